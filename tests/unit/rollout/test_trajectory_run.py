"""What a sample becomes: its reward, its parts, and the greedy response beside it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.base import AgentLoop, Generated, Trajectory
from one_step_off.checkpoint.files import read_samples, write_samples
from one_step_off.config.schema import Config
from one_step_off.data.samples import TIME_PARTS, Sample
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.trajectory_run import TrajectoryRun
from tests.unit.rollout.stand_ins import (
    UNSEEDED,
    FakeScorer,
    generate_two_tokens,
    make_prompt,
    plain_tokenizer,
    replica_of,
)
from tests.unit.stand_ins import tiny_tokenizer

PARTS = {"right": 1.0, "form": 0.5}


def sample_of(replica: RolloutReplica, **fields: Any) -> Sample:
    (sample,) = asyncio.run(replica._trajectory(make_prompt(**fields), 3, UNSEEDED))
    return sample


@pytest.mark.parametrize(
    ("response", "reward", "extra"),
    [
        ("late", 0.0, {"fault": "reward/timeouts", "error": "not scored within reward.timeout_s"}),
        ("x", 3.0, {}),
        ("parts", 1.5, {"reward_parts": PARTS}),
    ],
)
def test_a_sample_gets_the_scorers_answer(response, reward, extra):
    sample = sample_of(replica_of(tokenizer=plain_tokenizer(response)))
    assert sample.reward == reward
    assert sample.extra == extra


class TwoTurnsAndATool(AgentLoop):
    """Waits 0.2 s for a tool between its turns."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        trajectory.observe("tool", np.arange(2))
        await asyncio.sleep(0.2)
        await trajectory.generate(generate)
        return trajectory


def test_the_times_of_a_trajectory_are_those_of_its_parts():
    """Two trajectories, of which one waits for the other's turn. All their time is somewhere."""
    cfg = Config()
    cfg.agent.loop = f"{__name__}:TwoTurnsAndATool"

    async def generate(*request: Any) -> Generated:
        await asyncio.sleep(0.4)
        generated = await generate_two_tokens(*request)
        return replace(generated, queue_s=0.05, prefill_s=0.1)

    replica = replica_of(cfg, [FakeScorer(0.3)], plain_tokenizer(), generate)
    replica.limiter.limit = 1
    begin = time.monotonic()
    samples = asyncio.run(replica.rollout([make_prompt(0)], Sampling(2, 1.0, None)))
    whole = time.monotonic() - begin
    parts = [sample.seconds for sample in samples]
    for seconds in parts:
        assert tuple(seconds) == TIME_PARTS
        assert seconds["prefill"] == pytest.approx(0.2)
        assert seconds["decode"] >= 0.5 - 0.01
        assert seconds["tool"] >= 0.2 - 0.01
        assert seconds["reward"] >= 0.3 - 0.01
        assert sum(seconds.values()) <= whole
    assert parts[0]["queue"] >= 0.1
    assert parts[1]["queue"] >= 0.1 + 0.4 - 0.01, "it began after the other's first turn"
    slowest = max(sum(seconds.values()) for seconds in parts)
    assert slowest == pytest.approx(whole, abs=0.2)


def test_an_episode_of_a_loop_that_failed_has_its_times():
    cfg = Config()
    cfg.reward.on_error = "zero"
    sample = sample_of(replica_of(cfg), agent_loop=f"{__name__}:Fails")
    assert sample.seconds["tool"] >= 0.05 - 0.01
    assert sum(sample.seconds.values()) < 5


class Fails(AgentLoop):
    async def run(self, prompt, generate, score, limits):
        await asyncio.sleep(0.05)
        raise ValueError("of the loop")


class UsesScore(AgentLoop):
    """Calculates with what `score` returned, or returns it, or its parts, as its setting says."""

    def __init__(self, cfg, tokenizer, *, way="number"):
        super().__init__(cfg, tokenizer)
        self.way = way

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        reward = await score("parts")
        ways = {
            "number": lambda: 0.5 * reward + 1,
            "as it is": lambda: reward,
            "scaled": lambda: reward.scaled(2.0),
            "parts": lambda: reward.parts,
            "total": lambda: reward.total,
        }
        trajectory.reward = ways[self.way]()
        return trajectory


