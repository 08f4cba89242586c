"""Processes that are forked from a server with torch, transformers, vLLM and the trainers imported.

A spawned process imports them again, for ten seconds of a core. There is one server in each process
of pytest, and it has the imports of its first start alone: whoever forks takes `context`.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing as mp

PRELOADED = [
    "tests.unit.training.fsdp_helpers",
    "tests.unit.training.megatron_helpers",
    "vllm.model_executor.models.registry",
    "tests.unit.weight_sync.parallel_models",
]


def context() -> ForkServerContext:
    """The context of multiprocessing whose processes are forked from the server.

    They have the environment with which the server started. No test may let it start CUDA.
    """
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    return forked


def run_ranks(function: Callable[..., None], args: tuple, ranks: int) -> None:
    """Run function(rank, *args) in a process per rank, with this process's environment.

    Raises:
        ProcessRaisedException: a rank raised; it has the traceback. The others are ended.
        ProcessExitedException: a rank was killed, or exited with another code than 0.
    """
    context()
    everything = (function, dict(os.environ), args)
    mp.start_processes(_run_rank, args=everything, nprocs=ranks, start_method="forkserver")


def _run_rank(
    rank: int, function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)
