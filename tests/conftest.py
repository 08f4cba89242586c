"""Shared by all tests: tiny models, and the config of a small real run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from one_step_off.config.schema import Config

# On a busy machine one example may take any time. Speed has its own tests.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# One thread each: with a thread per core, several processes slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's stores look up the names of addresses for their logs. A name server that does not answer
# would delay each by 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

MIXTURE_OF_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LONG_FIRST = (
    "tests/e2e/",
    "tests/unit/weight_sync/",
    "tests/unit/training/",
    "tests/unit/checkpoint/",
    "tests/unit/engines/",
    "tests/unit/config/",
    "tests/unit/endpoint/",
)
"""Folders with files that take minutes. One that begins late has a worker alone at the end."""
TINY_RUN = {
    "model.dtype": "float32",
    "data.train_files": "generator:word_problems",
    "data.val_files": "generator:word_problems",
    "data.val_size": 8,
    "data.train_batch_size": 4,
    "data.max_prompt_length": 128,
    "data.max_response_length": 16,
    "data.generator_size": 64,
    "placement.device": "cpu",
    "rollout.n": 4,
    "rollout.kv_cache_mb": 64,
    "actor.ppo_mini_batch_size": 4,
    "actor.lr": 1e-3,
    "weight_sync.bucket_mb": 1,
    "weight_sync.overlap": "true",  # the harder setting: a failed sync meets an update
    "weight_sync.timeout_s": 60.0,
    "trainer.total_steps": 3,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders of LONG_FIRST before all others."""

    def place(item: pytest.Item) -> int:
        for place, folder in enumerate(LONG_FIRST):
            if item.nodeid.startswith(folder):
                return place
        return len(LONG_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """models(kind, tied, seed): the path of a random tiny model.

    It has two KV heads, so that tensor parallelism of two splits them. Each model is built once.
    """
    from one_step_off.models import tiny_qwen

    root = tmp_path_factory.mktemp("models")
    paths: dict[tuple[str, bool, int], str] = {}

    def build_once(kind: str = "qwen2", tied: bool = True, seed: int = 0) -> str:
        key = (kind, tied, seed)
        if key in paths:
            return paths[key]
        embeddings = "tied" if tied else "untied"
        experts = MIXTURE_OF_EXPERTS if kind == "qwen3_moe" else {}
        paths[key] = tiny_qwen.build(
            kind,
            str(root / f"{kind}-{embeddings}-{seed}"),
            seed=seed,
            tie_word_embeddings=tied,
            hidden_size=256,  # vLLM computes the head size of a Qwen2 as hidden_size / heads
            num_attention_heads=4,
            num_key_value_heads=2,
            **experts,
        )
        return paths[key]

    return build_once


def tiny_config(model: str, output_dir: str, **changes: object) -> Config:
    """The config of three small steps on CPU.

    Args:
        model: the path of the model.
        output_dir: the run folder.
        changes: values by dotted key.
    """
    from one_step_off.config.schema import Config

    settings: dict[str, object] = {
        **TINY_RUN,
        "model.path": model,
        "trainer.output_dir": output_dir,
    }
    settings.update(changes)
    cfg = Config()
    for key, value in settings.items():
        section_name, name = key.split(".")
        section = getattr(cfg, section_name)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return cfg
