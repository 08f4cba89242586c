"""The dedicated process groups of the weight sync: NCCL on GPUs, gloo on CPUs.

`DedicatedGroup` creates a group with a time limit, broadcasts in it, and leaves it when a peer fails.
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


def open_store(
    host_name: str, port: int, world_size: Any = None, is_master: bool = False, **how: Any
) -> dist.Store:
    """A TCPStore whose server listens at its own address alone: torch's would at every one that the machine has."""
    if is_master:
        with suppress(OSError):  # not an address of this machine: torch's way
            listener = socket.create_server((host_name, port))
            port, how["master_listen_fd"] = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host_name, port, world_size, is_master, **how)


importlib.import_module(
    "torch.distributed.rendezvous"
).TCPStore = open_store  # of init_process_group, vLLM's too


def _open_client(host: str, port: int, timeout_s: float) -> dist.Store:
    """A sender's store, from a receiver's side."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


GROUP_S = 0.5  # what the creation of one group may take beside weight_sync.timeout_s,


MEMBER_S = 0.05  # and each of its members more


def connect_limit(timeout_s: float, senders: int, receivers: int) -> float:
    """Seconds after which all groups of an epoch must stand. Receivers join the senders' groups one after another, and the
    more members a group has the longer it takes, so the limit grows with both."""
    return timeout_s + senders * (GROUP_S + MEMBER_S * (1 + receivers))


class DedicatedGroup:
    """Either end of a sender's group, which has a store of its own: NCCL for CUDA, gloo for CPU."""

    group: Any = None
    work: Any = None

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        timeout_s: float,
        connect_s: float,
    ) -> None:
        """Blocks until all `size` ranks are there, `connect_s` seconds at most; NCCL may block for ever, so call it on a
        thread that can be given up. `store`: of this group alone. `timeout_s`: for one message later."""
        self.device, self.timeout_s = device, timeout_s
        self.signal = AbortSignal(store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            # Our own limit (`wait`) comes first: NCCL's watchdog would take the whole process down without a word.
            options._timeout = timedelta(seconds=10 * connect_s + 600)
            with _watchdog_spares_the_process():
                self.group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=connect_s)
            self.group = dist.ProcessGroupGloo(store, rank, size, options)
        # NCCL connects at the first transfer; it belongs to this phase and not to the first sync.
        self.publish(torch.zeros(1, device=device))
        try:
            self.wait(connect_s)
        except BaseException:
            self.signal.close()  # this link is never handed out, so that no caller closes it
            raise

    def publish(self, tensor: torch.Tensor) -> None:
        """Begin to send a tensor; it must stay as it is until `wait` has returned."""
        self.work = self.group.broadcast(tensor, 0)

    def wait(self, timeout_s: float) -> None:
        """Wait on the host until what was published has gone. Raises TimeoutError: not within `timeout_s`; Aborted: the sync
        was given up; RuntimeError: the transport failed."""
        deadline = time.monotonic() + timeout_s
        work = self.work
        while not self._completed(work):
            self.signal.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out: no answer in {timeout_s:g} s")

    def _completed(self, work: Any) -> bool:
        """Whether `work` has ended, after POLL_INTERVAL_S seconds at most. Raises RuntimeError: the transport failed."""
        if self.device.type == "cuda":  # NCCL's `wait` only orders streams
            until = time.monotonic() + POLL_INTERVAL_S
            while not work.is_completed():
                if time.monotonic() > until:
                    return False
                time.sleep(1e-4)
            work.wait()
            return True
        try:
            work.wait(timedelta(seconds=POLL_INTERVAL_S))
        except RuntimeError:
            if not work.is_completed():
                return False
            self.signal.check()  # a peer that fails says why before it breaks the connection
            work.wait()  # raises the transport's own error, unless it ended well in this moment
        return True

    ask = publish  # begins to receive, at the other ends

    def take(self, room: torch.Tensor) -> torch.Tensor:
        """What was asked for, now that it is in `room`."""
        self.wait(self.timeout_s)
        return room

    def release(self) -> None:
        """What was taken is this end's own."""

    def close(self) -> None:
        """Break the connections, so that no peer waits for this one any longer: gloo does so when nothing refers to the
        group or to its work any more."""
        held = [self.group, self.work]
        self.group = self.work = None
        self.signal.close()
        pending = held[1] is not None and not held[1].is_completed()
        if pending:
            # gloo's group waits in its destructor for what is pending, and NCCL's abort for the GPU: not on this thread.
            threading.Thread(
                target=_dispose, args=(held, self.device), name="weight-dispose", daemon=True
            ).start()
        else:
            _dispose(held, self.device)


@contextmanager
def _watchdog_spares_the_process() -> Iterator[None]:
    """A group of NCCL's that is made meanwhile gives its communicators up when a peer fails. By default torch's watchdog ends
    the whole process then, before our own waits look. (Not tried on GPUs yet.)"""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # CleanUpOnly
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _dispose(held: list[Any], device: torch.device) -> None:
    """Give up the last references to a group and its work."""
    group = held[0]
    held.clear()
    if device.type == "cuda" and group is not None:
        group.abort()
