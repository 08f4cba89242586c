"""What a sync asks of a GPU: counted on the device path, over CPU tensors with stand-ins for
streams and events."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.config.schema import Config
from one_step_off.weight_sync.bucket_plan import weighted_sums
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from tests.unit.weight_sync.device_counts import SyncCounts, as_on_a_gpu
from tests.unit.weight_sync.kept_stream import KeptStream, rows
from tests.unit.weight_sync.weight_stream import (
    Job,
    Weights,
    assert_no_errors,
    random_weights,
    run_together,
)

SHAPES: dict[str, tuple] = {"embed": (64, 16)}
for layer in range(12):
    SHAPES |= {
        f"layers.{layer}.q": (16, 16),
        f"layers.{layer}.o": (16, 16),
        f"layers.{layer}.norm": (16,),
    }
BUCKET_BYTES = 2048

READS_PER_SYNC = 2
"""Host waits of a remote receiver beside those for its buckets: for the headers, and for the
checksums of the senders. They arrive on the device."""


def kept_by(rank: int, ranks: int, shapes: dict[str, tuple]) -> ShardBlocks:
    """Rows of embed and q, columns of o, all of the norms."""
    kept = {}
    for name, shape in shapes.items():
        dim = 1 if name.endswith("o") else 0
        size = shape[dim] // ranks
        block = rows(shape, rank * size, (rank + 1) * size, dim)
        kept[name] = (Block.whole(shape) if name.endswith("norm") else block,)
    return kept


class CountedStream(KeptStream):
    """Live fp32 rows, sent as bf16 into the parameters."""

    def __init__(self, counts: SyncCounts, senders: int, ranks: int, near: bool) -> None:
        super().__init__(senders, 1, ranks, BUCKET_BYTES, kept_by, shapes=SHAPES)
        self.counts = counts
        self.near = [[0]] if near else None
        self.weights = random_weights(SHAPES)
        self.live = [list(self.rows(self.weights, sender)) for sender in range(senders)]

    def run(self, version: int, sharded_only: bool = True) -> None:
        """One sync; the layouts hold the weights afterwards."""
        jobs: list[Job] = []
        for sender, tensors in zip(self.senders, self.live, strict=True):
            jobs.append(lambda s=sender, t=tensors: self._send(s, t, version, sharded_only))
        for receiver, layout in zip(self.receivers, self.layouts, strict=True):
            jobs.append(lambda r=receiver, o=layout: self._receive(r, o, version, sharded_only))
        assert_no_errors(run_together(jobs))
        expected: Weights = {name: w.bfloat16() for name, w in self.weights.items()}
        for layout in self.layouts:
            layout.assert_holds(expected)

    def _send(self, sender, tensors, version, sharded_only):
        with self.counts.of("sender"):
            return sender.send(tensors, version, sharded_only)

    def _receive(self, receiver, layout, version, sharded_only):
        with self.counts.of("receiver"):
            return receiver.receive(layout.load, version, sharded_only)

    def change_weights(self) -> None:
        for tensor in self.weights.values():
            tensor += 0.01 * torch.randn_like(tensor)


@pytest.fixture
def counts(monkeypatch) -> Iterator[SyncCounts]:
    counts = SyncCounts()
    as_on_a_gpu(monkeypatch, counts)
    yield counts


def counted_sync(counts: SyncCounts, senders: int, ranks: int, near: bool) -> CountedStream:
    """A stream whose counts are those of its fourth sync: all views are bound then."""
    stream = CountedStream(counts, senders, ranks, near)
    for sender in stream.senders:
        sender.keep_sent = True
    stream.connect(3, stream.near)
    for version in range(4):
        for sender in stream.senders:
            sender.finish_keeping()
        stream.change_weights()
        counts.clear()
        stream.run(version, sharded_only=version > 0)
    return stream


@pytest.mark.parametrize(
    ("senders", "ranks", "near", "messages"),
    # With two ranks a sender's part of a bucket leaves as three messages: to both, and to each.
    [(1, 1, True, 1), (1, 1, False, 1), (2, 2, False, 3)],
    ids=["same device", "collective", "sharded"],
)
def test_a_side_waits_once_per_bucket_and_launches_few_kernels(
    counts, senders, ranks, near, messages
):
    stream = counted_sync(counts, senders, ranks, near)
    buckets = len(stream.plan.buckets)
    assert buckets >= 5
    checksum_kernels = 3  # of less than a row of words
    cut_kernels = 0 if ranks == 1 else 2  # rows, and columns, which have gaps
    most_kernels = {
        "sender": 1 + messages * (cut_kernels + checksum_kernels),
        "receiver": 1 + senders * min(messages, 2) * checksum_kernels + bool(cut_kernels),
    }
    for side, processes in (("sender", senders), ("receiver", ranks)):
        waits = counts.host_waits[side]
        reads = READS_PER_SYNC if side == "receiver" and not near else 0
        assert sum(waits.values()) == processes * (buckets + reads), waits
        kernels = counts.kernels[side]
        once = processes * 12
        assert sum(kernels.values()) <= once + processes * buckets * most_kernels[side], kernels
        if ranks == 1:
            assert kernels["aten::_foreach_copy_"] == buckets


@pytest.mark.parametrize("near", [True, False], ids=["same device", "collective"])
def test_deltas_have_few_waits_per_message(counts, near):
    stream = CountedStream(counts, 1, 1, near)
    stream.senders[0].full_every = 50
    stream.connect(3, stream.near)
    for version in range(3):
        stream.senders[0].finish_keeping()
        for tensor in stream.weights.values():
            tensor += 0.01 * torch.randn_like(tensor) * (torch.rand_like(tensor) < 0.05)
        counts.clear()
        stream.run(version, sharded_only=version > 0)
    buckets = len(stream.plan.buckets)
    # Beside the bucket itself a sender reads the counts of a payload, twice; a receiver its header,
    # whether it fits, and, where it arrives on the device, its size.
    assert sum(counts.host_waits["sender"].values()) == 3 * buckets, counts.host_waits
    expected = 3 * buckets if near else 4 * buckets + READS_PER_SYNC
    assert sum(counts.host_waits["receiver"].values()) == expected, counts.host_waits


def test_a_checksum_is_five_kernels(counts):
    flat = torch.zeros(100_000, dtype=torch.uint8)
    words = torch.zeros(2, dtype=torch.int64)
    weighted_sums(flat, words)  # its weights are kept
    with counts.of("sender"):
        weighted_sums(flat, words)
    assert sum(counts.kernels["sender"].values()) == 5
    assert not counts.host_waits


def test_weights_that_moved_are_bound_again(counts):
    """Where a trainer's or an engine's storage moves, the old views lead to freed memory."""
    stream = counted_sync(counts, 1, 1, near=True)
    (layout,) = stream.layouts
    old_weights = stream.weights
    old_parameters = layout.tensors
    stream.weights = random_weights(SHAPES)
    stream.live = [list(stream.rows(stream.weights, 0))]
    layout.tensors = {name: torch.full_like(t, float("nan")) for name, t in old_parameters.items()}
    before = {name: tensor.clone() for name, tensor in old_parameters.items()}
    for tensor in old_weights.values():
        tensor.fill_(float("nan"))
    stream.senders[0].finish_keeping()
    stream.run(4)
    for name, tensor in before.items():
        assert torch.equal(tensor, old_parameters[name]), "nothing is written to the old place"


class Rank(WeightSenderMixin):
    """The part of a trainer rank that a sync needs, at a version that the replicas have."""

    def __init__(self, sender: WeightSender, version: int) -> None:
        self.cfg = Config()
        self.rank = 0
        self.version = version
        self.sender = sender
        self.release_changed = threading.Condition()
        self.released = version


def test_an_optimizer_step_waits_until_what_was_sent_is_kept(counts, monkeypatch):
    stream = counted_sync(counts, 1, 1, near=True)
    (sender,) = stream.senders
    sender.finish_keeping()
    may_pack = threading.Event()
    keep = sender._keep

    def keep_late(version: int) -> None:
        may_pack.wait(10)
        keep(version)

    monkeypatch.setattr(sender, "_keep", keep_late)
    sent = {name: tensor.clone() for name, tensor in stream.weights.items()}
    stream.run(4)
    assert sender.kept_version is None
    step = threading.Thread(target=Rank(sender, 4).before_step, daemon=True)
    step.start()
    step.join(0.2)
    assert step.is_alive(), "the weights are still to be copied"
    may_pack.set()
    step.join(10)
    assert not step.is_alive()
    assert sender.kept_version == 4

    stream.change_weights()
    changed, stream.weights = stream.weights, sent
    stream.connect(4, stream.near)
    stream.run(4)  # as for a replica that comes back: the kept version, not the model's
    assert not torch.equal(changed["embed"], sent["embed"])


def test_what_cannot_be_kept_ends_the_step_by_name(counts, monkeypatch):
    stream = counted_sync(counts, 1, 1, near=True)
    (sender,) = stream.senders

    def fail(version: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sender, "_keep", fail)
    stream.run(4)
    with pytest.raises(SyncError, match="sender 0, phase keep, .*out of memory"):
        Rank(sender, 4).before_step()


def test_marks_are_read_after_the_sync(counts):
    stream = counted_sync(counts, 1, 1, near=True)
    sender = stream.senders[0]
    seconds = sender.record.phase_seconds
    buckets = len(stream.plan.buckets)
    # The stand-in's marks are 1 ms apart.
    assert seconds["checksum"] == pytest.approx(1e-3 * buckets)
    assert "keep" not in seconds
    assert stream.receivers[0].record.phase_seconds["load"] == pytest.approx(1e-3 * buckets)
