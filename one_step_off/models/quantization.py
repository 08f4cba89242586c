"""Whether a checkpoint holds quantized weights. Trainers load none; an engine that only scores may
serve them."""

from pathlib import Path
from typing import Any

WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def quantization_method(model_config: Any) -> str | None:
    """How a checkpoint's weights are quantized, as its config names it; None: they are not.

    `model_config`: the Hugging Face config.
    """
    quantization = getattr(model_config, "quantization_config", None)
    if not quantization:
        return None
    if isinstance(quantization, dict):
        return quantization.get("quant_method") or "quantization_config in config.json"
    return str(quantization)


def weight_file_bytes(folder: str) -> int:
    """The size of all weight files in a model directory."""
    files = [path for pattern in WEIGHT_PATTERNS for path in Path(folder).glob(pattern)]
    return sum(path.stat().st_size for path in files)
