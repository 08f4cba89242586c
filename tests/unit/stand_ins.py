"""Stand-ins for Ray actors; real ones are in the e2e tests."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import time
import warnings
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import numpy as np

from one_step_off.cluster.run_events import RunEvents, Span
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup


@functools.cache
def _trained_tokenizer(kind: str) -> Any:
    from one_step_off.models import tiny_qwen  # slow to import, and most tests need none

    return tiny_qwen.build_tokenizer(kind)


def tiny_tokenizer(kind: str = "") -> Any:
    """A copy of `tiny_qwen.build_tokenizer(kind)`, which trains it for a tenth of a second."""
    return copy.deepcopy(_trained_tokenizer(kind))


TRAINER_CONTROL = {"alive": None, "abort_sync": None, "fail_sync": None}
"""Methods that any trainer answers, however busy it is."""


class RecordedEvents(RunEvents):
    """Keeps what is reported.

    Attributes:
        lines: for the user.
        roles: (role, activity, step) of the spans.
        traced: spans for the timeline alone.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.roles: list[tuple[str, str, int]] = []
        self.traced: list[Span] = []

    def log(self, line: str) -> None:
        self.lines.append(line)

    def span(self, role: str, activity: str, step: int, begin: float, end: float) -> None:
        assert begin <= end
        self.roles.append((role, activity, step))

    def trace(self, spans: Iterable[Span]) -> None:
        self.traced += spans


class ActorMethod:
    """A method of an actor: called as actor.METHOD.remote(...), it answers after `delay` seconds.

    `answer`: an exception is raised, a function is called, anything else is returned.
    """

    def __init__(self, answer: Any, delay: float = 0.0) -> None:
        self.answer = answer
        self.delay = delay

    async def remote(self, *args: Any) -> Any:
        await asyncio.sleep(self.delay)
        if isinstance(self.answer, Exception):
            raise self.answer
        if not callable(self.answer):
            return self.answer
        answer = self.answer(*args)
        if asyncio.iscoroutine(answer):
            return await answer
        return answer


class StandInActor:
    """An actor with these methods; what is no `ActorMethod` becomes one."""

    def __init__(self, **methods: Any) -> None:
        for name, method in methods.items():
            if not isinstance(method, ActorMethod):
                method = ActorMethod(method)
            setattr(self, name, method)


def train_with(monkeypatch: Any, train: Callable[[Any, Any], Any]) -> None:
    """Let runs start no Ray, and train by calling `train(prepared, tracker)`."""
    from one_step_off.runtime import launch

    monkeypatch.setattr(launch, "ray_session", lambda cfg, tracker: contextlib.nullcontext())
    monkeypatch.setattr(launch, "run_with_restarts", train)


def asyncio_reports(main: Callable[[], Coroutine[Any, Any, Any]]) -> list[str]:
    """What asyncio prints of a program beside its own failure: failures that nobody has read, and
    coroutines that nobody has awaited."""
    reports = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reports.append(str(context)))
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await main()
        await asyncio.sleep(0.02)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(watched())
        gc.collect()
    never_awaited = [str(w.message) for w in caught if "never awaited" in str(w.message)]
    return reports + never_awaited


def make_prompts(*rows: int) -> list[Prompt]:
    return [Prompt((0, row), np.arange(2), "", "") for row in rows]


def one_token_sample(prompt: Prompt, index: int) -> Sample:
    return Sample(
        prompt.id,
        index,
        prompt.ids,
        response_ids=np.zeros(1, np.int32),
        log_probs=np.zeros(1, np.float32),
        loss_mask=np.ones(1, bool),
        versions=np.zeros(1, int),
    )


def mark_healthy(group: RolloutGroup) -> RolloutGroup:
    """As after a sync."""
    for health in group.supervisor.health:
        health.transition_to(ReplicaState.HEALTHY)
        health.reset_timeouts(time.monotonic())
    return group


class SlowReplica:
    """A replica that works on `slots` samples at once, and says that it has room for `capacity`.

    Each sample generates for `delay` seconds and is scored for `score_s`. The reward function
    raises for the row `failing_row`.
    """

    def __init__(
        self,
        delay: float,
        score_s: float = 0.0,
        slots: int = 256,
        failing_row: int = -1,
        capacity: int = 1024,
    ) -> None:
        self.delay = delay
        self.capacity = capacity
        self.score_s = score_s
        self.slots = asyncio.Semaphore(slots)
        self.failing_row = failing_row
        self.rollout = ActorMethod(self.generate)
        self.wait_for_capacity = ActorMethod(self.poll_capacity)
        self.start = ActorMethod((slots, []))
        self.ping = ActorMethod((0, 0))
        self.alive = ActorMethod(None)
        self.rows: list[int] = []
        self.received = 0
        self.idle = 0
        self.most_generating = 0
        self.last_generated = 0.0
        self.calls = 0
        self.cancelled = 0

    async def poll_capacity(self, sent: int, most: int) -> tuple[int, int]:
        most = min(most, self.capacity)
        while sent - self.idle >= most:
            await asyncio.sleep(0.001)
        return self.idle, most

    async def generate_one(self) -> None:
        async with self.slots:
            await asyncio.sleep(self.delay)
        self.idle += 1
        self.last_generated = time.perf_counter()

    async def generate(self, prompts: list[Prompt], sampling: Any) -> list[Sample]:
        rows = [prompt.id[1] for prompt in prompts]
        count = len(prompts) * sampling.n
        self.calls += 1
        self.rows += rows
        self.received += count
        self.most_generating = max(self.most_generating, self.received - self.idle)
        try:
            await asyncio.gather(*(self.generate_one() for _ in range(count)))
            if self.failing_row in rows:
                raise ValueError("bad reward")
            await asyncio.sleep(self.score_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [one_token_sample(p, i) for p in prompts for i in range(sampling.n)]
