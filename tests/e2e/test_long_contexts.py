"""Sequence parallelism through the whole program: actor, critic and reference divide each sequence
over two ranks, and a run's figures are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import tiny_config
from tests.e2e.run_folder import read_rows, used_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
TOLERANCE = 1e-4  # of sums in another order, which each update carries on
CANARY_TOLERANCE = 1e-5
COMPARED = ("actor/", "critic/", "ratio/", "reward/", "response_length/", "logprob_diff/")


def figures(row: dict[str, Any]) -> dict[str, float]:
    """Those of the trainer and of the samples, without clocks and what is not known."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith(COMPARED) and not name.endswith("_s") and value is not None
    }


def test_a_run_with_divided_sequences_has_the_figures_of_one_rank(tmp_path, models):
    from one_step_off.runtime import launch

    rows = []
    for ranks in (1, 2):
        folder = tmp_path / f"of {ranks}"
        cfg = tiny_config(
            models(),
            str(folder),
            **{
                "placement.pools": {"rollout": [1], "actor": [ranks]},
                "placement.roles": {
                    "rollout": "rollout",
                    "actor": "actor",
                    "critic": "actor",
                    "ref": "actor",
                },
                "actor.sequence_parallel_size": ranks,
                "algorithm.adv_estimator": "gae",
                "algorithm.kl_coef": 0.1,
                "trainer.total_steps": STEPS,
            },
        )
        assert launch.run(cfg) == 0
        rows.append(read_rows(folder, "metrics.jsonl"))
    assert used_prompts(tmp_path / "of 1") == used_prompts(tmp_path / "of 2")
    whole, divided = rows
    assert len(divided) == len(whole) == STEPS
    for row, expected in zip(divided, whole, strict=True):
        assert figures(row) == pytest.approx(figures(expected), rel=TOLERANCE, abs=1e-5)
        assert row["actor/grad_norm"] > 0
        assert row["canary/logprob_diff_max"] < CANARY_TOLERANCE
