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
    """The size of a model directory's weight files, in the first format that it has."""
    for pattern in WEIGHT_PATTERNS:
        sizes = [path.stat().st_size for path in Path(folder).glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0
