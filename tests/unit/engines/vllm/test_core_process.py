"""The core's process: forked from a server, with the environment that it would have if spawned."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from one_step_off.engines.vllm.core_process import PRELOADED, CoreContext, core_is_forked
from one_step_off.engines.vllm.processes import engine_processes
from one_step_off.runtime.process_env import GPU_ENGINE_ENV

SET_LATER = "ONE_STEP_OFF_TEST_SET_LATER"
REMOVED = "ONE_STEP_OFF_TEST_REMOVED"


def send_environment(connection, name):
    """In a core's process."""
    connection.send((os.environ.get(SET_LATER), os.environ.get(REMOVED), name))


def wait_forever():
    """In a core's process."""
    time.sleep(600)


def name_itself(connection):
    """In a core's process: vLLM's core does the same, then works."""
    from vllm.utils.system_utils import set_process_title

    set_process_title("EngineCore")
    connection.send("named")
    time.sleep(600)


def report_imports():
    """In a core's process, before it has imported anything itself."""
    started_cuda = sys.modules["torch"].cuda.is_initialized()
    threads_of_server = os.listdir(f"/proc/{os.getppid()}/task")
    imported = [name in sys.modules for name in PRELOADED]
    print(imported, started_cuda, len(threads_of_server), flush=True)


START = """
from one_step_off.engines.vllm.core_process import CoreContext, start_fork_server
from tests.unit.engines.vllm.test_core_process import report_imports
if __name__ == "__main__":
    start_fork_server("cuda")
    process = CoreContext().Process(target=report_imports)
    process.start()
    process.join()
"""


def test_the_server_has_imported_vllm_and_may_fork(tmp_path):
    """It passes over a module that it cannot import. CUDA and threads do not survive a fork."""
    script = tmp_path / "start.py"
    script.write_text(START)
    search_path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | GPU_ENGINE_ENV | {"PYTHONPATH": search_path}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[True, True] False 1"


def answer_of(context: CoreContext) -> tuple:
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=send_environment, args=(theirs,), kwargs={"name": "core"})
    process.start()
    answer = ours.recv()
    process.join()
    assert process.exitcode == 0
    return answer


def test_the_process_has_the_environment_of_its_start_not_that_of_the_server(monkeypatch):
    context = CoreContext()
    monkeypatch.setenv(REMOVED, "of the server")
    assert answer_of(context) == (None, "of the server", "core")
    monkeypatch.setenv(SET_LATER, "now")
    monkeypatch.delenv(REMOVED)
    assert answer_of(context) == ("now", None, "core")


def test_a_killed_process_has_the_exit_code_of_its_signal():
    """`processes.killed_engine_raises_process_died` reads it."""
    process = CoreContext().Process(target=wait_forever)
    process.start()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_starts_its_core_in_this_context_on_gpus_alone(device):
    from vllm.v1.engine import utils

    own = utils.get_mp_context
    with core_is_forked(device):
        assert (utils.get_mp_context is own) == (device == "cpu")
    assert utils.get_mp_context is own


def test_it_is_found_as_a_process_of_the_engine():
    """So a dead replica's engine is ended, whose title cannot be set."""
    ours, theirs = multiprocessing.Pipe()
    process = CoreContext().Process(target=name_itself, args=(theirs,))
    process.start()
    ours.recv()
    assert process.pid in [found.pid for found in engine_processes()]
    process.kill()
    process.join()


START_AND_WAIT = """
import time
from one_step_off.engines.vllm.core_process import CoreContext
from tests.unit.engines.vllm.test_core_process import wait_forever
if __name__ == "__main__":
    process = CoreContext().Process(target=wait_forever)
    process.start()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def test_it_ends_with_the_actor_that_started_it(tmp_path):
    """And so does the server: both would keep the memory of a GPU."""
    script = tmp_path / "start.py"
    script.write_text(START_AND_WAIT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE
    ) as actor:
        core = psutil.Process(int(actor.stdout.readline()))
        server = core.parent()
        assert server.pid not in (actor.pid, 1)
        actor.kill()
        _, alive = psutil.wait_procs([core, server], timeout=20)
        for process in alive:
            process.kill()
        assert alive == []
