"""Dedicated process groups: creation with a time limit, broadcast, failure of a peer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from one_step_off.cluster.bounded_waits import Aborted
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import (
    DedicatedGroup,
    connect_store,
    connect_timeout,
    open_store,
)
from tests.unit.weight_sync.weight_stream import (
    CPU,
    HOST,
    SHAPES,
    WeightStream,
    assert_no_errors,
    assert_received,
    random_weights,
    run_together,
)


@pytest.fixture
def create_group():
    """Creates groups, and closes their members after the test."""
    stores = []  # the servers live as long as these
    members: list[DedicatedGroup] = []

    def create(world_size: int, timeout_s: float = 10.0) -> list[DedicatedGroup]:
        """All members of a new group."""
        store = open_store(HOST, timeout_s)
        stores.append(store)

        def join(rank: int) -> DedicatedGroup:
            member_store = connect_store(HOST, store.port, timeout_s)
            return DedicatedGroup(member_store, rank, world_size, CPU, HOST, timeout_s, timeout_s)

        new_members = run_together([lambda rank=rank: join(rank) for rank in range(world_size)])
        assert_no_errors(new_members)
        members.extend(new_members)
        return new_members

    yield create
    for member in members:
        member.close()


def test_rank_0_broadcasts_to_all_others(create_group):
    sender, *receivers = create_group(3)
    tensor = torch.randn(1000)
    sender.start_send(tensor)
    buffers = [torch.zeros(1000) for _ in receivers]
    for receiver, buffer in zip(receivers, buffers, strict=True):
        receiver.start_receive(buffer)
    sender.wait(10.0)
    for receiver, buffer in zip(receivers, buffers, strict=True):
        assert torch.equal(receiver.finish_receive(buffer), tensor)


def test_a_wait_ends_at_its_limit(create_group):
    _, receiver = create_group(2)
    receiver.start_receive(torch.zeros(4))
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        receiver.wait(0.5)
    assert time.monotonic() - begin < 5


def test_a_wait_ends_with_the_reason_of_an_abort(create_group):
    sender, receiver = create_group(2)
    receiver.start_receive(torch.zeros(4))
    sender.abort_signal.set("rollout 1 died")
    with pytest.raises(Aborted, match="rollout 1 died"):
        receiver.wait(60.0)


def test_a_wait_ends_when_the_peer_closes_the_group(create_group):
    sender, receiver = create_group(2)
    receiver.start_receive(torch.zeros(4))
    sender.close()
    with pytest.raises(RuntimeError):
        receiver.wait(60.0)


def test_a_sender_waits_until_every_receiver_has_announced(create_group):
    sender, *receivers = create_group(3)
    for _ in range(2):
        waiting = threading.Thread(target=sender.await_receivers, daemon=True)
        waiting.start()
        receivers[1].announce()
        waiting.join(0.3)
        assert waiting.is_alive()
        receivers[0].announce()
        waiting.join(5)
        assert not waiting.is_alive()


def test_a_receiver_that_is_late_is_waited_for(create_group):
    """Longer than torch waits at once."""
    sender, receiver = create_group(2)
    sender.ready_store.set_timeout(timedelta(seconds=0.05))
    waiting = threading.Thread(target=sender.await_receivers, daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    receiver.announce()
    waiting.join(5)
    assert not waiting.is_alive()


def test_an_abort_ends_the_wait_for_announcements(create_group):
    sender, _ = create_group(2)
    sender.abort_signal.set("rollout 1 died")
    begin = time.monotonic()
    with pytest.raises(Aborted, match="rollout 1 died"):
        sender.await_receivers()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("reason", ["", "out of memory"])
def test_a_receiver_that_leaves_ends_the_wait_for_its_announcement(create_group, reason):
    sender, *receivers = create_group(3)
    if reason:
        receivers[1].abort_signal.set(reason)
    receivers[1].close()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=reason or "group member 2 has left"):
        sender.await_receivers()
    assert time.monotonic() - begin < 5


def test_a_missing_member_ends_the_creation_in_time():
    store = open_store(HOST, 1.0)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 1 s; group members missing: \[1\]"):
        DedicatedGroup(store, 0, 2, CPU, HOST, 1.0, 1.0)
    assert time.monotonic() - begin < 5


def test_the_connect_timeout_grows_with_senders_and_receivers():
    assert connect_timeout(120, 1, 1) < 122
    assert connect_timeout(120, 8, 8) < connect_timeout(120, 64, 8)
    assert connect_timeout(120, 64, 8) < connect_timeout(120, 64, 64)
    assert connect_timeout(10, 4, 4) - 10 == connect_timeout(120, 4, 4) - 120


@pytest.mark.parametrize("hanging_rank", [0, 1], ids=["sender", "receiver"])
def test_a_transport_that_never_returns_does_not_hold_connect_and_the_next_epoch_works(
    monkeypatch, hanging_rank
):
    """ncclCommInitRank behaves so: it runs inside the first broadcast and has no time limit."""
    timeout_s = 2.0
    stream = WeightStream(SHAPES, 1, 2, timeout_s=timeout_s)
    released = threading.Event()
    create = DedicatedGroup.__init__

    def create_with_rank(group, store, rank, *args):
        group.rank = rank
        create(group, store, rank, *args)

    def hang_at(method):
        def transfer(group, tensor):
            if group.rank == hanging_rank and not released.is_set():
                released.wait()
            method(group, tensor)

        return transfer

    monkeypatch.setattr(DedicatedGroup, "__init__", create_with_rank)
    for name in ("start_send", "start_receive"):
        monkeypatch.setattr(DedicatedGroup, name, hang_at(getattr(DedicatedGroup, name)))
    begin = time.monotonic()
    results = run_together(stream.connect_jobs(2))
    for result in results:
        assert isinstance(result, SyncError)
        assert "phase connect" in str(result)
    assert time.monotonic() - begin < connect_timeout(timeout_s, 1, 2) + 3

    released.set()  # the late threads go on, and must not disturb the next epoch
    stream.connect(3)
    weights = random_weights(SHAPES)
    results, received = stream.sync(weights, 0)
    assert_no_errors(results)
    assert_received(received, weights)
