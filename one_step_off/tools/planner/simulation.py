"""The duration of a step, by the pipeline itself in simulated time: nothing is generated or
trained.

`Pipeline` and `RolloutGroup`, with its routing and device lock, are those of a real run. Only the
processes are stand-ins, whose calls sleep for modeled times. So the schedule is not modeled; the
durations are, see `work.Work`.
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
from one_step_off.data.samples import PolicyVersion, Prompt, Sample
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, RunGroups
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.sampling import Sampling
from one_step_off.tools.planner.shared_device import (
    SharedDevice,
)
from one_step_off.tools.planner.simulated_trainer import SimulatedSync, SimulatedTrainer
from one_step_off.tools.planner.work import Work
from one_step_off.weight_sync.overlap import DECIDING_STEPS, StepPhases, should_overlap

NO_TIME_LIMIT_S = 1e9
"""No phase reaches a time limit, and no replica is asked whether it is alive."""

END_TOLERANCE_TOKENS = 1e-6

# The arrays of a sample of one token.
ONE_ID = np.zeros(1, np.int32)
ONE_LOG_PROB = np.zeros(1, np.float32)
TRAINED_TOKEN = np.ones(1, bool)


@dataclass(frozen=True)
class _WaitingSequence:
    length: int
    done: asyncio.Future


@dataclass(frozen=True, order=True)
class _RunningSequence:
    """Ordered by the replica's position at which it ends; of equal ones the first that started."""

    end_position: float
    number: int
    done: asyncio.Future


