"""The weight stream without a network, between processes on one device: the sender's buckets, mapped by receivers.

On CPU a bucket is shared memory, on a GPU it goes by CUDA IPC. A message says which bucket is full and an answer that it
may be packed anew; both go over the sender's store. Nothing is copied on the way: a receiver loads out of the sender's
buffer. Shared memory has no name, so whatever dies leaves nothing behind.
"""

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from one_step_off.cluster.bounded_waits import AbortSignal, wait_for_keys


def shared_buffer(size: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Zeros, uint8 [size], and the handle by which other processes of this user on this device map them. Raises OSError:
    there is not so much memory."""
    if device.type == "cuda":
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        return buffer, pickle.dumps(reduce_tensor(buffer))
    file = os.fdopen(os.memfd_create("weight_sync"))
    os.posix_fallocate(
        file.fileno(), 0, max(size, 1)
    )  # or a lack of memory would show as a bus error, much later
    where = f"/proc/{os.getpid()}/fd/{file.fileno()}", size
    buffer: Any = _mapped(*where)
    buffer.file = file  # open as long as the buffer is there, for others to map
    return buffer, pickle.dumps((_mapped, where))


def _mapped(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class SharedMemorySender:
    """The sender's end. `buffers`: uint8, to be packed in turn; every message waits for all `readers` (numbers)."""

    def __init__(
        self, store: dist.Store, sizes: list[int], readers: list[int], device: torch.device
    ) -> None:
        self.store, self.readers, self.count = store, readers, 0
        self.signal = AbortSignal(store)
        made = [shared_buffer(size, device) for size in sizes]
        self.buffers = [buffer for buffer, _ in made]
        store.set("buffers", pickle.dumps([handle for _, handle in made]))

    def publish(self, tensor: torch.Tensor) -> None:
        """Tell all readers: of one of the buffers only which it is, of any other tensor its bytes. It must be there: readers
        look at once, on streams of their own."""
        starts = [buffer.data_ptr() for buffer in self.buffers]
        here = tensor.data_ptr()
        self.count += 1
        message = (
            str(starts.index(here)).encode() if here in starts else tensor.cpu().numpy().tobytes()
        )
        self.store.set(f"message{self.count}", message)

    def wait(self, timeout_s: float) -> None:
        """Until every reader is done with the last message. Raises TimeoutError after `timeout_s` seconds, Aborted as soon
        as the sync was given up."""
        keys = [
            f"message{self.count}",
            *(f"answer{self.count}.{reader}" for reader in self.readers),
        ]
        wait_for_keys(self.store, keys, timeout_s, self.signal)
        for key in keys:
            self.store.delete_key(key)

    def close(self) -> None:
        """Give the memory back, once no reader uses it."""
        self.signal.close()
        self.buffers = []


class SharedMemoryReceiver:
    """A receiver's end, as reader `number`; its peer must hold a SharedMemorySender. `timeout_s`: for any message."""

    def __init__(
        self, store: dist.Store, number: int, device: torch.device, timeout_s: float
    ) -> None:
        self.store, self.number, self.device, self.count = store, number, device, 0
        self.answers = store.clone()  # a store lets no other thread in while one waits
        self.timeout_s, self.signal = timeout_s, AbortSignal(store)
        self.buffers = [
            rebuild(*args)
            for rebuild, args in map(pickle.loads, pickle.loads(store.get("buffers")))
        ]

    def ask(self, room: torch.Tensor) -> None:
        """Messages come unasked."""

    def take(self, room: torch.Tensor) -> torch.Tensor:
        """The next message. Bytes stand for a bucket of as many as `room`, which is the sender's own and stays as it is until
        `release`; any other goes into `room`. Raises as `SharedMemorySender.wait`."""
        key = f"message{self.count + 1}"
        wait_for_keys(self.store, [key], self.timeout_s, self.signal)
        message, self.count = (
            self.store.get(key),
            self.count + 1,
        )  # now, for what is still in use was the one before
        if room.dtype == torch.uint8:
            return self.buffers[int(message)][: len(room)]
        room.copy_(torch.frombuffer(bytearray(message), dtype=room.dtype).view(room.shape))
        self.release()
        return room

    def release(self) -> None:
        """Answer that the last message may be overwritten."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.answers.set(f"answer{self.count}.{self.number}", b"")

    def close(self) -> None:
        """There is nothing to break."""
        self.signal.close()
