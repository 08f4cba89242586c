"""Functions in processes of their own, side by side: the members of a group, for one check."""

import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from one_step_off.config.schema import Config
from one_step_off.tools.gpu_check.check import CheckFailed

HOST = "127.0.0.1"
TIME_AFTER_FAILURE_S = 10.0
"""For the other peers to end, once one has failed."""

TOO_LATE = "no answer in time"


@dataclass(frozen=True)
class Failed:
    """A peer that has no result: it raised, died, or did not end in time."""

    reason: str


def run_peers(
    jobs: Sequence[tuple[Callable[..., Any], tuple]],
    limit_s: float,
    variables: dict[str, str] | None = None,
    one_may_die: bool = False,
) -> list[Any]:
    """What each function returns, or a `Failed`.

    Args:
        jobs: (function, arguments); functions of modules, since the processes are spawned.
        limit_s: seconds for all; those that run longer are killed.
        variables: environment variables of the peers.
        one_may_die: the others have all the time even if one has failed; else only
            TIME_AFTER_FAILURE_S, since they would wait for it in vain.
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
    time_after_failure_s = limit_s if one_may_die else TIME_AFTER_FAILURE_S
    results = _collect(processes, limit_s, time_after_failure_s)
    for process, _ in processes:
        process.kill()
    return results


def all_results(results: list[Any], names: Sequence[str]) -> list[Any]:
    """The results. Raises CheckFailed: a peer has none; names the one that says most."""
    failures = []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, Failed):
            failures.append(f"{name}: {result.reason}")
    if failures:
        raise CheckFailed(min(failures, key=_says_little))
    return results


def _says_little(failure: str) -> int:
    """A wrong result says more than a broken connection, and that more than a peer that waits."""
    if CheckFailed.__name__ in failure:
        return 0
    return 2 if TOO_LATE in failure else 1


def _collect(
    processes: list[tuple[Any, Connection]], limit_s: float, time_after_failure_s: float
) -> list[Any]:
    """The results, in the order of the processes."""
    results: list[Any] = [Failed(TOO_LATE)] * len(processes)
    waiting = {receiving: index for index, (_, receiving) in enumerate(processes)}
    deadline = time.monotonic() + limit_s
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiving in ready:
            index = waiting.pop(receiving)
            results[index] = _receive(*processes[index])
            if isinstance(results[index], Failed):
                deadline = min(deadline, time.monotonic() + time_after_failure_s)
    return results


def _receive(process: Any, receiving: Connection) -> Any:
    try:
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


def policy_worker(cfg: Config, device: str) -> Any:
    """A policy worker that is built and not yet set up. Also where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        sys.modules["ray"] = _marks_without_ray()
    from one_step_off.training.fsdp.fsdp_workers import PolicyWorker

    return PolicyWorker(cfg, "actor", 0, 1, device, total_steps=4)


def set_up(worker: Any) -> None:
    """Load its model, as the only rank."""
    worker.setup(*worker.free_address(HOST))


def _marks_without_ray() -> types.ModuleType:
    """A stand-in for Ray: the workers mark methods with `ray.method`, and use nothing else of it
    outside of actors."""
    stand_in: Any = types.ModuleType("ray")
    stand_in.method = lambda **options: lambda method: method
    return stand_in
