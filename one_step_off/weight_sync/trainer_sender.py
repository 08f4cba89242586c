"""A training worker's part in the weight sync, on top of its `weight_plan` and `weight_tensors`.

Where the driver overlaps sync and training, the weights leave while the next step's first forward
and backward pass run. The sync has a thread beside the worker's, and the optimizer waits until the
driver knows that every replica has the weights. (It is not enough that this rank has sent them:
they are sent again when a replica dies before it has finished.)

The calls that end a wait run on another thread, "control", because a send or a connect may hold its
thread for minutes.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
import torch

from one_step_off.cluster.core_binding import unpin
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.network import reachable_host
from one_step_off.config.placement import memory_share, share_beside_engine
from one_step_off.config.schema import Config
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces, automatic_bucket_mb
from one_step_off.weight_sync.gpu_queue import device_bytes
from one_step_off.weight_sync.member_link import LeaderAddress
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.sender_groups import GroupLeader, GroupMember, SenderGroup
from one_step_off.weight_sync.sync_calls import transfer_limits
from one_step_off.weight_sync.transports.transport import (
    Address,
    load_transport,
)
from one_step_off.weight_sync.weight_piece import WeightPiece


@dataclass(frozen=True)
class SenderAddress:
    """Where a sender can be reached."""

    store: Address
    """Of its store, for receivers."""
    for_members: LeaderAddress | None = None
    """For the members of its group; None: it has none."""
    lent_store: Address | None = None
    """Of the store for lent replicas; None: there are none."""


class WeightSenderMixin:
    """Mixed into a worker, before its class: gives the worker a `WeightSender` and the calls that
    drive it."""

    # Of the worker.
    cfg: Config
    rank: int
    device: str
    version: int
    weight_tensors: Callable[[], Iterable[torch.Tensor]]
    weight_plan: Callable[[], list[WeightPiece]]

    threads = {"control": 1, "sync": 1, "saving": 1}
    """Ray's concurrency groups, beside the worker's own calls."""
    released = -1
    """The latest version that every replica has, so that the weights may change; -1: none."""
    lent_sender: WeightSender | None = None
    """Sends again to the lent replicas, in groups of its own, so that those of all others stay;
    None: there are none, or this rank sends nothing."""
    member: GroupMember | None = None
    """The link to the leader of this rank's sender group, if another rank leads it."""
    sync_failure = ""
    """Why no sync will release the weights any more."""

    @ray.method(concurrency_group="sync")
    def automatic_bucket_mb(self) -> int:
        """The size of a bucket that suits this rank's part of its device, and a replica's of one
        that is as large, in MiB."""
        total_bytes = device_bytes(torch.device(self.device))
        trainer_bytes = int(memory_share(self.cfg, "actor") * total_bytes)
        receiver_bytes = int(share_beside_engine(self.cfg) * total_bytes)
        return automatic_bucket_mb(trainer_bytes, receiver_bytes)

    @ray.method(concurrency_group="sync")
    def open_sender(
        self,
        groups: list[SenderGroup],
        pieces: Pieces,
        bucket_bytes: int,
        host: str,
        timeout_s: float,
        transport: tuple[str, str] = ("auto", ""),
    ) -> SenderAddress | None:
        """Build the plan over all groups' pieces. A leader also listens for its members and for
        receivers.

        Args:
            groups: of `form_groups`.
            pieces: of the members of this rank's group, if it leads one of several ranks.
            bucket_bytes: of a bucket.
            host: the address at which to listen; empty: this node's address on the network.
            timeout_s: weight_sync.timeout_s.
            transport: the arguments of `load_transport`.

        Returns:
            The addresses of the sender, or None on a rank that sends nothing to receivers.
        """
        self.release_changed = threading.Condition()
        places = [index for index, group in enumerate(groups) if self.rank in group.ranks]
        if not places:
            return None
        index = places[0]
        group = groups[index]
        plan = BucketPlan.build([group.pieces for group in groups], bucket_bytes)
        device = torch.device(self.device)
        if self.rank != group.leader:
            limit_s, _ = transfer_limits(timeout_s, plan.total_bytes)
            self.member = GroupMember(
                plan, index, self.weight_plan(), self.rank, device, timeout_s, limit_s
            )
            return None
        host = reachable_host(host)
        sync_cfg = self.cfg.weight_sync
        self.sender = WeightSender(plan, index, device, host, timeout_s, load_transport(*transport))
        self.sender.full_every = sync_cfg.full_every if sync_cfg.mode == "delta" else 0
        self.sender.keep_sent = self._may_send_again()
        lent_store = None
        if self.cfg.placement.lend:
            own_transport = load_transport(*transport)
            self.lent_sender = WeightSender(plan, index, device, host, timeout_s, own_transport)
            lent_store = self.lent_sender.address
        if not group.members:
            return SenderAddress(self.sender.address, lent_store=lent_store)
        self.sender.leader = GroupLeader(plan, index, group, pieces, device, host)
        members_address = self.sender.leader.links.address
        return SenderAddress(self.sender.address, members_address, lent_store)

    def _may_send_again(self) -> bool:
        """Whether a replica may need an earlier version: with rollout in the actor's pool none is
        restarted by itself."""
        roles = self.cfg.placement.roles
        return self.cfg.weight_sync.keep_sent and roles["rollout"] != roles["actor"]

    @ray.method(concurrency_group="sync")
    def connect_sync(
        self,
        epoch: int,
        receivers: int,
        same_device: list[int],
        kept: ShardsOfReceivers | None = None,
        is_lent: bool = False,
    ) -> None:
        """Form this sender's groups; receivers and members join meanwhile. See
        `WeightSender.connect`. `is_lent`: with lent replicas."""
        sender = self.lent_sender if is_lent else self.sender
        sender.connect(epoch, receivers, same_device, kept)

    @ray.method(concurrency_group="sync")
    def join_leader(self, epoch: int, address: LeaderAddress) -> None:
        """Connect this member to the leader of its group. See `GroupMember.connect`."""
        self.member.connect(epoch, address)

    @ray.method(concurrency_group="sync")
    def send_weights(
        self, version: int, sharded_only: bool = False, wants_full: bool = False
    ) -> dict[str, Any]:
        """As `WeightSender.send`; a member gives its pieces to its leader.

        Raises:
            SyncError: `version` is neither the worker's nor kept by the sender; or as
                `WeightSender.send`.
        """
        unpin()
        if self.member is not None:
            return self.member.send(self.weight_tensors(), version, self.version)
        if version not in (self.version, self.sender.kept_version):
            raise SyncError(
                f"trainer rank {self.rank} holds version {self.version}, asked to send {version}"
            )
        return self.sender.send(self.weight_tensors(), version, sharded_only, wants_full)

    @ray.method(concurrency_group="sync")
    def send_kept(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """Send what was sent last to the lent replicas, as `WeightSender.send`. A leader has what
        its members gave. Raises SyncError: that is not `version`; or as `WeightSender.send`."""
        unpin()
        self.lent_sender.share_kept(self.sender)
        if version != self.sender.kept_version:
            raise SyncError(
                f"trainer rank {self.rank} keeps version {self.sender.kept_version}, asked to send "
                f"{version}"
            )
        return self.lent_sender.send((), version, sharded_only)

    @ray.method(concurrency_group="control")
    def release(self, version: int) -> None:
        """Every replica has version `version`: the weights may change."""
        with self.release_changed:
            self.released = version
            self.release_changed.notify_all()

    @ray.method(concurrency_group="control")
    def abort_sync(self, epoch: int, reason: str) -> None:
        """End all waits of this epoch's groups, here and at the receivers: one of their processes
        failed."""
        if hasattr(self, "sender"):
            self.sender.abort(epoch, reason)
        if self.lent_sender is not None:
            self.lent_sender.abort(epoch, reason)
        if self.member is not None:
            self.member.abort(epoch, reason)

    @ray.method(concurrency_group="control")
    def fail_sync(self, reason: str) -> None:
        """The attempt ends: `before_step` raises SyncError with this reason, and does not wait for
        a release."""
        with self.release_changed:
            self.sync_failure = reason
            self.release_changed.notify_all()

    def before_step(self) -> None:
        """Wait until the weights may change: every replica has them, its canary was accepted, and
        what was sent is kept. Raises SyncError: that did not happen."""
        sync_is_open = hasattr(self, "release_changed")
        if not sync_is_open:
            return
        limit_s = self.cfg.trainer.step_timeout_s
        with self.release_changed:
            ended = self.release_changed.wait_for(
                lambda: self.sync_failure or self.released >= self.version, limit_s
            )
        who = f"trainer rank {self.rank}: version {self.version}"
        if self.sync_failure:
            raise SyncError(f"{who} did not reach the replicas: {self.sync_failure}")
        if not ended:
            raise SyncError(f"{who} was not sent and accepted in {limit_s:g} s")
        if hasattr(self, "sender"):
            self.sender.finish_keeping()
