"""Shared parts of the tests: tiny models, configs for real runs, and a Ray cluster per module."""

from __future__ import annotations

import os

import hypothesis
import pytest

# A busy machine may take any time for one example; what must be fast has a test of its own.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# One thread each: on a small machine several processes with a thread per core only get in each
# other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch's stores look the names of addresses up, for their logs. A name server that does not answer
# would take 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(kind, tied, seed) -> path of a random tiny model with two KV heads (so that TP=2
    splits them)."""
    from one_step_off.models import tiny_qwen

    root = tmp_path_factory.mktemp("models")
    built = {}

    def get(kind: str = "qwen2", tied: bool = True, seed: int = 0) -> str:
        name = f"{kind}-{'tied' if tied else 'untied'}-{seed}"
        if name not in built:
            built[name] = tiny_qwen.build(
                kind,
                str(root / name),
                seed=seed,
                tie_word_embeddings=tied,
                hidden_size=256,  # vLLM takes the head size of a Qwen2 as hidden_size / heads
                num_attention_heads=4,
                num_key_value_heads=2,
                **(EXPERTS if kind == "qwen3_moe" else {}),
            )
        return built[name]

    return get


def tiny_config(model: str, output_dir: str, **changes: object):
    """A run of three small steps on CPU; `changes` are dotted keys."""
    from one_step_off.config.schema import Config

    cfg = Config()
    settings = {
        "model.path": model,
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
        "weight_sync.timeout_s": 60.0,
        "trainer.total_steps": 3,
        "trainer.output_dir": output_dir,
    }
    for key, value in {**settings, **changes}.items():
        section, name = key.split(".")
        assert hasattr(getattr(cfg, section), name), key
        setattr(getattr(cfg, section), name, value)
    return cfg
