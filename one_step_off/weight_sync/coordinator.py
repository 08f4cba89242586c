"""The trainer's weights into every replica: verified by checksum, by name and by canary, or the run stops.

Whatever fails in a sync ends it for all: the driver aborts the epoch, so that no process waits for one that failed. Then
it asks every process on a thread that is never busy whether it is there, and decides:

- a trainer is gone or hangs: ProcessDied, and the attempt ends;
- replicas are gone or hang: they are restarted in the background, the groups are created again without them, and the
  others receive the whole sync again, from whatever state the broken one left them in;
- all processes are well: the failure itself is raised, since the sync is not exact (checksum, plan, canary).

A restarted replica gets the weights that were sent last, from what the senders keep of them, and serves when its canary
has passed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from one_step_off.cluster.errors import GIVEN_UP, PhaseTimeout, ProcessDied, SyncError, TrainerDied
from one_step_off.cluster.remote_calls import MAX_ATTEMPTS, call_all, name_failures, not_alive
from one_step_off.config.schema import Config
from one_step_off.data.samples import Stamp
from one_step_off.distributed_util import connect_limit
from one_step_off.weight_sync.bucket_plan import BucketPlan, pieces_of_senders

ABORT_S = 5.0  # for the trainers to take an abort
QUICK_S = (
    2.0  # after it, until processes that have not ended their part are asked whether they are there
)
SETTLE_S = (
    12.0  # then, for those that are, to end what cannot be interrupted; one that does not hangs
)
SLOWEST_LINK = 50e6  # bytes/s: a sync slower than this counts as stuck
MOST_TOLD = 64  # processes of one sync that are told of: those that took longest
MOST_DRAWN = 1000  # spans of theirs in the timeline
SENDING = "gather", "checksum", "encode", "keep", "wire"  # phases of a sender
RECEIVING = "pause", "prepare", "wait", "apply", "verify", "load", "finish"  # and of a vLLM worker


class Trainers(Protocol):
    """The part of the actor's `TrainGroup` that a sync uses."""

    ranks: list[Any]
    cfg: Config

    def score(self, sequences: list[np.ndarray]) -> Awaitable[list[np.ndarray]]:
        """The trainer's log-probs of the canary's tokens at its current weights."""
        ...


class Replicas(Protocol):
    """The part of `RolloutGroup` that a sync uses."""

    replicas: list[Any]
    cfg: Config
    syncing: bool
    restore: Callable[[int], Awaitable[bool]] | None

    @property
    def active(self) -> list[int]:
        """The replicas that take part in syncs."""
        ...

    async def wait_for_any_replica(self) -> None:
        """Wait until there is a replica for a sync. Raises NoReplica."""
        ...

    def mark_stale(self) -> None:
        """No active replica holds verified weights from here on."""
        ...

    def mark_synced(self, number: int, replica: Any) -> None:
        """This process holds verified weights, unless it was replaced or has died since."""
        ...

    def mark_failed(self, i: int, why: str) -> None:
        """Restart a replica in the background."""
        ...

    def exclude(self, i: int, why: str) -> None:
        """Give a replica up for good."""
        ...


@dataclass
class Call:
    """What one process does for a sync. `replica`: its number; None: it is a trainer."""

    who: str
    actor: Any
    answer: Awaitable[Any]
    replica: int | None = None


class BrokenSync(Exception):
    """A part of a sync failed, and the sync was aborted. `error`: the first failure. `hanging`: those that did not end."""

    def __init__(self, error: Exception, hanging: list[Call]) -> None:
        super().__init__(str(error))
        self.error, self.hanging = error, hanging


