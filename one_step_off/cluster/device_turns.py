"""Turns of the processes that share a GPU while they start.

An engine that measures how much memory it may use must be the only one that takes or frees memory
meanwhile: vLLM counts what others take as its own, and fails if they free some. All others may
start at the same time. The turns are locks on a file, which the kernel frees with its process.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ASK_AGAIN_S = 0.05
"""Seconds between two questions whether it is this process's turn."""


def turn_file(folder: str = "") -> Path:
    """The file whose lock is the turn on this process's GPU.

    `folder`: "": that for temporary files, which all processes of a run have in common.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").replace(",", "_").replace("/", "_")
    # Machines may share the folder.
    name = f"one_step_off_{os.getuid()}_{socket.gethostname()}_gpu_{gpu}.lock"
    return Path(folder or tempfile.gettempdir(), name)


@contextlib.contextmanager
def device_turn(alone: bool, limit_s: float, path: Path | None = None) -> Iterator[None]:
    """Start on this process's GPU in the block.

    Args:
        alone: no other process starts meanwhile, since this one measures the memory.
        limit_s: to wait for the turn, in seconds.
        path: of the lock; None: that of this process's GPU.

    Raises:
        TimeoutError: other processes had not started within `limit_s`.
    """
    path = path or turn_file()
    mode = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with path.open("a+") as file:  # NFS gives a shared lock only to who may read
        deadline = time.monotonic() + limit_s
        while not _took_lock(file.fileno(), mode):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process has been starting on the same GPU for {limit_s:g} s; "
                    "raise trainer.start_timeout_s, or see why it does not end in logs/"
                )
            time.sleep(ASK_AGAIN_S)
        try:
            yield
        finally:
            # Closing the file would not do: a process that was forked meanwhile has it too.
            fcntl.flock(file, fcntl.LOCK_UN)


def _took_lock(file: int, mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
