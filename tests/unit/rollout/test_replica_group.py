"""Time limits, merging and the canary, with stand-ins for Ray actors; real ones are in the e2e tests."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from one_step_off.cluster.errors import GIVEN_UP, PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.cluster.remote_calls import call_all, name_failures, with_time_limit
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_STORED, Batch, Prompt, Sample
from one_step_off.data.staleness import StalenessError
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training import trainer_group as room
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync


class Method:
    def __init__(self, answer, delay: float = 0.0) -> None:
        self.answer, self.delay = answer, delay

    async def remote(self, *args):
        await asyncio.sleep(self.delay)
        if isinstance(self.answer, Exception):
            raise self.answer
        answer = self.answer(*args) if callable(self.answer) else self.answer
        return await answer if asyncio.iscoroutine(answer) else answer


class Actor:
    def __init__(self, **methods) -> None:
        for name, method in methods.items():
            setattr(self, name, method if isinstance(method, Method) else Method(method))


def test_a_limit_names_what_it_waited_for():
    begin = time.perf_counter()
    with pytest.raises(PhaseTimeout, match=r"step 3, actor: no answer in 0\.05 s"):
        asyncio.run(with_time_limit(0.05, "step 3, actor", asyncio.sleep(60)))
    assert time.perf_counter() - begin < 5


def test_the_first_failure_does_not_wait_for_the_slow_ones():
    actors = [Actor(work=Method(1, delay=30)), Actor(work=ValueError("rank 1 broke"))]

    async def main():
        await call_all(60, "actor", actors, "work")

    begin = time.perf_counter()
    with pytest.raises(RoleError, match="actor 1, work: ValueError: rank 1 broke"):
        asyncio.run(main())
    assert time.perf_counter() - begin < 5


def healthy(group: RolloutGroup) -> RolloutGroup:
    """As after a sync."""
    for health in group.health:
        health.transition_to(ReplicaState.HEALTHY)
    return group


def a_sample(prompt: Prompt, index: int) -> Sample:
    one = np.zeros(1)
    return Sample(
        prompt.id,
        index,
        prompt.ids,
        one.astype(np.int32),
        one.astype(np.float32),
        one > -1,
        one.astype(int),
    )


class Slow:
    """A replica that works on `slots` samples at once, each of which generates for `delay` seconds and is scored for
    `score_s`; `fails`: the row of which the reward function raises."""

    def __init__(
        self, delay: float, score_s: float = 0.0, slots: int = 256, fails: int = -1
    ) -> None:
        self.delay, self.score_s, self.had, self.slots, self.fails = (
            delay,
            score_s,
            [],
            asyncio.Semaphore(slots),
            fails,
        )
        self.rollout, self.wait_for_capacity, self.start = (
            Method(self.make),
            Method(self.room),
            Method((slots, [])),
        )
        self.ping, self.alive = Method((0, 0)), Method(None)
        self.most, self.came, self.away, self.last, self.calls, self.stopped = 0, 0, 0, 0.0, 0, 0

    async def room(self, sent, most):
        while sent - self.away >= most:
            await asyncio.sleep(0.001)
        return self.away

    async def one(self):
        async with self.slots:
            await asyncio.sleep(self.delay)
        self.away, self.last = self.away + 1, time.perf_counter()

    async def make(self, prompts, sampling):
        self.calls += 1
        self.had += [p.id[1] for p in prompts]
        self.came += len(prompts) * sampling.n
        self.most = max(self.most, self.came - self.away)
        try:
            await asyncio.gather(*(self.one() for _ in range(len(prompts) * sampling.n)))
            if self.fails in [p.id[1] for p in prompts]:
                raise ValueError("bad reward")
            await asyncio.sleep(self.score_s)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return [a_sample(p, i) for p in prompts for i in range(sampling.n)]


def routed(
    routing: str,
    replicas: list[Slow],
    rows: int,
    n: int,
    seeded: bool = False,
    most: int | None = None,
):
    """(samples, seconds) of one call for `rows` prompts. `most`: agent.max_concurrency."""
    cfg = Config()
    cfg.rollout.routing, cfg.rollout.n = routing, n
    cfg.agent.max_concurrency = most or cfg.agent.max_concurrency
    group = RolloutGroup(replicas, cfg, seeded)
    prompts = [Prompt((0, row), np.arange(2), "", "") for row in range(rows)]

    async def main():
        await group.setup()
        return await healthy(group).generate(prompts, "step 0", group.train_sampling)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("routing", "seeded", "static"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("static", False, True),
        ("least_loaded", True, False),
    ],
)
def test_new_prompts_go_to_the_least_loaded_replica_unless_a_run_is_to_repeat(
    routing, seeded, static
):
    replicas = [Slow(0.01), Slow(0.5)]
    samples, seconds = routed(routing, replicas, 12, 2, seeded, most=4)
    assert [(s.prompt_id[1], s.index) for s in samples] == [
        (row, i) for row in range(12) for i in range(2)
    ]
    if static:
        assert [r.had for r in replicas] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    else:
        assert len(replicas[0].had) >= 8, "the quick one has most of them"
        assert max(r.most for r in replicas) <= 4, "what there is room for"
        assert seconds >= 0.5


def test_slow_rewards_keep_no_replica_from_its_next_prompts():
    replicas, begin = [Slow(0.02, score_s=1.0), Slow(0.02, score_s=1.0)], time.perf_counter()
    samples, _ = routed("least_loaded", replicas, 32, 2, most=4)
    assert len(samples) == 64 and max(r.last for r in replicas) - begin < 0.9, (
        "before the first one is scored"
    )


def test_a_slow_replica_gets_less_and_all_is_done_earlier_with_the_concurrency_of_the_defaults():
    found = {}
    for routing in ("static", "least_loaded"):
        replicas = [Slow(0.05), Slow(0.5)]
        samples, seconds = routed(routing, replicas, 256, 8)
        assert len(samples) == 256 * 8
        found[routing] = seconds, [len(r.had) for r in replicas]
    assert found["static"][1] == [128, 128]
    fast, slow = found["least_loaded"][1]
    assert fast > 2 * slow > 0 and found["least_loaded"][0] < 0.7 * found["static"][0]


def test_each_prompt_goes_to_the_replica_with_the_fewest_under_way():
    """What an earlier call left on a replica counts, and what has come back does not."""
    cfg = Config()
    cfg.rollout.routing, cfg.rollout.n = "least_loaded", 1
    replicas = [Slow(0.3), Slow(0.01)]
    group = healthy(RolloutGroup(replicas, cfg, False))

    def rows(*numbers: int) -> list[Prompt]:
        return [Prompt((0, row), np.arange(2), "", "") for row in numbers]

    async def main():
        first = asyncio.create_task(group.generate(rows(0, 1, 2), "step 0", group.train_sampling))
        await asyncio.sleep(0.1)
        await group.generate(rows(3, 4), "validation", group.val_sampling)
        assert [r.had for r in replicas] == [[0, 2], [1, 3, 4]]
        await first
        await group.generate(rows(5, 6), "step 1", group.train_sampling)
        assert [r.had for r in replicas] == [[0, 2, 5], [1, 3, 4, 6]]

    asyncio.run(main())


def test_what_is_handed_out_at_once_is_seen_by_whoever_hands_out_next():
    """Two calls in one tick, as of an evaluation and of the next samples, do not both choose the same replica."""
    cfg = Config()
    cfg.rollout.routing, cfg.rollout.n, cfg.rollout.val_n = "least_loaded", 4, 4
    replicas = [Slow(0.01), Slow(0.01)]
    group = healthy(RolloutGroup(replicas, cfg, False))

    async def main():
        calls = (group.val_sampling, 0), (group.train_sampling, 1)
        ask = [
            group.generate([Prompt((0, row), np.arange(2), "", "")], f"step {row}", how)
            for how, row in calls
        ]
        await asyncio.gather(*ask)

    asyncio.run(main())
    assert [r.had for r in replicas] == [[0], [1]]


def test_a_failing_reward_ends_a_step_before_the_other_prompts_are_sent():
    replicas = [Slow(0.05, score_s=30, fails=0), Slow(0.05, score_s=30)]
    begin = time.perf_counter()
    with pytest.raises(RoleError, match="^step 0, rollout 0: ValueError: bad reward$"):
        routed("least_loaded", replicas, 400, 1, most=4)
    assert time.perf_counter() - begin < 5
    sent = sum(len(r.had) for r in replicas)
    assert sent < 20 and sum(r.stopped for r in replicas) == sum(r.calls for r in replicas) - 1, (
        "the others are cancelled"
    )


def test_samples_come_back_in_the_order_of_prompts_whatever_the_replicas_do():
    cfg = Config()
    prompts = [Prompt((0, r), np.arange(2), "", "") for r in (5, 3, 8, 1, 9)]

    def rollout(share, sampling):
        return [a_sample(p, i) for p in reversed(share) for i in reversed(range(sampling.n))]

    group = healthy(RolloutGroup([Actor(rollout=rollout) for _ in range(3)], cfg, seeded=True))
    samples, seconds = asyncio.run(group.generate(prompts, "step 0", group.train_sampling))
    assert [(s.prompt_id, s.index) for s in samples] == [
        (p.id, i) for p in prompts for i in range(cfg.rollout.n)
    ]
    assert 0.0 < seconds < 5.0
    assert group.train_sampling.seed != group.val_sampling.seed


CONTROL = {
    "alive": None,
    "abort_sync": None,
    "fail_sync": None,
}  # what any trainer answers, however busy it is


def sync_of(trainer: list, engines: list[list], dtype: str = "float32") -> WeightSync:
    cfg = Config()
    cfg.model.dtype = dtype
    sent = {"bytes": 8.0, "changed": 1.0, "gather": 0.1, "bucket_wire": [[0, 0.3]], "spans": []}
    got = {
        "bytes": 8.0,
        "load": 0.2,
        "bucket_wire": [[0, 0.1]],
        "spans": [["", "load", 1.0, 2.0]],
        "bare_wire": 0.05,
    }
    rank = Actor(
        score=lambda seqs: trainer, send_weights=lambda version: dict(sent), release=None, **CONTROL
    )
    actor = TrainGroup("actor", [rank], cfg)
    replicas = [
        Actor(score=lambda seqs, e=e: e, sync=lambda stamp: [dict(got)], alive=None)
        for e in engines
    ]
    sync = WeightSync(actor, RolloutGroup(replicas, cfg, True), [np.arange(3)], "127.0.0.1", [[]])
    sync.senders, sync.sending_ranks, sync.connected_replicas = actor.ranks, actor.ranks, replicas
    sync.total_bytes = 8
    return sync


def test_a_replica_that_comes_back_while_the_next_version_waits_gets_that_one_too():
    """It was given the version before when the sync of all began to wait for its turn, and took no part then."""
    right = [np.array([-1.0])]
    sync, had = sync_of(right, [right, right]), {0: [], 1: []}
    rollout, sync.connect_info = sync.rollout, {}
    report = {"bytes": 8.0, "bucket_wire": [[0, 0.1]], "spans": [], "bare_wire": 0.05}
    for ranks in (sync.actor.ranks, rollout.replicas):
        for one in ranks:
            one.connect_sync = Method(None)
    for i, replica in enumerate(rollout.replicas):
        replica.sync = Method(lambda stamp, i=i: had[i].append(stamp) or [dict(report)], delay=0.02)

    async def come_back():
        assert await sync.restore(1)
        del rollout.restart_tasks[1]

    async def main():
        sync.last_sent, sync.connected_replicas = ((0, 3), right), []
        rollout.restart_tasks[1] = asyncio.create_task(come_back())
        await asyncio.sleep(0.01)
        assert had == {0: [], 1: []} and sync.lock.locked(), "the one is under way"
        await sync((0, 4))
        assert had == {0: [(0, 4)], 1: [(0, 3), (0, 4)]}
        assert await rollout.wait_for_healthy() == [0, 1]

    asyncio.run(main())


def test_when_several_ends_fail_the_first_is_named_and_none_is_reported_behind_our_back(caplog):
    """asyncio tells of every failure that nobody asked for, with a traceback, among what the user reads."""
    sync = sync_of([np.array([-1.0])], [[np.array([-1.0])]])
    late, first = (
        Method(SyncError("sender 0: late"), delay=0.05),
        Method(SyncError("sender 1: first")),
    )
    ranks: list[Any] = [Actor(send_weights=late, **CONTROL), Actor(send_weights=first, **CONTROL)]
    ranks[0].score = sync.actor.ranks[0].score
    ranks[1].score = Method(None)
    sync.senders = sync.sending_ranks = sync.actor.ranks = ranks

    async def main():
        with pytest.raises(SyncError, match="trainer rank 1: sender 1: first"):
            await sync((0, 3))
        gc.collect()

    asyncio.run(main())
    assert "never retrieved" not in caplog.text


def test_who_fails_since_the_sync_was_given_up_is_not_named_as_the_cause():
    sync = sync_of([np.array([-1.0])], [[np.array([-1.0])]])
    follows = SyncError(
        f"sender 0, phase wire: {GIVEN_UP}receiver 0, phase load: too little memory"
    )
    sync.actor.ranks[0].send_weights = Method(follows)
    cause = SyncError("receiver 0, phase load: too little memory")
    sync.rollout.replicas[0].sync = Method(
        cause, delay=0.05
    )  # its answer comes by way of the engine, and later
    with pytest.raises(
        SyncError, match="version 3, rollout 0: receiver 0, phase load: too little memory"
    ):
        asyncio.run(sync((0, 3)))


def test_a_trainer_that_hangs_in_the_sync_is_named_and_not_the_one_that_waited_for_it(monkeypatch):
    """So that another attempt may do better: the other one says only that an answer did not come."""
    monkeypatch.setattr("one_step_off.weight_sync.sync_calls.BUSY_GRACE_S", 0.1)
    sync = sync_of([np.array([-1.0])], [[np.array([-1.0])]])
    hung, waited = (
        Method(None, delay=30),
        Method(SyncError("sender 1, phase header: timed out"), delay=0.02),
    )
    ranks: list[Any] = [Actor(send_weights=hung, **CONTROL), Actor(send_weights=waited, **CONTROL)]
    ranks[0].score = sync.actor.ranks[0].score
    ranks[1].score = Method(None)
    sync.senders = sync.sending_ranks = sync.actor.ranks = ranks
    with pytest.raises(ProcessDied, match="version 3: trainer rank 0: it hangs"):
        asyncio.run(sync((0, 3)))


def test_the_canary_reports_the_largest_difference():
    scores = [np.full(50, -1.0), np.array([-2.0])]
    metrics = asyncio.run(
        sync_of(scores, [scores, [np.full(50, -1.0), np.array([-2.0005])]])((0, 3))
    )
    assert metrics["canary/logprob_diff_max"] == pytest.approx(5e-4)
    assert metrics["sync/bytes"] == 8 and metrics["sync/load_s"] == 0.2


@pytest.mark.parametrize("second", [-2.01, float("nan")])
def test_a_canary_over_the_tolerance_or_nan_stops(second):
    good = [np.array([-1.0, -2.0])]
    with pytest.raises(SyncError, match="version 3: rollout replica 1 .*canary_tolerance = 0.001"):
        asyncio.run(sync_of(good, [good, [np.array([-1.0, second])]])((0, 3)))


def test_bfloat16_has_its_own_tolerance():
    good = [np.full(50, -1.0), np.array([-2.0])]
    metrics = asyncio.run(
        sync_of(good, [[np.full(50, -1.0), np.array([-2.2])]], "bfloat16")((0, 1))
    )
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
        await with_time_limit(60, "x", Method(TimeoutError("inner limit")).remote())

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
        asyncio.run(name_failures("sync, rollout 1", Method(RayLike(cause)).remote()))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("Worker exits unexpectedly.", r"^sync, rollout 1: its process died \(pid 41\)$"),
        (
            "The actor died because its node has died. Node Id: 5b",
            r"rollout 1: its node is lost, or the network to it: ",
        ),
    ],
)
def test_a_dead_process_is_named_and_a_lost_node_too(how, words):
    class ActorDiedError(Exception):
        pass

    died = ActorDiedError(
        f"The actor died unexpectedly.\n\tclass_name: Rank\n\tpid: 41\n\tip: 10.0.0.2\n{how}"
    )
    with pytest.raises(RoleError, match=words):
        asyncio.run(name_failures("sync, rollout 1", Method(died).remote()))


def test_a_role_in_the_replicas_pool_has_them_sleep_first(monkeypatch):
    import one_step_off.training.trainer_group as room

    monkeypatch.setattr(room, "put_batch", lambda batch: batch)
    told = []

    def said(what, answer):
        def answers(*_):
            told.append(what)
            return answer

        return Method(answers, delay=0.01)

    async def main():
        turn = asyncio.Lock()
        replica = Actor(rollout=said("generate", []), sleep=said("sleep", None))
        rollout = healthy(RolloutGroup([replica], Config(), True, turn))
        actor = TrainGroup("actor", [Actor(update=said("update", {}))], Config(), turn)
        actor.colocated = rollout
        prompts = [Prompt((0, 0), "", np.arange(2), "")]
        await asyncio.gather(
            rollout.generate(prompts, "step 0", rollout.train_sampling),
            actor.update(Batch(0, [], (0, 0))),
        )

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
        groups = [
            TrainGroup(role, [Actor(log_prob=Method(0))], Config(), turn)
            for role in ("actor", "ref")
        ]
        for group in groups:
            group.ranks[0].log_prob = Busy()
        batch = Batch(0, [], (0, 0))
        await asyncio.gather(*(g.log_prob(batch) for g in groups))
        return most[0]

    import one_step_off.training.trainer_group as room

    put, room.put_batch = room.put_batch, lambda batch: batch
    try:
        assert asyncio.run(main(shared=True)) == 1
        assert asyncio.run(main(shared=False)) == 2
    finally:
        room.put_batch = put


def test_what_a_replica_gets_at_a_time_is_one_call():
    """Unless somebody waits for each prompt."""
    for land, calls in ((None, [1, 1]), (lambda samples: None, [8, 8])):
        replicas = [Slow(0.05, slots=4), Slow(0.05, slots=4)]
        cfg = Config()
        cfg.rollout.n = 1
        group = RolloutGroup(replicas, cfg, False)
        prompts = [Prompt((0, row), np.arange(2), "", "") for row in range(16)]

        async def main(group=group, prompts=prompts, land=land):
            return await healthy(group).generate(prompts, "step 0", group.train_sampling, land)

        samples, seconds = asyncio.run(main())
        assert len(samples) == 16 and 0.09 < seconds < 2.0
        assert [r.calls for r in replicas] == calls and all(len(r.had) == 8 for r in replicas)
        assert [(load.sent, load.back) for load in group.loads] == [(8, 8)] * 2


def test_a_batch_goes_into_the_store_again_only_when_it_has_changed(monkeypatch):
    put = []
    monkeypatch.setattr("ray.put", lambda batch: put.append(batch) or len(put))
    batch = Batch(0, [a_sample(Prompt((0, 0), np.arange(2), "", ""), 0)], expected_stamp=(0, 0))
    assert [room.put_batch(batch), room.put_batch(batch)] == [1, 1], (
        "the reference model's and the critic's"
    )
    batch.advantages = [np.ones(1, np.float32)]
    assert [room.put_batch(batch), room.put_batch(batch)] == [2, 2] and put[1].advantages[0][
        0
    ] == 1.0
    batch.samples = [replace(batch.samples[0], loss_mask=np.zeros(1, bool))]
    assert (
        room.put_batch(batch) == 3
        and not put[2].samples[0].loss_mask.any()
        and put[2].stored == NOT_STORED
    )


def test_a_prompt_that_was_given_out_as_a_sync_began_goes_to_its_replica_behind_it():
    """The sync's call goes first then, and the replica has no verified weights until it has ended."""
    cfg, stale = Config(), []
    cfg.rollout.n = 1
    replica = Slow(0.001)
    group = healthy(RolloutGroup([replica], cfg, False))
    give, make = group._give, replica.make

    def at_that_moment(*args, **kwargs):
        yield from give(*args, **kwargs)
        if not stale:
            stale.append(True)
            group.syncing = True
            group.health[0].transition_to(ReplicaState.STALE)
            asyncio.get_running_loop().call_later(0.05, healthy, group)

    async def seen(prompts, sampling):
        assert group.health[0].state is ReplicaState.HEALTHY
        return await make(prompts, sampling)

    group._give, replica.rollout = at_that_moment, Method(seen)
    prompts = [Prompt((0, row), np.arange(2), "", "") for row in range(4)]
    samples, _ = asyncio.run(
        group.generate(prompts, "step 0", group.train_sampling, lambda samples: None)
    )
    assert len(samples) == 4 and stale and (group.loads[0].sent, group.loads[0].back) == (4, 4)


