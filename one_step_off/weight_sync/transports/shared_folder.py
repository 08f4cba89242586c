"""Messages as files in a folder that trainer and rollout share: for clusters without a network
between the two, and to look at what was sent.

    FOLDER/sender_0/store-1f2e...           keys of the epochs: who has joined, the abort signal
    FOLDER/sender_0/3/set_0/000007.safetensors    message 7 of epoch 3, one flat tensor
                           /000007.json           its manifest: dtype, count of numbers, XXH3-128
                           /000007.done_1         receiver 1 has it

The manifest is written last. Every file gets its name when it is complete and on the disk, so a
receiver never reads a part of one. A message is deleted when all receivers have it. What a failed
sync leaves stays until the next groups are created.

A process that dies is noticed by the driver, and by its peers at the time limit: a file system,
unlike a connection, does not tell. The abort signal is set by a sender that lives.
"""

import json
import os
import secrets
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from one_step_off.cluster.bounded_waits import AbortSignal
from one_step_off.weight_sync.transports.transport import Address, Stream, Transport, wait_until

TENSOR = "message"
"""The name of the tensor in a message's file."""

OPENED = "opened"
"""The file that says that all receivers of a stream have joined."""

JOIN_MARGIN_S = 0.5
"""The sender's wait for its receivers ends so many seconds before theirs, because it can name who
is missing."""