@pytest.mark.parametrize(
    ("way", "reward", "parts"),
    [
        ("number", 1.75, {}),
        ("as it is", 1.5, PARTS),
        ("scaled", 3.0, {"right": 2.0, "form": 1.0}),
        ("parts", 1.5, PARTS),
        ("total", 1.5, {}),
    ],
)
def test_a_loop_may_calculate_with_a_reward_or_read_its_parts(way, reward, parts):
    cfg = Config()
    cfg.agent.loop = f"{__name__}:UsesScore"
    cfg.agent.loop_kwargs = {cfg.agent.loop: {"way": way}}
    sample = sample_of(replica_of(cfg))
    assert sample.reward == reward
    assert type(sample.reward) is float
    assert sample.extra.get("reward_parts", {}) == parts


class ReportsNumbers(AgentLoop):
    """Reports numbers of several libraries."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        turn = await trajectory.generate(generate)
        trajectory.count("commas", (turn.ids == 3).sum())
        trajectory.count("commas", np.float32(0.5))
        trajectory.facts["is_right"] = np.bool_(True)
        trajectory.facts["loss"] = torch.tensor(2.0)
        trajectory.facts["share"] = Fraction(1, 4)
        trajectory.reward = np.float32(0.5)
        return trajectory


def test_the_numbers_of_other_libraries_become_pythons_own(tmp_path):
    cfg = Config()
    cfg.agent.loop = f"{__name__}:ReportsNumbers"
    sample = sample_of(replica_of(cfg))
    numbers = {"turns": 1.0, "commas": 0.5, "is_right": 1, "loss": 2.0, "share": 0.25}
    assert sample.extra["agent"] == numbers
    assert {type(number) for number in sample.extra["agent"].values()} <= {int, float}
    write_samples([sample], tmp_path)
    (copy,) = read_samples(tmp_path)
    assert copy.extra == sample.extra


@pytest.mark.parametrize(
    ("function", "functions", "columns"),
    [
        ("gsm8k", {}, {}),
        ("my_rewards:f", {}, {"level": 3}),
        ("gsm8k", {"a": "math"}, {}),
        ("gsm8k", {"a": "m:f"}, {"level": 3}),
    ],
)
def test_the_rows_other_columns_go_to_user_functions_and_into_no_sample(
    function, functions, columns
):
    cfg = Config()
    cfg.reward.function = function
    cfg.reward.functions = functions
    scorer = FakeScorer()
    replica = replica_of(cfg, [scorer], plain_tokenizer())
    sample = sample_of(replica, data_source="a", extra={"level": 3}, where="rows.jsonl:1")
    (item,) = scorer.items
    assert item.extra_info == columns
    assert item.where == "rows.jsonl:1"
    assert item.data_source == "a"
    assert sample.extra == {}


@pytest.mark.parametrize(
    ("tries", "reward", "late"),
    [(["late"] * 2, 0.0, True), (["x", "late"], 0.0, True), (["late", "x"], 1.5, False)],
)
def test_a_last_try_whose_reward_is_late_is_marked_as_such(tries, reward, late):
    cfg = Config()
    cfg.agent.loop = "retry_with_feedback"
    cfg.agent.max_turns = 2
    cfg.agent.loop_kwargs = {"retry_with_feedback": {"passes_at": 9.0, "discount": 0.5}}
    tokenizer = tiny_tokenizer()
    texts = iter(tries)

    async def engine(*_):
        ids = np.array(tokenizer.encode(next(texts)), np.int32)
        return Generated(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0, "stop")

    sample = sample_of(replica_of(cfg, tokenizer=tokenizer, generate=engine))
    assert sample.reward == reward
    assert ("error" in sample.extra) == late
    assert sample.extra["agent"]["tries"] == 2


class EstimatorWithBaselines:
    """Named in a config as an estimator of the user's own."""

    needs = ("baselines",)

    def __call__(self, *_):
        raise AssertionError("nothing is estimated here")


