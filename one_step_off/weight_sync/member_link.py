"""The link inside a sender group: each member's pieces go to the group's leader over TCP, from host
memory to host memory.

Why not NCCL: a leader's receive would be a kernel that spins on one of the GPU's few hardware
queues until its member has sent, while the trainer's own collectives may wait behind it, on both
ranks. Here the GPU only copies to and from host memory, on a stream that waits for nothing else,
and all waits for another process are on the host, in a thread of the sync. So the order of the
GPU's queues cannot close a circle: a member waits for its leader, a leader for its members and its
receivers, a receiver for the leaders; none of them waits for the trainer. It costs one copy through
host memory, and a leader's rate is that of one thread with sockets. A group needs one connection
per member and no communicator, so its size is not limited by full meshes.

What travels:

    member -> leader   hello: the group's token, epoch, rank             once per epoch
    leader -> member   order: digest of the plan, version, wants data    once per sync
    member -> leader   for each bucket: header (index, bytes, XXH3-128), then the bytes

A member sends as fast as the leader reads; the sockets' buffers bound what is under way. A member
that fails sends the reason instead of a bucket. A leader that gives up closes its links, which
ends its members' waits.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import xxhash

from one_step_off.cluster.bounded_waits import POLL_INTERVAL_S, Aborted

HELLO_TIMEOUT_S = 2.0
"""Seconds for a new connection to say who it is."""

FAILED = -1
"""In place of a bucket's index: the member failed, and the reason follows."""

MAX_REASON_BYTES = 4096

_HELLO = struct.Struct("<32sqq")
_ORDER = struct.Struct("<qq?")
_HEADER = struct.Struct("<qq16s")

LeaderAddress = tuple[str, int, str]
"""Host and port at which a leader listens, and its group's token."""

Order = tuple[int, int, bool]
"""Digest of the plan, version of the weights, and whether the members' data is wanted."""


class MemberFailed(Aborted):
    """A member of this group failed by itself; the message has its reason."""


