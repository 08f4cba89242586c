"""The driver's record of the frozen model under LoRA adapters that are sent alone."""

from dataclasses import astuple
from math import prod
from typing import Any

import torch

from one_step_off.cluster.remote_calls import call_all
from one_step_off.weight_sync.sync_calls import SLOWEST_LINK
from one_step_off.weight_sync.weight_piece import FrozenBlock


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
