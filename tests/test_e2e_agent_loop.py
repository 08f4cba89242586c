"""Conversations of several turns through real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import json

import pytest

from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_three_tries_train_on_what_was_said_and_nothing_else(models, tmp_path):
    """In the first step theta is mu: over all turns the trainer's log-probs must be the engine's."""
    from one_step_off import launch
    from one_step_off.checkpoint import finished, read_samples

    cfg = tiny_config(
        models("qwen3"),
        str(tmp_path),
        **{
            "reward.function": "tests.test_e2e_pipeline:half_letters",
            "reward.workers": 2,
            "agent.loop": "retry_with_feedback",
            "agent.loop_kwargs": {"retry_with_feedback": {"passes_at": 2.0}},
            "agent.max_turns": 3,
            "agent.max_turn_tokens": 12,
            "agent.max_concurrency": 5,
            "rollout.sampling_kwargs": {"stop_token_ids": list(range(200))},  # a random model seldom stops by itself
            "data.max_response_length": 120,
            "trainer.save_freq": 2,
        },
    )
    assert launch.run(cfg) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        # Three tries, but for those of which one was cut at 12 tokens.
        assert 1.5 < row["agent/turns/mean"] <= 3.0 and row["agent/tries/mean"] == row["agent/turns/mean"]
        assert row["actor/grad_norm"] > 0
        assert row["staleness/max"] == min(1, row["step"])
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["ratio/max"] == pytest.approx(1.0, abs=3e-4)
    samples = read_samples(finished(tmp_path / "checkpoints")[0])
    assert len(samples) == rows[-1]["samples"]
    for sample in samples:
        assert len(sample.response_ids) == len(sample.loss_mask) and sample.loss_mask[-1]
        assert (sample.versions[~sample.loss_mask] == -1).all() and (sample.versions[sample.loss_mask] >= 0).all()
        assert not sample.log_probs[~sample.loss_mask].any() and sample.extra["agent"]["turns"] <= 3
        if sample.extra["agent"]["turns"] > 1:
            assert (~sample.loss_mask).sum() > 5
