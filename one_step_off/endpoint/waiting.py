"""Waits of the endpoint, and what its clients say of them."""

import asyncio
import contextlib

from aiohttp import web

from one_step_off.endpoint.refusals import Refused

MOST_WAIT_S = 60.0
DEFAULT_WAIT_S = 30.0
LONGEST_TIMER_S = 1e6


def seconds_to_wait(request: web.BaseRequest) -> float:
    """`wait` of a request's query. Raises Refused: it is no number of seconds."""
    text = request.query.get("wait", str(DEFAULT_WAIT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise Refused(400, "bad_request", f"wait={text[:40]!r}: send seconds, 0 to {MOST_WAIT_S:g}")
    return min(seconds, MOST_WAIT_S)


async def happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event is set within that time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(seconds, LONGEST_TIMER_S)):
            await event.wait()
    return event.is_set()
