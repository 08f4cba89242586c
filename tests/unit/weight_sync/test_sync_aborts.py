"""Waits of the weight stream end when another process fails, hangs or is stopped: real ends of it over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import DedicatedGroup, connect_limit
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from tests.unit.weight_sync.test_distributed_util import CPU, SHAPES, Net, normal, pieces_of, same


@pytest.mark.parametrize("hangs", ["sender", "receiver"])
def test_a_transport_that_never_returns_leaves_connect_in_time_and_the_next_epoch_works(
    monkeypatch, hangs
):
    """As ncclCommInitRank does, which runs inside the first broadcast and knows no time limit."""
    honest, never = DedicatedGroup.publish, threading.Event()

    def publish(link, tensor):
        if link.rank == (0 if hangs == "sender" else 1) and not never.is_set():
            never.wait()
        honest(link, tensor)

    real_init = DedicatedGroup.__init__

    def init(link, store, rank, *args):
        link.rank = rank
        real_init(link, store, rank, *args)

    net = Net(SHAPES, 1, 2, timeout_s=2.0)
    monkeypatch.setattr(DedicatedGroup, "publish", publish)
    monkeypatch.setattr(DedicatedGroup, "ask", publish)
    monkeypatch.setattr(DedicatedGroup, "__init__", init)
    begin, address = time.monotonic(), [net.senders[0].address]
    jobs = [lambda: net.senders[0].connect(2, 2)]
    jobs += [lambda r=r: r.connect(2, address, 2) for r in net.receivers]
    results = net.together(jobs)
    assert all(isinstance(r, SyncError) and "phase connect" in str(r) for r in results), results
    assert time.monotonic() - begin < connect_limit(2.0, 1, 2) + 3
    never.set()  # what hung may go on, and must not disturb
    net.connect(3)
    model = normal(SHAPES)
    results, got = net.sync(model, 0)
    assert not [r for r in results if isinstance(r, Exception)] and same(got, model)


def test_the_limit_of_a_connect_grows_with_senders_and_receivers():
    assert connect_limit(120, 1, 1) < 122
    assert connect_limit(120, 8, 8) < connect_limit(120, 64, 8) < connect_limit(120, 64, 64)
    assert connect_limit(10, 4, 4) - 10 == connect_limit(120, 4, 4) - 120


@pytest.mark.parametrize("near", [None, [[0, 1]]])
def test_a_receiver_that_cannot_load_ends_the_sync_for_all_at_once_with_its_reason(near):
    shapes = {f"w{i}": (100, 64) for i in range(20)}
    net = Net(shapes, 1, 2, bucket_bytes=50_000, timeout_s=60.0, near=near)
    model = normal(shapes)

    def refuses(tensors):
        raise MemoryError("too little memory")

    begin = time.monotonic()
    results, _ = net.sync(
        model,
        0,
        change=lambda jobs: jobs.__setitem__(1, lambda: net.receivers[0].receive(refuses, 0)),
    )
    assert time.monotonic() - begin < 20, "the limit of a wait is 60 s"
    assert "phase load" in str(results[1]) and "too little memory" in str(results[1])
    for other in (results[0], results[2]):
        assert isinstance(other, SyncError) and "given up, since receiver 0, phase load" in str(
            other
        ), results


def test_an_abort_from_outside_ends_the_waits_of_its_epoch_alone():
    net = Net(SHAPES, 1, 1, timeout_s=60.0, near=[[0]])
    sender, results = net.senders[0], []
    thread = threading.Thread(
        target=lambda: results.extend(net.together([lambda: sender.send(iter(()), 0)]))
    )
    thread.daemon = True
    sender.abort(99, "of another epoch")
    thread.start()
    time.sleep(1.5)
    assert thread.is_alive()
    sender.abort(1, "rollout 0 died")
    thread.join(10)
    assert "given up, since rollout 0 died" in str(results[0])
    with pytest.raises(SyncError, match="must connect first"):
        sender.send(iter(()), 0)


def sends_when_asked(pieces: list, near: list, outbox, go) -> None:
    """A sender in a process of its own, which may be stopped."""
    torch.set_num_threads(1)
    sender = WeightSender(BucketPlan.build(pieces, 64), 0, CPU, "127.0.0.1", 2.0)
    outbox.put(sender.address)
    sender.connect(1, 1, near)
    go.wait(60)


@pytest.mark.parametrize("near", [[], [0]])
def test_a_sender_that_is_stopped_holds_a_receiver_no_longer_than_the_limit(near):
    """A `check` of its store would not return, whatever time limit the store has."""
    pieces = pieces_of(SHAPES, 1)
    context = torch.multiprocessing.get_context("spawn")
    outbox, go = context.Queue(), context.Event()
    process = context.Process(target=sends_when_asked, args=(pieces, near, outbox, go), daemon=True)
    process.start()
    receiver = WeightReceiver(BucketPlan.build(pieces, 64), 0, CPU, "127.0.0.1", 2.0)
    try:
        receiver.connect(1, [outbox.get(timeout=60)], 1, [near] if near else ())
        os.kill(process.pid, signal.SIGSTOP)
        begin, results = time.monotonic(), []
        thread = threading.Thread(
            target=lambda: results.extend(Net.together([lambda: receiver.receive(print, 0)]))
        )
        thread.daemon = True
        thread.start()
        thread.join(20)
        assert results and time.monotonic() - begin < 15, "it still waits"
        assert isinstance(results[0], SyncError) and "timed out" in str(results[0])
    finally:
        process.kill()
