"""The Megatron back end with real Ray, gloo and vLLM: its shards into the engine, and a whole run as FSDP makes it."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.conftest import tiny_config
from tests.test_e2e_sync import sync_and_compare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]

TP, PP = {"actor.tensor_parallel_size": 2}, {"actor.pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("kind", "tied", "layout"), [("qwen2", True, TP), ("qwen2", True, PP), ("qwen3", False, TP), ("llama", False, PP)]
)
def test_engine_equals_hf_after_sync(models, tmp_path, kind, tied, layout):
    other, mine = models(kind, tied=tied, seed=1), models(kind, tied=tied, seed=2)
    pools = {"rollout": [1], "actor": [2]}
    sync_and_compare(other, mine, tmp_path, {"placement.pools": pools, "actor.backend": "megatron", **layout})


def test_the_first_steps_are_those_of_fsdp(models, tmp_path):
    """The same seed on both back ends: the rewards of the first five steps, too few to learn much in, and then a resumed
    run on two stages."""
    from one_step_off import launch

    found = {}
    for name, changes in (
        ("fsdp", {}),
        ("megatron", {"actor.backend": "megatron", **TP, "placement.pools": {"rollout": [1], "actor": [2]}}),
        ("resumed", {"actor.backend": "megatron", **PP, "placement.pools": {"rollout": [1], "actor": [2]}}),
    ):
        folder = tmp_path / ("megatron" if name == "resumed" else name)
        settings = {
            "rollout.n": 16,
            "actor.lr": 2e-4,
            "data.train_batch_size": 8,
            "actor.ppo_mini_batch_size": 8,
            "data.max_response_length": 24,
            "trainer.total_steps": 7 if name == "resumed" else 5,
            "trainer.save_freq": 5,
            "trainer.val_before_train": False,
            "reward.function": "tests.test_e2e_pipeline:half_letters",
            "trainer.val_after_train": False,
            "data.val_files": "",
        }
        cfg = tiny_config(models("qwen2"), str(folder), **settings | changes)
        assert launch.run(cfg) == 0
        found[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    fsdp, megatron = ([row["reward/mean"] for row in found[name]] for name in ("fsdp", "megatron"))
    assert len(fsdp) == 5 and fsdp == pytest.approx(megatron, abs=1e-3)
    for name in ("actor/grad_norm", "actor/loss", "actor/entropy"):
        assert found["fsdp"][0][name] == pytest.approx(found["megatron"][0][name], rel=1e-3, abs=1e-6), name
    assert len(set(fsdp)) > 1
    assert len(found["resumed"]) == 7, "the resumed run went on where the other had stopped"
    for row in found["resumed"]:
        assert row["canary/logprob_diff_max"] < 1e-4 and row["actor/grad_norm"] > 0
