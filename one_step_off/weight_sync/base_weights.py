"""The base model under LoRA adapters that are sent alone: trainer and engine each load it from the
checkpoint, and compare digests once.

The trainer's base is frozen, so no sync needs to bring it. But the engine must have the same one: a
folder may differ from node to node, or change between two starts. So each trainer rank hashes the
blocks that it trains on, and each new vLLM worker hashes the same blocks of the files that it has
loaded. That vLLM has put them into the right places is the canary's to show, as for any model.
"""

from collections.abc import Iterable
from dataclasses import astuple
from math import prod
from typing import Any

import torch
import xxhash

from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.remote_calls import call_all
from one_step_off.weight_sync.sync_calls import SLOWEST_LINK
from one_step_off.weight_sync.weight_piece import FrozenBlock, WeightPiece

ADAPTER_ID = 1
"""vLLM's number of the one adapter. It stays the same from sync to sync: the pause before a sync
clears the prefix cache, and unfinished requests resume with the new matrices."""

NAMES_SHOWN = 3

FIX = "set weight_sync.lora=merged, or give trainer and engine the same model.path"


def digest(tensor: torch.Tensor, dtype: str) -> str:
    """XXH3 (128 bits) of a tensor's elements in this dtype."""
    block = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous()
    return xxhash.xxh3_128_hexdigest(block.reshape(-1).view(torch.uint8).numpy())


def frozen_block(piece: WeightPiece, tensor: torch.Tensor) -> FrozenBlock:
    """`tensor`: the data of `piece`."""
    return FrozenBlock(piece, digest(tensor, piece.dtype))


def compare(blocks: list[list[Any]], loaded: Iterable[tuple[str, torch.Tensor]], who: str) -> None:
    """Compare the trainers' base model with what an engine has loaded.

    Args:
        blocks: of `BaseModel`.
        loaded: name and whole tensor, one after the other; the trainers need not have all.
        who: names the engine in errors.

    Raises:
        SyncError: a block differs, or is missing.
    """
    expected: dict[str, list[tuple[WeightPiece, str]]] = {}
    for *fields, expected_digest in blocks:
        name, dtype, shape, *cut = fields
        piece = WeightPiece(name, dtype, tuple(shape), *cut)
        expected.setdefault(name, []).append((piece, expected_digest))
    different = []
    for name, tensor in loaded:
        for piece, expected_digest in expected.pop(name, ()):
            is_same = tuple(tensor.shape) == piece.shape
            if not is_same or digest(piece.slice_of(tensor), piece.dtype) != expected_digest:
                different.append(name)
    _refuse(sorted(set(different)), "differ from the trainer's", who)
    _refuse(sorted(expected), "are not in the engine's checkpoint", who)


def _refuse(names: list[str], fault: str, who: str) -> None:
    if names:
        raise SyncError(
            f"{who}: {len(names)} tensors of the base model {fault}, such as "
            f"{names[:NAMES_SHOWN]}; {FIX}"
        )


class BaseModel:
    """What the trainers hold of the frozen model.

    Attributes:
        blocks: the fields of each block's piece, and its digest: plain data, since it crosses the
            borders of vLLM's processes.
        nbytes: of the whole model.
    """

    def __init__(self, blocks: list[FrozenBlock]) -> None:
        """`blocks`: of all ranks."""
        self.blocks: list[list[Any]] = []
        self.nbytes = 0
        for block in blocks:
            self.blocks.append([*astuple(block.piece), block.digest])
            self.nbytes += (
                prod(block.piece.block_shape) * getattr(torch, block.piece.dtype).itemsize
            )

    def read_limit_s(self, timeout_s: float) -> float:
        """Seconds for a worker to read and to hash the model's files."""
        return timeout_s + self.nbytes / SLOWEST_LINK


async def ask_trainers(ranks: list[Any], timeout_s: float) -> BaseModel:
    """Ask every rank for the digests of its blocks.

    Args:
        ranks: Ray actor handles.
        timeout_s: for all answers.

    Raises:
        PhaseTimeout, and what a rank raises.
    """
    who = "weight sync, base model of trainer rank"
    answers = await call_all(timeout_s, who, ranks, "base_digests")
    return BaseModel([block for blocks in answers for block in blocks])
