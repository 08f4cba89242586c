"""Calls of Ray actors: every call has a time limit, and every failure names the process."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.config.errors import ConfigError
from one_step_off.data.staleness import StalenessError

T = TypeVar("T")

LIVENESS_TIMEOUT_S = 5.0
"""Seconds for a process to answer on the thread that is never busy."""

MAX_TRIES = 3
"""To restart a failed replica, to sync with one that fails, and to have the same prompts answered
by another one."""

DEATH_ERRORS = ("ActorDiedError", "ActorUnavailableError")
"""Names of Ray's exceptions for a process that is gone. By name: the classes differ between Ray's
releases."""


def now() -> float:
    """Seconds by the event loop's clock: on Linux that of time.perf_counter, unless a simulation
    counts its own."""
    return asyncio.get_running_loop().time()


def observed(work: Awaitable[T]) -> asyncio.Future[T]:
    """`work` as a task whose failure need not be read: its owner may be gone by then, because
    another failure has ended the run. asyncio would print such a failure with its traceback, after
    the message of the one that counts."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_read_failure)
    return task


def _read_failure(task: asyncio.Future) -> None:
    if not task.cancelled():
        task.exception()


async def with_time_limit(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """Await `work`. Raises PhaseTimeout, which names `what`, after `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # a time limit inside `work`
            raise
        raise PhaseTimeout(f"{what}: no answer in {limit_s:g} s") from error


async def name_failures(who: str, work: Awaitable[T]) -> T:
    """Await the answer of one process; a failure is raised with `who` in front of its message.

    Raises:
        ConfigError, StalenessError, SyncError: the process raised it; it keeps its kind.
        ProcessDied: the process is gone, or its node is; or a process on which it depends is gone,
            and it raised ProcessDied for that one.
        RoleError: the process raised anything else, maybe while it was created; the message names
            the exception.
    """
    try:
        return await work
    except Exception as error:
        raise _named_failure(who, error) from error


def _named_failure(who: str, error: Exception) -> Exception:
    """The exception that `name_failures` raises for `error`."""
    # Ray wraps what a process raised, and puts the process's whole traceback into the message.
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ConfigError):
        return ConfigError(str(cause))
    if isinstance(cause, (StalenessError, SyncError)):
        return type(cause)(f"{who}: {cause}")
    if isinstance(cause, ProcessDied):
        return ProcessDied(f"{who}: {cause}")
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        # Also where its class could not be imported. The last line is the exception.
        reason = lines[-1] if lines else type(cause).__name__
        return RoleError(f"{who}: its process could not be created: {reason}")
    if type(error).__name__ in DEATH_ERRORS:
        if "its node has died" in str(cause):
            who += ": its node, or the network to it, failed"
        pids = [line.split()[-1] for line in lines if line.startswith("pid:")]
        pid = pids[0] if pids else "unknown"
        return ProcessDied(f"{who}: its process died (pid {pid})")
    first_line = lines[0] if lines else ""
    return RoleError(f"{who}: {type(cause).__name__}: {first_line}")


def call_all(
    limit_s: float, what: str, actors: list[Any], method: str, *args: Any
) -> Awaitable[list[Any]]:
    """Call a method on all actors, before this returns; the result awaits all answers.

    Args:
        limit_s: seconds for all answers.
        what: names the group in errors; an actor is "`what` i".
        actors: Ray actor handles.
        method: name of the remote method.
        args: of the call, the same for all.

    Raises (when awaited):
        PhaseTimeout: after `limit_s` seconds.
        As `name_failures`: the first failure of any actor, at once.
    """
    return call_each(limit_s, what, actors, method, [args] * len(actors))


def call_each(
    limit_s: float, what: str, actors: list[Any], method: str, arguments: list[tuple]
) -> Awaitable[list[Any]]:
    """As `call_all`, with arguments of its own for each actor."""
    named_answers = []
    for i, (actor, args) in enumerate(zip(actors, arguments, strict=True)):
        answer = getattr(actor, method).remote(*args)
        named_answers.append(name_failures(f"{what} {i}, {method}", answer))
    answers = asyncio.gather(*named_answers)
    return observed(with_time_limit(limit_s, f"{what}, {method}", answers))


def store_once(value: Any) -> Any:
    """A reference to `value` in Ray's object store, to pass to many actors: it is copied once per
    node, and not per call. Without Ray (the actors are stand-ins in this process) `value`."""
    import ray

    return ray.put(value) if ray.is_initialized() else value


async def not_alive(processes: dict[str, Any]) -> dict[str, str]:
    """Which processes are gone or hang, of name -> actor. Returns name -> reason.

    They answer on a thread that is never busy, so a process that works or waits for another one
    counts as alive.
    """
    reasons = await asyncio.gather(*(_why_not_alive(*process) for process in processes.items()))
    return {who: reason for who, reason in zip(processes, reasons, strict=True) if reason}


async def _why_not_alive(who: str, actor: Any) -> str:
    """The reason why a process counts as failed; "" if it answers."""
    try:
        await with_time_limit(LIVENESS_TIMEOUT_S, who, name_failures(who, actor.alive.remote()))
    except PhaseTimeout:
        return f"{who}: its process hangs, it did not answer in {LIVENESS_TIMEOUT_S:g} s"
    except Exception as error:
        return str(error)
    return ""
