"""Waits of the endpoint, and what its clients say of them."""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from one_step_off.endpoint.refusals import Refused

MAX_WAIT_S = 60.0
DEFAULT_WAIT_S = 30.0
MAX_TIMER_S = 1e6

THREADS = ThreadPoolExecutor(2, "endpoint")
"""For work on requests that would block the event loop: a replica that does not answer is killed.
They are few, because what they do in Python makes the event loop wait for its turn."""

Result = TypeVar("Result")


async def in_thread(function: Callable[..., Result], *arguments: object) -> Result:
    """What a function returns. It runs in one of `THREADS`, with the caller's context variables."""
    run = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(THREADS, run, function, *arguments)


def seconds_to_wait(request: web.BaseRequest) -> float:
    """`wait` of a request's query. Raises Refused: it is no number of seconds."""
    text = request.query.get("wait", str(DEFAULT_WAIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise Refused(400, "bad_request", f"wait={text[:40]!r}: send seconds, 0 to {MAX_WAIT_S:g}")
    return min(seconds, MAX_WAIT_S)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(seconds, MAX_TIMER_S)):
            await event.wait()
    return event.is_set()
