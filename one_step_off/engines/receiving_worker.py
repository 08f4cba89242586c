"""What the workers of all engines do alike to receive weights."""

from typing import Any

import torch

from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.shard_blocks import shards_from_plain
from one_step_off.weight_sync.transports.transport import load_transport
from one_step_off.weight_sync.weight_piece import WeightPiece


class ReceivingWorker:
    """A worker of an engine, as far as it joins the weight sync. What it does with the weights is
    up to its subclass.

    Attributes:
        receiver: None before the first `join_groups`.
    """

    receiver: WeightReceiver | None = None

    def join_groups(self, info: dict[str, Any], device: torch.device, worker: int = 0) -> None:
        """Join the senders' groups of a new epoch; those of an earlier one are closed.

        Args:
            info: what `connect_sync` of the worker is given, plain data: "pieces" (per sender the
                fields of its WeightPieces), "bucket_bytes", "first_receiver" (the number of this
                replica's first worker), "host" (the address at which this process listens),
                "timeout_s", "kept" ("blocks" of each kind of receivers, as `plain_shards` makes
                them, and "kind_of_receiver"; None: only whole tensors travel), "transport" (the
                arguments of `load_transport`), and the other arguments of `WeightReceiver.connect`.
            device: that receives the weights.
            worker: its number in this engine.

        Raises:
            SyncError: as `WeightReceiver.connect`.
        """
        groups = dict(info)
        pieces = [_weight_pieces(sent) for sent in groups.pop("pieces")]
        plan = BucketPlan.build(pieces, groups.pop("bucket_bytes"))
        index = groups.pop("first_receiver") + worker
        host = groups.pop("host")
        timeout_s = groups.pop("timeout_s")
        kept = _shards_of_receivers(groups.pop("kept", None))
        transport = groups.pop("transport", ("auto", ""))
        receiver = self.receiver
        if receiver is not None and receiver.plan.digest != plan.digest:
            # The trainers were restarted, and divide the model otherwise.
            receiver.close()
            receiver.wire_thread.stop()
            receiver = None
        if receiver is None:  # one for all epochs: it has a thread and buffers
            streams = load_transport(*transport)
            receiver = WeightReceiver(plan, index, device, host, timeout_s, streams)
        self.receiver = receiver
        receiver.index = index
        receiver.connect(**groups, kept=kept)


def _weight_pieces(fields_of_pieces: list) -> list[WeightPiece]:
    """The pieces of one sender, from the fields of each."""
    pieces = []
    for name, dtype, shape, *cut in fields_of_pieces:
        pieces.append(WeightPiece(name, dtype, tuple(shape), *cut))
    return pieces


def _shards_of_receivers(plain: dict[str, Any] | None) -> ShardsOfReceivers | None:
    if plain is None:
        return None
    blocks = tuple(map(shards_from_plain, plain["blocks"]))
    return ShardsOfReceivers(blocks, tuple(plain["kind_of_receiver"]))
