"""Whether a checkpoint holds quantized weights. Trainers load none; an engine that only scores may
serve them."""

import json
from pathlib import Path
from typing import Any

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
MODELOPT_FILE = "hf_quant_config.json"
"""The settings of NVIDIA ModelOpt, where config.json has none. vLLM reads them, transformers does
not."""


def quantization_method(model: str, model_config: Any) -> str | None:
    """How a checkpoint's weights are quantized, as its files name it; None: they are not.

    As vLLM recognises it, which looks for ModelOpt's file where config.json has no settings.

    Args:
        model: a model directory or a hub id.
        model_config: its Hugging Face config.
    """
    quantization = getattr(model_config, "quantization_config", None)
    if quantization is None:
        return _modelopt_method(model)
    if not quantization:
        return None
    if isinstance(quantization, dict):
        return quantization.get("quant_method") or "quantization_config in config.json"
    return str(quantization)


def _modelopt_method(model: str) -> str | None:
    """The method in ModelOpt's file. None: there is no file, or it names none for the weights, as
    where only the KV cache is quantized."""
    from transformers.utils.hub import cached_file  # slow to import

    path = cached_file(
        model,
        MODELOPT_FILE,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    try:
        settings = json.loads(Path(path).read_text())
    except ValueError:  # not JSON
        return MODELOPT_FILE
    if not isinstance(settings, dict):
        return MODELOPT_FILE
    # {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", ...}}
    quantization = settings.get("quantization")
    if isinstance(quantization, dict):
        algorithm = quantization.get("quant_algo")
        return f"{algorithm} in {MODELOPT_FILE}" if algorithm else None
    return settings.get("quant_method")


def weight_file_bytes(folder: str) -> int:
    """The size of a model directory's weight files, in the first format that it has."""
    for pattern in WEIGHT_PATTERNS:
        sizes = [path.stat().st_size for path in Path(folder).glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0
