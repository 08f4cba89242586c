"""Real sends over gloo between threads, each with a group of its own: full, as deltas, in
strips."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from tests.unit.weight_sync.weight_stream import (
    CPU,
    HOST,
    SHAPES,
    WeightStream,
    assert_no_errors,
    assert_received,
    perturb,
    random_weights,
    row_pieces,
)

MIB = 1 << 20


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_arrive_over_gloo(senders, receivers, dtype):
    stream = WeightStream(SHAPES, senders, receivers, dtype=dtype)
    assert len(stream.plan.buckets) > 1
    for version in range(3):  # the same buffers serve every sync
        weights = random_weights(SHAPES, dtype)
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)


def test_no_default_group_is_created():
    WeightStream(SHAPES, 1, 1)
    assert not torch.distributed.is_initialized()


class CorruptingWork:
    """Work of a process group that flips a bit of what it has received."""

    def __init__(self, work, tensor) -> None:
        self.work = work
        self.tensor = tensor
        self.corrupted = False

    def is_completed(self):
        return self.work.is_completed()

    def wait(self, limit):
        self.work.wait(limit)
        self.tensor[3] ^= 4
        self.corrupted = True


def test_corruption_on_the_wire_is_detected(monkeypatch):
    stream = WeightStream(SHAPES, 2, 1)
    group_of_sender_0 = stream.receivers[0].ends[0]
    start_receive = DedicatedGroup.start_receive
    received_buckets: list[torch.Tensor] = []
    corrupting: list[CorruptingWork] = []

    def corrupt_second_bucket(group, buffer):
        start_receive(group, buffer)
        if group is group_of_sender_0 and buffer.dtype == torch.uint8:
            received_buckets.append(buffer)
            if len(received_buckets) == 2:
                group.work = CorruptingWork(group.work, buffer)
                corrupting.append(group.work)

    monkeypatch.setattr(DedicatedGroup, "start_receive", corrupt_second_bucket)
    results, _ = stream.sync(random_weights(SHAPES), 0)
    assert [work.corrupted for work in corrupting] == [True]
    errors = [str(result) for result in results if isinstance(result, SyncError)]
    assert errors
    assert "checksum of bucket 2" in errors[0]
    assert "sender 0" in errors[0]


def test_a_wrong_version_is_refused():
    stream = WeightStream(SHAPES, 1, 1, timeout_s=4.0)
    results, received = stream.sync(random_weights(SHAPES), 7, expected_version=8)
    assert any("sends version 7, expected 8" in str(result) for result in results)
    assert not received[0]


def test_another_plan_is_refused():
    stream = WeightStream(SHAPES, 1, 1, timeout_s=4.0)
    stream.receivers[0].plan = dataclasses.replace(stream.plan, digest=1)
    results, received = stream.sync(random_weights(SHAPES), 0)
    assert any("another bucket plan" in str(result) for result in results)
    assert not received[0]


def test_a_missing_peer_ends_in_a_named_error_in_bounded_time():
    stream = WeightStream(SHAPES, 1, 2, timeout_s=3.0)
    begin = time.perf_counter()
    sender_never_sends = {"change_jobs": lambda jobs: jobs.pop(0)}
    results, _ = stream.sync(random_weights(SHAPES), 0, **sender_never_sends)
    assert time.perf_counter() - begin < 10
    for result in results:
        assert isinstance(result, SyncError)
        assert "phase header" in str(result)


def test_a_tensor_that_is_not_as_planned_is_named():
    stream = WeightStream(SHAPES, 1, 1, timeout_s=3.0)
    weights = random_weights(SHAPES)
    weights["w"] = torch.randn(4, 4, 3)
    results, _ = stream.sync(weights, 0)
    assert any("w is (4, 4, 3), planned (4, 4, 2)" in str(result) for result in results)


@pytest.mark.parametrize("same_device", [None, [[0], [0]]], ids=["gloo", "shared memory"])
def test_a_tensor_larger_than_a_bucket_arrives_in_strips_and_memory_stays_bounded(same_device):
    bucket_bytes = 20_000
    shapes = {"small": (3, 5), "huge": (1000, 64), "column": (6, 300), "last": (7,)}
    huge_bytes = 1000 * 64 * 4
    stream = WeightStream(shapes, 2, 1, bucket_bytes=bucket_bytes, same_device=same_device)
    (receiver,) = stream.receivers
    strips = [bucket for bucket in stream.plan.buckets if "huge" in bucket.join_offsets]
    assert len(strips) == 13
    assert stream.plan.largest_bucket_bytes <= bucket_bytes
    # Beside two buffers a sender needs nothing: it packs the rows as they are, without a copy.
    for endpoint in (*stream.senders, receiver):
        assert sum(buffer.nbytes for buffer in endpoint.buffers) <= 2 * bucket_bytes
    assert len(receiver.join_buffer) == huge_bytes

    def buffer_addresses() -> list[int]:
        endpoints = (*stream.senders, receiver)
        return [buffer.data_ptr() for endpoint in endpoints for buffer in endpoint.buffers]

    addresses = buffer_addresses()
    for version in range(3):
        weights = random_weights(shapes)
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)
    assert buffer_addresses() == addresses, "the buffers are reused"


@pytest.mark.parametrize(
    "same_device",
    [None, [[0, 1], [0, 1]], [[0], [1]]],
    ids=["gloo", "shared memory", "both"],
)
def test_deltas_leave_the_same_bits_as_full_syncs(same_device):
    """Random sparse updates of bf16 weights, a dense one among them, and a full sync every 20."""
    shapes = {"embed": (400, 64), "w": (64, 64), "norm": (64,), "scalar": ()}
    stream = WeightStream(
        shapes, 2, 2, bucket_bytes=16_000, dtype="bfloat16", same_device=same_device
    )
    for sender in stream.senders:
        sender.full_every = 20
    weights = random_weights(shapes, "bfloat16")
    bytes_of_sync = []
    for version in range(50):
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)
        bytes_of_sync.append(sum(report["bytes"] for report in results[:2]))
        perturb(weights)
        if version == 7:
            for tensor in weights.values():
                tensor.copy_(torch.randn(tensor.shape))
    full_bytes = stream.plan.total_bytes
    full_syncs = [i for i, size in enumerate(bytes_of_sync) if size >= full_bytes]
    assert full_syncs == [0, 8, 20, 40]
    deltas = [size for i, size in enumerate(bytes_of_sync) if i not in full_syncs]
    assert max(deltas) < 0.1 * full_bytes


@pytest.mark.parametrize("same_device", [None, [[0], [0]]], ids=["gloo", "shared memory"])
def test_a_full_sync_between_deltas_is_the_base_of_the_next_one(same_device):
    shapes = {"embed": (400, 64), "w": (64, 64), "norm": (64,), "scalar": ()}
    stream = WeightStream(
        shapes, 2, 1, bucket_bytes=16_000, dtype="bfloat16", same_device=same_device
    )
    for sender in stream.senders:
        sender.full_every = 20
    weights = random_weights(shapes, "bfloat16")
    full_syncs = []
    for version in range(8):
        results, received = stream.sync(weights, version, wants_full=version in (2, 5, 6))
        assert_no_errors(results)
        assert_received(received, weights)
        if math.isnan(results[0]["changed"]):
            full_syncs.append(version)
        perturb(weights)
    assert full_syncs == [0, 2, 5, 6]


def test_a_delta_on_a_wrong_base_is_detected():
    shapes = {"w": (64, 64)}
    stream = WeightStream(shapes, 1, 1, dtype="bfloat16")
    stream.senders[0].full_every = 20
    weights = random_weights(shapes, "bfloat16")
    stream.sync(weights, 0)
    stream.receivers[0].mirror.buckets[0][5] ^= 1
    weights["w"].view(torch.int16)[3, 3] += 1
    results, _ = stream.sync(weights, 1)
    assert any("checksum of bucket 1" in str(result) for result in results)


def test_the_version_that_is_kept_is_sent_again_without_the_model():
    """A restarted replica receives it in a new epoch, after the trainer's weights have changed."""
    stream = WeightStream(SHAPES, 2, 1)
    for sender in stream.senders:
        sender.keep_sent = True
    weights = random_weights(SHAPES)
    stream.sync(weights, 3)
    assert [sender.kept_version for sender in stream.senders] == [3, 3]
    stream.connect(2)
    results, received = stream.sync(random_weights(SHAPES), 3)
    assert_no_errors(results)
    assert_received(received, weights)


