"""What a step would take, by the pipeline itself on a clock that is counted: nothing is generated, trained or waited for.

`Pipeline` and `RolloutGroup`, with its routing and turns, are those of a real run. Only who works is a stand-in, whose
calls sleep for modelled times, on an event loop whose clock jumps to the next timer as soon as nobody has anything left to
do. So the schedule is not modelled; the durations are, see `Work`.
"""

import asyncio
import heapq
import io
import selectors
import tempfile
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from one_step_off.cluster.remote_calls import now
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Batch, Prompt, Sample, Stamp
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Roles
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.sampling import Sampling

LONGEST_S = 1e9  # no phase is to meet a limit of time, and nobody is asked whether he is there
NO_IDS, ZERO, TRAINED = (
    np.zeros(1, np.int32),
    np.zeros(1, np.float32),
    np.ones(1, bool),
)  # of one token


@dataclass(frozen=True)
class Work:
    """What a step has to do, and how many seconds that takes.

    Each of `prompts` has response lengths drawn from the rows of `lengths` (tokens, int [groups, n]; a row is one
    prompt's), and is of `prompt_tokens` itself.
    Generation: all sequences at work in a replica, `busy` of them, advance by one token in decode_s + sequence_s * busy:
    reading the weights costs the same for one as for many, the rest goes by sequences. At most `places` are at work at
    once, the others wait (vLLM's continuous batching in first order; prompts cost nothing apart). So the longest response
    takes decode_s a token at least, however many replicas there are.
    Training, log-probs and the driver's part included: train_fixed_s + train_token_s * tokens / ranks, of the tokens of
    prompts and responses; the first optimiser step comes after the share `before_step` of it.
    The sync: sync_s for the replicas; in the first canary_s of it the trainer is busy too, with its half of the canary.
    Handing devices over, where all take turns, costs nothing.
    """

    prompts: int
    lengths: np.ndarray
    prompt_tokens: float
    decode_s: float
    sequence_s: float
    train_fixed_s: float
    train_token_s: float
    sync_s: float
    canary_s: float = 0.0
    before_step: float = 1.0
    places: int = 256


class Clock(selectors.DefaultSelector):
    """Counts `seconds` where an event loop would wait so long."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list:
        """Nobody calls from outside. Raises RuntimeError: there is no timer, so nothing would ever happen again."""
        if timeout is None:
            raise RuntimeError("the simulation waits for what nobody does")
        self.seconds += max(0.0, timeout)
        return super().select(0)


def counted_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose time, from 0, jumps to the next timer where nobody has anything to do."""
    loop = asyncio.SelectorEventLoop(clock := Clock())
    loop.time = lambda: clock.seconds
    return loop


