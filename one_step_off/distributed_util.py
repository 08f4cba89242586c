"""The dedicated process groups of the weight sync: NCCL on GPUs, gloo on CPUs.

`DedicatedGroup` creates a group with a time limit, broadcasts in it, and leaves it when a peer
fails. The groups need no default process group, so they can be created again at any time, with
other members.

`open_store` creates the store in which the members of a group meet, and
`bind_rendezvous_to_its_host` gives the same property to the store of
`torch.distributed.init_process_group`: it listens at one address of the machine only.
"""

import importlib
import math
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

from one_step_off.cluster.bounded_waits import (
    FIRST_STORE_WAIT_S,
    POLL_INTERVAL_S,
    AbortSignal,
    poll_for_keys,
)

# What the creation of the groups may take beside weight_sync.timeout_s: per group, and per member
# of each group.
SECONDS_PER_GROUP = 0.5
SECONDS_PER_MEMBER = 0.05

NCCL_POLL_S = 1e-4
"""Seconds between two questions whether an NCCL operation has completed."""

NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""torch's variable: a group created with the value 1 has no watchdog."""

ENVIRONMENT_LOCK = threading.Lock()
"""Held while a variable of the environment is changed for the creation of a group."""

READY = b"ready"
"""What a receiver puts into its sender's queue when it is ready for the next broadcast."""

LEFT = b"left "
"""What a member that has closed its group puts there, with its rank behind it."""

READY_POLL_S = 2e-3
"""Seconds between two looks into the queue once a sender has waited for long: torch logs each wait
that ends without a word."""