def test_groups_are_created_again_without_a_failed_receiver_and_with_a_late_one():
    stream = WeightStream(SHAPES, 2, 3, timeout_s=20.0)
    for sender in stream.senders:
        sender.full_every = 20
    stream.sync(random_weights(SHAPES), 0)

    failed_receiver = stream.receivers.pop(1)
    begin = time.monotonic()
    failed_receiver.close()
    results, _ = stream.sync(random_weights(SHAPES), 1)
    assert all(isinstance(result, SyncError) for result in results)
    assert time.monotonic() - begin < 10

    stream.receivers[1] = stream.new_receiver(1)
    stream.connect(2)
    weights = random_weights(SHAPES)
    results, received = stream.sync(weights, 1)
    assert_no_errors(results)
    assert_received(received, weights)

    stream.receivers.append(stream.new_receiver(2))
    stream.connect(3)
    for version in (2, 3):  # with deltas: the first sync of an epoch is full
        weights = random_weights(SHAPES)
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)


def test_each_bucket_is_timed_on_the_wire():
    shapes = {"w": (1000, 64)}
    stream = WeightStream(shapes, 2, 1, bucket_bytes=50_000)
    results, _ = stream.sync(random_weights(shapes), 0)
    *sent, received = results
    assert received["bytes"] == stream.plan.total_bytes
    assert sum(report["bytes"] for report in sent) == stream.plan.total_bytes
    for report in results:
        buckets = [index for index, _ in report["bucket_wire"]]
        assert buckets == list(range(len(stream.plan.buckets)))
        assert all(seconds > 0 for _, seconds in report["bucket_wire"])
    assert received["bare_wire"] > 0
    assert {"wait", "verify", "load"} <= received.keys()
    span_phases = {phase for _, phase, _, _ in received["spans"]}
    assert span_phases >= {"wire", "load", "verify"}


