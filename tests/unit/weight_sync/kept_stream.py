"""Receivers that keep blocks of the tensors, as tensor-parallel workers do, and a stand-in for the
layout of their models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks
from tests.unit.weight_sync.weight_stream import Job, Weights, WeightStream

SHAPES = {
    "embed": (40, 6),
    "q": (16, 9),
    "k": (4, 9),
    "o": (9, 16),
    "norm": (9,),
    "scale": (),
    "expert.0": (5, 7),
    "expert.1": (5, 7),
    "unused": (3, 3),
}


def rows(shape: tuple[int, ...], start: int, stop: int, dim: int = 0) -> Block:
    """The rows (columns) [start, stop) of a tensor."""
    starts = [0] * len(shape)
    stops = list(shape)
    starts[dim], stops[dim] = start, stop
    return Block(tuple(starts), tuple(stops))


def kept_by_rank(rank: int, ranks: int, shapes: dict[str, tuple] = SHAPES) -> ShardBlocks:
    """What one tensor-parallel rank keeps: rows of embed and q, columns of o, rows of k that two
    neighbors share if there are more than two ranks, one expert, and nothing of `unused`."""
    share = {name: shape[0] // ranks for name, shape in shapes.items() if shape}
    heads = min(ranks, 2)
    head = rank * heads // ranks
    kept = {}
    for name, shape in shapes.items():
        if name in ("embed", "q"):
            block = rows(shape, rank * share[name], (rank + 1) * share[name])
        elif name == "k":
            size = shape[0] // heads
            block = rows(shape, head * size, (head + 1) * size)
        elif name == "o":
            size = shape[1] // ranks
            block = rows(shape, rank * size, (rank + 1) * size, dim=1)
        else:
            block = Block.whole(shape)
        kept[name] = (block,)
        if name == "unused" or (name.startswith("expert") and int(name[-1]) != rank % 2):
            kept[name] = ()
    return kept


class StandInLayout:
    """A model that holds whole tensors, NaN where its worker keeps nothing."""

    def __init__(self, kept: ShardBlocks, shapes: dict[str, tuple], dtype: torch.dtype) -> None:
        self.kept = kept
        self.tensors: Weights = {
            name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()
        }

    def addresses(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors.values())

    def bind(self, shards: list[tuple[str, Block, torch.Tensor]]) -> BoundCopies:
        pairs = []
        for name, block, view in shards:
            assert any(own.contains(block) for own in self.kept[name]), (name, block)
            pairs.append((block.slice_of(self.tensors[name]), view))
        return BoundCopies(pairs)

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Take whole tensors, as vLLM's loader does."""
        for name, tensor in tensors:
            for block in self.kept[name]:
                block.slice_of(self.tensors[name]).copy_(block.slice_of(tensor))

    def assert_holds(self, weights: Weights) -> None:
        """Exactly the kept blocks of `weights`, and NaN elsewhere."""
        for name, tensor in weights.items():
            expected = torch.full_like(tensor, float("nan"))
            for block in self.kept[name]:
                block.slice_of(expected).copy_(block.slice_of(tensor))
            found = self.tensors[name]
            same = torch.equal(found.nan_to_num(9e9), expected.nan_to_num(9e9))
            assert same and torch.equal(found.isnan(), expected.isnan()), name


class KeptStream(WeightStream):
    """A stream to `replicas` engines of `ranks` workers each."""

    def __init__(
        self,
        senders: int,
        replicas: int,
        ranks: int,
        bucket_bytes: int = 300,
        kept_by: Callable[[int, int, dict], ShardBlocks] = kept_by_rank,
        **more: Any,
    ) -> None:
        """`kept_by`: what a rank of so many keeps of these shapes."""
        self.kept: ShardsOfReceivers | None = None
        dtype = more.pop("dtype", "bfloat16")
        shapes = more.pop("shapes", SHAPES)
        super().__init__(shapes, senders, 0, bucket_bytes, dtype=dtype, **more)
        self.layouts = []
        for receiver in range(replicas * ranks):
            kept = kept_by(receiver % ranks, ranks, shapes)
            self.layouts.append(StandInLayout(kept, shapes, getattr(torch, dtype)))
            self.receivers.append(self.new_receiver(receiver))
            self.receivers[-1].layout = self.layouts[-1]
        self.kept = ShardsOfReceivers.by_kind([layout.kept for layout in self.layouts])
        self.connect(2)

    def connect_jobs(self, epoch: int, same_device: list[list[int]] | None = None) -> list[Job]:
        count = len(self.receivers)
        neighbors = same_device or [[] for _ in self.senders]
        addresses = [sender.address for sender in self.senders]
        jobs: list[Job] = []
        for sender, near in zip(self.senders, neighbors, strict=True):
            jobs.append(lambda s=sender, n=near: s.connect(epoch, count, n, self.kept))
        for receiver in self.receivers:
            jobs.append(lambda r=receiver: r.connect(epoch, addresses, count, neighbors, self.kept))
        return jobs

    def sync_kept(self, weights: Weights, version: int, sharded_only: bool = True) -> list[Any]:
        """One sync into the layouts: what senders and then receivers return or raise."""

        def change(jobs: list[Job]) -> None:
            jobs.clear()
            for index, sender in enumerate(self.senders):
                jobs.append(
                    lambda s=sender, i=index: s.send(self.rows(weights, i), version, sharded_only)
                )
            for receiver, layout in zip(self.receivers, self.layouts, strict=True):
                jobs.append(lambda r=receiver, o=layout: r.receive(o.load, version, sharded_only))

        results, _ = self.sync(weights, version, change_jobs=change)
        return results
