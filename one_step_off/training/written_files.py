"""The checksums of a checkpoint's files, computed by the ranks that wrote them: one process alone
would read hundreds of gigabytes."""

import hashlib
import os
import re
from pathlib import Path

import xxhash

FileFacts = dict[str, tuple[int, str]]
"""Size in bytes and checksum (XXH3-128) of each file, by its path in the checkpoint."""

_RANK_IN_NAME = re.compile(r"__(\d+)_\d+\.distcp")
"""How torch's and Megatron's checkpoints name what a rank wrote."""


def file_checksum(path: Path) -> str:
    """XXH3-128 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def facts_of_rank(folder: Path, role: str, rank: int) -> FileFacts:
    """The files that a rank of a role wrote, which are flushed to its disk too. Rank 0 counts those
    that belong to no rank.

    Args:
        folder: of the checkpoint, in which the rank has finished writing.
        role: of the rank.
        rank: in the role.
    """
    paths = [folder / f"{role}_rank_{rank}.npz"]
    for path in (folder / role).rglob("*"):
        match = _RANK_IN_NAME.fullmatch(path.name)
        writer = int(match[1]) if match else 0
        if writer == rank and path.is_file():
            paths.append(path)
    facts = {}
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        name = path.relative_to(folder).as_posix()
        facts[name] = (path.stat().st_size, file_checksum(path))
    return facts
