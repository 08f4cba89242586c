"""Conversations of several turns through real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.tool_loop import ToolLoop
from one_step_off.config.schema import Config
from one_step_off.data.samples import Sample
from one_step_off.data.word_problems import make
from one_step_off.models import tiny_qwen
from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Caller(ToolLoop):
    """Takes every turn for a call of `python`: a random model makes none by itself."""

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        super().__init__(cfg, tokenizer, taught=True)
        self.calls = lambda text: [("python", {"code": "print('x ' * 20)"})]


def two_loops_config(model: str, folder: Path) -> Config:
    """A run in which every second row uses tools, and the others try again."""
    rows = make("train", 64, 0)
    for i, row in enumerate(rows):
        row["agent_loop"] = f"{__name__}:Caller" if i % 2 else ""
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    changes = {
        "data.train_files": str(folder / "data.jsonl"),
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
        # A random model seldom ends a turn by itself.
        "rollout.sampling_kwargs": {"stop_token_ids": list(range(200))},
        "data.max_response_length": 120,
        "trainer.save_freq": 2,
    }
    return tiny_config(model, str(folder), **changes)


def assert_turns_are_counted(rows: list[dict]) -> None:
    assert len(rows) == 3
    for row in rows:
        # Three turns, but for those of which one was cut at 12 tokens.
        assert 1.5 < row["agent/turns/mean"] <= 3.0
        assert row["agent/tries/mean"] < row["agent/turns/mean"]
        assert row["agent/tool_calls/mean"] > 0
        assert row["agent/tool_errors/mean"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["staleness/max"] == min(1, row["step"])
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["ratio/max"] == pytest.approx(1.0, abs=3e-4)


def assert_only_generated_tokens_are_trained(sample: Sample, tokenizer: Any) -> None:
    """What the tool or the loop added has no version and no log-prob, and is not trained."""
    observed = ~sample.loss_mask
    assert len(sample.response_ids) == len(sample.loss_mask)
    assert sample.loss_mask[-1]
    assert (sample.versions[observed] == -1).all()
    assert (sample.versions[sample.loss_mask] >= 0).all()
    assert not sample.log_probs[observed].any()
    counts = sample.extra["agent"]
    assert counts["turns"] <= 3
    text = tokenizer.decode(sample.response_ids[observed])
    words = {"tool_calls": "x " * 20, "tries": "That is wrong."}
    for name, expected in words.items():
        times = counts["turns"] - 1 if name in counts else 0
        assert text.count(expected) == times


def test_tries_and_tool_calls_train_on_what_was_generated_and_nothing_else(models, tmp_path):
    """Two loops in each batch. In the first step theta is mu: over all turns the trainer's
    log-probs must be the engine's."""
    from one_step_off.checkpoint import finished, read_samples
    from one_step_off.runtime import launch

    assert launch.run(two_loops_config(models("qwen3"), tmp_path)) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert_turns_are_counted(rows)
    samples = read_samples(finished(tmp_path / "checkpoints")[0])
    assert len(samples) == rows[-1]["samples"]
    tokenizer = tiny_qwen.build_tokenizer()
    for sample in samples:
        assert_only_generated_tokens_are_trained(sample, tokenizer)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_learns_to_call_its_tool(tmp_path):
    """Products that only the calculator knows: both the rate of calls and what is right held out
    must rise."""
    command = [sys.executable, "-m", "one_step_off.main_ppo", "config=config/tool_agent.yaml"]
    done = subprocess.run(
        [*command, f"trainer.output_dir={tmp_path}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    calls = [row["agent/used_tools/mean"] for row in rows]
    assert sum(calls[:5]) / 5 < 0.4
    assert sum(calls[-5:]) / 5 > 0.8
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["val/first"] < 0.2
    assert summary["val/last"] > 0.8