def run_sender(pieces: list, bucket_bytes: int, outbox) -> None:
    """One sender in a process of its own; reports by how much its memory grew while it sent."""
    torch.set_num_threads(1)
    model = [torch.ones(piece.shape) for sent in pieces for piece in sent]
    sender = WeightSender(BucketPlan.build(pieces, bucket_bytes), 0, CPU, HOST, 30.0)
    outbox.put(sender.address)
    resident_before = process_memory("VmRSS")
    sender.connect(1, 1)
    for version in range(2):
        sender.send(iter(model), version)
    outbox.put(process_memory("VmHWM") - resident_before)


def process_memory(name: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    raise ValueError(name)


def test_the_memory_of_a_sender_grows_by_two_buckets_and_a_piece():
    """256 MiB in tensors of 1 to 64 MiB, sent in half as many bytes by buckets of 16 MiB."""
    shapes = {"embed": (64, 262144)}
    for i in range(15):
        shapes[f"layers.{i}.w"] = (48, 65536)
    shapes["norm"] = (4, 65536)
    bucket_bytes = 16 * MIB
    pieces = row_pieces(shapes, 1, "bfloat16")
    context = torch.multiprocessing.get_context("spawn")
    outbox = context.Queue()
    arguments = (pieces, bucket_bytes, outbox)
    process = context.Process(target=run_sender, args=arguments, daemon=True)
    process.start()
    plan = BucketPlan.build(pieces, bucket_bytes)
    receiver = WeightReceiver(plan, 0, CPU, HOST, 30.0)
    receiver.connect(1, [outbox.get(timeout=60)], 1)
    for version in range(2):
        receiver.receive(lambda tensors: None, version)
    grown_bytes = outbox.get(timeout=60)
    process.join(30)
    assert plan.largest_bucket_bytes <= bucket_bytes
    of_torch_and_gloo = 24 * MIB
    assert grown_bytes < 2 * bucket_bytes + of_torch_and_gloo
