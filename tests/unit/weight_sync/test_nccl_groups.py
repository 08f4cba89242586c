"""NCCL groups over a stand-in for torch's `ProcessGroupNCCL`, which fails and blocks as the real
one does; on CPUs."""

from __future__ import annotations

import math
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from one_step_off import distributed_util
from one_step_off.cluster.bounded_waits import Aborted
from one_step_off.distributed_util import MAX_CTAS, DedicatedGroup, connect_store, open_store
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.sender import WeightSender
from tests.unit.weight_sync.weight_stream import CPU, HOST, SHAPES, row_pieces, run_together

CUDA = torch.device("cuda")
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
LONG_S = 30.0


class FakeWork:
    """A broadcast on the device. It has an error as NCCL's has: completed, and `wait` raises."""

    def __init__(self) -> None:
        self.completed = True
        self.error = ""

    def is_completed(self) -> bool:
        return self.completed or bool(self.error)

    def wait(self) -> None:
        assert self.is_completed(), "NCCL's wait would block in C++"
        if self.error:
            raise RuntimeError(self.error)


class FakeNccl:
    """torch's ProcessGroupNCCL; each event that is cleared blocks a call in C++."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=-1)

    def __init__(self, store, rank: int, world_size: int, options) -> None:
        self.environment = os.environ.get(BLOCKING_WAIT)
        self.options = options
        self.works: list[FakeWork] = []
        self.aborts: list[str] = []  # names of the threads
        self.bytes: int | None = 0
        created.append(self)

    def broadcast(self, tensor: torch.Tensor, root: int) -> FakeWork:
        assert may_connect.wait(LONG_S)
        self.works.append(FakeWork())
        return self.works[-1]

    def memory_stats(self) -> dict[str, int]:
        if self.bytes is None:
            raise RuntimeError("getMemoryStats() requires NCCL 2.29.7 or later")
        return {"suspend": self.bytes, "suspended": 0, "persist": 0, "total": self.bytes}

    def abort(self) -> None:
        assert may_abort.wait(LONG_S)
        self.aborts.append(threading.current_thread().name)
        for work in self.works:  # the kernel ends, without data
            work.completed = True


created: list[FakeNccl] = []
may_connect = threading.Event()
may_abort = threading.Event()


@pytest.fixture(autouse=True)
def fake_nccl(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=CPU, **rest: zeros(*size, **rest))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    created.clear()
    may_connect.set()
    may_abort.set()
    yield
    may_connect.set()
    may_abort.set()


@pytest.fixture
def store():
    """A store whose server lives as long as the test."""
    return open_store(HOST, 5.0)


def join(store: dist.Store, rank: int = 0, world_size: int = 1, limit_s: float = 5.0):
    return DedicatedGroup(store, rank, world_size, CUDA, HOST, limit_s, limit_s)


def until(condition) -> bool:
    """Whether `condition` becomes true within 5 seconds."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("before", [None, "0"])
def test_groups_are_created_without_watchdog_and_all_others_as_before(monkeypatch, before, store):
    """torch's watchdog would end the process when a peer breaks."""
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    join(store)
    assert created[0].environment == "1"
    assert os.environ.get(BLOCKING_WAIT) == before
    assert created[0].options.config.blocking == 1
    assert created[0].options.config.max_ctas == MAX_CTAS


def test_nccl_is_not_entered_before_all_members_are_there(store):
    """ncclCommInitRank cannot be interrupted."""
    begin = time.monotonic()
    jobs = [
        lambda rank=rank: join(connect_store(HOST, store.port, 5.0), rank, 3, 1.0)
        for rank in (0, 2)
    ]
    sender_error, receiver_error = run_together(jobs)
    assert time.monotonic() - begin < 4
    assert "group members missing: [1]" in str(sender_error)
    assert isinstance(receiver_error, TimeoutError)
    assert not created


