"""Trajectories on their way to the reward workers, and workers whose processes die."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError

from one_step_off.rewards.reward import RewardError
from one_step_off.rollout.reward_queue import RewardQueue
from tests.unit.rollout.stand_ins import FakeScorer, reward_item


async def score_all(queue: RewardQueue, count: int) -> list:
    return await asyncio.gather(*(queue.score(reward_item(i)) for i in range(count)))


def test_rewards_come_back_to_their_own_samples_in_few_calls():
    scorer = FakeScorer(0.02)

    async def main():
        return await score_all(RewardQueue([scorer]), 50)

    assert asyncio.run(main()) == [float(i) for i in range(50)]
    assert len(scorer.call_sizes) <= 2
    assert sum(scorer.call_sizes) == 50


def test_a_failing_reward_reaches_its_caller_and_later_ones_still_work():
    async def main():
        queue = RewardQueue([FakeScorer(failing_response="boom")])
        failed = queue.score(reward_item(0, "boom"))
        found = await asyncio.gather(failed, queue.score(reward_item(1)))
        return [*found, await queue.score(reward_item(3))]

    error, *others = asyncio.run(main())
    assert str(error) == "bad reward"
    assert others == [1.0, 3.0]


def test_slow_rewards_are_scored_side_by_side():
    scorers = [FakeScorer(0.05) for _ in range(4)]

    async def main():
        return await score_all(RewardQueue(scorers), 20)

    assert asyncio.run(main()) == [float(i) for i in range(20)]
    for scorer in scorers:
        assert 0 < sum(scorer.call_sizes) <= 8


def test_a_cancelled_trajectory_takes_no_other_ones_reward():
    async def main():
        queue = RewardQueue([FakeScorer(0.05)])
        tasks = [asyncio.create_task(queue.score(reward_item(i))) for i in range(5)]
        await asyncio.sleep(0.01)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert isinstance(found.pop(2), asyncio.CancelledError)
    assert found == [0.0, 1.0, 3.0, 4.0]


def test_replicas_begin_with_different_workers():
    scorers = [FakeScorer() for _ in range(3)]

    async def main():
        for replica in range(4):
            await RewardQueue(scorers, replica).score(reward_item(0))

    asyncio.run(main())
    assert [len(scorer.call_sizes) for scorer in scorers] == [2, 1, 1]


def test_a_dead_worker_is_named():
    class Dead:
        async def remote(self, items):
            raise ActorDiedError

    async def main():
        await RewardQueue([SimpleNamespace(score_batch=Dead())]).score(reward_item(0))

    with pytest.raises(RuntimeError, match="reward worker 0: its process died"):
        asyncio.run(main())


class MortalScorer:
    """A reward worker whose process dies of some items: the call fails, and Ray restarts it."""

    def __init__(self, deadly: set[int]) -> None:
        self.deadly = deadly
        self.deaths = 0
        self.calls_until_back = 0
        self.score_batch = self

    async def remote(self, items):
        await asyncio.sleep(0)
        if any(item.index in self.deadly for item in items):
            self.deaths += 1
            self.calls_until_back = 2
        else:
            self.calls_until_back = max(0, self.calls_until_back - 1)
        if self.calls_until_back:  # Ray refuses every call until the new process runs
            raise ActorUnavailableError("dead", None)
        return [float(item.index) for item in items]


@given(st.sets(st.integers(0, 19), max_size=4), st.integers(1, 3))
@settings(max_examples=25)
def test_only_an_item_that_kills_its_process_alone_and_twice_is_to_blame(deadly, workers):
    scorers = [MortalScorer(deadly) for _ in range(workers)]
    sleep = asyncio.sleep

    async def main():
        return await score_all(RewardQueue(scorers), 20)

    with mock.patch("one_step_off.rollout.reward_queue.asyncio.sleep", lambda seconds: sleep(0)):
        found = asyncio.run(asyncio.wait_for(main(), 5))
    for i, score in enumerate(found):
        if i in deadly:
            assert isinstance(score, RewardError)
            assert f"sample {i}: killed" in str(score)
        else:
            assert score == float(i)
    assert sum(scorer.deaths for scorer in scorers) <= 3 * len(deadly)
