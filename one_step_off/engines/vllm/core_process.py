"""The process of vLLM's core on a GPU, forked from a server that has imported vLLM.

In a Ray actor vLLM starts its core with `spawn`: the actor imports vLLM, and when it has ended its
core imports it again, which takes as long. A fork server imports it at the same time as the actor.
It has neither Ray's threads, for which vLLM does not fork, nor CUDA. On CPUs the core is spawned:
libraries read some variables of the environment when they are loaded, which vLLM sets later there.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from one_step_off.cluster.errors import ProcessDied

PRELOADED = ["vllm.v1.engine.async_llm", "vllm.v1.engine.core"]
"""What the server imports: what vLLM itself imports before it forks. More might start CUDA, which
no forked process can use."""


PR_SET_PDEATHSIG = 1
SPAWN_WORKERS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""For the workers of tensor parallelism, as vLLM itself has them in a Ray actor."""

KERNEL_NAME = "VLLM::EngineCore"
"""By it `processes.is_engine` finds the process: a forked one has the server's command line, in
which there is no room for the title that vLLM gives itself. The kernel keeps 15 letters."""


def start_fork_server(device: str) -> None:
    """Start the server on a GPU; it imports vLLM while the caller continues. `device`: "cpu" or
    "cuda"."""
    if device != "cuda":
        return
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class CoreProcess(ForkServerProcess):
    """A forked process with the environment that its parent has when it starts it. That of the
    server is older."""

    def start(self) -> None:
        """See `multiprocessing.Process`."""
        self.environment = os.environ | SPAWN_WORKERS
        super().start()

    def run(self) -> None:
        """See `multiprocessing.Process`."""
        _die_with_the_server()
        Path("/proc/self/comm").write_text(KERNEL_NAME)
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


def _die_with_the_server() -> None:
    """In a forked process: let it end with the server, and the server with the actor. The server
    ends when all copies of a pipe are closed, and it gives one to each process that it forks."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


class CoreContext(ForkServerContext):
    """A context of multiprocessing whose processes are `CoreProcess`es."""

    Process = CoreProcess


@contextlib.contextmanager
def core_is_forked(device: str) -> Iterator[None]:
    """In the block vLLM 0.32 forks its core on a GPU from the server. `device`: "cpu" or "cuda".

    Patch of `vllm.v1.engine.utils.get_mp_context`, which in a Ray actor insists on `spawn`,
    whatever VLLM_WORKER_MULTIPROC_METHOD says.
    """
    if device != "cuda":
        yield
        return
    from vllm.v1.engine import utils

    own_context = utils.get_mp_context
    utils.get_mp_context = CoreContext
    try:
        yield
    finally:
        utils.get_mp_context = own_context


def start_engine(engine_config: Any, arguments: dict[str, Any], device: str) -> Any:
    """An `AsyncLLM` with vLLM's `VllmConfig`, which has been made of `arguments`. Raises what vLLM
    raises, and ProcessDied: the server died.

    Args:
        device: "cpu" or "cuda".
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM binds a process to a NUMA node by another executable, which a fork does not start.
    forks = device == "cuda" and not engine_config.parallel_config.numa_bind
    with core_is_forked(device) if forks else contextlib.nullcontext():
        try:
            return AsyncLLM.from_vllm_config(
                engine_config,
                enable_log_requests=arguments.get("enable_log_requests", False),
                disable_log_stats=arguments["disable_log_stats"],
            )
        except (EOFError, ConnectionError) as error:  # of the server's pipe and socket
            raise ProcessDied("its engine's fork server died") from error
