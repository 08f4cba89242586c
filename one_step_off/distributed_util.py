"""The dedicated process groups of the weight sync: NCCL on GPUs, gloo on CPUs.

`DedicatedGroup` creates a group with a time limit, broadcasts in it, and leaves it when a peer
fails. The groups need no default process group, so they can be created again at any time, with
other members.

`open_store` creates the store in which the members of a group meet, and
`bind_rendezvous_to_its_host` gives the same property to the store of
`torch.distributed.init_process_group`: it listens at one address of the machine only.
"""

import importlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import POLL_INTERVAL_S, AbortSignal

# What the creation of the groups may take beside weight_sync.timeout_s: per group, and per member
# of each group.
SECONDS_PER_GROUP = 0.5
SECONDS_PER_MEMBER = 0.05

NCCL_POLL_S = 1e-4
"""Seconds between two questions whether an NCCL operation has completed."""

NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_CLEAN_UP_ONLY = "2"
"""torch's value for: abort the communicators of a failed group, but let the process live."""


def connect_timeout(timeout_s: float, senders: int, receivers: int) -> float:
    """Seconds within which all groups of one epoch must be connected.

    Receivers join the senders' groups one after another, and a group with more members takes
    longer. So the limit grows with both.

    Args:
        timeout_s: weight_sync.timeout_s.
        senders: number of groups.
        receivers: number of receivers in each group.
    """
    members = 1 + receivers
    return timeout_s + senders * (SECONDS_PER_GROUP + SECONDS_PER_MEMBER * members)


def open_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Start a store on a free port of `host` that listens at this address only. `timeout_s`: for
    one request."""
    return _store_at_one_address(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a store that another process has opened. `timeout_s`: for one request."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def bind_rendezvous_to_its_host() -> None:
    """Let the store of `torch.distributed.init_process_group` listen at the address of rank 0 only.

    torch's store listens at every address of the machine, without authentication: every host that
    reaches the machine could write into it. torch 2.13 has no option for the address, so this
    replaces the name `TCPStore` in `torch.distributed.rendezvous`, by which `_create_c10d_store`
    creates the store.

    A process calls this once, before it creates its default process group: the trainer's workers in
    `ModelWorker.setup`, vLLM's workers when they import `weight_sync.vllm_receiver`.
    """
    # By name: `torch.distributed.rendezvous` as an attribute is the function, not the module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = _store_at_one_address


def _store_at_one_address(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    **options: Any,
) -> dist.TCPStore:
    """A TCPStore with torch's own arguments, whose server listens at `host_name` only."""
    if is_master:
        with suppress(OSError):  # `host_name` is not an address of this machine: torch's default
            listener = socket.create_server((host_name, port))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
    return dist.TCPStore(host_name, port, world_size, is_master, **options)


