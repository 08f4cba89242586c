"""Time limits, merging and the canary, with stand-ins for Ray actors; real ones are in the e2e tests."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from one_step_off.config import Config
from one_step_off.distributed_util import SyncError
from one_step_off.groups import PhaseTimeout, RolloutGroup, TrainGroup, WeightSync, every, within
from one_step_off.samples import Prompt, Sample


class Method:
    def __init__(self, answer, delay: float = 0.0) -> None:
        self.answer, self.delay = answer, delay

    async def remote(self, *args):
        await asyncio.sleep(self.delay)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(*args) if callable(self.answer) else self.answer


class Actor:
    def __init__(self, **methods) -> None:
        for name, method in methods.items():
            setattr(self, name, method if isinstance(method, Method) else Method(method))


def test_a_limit_names_what_it_waited_for():
    begin = time.perf_counter()
    with pytest.raises(PhaseTimeout, match=r"step 3, actor: no answer in 0\.05 s"):
        asyncio.run(within(0.05, "step 3, actor", asyncio.sleep(60)))
    assert time.perf_counter() - begin < 5


def test_the_first_failure_does_not_wait_for_the_slow_ones():
    actors = [Actor(work=Method(1, delay=30)), Actor(work=ValueError("rank 1 broke"))]

    async def main():
        await every(60, "actor", actors, "work")

    begin = time.perf_counter()
    with pytest.raises(ValueError, match="rank 1 broke"):
        asyncio.run(main())
    assert time.perf_counter() - begin < 5


def a_sample(prompt: Prompt, index: int) -> Sample:
    one = np.zeros(1)
    return Sample(prompt.id, index, prompt.ids, one.astype(np.int32), one.astype(np.float32), one > -1, one.astype(int))


def test_samples_come_back_in_the_order_of_prompts_whatever_the_replicas_do():
    cfg = Config()
    prompts = [Prompt((0, r), np.arange(2), "", "") for r in (5, 3, 8, 1, 9)]

    def rollout(share, sampling):
        return [a_sample(p, i) for p in reversed(share) for i in reversed(range(sampling.n))], 0.1 * len(share)

    group = RolloutGroup([Actor(rollout=rollout), Actor(rollout=rollout), Actor(rollout=rollout)], cfg, seeded=True)
    samples, seconds = asyncio.run(group.generate(prompts, "step 0", group.train))
    assert [(s.prompt_id, s.index) for s in samples] == [(p.id, i) for p in prompts for i in range(cfg.rollout.n)]
    assert seconds == pytest.approx(0.2)
    assert group.train.seed != group.val.seed


def sync_of(trainer: list, engines: list[list], dtype: str = "float32") -> WeightSync:
    cfg = Config()
    cfg.model.dtype = dtype
    actor = TrainGroup("actor", [Actor(score=lambda seqs: trainer, send_weights={"bytes": 8.0, "pack": 0.1})], cfg)
    replicas = [Actor(score=lambda seqs, e=e: e, sync={"wire": 0.1, "load": 0.2}) for e in engines]
    sync = WeightSync(actor, RolloutGroup(replicas, cfg, True), [np.arange(3)], "127.0.0.1")
    sync.senders = actor.ranks
    return sync


def test_the_canary_reports_the_largest_difference():
    scores = [np.array([-1.0, -2.0])]
    metrics = asyncio.run(sync_of(scores, [scores, [np.array([-1.0, -2.0005])]])((0, 3)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(5e-4)
    assert metrics["sync/bytes"] == 8 and metrics["sync/load_s"] == 0.2


@pytest.mark.parametrize("second", [-2.01, float("nan")])
def test_a_canary_over_the_tolerance_or_nan_stops(second):
    good = [np.array([-1.0, -2.0])]
    with pytest.raises(SyncError, match="version 3: rollout replica 1 .*canary_tolerance 0.001"):
        asyncio.run(sync_of(good, [good, [np.array([-1.0, second])]])((0, 3)))


def test_bfloat16_has_its_own_tolerance():
    good = [np.array([-1.0, -2.0])]
    metrics = asyncio.run(sync_of(good, [[np.array([-1.0, -2.2])]], "bfloat16")((0, 1)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(0.2)
