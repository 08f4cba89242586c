"""A run whose prompts are long: each is computed once for its samples, and the run is the one that
computes it for each of them."""

from __future__ import annotations

import json

import pytest

from tests.conftest import tiny_config
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

COMPARED = ("reward/mean", "actor/loss", "actor/entropy", "actor/grad_norm", "actor/tokens_total")


def test_a_run_with_long_prompts_is_the_same_and_computes_less(models, tmp_path):
    from one_step_off.runtime import launch

    data = tmp_path / "long.jsonl"
    questions = [f"{'Count the words of this text. ' * 14}{i} + {i} = ?" for i in range(8)]
    rows = [{"question": text, "answer": f"#### {2 * i}"} for i, text in enumerate(questions)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, packing: str) -> list[dict]:
        keys = {
            "data.train_files": str(data),
            "data.val_files": "",
            "data.train_batch_size": 2,
            "data.max_prompt_length": 512,
            "data.max_response_length": 8,
            "rollout.n": 16,
            "actor.packing": packing,
            "actor.ppo_mini_batch_size": 2,
            "actor.lr": 1e-6,
            "trainer.total_steps": 2,
        }
        assert launch.run(tiny_config(models(), str(tmp_path / name), **keys)) == 0
        return read_rows(tmp_path / name, "metrics.jsonl")

    shared = run("shared", "auto")
    plain = run("plain", "off")
    ledgers = [read_rows(tmp_path / name, "ledger.jsonl") for name in ("shared", "plain")]
    assert ledgers[0] == ledgers[1]
    assert all(row["actor/shared_prefix_share"] > 0.8 for row in shared)
    for ours, theirs in zip(shared, plain, strict=True):
        assert "actor/shared_prefix_share" not in theirs
        for name in COMPARED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
