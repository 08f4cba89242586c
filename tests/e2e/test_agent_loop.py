"""Conversations of several turns through real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agent_loop.tool_loop import ToolLoop
from one_step_off.config.schema import Config
from one_step_off.data.word_problems import make
from one_step_off.models import tiny_qwen
from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Caller(ToolLoop):
    """Takes every turn for a call of `python`: a random model makes none by itself."""

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        super().__init__(cfg, tokenizer, taught=True)
        self.calls = lambda text: [("python", {"code": "print('x ' * 20)"})]


def test_tries_and_tool_calls_train_on_what_was_said_and_nothing_else(models, tmp_path):
    """Two loops in each batch. In the first step theta is mu: over all turns the trainer's log-probs must be the engine's."""
    from one_step_off.checkpoint import finished, read_samples
    from one_step_off.runtime import launch

    rows = make("train", 64, 0)
    for i, row in enumerate(rows):  # every second one with tools
        row["agent_loop"] = f"{__name__}:Caller" if i % 2 else ""
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cfg = tiny_config(
        models("qwen3"),
        str(tmp_path),
        **{
            "data.train_files": str(tmp_path / "data.jsonl"),
            "data.shuffle": False,
            "agent.tools": "python",
            "agent.tool_timeout_s": 60.0,
            "reward.function": "tests.e2e.test_pipeline:half_letters",
            "reward.workers": 2,
            "agent.loop": "retry_with_feedback",
            "agent.loop_kwargs": {"retry_with_feedback": {"passes_at": 2.0}},
            "agent.max_turns": 3,
            "agent.max_turn_tokens": 12,
            "agent.max_concurrency": 5,
            "rollout.sampling_kwargs": {
                "stop_token_ids": list(range(200))
            },  # a random model seldom stops by itself
            "data.max_response_length": 120,
            "trainer.save_freq": 2,
        },
    )
    assert launch.run(cfg) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        # Three turns, but for those of which one was cut at 12 tokens.
        assert (
            1.5 < row["agent/turns/mean"] <= 3.0
            and row["agent/tries/mean"] < row["agent/turns/mean"]
        )
        assert row["agent/tool_calls/mean"] > 0 and row["agent/tool_errors/mean"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["staleness/max"] == min(1, row["step"])
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["ratio/max"] == pytest.approx(1.0, abs=3e-4)
    samples, tokenizer = (
        read_samples(finished(tmp_path / "checkpoints")[0]),
        tiny_qwen.build_tokenizer(),
    )
    assert len(samples) == rows[-1]["samples"]
    for sample in samples:
        assert len(sample.response_ids) == len(sample.loss_mask) and sample.loss_mask[-1]
        assert (sample.versions[~sample.loss_mask] == -1).all() and (
            sample.versions[sample.loss_mask] >= 0
        ).all()
        assert not sample.log_probs[~sample.loss_mask].any() and sample.extra["agent"]["turns"] <= 3
        heard = tokenizer.decode(sample.response_ids[~sample.loss_mask])
        facts, words = sample.extra["agent"], {"tool_calls": "x " * 20, "tries": "That is wrong."}
        for name in words:
            assert heard.count(words[name]) == (name in facts) * (facts["turns"] - 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_learns_to_call_its_tool(tmp_path):
    """Products that only the calculator knows: both the rate of calls and what is right held out must rise."""
    command = [sys.executable, "-m", "one_step_off.main_ppo", "config=config/tool_agent.yaml"]
    done = subprocess.run(
        [*command, f"trainer.output_dir={tmp_path}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    calls = [row["agent/used_tools/mean"] for row in rows]
    assert sum(calls[:5]) / 5 < 0.4 and sum(calls[-5:]) / 5 > 0.8
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["val/first"] < 0.2 and summary["val/last"] > 0.8