def test_an_abort_ends_the_wait_for_members(store):
    signal = distributed_util.AbortSignal(store)
    threading.Timer(0.3, signal.set, ["rollout 1 died"]).start()
    begin = time.monotonic()
    with pytest.raises(Aborted, match="rollout 1 died"):
        join(store, 0, 2, 20.0)
    assert time.monotonic() - begin < 5


def open_alone(sender: WeightSender, store: dist.Store, deadline: float) -> None:
    """A stream without receivers."""
    stream = sender._describe_stream(0, 1, store, (), 0)
    sender._open_end(deadline, sender.transport.open_sender, stream)


def test_a_creation_that_blocks_is_abandoned_in_time_and_aborted_when_it_ends(monkeypatch):
    plan = BucketPlan.build(row_pieces(SHAPES, 1), 64)
    sender = WeightSender(plan, 0, CPU, HOST, 5.0)
    sender.device = CUDA
    monkeypatch.setattr(sender, "prepare_thread", lambda: None)
    may_connect.clear()
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        open_alone(sender, sender.store, begin + 1.0)
    assert time.monotonic() - begin < 3
    assert not created[0].aborts
    may_connect.set()
    assert until(lambda: created[0].aborts)


def test_the_memory_of_communicators_is_that_of_this_process(monkeypatch):
    """Free memory of the device would count all ranks on it."""
    plan = BucketPlan.build(row_pieces(SHAPES, 1), 64)
    sender = WeightSender(plan, 0, CPU, HOST, 5.0)
    monkeypatch.setattr(sender, "prepare_thread", lambda: None)
    assert "communicator_bytes" not in sender._report()
    sender.device = CUDA
    for epoch in range(2):
        store = dist.PrefixStore(str(epoch), sender.store)
        open_alone(sender, store, time.monotonic() + 5.0)
    assert sender._report()["communicator_bytes"] == 0
    created[0].bytes, created[1].bytes = 400, 100
    assert sender._report()["communicator_bytes"] == 500, "NCCL takes more at larger messages"
    created[1].bytes = None
    assert math.isnan(sender._report()["communicator_bytes"]), "NCCL before 2.29.7"
    sender.close()
    assert sender._report()["communicator_bytes"] == 0


def test_a_broadcast_that_blocks_ends_at_the_limit_or_with_the_reason_of_an_abort(store):
    group = join(store)
    group.start_send(torch.zeros(1))
    group.work.completed = False
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        group.wait(0.5)
    threading.Timer(0.2, group.abort_signal.set, ["trainer rank 1 died"]).start()
    begin = time.monotonic()
    with pytest.raises(Aborted, match="trainer rank 1 died"):
        group.wait(LONG_S)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("reason", ["", "rollout 0 died"])
def test_an_error_of_nccl_is_raised_but_a_known_reason_goes_first(reason, store):
    group = join(store)
    group.start_send(torch.zeros(1))
    group.work.error = "NCCL error: remote process exited"
    if reason:
        group.abort_signal.set(reason)
    with pytest.raises(RuntimeError, match=reason or "remote process exited"):
        group.wait(5.0)


def test_what_an_abort_ends_does_not_count_as_received(store):
    """NCCL reports an aborted broadcast as completed."""
    group = join(store)
    group.start_receive(torch.zeros(1))
    group.work.completed = False
    threading.Timer(0.3, group.close).start()
    with pytest.raises(RuntimeError, match="the group was closed meanwhile"):
        group.finish_receive(torch.zeros(1))


def test_an_abort_that_blocks_holds_nobody(store):
    group = join(store)
    may_abort.clear()
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < LONG_S / 2
    may_abort.set()
    assert until(lambda: created[0].aborts == ["weight-dispose"])


def test_a_creation_that_fails_aborts_what_it_has_created(monkeypatch, store):
    def fail(group, tensor, root):
        raise RuntimeError("NCCL error: no route")

    monkeypatch.setattr(FakeNccl, "broadcast", fail)
    with pytest.raises(RuntimeError, match="no route"):
        join(store)
    assert until(lambda: created[0].aborts)
