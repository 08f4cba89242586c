"""Calls of Ray actors: every call has a time limit, and every failure names the process."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.config.schema import ConfigError
from one_step_off.data.samples import StalenessError

T = TypeVar("T")


OnSpan = Callable[[str, str, int, float, float], None]
"""Told of a role's work: (role, method, step, begin, end), in seconds of `now`."""


LIVENESS_TIMEOUT_S = 5.0  # and any process to answer on the thread that is never busy


MAX_ATTEMPTS = 3  # to start a lost one anew; and to have the same prompts answered


def now() -> float:
    """Seconds by the event loop's clock: on Linux that of time.perf_counter, unless a simulation counts its own."""
    return asyncio.get_running_loop().time()


async def with_time_limit(limit_s: float, what: str, work: Awaitable[T]) -> T:
    """Await `work`; raises PhaseTimeout naming `what` after `limit_s` seconds."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await work
    except TimeoutError as e:
        if not limit.expired():  # a time limit of the work's own
            raise
        raise PhaseTimeout(f"{what}: no answer in {limit_s:g} s") from e


async def name_failures(who: str, work: Awaitable[T]) -> T:
    """Await one process's answer; its failure is raised with `who` in front. ConfigError, StalenessError and SyncError
    keep their kind; anything else, its death included, is a RoleError."""
    try:
        return await work
    except Exception as e:
        # Ray wraps what a process raised, and puts that process's whole traceback into the message.
        cause = getattr(e, "cause", None) or e
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [""]
        if isinstance(cause, ConfigError):
            raise ConfigError(str(cause)) from e
        if isinstance(cause, (StalenessError, SyncError)):
            raise type(cause)(f"{who}: {cause}") from e
        if type(e).__name__ in ("ActorDiedError", "ActorUnavailableError"):
            if "its node has died" in str(cause):
                who += ": its node is lost, or the network to it"
            pid = next((line.split()[-1] for line in lines if line.startswith("pid:")), "unknown")
            raise ProcessDied(f"{who}: its process died (pid {pid})") from e
        raise RoleError(f"{who}: {type(cause).__name__}: {lines[0]}") from e


def call_all(
    limit_s: float,
    what: str,
    actors: list[Any],
    method: str,
    *args: Any,
    each: list[tuple] | None = None,
) -> Awaitable[list[Any]]:
    """Call a method on all actors at once, now, with `args` and with what is `each` one's own; awaiting it awaits all.
    The first failure is raised at once, and names the actor."""
    each = each or [()] * len(actors)
    sent = [getattr(a, method).remote(*args, *own) for a, own in zip(actors, each, strict=True)]
    calls = (name_failures(f"{what} {i}, {method}", answer) for i, answer in enumerate(sent))
    return with_time_limit(limit_s, f"{what}, {method}", asyncio.gather(*calls))


async def not_alive(processes: dict[str, Any]) -> dict[str, str]:
    """Which of these processes (name -> actor) are gone or stopped: name -> why. They are asked on a thread that is never
    busy: one that works, or waits for another one, answers."""

    async def why(who: str, actor: Any) -> str:
        try:
            await with_time_limit(LIVENESS_TIMEOUT_S, who, name_failures(who, actor.alive.remote()))
        except PhaseTimeout:
            return f"{who}: its process hangs, it did not answer in {LIVENESS_TIMEOUT_S:g} s"
        except Exception as e:
            return str(e)
        return ""

    reasons = await asyncio.gather(*(why(who, actor) for who, actor in processes.items()))
    return {who: reason for who, reason in zip(processes, reasons, strict=True) if reason}
