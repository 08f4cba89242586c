"""The trainer's weights into every replica: verified by checksum, by name and by canary, or the run stops.

A replica whose process dies in a sync is left out: the groups are made anew without it, and those that are left receive
the whole sync again, from whatever state the broken one left them in. A replica that was started anew, whatever it died
of, gets the weights that were sent last, from what the senders keep of them, and serves when its canary has passed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from typing import Any

import numpy as np

from one_step_off.bucket_plan import BucketPlan, SyncError, sent_by
from one_step_off.groups import PhaseTimeout, RoleError, RolloutGroup, TrainGroup, every, named, within
from one_step_off.health import State
from one_step_off.samples import Stamp

SLOWEST_LINK = 50e6  # bytes/s: a sync slower than this counts as stuck
MOST_TOLD = 64  # processes of one sync that are told of: those that took longest
MOST_DRAWN = 1000  # spans of theirs in the timeline
SENDING = "gather", "checksum", "encode", "keep", "wire"  # phases of a sender
RECEIVING = "pause", "prepare", "wait", "apply", "verify", "load", "finish"  # and of a vLLM worker


class WeightSync:
    """Brings every replica to the trainer's weights."""

    def __init__(
        self, actor: TrainGroup, rollout: RolloutGroup, canary: list[np.ndarray], host: str, near: list[list[int]]
    ) -> None:
        """`near`: per rank of the actor the replicas on its device; they need no network."""
        self.actor, self.rollout, self.canary, self.host, self.near = actor, rollout, canary, host, near
        self.cfg, self.epoch = actor.cfg.weight_sync, 0
        self.tolerance = self.cfg.canary_tolerance or {"float32": 1e-3, "bfloat16": 1.0}[actor.cfg.model.dtype]
        self.lock = asyncio.Lock()  # one sync at a time: of all replicas, or of one that comes back
        self.last: tuple[Stamp, list[np.ndarray]] | None = None  # what replicas are to hold, and the trainer's canary
        self.grouped: list[Any] = []  # the replicas that the groups were made for
        rollout.restore = self.restore
        self.on_trace: Callable[[list[tuple[str, str, int, float, float]]], None] = lambda spans: None

    async def connect(self) -> None:
        """Exchange the metadata, once."""
        limit, size, what = self.cfg.timeout_s, self.cfg.bucket_mb << 20, "weight sync, trainer rank"
        plans = await every(limit, what, self.actor.ranks, "weight_plan")
        found = await every(limit, what, self.actor.ranks, "open_sender", plans, size, self.host, limit)
        sending = sent_by(plans, self.cfg.sender)
        self.senders = [self.actor.ranks[i] for i in sending]
        self.taking_part = self.actor.ranks if self.cfg.sender == "gather" else self.senders
        self.near = [self.near[i] for i in sending]
        self.total_bytes = BucketPlan.build([*sending.values()], size).total_bytes
        self.info = {"bucket_bytes": size, "addresses": [found[i] for i in sending], "host": self.host}
        self.info |= {"timeout_s": limit, "pieces": [[astuple(p) for p in sent] for sent in sending.values()]}

    async def _regroup(self, numbers: list[int]) -> None:
        """New groups, of the senders and these replicas."""
        self.epoch, self.grouped = self.epoch + 1, []
        width = self.rollout.cfg.rollout.tensor_parallel_size
        place, chosen = {number: i for i, number in enumerate(numbers)}, [self.rollout.all[i] for i in numbers]
        near = [[place[r] for r in those if r in place] for those in self.near]
        receivers, limit = len(place) * width, 2 * self.cfg.timeout_s
        info = self.info | {"epoch": self.epoch, "receivers": receivers, "near": near}
        shape, firsts = (self.epoch, receivers), [(i * width,) for i in place.values()]
        await asyncio.gather(
            every(limit, "weight sync, trainer rank", self.senders, "connect_sync", *shape, each=[(n,) for n in near]),
            every(limit, "weight sync, rollout", chosen, "connect_sync", info, each=firsts),
        )
        self.grouped = chosen

    def expect(self) -> Awaitable[list[np.ndarray]]:
        """Ask the trainer for its half of the canary, by the weights that it has now."""
        return self.actor.score(self.canary)

    async def __call__(self, stamp: Stamp, expected: Awaitable[list[np.ndarray]] | None = None) -> dict[str, Any]:
        """Bring every replica to `stamp`. `expected`: of `expect`, if it was asked earlier. Returns metrics: sync/bytes,
        sync/gb_per_s, seconds per phase, canary. Raises SyncError or PhaseTimeout, naming who, which phase, bucket and
        version; NoReplica if all are lost."""
        begin, metrics = time.perf_counter(), None
        trainer = await (expected or self.expect())
        asked, self.last = time.perf_counter() - begin, (stamp, trainer)
        self.rollout.syncing = True  # prompts that come meanwhile wait
        for i in self.rollout.active:
            self.rollout.health[i].to(State.STALE)
        while not metrics:
            await self.rollout.somebody()  # who comes back now may have these weights by then, from `restore`
            metrics = await self._bring([])
        self.rollout.syncing = False
        await self.release(stamp[1])
        # The replicas idle until the canary has passed, so it belongs to the sync.
        metrics["time/canary_s"] += asked
        return metrics | {"time/sync_s": time.perf_counter() - begin}

    def release(self, version: int) -> Awaitable[Any]:
        """Tell the trainer that these weights may change: nobody needs them any more."""
        return every(self.cfg.timeout_s, "weight sync, trainer rank", self.actor.ranks, "release", version)

    async def restore(self, number: int) -> bool:
        """Bring a replica that was started anew to the weights that were sent last; where nothing was sent yet, or it is
        not kept, it gets the next. Returns whether it is still there."""
        kept = self.last and self.cfg.keep_sent and self.cfg.sender == "sharded"
        return not kept or bool(await self._bring([number]))

    async def _bring(self, numbers: list[int]) -> dict[str, Any]:
        """`last` into these replicas, none: all that take part, which are healthy then. Empty: some died of it, and are
        being started anew."""
        async with self.lock:
            # Only now: while this waited, one may have come back, with what was the last before.
            (stamp, trainer), numbers = self.last, numbers or self.rollout.active
            if not numbers:
                return {}
            try:
                if self.grouped != [self.rollout.all[i] for i in numbers]:
                    await self._regroup(numbers)
                start = time.perf_counter()
                metrics = self._metrics(numbers, start, *await self._transfer(stamp, numbers))
                checked = time.perf_counter()
                metrics |= await self._check_canary(stamp, trainer, numbers)
                metrics["time/canary_s"] = time.perf_counter() - checked
            except (SyncError, RoleError, PhaseTimeout) as error:
                lost, self.grouped = await self.rollout.missing(numbers), []
                # Where ranks gather, some still wait in the attempt that broke.
                if not lost or self.cfg.sender == "gather":
                    raise
                for i in lost:
                    self.rollout.lose(i, f"in the weight sync of version {stamp[1]}: {error}")
                return {}
        for i, replica in zip(numbers, self.grouped, strict=True):
            health = self.rollout.health[i]
            if replica is self.rollout.all[i] and health.state is not State.DEAD:  # else it was lost since its canary
                health.to(State.HEALTHY)
                health.begin(time.monotonic())
        return metrics

    async def _transfer(self, stamp: Stamp, replicas: list[int]) -> tuple[list[Any], list[Any]]:
        """What senders and replicas report. The first failure is raised once all have ended: whoever fails leaves its
        groups, so that the others fail soon after."""
        what, failed = f"weight sync of version {stamp[1]}", []
        calls = [(f"{what}, trainer rank {i}", a.send_weights.remote(stamp[1])) for i, a in enumerate(self.taking_part)]
        calls += [(f"{what}, rollout {i}", self.rollout.all[i].sync.remote(stamp)) for i in replicas]
        # Each wait inside has the limit timeout_s; this one is for what hangs outside of those.
        limit = 3 * self.cfg.timeout_s + self.total_bytes / SLOWEST_LINK

        async def ended(who: str, answer: Awaitable[Any]) -> Any:
            try:
                return await within(limit, who, named(who, answer))
            except Exception as e:
                failed.append(e)

        reports = await asyncio.gather(*(ended(*call) for call in calls))
        if failed:  # where a trainer hangs, those that failed had waited for it
            raise next((e for e in failed if isinstance(e, PhaseTimeout) and "trainer" in str(e)), failed[0])
        return reports[: len(self.taking_part)], reports[len(self.taking_part) :]

    def _metrics(self, numbers: list[int], start: float, sent: list, received: list) -> dict[str, Any]:
        seconds, size = time.perf_counter() - start, sum(report["bytes"] for report in sent)
        ranks = {f"trainer {i}": report for i, report in enumerate(sent)}
        for number, workers in zip(numbers, received, strict=True):  # the first worker has no number of its own
            ranks |= {f"rollout {number}" + f".{k}" * (k > 0): report for k, report in enumerate(workers)}
        metrics = {"sync/transfer_s": seconds, "sync/bytes": size, "sync/gb_per_s": size / seconds / 1e9}
        changed = 2 * sum(report["changed"] for report in sent) / self.total_bytes
        metrics |= {"sync/full_bytes": float(self.total_bytes), "sync/changed_share": changed}
        workers = [worker for replica in received for worker in replica]
        for names, reports in ((SENDING[:-1], sent), (RECEIVING, workers)):
            metrics |= {f"sync/{name}_s": max(r.get(name, 0.0) for r in reports) for name in names}
        # Either end's time includes its wait for the other, so the shorter one counts.
        slowest = dict(sorted((i, seconds) for report in sent for i, seconds in report["each"]))
        metrics["sync/wire_s"], raw = max((sum(min(s, slowest[i]) for i, s in w["each"]), w["raw"]) for w in workers)
        if raw and size >= self.total_bytes:  # for the few bytes of changes both are mere latency
            metrics |= {"sync/raw_s": raw, "sync/wire_ratio": metrics["sync/wire_s"] / raw}
        # 1: changes go straight into every engine's parameters; 0: one of them keeps a mirror in host memory
        if held := [w["in_place"] for w in workers if "in_place" in w]:
            metrics["sync/in_place"] = min(held)
        plain = ("bytes", *SENDING, *RECEIVING)
        took = {who: sum(report.get(phase, 0.0) for phase in plain[1:]) for who, report in ranks.items()}
        ranks = {who: ranks[who] for who in sorted(took, key=took.get)[-MOST_TOLD:]}
        spans = [(f"sync {who}", *s) for who, r in ranks.items() for s in r["spans"][: MOST_DRAWN // len(ranks)]]
        self.on_trace([(who + lane, phase, self.last[0][1], *when) for who, lane, phase, *when in spans])
        metrics["sync/ranks"] = {who: {k: v for k, v in r.items() if k in plain} for who, r in ranks.items()}
        return metrics

    async def _check_canary(self, stamp: Stamp, trainer: list[np.ndarray], numbers: list[int]) -> dict[str, float]:
        replicas = await self.rollout.score(self.canary, numbers)
        diffs = np.abs(np.concatenate(trainer) - np.stack([*map(np.concatenate, replicas)]))
        # Noise of the dtype scatters, so its mean is far below its maximum; other weights shift the mean too.
        found = {"max": diffs.max(1), "mean": diffs.mean(1)}
        for (kind, sizes), share, shown in zip(found.items(), (1.0, 0.1), ("", " / 10"), strict=True):
            for i in np.flatnonzero(~(sizes <= share * self.tolerance)):  # NaN fails too
                who = f"canary after the sync of version {stamp[1]}: rollout replica {numbers[i]} and the trainer"
                most = f"weight_sync.canary_tolerance{shown} = {share * self.tolerance:g}"
                raise SyncError(f"{who} differ by {sizes[i]:.3g} nats on the same tokens ({kind}), more than {most}")
        return {f"canary/logprob_diff_{kind}": float(sizes.max()) for kind, sizes in found.items()}
