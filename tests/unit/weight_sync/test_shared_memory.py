"""The shared-memory transport: receivers on the sender's device read its buckets."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.transports.same_device import SharedBuffer, SharedMemorySender
from tests.unit.weight_sync.weight_stream import (
    SHAPES,
    WeightStream,
    assert_no_errors,
    assert_received,
    random_weights,
)


@pytest.mark.parametrize(
    ("receivers", "same_device"),
    [
        (1, [[0]]),
        (2, [[0, 1], [0, 1]]),  # the CPU of one machine: all are on the same device
        (2, [[0], [1]]),  # one GPU per slot: the other receivers are remote
        (3, [[0, 1], [0, 1], [2]]),
        (2, [[1], []]),
    ],
)
def test_bits_arrive_in_shared_memory(receivers, same_device):
    stream = WeightStream(SHAPES, len(same_device), receivers, same_device=same_device)
    for sender, neighbors in zip(stream.senders, same_device, strict=True):
        if neighbors:
            assert sender.ends[0].receivers == neighbors
    for version in range(3):
        weights = random_weights(SHAPES)
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)


def test_a_receiver_reads_the_senders_own_buffer():
    stream = WeightStream(SHAPES, 1, 1, same_device=[[0]])
    sent_buffer = stream.senders[0].buffers[1]
    mapped_buffer = stream.receivers[0].ends[0].buffers[1]
    sent_buffer[3] = 77
    assert mapped_buffer[3] == 77
    assert mapped_buffer.data_ptr() != sent_buffer.data_ptr()


def test_no_message_is_left_in_the_store():
    stream = WeightStream(SHAPES, 1, 1, same_device=[[0]])
    stream.sync(random_weights(SHAPES), 0)
    keys_left = stream.senders[0].store.num_keys()
    stream.sync(random_weights(SHAPES), 1)
    assert stream.senders[0].store.num_keys() == keys_left


def test_shared_memory_written_after_it_was_announced_is_detected(monkeypatch):
    start_send = SharedMemorySender.start_send

    def corrupt_second_bucket(self, tensor):
        if tensor.dtype == torch.uint8 and self.messages_sent == 2:
            tensor[3] ^= 4
        start_send(self, tensor)

    monkeypatch.setattr(SharedMemorySender, "start_send", corrupt_second_bucket)
    stream = WeightStream(SHAPES, 1, 1, same_device=[[0]], timeout_s=4.0)
    results, _ = stream.sync(random_weights(SHAPES), 0)
    assert any("checksum of bucket 2" in str(result) for result in results)


@pytest.mark.parametrize("missing_job", [0, 1], ids=["sender", "receiver"])
def test_a_missing_peer_ends_in_a_named_error(missing_job):
    stream = WeightStream(SHAPES, 1, 1, same_device=[[0]], timeout_s=3.0)
    begin = time.monotonic()
    results, _ = stream.sync(
        random_weights(SHAPES), 0, change_jobs=lambda jobs: jobs.pop(missing_job)
    )
    assert time.monotonic() - begin < 10
    assert isinstance(results[0], SyncError)
    assert "phase header" in str(results[0])


READER = """
import torch
from one_step_off.weight_sync.transports.same_device import SharedMemoryReceiver
store = torch.distributed.TCPStore("127.0.0.1", {port})
receiver = SharedMemoryReceiver(store, 0, 60.0)
for expected in (1, 2):
    buffer = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    assert (receiver.finish_receive(buffer) == expected).all()
    receiver.free()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
def test_cuda_ipc_between_two_processes():
    """A receiver in another process reads the sender's bucket from the same GPU's memory."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    device = torch.device("cuda", 0)
    sender = SharedMemorySender(store, [SharedBuffer(1 << 20, device)], [0])
    process = subprocess.Popen([sys.executable, "-c", READER.format(port=store.port)])
    for value in (1, 2):
        sender.buffers[0].fill_(value)
        torch.cuda.synchronize()
        sender.start_send(sender.buffers[0])
        sender.wait(60.0)
    assert process.wait(60) == 0
