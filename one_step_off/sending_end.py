"""A training worker's end of the weight sync, over its `weight_plan` and `weight_tensors`.

With `weight_sync.overlap` the weights leave while the next step's first forward and backward pass run: what Ray calls
here has a thread of its own beside the worker's, and the optimiser waits until the driver knows that every replica has
them. (That this rank has sent them is not enough: they are sent again when a replica dies before its end of it.)
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch

from one_step_off.bucket_plan import BucketPlan, Pieces, SyncError, sent_by
from one_step_off.config import Config
from one_step_off.distributed_util import Sender, own_host, unpin


class SendingEnd:
    """Mixed into a worker, before its class. `threads`: what runs beside the worker's own calls."""

    # The worker's own.
    cfg: Config
    rank: int
    device: str
    version: int
    weight_tensors: Callable[[], Iterator[torch.Tensor]]
    gathered: Callable[..., Iterator[tuple[str, torch.Tensor]]]

    threads = {"sync": 1, "saving": 1}
    released = -1  # the version that need not be read any more

    @ray.method(concurrency_group="sync")
    def open_sender(self, pieces: Pieces, bucket_bytes: int, host: str, timeout_s: float) -> tuple[str, int] | None:
        """Build the plan over all ranks' pieces and listen. Returns (host, port), or None from a rank that sends
        nothing itself."""
        self.pieces, self.changing, own = pieces, threading.Condition(), self.cfg.weight_sync
        sent = sent_by(pieces, own.sender)
        if self.rank not in sent:
            return None
        plan, device = BucketPlan.build([*sent.values()], bucket_bytes), torch.device(self.device)
        self.sender = Sender(plan, [*sent].index(self.rank), device, own_host(host), timeout_s)
        self.sender.full_every = own.full_every if own.mode == "delta" else 0
        self.sender.keep = own.keep_sent and own.sender == "sharded"
        return self.sender.address

    @ray.method(concurrency_group="sync")
    def connect_sync(self, epoch: int, receivers: int, near: list[int]) -> None:
        """Form this sender's group; the receivers join meanwhile. `near`: those on its device."""
        self.sender.connect(epoch, receivers, near)

    @ray.method(concurrency_group="sync")
    def send_weights(self, version: int) -> dict[str, Any]:
        """As `Sender.send`; it refuses (SyncError) a version that is neither the worker's nor kept. With weight_sync.sender=gather
        every rank is called, and gives rank 0 its pieces (collective)."""
        unpin()
        own = self.cfg.weight_sync.sender == "sharded"
        if version != self.version and not (own and self.sender.kept == version):
            raise SyncError(f"trainer rank {self.rank} holds version {self.version}, asked to send {version}")
        if own:
            return self.sender.send(self.weight_tensors(), version)
        gathered = self.gathered(self.pieces, self.device)
        if self.rank == 0:
            return self.sender.send((tensor for _, tensor in gathered), version)
        return {"bytes": 0.0, "changed": 0.0, "each": [], "spans": []} | dict(gathered)  # which has nothing here

    @ray.method(concurrency_group="sync")
    def release(self, version: int) -> None:
        """Every replica has these weights: they may change."""
        with self.changing:
            self.released = version
            self.changing.notify_all()

    def before_step(self) -> None:
        """Wait until these weights may change. Raises SyncError: the driver has not got them to the replicas."""
        own, limit = self.cfg.weight_sync, self.cfg.trainer.step_timeout_s
        if own.overlap and hasattr(self, "changing"):
            with self.changing:
                if not self.changing.wait_for(lambda: self.released >= self.version, limit):
                    raise SyncError(f"trainer rank {self.rank}: version {self.version} was not sent in {limit:g} s")
