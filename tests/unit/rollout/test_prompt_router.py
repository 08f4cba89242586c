"""Which replica gets which prompt, and in which order samples come back."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from one_step_off.cluster.errors import PhaseTimeout, RoleError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Sample
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from tests.unit.stand_ins import (
    ActorMethod,
    RecordedEvents,
    SlowReplica,
    StandInActor,
    make_prompts,
    mark_healthy,
    one_token_sample,
)


def group_of(
    replicas: list, routing: str = "least_loaded", n: int = 1, seeded: bool = False
) -> RolloutGroup:
    cfg = Config()
    cfg.rollout.routing = routing
    cfg.rollout.n = n
    return mark_healthy(RolloutGroup(replicas, cfg, seeded))


def generate(
    routing: str,
    replicas: list[SlowReplica],
    rows: int,
    n: int,
    seeded: bool = False,
    max_concurrency: int | None = None,
) -> tuple[list[Sample], float]:
    """(samples, seconds) of one call for `rows` prompts."""
    cfg = Config()
    cfg.rollout.routing = routing
    cfg.rollout.n = n
    if max_concurrency is not None:
        cfg.agent.max_concurrency = max_concurrency
    group = RolloutGroup(replicas, cfg, seeded)

    async def main():
        await group.setup()
        mark_healthy(group)
        return await group.generate(make_prompts(*range(rows)), "step 0", group.train_sampling)

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
def test_new_prompts_go_to_the_least_loaded_replica_unless_a_run_must_repeat(
    routing, seeded, static
):
    fast = SlowReplica(0.01)
    slow = SlowReplica(0.5)
    samples, seconds = generate(routing, [fast, slow], 12, 2, seeded, max_concurrency=4)
    order = [(sample.prompt_id[1], sample.index) for sample in samples]
    assert order == [(row, i) for row in range(12) for i in range(2)]
    if static:
        assert fast.rows == [0, 2, 4, 6, 8, 10]
        assert slow.rows == [1, 3, 5, 7, 9, 11]
    else:
        assert len(fast.rows) >= 8
        # A prompt of two trajectories goes to a replica on which at most three generate.
        assert max(fast.most_generating, slow.most_generating) <= 5
        assert seconds >= 0.5


def test_slow_rewards_keep_no_replica_from_its_next_prompts():
    replicas = [SlowReplica(0.02, score_s=2.0), SlowReplica(0.02, score_s=2.0)]
    begin = time.perf_counter()
    samples, _ = generate("least_loaded", replicas, 32, 2, max_concurrency=4)
    assert len(samples) == 64
    last_generated = max(replica.last_generated for replica in replicas)
    assert last_generated - begin < 1.9, "before the first one is scored"


def test_a_slow_replica_gets_less_and_all_is_done_earlier_with_the_default_concurrency():
    seconds = {}
    for routing in ("static", "least_loaded"):
        fast = SlowReplica(0.05)
        slow = SlowReplica(0.5)
        samples, seconds[routing] = generate(routing, [fast, slow], 256, 8)
        assert len(samples) == 256 * 8
        if routing == "static":
            assert len(fast.rows) == len(slow.rows) == 128
        else:
            assert len(fast.rows) > 2 * len(slow.rows) > 0
    assert seconds["least_loaded"] < 0.7 * seconds["static"]


def test_each_prompt_goes_to_the_replica_with_the_fewest_generating():
    """What an earlier call left on a replica counts, and what has come back does not."""
    slow = SlowReplica(0.3)
    fast = SlowReplica(0.01)
    group = group_of([slow, fast])

    async def main():
        first_call = group.generate(make_prompts(0, 1, 2), "step 0", group.train_sampling)
        first = asyncio.create_task(first_call)
        await asyncio.sleep(0.1)
        await group.generate(make_prompts(3, 4), "validation", group.val_sampling)
        assert slow.rows == [0, 2]
        assert fast.rows == [1, 3, 4]
        await first
        await group.generate(make_prompts(5, 6), "step 1", group.train_sampling)
        assert slow.rows == [0, 2, 5]
        assert fast.rows == [1, 3, 4, 6]

    asyncio.run(main())


def test_no_replica_gets_more_than_it_has_room_for_from_the_first_prompts_on():
    """One that has said nothing yet gets none: what it has no room for would wait in it."""
    replicas = [SlowReplica(0.05, capacity=4) for _ in range(2)]
    samples, _ = generate("least_loaded", replicas, 16, 2)
    assert len(samples) == 32
    assert [replica.most_generating for replica in replicas] == [4, 4]


def test_a_replica_that_answers_late_gets_its_share_of_the_first_prompts():
    late = SlowReplica(0.05)
    late.wait_for_capacity = ActorMethod(late.poll_capacity, delay=0.3)
    replicas = [SlowReplica(0.05), late]
    generate("least_loaded", replicas, 16, 2)
    assert [len(replica.rows) for replica in replicas] == [8, 8]


def test_prompts_count_before_their_call_is_made():
    """Two calls in one tick, as of an evaluation and of the next samples, do not both choose the
    same replica."""
    cfg = Config()
    cfg.rollout.routing = "least_loaded"
    cfg.rollout.n = 4
    cfg.rollout.val_n = 4
    replicas = [SlowReplica(0.01), SlowReplica(0.01)]
    group = mark_healthy(RolloutGroup(replicas, cfg, False))

    async def main():
        await asyncio.gather(
            group.generate(make_prompts(0), "step 0", group.val_sampling),
            group.generate(make_prompts(1), "step 1", group.train_sampling),
        )

    asyncio.run(main())
    assert [replica.rows for replica in replicas] == [[0], [1]]


def test_a_failing_reward_ends_a_step_before_the_other_prompts_are_sent():
    replicas = [
        SlowReplica(0.05, score_s=30, failing_row=0),
        SlowReplica(0.05, score_s=30),
    ]
    begin = time.perf_counter()
    with pytest.raises(RoleError, match="^step 0, rollout 0: ValueError: bad reward$"):
        generate("least_loaded", replicas, 400, 1, max_concurrency=4)
    assert time.perf_counter() - begin < 5
    assert sum(len(replica.rows) for replica in replicas) < 20
    calls = sum(replica.calls for replica in replicas)
    cancelled = sum(replica.cancelled for replica in replicas)
    assert cancelled == calls - 1


def test_samples_come_back_in_the_order_of_prompts_whatever_the_replicas_do():
    prompts = make_prompts(5, 3, 8, 1, 9)
    cfg = Config()

    def rollout(share, sampling):
        indices = range(sampling.n)
        return [one_token_sample(p, i) for p in reversed(share) for i in reversed(indices)]

    replicas = [StandInActor(rollout=rollout) for _ in range(3)]
    group = mark_healthy(RolloutGroup(replicas, cfg, seeded=True))
    samples, seconds = asyncio.run(group.generate(prompts, "step 0", group.train_sampling))
    order = [(sample.prompt_id, sample.index) for sample in samples]
    assert order == [(prompt.id, i) for prompt in prompts for i in range(cfg.rollout.n)]
    assert 0.0 < seconds < 5.0


def test_evaluation_has_other_seeds_than_training():
    group = RolloutGroup([], Config(), seeded=True)
    assert group.train_sampling.seed != group.val_sampling.seed


@pytest.mark.parametrize(("wants_each", "calls"), [(False, 1), (True, 8)])
def test_a_replica_gets_its_prompts_in_one_call_unless_each_is_waited_for(wants_each, calls):
    replicas = [SlowReplica(0.05, slots=4), SlowReplica(0.05, slots=4)]
    group = group_of(replicas)
    on_group = (lambda samples: None) if wants_each else None
    work = group.generate(make_prompts(*range(16)), "step 0", group.train_sampling, on_group)
    samples, seconds = asyncio.run(work)
    assert len(samples) == 16
    assert 0.09 < seconds < 2.0
    for replica, load in zip(replicas, group.router.loads, strict=True):
        assert replica.calls == calls
        assert len(replica.rows) == 8
        assert load.sent == 8
        assert load.returned == 8


def test_a_prompt_that_was_routed_as_a_sync_began_goes_to_its_replica_behind_it():
    """The sync's call goes first then, and the replica has no verified weights until it has
    ended."""
    replica = SlowReplica(0.001)
    group = group_of([replica])
    health = group.supervisor.health[0]
    route = group.router.route
    generate_on_replica = replica.generate
    syncs = []

    def route_as_a_sync_begins(*args, **kwargs):
        yield from route(*args, **kwargs)
        if not syncs:
            syncs.append(True)
            group.supervisor.syncing = True
            health.transition_to(ReplicaState.STALE)
            asyncio.get_running_loop().call_later(0.05, mark_healthy, group)

    async def generate_if_healthy(prompts, sampling):
        assert health.state is ReplicaState.HEALTHY
        return await generate_on_replica(prompts, sampling)

    group.router.route = route_as_a_sync_begins
    replica.rollout = ActorMethod(generate_if_healthy)
    prompts = make_prompts(*range(4))
    work = group.generate(prompts, "step 0", group.train_sampling, lambda samples: None)
    samples, _ = asyncio.run(work)
    assert len(samples) == 4
    assert syncs
    assert group.router.loads[0].sent == 4
    assert group.router.loads[0].returned == 4


@pytest.mark.parametrize("is_pool", [True, False])
@pytest.mark.parametrize("staleness", [1, 3])
def test_prompts_have_the_time_of_all_steps_that_they_may_take(is_pool, staleness):
    group = group_of([SlowReplica(1.5)])
    group.cfg.trainer.step_timeout_s = 1.0
    group.cfg.pipeline.staleness = staleness
    on_group = (lambda samples: None) if is_pool else None
    work = group.generate(make_prompts(0), "step 0", group.train_sampling, on_group)
    if is_pool or staleness > 1:
        samples, _ = asyncio.run(work)
        assert len(samples) == 1
    else:
        with pytest.raises(PhaseTimeout, match="step 0, rollout: no answer in 1 s"):
            asyncio.run(work)


def test_the_spans_of_a_call_name_its_replica_and_step():
    group = group_of([SlowReplica(0.01), SlowReplica(0.01)])
    events = RecordedEvents()
    group.events = events
    asyncio.run(group.generate(make_prompts(0, 1), "step 3", group.train_sampling))
    asyncio.run(group.generate(make_prompts(2), "evaluation of v4", group.val_sampling))
    lanes = [(lane, kind, step) for lane, kind, step, _, _ in events.traced]
    assert lanes == [
        ("rollout 0", "generate", "3"),
        ("rollout 1", "generate", "3"),
        ("rollout 0 evaluation", "evaluate", "4"),
    ]
    assert all(begin < end for *_, begin, end in events.traced)
    assert np.ptp([begin for *_, begin, _ in events.traced]) < 5, "seconds since the epoch"