class Replica:
    """A replica that decodes by `Work`, called as an actor of Ray: replica.METHOD.remote(...). Its samples are one token
    long, which has the stamp of the last sync; the length that was drawn, by prompt, is extra["tokens"]."""

    def __init__(self, work: Work, seed: int) -> None:
        self.rollout, self.wait_for_capacity = (
            SimpleNamespace(remote=self._rollout),
            SimpleNamespace(remote=self._vacancy),
        )
        self.work, self.seed, self.stamp = work, seed, (0, -1)
        self.waiting: deque[tuple[float, asyncio.Future]] = deque()
        self.at_work: list[
            tuple[float, int, asyncio.Future]
        ] = []  # a heap: by the position at which each ends
        self.position = self.since = (
            0.0  # tokens that a sequence at work from the beginning would have; as of when
        )
        self.timer, self.taken = None, 0

    async def _rollout(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        samples, version = [], np.full(1, self.stamp[1], np.int32)
        for prompt in prompts:
            row = np.random.default_rng([self.seed, *prompt.id]).integers(len(self.work.lengths))
            for i, length in enumerate(self.work.lengths[row].tolist()):
                given = prompt.id, i, prompt.ids, NO_IDS, ZERO, TRAINED, version, self.stamp[0]
                samples.append(Sample(*given, reward=0.0, extra={"tokens": length}))
        ends = [asyncio.get_running_loop().create_future() for _ in samples]
        self.waiting.extend((s.extra["tokens"], end) for s, end in zip(samples, ends, strict=True))
        self._go_on()
        await asyncio.gather(*ends)
        return samples

    async def _vacancy(self, sent: int, most: int) -> int:
        while sent - (self.taken - len(self.at_work)) >= most:
            await asyncio.wait(
                [end for _, _, end in self.at_work], return_when=asyncio.FIRST_COMPLETED
            )
        return self.taken - len(self.at_work)

    def _go_on(self) -> None:
        """Count what was decoded since the last time, let go who is done and in who waits, and come back at the next end."""
        w, loop = self.work, asyncio.get_running_loop()
        self.position += (
            (now() - self.since) / (w.decode_s + w.sequence_s * len(self.at_work))
            if self.at_work
            else 0.0
        )
        self.since = now()
        while self.at_work and self.at_work[0][0] <= self.position + 1e-6:
            heapq.heappop(self.at_work)[2].set_result(None)
        while self.waiting and len(self.at_work) < w.places:
            length, end = self.waiting.popleft()
            heapq.heappush(self.at_work, (self.position + length, self.taken, end))
            self.taken += 1
        if self.timer:
            self.timer.cancel()
        if self.at_work:
            seconds = (self.at_work[0][0] - self.position) * (
                w.decode_s + w.sequence_s * len(self.at_work)
            )
            self.timer = loop.call_later(seconds, self._go_on)


class Trainer:
    """All ranks of a trainer that trains by `Work`, and its end of the sync to these replicas."""

    def __init__(self, work: Work, ranks: int, rollout: RolloutGroup) -> None:
        self.work, self.ranks, self.rollout = work, ranks, rollout
        self.turn = rollout.pool_lock if rollout.shares_pool else asyncio.Lock()
        self.sent = asyncio.Event()  # the weights may change

    async def _busy(self, seconds: float) -> None:
        async with self.turn:
            await asyncio.sleep(seconds)

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One step; its optimiser waits until the replicas have the weights, where they are sent meanwhile."""
        w, tokens = (
            self.work,
            sum(s.extra["tokens"] + self.work.prompt_tokens for s in batch.samples),
        )
        seconds = w.train_fixed_s + w.train_token_s * tokens / self.ranks
        await self._busy(seconds * w.before_step)
        begin = now()
        await self.sent.wait()
        waited = now() - begin
        await self._busy(seconds * (1 - w.before_step))
        self.sent.clear()
        return {"actor/sync_wait_s": waited}

    def score_canary(self) -> asyncio.Task:
        """The trainer's half of the canary, before anything that it is asked for later."""
        return asyncio.ensure_future(self._busy(self.work.canary_s))

    async def fail(self, error: BaseException) -> None:
        """No process waits here."""

    async def __call__(
        self, stamp: Stamp, expected: asyncio.Task | None = None
    ) -> dict[str, float]:
        """A sync."""
        begin = now()
        await (expected or self.score_canary())
        await asyncio.sleep(self.work.sync_s - self.work.canary_s)
        for i, replica in enumerate(self.rollout.replicas):
            replica.stamp, self.rollout.supervisor.health[i].state = stamp, ReplicaState.HEALTHY
        self.sent.set()
        return {"time/sync_s": now() - begin}


def simulate(
    work: Work, rollout: int, trainer: int, staleness: int = 1, overlap: bool = True, static: bool = False,
    steps: int = 8, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """So many steps of `rollout` replicas and `trainer` ranks on devices of their own; of no replicas: all devices belong
    to both in turns, a replica and a rank on each. `overlap` of the sync, `static` routing: see the config.

    Returns what `Tracker.summary` says of them: median/time/step_s and the other medians in seconds, idle_share/rollout,
    idle_share/trainer, samples_per_s. The first step is left out, as there. The same arguments give the same figures.
    Raises StalenessError: a token was trained on that other weights made."""
    cfg = Config()
    cfg.pipeline.staleness, cfg.weight_sync.overlap = staleness, overlap and rollout > 0
    cfg.rollout.n, cfg.rollout.routing = (
        work.lengths.shape[1],
        "static" if static else "least_loaded",
    )
    cfg.rollout.heartbeat_s = cfg.rollout.heartbeat_timeout_s = cfg.trainer.step_timeout_s = (
        LONGEST_S
    )
    prompts = [Prompt((0, row), NO_IDS, "", "") for row in range(work.prompts)]

    async def run(folder: str) -> dict[str, Any]:
        actors = [Replica(work, seed) for _ in range(rollout or trainer)]
        group = RolloutGroup(actors, cfg, False, None if rollout else asyncio.Lock())
        group.router.replica_capacity = min(group.router.replica_capacity, work.places)
        actor = Trainer(work, trainer, group)
        stream, tracker = (
            PromptStream(prompts, work.prompts, False, seed, steps),
            Tracker(folder, steps, io.StringIO()),
        )
        await Pipeline(cfg, Roles(actor, group, actor), stream, None, tracker).fit()
        return tracker.summary()

    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=counted_loop) as runner,
    ):
        return runner.run(run(folder))
