"""Reading blocks of a checkpoint for Megatron's shards."""

import dataclasses

import pytest
import safetensors.torch
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra megatron)")

from one_step_off.config.errors import ConfigError
from one_step_off.training.megatron.megatron_weights import CheckpointReader
from one_step_off.weight_sync.weight_piece import WeightPiece


def test_weights_of_another_shape_are_refused(tmp_path):
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 3)}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    reader = CheckpointReader("critic.path", str(tmp_path))
    piece = WeightPiece("a", "float32", (4, 2), 1, 3)
    assert reader.read(piece).shape == (2, 2)
    words = r"critic.path: b of .* is \(4, 3\), but its config.json says \(4, 2\)"
    with pytest.raises(ConfigError, match=words):
        reader.read(dataclasses.replace(piece, name="b"))
    with pytest.raises(ConfigError, match="critic.path: the checkpoint .* lacks the weight c"):
        reader.read(dataclasses.replace(piece, name="c"))