class SimulatedReplica:
    """A replica that decodes by `Work`, called as a Ray actor: replica.METHOD.remote(...).

    Its samples have one token, with the stamp of the last sync; the length that was drawn, by
    prompt, is extra["tokens"].
    """

    def __init__(self, work: Work, seed: int, device: SharedDevice | None) -> None:
        """`device`: shared with the trainer; None: the replica has its own alone."""
        self.device = device
        if device:
            device.advance_replicas.append(self._advance)
        self.rollout = SimpleNamespace(remote=self._rollout)
        self.wait_for_capacity = SimpleNamespace(remote=self._wait_for_capacity)
        self.work = work
        self.seed = seed
        self.stamp: PolicyVersion = (0, -1)
        self._waiting: deque[_WaitingSequence] = deque()
        self._running: list[_RunningSequence] = []  # a heap
        self._started = 0
        self._position = 0.0  # tokens of a sequence that has run from the beginning
        self._position_time = 0.0  # when `_position` was computed
        self._timer: asyncio.TimerHandle | None = None
        self._ends = asyncio.Event()  # set for a moment when sequences end
        self._is_running = asyncio.Event()
        self._is_running.set()

    def pause(self) -> None:
        """Stop decoding, for a sync. Sequences keep their position."""
        self._advance()
        self._is_running.clear()
        if self._timer:
            self._timer.cancel()
        if self.device:
            self.device.set_generating(self, False)

    def resume(self, stamp: PolicyVersion) -> None:
        """Continue with the weights `stamp`. To compute the KV cache again costs nothing, as a
        prompt does."""
        self.stamp = stamp
        self._is_running.set()
        self._position_time = now()
        self._advance()

    async def _rollout(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        samples = []
        for prompt in prompts:
            for index, length in enumerate(self._drawn_lengths(prompt)):
                samples.append(self._sample(prompt, index, length))
        loop = asyncio.get_running_loop()
        ends = []
        for sample in samples:
            sequence = _WaitingSequence(sample.extra["tokens"], loop.create_future())
            self._waiting.append(sequence)
            ends.append(sequence.done)
        self._advance()
        await asyncio.gather(*ends)
        return samples

    def _drawn_lengths(self, prompt: Prompt) -> list[int]:
        """The lengths of a prompt's responses; they depend on nothing but seed and prompt."""
        rng = np.random.default_rng([self.seed, *prompt.id])
        row = rng.integers(len(self.work.lengths))
        return self.work.lengths[row].tolist()

    def _sample(self, prompt: Prompt, index: int, length: int) -> Sample:
        attempt, version = self.stamp
        return Sample(
            prompt_id=prompt.id,
            index=index,
            prompt_ids=prompt.ids,
            response_ids=ONE_ID,
            log_probs=ONE_LOG_PROB,
            loss_mask=TRAINED_TOKEN,
            versions=np.full(1, version, np.int32),
            attempt=attempt,
            reward=0.0,
            extra={"tokens": length},
        )

    async def _wait_for_capacity(self, sent: int, most: int) -> tuple[int, int]:
        """Wait until fewer than `most` of the `sent` sequences are unfinished; returns how many
        have ended, and `most`."""
        while sent - self._ended >= most:
            await self._is_running.wait()
            await self._ends.wait()
        return self._ended, most

    @property
    def _ended(self) -> int:
        return self._started - len(self._running)

    @property
    def _token_seconds(self) -> float:
        """Seconds in which all running sequences advance by a token."""
        alone = self.work.decode_s + self.work.sequence_s * len(self._running)
        return alone * self.device.replica_slowdown if self.device else alone

    def _advance(self) -> None:
        """Decode up to now, end sequences, start waiting ones, and come back at the next end."""
        if not self._is_running.is_set():
            return
        if self._running:
            self._position += (now() - self._position_time) / self._token_seconds
        self._position_time = now()
        while (
            self._running and self._running[0].end_position <= self._position + END_TOLERANCE_TOKENS
        ):
            heapq.heappop(self._running).done.set_result(None)
            self._ends.set()
        self._ends.clear()
        while self._waiting and len(self._running) < self.work.places:
            sequence = self._waiting.popleft()
            end_position = self._position + sequence.length
            heapq.heappush(
                self._running, _RunningSequence(end_position, self._started, sequence.done)
            )
            self._started += 1
        if self.device:
            self.device.set_generating(self, bool(self._running))
        if self._timer:
            self._timer.cancel()
        if self._running:
            tokens = self._running[0].end_position - self._position
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(tokens * self._token_seconds, self._advance)


def simulate(
    work: Work,
    rollout: int,
    trainer: int,
    staleness: int = 1,
    overlap: str = "true",
    static: bool = False,
    steps: int = 8,
    seed: int = 0,
    shared: bool = False,
    in_flight: str = "wait",
) -> dict[str, Any]:
    """Simulate a run. The same arguments give the same figures.

    Args:
        rollout: replicas on devices of their own; 0: colocated, each device alternates.
        trainer: ranks.
        staleness: see pipeline.staleness. 1: one step off; 0: synchronous.
        overlap: "true", "false" or "auto", see weight_sync.overlap. The figures of "auto" are those
            of the setting that it chooses.
        static: whether routing is static, see rollout.routing.
        steps: of the run; the first one is left out of the figures.
        seed: of the drawn response lengths.
        shared: one replica and one rank work at once on one device.
        in_flight: see weight_sync.in_flight; recompute and keep take the same time here.

    Returns:
        What `Tracker.summary` reports: median/time/step_s and the other medians in seconds,
        idle_share/rollout, idle_share/trainer, samples_per_s.

    Raises:
        StalenessError: a token was trained on that other weights made.
    """
    if overlap == "auto" and shared:
        overlap = "true"
    if overlap == "auto" and staleness and rollout:
        rest = (static, steps, seed, shared, in_flight)
        without = simulate(work, rollout, trainer, staleness, "false", *rest)
        if not _chooses_overlap(without):
            return without
        overlap = "true"
    cfg = _run_config(work, rollout, staleness, overlap, static, in_flight)
    device = SharedDevice() if shared else None
    with asyncio.Runner(loop_factory=simulated_loop) as runner:
        return runner.run(_run(work, cfg, rollout, trainer, steps, seed, device))


async def _run(
    work: Work, cfg: Config, rollout: int, trainer: int, steps: int, seed: int, device: Any
) -> dict[str, Any]:
    """One run in the simulated time of the present loop; arguments and result as `simulate`.
    `device`: what both sides use; None: each has its own alone."""
    replicas = [SimulatedReplica(work, seed, device) for _ in range(rollout or trainer)]
    pool_lock = None if rollout else asyncio.Lock()
    group = RolloutGroup(replicas, cfg, False, pool_lock)
    group.router.replica_capacity = min(group.router.replica_capacity, work.places)
    actor = SimulatedTrainer(work, trainer, group, device)
    sync = SimulatedSync(work, actor, group)
    prompts = [Prompt((0, row), ONE_ID, "", "") for row in range(work.prompts)]
    stream = PromptStream(prompts, work.prompts, False, seed, steps)
    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(folder, steps, io.StringIO())
        await Pipeline(cfg, RunGroups(actor, group, sync), stream, None, tracker).fit()
        return tracker.summary()


def step_with_lending(work: Work, figures: dict[str, Any], replicas: int, ranks: int) -> float:
    """Seconds of a step, at the least, if the trainer's GPUs generated whenever the trainer waits.

    They take over a part of the generation, each GPU as much as a replica in that time, after a
    weight sync of their own. What it takes to get the GPUs back counts nothing. No response gets
    shorter.

    Args:
        figures: of `simulate`, for `replicas` and `ranks` on devices of their own.
    """
    step_s = figures["median/time/step_s"]
    generate_s = figures["median/time/generate_s"]
    train_s = step_s * (1 - figures["idle_share/trainer"])
    begin_s = train_s + work.sync_s  # from here on the trainer's GPUs generate
    together_s = (replicas * generate_s + ranks * begin_s) / (replicas + ranks)
    longest_s = (work.decode_s + work.sequence_s) * work.lengths.max()
    exposed_s = max(0.0, step_s - max(generate_s, train_s))
    return min(step_s, max(together_s, train_s, longest_s) + exposed_s)


def _chooses_overlap(figures: dict[str, Any]) -> bool:
    """What weight_sync.overlap=auto chooses after steps with these figures, without overlap."""
    phases = StepPhases(
        generate_s=figures["median/time/generate_s"],
        train_s=figures["median/time/train_s"],
        sync_s=figures["median/time/sync_s"],
    )
    return should_overlap([phases] * DECIDING_STEPS, overlapped=False)


def _run_config(
    work: Work,
    rollout: int,
    staleness: int,
    overlap: str,
    static: bool,
    in_flight: str,
) -> Config:
    """The config of the simulated run. Arguments: of `simulate`."""
    cfg = Config()
    cfg.weight_sync.in_flight = in_flight
    cfg.pipeline.staleness = staleness
    cfg.weight_sync.overlap = overlap if rollout > 0 else "false"
    cfg.data.train_batch_size = work.prompts
    cfg.rollout.n = work.lengths.shape[1]
    cfg.rollout.routing = "static" if static else "least_loaded"
    cfg.rollout.heartbeat_s = NO_TIME_LIMIT_S
    cfg.rollout.heartbeat_timeout_s = NO_TIME_LIMIT_S
    cfg.trainer.step_timeout_s = NO_TIME_LIMIT_S
    return cfg


class SimulatedClock(selectors.DefaultSelector):
    """Adds to `seconds` what an event loop would have waited for."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list:
        """Return at once; nothing outside of the simulation calls.

        Raises:
            RuntimeError: there is no timer, so nothing would ever happen again.
        """
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that no task will cause")
        self.seconds += max(0.0, timeout)
        return super().select(0)


def simulated_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose time, from 0, jumps to the next timer when no task is ready."""
    clock = SimulatedClock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.seconds
    return loop
