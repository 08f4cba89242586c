"""The store of torch's default process group listens at one address, in every process that has one.

These tests fail when torch's rendezvous no longer creates its store by the name that
`bind_rendezvous_to_its_host` replaces.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from one_step_off.distributed_util import bind_rendezvous_to_its_host, open_store
from one_step_off.training.fsdp.fsdp_workers import WORKERS
from tests.unit.training.fsdp_helpers import config, free_port, start

LOOPBACK = "127.0.0.1"


@pytest.fixture
def rendezvous(monkeypatch):
    """torch's module, with its own store."""
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "TCPStore", dist.TCPStore)
    return module


def listening_addresses() -> set[tuple[str, int]]:
    """(address, port) of all sockets of this process that listen."""
    connections = psutil.Process().net_connections("inet")
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }


def addresses_of_default_group() -> set[str]:
    """The addresses at which the sockets of a default group of this process listen."""
    before = listening_addresses()
    dist.init_process_group("gloo", f"tcp://{LOOPBACK}:{free_port()}", world_size=1, rank=0)
    try:
        dist.barrier()
        return {address for address, _ in listening_addresses() - before}
    finally:
        dist.destroy_process_group()


def test_torch_creates_the_store_by_the_name_that_is_replaced(rendezvous):
    bind_rendezvous_to_its_host()
    store, rank, world_size = next(
        dist.rendezvous(f"tcp://{LOOPBACK}:{free_port()}", rank=0, world_size=1)
    )
    assert (rank, world_size) == (0, 1)
    assert (LOOPBACK, store.port) in listening_addresses()


def test_without_the_replacement_torchs_store_listens_everywhere(rendezvous):
    """Otherwise the replacement is not needed any more."""
    addresses = addresses_of_default_group()
    assert addresses - {LOOPBACK}


def test_the_default_group_listens_at_its_host_only(rendezvous):
    bind_rendezvous_to_its_host()
    assert addresses_of_default_group() <= {LOOPBACK}


def test_an_opened_store_listens_at_its_host_only():
    before = listening_addresses()
    store = open_store(LOOPBACK, timeout_s=60.0)
    assert listening_addresses() - before == {(LOOPBACK, store.port)}


def test_a_trainer_binds_its_rendezvous(rendezvous, models):
    before = listening_addresses()
    cfg = config(models("qwen2", True))
    start(cfg, port=free_port(), cls=WORKERS["actor"])
    try:
        new = {address for address, _ in listening_addresses() - before}
        assert new <= {LOOPBACK}
    finally:
        dist.destroy_process_group()


VLLM_WORKER = """
import importlib
from one_step_off.engines.vllm import worker_extension as vllm_receiver
from one_step_off import distributed_util
rendezvous = importlib.import_module("torch.distributed.rendezvous")
assert rendezvous.TCPStore is distributed_util._store_at_one_address
"""


def test_a_vllm_worker_binds_its_rendezvous():
    """Its worker extension is imported before the worker creates its groups."""
    subprocess.run([sys.executable, "-c", VLLM_WORKER], check=True)
