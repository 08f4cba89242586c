"""A process that waits for a failed one in a collective operation ends itself after an abort."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import AbortSignal

WORKER = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from one_step_off.cluster import bounded_waits

rank, port, fails = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fails"
bounded_waits.ABORTED_BLOCK_S = 0.5
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
signal = bounded_waits.AbortSignal(dist.PrefixStore("epoch", store))
try:
    with bounded_waits.exit_when_stuck([signal]):
        if rank == 1 and fails:
            raise RuntimeError("no memory for layer 3")
        dist.all_reduce(torch.ones(1))
    store.set(f"left {rank}", "")
except RuntimeError as error:
    signal.set(f"receiver {rank}: {error}")
store.wait(["end"], timedelta(minutes=5))  # as a worker that has answered waits for its next call
"""


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
        assert "it waits for one that failed: receiver 1: no memory for layer 3" in errors
        assert failed.poll() is None, "the one that failed has ended its block, and stays"
    finally:
        for worker in (waits, failed):
            worker.kill()
            worker.communicate()


def test_a_block_that_ends_is_left_alone_by_a_later_abort(store):
    workers = start_workers(store, "works")
    try:
        store.wait(["left 0", "left 1"], timedelta(seconds=120))
        AbortSignal(dist.PrefixStore("epoch", store)).set("too late")
        time.sleep(1.5)  # longer than a watcher would take
        store.set("end", "")
        assert [worker.wait(60) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