def test_a_replica_that_dies_behind_its_canary_is_not_taken_for_healthy():
    """Another's canary was still awaited then; a prompt under way told of the death."""
    right = [np.array([-1.0])]
    sync = sync_of(right, [right, right])
    rollout = sync.rollout

    def dies(sequences):
        rollout.health[0].state = ReplicaState.DEAD
        return right

    rollout.replicas[1].score = Method(dies)
    asyncio.run(sync((0, 4)))
    assert [health.state for health in rollout.health] == [ReplicaState.DEAD, ReplicaState.HEALTHY]


def test_with_partial_rollouts_prompts_have_the_time_of_all_steps_that_they_may_take():
    for land, enough in ((lambda samples: None, True), (None, False)):
        cfg = Config()
        cfg.trainer.step_timeout_s, cfg.rollout.n, cfg.pipeline.max_carry = 0.1, 1, 1
        group = healthy(RolloutGroup([Slow(0.2)], cfg, False))
        work = group.generate(
            [Prompt((0, 0), np.arange(2), "", "")], "step 0", group.train_sampling, land
        )
        if enough:
            assert len(asyncio.run(work)[0]) == 1
        else:
            with pytest.raises(PhaseTimeout, match="step 0, rollout: no answer in 0.1 s"):
                asyncio.run(work)
