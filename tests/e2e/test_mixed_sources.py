"""Two sources with loops, rewards and limits of their own, a difficulty filter and a curriculum,
through real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from one_step_off.runtime import launch
from tests.conftest import tiny_config
from tests.e2e.commands import assert_all_ended, descendants, start_run, wait_for_steps
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows, used_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SHORT = 6  # tokens of a response of the second source
SOURCES = [
    {
        "files": "generator:word_problems",
        "weight": 3.0,
        "agent_loop": "retry_with_feedback",
        "reward": LETTER_SHARE,
        "max_turns": 2,
        "max_turn_tokens": SHORT,
    },
    {"files": "generator:products", "weight": 1.0, "max_response_length": SHORT},
]
SETTINGS: dict[str, Any] = {
    "data.train_files": SOURCES,
    "data.generator_size": 8,
    "data.solved_at": 0.2,  # of the letters in a random model's response
    "data.difficulty_filter": {"visits": 1, "max_dropped": 0.5, "return_after": 2},
    "data.curriculum": {"target": 0.5},
    "data.val_files": "",
    "agent.loop_kwargs": {"retry_with_feedback": {"passes_at": 2.0}},
    "data.max_response_length": 40,
}


@pytest.mark.slow  # tests/unit/ray_trainer/test_mixed_sources.py has it without processes
def test_each_source_has_its_loop_reward_and_limits(models, tmp_path):
    settings = SETTINGS | {"trainer.total_steps": 5, "trainer.save_freq": 4}
    assert launch.run(tiny_config(models(), str(tmp_path), **settings)) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    prompts = used_prompts(tmp_path)
    assert len(prompts) == 20
    assert sum(row >= 8 for _, row in prompts) == 5, "one prompt in four"
    for row in rows:
        assert row["source/word_problems/prompts"] == 3
        assert row["source/products/prompts"] == 1
        assert row["source/products/reward/mean"] == row["source/products/solve_rate"] == 0
        assert row["source/products/response_length/mean"] <= SHORT
    assert any(row["source/word_problems/reward/mean"] > 0 for row in rows)
    assert [row["source/products/epoch"] for row in rows][:2] == [1 / 8, 2 / 8]
    for sample in read_rows(tmp_path, "samples/step_000001.jsonl"):
        has_turns = "turns" in sample.get("agent", {})
        assert has_turns == (sample["prompt_id"][1] < 8), "only the first source has several"
    ledger = read_rows(tmp_path, "ledger.jsonl")
    filtered = [note for row in ledger for note in row.get("filtered", ())]
    assert {note["solved"] for note in filtered} >= {"never"}
    assert rows[-1]["difficulty/dropped"] >= 1
    last = sorted((tmp_path / "checkpoints").glob("step_*"))[-1]
    with np.load(last / "stream.npz") as arrays:
        assert arrays["visits"].sum() >= 12
        assert len(arrays["visits"]) == 16


@pytest.mark.slow  # three starts
def test_a_killed_run_draws_the_same_prompts_again(models, tmp_path):
    """Killed without a chance to save, the same command resumes from its checkpoint; list and
    mappings are arguments of the command line."""
    settings = {name: json.dumps(value) for name, value in SETTINGS.items()}
    settings |= {"trainer.total_steps": 12, "trainer.save_freq": 3, "data.train_batch_size": 4}
    settings |= {"rollout.n": 4, "actor.ppo_mini_batch_size": 4, "data.val_files": ""}
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    run = start_run(models, whole, **settings)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    run = start_run(models, killed, **settings)
    wait_for_steps(killed, 5, run)
    processes = descendants(run.pid)
    run.kill()
    run.communicate(timeout=60)
    assert_all_ended(processes)
    assert len(read_rows(killed, "metrics.jsonl")) < 12
    run = start_run(models, killed, **settings)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert "resuming from step" in output
    assert read_rows(whole, "ledger.jsonl") == read_rows(killed, "ledger.jsonl")
    assert learned_metrics(whole) == learned_metrics(killed)
    assert_same_weights(whole, killed)
