"""Conversations of several turns through real Ray, FSDP2 and gloo on a tiny random model, with each
engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_loop.tool_loop import ToolLoop
from one_step_off.config.schema import Config
from one_step_off.data.samples import TIME_PARTS, Sample
from one_step_off.data.word_problems import make
from one_step_off.models import tiny_qwen
from tests.conftest import tiny_config
from tests.e2e.commands import run_to_the_end
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import read_rows, read_summary

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOOL_OUTPUT = "x " * 20
REJECTION = "That is wrong."


class AlwaysCallsPython(ToolLoop):
    """Treats every turn as a call of `python`: a random model makes none by itself."""

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        super().__init__(cfg, tokenizer, taught=True)
        self.parse_calls = lambda text: [("python", {"code": "print('x ' * 20)"})]


def write_rows_of_two_loops(path: Path) -> None:
    """Write word problems. Every second one names the loop that calls a tool."""
    rows = make("train", 64, 0)
    for index, row in enumerate(rows):
        row["agent_loop"] = ""
        if index % 2 == 1:
            row["agent_loop"] = f"{__name__}:{AlwaysCallsPython.__name__}"
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines))


def config_of_two_loops(model: str, folder: Path, engine: str, replicas: int) -> Config:
    """A run in which half of the prompts retry with feedback and the others call a tool."""
    data_file = folder / "data.jsonl"
    write_rows_of_two_loops(data_file)
    settings = {
        "rollout.engine": engine,
        "placement.pools": {"rollout": [replicas], "actor": [1]},
        "data.train_files": str(data_file),
        "data.shuffle": False,
        "agent.tools": "python",
        "agent.tool_timeout_s": 60.0,
        "reward.function": LETTER_SHARE,
        "reward.workers": 2,
        "agent.loop": "retry_with_feedback",
        "agent.loop_kwargs": {"retry_with_feedback": {"passes_at": 2.0}},
        "agent.max_turns": 3,
        "agent.max_turn_tokens": 12,
        "agent.max_concurrency": 5,
        # A random model seldom stops by itself.
        "rollout.sampling_kwargs": {"stop_token_ids": list(range(200))},
        "data.max_response_length": 120,
        "trainer.save_freq": 2,
    }
    return tiny_config(model, str(folder), **settings)


def assert_metrics_of_two_loops(rows: list[dict[str, Any]]) -> None:
    """Both loops took part in each step, and each step trained."""
    assert len(rows) == 3
    assert all(0 < row["rollout/open_requests"] <= 10 for row in rows[1:])
    for row in rows:
        # Three turns, except where a turn was cut at 12 tokens.
        assert 1.5 < row["agent/turns/mean"] <= 3.0
        assert row["agent/tries/mean"] < row["agent/turns/mean"]
        assert row["agent/tool_calls/mean"] > 0
        assert row["agent/tool_errors/mean"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["staleness/max"] == min(1, row["step"])
        assert row["canary/logprob_diff_max"] < 1e-4
        # Of five at once the others wait; a Python process is a tool; the reward has its workers.
        assert all(row[f"samples/{part}_s"] > 0 for part in TIME_PARTS)


def assert_only_generated_tokens_train(sample: Sample) -> None:
    """The mask, the versions and the log-probs agree on which tokens the engine generated."""
    generated = sample.loss_mask
    observed = ~generated
    assert len(sample.response_ids) == len(generated)
    assert generated[-1]
    assert (sample.versions[observed] == -1).all()
    assert (sample.versions[generated] >= 0).all()
    assert not sample.log_probs[observed].any()


def assert_observations(sample: Sample, tokenizer: Any) -> None:
    """After each turn except the last, the sample observes what its own loop answers."""
    observed_text = tokenizer.decode(sample.response_ids[~sample.loss_mask])
    facts = sample.extra["agent"]
    assert facts["turns"] <= 3
    for fact, observation in (("tool_calls", TOOL_OUTPUT), ("tries", REJECTION)):
        expected_count = 0
        if fact in facts:
            expected_count = facts["turns"] - 1
        assert observed_text.count(observation) == expected_count


@pytest.mark.parametrize(
    ("engine", "replicas"),
    [("transformers", 2), pytest.param("vllm", 1, marks=pytest.mark.slow)],
)
def test_retries_and_tool_calls_train_on_generated_tokens_alone(models, tmp_path, engine, replicas):
    """Two loops in each batch, with more samples than the agents' limit. In the first step theta is
    mu, so the trainer's log-probs must equal the engine's over all turns."""
    from one_step_off.checkpoint import finished, read_samples
    from one_step_off.runtime import launch

    assert launch.run(config_of_two_loops(models("qwen3"), tmp_path, engine, replicas)) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert_metrics_of_two_loops(rows)
    assert rows[0]["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert rows[0]["ratio/max"] == pytest.approx(1.0, abs=3e-4)
    samples = read_samples(finished(tmp_path / "checkpoints")[0])
    assert len(samples) == rows[-1]["samples"]
    tokenizer = tiny_qwen.build_tokenizer()
    for sample in samples:
        assert_only_generated_tokens_train(sample)
        assert_observations(sample, tokenizer)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_learns_to_call_its_tool(tmp_path):
    """Products that only the calculator knows. Both must rise: the rate of calls, and the held-out
    reward."""
    run_to_the_end("config=config/tool_agent.yaml", f"trainer.output_dir={tmp_path}")
    rows = read_rows(tmp_path, "metrics.jsonl")
    calls = [row["agent/used_tools/mean"] for row in rows]
    assert sum(calls[:5]) / 5 < 0.4
    assert sum(calls[-5:]) / 5 > 0.8
    summary = read_summary(tmp_path)
    assert summary["val/first"] < 0.2
    assert summary["val/last"] > 0.8
