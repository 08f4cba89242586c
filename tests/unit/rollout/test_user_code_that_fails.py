"""Reward functions and agent loops that fail, under each policy of `reward.on_error`."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from agent_loop.base import AgentLoop, Generated, Trajectory
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.data.staleness import assert_staleness
from one_step_off.rewards.reward import RewardError
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.concurrency import ConcurrencyLimiter
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.reward_queue import RewardQueue
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.trajectory_run import TrajectoryRun
from tests.unit.stand_ins import tiny_tokenizer

POLICIES = ("stop", "zero", "drop")
PROMPT = Prompt((0, 7), np.arange(2, dtype=np.int32), "q", "1")
TWO_SAMPLES = Sampling(2, 1.0, None)


def misbehaving_reward(response: str, **_: object) -> object:
    """Does what its response says."""
    if response == "raise":
        raise KeyError("why\nnot")
    if response == "hang":
        time.sleep(30)
    if response == "exit":
        sys.exit(3)
    answers = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0, 2.0],
        "parts": {"a": 1},
    }
    return answers.get(response, 1.0)


class InProcessScorer:
    """A `Scorer` of this process, called as a Ray actor is."""

    def __init__(self, cfg: Config) -> None:
        self.scorer = Scorer(cfg.reward)
        self.score_batch = self

    async def remote(self, items):
        return self.scorer.score_batch(items)


def replica_of(response: str, on_error: str, loop: str = "single_turn") -> RolloutReplica:
    """A replica whose policy always responds with this text."""
    cfg = Config()
    cfg.reward.function = f"{__name__}:misbehaving_reward"
    cfg.reward.timeout_s = 0.5
    cfg.reward.on_error = on_error
    cfg.agent.loop = loop
    cfg.agent.timeout_s = 0.1
    cfg.agent.tool_timeout_s = 0.1
    tokenizer = tiny_tokenizer()

    async def generate(*_):
        await asyncio.sleep(0.001)
        ids = np.array(tokenizer.encode(response), np.int32)
        versions = np.full(len(ids), 4, np.int32)
        return Generated(ids, np.zeros(len(ids), np.float32), versions, 0, "stop")

    replica = RolloutReplica(cfg, 0, "cpu", [InProcessScorer(cfg)])
    replica.tokenizer = tokenizer
    replica._generate = generate
    replica.stamp = (0, 4)
    return replica


def sample_of(replica: RolloutReplica, sampling: Sampling = TWO_SAMPLES, index: int = 1) -> Sample:
    """One trajectory; afterwards it holds nothing."""

    async def main():
        (sample,) = await asyncio.wait_for(replica._trajectory(PROMPT, index, sampling), 10)
        return sample

    try:
        return asyncio.run(main())
    finally:
        assert (replica.limiter.open, replica.limiter.begun) == (0, 0)
        assert replica.limiter.idle_trajectories == 1


# --- reward functions -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize(
    "response", ["raise", "hang", "exit", "nan", "inf", "none", "text", "list"]
)
def test_every_way_in_which_a_reward_function_misbehaves(response, on_error):
    replica = replica_of(response, on_error)
    if on_error == "stop":
        words = r"misbehaving_reward.*prompt \(0, 7\), sample 1: "
        with pytest.raises(RewardError, match=words):
            sample_of(replica)
        return
    sample = sample_of(replica)
    assert sample.reward == 0.0
    assert sample.response == response
    assert len(sample.response_ids)
    assert sample.loss_mask.all()
    fault = "reward/timeouts" if response == "hang" else "reward/errors"
    assert sample.extra["fault"] == fault
    assert sample.extra["error"].startswith("reward.function=")
    assert "\n" not in sample.extra["error"]


@pytest.mark.parametrize("on_error", POLICIES)
def test_a_good_reward_is_untouched_by_the_policy(on_error):
    assert sample_of(replica_of("fine", on_error)).extra == {}
    assert sample_of(replica_of("parts", on_error)).extra == {"reward_parts": {"a": 1.0}}


@pytest.mark.parametrize("on_error", POLICIES)
def test_an_error_in_one_of_several_scores_is_that_of_the_sample(on_error):
    """The second try follows the feedback "That is wrong", which nothing says."""
    replica = replica_of("raise", on_error, "retry_with_feedback")
    replica.cfg.agent.max_turns = 2
    tokenizer = replica.tokenizer
    texts = iter(["raise", "fine"])

    async def generate(*_):
        ids = np.array(tokenizer.encode(next(texts)), np.int32)
        return Generated(ids, np.zeros(len(ids), np.float32), np.full(len(ids), 4), 0, "stop")

    replica._generate = generate
    if on_error == "stop":
        with pytest.raises(RewardError, match="KeyError"):
            sample_of(replica)
        return
    sample = sample_of(replica)
    assert sample.extra["agent"]["tries"] == 2
    assert sample.extra["fault"] == "reward/errors"
    assert sample.reward == 0.0


def test_a_worker_that_does_not_come_back_ends_the_run_by_name():
    class Dead:
        async def remote(self, items):
            raise ActorDiedError

    replica = replica_of("fine", "drop")
    replica.rewards = RewardQueue([SimpleNamespace(score_batch=Dead())])
    words = "reward worker 0: its process died and did not come back"
    with pytest.raises(RuntimeError, match=words):
        sample_of(replica)


# --- agent loops ----------------------------------------------------------------------------------


class MisbehavingLoop(AgentLoop):
    """Does one thing after a turn of the policy."""

    fault = ""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        await getattr(self, self.fault)(trajectory, generate, score)
        if self.fault == "returns_nothing":
            return None
        return trajectory

    async def raises(self, *_):
        raise KeyError("mood")

    async def never_ends(self, *_):
        await asyncio.Event().wait()

    async def ignores_cancellation(self, *_):
        end = time.monotonic() + 1.5  # or the test's event loop would wait for it without end
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def generates_without_end(self, trajectory, generate, score):
        while True:
            await generate(trajectory.ids, 1)

    async def scores_without_end(self, trajectory, generate, score):
        while True:
            await score("fine")
            await asyncio.sleep(0)

    async def cancels_itself(self, *_):
        raise asyncio.CancelledError

    async def gives_nan(self, trajectory, generate, score):
        trajectory.reward = float("nan")

    async def gives_a_text(self, trajectory, generate, score):
        trajectory.reward = "good"

    async def counts_a_text(self, trajectory, generate, score):
        trajectory.count("commas", "3")

    async def reports_a_set(self, trajectory, generate, score):
        trajectory.facts["commas"] = {1, 2}

    async def reports_several(self, trajectory, generate, score):
        trajectory.facts["commas"] = np.arange(2)

    async def reports_nan(self, trajectory, generate, score):
        trajectory.facts["commas"] = np.float32("nan")

    async def keeps_a_date(self, trajectory, generate, score):
        trajectory.finish_reason = datetime.date(2026, 1, 1)

    async def has_no_turn(self, trajectory, generate, score):
        trajectory.segments.clear()

    async def returns_nothing(self, *_): ...


ENDLESS = (
    "never_ends",
    "ignores_cancellation",
    "generates_without_end",
    "scores_without_end",
)
FAULTS_OF_LOOPS = (
    *ENDLESS,
    "raises",
    "cancels_itself",
    "gives_nan",
    "gives_a_text",
    "counts_a_text",
    "reports_a_set",
    "reports_several",
    "reports_nan",
    "keeps_a_date",
    "has_no_turn",
    "returns_nothing",
)
LOOP = f"{__name__}:MisbehavingLoop"


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize("fault", FAULTS_OF_LOOPS)
def test_every_way_in_which_an_agent_loop_misbehaves(fault, on_error, monkeypatch):
    monkeypatch.setattr(MisbehavingLoop, "fault", fault)
    replica = replica_of("fine", on_error, LOOP)
    if on_error == "stop":
        words = r"agent loop .*:MisbehavingLoop, prompt \(0, 7\), sample 1: raised "
        with pytest.raises(RewardError, match=words):
            sample_of(replica)
        return
    sample = sample_of(replica)
    assert sample.extra["fault"] == "agent/errors"
    assert sample.reward == 0.0
    assert len(sample.response_ids) == 0
    late = (
        "raised TimeoutError: it did not end in 0.4 s, twice agent.timeout_s and "
        "agent.tool_timeout_s"
    )
    assert (late in sample.extra["error"]) == (fault in ENDLESS)
    assert_staleness(Batch(0, [sample], (0, 4)))


def test_a_loop_that_fails_while_new_weights_arrive_is_an_error_of_its_sample():
    """With partial rollouts trajectories live on in a sync, and tools run on in it."""
    replica = replica_of("fine", "zero")
    replica.stamp = None
    replica.attempt = 3
    run = TrajectoryRun(replica, PROMPT, 1, TWO_SAMPLES)
    sample = run.failed_sample(ValueError("the tool broke"))
    assert sample.attempt == 3
    assert sample.reward == 0.0
    assert "the tool broke" in sample.extra["error"]


def test_a_greedy_sample_that_failed_is_still_the_greedy_one(monkeypatch):
    monkeypatch.setattr(MisbehavingLoop, "fault", "raises")
    replica = replica_of("fine", "zero", LOOP)
    sample = sample_of(replica, Sampling(2, 1.0, None, greedy=True), index=2)
    assert sample.extra["greedy"]
    assert sample.extra["fault"] == "agent/errors"


def test_slow_generation_and_slow_scoring_are_not_the_loops_time():
    """Each takes 0.8 s. The loop's own code may take 0.4 s: twice the sum of both keys."""
    replica: Any = replica_of("fine", "stop")
    replica.cfg.agent.timeout_s = 0.1
    replica.cfg.agent.tool_timeout_s = 0.1
    generate = replica._generate
    score = replica.rewards.score

    async def generate_slowly(*args):
        await asyncio.sleep(0.8)
        return await generate(*args)

    async def score_slowly(*args):
        await asyncio.sleep(0.8)
        return await score(*args)

    replica._generate = generate_slowly
    replica.rewards.score = score_slowly
    sample = sample_of(replica)
    assert sample.reward == 1.0
    assert sample.extra == {}