class WeightSync:
    """Brings every replica to the trainer's weights."""

    def __init__(
        self,
        actor: Trainers,
        rollout: Replicas,
        canary: list[np.ndarray],
        host: str,
        near: list[list[int]],
    ) -> None:
        """`near`: per rank of the actor the replicas on its device; they need no network."""
        self.actor = actor
        self.rollout: Any = rollout
        self.canary = canary
        self.host = host
        self.near = near
        self.cfg, self.epoch = actor.cfg.weight_sync, 0
        self.tolerance = (
            self.cfg.canary_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[actor.cfg.model.dtype]
        )
        self.lock = asyncio.Lock()  # one sync at a time: of all replicas, or of one that comes back
        self.last_sent: tuple[Stamp, list[np.ndarray]] | None = (
            None  # what replicas are to hold, and the trainer's canary
        )
        self.connected_replicas: list[Any] = []  # the replicas that the groups were made for
        self.failures: dict[
            int, int
        ] = {}  # replica -> syncs in a row that it failed in, its own ones not counted
        rollout.restore = self.restore
        self.on_trace: Callable[[list[tuple[str, str, int, float, float]]], None] = lambda spans: (
            None
        )

    async def connect(self) -> None:
        """Exchange the metadata, once."""
        limit, size, what = (
            self.cfg.timeout_s,
            self.cfg.bucket_mb << 20,
            "weight sync, trainer rank",
        )
        plans = await call_all(limit, what, self.actor.ranks, "weight_plan")
        found = await call_all(
            limit, what, self.actor.ranks, "open_sender", plans, size, self.host, limit
        )
        sending = pieces_of_senders(plans, self.cfg.sender)
        self.senders = [self.actor.ranks[i] for i in sending]
        self.sending_ranks = self.actor.ranks if self.cfg.sender == "gather" else self.senders
        self.near = [self.near[i] for i in sending]
        self.total_bytes = BucketPlan.build([*sending.values()], size).total_bytes
        self.info = {
            "bucket_bytes": size,
            "addresses": [found[i] for i in sending],
            "host": self.host,
        }
        self.info |= {
            "timeout_s": limit,
            "pieces": [[astuple(p) for p in sent] for sent in sending.values()],
        }

    async def _regroup(self, numbers: list[int]) -> None:
        """New groups, of the senders and these replicas. Raises BrokenSync."""
        self.epoch, self.connected_replicas = self.epoch + 1, []
        width = self.rollout.cfg.rollout.tensor_parallel_size
        place = {number: i for i, number in enumerate(numbers)}
        near = [[place[r] for r in those if r in place] for those in self.near]
        receivers = len(place) * width
        info = self.info | {"epoch": self.epoch, "receivers": receivers, "near": near}
        what = f"weight sync, groups of epoch {self.epoch}"
        calls = [
            Call(
                f"trainer rank {i}", sender, sender.connect_sync.remote(self.epoch, receivers, own)
            )
            for i, (sender, own) in enumerate(zip(self.senders, near, strict=True))
        ]
        for number, i in place.items():
            replica = self.rollout.replicas[number]
            calls.append(
                Call(
                    f"rollout {number}",
                    replica,
                    replica.connect_sync.remote(info, i * width),
                    number,
                )
            )
        # Each process keeps the limit itself; this one is for what hangs outside of its waits.
        limit = 5.0 + connect_limit(self.cfg.timeout_s, len(self.senders), receivers)
        await self._together(what, calls, limit, limit)
        self.connected_replicas = [self.rollout.replicas[number] for number in numbers]

    async def _together(
        self, what: str, calls: list[Call], limit_s: float, rest_s: float
    ) -> list[Any]:
        """What all calls return, which are for `what`. As soon as one fails, or none has ended after `limit_s` seconds, or
        some have not `rest_s` seconds after the first, the epoch is aborted, which ends the others. Raises BrokenSync then."""
        tasks = {
            asyncio.ensure_future(name_failures(f"{what}, {call.who}", call.answer)): call
            for call in calls
        }
        try:
            done, pending = await asyncio.wait(
                tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done and pending and not any(task.exception() for task in done):
                limit_s = rest_s
                _, pending = await asyncio.wait(
                    pending, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
                )
                done = {task for task in tasks if task.done()}
            errors = [error for task in tasks if task in done and (error := task.exception())]
            if not errors and not pending:
                return [task.result() for task in tasks]
            if not errors:
                late = ", ".join(call.who for task, call in tasks.items() if task in pending)
                errors = [PhaseTimeout(f"{what}, {late}: no answer in {limit_s:g} s")]
            await self._abort(errors[0])
            hanging = await self._settle({task: tasks[task] for task in pending})
            errors += [error for task in pending - hanging if (error := task.exception())]
            first = next((error for error in errors if GIVEN_UP not in str(error)), errors[0])
            raise BrokenSync(first, [tasks[task] for task in hanging])
        finally:
            for task in tasks:
                task.cancel()

    async def _settle(self, pending: dict[asyncio.Future, Call]) -> set[asyncio.Future]:
        """Wait until the calls that an abort is to end have ended, but not for processes that are gone or stopped. Returns
        those that have not."""
        if not pending:
            return set()
        _, left = await asyncio.wait(pending, timeout=QUICK_S)
        gone = await not_alive({pending[task].who: pending[task].actor for task in left})
        busy = {task for task in left if pending[task].who not in gone}
        if busy:
            await asyncio.wait(busy, timeout=SETTLE_S)
        return {task for task in left if not task.done()}

    async def _abort(self, error: Exception) -> None:
        """End every wait of the epoch's groups, at trainers and replicas alike."""
        calls = [sender.abort_sync.remote(self.epoch, str(error)) for sender in self.senders]
        await _quietly(calls)

    async def fail(self, error: BaseException) -> None:
        """Tell the trainers that wait for the end of the sync that the attempt ends: they raise SyncError."""
        await _quietly([rank.fail_sync.remote(str(error)) for rank in self.actor.ranks])

    def score_canary(self) -> Awaitable[list[np.ndarray]]:
        """Ask the trainer for its half of the canary, by the weights that it has now."""
        return self.actor.score(self.canary)

    async def __call__(
        self, stamp: Stamp, expected: Awaitable[list[np.ndarray]] | None = None
    ) -> dict[str, Any]:
        """Bring every replica to `stamp`. `expected`: of `expect`, if it was asked earlier. Returns metrics: sync/bytes,
        sync/gb_per_s, seconds per phase, canary. Raises SyncError, naming who, which phase, bucket and version; ProcessDied
        if a trainer is gone or hangs; NoReplica if all replicas are."""
        begin = time.perf_counter()
        metrics: dict[str, Any] = {}
        trainer = await (expected or self.score_canary())
        asked, self.last_sent = time.perf_counter() - begin, (stamp, trainer)
        self.rollout.syncing = True  # prompts that come meanwhile wait
        self.rollout.mark_stale()
        # Bounded: of each round that brings nothing at least one replica died, and each may do so MAX_ATTEMPTS times.
        while not metrics:
            await (
                self.rollout.wait_for_any_replica()
            )  # who comes back now may have these weights by then, from `restore`
            metrics = await self._bring([])
        self.rollout.syncing = False
        await self.release(stamp[1])
        # The replicas idle until the canary has passed, so it belongs to the sync.
        metrics["time/canary_s"] += asked
        return metrics | {"time/sync_s": time.perf_counter() - begin}

    def release(self, version: int) -> Awaitable[Any]:
        """Tell the trainer that these weights may change: nobody needs them any more."""
        return call_all(
            self.cfg.timeout_s, "weight sync, trainer rank", self.actor.ranks, "release", version
        )

    async def restore(self, number: int) -> bool:
        """Bring a replica that was started anew to the weights that were sent last; where nothing was sent yet, or it is
        not kept, it gets the next. Returns whether it is still there."""
        kept = self.last_sent and self.cfg.keep_sent and self.cfg.sender == "sharded"
        return not kept or bool(await self._bring([number]))

    async def _bring(self, numbers: list[int]) -> dict[str, Any]:
        """`last` into these replicas, none: all that take part, which are healthy then. Empty: some failed in it, and are
        being restarted."""
        async with self.lock:
            # Only now: while this waited, one may have come back, with what was the last before.
            stamp, trainer = self.last_sent
            alone, numbers = bool(numbers), numbers or self.rollout.active
            if not numbers:
                return {}
            # Now: when the sync has failed, another process may have taken the place of one that died.
            replicas = {i: self.rollout.replicas[i] for i in numbers}
            try:
                if self.connected_replicas != [self.rollout.replicas[i] for i in numbers]:
                    await self._regroup(numbers)
                start = time.perf_counter()
                metrics = self._metrics(numbers, start, *await self._transfer(stamp, numbers))
                checked = time.perf_counter()
                metrics |= await self._check_canary(stamp, trainer, numbers)
                metrics["time/canary_s"] = time.perf_counter() - checked
            except BrokenSync as broken:
                self.connected_replicas = []
                await self._give_up_failed(broken, stamp, replicas, alone)
                return {}
            except SyncError:
                self.connected_replicas = []
                raise
        for i, replica in zip(numbers, self.connected_replicas, strict=True):
            if not alone:
                self.failures.pop(i, None)
            self.rollout.mark_synced(i, replica)
        return metrics

    async def _give_up_failed(
        self, broken: BrokenSync, stamp: Stamp, replicas: dict[int, Any], alone: bool
    ) -> None:
        """Restart those of these replicas (number -> actor) that a broken sync has failed by. Raises TrainerDied if it was a
        trainer, ProcessDied where no replica can be restarted by itself; the failure itself if all processes are well."""
        what = f"weight sync of version {stamp[1]}"
        ranks = {f"trainer rank {i}": rank for i, rank in enumerate(self.actor.ranks)}
        names = {f"rollout {i}": i for i in replicas}
        found = await asyncio.gather(
            not_alive(ranks), not_alive({who: replicas[i] for who, i in names.items()})
        )
        dead_ranks, dead = found[0], {names[who]: why for who, why in found[1].items()}
        gathers = self.cfg.sender == "gather"
        for call in broken.hanging:
            hangs = f"{call.who}: it hangs, and did not end {QUICK_S + SETTLE_S:g} s after an abort"
            if call.replica is not None:
                dead.setdefault(call.replica, hangs)
            elif (
                not gathers
            ):  # other ranks of a gathering trainer wait for the first one, which has failed
                dead_ranks.setdefault(call.who, hangs)
        if dead_ranks:
            raise TrainerDied(f"{what}: {'; '.join(dead_ranks.values())}") from broken.error
        if not dead:
            raise broken.error
        if gathers:
            raise ProcessDied(f"{what}: {'; '.join(dead.values())}") from broken.error
        for i, why in dead.items():
            self.failures[i] = self.failures.get(i, 0) + (not alone)
            if self.failures[i] >= MAX_ATTEMPTS:
                self.rollout.exclude(
                    i, f"it failed in {MAX_ATTEMPTS} weight syncs in a row; the last time: {why}"
                )
            else:
                self.rollout.mark_failed(i, f"in the {what}: {why}")

    async def _transfer(self, stamp: Stamp, replicas: list[int]) -> tuple[list[Any], list[Any]]:
        """What senders and replicas report. Raises BrokenSync."""
        what = f"weight sync of version {stamp[1]}"
        calls = [
            Call(f"trainer rank {i}", rank, rank.send_weights.remote(stamp[1]))
            for i, rank in enumerate(self.sending_ranks)
        ]
        chosen = {i: self.rollout.replicas[i] for i in replicas}
        calls += [
            Call(f"rollout {i}", actor, actor.sync.remote(stamp), i) for i, actor in chosen.items()
        ]
        # Each wait inside has the limit timeout_s; this one is for what hangs outside of those.
        slowest = self.total_bytes / SLOWEST_LINK
        # All walk the buckets side by side: when one has ended, the others soon will.
        reports = await self._together(
            what, calls, 3 * self.cfg.timeout_s + slowest, self.cfg.timeout_s + slowest
        )
        return reports[: len(self.sending_ranks)], reports[len(self.sending_ranks) :]

    def _metrics(
        self, numbers: list[int], start: float, sent: list, received: list
    ) -> dict[str, Any]:
        seconds, size = time.perf_counter() - start, sum(report["bytes"] for report in sent)
        ranks = {f"trainer {i}": report for i, report in enumerate(sent)}
        for number, workers in zip(
            numbers, received, strict=True
        ):  # the first worker has no number of its own
            ranks |= {
                f"rollout {number}" + f".{k}" * (k > 0): report for k, report in enumerate(workers)
            }
        metrics = {
            "sync/transfer_s": seconds,
            "sync/bytes": size,
            "sync/gb_per_s": size / seconds / 1e9,
        }
        changed = 2 * sum(report["changed"] for report in sent) / self.total_bytes
        metrics |= {"sync/full_bytes": float(self.total_bytes), "sync/changed_share": changed}
        workers = [worker for replica in received for worker in replica]
        for names, reports in ((SENDING[:-1], sent), (RECEIVING, workers)):
            metrics |= {f"sync/{name}_s": max(r.get(name, 0.0) for r in reports) for name in names}
        # Either end's time includes its wait for the other, so the shorter one counts.
        slowest = dict(
            sorted((i, seconds) for report in sent for i, seconds in report["bucket_wire"])
        )
        metrics["sync/wire_s"], raw = max(
            (sum(min(s, slowest[i]) for i, s in w["bucket_wire"]), w["bare_wire"]) for w in workers
        )
        if raw and size >= self.total_bytes:  # for the few bytes of changes both are mere latency
            metrics |= {"sync/raw_s": raw, "sync/wire_ratio": metrics["sync/wire_s"] / raw}
        # 1: changes go straight into every engine's parameters; 0: one of them keeps a mirror in host memory
        if held := [w["in_place"] for w in workers if "in_place" in w]:
            metrics["sync/in_place"] = min(held)
        plain = ("bytes", *SENDING, *RECEIVING)
        took = {
            who: sum(report.get(phase, 0.0) for phase in plain[1:]) for who, report in ranks.items()
        }
        ranks = {who: ranks[who] for who in sorted(took, key=took.get)[-MOST_TOLD:]}
        spans = [
            (f"sync {who}", *s)
            for who, r in ranks.items()
            for s in r["spans"][: MOST_DRAWN // len(ranks)]
        ]
        self.on_trace(
            [(who + lane, phase, self.last_sent[0][1], *when) for who, lane, phase, *when in spans]
        )
        metrics["sync/ranks"] = {
            who: {k: v for k, v in r.items() if k in plain} for who, r in ranks.items()
        }
        return metrics

    async def _check_canary(
        self, stamp: Stamp, trainer: list[np.ndarray], numbers: list[int]
    ) -> dict[str, float]:
        what = f"canary after the sync of version {stamp[1]}"
        chosen = {i: self.rollout.replicas[i] for i in numbers}
        calls = [
            Call(f"rollout {i}", actor, actor.score.remote(self.canary), i)
            for i, actor in chosen.items()
        ]
        replicas = await self._together(what, calls, self.cfg.timeout_s, self.cfg.timeout_s)
        diffs = np.abs(np.concatenate(trainer) - np.stack([*map(np.concatenate, replicas)]))
        # Noise of the dtype scatters, so its mean is far below its maximum; other weights shift the mean too.
        found = {"max": diffs.max(1), "mean": diffs.mean(1)}
        for (kind, sizes), share, shown in zip(
            found.items(), (1.0, 0.1), ("", " / 10"), strict=True
        ):
            for i in np.flatnonzero(~(sizes <= share * self.tolerance)):  # NaN fails too
                who = f"{what}: rollout replica {numbers[i]} and the trainer"
                most = f"weight_sync.canary_tolerance{shown} = {share * self.tolerance:g}"
                raise SyncError(
                    f"{who} differ by {sizes[i]:.3g} nats on the same tokens ({kind}), more than {most}"
                )
        return {f"canary/logprob_diff_{kind}": float(sizes.max()) for kind, sizes in found.items()}


async def _quietly(calls: list[Awaitable[Any]]) -> None:
    """Await these calls for ABORT_S seconds at most. A process that fails or hangs in one is found by `not_alive`."""

    async def ended(call: Awaitable[Any]) -> None:
        with suppress(Exception):
            await call

    with suppress(TimeoutError):
        async with asyncio.timeout(ABORT_S):
            await asyncio.gather(*(ended(call) for call in calls))
