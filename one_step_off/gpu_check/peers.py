"""Functions in processes of their own, side by side: the members of a group, for one check."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from one_step_off.gpu_check.check import CheckFailed

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Failed:
    """A peer that has no result: it raised, died, or did not end in time."""

    reason: str


def run_peers(
    jobs: Sequence[tuple[Callable[..., Any], tuple]],
    limit_s: float,
    variables: dict[str, str] | None = None,
) -> list[Any]:
    """What each function returns, or a `Failed`.

    Args:
        jobs: (function, arguments); functions of modules, since the processes are spawned.
        limit_s: seconds for all; those that run longer are killed.
        variables: environment variables of the peers.
    """
    processes = []
    former = dict(os.environ)
    os.environ.update(variables or {})
    start = multiprocessing.get_context("spawn")
    try:
        for function, arguments in jobs:
            receiving, sending = start.Pipe(duplex=False)
            process = start.Process(target=_run_peer, args=(sending, function, arguments))
            process.start()
            sending.close()
            processes.append((process, receiving))
    finally:
        os.environ.clear()
        os.environ.update(former)
    deadline = time.monotonic() + limit_s
    results = [_result(process, receiving, deadline) for process, receiving in processes]
    for process, _ in processes:
        process.kill()
    return results


def all_results(results: list[Any], names: Sequence[str]) -> list[Any]:
    """The results. Raises CheckFailed: a peer has none; names it."""
    for name, result in zip(names, results, strict=True):
        if isinstance(result, Failed):
            raise CheckFailed(f"{name}: {result.reason}")
    return results


def _result(process: Any, receiving: Connection, deadline: float) -> Any:
    try:
        if not receiving.poll(max(0.0, deadline - time.monotonic())):
            return Failed("no answer in time")
        return receiving.recv()
    except EOFError:
        process.join(5.0)
        return Failed(f"its process ended with code {process.exitcode}")


def _run_peer(sending: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        result = function(*arguments)
    except Exception as error:
        traceback.print_exc()
        result = Failed(f"{type(error).__name__}: {' '.join(str(error).split())}")
    sending.send(result)
    sending.close()
    # Threads that an aborted group has left behind must not hold the process.
    os._exit(0)
