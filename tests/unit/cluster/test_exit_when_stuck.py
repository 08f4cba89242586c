"""A process that waits for a failed one in a collective operation ends itself; one that is only
busy is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal, exit_when_stuck

WORKER = """
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from one_step_off.cluster import bounded_waits

rank, port, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
bounded_waits.STUCK_AFTER_S = 0.5
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
epoch = dist.PrefixStore("epoch", store)
try:
    with bounded_waits.exit_when_stuck([dist.PrefixStore("replica0", epoch)]):
        if rank == 1 and mode == "fails":
            raise RuntimeError("no memory for layer 3")
        dist.all_reduce(torch.ones(1))
        if mode == "busy":
            bounded_waits.AbortSignal(epoch).set("receiver 7 died")
            time.sleep(3)  # longer than a watcher would take
    store.set(f"left {rank}", "")
except RuntimeError:
    pass
store.wait(["end"], timedelta(minutes=5))  # as a worker that has answered waits for its next call
"""

STORE = """
import time
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stopped_store() -> Iterator[dist.Store]:
    """A connection to the store of a process that is stopped, as a frozen sender."""
    server = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    port = int(server.stdout.readline())
    connection = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    server.send_signal(signal.SIGSTOP)
    try:
        yield connection
    finally:
        server.kill()
        server.communicate()


def start_workers(store: dist.TCPStore, mode: str) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(store.port), mode],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_a_worker_in_a_collective_operation_ends_when_the_other_one_fails(store):
    waits, failed = start_workers(store, "fails")
    try:
        _, errors = waits.communicate(timeout=120)
        assert waits.returncode == 1
        assert "it waits for one that failed: no memory for layer 3" in errors
        assert failed.poll() is None, "the one that failed has ended its block, and stays"
    finally:
        for worker in (waits, failed):
            worker.kill()
            worker.communicate()


def test_busy_workers_are_left_alone_by_the_failure_of_another_replica(store):
    workers = start_workers(store, "busy")
    try:
        store.wait(["left 0", "left 1"], timedelta(seconds=120))
        store.set("end", "")
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_a_block_that_has_ended_is_left_alone_by_a_later_failure(store):
    workers = start_workers(store, "works")
    try:
        store.wait(["left 0", "left 1"], timedelta(seconds=120))
        AbortSignal(dist.PrefixStore("epoch/replica0", store)).set("too late")
        time.sleep(1.5)  # longer than a watcher would take
        store.set("end", "")
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def fail_in_a_block(store: dist.Store) -> None:
    with pytest.raises(ValueError, match="layer 3"), exit_when_stuck([store]):
        raise ValueError("layer 3")


@pytest.mark.parametrize(
    "call",
    [fail_in_a_block, lambda store: AbortSignal(store).check()],
    ids=["a block", "a signal"],
)
def test_a_stopped_sender_holds_no_process(stopped_store, call: Callable[[dist.Store], Any]):
    """To connect to its store would not return, whatever time limit the store has."""
    thread = threading.Thread(target=call, args=(stopped_store,), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it still waits"