MAX_CTAS = 16
"""NCCL's thread blocks for a broadcast, and so its channels, each of which has buffers on every
member. NCCL's own choice takes more memory and compute units, and is not faster for one broadcast
at a time. The environment variable NCCL_MAX_CTAS has priority."""


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
    `ModelWorker.setup`, vLLM's workers when they import `engines/vllm/worker_extension.py`.
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

    A transfer is one broadcast. The sender calls `await_receivers`, `start_send` and `wait`, each
    receiver `announce`, `start_receive` and `finish_receive`: see weight_sync/launch_order.py. The
    first call of each end may be left out, by all members, where nothing else uses the GPU.
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
        name: str = "",
    ) -> None:
        """Create the group. Blocks until all ranks have joined. NCCL may block longer than any
        limit, so call this on a thread that can be abandoned.

        Args:
            store: of the sender; it also carries the abort signal.
            rank: 0 sends, all others receive.
            world_size: number of members.
            device: of the tensors; its type selects the backend.
            host: the address at which gloo listens.
            timeout_s: for one message later.
            connect_timeout_s: for all members to join.
            name: tells groups with the same store apart.

        Raises:
            TimeoutError: not all members joined within `connect_timeout_s`.
            Aborted: another process gave up the sync.
            RuntimeError: the transport failed.
        """
        self.device = device
        self.timeout_s = timeout_s
        self.rank = rank
        self.member_keys = [f"{name}member{member}" for member in range(world_size)]  # set by them
        self.ready_queue = f"{name}ready"
        self.abort_signal = AbortSignal(store)
        # A separate connection: while one thread waits in a store, no second thread can use it.
        self.ready_store: Any = store.clone()
        self.ready_store.set_timeout(timedelta(seconds=FIRST_STORE_WAIT_S))
        self.group: Any = None
        self.work: Any = None
        group_store = dist.PrefixStore(name, store) if name else store
        group_args = (group_store, rank, world_size, device, host, connect_timeout_s)
        try:
            self._meet(connect_timeout_s)
            self.group = _create_group(*group_args)
            # NCCL connects at the first transfer, which belongs to this phase.
            self.start_send(torch.zeros(1, device=device))
            self.wait(connect_timeout_s)
        except BaseException:
            self.close()  # the caller gets no group, so it cannot close it
            raise

    def _meet(self, connect_timeout_s: float) -> None:
        """Wait for all members before any enters the backend. NCCL would wait in C++ for one that
        is missing, without a limit and deaf to an abort, and cannot be interrupted there."""
        self.ready_store.set(self.member_keys[self.rank], b"")
        try:
            poll_for_keys(self.member_keys, connect_timeout_s, self.abort_signal)
        except TimeoutError as error:
            if self.rank != 0:
                raise
            missing = [
                rank
                for rank, key in enumerate(self.member_keys)
                if not self.abort_signal.contains([key])
            ]
            raise TimeoutError(f"{error}; group members missing: {missing}") from None
        self.abort_signal.check()  # one that was there may have failed

    def announce(self) -> None:
        """A receiver is ready for the next broadcast: nothing that it still has to do before
        depends on another sender.

        Raises:
            RuntimeError: the sender is gone.
        """
        # The store does not answer, so this does not wait for a sender that is stopped.
        self.ready_store.queue_push(self.ready_queue, READY)

    def await_receivers(self) -> None:
        """Wait until every receiver has announced the next broadcast. Raises as `wait`."""
        deadline = time.monotonic() + self.timeout_s
        # One word of each: none announces another broadcast before this one has ended.
        for _ in self.member_keys[1:]:
            word = self._next_word(deadline)
            if word != READY:
                self.abort_signal.check()  # a receiver that fails says why before it leaves
                raise RuntimeError(f"group member {word.removeprefix(LEFT).decode()} has left")

    def _next_word(self, deadline: float) -> bytes:
        """The next word of a receiver. Raises TimeoutError and Aborted as `wait`."""
        # The store is in this process, so it always answers.
        with suppress(dist.DistStoreError):
            return self.ready_store.queue_pop(self.ready_queue)
        while time.monotonic() < deadline:
            self.abort_signal.check()
            with suppress(dist.QueueEmptyError):
                return self.ready_store.queue_pop(self.ready_queue, block=False)
            time.sleep(READY_POLL_S)
        raise TimeoutError(f"timed out: not all receivers were ready in {self.timeout_s:g} s")

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

    def free(self) -> None:
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
        if self.group is None:
            # NCCL calls an aborted operation completed, though the data has not arrived.
            raise RuntimeError("the group was closed meanwhile")

    def communicator_bytes(self) -> float:
        """GPU memory of this member's communicators, as NCCL counts it; NaN: it does not, before
        2.29.7."""
        try:
            return float(self.group.memory_stats()["total"])
        except RuntimeError:
            return math.nan

    def close(self) -> None:
        """Leave the group and break its connections, so that no peer waits for this member any
        longer.

        gloo breaks them when nothing refers to the group or its work any more; NCCL's communicators
        are aborted.
        """
        held = [self.group, self.work]
        is_nccl = self.device.type == "cuda"
        may_block = is_nccl or (self.work is not None and not self.work.is_completed())
        self.group = None
        self.work = None
        with suppress(RuntimeError):  # the sender's process is gone, and its store with it
            self.ready_store.queue_push(self.ready_queue, LEFT + str(self.rank).encode())
        self.abort_signal.close()
        if may_block:
            # Not on this thread: gloo's destructor waits for pending work, and NCCL's abort waits
            # for the GPU and for other threads inside NCCL.
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
            return self._poll_nccl(work)
        try:
            work.wait(timedelta(seconds=POLL_INTERVAL_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            self.abort_signal.check()  # a peer that fails says why before it breaks the connection
            work.wait()  # raises the transport's own error, unless the work has just completed
        return True

    def _poll_nccl(self, work: Any) -> bool:
        """As `_poll`. NCCL's `wait` alone orders streams; before the end it would block in C++."""
        poll_end = time.monotonic() + POLL_INTERVAL_S
        while not work.is_completed():  # also True when NCCL has found an error
            if time.monotonic() > poll_end:
                return False
            time.sleep(NCCL_POLL_S)
        try:
            work.wait()
        except RuntimeError:
            self.abort_signal.check()  # as for gloo
            raise
        return True


def _create_group(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    host: str,
    connect_timeout_s: float,
) -> Any:
    if device.type == "cuda":
        return _create_nccl_group(store, rank, world_size, connect_timeout_s)
    return _create_gloo_group(store, rank, world_size, host, connect_timeout_s)


def _create_nccl_group(
    store: dist.Store, rank: int, world_size: int, connect_timeout_s: float
) -> Any:
    """An NCCL process group. Its communicators connect at the first transfer."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=connect_timeout_s)  # of `abort`
    # The communicator connects in blocking mode. torch can abort one that is still connecting only
    # in non-blocking mode, but that has hung with some NCCL versions (pytorch issue 153960).
    options.config.blocking = 1
    options.config.max_ctas = MAX_CTAS
    with _without_watchdog():
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
def _without_watchdog() -> Iterator[None]:
    """NCCL groups created in this block have no watchdog, so that a broken peer does not end the
    process.

    torch's watchdog reports every failure of its group to the process's first group, whose monitor
    then ends the process after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, whatever the failed group's own
    TORCH_NCCL_ASYNC_ERROR_HANDLING says. (Read in torch's sources; not tried on GPUs yet.) All
    waits of a `DedicatedGroup` look for errors and limits by themselves.

    torch reads the variable in the constructor. The trainer creates no other group meanwhile.
    """
    with ENVIRONMENT_LOCK:
        previous = os.environ.get(NCCL_BLOCKING_WAIT)
        os.environ[NCCL_BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if previous is None:
                del os.environ[NCCL_BLOCKING_WAIT]
            else:
                os.environ[NCCL_BLOCKING_WAIT] = previous


def _dispose(held: list[Any], device: torch.device) -> None:
    """Drop the last references to a group and its work, `held` = [group, work]."""
    group = held[0]
    held.clear()
    if device.type == "cuda" and group is not None:
        with suppress(RuntimeError):  # it did not end within the group's own limit
            group.abort()
