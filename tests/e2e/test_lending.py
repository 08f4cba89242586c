"""The trainer's cores generate while the trainer waits, with real engines, trainers and gloo."""

from __future__ import annotations

import pytest

from one_step_off.config.schema import Config
from tests.conftest import tiny_config
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(600)]

STEPS = 5


def test_lent_replicas_generate_and_the_run_is_as_without_lending(models, tmp_path, capsys) -> None:
    """The engine takes few samples at once, so that prompts wait. Its samples are longer than the
    trainer's step. Each wake-up has passed its canary, or the lent replica would be given up."""
    from one_step_off.runtime import launch

    settings = {
        "placement.lend": True,
        "agent.max_concurrency": 2,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "data.max_response_length": 128,
        "data.val_files": "",
        "trainer.total_steps": STEPS,
        "reward.function": LETTER_SHARE,
    }
    model = models("qwen2", True)
    cfg = tiny_config(model, str(tmp_path / "lent"), **settings)
    expected = prompts_of_an_undisturbed_run(cfg)
    assert launch.run(cfg) == 0
    metrics = read_rows(tmp_path / "lent", "metrics.jsonl")
    assert len(metrics) == STEPS
    assert sum(row["lend/samples"] for row in metrics) > 0
    for step, row in enumerate(metrics):
        assert row["staleness/min"] == row["staleness/max"] == min(step, 1)
        assert row["canary/logprob_diff_max"] < 1e-3
        assert row["rollout/replicas"] == 1
        assert (row["lend/samples"] > 0) <= (row["lend/wake_s"] > 0)
    ledger = [row["prompts"] for row in read_rows(tmp_path / "lent", "ledger.jsonl")]
    assert ledger == expected
    assert "is given up" not in capsys.readouterr().out


def prompts_of_an_undisturbed_run(cfg: Config) -> list[list]:
    from one_step_off.runtime.launch import prepare

    stream = prepare(cfg, lambda line: None).data.stream
    return [[list(prompt.id) for prompt in stream.next_batch()] for _ in range(STEPS)]
