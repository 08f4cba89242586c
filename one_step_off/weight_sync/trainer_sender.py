"""A training worker's end of the weight sync, over its `weight_plan` and `weight_tensors`.

With `weight_sync.overlap` the weights leave while the next step's first forward and backward pass run: the sync has a
thread of its own beside the worker's, and the optimiser waits until the driver knows that every replica has them. (That
this rank has sent them is not enough: they are sent again when a replica dies before its end of it.)

What ends a wait has a second thread, "control": a send or a connect may hold the first one for minutes.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch

from one_step_off.cluster.core_binding import unpin
from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.network import reachable_host
from one_step_off.config.schema import Config
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces, pieces_of_senders
from one_step_off.weight_sync.sender import WeightSender


class WeightSenderMixin:
    """Mixed into a worker, before its class. `threads`: what runs beside the worker's own calls."""

    # The worker's own.
    cfg: Config
    rank: int
    device: str
    version: int
    weight_tensors: Callable[[], Iterator[torch.Tensor]]
    gathered: Callable[..., Iterator[tuple[str, torch.Tensor]]]

    threads = {"control": 1, "sync": 1, "saving": 1}
    released = -1  # the version that need not be read any more
    sync_failure = ""  # why no sync will release the weights any more

    @ray.method(concurrency_group="sync")
    def open_sender(
        self, pieces: Pieces, bucket_bytes: int, host: str, timeout_s: float
    ) -> tuple[str, int] | None:
        """Build the plan over all ranks' pieces and listen. Returns (host, port), or None from a rank that sends
        nothing itself."""
        self.pieces, self.changing, own = pieces, threading.Condition(), self.cfg.weight_sync
        sent = pieces_of_senders(pieces, own.sender)
        if self.rank not in sent:
            return None
        plan, device = BucketPlan.build([*sent.values()], bucket_bytes), torch.device(self.device)
        self.sender = WeightSender(
            plan, [*sent].index(self.rank), device, reachable_host(host), timeout_s
        )
        self.sender.full_every = own.full_every if own.mode == "delta" else 0
        self.sender.keep = own.keep_sent and own.sender == "sharded"
        return self.sender.address

    @ray.method(concurrency_group="sync")
    def connect_sync(self, epoch: int, receivers: int, near: list[int]) -> None:
        """Form this sender's group; the receivers join meanwhile. `near`: those on its device."""
        self.sender.connect(epoch, receivers, near)

    @ray.method(concurrency_group="sync")
    def send_weights(self, version: int) -> dict[str, Any]:
        """As `WeightSender.send`; it refuses (SyncError) a version that is neither the worker's nor kept. With weight_sync.sender=gather
        every rank is called, and gives rank 0 its pieces (collective)."""
        unpin()
        own = self.cfg.weight_sync.sender == "sharded"
        if version != self.version and not (own and self.sender.kept == version):
            raise SyncError(
                f"trainer rank {self.rank} holds version {self.version}, asked to send {version}"
            )
        if own:
            return self.sender.send(self.weight_tensors(), version)
        gathered = self.gathered(self.pieces, self.device)
        if self.rank == 0:
            return self.sender.send((tensor for _, tensor in gathered), version)
        return {"bytes": 0.0, "changed": 0.0, "bucket_wire": [], "spans": []} | dict(
            gathered
        )  # which has nothing here

    @ray.method(concurrency_group="control")
    def release(self, version: int) -> None:
        """Every replica has these weights: they may change."""
        with self.changing:
            self.released = version
            self.changing.notify_all()

    @ray.method(concurrency_group="control")
    def abort_sync(self, epoch: int, reason: str) -> None:
        """End all waits of this epoch's groups, here and at the receivers: one of their processes failed."""
        if hasattr(self, "sender"):
            self.sender.abort(epoch, reason)

    @ray.method(concurrency_group="control")
    def fail_sync(self, reason: str) -> None:
        """The attempt ends: `before_step` raises SyncError with this reason instead of waiting for a release."""
        with self.changing:
            self.sync_failure = reason
            self.changing.notify_all()

    def before_step(self) -> None:
        """Wait until these weights may change. Raises SyncError: they did not get to the replicas."""
        if not (self.cfg.weight_sync.overlap and hasattr(self, "changing")):
            return
        limit_s = self.cfg.trainer.step_timeout_s
        who = f"trainer rank {self.rank}: version {self.version}"
        with self.changing:
            ended = self.changing.wait_for(
                lambda: self.sync_failure or self.released >= self.version, limit_s
            )
        if self.sync_failure:
            raise SyncError(f"{who} did not reach the replicas: {self.sync_failure}")
        if not ended:
            raise SyncError(f"{who} was not sent in {limit_s:g} s")