class DedicatedGroup:
    """One member of a process group with one sender (rank 0) and its receivers: NCCL for CUDA, gloo
    for CPU.

    A transfer is one broadcast: the sender calls `start_send` and `wait`, each receiver
    `start_receive` and `finish_receive`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        host: str,
        timeout_s: float,
        connect_timeout_s: float,
    ) -> None:
        """Create the group. Blocks until all ranks have joined.

        NCCL may block longer than any limit, so call this on a thread that can be abandoned.

        Args:
            store: used by this group only; it also carries the group's abort signal.
            rank: 0 sends, all others receive.
            world_size: number of members.
            device: of the tensors; its type selects the backend.
            host: the address at which gloo listens.
            timeout_s: for one message later.
            connect_timeout_s: for all members to join.

        Raises:
            TimeoutError: not all members joined within `connect_timeout_s`.
            Aborted: another process gave up the sync.
            RuntimeError: the transport failed.
        """
        self.device = device
        self.timeout_s = timeout_s
        self.abort_signal = AbortSignal(store)
        self.work: Any = None
        if device.type == "cuda":
            self.group: Any = _create_nccl_group(store, rank, world_size, connect_timeout_s)
        else:
            self.group = _create_gloo_group(store, rank, world_size, host, connect_timeout_s)
        # NCCL connects at the first transfer, which belongs to this phase and not to the first
        # sync.
        self.start_send(torch.zeros(1, device=device))
        try:
            self.wait(connect_timeout_s)
        except BaseException:
            self.abort_signal.close()  # the caller gets no group, so it cannot close it
            raise

    def start_send(self, tensor: torch.Tensor) -> None:
        """Start to broadcast `tensor` from rank 0. It must not change until `wait` has returned."""
        self.work = self.group.broadcast(tensor, 0)

    def start_receive(self, buffer: torch.Tensor) -> None:
        """Start to receive the next broadcast into `buffer`."""
        self.work = self.group.broadcast(buffer, 0)

    def finish_receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """Wait for the broadcast that `start_receive` has started. Returns `buffer`. Raises as
        `wait`."""
        self.wait(self.timeout_s)
        return buffer

    def release(self) -> None:
        """The received tensor is not used any more. Here it was this member's own buffer: nothing
        to do."""

    def wait(self, timeout_s: float) -> None:
        """Block the host until the transfer that was started last has completed.

        Raises:
            TimeoutError: it did not complete within `timeout_s` seconds.
            Aborted: another process gave up the sync.
            RuntimeError: the transport failed.
        """
        deadline = time.monotonic() + timeout_s
        work = self.work
        while not self._poll(work):
            self.abort_signal.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out: no answer in {timeout_s:g} s")

    def close(self) -> None:
        """Leave the group and break its connections, so that no peer waits for this member any
        longer.

        gloo breaks them when nothing refers to the group or its work any more; NCCL's communicators
        are aborted.
        """
        held = [self.group, self.work]
        pending = self.work is not None and not self.work.is_completed()
        self.group = None
        self.work = None
        self.abort_signal.close()
        if pending:
            # Not on this thread: gloo's destructor waits for pending work, and NCCL's abort waits
            # for the GPU.
            dispose = threading.Thread(
                target=_dispose, args=(held, self.device), name="weight-dispose", daemon=True
            )
            dispose.start()
        else:
            _dispose(held, self.device)

    def _poll(self, work: Any) -> bool:
        """Whether `work` completes within POLL_INTERVAL_S seconds. Raises RuntimeError: the
        transport failed."""
        if self.device.type == "cuda":
            return _poll_nccl(work)
        try:
            work.wait(timedelta(seconds=POLL_INTERVAL_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            self.abort_signal.check()  # a peer that fails says why before it breaks the connection
            work.wait()  # raises the transport's own error, unless the work has just completed
        return True


def _create_nccl_group(
    store: dist.Store, rank: int, world_size: int, connect_timeout_s: float
) -> Any:
    """An NCCL process group. Its communicators connect at the first transfer."""
    options = dist.ProcessGroupNCCL.Options()
    # Far above our own limits: NCCL's watchdog would end the whole process without a message.
    options._timeout = timedelta(seconds=10 * connect_timeout_s + 600)
    with _watchdog_spares_the_process():
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _create_gloo_group(
    store: dist.Store, rank: int, world_size: int, host: str, connect_timeout_s: float
) -> Any:
    """A gloo process group whose connections use the address `host`."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=connect_timeout_s)
    return dist.ProcessGroupGloo(store, rank, world_size, options)


@contextmanager
def _watchdog_spares_the_process() -> Iterator[None]:
    """NCCL groups created in this block abort their communicators when a peer fails, and the
    process lives on.

    By default torch's watchdog ends the whole process, before our own waits notice the failure.
    (Not tried on GPUs yet.)
    """
    previous = os.environ.get(NCCL_ERROR_HANDLING)
    os.environ[NCCL_ERROR_HANDLING] = NCCL_CLEAN_UP_ONLY
    try:
        yield
    finally:
        if previous is None:
            del os.environ[NCCL_ERROR_HANDLING]
        else:
            os.environ[NCCL_ERROR_HANDLING] = previous


def _poll_nccl(work: Any) -> bool:
    """As `DedicatedGroup._poll`. NCCL's `wait` alone only orders streams and does not block the
    host."""
    poll_end = time.monotonic() + POLL_INTERVAL_S
    while not work.is_completed():
        if time.monotonic() > poll_end:
            return False
        time.sleep(NCCL_POLL_S)
    work.wait()
    return True


def _dispose(held: list[Any], device: torch.device) -> None:
    """Drop the last references to a group and its work, `held` = [group, work]."""
    group = held[0]
    held.clear()
    if device.type == "cuda" and group is not None:
        group.abort()
