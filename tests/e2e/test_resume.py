"""A run that is stopped and resumed equals one that was not: same prompts, same rewards, same
weights, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import tiny_config
from tests.e2e.test_pipeline import (
    IN_PARTS,
    VARIED,
    assert_all_gone,
    family_of,
    rows,
    start_run,
    wait_for_steps,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TIMES = (
    "time/", "sync/", "val/seconds", "actor/forward_s", "actor/backward_s", "actor/optimizer_s",
    "tokens_per_s/", "flops_per_s/", "mfu/", "memory/", "checkpoint/", "actor/sync_wait_s", "restarts/",
)  # fmt: skip


def learnt(folder: Path) -> list[dict]:
    """The rows without what a clock says. It also says which row repeats an evaluation, that of the
    step that ended next: what was found in them follows at the end."""
    names = [name for name in ("metrics.jsonl", "evaluations.jsonl") if (folder / name).exists()]
    left_out = {"metrics.jsonl": (*TIMES, "val/"), "evaluations.jsonl": TIMES}
    found = ((row.items(), left_out[name]) for name in names for row in rows(folder, name))
    return [
        {k: v for k, v in row if not k.startswith(without) and not k.endswith("_s")}
        for row, without in found
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "hf_model" / "model.safetensors")


def assert_greedy_baselines(folder: Path) -> None:
    """ReMax: each prompt's samples have the reward of its greedy response as baseline, which is in
    no other figure."""
    for step, row in enumerate(rows(folder, "metrics.jsonl")):
        assert row["samples"] == 16
        assert row["staleness/max"] == min(step, 1)
        samples = rows(folder, f"samples/step_{step:06d}.jsonl")
        assert [s["index"] for s in samples] == [0, 1, 2, 3] * 4
        baselines = {tuple(s["prompt_id"]): s["baseline"] for s in samples}
        assert len(baselines) == 4
        assert len(rows(folder, "ledger.jsonl")[step]["prompts"]) == 4
        for s in samples:
            assert s["baseline"] == baselines[tuple(s["prompt_id"])]
            assert s["reward"] == pytest.approx(sum(s["reward_parts"].values()))
            assert s["advantage/mean"] == pytest.approx(s["reward"] - s["baseline"], abs=1e-5)
        assert row["reward/even/mean"] + row["reward/short/mean"] == pytest.approx(
            row["reward/mean"]
        )
    saved = [
        json.loads(x)
        for x in (folder / "checkpoints/step_000006/samples.jsonl").read_text().splitlines()
    ]
    assert [s["index"] for s in saved if s["extra"].get("greedy")] == [4] * 4, (
        "a checkpoint keeps them"
    )


@pytest.mark.slow  # test_e2e_roles.py has another one, with a critic
def test_six_and_six_steps_equal_twelve(models, tmp_path):
    """The first half ends by a failure after its checkpoint of step 6, in the middle of step 8. By
    an estimator that has more in flight than samples: ReMax, with rewards in parts."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    def cfg(folder: str):
        return tiny_config(
            models(),
            str(tmp_path / folder),
            **VARIED
            | {
                "algorithm.adv_estimator": "remax",
                "reward.function": IN_PARTS,
                "trainer.total_steps": 12,
                "trainer.save_freq": 6,
                "trainer.test_freq": 4,
                "actor.lr_schedule": "cosine",
            },
        )

    assert launch.run(cfg("whole")) == 0
    real = ray_trainer.Pipeline._train

    async def failing(self, batch):
        if batch.step == 8:
            raise RuntimeError("pulled the plug")
        return await real(self, batch)

    ray_trainer.Pipeline._train = failing
    try:
        with pytest.raises(RuntimeError, match="pulled the plug"):
            launch.run(cfg("halves"))
    finally:
        ray_trainer.Pipeline._train = real
    assert len(rows(tmp_path / "halves", "metrics.jsonl")) == 8
    assert launch.run(cfg("halves")) == 0
    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    assert rows(whole, "ledger.jsonl") == rows(halves, "ledger.jsonl")
    assert learnt(whole) == learnt(halves)
    assert_greedy_baselines(whole)
    one = weights(whole)
    two = weights(halves)
    assert set(one) == set(two)
    assert all(torch.equal(one[n], two[n]) for n in one)
    summary = json.loads((halves / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["val/versions"] == [0, 4, 8, 12]


def test_ctrl_c_saves_and_the_same_command_goes_on(models, tmp_path):
    """Ctrl-C as a terminal sends it: to every process of the group. Then the same command, to the
    end."""
    run = start_run(models, tmp_path)
    wait_for_steps(tmp_path, 2, run)
    family = family_of(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "checkpoint of step" in said
    assert "the same command resumes from" in said
    assert "Traceback" not in said
    assert_all_gone(family)
    done = len(rows(tmp_path, "metrics.jsonl"))
    run = start_run(models, tmp_path, **{"trainer.total_steps": done + 2})
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 0, said
    assert "it is replaced" not in said
    assert f"resuming from step {done} of {done + 2}" in said
    ledger = rows(tmp_path, "ledger.jsonl")
    prompts = [tuple(p) for r in ledger for p in r["prompts"]]
    assert [r["step"] for r in ledger] == list(range(done + 2))
    assert len(prompts) == len(set(prompts))