class SharedFolder(Transport):
    """Streams as folders, in a folder of this run alone. It is created where it is missing."""

    def open_store(self, host: str, sender: int, timeout_s: float) -> tuple[dist.Store, Address]:
        """A store in a file. What an earlier process of this sender left is deleted."""
        own = self.folder / f"sender_{sender}"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        path = str(own / f"store-{secrets.token_hex(8)}")
        return _file_store(path, timeout_s), (path, 0)

    def connect_store(self, address: Address, timeout_s: float) -> dist.Store:
        """The store in the file of the sender."""
        path, _ = address
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path}: is not here; is weight_sync.folder shared?")
        return _file_store(path, timeout_s)

    def open_sender(self, stream: Stream) -> "FolderSender":
        """Create the folder of the stream, without those of earlier epochs."""
        folder = self._folder_of(stream)
        for epoch in folder.parent.parent.iterdir():
            if epoch.name.isdecimal() and int(epoch.name) < stream.epoch:
                shutil.rmtree(epoch, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        sender = FolderSender(folder, stream)
        try:
            sender.await_all("joined", stream.connect_timeout_s - JOIN_MARGIN_S)
            _write(folder / OPENED, b"")
        except BaseException:
            sender.close()  # the caller gets no end, so it cannot close it
            raise
        return sender

    def open_receiver(self, stream: Stream, receiver: int) -> "FolderReceiver":
        """Join the stream when its folder is there."""
        end = FolderReceiver(self._folder_of(stream), stream, receiver)
        try:
            end.join()
        except BaseException:
            end.close()
            raise
        return end

    def _folder_of(self, stream: Stream) -> Path:
        epoch = self.folder / f"sender_{stream.sender}" / str(stream.epoch)
        return epoch / (stream.name.strip("/") or "set0")


class FolderSender:
    """See `SendEnd`."""

    def __init__(self, folder: Path, stream: Stream) -> None:
        """`folder`: of the stream."""
        self.folder = folder
        self.stream = stream
        self.abort_signal = AbortSignal(stream.store)
        self.number = 0  # of the message sent last

    def await_receivers(self) -> None:
        """Nothing to wait for: no kernel spins until receivers are there."""

    def start_send(self, tensor: torch.Tensor) -> None:
        """Write a message, and then its manifest."""
        self.number += 1
        message = tensor.detach().to("cpu").contiguous()
        manifest = {
            "dtype": str(message.dtype),
            "numbers": message.numel(),
            "xxh3_128": _digest(message),
        }
        flat = {TENSOR: message.reshape(-1)}
        _write(_message_file(self.folder, self.number), save(flat))
        _write(_manifest_file(self.folder, self.number), json.dumps(manifest).encode())

    def wait(self, timeout_s: float) -> None:
        """Wait until all receivers have the message, and delete it."""
        name = f"{self.number:06d}"
        self.await_all(f"{name}.done", timeout_s)
        for path in self.folder.glob(f"{name}.*"):
            path.unlink(missing_ok=True)

    def await_all(self, name: str, timeout_s: float) -> None:
        """Wait for a file `name`_R of each receiver R."""
        expected = {f"{name}_{receiver}": receiver for receiver in self.stream.receivers}

        def missing() -> list[int]:
            names = os.listdir(self.folder)
            return [receiver for file, receiver in expected.items() if file not in names]

        try:
            wait_until(lambda: not missing(), timeout_s, self.abort_signal, "no answer")
        except TimeoutError as error:
            raise TimeoutError(
                f"{error} of receivers {missing()}: {name} in {self.folder}"
            ) from None

    def close(self) -> None:
        """No connection to break."""
        self.abort_signal.close()


class FolderReceiver:
    """See `ReceiveEnd`."""

    def __init__(self, folder: Path, stream: Stream, receiver: int) -> None:
        """`folder`: of the stream. `receiver`: this one's number."""
        self.folder = folder
        self.stream = stream
        self.receiver = receiver
        self.abort_signal = AbortSignal(stream.store)
        self.number = 0  # of the message received last

    def join(self) -> None:
        """Tell the sender that this receiver is there, and wait for all others."""
        limit_s = self.stream.connect_timeout_s
        what = f"sender {self.stream.sender} did not create {self.folder}"
        wait_until(self.folder.is_dir, limit_s, self.abort_signal, what)
        _write(self.folder / f"joined_{self.receiver}", b"")
        what = f"sender {self.stream.sender} did not find all receivers"
        wait_until((self.folder / OPENED).exists, limit_s, self.abort_signal, what)

    def announce(self) -> None:
        """Nothing to do: the sender does not wait for receivers before it writes."""

    def start_receive(self, buffer: torch.Tensor) -> None:
        """Nothing to do: the sender writes by itself."""

    def finish_receive(self, buffer: torch.Tensor) -> torch.Tensor:
        """The next message, copied into `buffer`.

        Raises:
            TimeoutError, Aborted: as `wait_until`.
            RuntimeError: the file is not what its manifest says, or not as long as `buffer`.
        """
        number = self.number + 1
        manifest_file = _manifest_file(self.folder, number)
        what = f"sender {self.stream.sender} did not write {manifest_file}"

        def is_there() -> bool:
            return manifest_file.name in os.listdir(self.folder)

        wait_until(is_there, self.stream.timeout_s, self.abort_signal, what)
        message = _read(self.folder, number)
        if (message.dtype, message.numel()) != (buffer.dtype, buffer.numel()):
            raise RuntimeError(
                f"{manifest_file}: {message.numel()} numbers of {message.dtype}, expected "
                f"{buffer.numel()} of {buffer.dtype}"
            )
        buffer.copy_(message.view(buffer.shape))
        if buffer.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.number = number
        _write(self.folder / f"{number:06d}.done_{self.receiver}", b"")
        return buffer

    def free(self) -> None:
        """Nothing to do: the message was copied."""

    def close(self) -> None:
        """No connection to break."""
        self.abort_signal.close()


def _file_store(path: str, timeout_s: float) -> dist.Store:
    store = dist.FileStore(path, -1)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _message_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def _manifest_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _write(path: Path, content: bytes) -> None:
    """Write a file that has its name only when it is complete and on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _read(folder: Path, number: int) -> torch.Tensor:
    """The flat tensor of a message. Raises RuntimeError: it is not what its manifest says."""
    path = _message_file(folder, number)
    try:
        manifest = json.loads(_manifest_file(folder, number).read_bytes())
        message = load_file(path)[TENSOR]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise RuntimeError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    found = (str(message.dtype), message.numel(), _digest(message))
    if found != (manifest["dtype"], manifest["numbers"], manifest["xxh3_128"]):
        raise RuntimeError(f"{path}: its content is not what its manifest says")
    return message


def _digest(message: torch.Tensor) -> str:
    """XXH3 (128 bits) of a tensor in host memory."""
    return xxhash.xxh3_128_hexdigest(message.reshape(-1).view(torch.uint8).numpy())
