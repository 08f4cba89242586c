"""What the weight-sync benchmark sends: models by their shapes, from how many ranks to how many
engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.common.models import QWEN25_05B
from one_step_off.config.schema import Config

ARM_NAMES = (
    "raw", "per-tensor", "whole", "sharded", "delta", "shared", "file", "vllm", "vllm, NCCL",
)  # fmt: skip
"""In the order of the classes in `arms.ARMS`, which are slow to import."""


@dataclass(frozen=True)
class ModelShape:
    """A model with random weights. `keys`: of its config.json."""

    keys: dict[str, Any]
    description: str


# 7b and 32b have the layers of Qwen2.5, but fewer of them and a smaller vocabulary.
SHAPES = {
    "tiny": ModelShape({}, "the tiny model"),
    "0.5b": ModelShape(QWEN25_05B, "the shape of Qwen2.5-0.5B"),
    "7b": ModelShape(
        {
            "hidden_size": 3584,
            "num_hidden_layers": 2,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 18944,
            "vocab_size": 16384,
            "tie_word_embeddings": False,
        },
        "layers of Qwen2.5-7B, 2 of 28, vocabulary of 16,384 instead of 152,064",
    ),
    "32b": ModelShape(
        {
            "hidden_size": 5120,
            "num_hidden_layers": 1,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 27648,
            "vocab_size": 16384,
            "tie_word_embeddings": False,
        },
        "a layer of Qwen2.5-32B, 1 of 64, vocabulary of 16,384 instead of 152,064",
    ),
}


@dataclass(frozen=True)
class Layout:
    """What is sent, from how many trainer ranks to how many engines. The names are those of the
    flags.
    """

    model: str = "tiny"
    ranks: int = 1
    replicas: int = 1
    tp: int = 1
    bucket_mb: int = 64
    device: str = "cpu"


def make_config(layout: Layout, folder: str) -> Config:
    """A config whose trainer and engines hold the model. `folder`: where the model is built."""
    cfg = Config()
    shape = SHAPES[layout.model]
    from one_step_off.models import tiny_qwen  # slow to import

    cfg.model.path = tiny_qwen.build("qwen2", folder, dtype="bfloat16", **shape.keys)
    cfg.model.dtype = "bfloat16"
    cfg.data.train_files = "generator:word_problems"
    cfg.data.max_prompt_length = 128
    cfg.data.max_response_length = 32
    cfg.placement.device = layout.device
    cfg.placement.pools = {"rollout": [layout.replicas * layout.tp], "actor": [layout.ranks]}
    cfg.rollout.tensor_parallel_size = layout.tp
    cfg.rollout.kv_cache_mb = 64
    cfg.weight_sync.bucket_mb = layout.bucket_mb
    cfg.trainer.total_steps = 1
    return cfg