def test_the_wait_for_a_slot_is_not_the_loops_time():
    replica: Any = replica_of("fine", "stop")
    replica.cfg.agent.timeout_s = 0.1
    replica.cfg.agent.tool_timeout_s = 0.1
    replica.limiter = ConcurrencyLimiter(1)
    generate = replica._generate

    async def generate_slowly(*args):
        await asyncio.sleep(0.3)
        return await generate(*args)

    replica._generate = generate_slowly
    samples = asyncio.run(replica.rollout([PROMPT], Sampling(4, 1.0, None)))
    assert [sample.reward for sample in samples] == [1.0] * 4


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize("error", [RuntimeError("the engine died"), ConfigError("no such thing")])
def test_an_error_of_the_engine_is_not_the_loops_fault(error, on_error):
    """Under no policy may a dead engine look like a bad sample."""
    replica: Any = replica_of("fine", on_error)

    async def fail(*_):
        raise error

    replica._generate = fail
    with pytest.raises(type(error), match=str(error)):
        sample_of(replica)


def test_a_cancelled_rollout_ends_its_loops(monkeypatch):
    monkeypatch.setattr(MisbehavingLoop, "fault", "never_ends")
    replica = replica_of("fine", "drop", LOOP)
    replica.cfg.agent.timeout_s = 60.0

    async def main():
        before = asyncio.all_tasks()
        task = asyncio.create_task(replica.rollout([PROMPT], Sampling(4, 1.0, None)))
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        return asyncio.all_tasks() - before

    assert not asyncio.run(main())
