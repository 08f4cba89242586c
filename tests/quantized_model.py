"""A small quantized checkpoint that vLLM's CPU build can serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
LARGEST = 127
SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": SCHEME | {"strategy": "channel", "dynamic": False},
            "input_activations": SCHEME | {"strategy": "token", "dynamic": True},
        }
    },
}
"""W8A8: linear layers in int8 with a scale per output, activations in int8 as they come."""


def quantized_copy(model: str, folder: Path) -> str:
    """A copy of a model directory in `folder` with int8 weights; returns its path."""
    copy = Path(shutil.copytree(model, folder / "quantized"))
    tensors = {}
    for name, weight in load_file(copy / WEIGHTS).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
        tensors[name] = (weight.float() / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, copy / WEIGHTS, {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)
