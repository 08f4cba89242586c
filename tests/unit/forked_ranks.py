"""Processes that are forked from a server with torch, transformers, vLLM and the trainers imported.

A spawned process imports them again, for ten seconds of a core. There is one server in each process
of pytest, and it has the imports of its first start alone: whoever forks takes `context`, and
starts what `process` or `run_ranks` makes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.multiprocessing as mp

PRELOADED = [
    "tests.unit.training.fsdp_helpers",
    "tests.unit.training.megatron_helpers",
    "vllm.model_executor.models.registry",
    "tests.unit.weight_sync.parallel_models",
]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)
"""Before any test has changed it: what is imported in the server may read it."""


def context() -> ForkServerContext:
    """The context of multiprocessing whose processes are forked from the server, for pipes and
    queues. No test may let the server start CUDA."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    # Python 3.11's server finds modules below its working directory, and passes over the others.
    with contextlib.chdir(ROOT), patch.dict(os.environ, ENVIRONMENT, clear=True):
        forkserver.ensure_running()
    return forked


def process(function: Callable[..., None], args: tuple) -> ForkServerProcess:
    """A process that will run function(*args) with this process's environment, and ends with it."""
    arguments = (function, dict(os.environ), args)
    return context().Process(target=_run, args=arguments, daemon=True)


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
    _run(function, environment, (rank, *args))


def _run(function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(*args)
