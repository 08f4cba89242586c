"""The contract of a transport: how messages get from one sender to its receivers.

Everything above is the same for all transports: the bucket plan, headers with plan and version,
checksums, deltas, the canary. A message is a flat tensor on the device of its end: bytes of a
bucket (uint8 [n]), or a few numbers (int64).

What every transport keeps:

- Order. A stream has one sender and fixed receivers. Each message reaches every receiver once, and
  in the order in which it was sent.
- One message of a stream is under way at a time. `start_send` or `start_receive` may return at
  once; `wait` and `finish_receive` return when this end has finished the message, and the tensor
  may then be overwritten.
- Every wait ends: after its time limit by TimeoutError, and by Aborted as soon as another process
  gave up the epoch. `wait_until` does both, with an `AbortSignal(stream.store)` of the end itself:
  while one thread waits in a store, no other can use it.
- Errors are exceptions. The caller closes the end, sets the abort signal, and names process, phase
  and bucket; a transport names the peer or the file.
- An end is used by one thread at a time. `close` may come from another one, at any moment.
"""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import KEY_POLL_S, POLL_INTERVAL_S, AbortSignal
from one_step_off.config.registry import TRANSPORTS, import_object
from one_step_off.config.schema import Config
from one_step_off.distributed_util import connect_store, open_store

KEY = "weight_sync.transport"

FOLDER = "weight_sync"
"""Of the run's folder: the default of weight_sync.folder."""

Address = tuple[str, int]
"""Where a sender's store is: plain data, as the transport's `open_store` chose it."""


@dataclass(frozen=True)
class Stream:
    """What both ends of a stream know.

    Attributes:
        sender: the index of the sender.
        receivers: the numbers of all receivers of this stream.
        name: tells the streams of one sender apart; the same at both ends.
        epoch: counts the groups; a new epoch begins with new streams.
        store: of the sender, with the prefix of the epoch; it carries the epoch's abort signal.
        device: of the messages at this end.
        host: the address at which this process listens.
        timeout_s: for one message.
        connect_timeout_s: for all ends to meet.
    """

    sender: int
    receivers: tuple[int, ...]
    name: str
    epoch: int
    store: dist.Store
    device: torch.device
    host: str
    timeout_s: float
    connect_timeout_s: float


class SendEnd(Protocol):
    """A sender's end of one stream."""

    def await_receivers(self) -> None:
        """Wait until every receiver has announced the next message. Called on GPUs only, where a
        transport may launch kernels that spin; others need not do anything."""

    def start_send(self, tensor: torch.Tensor) -> None:
        """Start to send a message. `tensor` stays as it is until `wait` has returned."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until the message that was started last needs `tensor` no longer.

        Raises:
            TimeoutError: not within `timeout_s` seconds.
            Aborted: another process gave up the sync.
        """
        ...

    def close(self) -> None:
        """Leave the stream. Nothing is sent any more."""
        ...


class ReceiveEnd(Protocol):
    """A receiver's end of one stream."""

    def announce(self) -> None:
        """This receiver is ready for the next message; see `SendEnd.await_receivers`."""

    def start_receive(self, buffer: torch.Tensor) -> None:
        """Start to receive the next message into `buffer`, which has its shape and dtype."""

    def finish_receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """Wait for the next message. Returns `buffer`, filled; or a view of other memory with the
        same content, which stays as it is until `free`. Raises as `SendEnd.wait`."""
        ...

    def free(self) -> None:
        """The bucket that was received last is not used any more, and the device has done all work
        on it. Not called for messages of numbers."""

    def close(self) -> None:
        """Leave the stream."""
        ...


class Transport(ABC):
    """Opens the ends of streams, and the store in which they meet. One object per process."""

    def __init__(self, folder: str = "") -> None:
        """`folder`: weight_sync.folder, absolute; the same in all processes."""
        self.folder = Path(folder)

    def open_store(self, host: str, sender: int, timeout_s: float) -> tuple[dist.Store, Address]:
        """The store of a sender, and where receivers find it. It also carries the abort signal.

        Args:
            host: the address at which the sender may listen.
            sender: its index.
            timeout_s: for one request.
        """
        store = open_store(host, timeout_s)
        return store, (host, store.port)

    def connect_store(self, address: Address, timeout_s: float) -> dist.Store:
        """A receiver's connection to a sender's store."""
        return connect_store(*address, timeout_s)

    @abstractmethod
    def open_sender(self, stream: Stream) -> SendEnd:
        """Open the sender's end, and wait until all receivers have opened theirs. Runs on a thread
        that may be abandoned.

        Raises:
            TimeoutError: a receiver is missing after `stream.connect_timeout_s`.
            Aborted: another process gave up the sync.
        """

    @abstractmethod
    def open_receiver(self, stream: Stream, receiver: int) -> ReceiveEnd:
        """Open the end of one receiver of `stream.receivers`. As `open_sender`."""


def transport_settings(cfg: Config) -> tuple[str, str]:
    """The arguments of `load_transport`, as plain data. In a folder that was given each run has its
    own one: another run must not delete its files."""
    output_dir = os.path.abspath(cfg.trainer.output_dir)
    folder = os.path.join(output_dir, FOLDER)
    if cfg.weight_sync.folder:
        name = hashlib.sha256(output_dir.encode()).hexdigest()[:12]
        folder = os.path.join(os.path.abspath(cfg.weight_sync.folder), name)
    return cfg.weight_sync.transport, folder


def load_transport(spec: str, folder: str) -> Transport:
    """The transport that weight_sync.transport names: a key of TRANSPORTS, or the user's own
    `module:Class`.

    Raises:
        ConfigError: there is no such module or class.
    """
    cls: Any = import_object(KEY, TRANSPORTS.get(spec, spec))
    return cls(folder)


def wait_until(
    is_done: Callable[[], bool], timeout_s: float, signal: AbortSignal, what: str
) -> None:
    """Ask `is_done` a hundred times per second until it returns True.

    Args:
        is_done: what is waited for; it must return soon.
        timeout_s: the time limit.
        signal: of the epoch, asked a few times per second.
        what: is missing, for the error.

    Raises:
        TimeoutError: not done within `timeout_s` seconds.
        Aborted: another process gave up the sync.
    """
    begin = time.monotonic()
    next_check = begin + POLL_INTERVAL_S
    while not is_done():
        now = time.monotonic()
        if now > next_check:
            signal.check()
            next_check = now + POLL_INTERVAL_S
        if now > begin + timeout_s:
            raise TimeoutError(f"timed out: {what} in {timeout_s:g} s")
        time.sleep(KEY_POLL_S)
