"""Time limits, merging and the canary, with stand-ins for Ray actors; real ones are in the e2e tests."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from one_step_off.config import Config, ConfigError
from one_step_off.distributed_util import SyncError
from one_step_off.groups import PhaseTimeout, RoleError, RolloutGroup, TrainGroup, WeightSync, every, named, within
from one_step_off.samples import Batch, Prompt, Sample, StalenessError


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
    with pytest.raises(RoleError, match="actor 1, work: ValueError: rank 1 broke"):
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
    sync = WeightSync(actor, RolloutGroup(replicas, cfg, True), [np.arange(3)], "127.0.0.1", [[]])
    sync.senders, sync.total_bytes = actor.ranks, 8
    return sync


def test_the_canary_reports_the_largest_difference():
    scores = [np.full(50, -1.0), np.array([-2.0])]
    metrics = asyncio.run(sync_of(scores, [scores, [np.full(50, -1.0), np.array([-2.0005])]])((0, 3)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(5e-4)
    assert metrics["sync/bytes"] == 8 and metrics["sync/load_s"] == 0.2


@pytest.mark.parametrize("second", [-2.01, float("nan")])
def test_a_canary_over_the_tolerance_or_nan_stops(second):
    good = [np.array([-1.0, -2.0])]
    with pytest.raises(SyncError, match="version 3: rollout replica 1 .*canary_tolerance = 0.001"):
        asyncio.run(sync_of(good, [good, [np.array([-1.0, second])]])((0, 3)))


def test_bfloat16_has_its_own_tolerance():
    good = [np.full(50, -1.0), np.array([-2.0])]
    metrics = asyncio.run(sync_of(good, [[np.full(50, -1.0), np.array([-2.2])]], "bfloat16")((0, 1)))
    assert metrics["canary/logprob_diff_max"] == pytest.approx(0.2)


def test_nan_in_any_sequence_stops():
    good = [np.array([-1.0]), np.array([-2.0]), np.array([-3.0])]
    bad = [np.array([-1.0]), np.array([float("nan")]), np.array([-3.0])]
    with pytest.raises(SyncError, match="differ by nan"):
        asyncio.run(sync_of(good, [bad])((0, 1)))


def test_weights_that_are_only_a_little_off_everywhere_are_caught_by_the_mean():
    good = [np.full(50, -1.0)]
    with pytest.raises(SyncError, match=r"\(mean\).*canary_tolerance / 10 = 0.1"):
        asyncio.run(sync_of(good, [[np.full(50, -1.2)]], "bfloat16")((0, 1)))


def test_a_time_limit_of_the_work_itself_is_not_taken_for_ours():
    async def main():
        await within(60, "x", Method(TimeoutError("inner limit")).remote())

    with pytest.raises(TimeoutError, match="inner limit"):
        asyncio.run(main())


class RayLike(Exception):
    """As Ray wraps a failure: the cause as an attribute, a traceback as the message."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::Worker.setup() (pid=1)\n  File x\n{cause}")
        self.cause = cause


@pytest.mark.parametrize(
    ("cause", "kind", "words"),
    [
        (ConfigError("model.path=x: no"), ConfigError, "^model.path=x: no$"),
        (SyncError("bucket 2 differs"), SyncError, "^sync, rollout 1: bucket 2 differs$"),
        (StalenessError("token 3"), StalenessError, "^sync, rollout 1: token 3$"),
        (MemoryError("out\nof memory"), RoleError, "^sync, rollout 1: MemoryError: out$"),
    ],
)
def test_a_failure_in_a_process_is_named_and_keeps_its_kind(cause, kind, words):
    with pytest.raises(kind, match=words):
        asyncio.run(named("sync, rollout 1", Method(RayLike(cause)).remote()))


def test_a_role_in_the_replicas_pool_has_them_sleep_first(monkeypatch):
    import one_step_off.groups as room

    monkeypatch.setattr(room, "_put", lambda batch: batch)
    told = []

    def said(what, answer):
        def answers(*_):
            told.append(what)
            return answer

        return Method(answers, delay=0.01)

    async def main():
        turn = asyncio.Lock()
        rollout = RolloutGroup(
            [Actor(rollout=said("generate", ([], 0.1)), sleep=said("sleep", None))], Config(), True, turn
        )
        actor = TrainGroup("actor", [Actor(update=said("update", {}))], Config(), turn)
        actor.colocated = rollout
        prompts = [Prompt((0, 0), "", np.arange(2), "")]
        await asyncio.gather(rollout.generate(prompts, "step 0", rollout.train), actor.update(Batch(0, [], (0, 0))))

    asyncio.run(main())
    assert told == ["generate", "sleep", "update"]


def test_roles_in_one_pool_take_turns():
    running, most = [0], [0]

    class Busy:
        async def remote(self, *_):
            running[0] += 1
            most[0] = max(most[0], running[0])
            await asyncio.sleep(0.01)
            running[0] -= 1
            return {}

    async def main(shared: bool):
        most[0] = 0
        turn = asyncio.Lock() if shared else None
        groups = [TrainGroup(role, [Actor(log_prob=Method(0))], Config(), turn) for role in ("actor", "ref")]
        for group in groups:
            group.ranks[0].log_prob = Busy()
        batch = Batch(0, [], (0, 0))
        await asyncio.gather(*(g.log_prob(batch) for g in groups))
        return most[0]

    import one_step_off.groups as room

    put, room._put = room._put, lambda batch: batch
    try:
        assert asyncio.run(main(shared=True)) == 1
        assert asyncio.run(main(shared=False)) == 2
    finally:
        room._put = put
