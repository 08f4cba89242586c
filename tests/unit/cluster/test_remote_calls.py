"""Calls of Ray actors: time limits, and failures that name the process."""

from __future__ import annotations

import asyncio
import time

import pytest

from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.cluster.remote_calls import call_all, name_failures, with_time_limit
from one_step_off.config.errors import ConfigError
from one_step_off.data.staleness import StalenessError
from one_step_off.weight_sync.sync_calls import SyncCall, run_or_abort
from tests.unit.stand_ins import ActorMethod, StandInActor, asyncio_reports


def test_a_limit_names_what_it_waited_for():
    begin = time.perf_counter()
    with pytest.raises(PhaseTimeout, match=r"step 3, actor: no answer in 0\.05 s"):
        asyncio.run(with_time_limit(0.05, "step 3, actor", asyncio.sleep(60)))
    assert time.perf_counter() - begin < 5


def test_the_first_failure_does_not_wait_for_the_slow_ones():
    slow = StandInActor(work=ActorMethod(1, delay=30))
    failing = StandInActor(work=ValueError("rank 1 broke"))

    async def main():
        await call_all(60, "actor", [slow, failing], "work")

    begin = time.perf_counter()
    with pytest.raises(RoleError, match="actor 1, work: ValueError: rank 1 broke"):
        asyncio.run(main())
    assert time.perf_counter() - begin < 5


def test_a_time_limit_of_the_work_itself_is_not_taken_for_ours():
    async def main():
        work = ActorMethod(TimeoutError("inner limit")).remote()
        await with_time_limit(60, "x", work)

    with pytest.raises(TimeoutError, match="inner limit"):
        asyncio.run(main())


class RayLikeError(Exception):
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
        (ProcessDied("its engine"), ProcessDied, "^sync, rollout 1: its engine$"),
        (MemoryError("out\nof memory"), RoleError, "^sync, rollout 1: MemoryError: out$"),
    ],
)
def test_a_failure_in_a_process_is_named_and_keeps_its_kind(cause, kind, words):
    work = ActorMethod(RayLikeError(cause)).remote()
    with pytest.raises(kind, match=words):
        asyncio.run(name_failures("sync, rollout 1", work))


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Worker exits unexpectedly.", r"^sync, rollout 1: its process died \(pid 41\)$"),
        (
            "The actor died because its node has died. Node Id: 5b",
            r"rollout 1: its node, or the network to it, failed: ",
        ),
    ],
)
def test_a_dead_process_is_named_and_a_lost_node_too(reason, words):
    class ActorDiedError(Exception):
        pass

    details = "class_name: Rank\n\tpid: 41\n\tip: 10.0.0.2"
    died = ActorDiedError(f"The actor died unexpectedly.\n\t{details}\n{reason}")
    with pytest.raises(RoleError, match=words):
        asyncio.run(name_failures("sync, rollout 1", ActorMethod(died).remote()))


def test_an_exception_in_the_creation_of_a_process_is_not_its_death():
    """Ray raises the same error for both. A class that cannot be imported is such an exception."""

    class ActorDiedError(Exception):
        actor_init_failed = True

    traceback = (
        "ray::Rank.__init__() (pid=41)\n  File x\nModuleNotFoundError: No module named 'x'\n"
    )
    failed = ActorDiedError(f"The actor died because of an error in its creation task, {traceback}")
    words = "^actor 0, setup: its process could not be created: ModuleNotFoundError: No module"
    with pytest.raises(RoleError, match=words) as caught:
        asyncio.run(name_failures("actor 0, setup", ActorMethod(failed).remote()))
    assert not isinstance(caught.value, ProcessDied)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_answers_that_nobody_waits_for_any_more_are_not_reported(seconds):
    """Another failure has ended the step, and asyncio must not print tracebacks after it."""

    async def main():
        failing = StandInActor(work=ActorMethod(ValueError("broke"), delay=seconds))
        call_all(60, "actor", [failing, failing], "work")
        await asyncio.sleep(2 * seconds)

    assert asyncio_reports(main) == []


def test_answers_of_a_task_that_never_began_are_not_reported():
    async def main():
        failing = StandInActor(work=ValueError("broke"))

        async def use(answers):
            await answers

        asyncio.create_task(use(call_all(60, "actor", [failing], "work"))).cancel()

    assert asyncio_reports(main) == []


@pytest.mark.parametrize("failures", [1, 2])
def test_the_calls_of_a_sync_that_is_cancelled_are_not_reported(failures):
    async def main():
        answers = [ActorMethod(ValueError("broke"), delay=0.01).remote() for _ in range(failures)]
        answers.append(ActorMethod(None, delay=0.01).remote())
        calls = [SyncCall(f"rank {i}", None, answer) for i, answer in enumerate(answers)]

        async def abort(error: Exception) -> None:
            await asyncio.sleep(60)

        sync = asyncio.create_task(run_or_abort("sync", calls, 60, 60, abort))
        await asyncio.sleep(0.005)
        time.sleep(0.02)  # the answers and the cancellation come at once
        sync.cancel()
        await sync

    assert asyncio_reports(main) == []