estimator_with_baselines = EstimatorWithBaselines()


@pytest.mark.parametrize(
    ("estimator", "has_greedy"),
    [("remax", True), ("grpo", False), (f"{__name__}:estimator_with_baselines", True)],
)
def test_a_greedy_response_beside_the_samples_where_the_estimator_needs_baselines(
    estimator, has_greedy
):
    cfg = Config()
    cfg.algorithm.adv_estimator = estimator
    cfg.rollout.n = 2
    group = RolloutGroup([], cfg, seeded=True)
    assert group.train_sampling.greedy == has_greedy
    assert not group.val_sampling.greedy
    replica = replica_of(cfg, tokenizer=plain_tokenizer(), generate=generate_two_tokens)
    prompts = [make_prompt(row) for row in range(2)]
    samples = asyncio.run(replica.rollout(prompts, group.train_sampling))
    places = [(sample.prompt_id[1], sample.index) for sample in samples]
    assert places == [(row, i) for row in range(2) for i in range(2 + has_greedy)]
    for sample in samples:
        is_greedy = sample.index == 2
        assert sample.log_probs[0] == (0.0 if is_greedy else 1.0), "the temperature"
        assert sample.extra == ({"greedy": True} if is_greedy else {})
        assert sample.reward == float(sample.index), "scored like the others"


def test_the_limits_of_a_source_hold_for_its_prompts():
    """And those of the config for others; an evaluation may have a length of its own."""
    cfg = Config()
    cfg.agent.max_turns = 5
    cfg.agent.timeout_s = 40.0
    cfg.data.train_files = [
        {"files": "a.jsonl", "max_response_length": 7, "max_turns": 2, "timeout_s": 9.0},
        {"files": "b.jsonl", "max_turn_tokens": 3},
    ]
    replica = replica_of(cfg)

    def limits(source: str, sampling: Sampling = UNSEEDED) -> tuple:
        run = TrajectoryRun(replica, make_prompt(source=source), 0, sampling)
        limits = replica.loops.limits(run.most_tokens, source)
        slot_s = run.slot.limit_s
        return (limits.tokens, limits.turns, limits.turn_tokens, limits.seconds, slot_s)

    tool_s = cfg.agent.tool_timeout_s
    longest = cfg.data.max_response_length
    assert limits("a") == (7, 2, None, 9.0, 2 * (9.0 + tool_s))
    assert limits("b") == (longest, 5, 3, 40.0, 2 * (40.0 + tool_s))
    assert limits("") == (longest, 5, None, 40.0, 2 * (40.0 + tool_s))
    assert limits("a", Sampling(1, 1.0, None, max_tokens=20))[0] == 20


def test_a_reward_worker_learns_the_source_and_gets_columns_where_a_source_has_an_own_function():
    cfg = Config()
    cfg.data.train_files = [{"files": "a.jsonl", "reward": "own:score"}, {"files": "b.jsonl"}]
    run = TrajectoryRun(replica_of(cfg), make_prompt(source="a", extra={"level": 3}), 0, UNSEEDED)
    item = run._reward_item("x")
    assert (item.source, item.extra_info) == ("a", {"level": 3})


class TwoTurns(AgentLoop):
    """Two turns, with nothing between them."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        await trajectory.generate(generate)
        return trajectory


def test_the_draft_tokens_of_all_turns_are_counted(tmp_path):
    cfg = Config()
    cfg.agent.loop = f"{__name__}:TwoTurns"
    cfg.agent.max_turns = 2
    replica = replica_of(cfg)
    own = replica._generate
    counts = iter([(5, 2), (3, 0)])

    async def generate(*args):
        return replace(await own(*args), draft_tokens=next(counts))

    replica._generate = generate
    sample = sample_of(replica)
    assert sample.extra["draft_tokens"] == [8, 2, len(sample.response_ids)]
    write_samples([sample], tmp_path)
    (copy,) = read_samples(tmp_path)
    assert copy.extra == sample.extra
