"""The driver's part in the weight sync: it brings the trainer's weights to every replica and
verifies them, or the run stops.

The weights are verified by checksum, by name and by the canary. A failure anywhere in a sync ends
it for all: the driver aborts the epoch, so that no process waits for one that failed. Then it asks
every process, on a thread that is never busy, whether it is alive, and decides:

- a trainer is gone or hangs: TrainerDied, and the attempt ends;
- replicas are gone or hang: they are restarted in the background, the groups are created again
  without them, and the others receive the whole sync again, no matter in which state the broken
  sync left them;
- all processes are alive: the failure itself is raised. Where the sync is not exact (checksum,
  plan, canary) it ends the run; a time limit of the driver ends the attempt.

A restarted replica gets the weights that were sent last, from the senders' copies, and serves when
its canary has passed. Where that fails it is restarted again, and excluded after three times.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from one_step_off.cluster.errors import CanaryFailed, SyncError
from one_step_off.cluster.remote_calls import (
    call_all,
    call_each,
    store_once,
)
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.quantization import is_quantized
from one_step_off.data.images import Images
from one_step_off.data.samples import PolicyVersion
from one_step_off.distributed_util import connect_timeout
from one_step_off.weight_sync import base_weights, report
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces
from one_step_off.weight_sync.canary import Canary, FailedCanary, canary_limit_s, canary_name
from one_step_off.weight_sync.kind_choice import KindChoice
from one_step_off.weight_sync.replica_layouts import ReplicaLayouts, plain_shards_of_receivers
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.sender_groups import SenderGroup, form_groups
from one_step_off.weight_sync.sync_calls import (
    BrokenSync,
    FailedSyncs,
    LogProbs,
    Replicas,
    SyncCall,
    Trainers,
    await_quietly,
    begin_on_replicas,
    run_or_abort,
    transfer_limits,
)
from one_step_off.weight_sync.transports.transport import transport_settings
from one_step_off.weight_sync.versions import VersionTable

CONNECT_GRACE_S = 5.0
"""Each process enforces `connect_timeout` itself. The driver waits this many seconds longer, for a
process that hangs where it enforces nothing."""


@dataclass
class SyncGroups:
    """The groups of the senders with a set of replicas.

    Attributes:
        are_lent: with the lent replicas, which get again what was sent last.
        replicas: the actor handles that they were created for; empty: there are no groups.
        epoch: in which they were created.
        kept: what all workers keep; None: only whole tensors can be sent.
    """

    are_lent: bool = False
    replicas: list[Any] = field(default_factory=list)
    epoch: int = 0
    kept: ShardsOfReceivers | None = None


class WeightSync:
    """Brings every replica to the trainer's weights.

    `connect` exchanges the metadata once. A call is one sync: it creates the groups if the replicas
    have changed, transfers, and checks the canary. `restore` does the same for one restarted
    replica.
    """

    canary_images: Sequence[Images] = ()
    """Of each sequence of the canary; (): none has any."""

    def __init__(
        self,
        actor: Trainers,
        rollout: Replicas,
        canary: list[np.ndarray],
        host: str,
        same_device: list[list[int]],
        events: RunEvents | None = None,
        canary_images: Sequence[Images] = (),
    ) -> None:
        """Nothing is connected yet.

        Args:
            actor: the trainers of the actor.
            rollout: the replicas.
            canary: token ids of each sequence, int32 [tokens].
            host: the address at which senders and receivers listen; empty: each node's own.
            same_device: per rank of the actor the replicas on its device, which need no network.
            events: receives the spans of each sync, and what a failed canary's diagnosis finds.
            canary_images: of each sequence; (): none has any.
        """
        self.actor = actor
        self.rollout: Any = rollout
        self.canary = canary
        self.canary_images = canary_images
        self.host = host
        self.cfg = actor.cfg.weight_sync
        self.same_device = same_device
        if self.cfg.transport != "auto":
            self.same_device = [[] for _ in same_device]
        self.kind_choice = KindChoice(self.cfg.full_every)
        """With `weight_sync.mode=delta`."""
        self.canary_check = Canary(
            self.cfg.canary_tolerance, actor.cfg.model.dtype, is_quantized(actor.cfg)
        )
        self.lock = asyncio.Lock()
        """Held by one sync at a time: of all replicas, or of one restarted replica."""
        self.epoch = 0
        """Counts the groups; receivers that come or go begin a new epoch."""
        self.members: list[tuple[Any, int]] = []
        """The ranks that give their pieces to a sender: each with the rank of that sender."""
        self.own_groups = SyncGroups()
        self.lent_groups = SyncGroups(are_lent=True)
        self.groups = self.own_groups
        """Those of the sync that is under way, or was the last one."""
        self.addresses: list[Any] = []
        """Of the senders' stores, for all replicas but the lent ones."""
        self.lent_addresses: list[Any] = []
        self.layouts = ReplicaLayouts([], self.cfg.timeout_s)
        """What the replicas' workers keep of the model."""
        self.versions = VersionTable()
        """What was trained, what replicas must hold, and what they have received."""
        self.failed_syncs = FailedSyncs(actor, rollout)
        self.events = events or RunEvents()
        rollout.restore = self.restore

    async def connect(self) -> None:
        """Exchange the metadata, once: every rank's pieces, and the senders' addresses."""
        timeout_s = self.cfg.timeout_s
        who = "weight sync, trainer rank"
        ranks = self.actor.ranks
        bucket_mb = self.cfg.bucket_mb
        if bucket_mb is None:
            bucket_mb = min(await call_all(timeout_s, who, ranks, "automatic_bucket_mb"))
        bucket_bytes = bucket_mb << 20
        plans = await call_all(timeout_s, who, ranks, "weight_plan")
        groups = await asyncio.to_thread(form_groups, plans, self.cfg.max_senders)
        shared_groups = store_once(groups)
        pieces_for_rank = self._pieces_for_ranks(plans, groups)
        transport = transport_settings(self.actor.cfg)
        arguments = [
            (shared_groups, pieces, bucket_bytes, self.host, timeout_s, transport)
            for pieces in pieces_for_rank
        ]
        addresses = await call_each(timeout_s, who, ranks, "open_sender", arguments)
        self.senders = [ranks[group.leader] for group in groups]
        self.members = [(ranks[rank], group.leader) for group in groups for rank in group.members]
        sending_ranks = sorted(rank for group in groups for rank in group.ranks)
        self.sending_ranks = [ranks[rank] for rank in sending_ranks]
        self.same_device = [self.same_device[group.leader] for group in groups]
        pieces_of_sender = [group.pieces for group in groups]
        self.layouts = ReplicaLayouts(pieces_of_sender, timeout_s)
        if self.cfg.lora == "adapter":
            self.layouts.base = await base_weights.ask_trainers(ranks, timeout_s)
        self.total_bytes = BucketPlan.build(pieces_of_sender, bucket_bytes).total_bytes
        self.member_addresses = [address and address.for_members for address in addresses]
        leaders = [addresses[group.leader] for group in groups]
        self.addresses = [leader.store for leader in leaders]
        self.lent_addresses = [leader.lent_store for leader in leaders]
        self.connect_info = {
            "bucket_bytes": bucket_bytes,
            "host": self.host,
            "timeout_s": timeout_s,
            "transport": transport,
            "pieces": [[astuple(piece) for piece in sent] for sent in pieces_of_sender],
        }

    def _pieces_for_ranks(self, plans: Pieces, groups: list[SenderGroup]) -> list[Any]:
        """Per rank the pieces that it must know beside its own and its group's: a leader those of
        its members."""
        pieces_for_rank: list[Any] = [[] for _ in plans]
        for group in groups:
            if group.members:
                pieces = [plans[rank] for rank in group.ranks]
                pieces_for_rank[group.leader] = store_once(pieces)
        return pieces_for_rank

    @property
    def scored(self) -> tuple[Any, ...]:
        """The canary, as the arguments of `score`."""
        return (self.canary, self.canary_images) if self.canary_images else (self.canary,)

    def score_canary(self) -> Awaitable[LogProbs]:
        """Ask the trainer for its log-probs of the canary, at the weights that it has now."""
        return self.actor.score(*self.scored)

    async def __call__(
        self, stamp: PolicyVersion, expected: Awaitable[LogProbs] | None = None
    ) -> dict[str, Any]:
        """Bring every replica to `stamp`.

        Args:
            stamp: (attempt, version) of the trainer's weights.
            expected: from `score_canary`, if it was asked earlier.

        Returns:
            Metrics: sync/bytes, sync/gb_per_s, seconds per phase, the canary's differences.

        Raises:
            SyncError: the sync is not exact; names the process, phase, bucket and version.
            TrainerDied: a trainer is gone or hangs.
            ProcessDied: a failed replica cannot be restarted beside other roles of its pool.
            PhaseTimeout: the driver's time limit, with all processes alive.
            NoReplica: all replicas are gone or hang.
        """
        metrics = await self._sync(stamp, expected)
        _, version = stamp
        await self.release(version)
        return metrics

    async def _sync(
        self, stamp: PolicyVersion, expected: Awaitable[LogProbs] | None
    ) -> dict[str, Any]:
        begin = time.perf_counter()
        trainer_log_probs = await (expected or self.score_canary())
        canary_wait_s = time.perf_counter() - begin
        self.versions.send(stamp, trainer_log_probs)
        self.rollout.syncing = True
        self.rollout.mark_stale()
        metrics: dict[str, Any] = {}
        # Bounded: in each round without metrics at least one replica fails, and each may do so
        # MAX_TRIES times.
        while not metrics:
            # A replica that comes back now may have these weights already, from `restore`.
            await self.rollout.wait_for_any_replica()
            metrics = await self._sync_active()
        self.rollout.syncing = False
        # The replicas idle until the canary has passed, so it belongs to the sync.
        metrics["time/canary_s"] += canary_wait_s
        return metrics | {"time/sync_s": time.perf_counter() - begin}

    async def restore(self, *numbers: int, begun: asyncio.Event | None = None) -> bool:
        """Bring restarted or lent replicas to the weights that were sent last.

        If nothing was sent yet, or the senders keep nothing, they stay stale until the next sync.

        Args:
            begun: set when the sync begins. To cancel before that, while this waits for another
                sync, leaves nothing behind.

        Returns:
            Whether all of them are still alive; if not, none of them has the weights.
        """
        if self.versions.sent is None or not self.cfg.keep_sent:
            return True
        async with self.lock:
            if begun is not None:
                begun.set()
            metrics = await self._sync_replicas(list(numbers), is_restore=True)
        return bool(metrics)

    def release(self, version: int) -> Awaitable[Any]:
        """Let the trainer change these weights: no replica needs them any more."""
        who = "weight sync, trainer rank"
        return call_all(self.cfg.timeout_s, who, self.actor.ranks, "release", version)

    async def fail(self, error: BaseException) -> None:
        """The attempt ends: trainers that wait for the end of the sync raise SyncError."""
        await await_quietly([rank.fail_sync.remote(str(error)) for rank in self.actor.ranks])

    async def _sync_active(self) -> dict[str, Any]:
        """One sync of all active replicas; see `_sync_replicas`."""
        async with self.lock:
            # Only now: while this waited for the lock, a replica may have come back, with the
            # version before.
            numbers = self.rollout.active
            if not numbers:
                return {}
            # Such a replica serves already. It must get no prompts before its sync is verified.
            self.rollout.mark_stale()
            return await self._sync_replicas(numbers, is_restore=False)

    async def _sync_replicas(self, numbers: list[int], is_restore: bool) -> dict[str, Any]:
        """Bring what was sent last to these replicas.

        Args:
            numbers: of the replicas.
            is_restore: the sync is for restarted or lent replicas alone.

        Returns:
            Metrics; empty: some replicas failed, and are being restarted.

        Raises:
            SyncError, ProcessDied: as `__call__`.
        """
        stamp = self.versions.sent
        trainer_log_probs = self.versions.canary
        # Looked up before the sync: after a failure, a restarted process may have taken the place
        # of a dead one.
        replicas = {number: self.rollout.replicas[number] for number in numbers}
        are_lent = self.rollout.lent.issuperset(numbers)
        self.groups = self.lent_groups if are_lent else self.own_groups
        try:
            if self.groups.replicas != list(replicas.values()):
                await self._regroup(numbers)
            metrics = await self._transfer(stamp, numbers)
            if not is_restore:
                self._note_kind(metrics)
            begin = time.perf_counter()
            metrics |= await self._check_canary(stamp, trainer_log_probs, numbers, is_restore)
            metrics["time/canary_s"] = time.perf_counter() - begin
        except BrokenSync as broken:
            self.groups.replicas = []
            self.layouts.forget_proofs(replicas.values())
            await self.failed_syncs.handle(broken, stamp, replicas, is_restore)
            return {}
        except SyncError:
            self.groups.replicas = []
            raise
        for number, replica in replicas.items():
            if not is_restore:
                self.failed_syncs.passed(number)
            self.rollout.mark_synced(number, replica)
        return metrics

    async def _regroup(self, numbers: list[int]) -> None:
        """Create new groups, of the senders and these replicas. Raises BrokenSync."""
        self.epoch += 1
        groups = self.groups
        groups.epoch = self.epoch
        groups.replicas = []
        workers_per_replica = self.rollout.cfg.rollout.tensor_parallel_size
        receivers = len(numbers) * workers_per_replica
        same_device = self._same_device_receivers(numbers)
        replicas = [self.rollout.replicas[number] for number in numbers]
        self.layouts.forget_all_but(self.rollout.replicas)
        await self.layouts.learn(dict(zip(numbers, replicas, strict=True)), self.abort)
        groups.kept = self.layouts.kept_by(replicas)
        if groups.kept is not None and any(same_device):
            # In shared memory all read the sender's own part, of which nothing is cut.
            groups.kept = groups.kept if self.layouts.all_keep_all(groups.kept) else None
        shared_kept = store_once(groups.kept)
        connect_info = self.connect_info | {
            "epoch": self.epoch,
            "receivers": receivers,
            "same_device": same_device,
            "kept": plain_shards_of_receivers(groups.kept),
            "addresses": self.lent_addresses if groups.are_lent else self.addresses,
        }
        shared_info = store_once(connect_info)
        calls = []
        for member, leader in [] if groups.are_lent else self.members:
            answer = member.join_leader.remote(self.epoch, self.member_addresses[leader])
            calls.append(SyncCall(self.rank_name(member), member, answer))
        for i, sender in enumerate(self.senders):
            arguments = (self.epoch, receivers, same_device[i], shared_kept)
            if groups.are_lent:
                arguments = (*arguments, True)
            answer = sender.connect_sync.remote(*arguments)
            calls.append(SyncCall(self.rank_name(sender), sender, answer))
        for position, (number, replica) in enumerate(zip(numbers, replicas, strict=True)):
            first_receiver = position * workers_per_replica
            answer = replica.connect_sync.remote(shared_info, first_receiver)
            calls.append(SyncCall(f"rollout {number}", replica, answer, number))
        limit_s = CONNECT_GRACE_S + connect_timeout(
            self.cfg.timeout_s, len(self.senders), receivers
        )
        what = f"weight sync, groups of epoch {self.epoch}"
        await run_or_abort(what, calls, limit_s, limit_s, self.abort)
        groups.replicas = replicas
        if not groups.are_lent:
            self.kind_choice.begin_groups()

    def rank_name(self, rank: Any) -> str:
        """A trainer's name in messages. Not all ranks send: one that owns no pieces does not."""
        return f"trainer rank {self.actor.ranks.index(rank)}"

    def _same_device_receivers(self, numbers: list[int]) -> list[list[int]]:
        """Per sender the receivers on its device. Only replicas with one worker share a device with
        a trainer, so a replica's position is the number of its receiver."""
        receiver_of = {number: receiver for receiver, number in enumerate(numbers)}
        same_device = []
        for replicas in self.same_device:
            same_device.append([receiver_of[r] for r in replicas if r in receiver_of])
        return same_device

    async def _transfer(self, stamp: PolicyVersion, numbers: list[int]) -> dict[str, Any]:
        """Send and receive; returns the metrics. Raises BrokenSync."""
        begin = time.perf_counter()
        _, version = stamp
        replicas = {number: self.rollout.replicas[number] for number in numbers}
        groups = self.groups
        are_proved = self.layouts.are_proved(list(replicas.values()))
        sharded_only = groups.kept is not None and are_proved
        wants_full = self.cfg.mode == "delta" and self.kind_choice.wants_full()
        sending_ranks = self.senders if groups.are_lent else self.sending_ranks
        calls = []
        for rank in sending_ranks:
            if groups.are_lent:
                answer = rank.send_kept.remote(version, sharded_only)
            else:
                answer = rank.send_weights.remote(version, sharded_only, wants_full)
            calls.append(SyncCall(self.rank_name(rank), rank, answer))
        calls += begin_on_replicas(replicas, "sync", stamp, sharded_only)
        first_limit_s, rest_limit_s = transfer_limits(self.cfg.timeout_s, self.total_bytes)
        what = f"weight sync of version {version}"
        reports = await run_or_abort(what, calls, first_limit_s, rest_limit_s, self.abort)
        sent = reports[: len(sending_ranks)]
        received = dict(zip(numbers, reports[len(sending_ranks) :], strict=True))
        self.layouts.note_reports(dict(zip(replicas.values(), received.values(), strict=True)))
        return self._collect_metrics(sent, received, time.perf_counter() - begin)

    def _collect_metrics(
        self,
        sent: list[report.Report],
        received: dict[int, list[report.Report]],
        seconds: float,
    ) -> dict[str, Any]:
        """The metrics of a transfer; also passes its spans to the timeline. Arguments as
        `report.sync_metrics`."""
        _, version = self.versions.sent
        metrics = report.sync_metrics(sent, received, seconds, self.total_bytes)
        slowest = report.slowest_processes(sent, received)
        self.events.trace(report.timeline_spans(slowest, version))
        metrics["sync/ranks"] = report.phase_table(slowest)
        return metrics

    def _note_kind(self, metrics: dict[str, Any]) -> None:
        """Choose the kind of the next syncs by the metrics of this one."""
        if self.cfg.mode != "delta":
            return
        share = metrics["sync/changed_share"]
        seconds = metrics["sync/transfer_s"] - metrics["sync/pause_s"]
        line = self.kind_choice.note(math.isnan(share), seconds, share)
        if line:
            self.events.log(line)

    async def _check_canary(
        self,
        stamp: PolicyVersion,
        trainer_log_probs: LogProbs,
        numbers: list[int],
        is_restore: bool,
    ) -> dict[str, float]:
        """Let these replicas score the canary. Returns metrics.

        Raises:
            BrokenSync: a replica did not score it.
            CanaryFailed: they differ; where, is in the log then.
        """
        what = canary_name(stamp)
        replicas = {number: self.rollout.replicas[number] for number in numbers}
        calls = begin_on_replicas(replicas, "score", *self.scored)
        limit_s = canary_limit_s(self.actor.cfg)
        scores = await run_or_abort(what, calls, limit_s, limit_s, self.abort)
        replica_log_probs = dict(zip(numbers, scores, strict=True))
        try:
            return self.canary_check.check(
                trainer_log_probs, replica_log_probs, what, self.events.log
            )
        except CanaryFailed:
            if not is_restore:  # for a restore the trainer may have newer weights by now
                limit = self.canary_check.tolerance.largest
                failed = FailedCanary(
                    what,
                    self.canary,
                    trainer_log_probs,
                    replica_log_probs,
                    limit,
                    self.scored,
                )
                await failed.log_diagnosis(self.actor, replicas, self.events.log)
            raise

    async def abort(self, error: Exception) -> None:
        """End every wait of the epoch's groups, at trainers and replicas alike."""
        reason = str(error)
        ranks = [*self.senders, *(member for member, _ in self.members)]
        await await_quietly([rank.abort_sync.remote(self.groups.epoch, reason) for rank in ranks])
