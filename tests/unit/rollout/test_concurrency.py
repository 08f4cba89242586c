"""How many trajectories use the engine at once, and when a replica has capacity."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from agent_loop.base import AgentLoop, Trajectory
from one_step_off.config.schema import Config
from one_step_off.rollout.concurrency import ConcurrencyLimiter, TrajectorySlot
from one_step_off.rollout.sampling import Sampling, sample_seed
from tests.unit.rollout.stand_ins import (
    UNSEEDED,
    FakeScorer,
    generate_two_tokens,
    make_prompt,
    plain_tokenizer,
    replica_of,
)


class CountingEngine:
    """In place of `RolloutReplica._generate`: counts the requests that run at once."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.seeds: list[int | None] = []

    async def __call__(self, ids, max_tokens, seed, sampling):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        self.seeds.append(seed)
        return await generate_two_tokens(ids, max_tokens, seed, sampling)


def test_running_trajectories_are_bounded_and_slots_are_refilled():
    """A reward that takes long holds no slot."""
    cfg = Config()
    cfg.agent.max_concurrency = 3
    engine = CountingEngine()
    scoring_s = 1.0
    scorers = [FakeScorer(scoring_s) for _ in range(12)]
    replica = replica_of(cfg, scorers, plain_tokenizer(), engine)
    prompts = [make_prompt(row) for row in range(12)]
    begin = time.perf_counter()
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, 7)))
    assert time.perf_counter() - begin < 4 * scoring_s, "the next ones generate during scoring"
    assert engine.most_running == 3
    assert len(samples) == 12
    assert sorted(engine.seeds) == sorted(sample_seed(7, p.id, 0) for p in prompts)


def test_a_try_that_is_being_scored_keeps_no_other_one_waiting():
    """One slot, and rewards of 0.3 s: all first tries have ended before the first one is scored."""
    cfg = Config()
    cfg.agent.loop = "retry_with_feedback"
    cfg.agent.max_concurrency = 1
    cfg.agent.max_turns = 2
    first_tries = []
    second_tries = []

    async def engine(ids, max_tokens, seed, sampling):
        tries = first_tries if len(ids) == 2 else second_tries
        tries.append(time.perf_counter())
        return await generate_two_tokens(ids, max_tokens, seed, sampling)

    scorers = [FakeScorer(0.3, "boom") for _ in range(8)]
    replica = replica_of(cfg, scorers, generate=engine)
    samples = asyncio.run(replica.rollout([make_prompt(row) for row in range(8)], UNSEEDED))
    assert len(samples) == 8
    assert all(sample.extra["agent"]["tries"] == 2 for sample in samples)
    assert len(first_tries) == len(second_tries) == 8
    begin = min(first_tries)
    assert max(first_tries) - begin < 0.3 <= min(second_tries) - begin
    assert (replica.limiter.open, replica.limiter.begun) == (0, 0)


class ScoresRepeatedly(AgentLoop):
    """Asks for a score after each of four turns, whatever comes of it, and twice at once at the
    end."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits, reward=0.0)
        while turn := await trajectory.generate(generate):
            text = "boom" if trajectory.turns % 2 else "x"
            timeout_s = 0.03 if trajectory.turns == 2 else None
            with contextlib.suppress(TimeoutError):
                trajectory.reward = await asyncio.wait_for(score(text), timeout_s)
            trajectory.observe("user", turn.ids)
        await asyncio.gather(score("x"), score("x"))
        return trajectory


def test_no_result_of_scoring_changes_the_number_of_slots():
    """Rewards that fail, take too long for the loop, or are asked for twice at once."""
    cfg = Config()
    cfg.agent.loop = f"{__name__}:ScoresRepeatedly"
    cfg.agent.max_concurrency = 3
    cfg.agent.max_turns = 4
    cfg.reward.on_error = "zero"
    engine = CountingEngine()
    scorers = [FakeScorer(0.05, "boom") for _ in range(40)]
    replica = replica_of(cfg, scorers, generate=engine)
    samples = asyncio.run(replica.rollout([make_prompt(row) for row in range(12)], UNSEEDED))
    assert [sample.extra["agent"]["turns"] for sample in samples] == [4.0] * 12
    assert engine.most_running == 3
    assert (replica.limiter.open, replica.limiter.begun) == (0, 0)
    assert replica.limiter.idle_trajectories == 12


def test_a_place_that_is_waited_for_when_the_trajectory_ends_is_not_kept():
    """A loop that is given up may go on, since it is not awaited."""

    async def main():
        limiter = ConcurrencyLimiter(1)
        first = TrajectorySlot(limiter, 1.0)
        second = TrajectorySlot(limiter, 1.0)
        call = first.call(uses_engine=True)
        await call.__aenter__()
        waiting = asyncio.create_task(second.call(uses_engine=True).__aenter__())
        await asyncio.sleep(0)
        second.release(ended=True)
        await call.__aexit__(None, None, None)
        first.release()
        await waiting
        assert (limiter.open, limiter.begun) == (0, 0)
        assert limiter.idle_trajectories == 2

    asyncio.run(main())


def test_turns_at_the_same_time_are_requests_of_one_trajectory():
    async def main():
        limiter = ConcurrencyLimiter(1)
        slot = TrajectorySlot(limiter, 1.0)
        calls = [slot.call(uses_engine=True) for _ in range(3)]
        await asyncio.gather(*(call.__aenter__() for call in calls))
        assert (limiter.open, limiter.begun) == (3, 1)
        slot.release()  # one of them is scored meanwhile
        for call in calls:
            assert limiter.idle_trajectories == 0
            await call.__aexit__(None, None, None)
        assert (limiter.open, limiter.begun, limiter.idle_trajectories) == (0, 0, 1)

    asyncio.run(main())


def test_calls_are_counted_by_whether_they_began_within_the_limit():
    async def calls(slot: TrajectorySlot) -> None:
        for delay in (0.0, 0.0, 0.15):
            await asyncio.sleep(delay)
            async with slot.call(uses_engine=False):
                pass

    slot = TrajectorySlot(ConcurrencyLimiter(1), limit_s=0.1)
    asyncio.run(slot.run(lambda: calls(slot)))
    assert slot.calls_in_time == 2
    assert slot.calls_late <= 1


UNTIL_THE_TEST_ENDS_S = 60.0


class WaitsForATool(AgentLoop):
    """Waits for a tool after its turn."""

    async def run(self, prompt, generate, score, limits):
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        await asyncio.sleep(UNTIL_THE_TEST_ENDS_S)
        return trajectory


@pytest.mark.parametrize("loop", ["single_turn", f"{__name__}:WaitsForATool"])
def test_a_replica_reports_when_it_has_capacity(loop):
    """Also for prompts that have not arrived yet; trajectories that are scored, or wait for a tool,
    need none."""
    cfg = Config()
    cfg.agent.loop = loop
    replica = replica_of(cfg, [FakeScorer(UNTIL_THE_TEST_ENDS_S)], plain_tokenizer())

    async def main():
        assert await asyncio.wait_for(replica.wait_for_capacity(3, 4), 5) == (0, 4)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.wait_for_capacity(4, 4), 0.05)
        capacity = asyncio.create_task(replica.wait_for_capacity(4, 4))
        work = asyncio.create_task(replica.rollout([make_prompt()], Sampling(2, 1.0, None)))
        assert await asyncio.wait_for(capacity, 10) >= (1, 4), "a tool or a score is waited for"
        work.cancel()
        await asyncio.wait([work])
        assert await replica.wait_for_capacity(4, 3) == (2, 3)

    asyncio.run(main())
