"""Streams between processes on the same device: receivers map the sender's buckets, and nothing is
copied. With weight_sync.transport=auto the sender uses them beside the transport.

On CPUs a bucket is shared memory, on a GPU it is passed by CUDA IPC. A message says which bucket is
full, and an answer that it may be overwritten. Both travel through the sender's store. A receiver
loads directly from the sender's buffer. The shared memory has no name, so a process that dies
leaves nothing behind.
"""

import os
import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from one_step_off.cluster.bounded_waits import AbortSignal, wait_for_keys
from one_step_off.cluster.errors import SyncError
from one_step_off.config.allocator import expandable_segments
from one_step_off.weight_sync.transports.transport import Stream

HANDLES_KEY = "buffers"
"""The store's key with the handles of the sender's buffers."""


def _message_key(number: int) -> str:
    return f"message{number}"


def _answer_key(number: int, receiver: int) -> str:
    return f"answer{number}.{receiver}"


class SharedBuffer:
    """A buffer that other processes of this user on this device can map.

    Attributes:
        tensor: the buffer, uint8 [size], zeros at first.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate it.

        Args:
            size: in bytes.
            device: where it is.

        Raises:
            OSError: there is not enough memory.
            SyncError: torch's allocator of this process uses memory that cannot be shared.
        """
        if device.type == "cuda":
            # The config check sees the driver's environment only; another node may have its own.
            setting = expandable_segments()
            if setting:
                raise SyncError(f"{setting}: such memory cannot be shared by CUDA IPC")
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
            return
        # It stays open as long as the buffer exists, so that others can map it.
        self._file = os.fdopen(os.memfd_create("weight_sync"))
        # Allocated now: otherwise a lack of memory would show as a bus error, much later.
        os.posix_fallocate(self._file.fileno(), 0, max(size, 1))
        self._location = (f"/proc/{os.getpid()}/fd/{self._file.fileno()}", size)
        self.tensor = _map_file(*self._location)

    def handle(self) -> bytes:
        """A pickled (function, arguments) that maps the buffer in other processes.

        Raises:
            SyncError: the driver refuses CUDA IPC.
        """
        if self.tensor.device.type != "cuda":
            return pickle.dumps((_map_file, self._location))
        try:
            return pickle.dumps(reduce_tensor(self.tensor))
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise SyncError(
                f"the GPU's memory cannot be shared by CUDA IPC ({cause}); some containers and WSL "
                "do not allow it: give rollout and actor separate GPUs"
            ) from error


def _map_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class SharedMemorySender:
    """The sender's end of the shared-memory transport. Every message waits for all receivers."""

    def __init__(
        self,
        store: dist.Store,
        buffers: Sequence[SharedBuffer],
        receivers: list[int],
    ) -> None:
        """Tell the receivers where the buffers are.

        Args:
            store: the sender's, with the prefix of the epoch.
            buffers: the caller fills them one after another.
            receivers: the numbers of the receivers on the device of the buffers.
        """
        self.store = store
        self.receivers = receivers
        self.messages_sent = 0
        self.abort_signal = AbortSignal(store)
        self.buffers = [buffer.tensor for buffer in buffers]
        handles = [buffer.handle() for buffer in buffers]
        store.set(HANDLES_KEY, pickle.dumps(handles))

    def await_receivers(self) -> None:
        """Nothing to wait for: no kernel spins until receivers are there."""

    def start_send(self, tensor: torch.Tensor) -> None:
        """Announce a message to all receivers: the number of a buffer if `tensor` begins one of
        `buffers`, otherwise the tensor's bytes; then it is in host memory.

        A buffer must be completely written: receivers read it at once, on CUDA streams of their
        own.
        """
        buffer_starts = [buffer.data_ptr() for buffer in self.buffers]
        if tensor.data_ptr() in buffer_starts:
            message = str(buffer_starts.index(tensor.data_ptr())).encode()
        else:
            message = tensor.numpy().tobytes()
        self.messages_sent += 1
        self.store.set(_message_key(self.messages_sent), message)

    def wait(self, timeout_s: float) -> None:
        """Wait until every receiver has freed the last message.

        Raises:
            TimeoutError: not within `timeout_s` seconds.
            Aborted: another process gave up the sync.
        """
        keys = [_message_key(self.messages_sent)]
        keys += [_answer_key(self.messages_sent, receiver) for receiver in self.receivers]
        wait_for_keys(self.store, keys, timeout_s, self.abort_signal)
        for key in keys:
            self.store.delete_key(key)

    def close(self) -> None:
        """Use the buffers no longer."""
        self.abort_signal.close()
        self.buffers = []


class SharedMemoryReceiver:
    """A receiver's end of the shared-memory transport. Its peer must be a `SharedMemorySender`."""

    def __init__(self, store: dist.Store, receiver: int, timeout_s: float) -> None:
        """Map the sender's buffers.

        Args:
            store: the sender's, with the prefix of the epoch.
            receiver: this receiver's number, one of the sender's `receivers`.
            timeout_s: for one message.
        """
        self.store = store
        self.receiver = receiver
        self.timeout_s = timeout_s
        self.messages_received = 0
        self.answer_store = store.clone()  # while one thread waits in a store, no other can use it
        self.abort_signal = AbortSignal(store)
        self.buffers: list[torch.Tensor] = []
        for handle in pickle.loads(store.get(HANDLES_KEY)):
            rebuild, arguments = pickle.loads(handle)
            self.buffers.append(rebuild(*arguments))

    def announce(self) -> None:
        """Nothing to do: the sender does not wait for receivers before it sends."""

    def start_receive(self, buffer: torch.Tensor) -> None:
        """Nothing to do: messages arrive in the store by themselves."""

    def finish_receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """The next message.

        Args:
            buffer: of the shape and dtype of the message. uint8 stands for a bucket; any other one
                is in host memory.

        Returns:
            For a bucket a view of the sender's buffer, with as many bytes as `buffer`; it stays as
            it is until `free`. For any other tensor `buffer`, filled.

        Raises:
            TimeoutError, Aborted: as `SharedMemorySender.wait`.
        """
        key = _message_key(self.messages_received + 1)
        wait_for_keys(self.store, [key], self.timeout_s, self.abort_signal)
        message = self.store.get(key)
        # Counted only now: until here `free` may still be called for the message before.
        self.messages_received += 1
        if buffer.dtype == torch.uint8:
            return self.buffers[int(message)][: len(buffer)]
        values = torch.frombuffer(bytearray(message), dtype=buffer.dtype)
        buffer.copy_(values.view(buffer.shape))
        self.free()
        return buffer

    def free(self) -> None:
        """Answer that the last message may be overwritten."""
        self.answer_store.set(_answer_key(self.messages_received, self.receiver), b"")

    def close(self) -> None:
        """No connection to break."""
        self.abort_signal.close()


def map_sender(stream: Stream, receiver: int) -> SharedMemoryReceiver:
    """Map the buffers of a sender on this device. `stream`: its stream to its other receivers."""
    return SharedMemoryReceiver(stream.store, receiver, stream.timeout_s)
