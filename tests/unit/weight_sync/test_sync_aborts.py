"""Waits of the weight stream end when another process fails, hangs or is stopped: real endpoints
over gloo and shared memory."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from tests.unit import forked_ranks
from tests.unit.weight_sync.weight_stream import (
    CPU,
    HOST,
    SHAPES,
    Job,
    WeightStream,
    random_weights,
    row_pieces,
    run_together,
)

BUCKET_BYTES = 64


def start_in_background(job: Job) -> tuple[threading.Thread, list]:
    """The thread that runs a job, and the list that gets its result or exception."""
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(run_together([job])), daemon=True)
    thread.start()
    return thread, results


@pytest.mark.parametrize("same_device", [None, [[0, 1]]], ids=["gloo", "shared memory"])
def test_a_receiver_that_cannot_load_ends_the_sync_for_all_with_its_reason(same_device):
    shapes = {f"w{i}": (100, 64) for i in range(20)}
    stream = WeightStream(
        shapes, 1, 2, bucket_bytes=50_000, timeout_s=60.0, same_device=same_device
    )

    def refuse(tensors):
        raise MemoryError("too little memory")

    def first_receiver_refuses(jobs: list[Job]) -> None:
        jobs[1] = lambda: stream.receivers[0].receive(refuse, 0)

    begin = time.monotonic()
    results, _ = stream.sync(random_weights(shapes), 0, change_jobs=first_receiver_refuses)
    assert time.monotonic() - begin < 20, "the limit of a wait is 60 s"
    sender, failed_receiver, other_receiver = results
    assert "phase load" in str(failed_receiver)
    assert "too little memory" in str(failed_receiver)
    for error in (sender, other_receiver):
        assert isinstance(error, SyncError)
        assert "given up, since receiver 0, phase load" in str(error)


def test_an_abort_from_outside_ends_the_waits_of_its_epoch_only():
    stream = WeightStream(SHAPES, 1, 1, timeout_s=60.0, same_device=[[0]])
    (sender,) = stream.senders
    sender.abort(99, "of another epoch")
    thread, results = start_in_background(lambda: sender.send(iter(()), 0))
    time.sleep(1.5)
    assert thread.is_alive()
    sender.abort(1, "rollout 0 died")
    thread.join(10)
    assert "given up, since rollout 0 died" in str(results[0])
    with pytest.raises(SyncError, match="must connect first"):
        sender.send(iter(()), 0)


def run_idle_sender(pieces: list, same_device: list, outbox, stop) -> None:
    """A connected sender in a process of its own, which the test can stop."""
    torch.set_num_threads(1)
    sender = WeightSender(BucketPlan.build(pieces, BUCKET_BYTES), 0, CPU, HOST, 2.0)
    outbox.put(sender.address)
    sender.connect(1, 1, same_device)
    stop.wait(60)


@pytest.mark.parametrize("same_device", [[], [0]], ids=["gloo", "shared memory"])
def test_a_stopped_sender_holds_a_receiver_no_longer_than_the_limit(same_device):
    """A `check` of its store would not return, whatever time limit the store has."""
    pieces = row_pieces(SHAPES, 1)
    context = forked_ranks.context()
    outbox = context.Queue()
    arguments = (pieces, same_device, outbox, context.Event())
    process = forked_ranks.process(run_idle_sender, arguments)
    process.start()
    receiver = WeightReceiver(BucketPlan.build(pieces, BUCKET_BYTES), 0, CPU, HOST, 2.0)
    try:
        address = outbox.get(timeout=60)
        receiver.connect(1, [address], 1, [same_device])
        os.kill(process.pid, signal.SIGSTOP)
        begin = time.monotonic()
        thread, results = start_in_background(lambda: receiver.receive(print, 0))
        thread.join(20)
        assert results, "it still waits"
        assert time.monotonic() - begin < 15
        assert isinstance(results[0], SyncError)
        assert "timed out" in str(results[0])
    finally:
        process.kill()
