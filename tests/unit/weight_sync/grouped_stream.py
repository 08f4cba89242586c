"""A weight stream whose ranks form sender groups: leaders, members and receivers, each on a thread,
over TCP and gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.sender_groups import GroupLeader, GroupMember, form_groups
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.weight_sync.weight_stream import CPU, HOST, Job, Weights, copy_into, run_together

MEMBER_LIMIT_S = 60.0
"""Far above any limit of a test: a member must end by its leader's failure, or by an abort."""


class GroupedStream:
    """The ranks that own `pieces`, in at most `max_senders` groups, connected."""

    def __init__(
        self,
        pieces: Pieces,
        max_senders: int,
        receivers: int = 2,
        bucket_bytes: int = 256,
        timeout_s: float = 10.0,
        **sender_attributes: Any,
    ) -> None:
        """`sender_attributes`: full_every and keep_sent of every leader."""
        self.pieces = pieces
        self.groups = form_groups(pieces, max_senders)
        self.plan = BucketPlan.build([group.pieces for group in self.groups], bucket_bytes)
        self.senders: list[WeightSender] = []
        self.members: dict[int, GroupMember] = {}
        self.leader_of: dict[int, GroupLeader] = {}
        for index, group in enumerate(self.groups):
            sender = WeightSender(self.plan, index, CPU, HOST, timeout_s)
            for name, value in sender_attributes.items():
                setattr(sender, name, value)
            if group.members:
                group_pieces = [pieces[rank] for rank in group.ranks]
                leader = GroupLeader(self.plan, index, group, group_pieces, CPU, HOST)
                sender.leader = leader
                for rank in group.members:
                    self.leader_of[rank] = leader
                    self.members[rank] = GroupMember(
                        self.plan, index, pieces[rank], rank, CPU, timeout_s, MEMBER_LIMIT_S
                    )
            self.senders.append(sender)
        self.receivers = [
            WeightReceiver(self.plan, index, CPU, HOST, timeout_s) for index in range(receivers)
        ]
        assert self.connect(1) == [None] * self.process_count

    @property
    def process_count(self) -> int:
        """Of leaders, members and receivers."""
        return len(self.senders) + len(self.members) + len(self.receivers)

    def connect(self, epoch: int, without: int | None = None) -> list[Any]:
        """Create the groups of an epoch; what each process returns or raises.

        Args:
            epoch: counts the groups.
            without: a member that does not come.
        """
        count = len(self.receivers)
        addresses = [sender.address for sender in self.senders]
        jobs: list[Job] = [lambda s=sender: s.connect(epoch, count) for sender in self.senders]
        for rank, member in self.members.items():
            address = self.leader_of[rank].links.address
            if rank != without:
                jobs.append(lambda m=member, a=address: m.connect(epoch, a))
        for receiver in self.receivers:
            jobs.append(lambda r=receiver: r.connect(epoch, addresses, count))
        return run_together(jobs)

    def sync(
        self,
        weights: Weights,
        version: int,
        held_version: int | None = None,
        change: Callable[[dict[str, Job]], Any] | None = None,
    ) -> tuple[dict[str, Any], list[Weights]]:
        """One sync: what each process returns or raises, by "rank R" and "receiver I"; and what
        each receiver got.

        Args:
            weights: of the model.
            version: that is sent.
            held_version: of the members' weights; None: the same.
            change: changes the calls, by the same names.
        """
        if held_version is None:
            held_version = version
        jobs: dict[str, Job] = {}
        for sender, group in zip(self.senders, self.groups, strict=True):
            tensors = data_of(self.pieces[group.leader], weights)
            jobs[f"rank {group.leader}"] = lambda s=sender, t=tensors: s.send(t, version)
        for rank, member in self.members.items():
            tensors = data_of(self.pieces[rank], weights)
            jobs[f"rank {rank}"] = lambda m=member, t=tensors: m.send(t, version, held_version)
        received: list[Weights] = []
        for index, receiver in enumerate(self.receivers):
            target: Weights = {}
            received.append(target)
            load = copy_into(target)
            jobs[f"receiver {index}"] = lambda r=receiver, load=load: r.receive(load, version)
        if change:
            change(jobs)
        results = run_together(list(jobs.values()))
        return dict(zip(jobs, results, strict=True)), received


def data_of(pieces: list[WeightPiece], weights: Weights) -> Iterator[torch.Tensor]:
    """The data of a rank's pieces."""
    for piece in pieces:
        yield piece.slice_of(weights[piece.name])


def megatron_pieces(tensor_parallel: int, data_parallel: int, dtype: str) -> Pieces:
    """As Megatron's ranks have them: layers cut along rows or columns over the tensor-parallel
    ranks, norms whole on the first of them, and the data-parallel copies send a layer each."""
    layers = 3
    pieces: Pieces = []
    for copy in range(data_parallel):
        for shard in range(tensor_parallel):
            owned = []
            for layer in range(layers):
                if layer % data_parallel != copy:
                    continue
                prefix = f"model.layers.{layer}"
                rows = (shard * 6, shard * 6 + 6)
                shape = (6 * tensor_parallel, 5)
                owned.append(WeightPiece(f"{prefix}.up", dtype, shape, *rows))
                owned.append(WeightPiece(f"{prefix}.down", dtype, shape[::-1], *rows, dim=1))
                if shard == 0:
                    owned.append(WeightPiece(f"{prefix}.norm", dtype, (5,), 0, 5))
            pieces.append(owned)
    return pieces


def hsdp_pieces(shapes: dict[str, tuple], shards: int, replicas: int, dtype: str) -> Pieces:
    """As HSDP's ranks have them: each tensor is sent by the shards of one replica."""
    pieces: Pieces = [[] for _ in range(shards * replicas)]
    for position, (name, shape) in enumerate(shapes.items()):
        first_rank = position % replicas * shards
        rows_per_shard = -(-shape[0] // shards)
        for shard in range(shards):
            start = min(shape[0], shard * rows_per_shard)
            stop = min(shape[0], start + rows_per_shard)
            if start < stop:
                pieces[first_rank + shard].append(WeightPiece(name, dtype, shape, start, stop))
    return pieces


def weights_of(pieces: Pieces, dtype: str) -> Weights:
    """Random tensors for all of these."""
    weights: Weights = {}
    for piece in (piece for owned in pieces for piece in owned):
        weights.setdefault(piece.name, torch.randn(piece.shape).to(getattr(torch, dtype)))
    return weights
