"""The state machine of one replica."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from one_step_off.rollout.health import ReplicaHealth, ReplicaState


@given(st.lists(st.sampled_from(ReplicaState), max_size=40))
def test_a_dead_replica_serves_only_after_a_start_and_a_sync(wanted):
    """Whatever is tried: HEALTHY after DEAD only by way of STALE, and SUSPECT only from HEALTHY."""
    health = ReplicaHealth(1.0, 1.0)
    states = [health.state]
    for state in wanted:
        try:
            health.transition_to(state)
            states.append(state)
        except ValueError as e:
            assert str(e) == f"a {states[-1].name} replica never becomes {state.name}"
        assert health.state is states[-1]
    for before, after in itertools.pairwise(states):
        if before is ReplicaState.DEAD:
            assert after in (ReplicaState.STALE, ReplicaState.DEAD, ReplicaState.LEFT)
        if before is ReplicaState.LEFT:
            assert after is ReplicaState.DEAD
        if after is ReplicaState.SUSPECT:
            assert before is ReplicaState.HEALTHY
        if before is ReplicaState.ASLEEP:
            assert after in (ReplicaState.STALE, ReplicaState.DEAD), "it serves after a sync"


def test_silence_makes_a_replica_suspect_and_then_failed_and_an_answer_clears_it():
    health = ReplicaHealth(heartbeat_timeout_s=60, progress_timeout_s=600)
    health.transition_to(ReplicaState.HEALTHY)
    health.reset_timeouts(100.0)
    health.heartbeat_missed()
    assert health.state is ReplicaState.SUSPECT
    assert not health.failure_reason(159.0)
    health.heartbeat(159.5, finished_requests=4, running_requests=2)
    assert health.state is ReplicaState.HEALTHY
    assert not health.failure_reason(219.0)
    assert health.failure_reason(220.0) == "no heartbeat in 60 s"


def test_a_busy_replica_that_finishes_nothing_has_failed_but_an_idle_one_has_not():
    busy = ReplicaHealth(60, 600)
    idle = ReplicaHealth(60, 600)
    for health in (busy, idle):
        health.transition_to(ReplicaState.HEALTHY)
        health.reset_timeouts(0.0)
    for now_s in range(0, 1300, 50):
        finished_by_busy = 7 if now_s < 650 else 8
        busy.heartbeat(now_s, finished_by_busy, running_requests=3)
        idle.heartbeat(now_s, 7, running_requests=0)
        assert not idle.failure_reason(now_s)
        expected = 600 < now_s < 650 or now_s > 1250
        assert bool(busy.failure_reason(now_s)) == expected, now_s
    assert busy.failure_reason(1251.0) == "it has requests, and finished none in 600 s"