class Link:
    """One connection between a leader and a member. Each wait has a limit, and ends when `check`
    raises."""

    def __init__(self, connection: socket.socket, peer: str, check: Callable[[], None]) -> None:
        """
        Args:
            connection: established.
            peer: the other end, in errors.
            check: called a few times per second while this end waits; it may raise.
        """
        connection.settimeout(POLL_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.peer = peer
        self.check = check

    def send(self, content: bytes | memoryview, limit_s: float) -> None:
        """Send all of `content`. Raises as `_wait`."""
        rest = memoryview(content)
        deadline = time.monotonic() + limit_s
        while len(rest):
            sent = self._wait(self.connection.send, rest, deadline, limit_s)
            rest = rest[sent:]

    def receive_into(self, view: memoryview, limit_s: float) -> None:
        """Fill `view`. Raises as `_wait`."""
        deadline = time.monotonic() + limit_s
        while len(view):
            received = self._wait(self.connection.recv_into, view, deadline, limit_s)
            if received == 0:
                self.check()  # this end may have closed the link, and knows why
                raise ConnectionError(f"{self.peer} closed its link")
            view = view[received:]

    def receive(self, size: int, limit_s: float) -> bytes:
        """The next `size` bytes. Raises as `_wait`."""
        content = bytearray(size)
        self.receive_into(memoryview(content), limit_s)
        return bytes(content)

    def close(self) -> None:
        """Break the connection; a wait of another thread in it ends."""
        with suppress(OSError):  # it is broken already
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _wait(
        self,
        transfer: Callable[[memoryview], int],
        view: memoryview,
        deadline: float,
        limit_s: float,
    ) -> int:
        """How many bytes of `view` were transferred, at least one if the other end is there.

        Args:
            transfer: a method of the connection, which raises TimeoutError after POLL_INTERVAL_S.
            view: of the bytes.
            deadline: by `time.monotonic`.
            limit_s: for the message.

        Raises:
            TimeoutError: it did not by the deadline.
            ConnectionError: the other end is gone.
            What `check` raises.
        """
        while True:
            try:
                return transfer(view)
            except TimeoutError:
                pass
            except OSError as error:
                self.check()  # this end may have closed the link, and knows why
                raise ConnectionError(f"{self.peer}: {error}") from error
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out: {self.peer} did not answer in {limit_s:g} s")


class MemberLinks:
    """The leader's end: it listens, and has one link per member."""

    def __init__(self, host: str, members: Sequence[int]) -> None:
        """Listen at `host` for these ranks."""
        self.members = members
        self.token = secrets.token_hex(16)
        self.server = socket.create_server((host, 0), backlog=max(128, 2 * len(members)))
        self.server.settimeout(POLL_INTERVAL_S)
        self.address: LeaderAddress = (host, self.server.getsockname()[1], self.token)
        self.links: dict[int, Link] = {}

    def accept(self, epoch: int, deadline: float, check: Callable[[], None]) -> None:
        """Wait until every member has connected.

        Connections of other epochs and unauthenticated ones are closed.

        Args:
            epoch: that the members join.
            deadline: by `time.monotonic`.
            check: see `Link`.

        Raises:
            TimeoutError: not all came by the deadline; names some that did not.
            What `check` raises.
        """
        self.close()
        limit_s = deadline - time.monotonic()
        while missing := [rank for rank in self.members if rank not in self.links]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing[:3]))
                raise TimeoutError(
                    f"timed out: {len(missing)} members of the sender group did not connect "
                    f"in {limit_s:g} s, such as trainer rank {names}"
                )
            try:
                connection, _ = self.server.accept()
            except TimeoutError:
                check()
                continue
            self._welcome(connection, epoch, check)

    def order(self, order: Order, limit_s: float) -> None:
        """Tell all members what is sent. Raises as `Link.send`."""
        for link in self.links.values():
            link.send(_ORDER.pack(*order), limit_s)

    def receive(self, rank: int, index: int, message: torch.Tensor, limit_s: float) -> None:
        """Fill `message` (uint8 [n], in host memory) with a member's part of bucket `index`.

        Raises:
            MemberFailed: the member failed.
            RuntimeError: it sent something else, or bytes that changed on the way.
            TimeoutError, ConnectionError: as `Link.receive_into`.
        """
        link = self.links[rank]
        sent_index, size, sent_checksum = _HEADER.unpack(link.receive(_HEADER.size, limit_s))
        if sent_index == FAILED:
            reason = link.receive(min(size, MAX_REASON_BYTES), limit_s)
            raise MemberFailed(reason.decode(errors="replace"))
        if (sent_index, size) != (index, len(message)):
            raise RuntimeError(
                f"{link.peer} sent {size} bytes of bucket {sent_index + 1}, "
                f"expected {len(message)} of bucket {index + 1}"
            )
        view = memoryview(message.numpy())
        link.receive_into(view, limit_s)
        if xxhash.xxh3_128_digest(view) != sent_checksum:
            raise RuntimeError(f"{link.peer}: checksum of its part of bucket {index + 1} differs")

    def close(self) -> None:
        """Break all links; members that wait for this leader fail. It still listens."""
        for link in self.links.values():
            link.close()
        self.links = {}

    def _welcome(self, connection: socket.socket, epoch: int, check: Callable[[], None]) -> None:
        """Keep a new connection if it is a member's of this epoch, otherwise close it."""
        link = Link(connection, "a new connection", check)
        try:
            token, of_epoch, rank = _HELLO.unpack(link.receive(_HELLO.size, HELLO_TIMEOUT_S))
        except (TimeoutError, ConnectionError):
            link.close()
            return
        is_member = hmac.compare_digest(token, self.token.encode()) and rank in self.members
        if not is_member or of_epoch != epoch:
            link.close()
            return
        link.peer = f"trainer rank {rank}"
        self.links[rank] = link


def connect_to_leader(
    address: LeaderAddress, epoch: int, rank: int, limit_s: float, check: Callable[[], None]
) -> Link:
    """A member's link to its leader.

    Raises:
        OSError: the leader does not listen any more.
    """
    host, port, token = address
    connection = socket.create_connection((host, port), limit_s)
    link = Link(connection, "the leader of its sender group", check)
    link.send(_HELLO.pack(token.encode(), epoch, rank), limit_s)
    return link


def receive_order(link: Link, limit_s: float) -> Order:
    """The leader's next order. Raises as `Link.receive_into`."""
    return _ORDER.unpack(link.receive(_ORDER.size, limit_s))


def send_message(link: Link, index: int, message: torch.Tensor, limit_s: float) -> None:
    """Send a member's part of bucket `index`, uint8 [n] in host memory. Raises as `Link.send`."""
    view = memoryview(message.numpy())
    link.send(_HEADER.pack(index, len(message), xxhash.xxh3_128_digest(view)), limit_s)
    link.send(view, limit_s)


def send_failure(link: Link, reason: str, limit_s: float) -> None:
    """Tell the leader why this member sends nothing more. Raises as `Link.send`."""
    text = reason.encode()[:MAX_REASON_BYTES]
    link.send(_HEADER.pack(FAILED, len(text), bytes(16)) + text, limit_s)
