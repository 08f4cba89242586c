"""The Megatron back end with real Ray, gloo and vLLM: its shards into the engine, and a whole run
as FSDP makes it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.e2e.test_sync import sync_and_compare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]

TP, PP, EP = ({f"actor.{kind}_parallel_size": 2} for kind in ("tensor", "pipeline", "expert"))
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "tied", "layout"),
    [
        pytest.param("qwen2", True, TP, id="qwen2-tp"),
        pytest.param("llama", False, PP, id="llama-pp", marks=SLOW),
        pytest.param("qwen2", True, PP, id="qwen2-pp", marks=SLOW),
        pytest.param("qwen3", False, TP, id="qwen3-tp", marks=SLOW),
        pytest.param("qwen3_moe", False, EP, id="moe-ep", marks=SLOW),
    ],
)
def test_engine_equals_hf_after_sync(models, tmp_path, kind, tied, layout):
    other = models(kind, tied=tied, seed=1)
    mine = models(kind, tied=tied, seed=2)
    pools = {"rollout": [1], "actor": [2]}
    sync_and_compare(
        other, mine, tmp_path, {"placement.pools": pools, "actor.backend": "megatron", **layout}
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_learns_as_fsdp_does_and_goes_on_in_another_layout(tmp_path):
    """The tiny run with one seed on both back ends, and then the checkpoint of two shards on two
    stages."""
    found = {}
    pools = "placement.pools={rollout: [1], actor: [2]}"
    megatron = ["actor.backend=megatron", pools]
    for name, steps, changes in (
        ("fsdp", 20, []),
        ("megatron", 20, [*megatron, "actor.tensor_parallel_size=2"]),
        ("megatron", 22, [*megatron, "actor.pipeline_parallel_size=2"]),
    ):
        folder = tmp_path / name
        settings = [
            "config=config/gsm8k_tiny_cpu.yaml",
            "model.path=tiny:qwen3",
            f"trainer.output_dir={folder}",
        ]
        settings += [f"trainer.total_steps={steps}", "trainer.save_freq=20", *changes]
        done = subprocess.run(
            [sys.executable, "-m", "one_step_off.main_ppo", *settings],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[name, steps] = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
    fsdp, megatron, resumed = found.values()
    rewards, same = ([row["reward/mean"] for row in rows] for rows in (megatron, fsdp))
    assert len(rewards) == len(same) == 20
    assert rewards[:5] == pytest.approx(same[:5], abs=1e-3)
    assert len(set(same[:5])) > 1
    # What rounding does to the rest is chance: a sample that falls on the other side of a random
    # number.
    assert rewards == pytest.approx(same, abs=0.1)
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    for folder in ("fsdp", "megatron"):
        first, *_, last = (
            json.loads(line)
            for line in (tmp_path / folder / "evaluations.jsonl").read_text().splitlines()
        )
        assert last["val/reward"] > first["val/reward"] + 0.5
    for name in ("actor/grad_norm", "actor/loss", "actor/entropy"):
        assert fsdp[0][name] == pytest.approx(megatron[0][name], rel=1e-3, abs=1e-6), name
    assert len(resumed) == 22, "the run of two stages went on where that of two shards had stopped"
    for row in resumed[20:]:
        assert row["canary/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["reward/mean"] > np.mean(rewards[:5]) + 0.2
