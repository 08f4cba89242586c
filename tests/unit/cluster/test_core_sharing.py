"""Which cores threads may use, when a side of the pipeline works, and that no bit depends on it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from one_step_off.cluster import core_binding, core_sharing
from one_step_off.cluster.core_sharing import ROLLOUT, TRAINER, CoreBinding, CoreSharing, CoreUser

CORES = sorted(os.sched_getaffinity(0))
OWN = CORES[:1]
GUEST = CORES[1:2]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")

# One thread is unbound, as those of the weight sync are; a line of input starts another one.
BOUND_PROCESS = """
import os, sys, threading
own, everything = eval(sys.argv[1]), eval(sys.argv[2])
os.sched_setaffinity(0, own)
def wait(cores, ready):
    os.sched_setaffinity(0, cores or os.sched_getaffinity(0))
    ready.set()
    threading.Event().wait()
def start(cores):
    ready = threading.Event()
    thread = threading.Thread(target=wait, args=(cores, ready), daemon=True)
    thread.start()
    ready.wait()
    print(thread.native_id, flush=True)
start(own)
start(everything)
while sys.stdin.readline():
    start(None)
"""


@pytest.fixture
def bound_process() -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", BOUND_PROCESS, repr(OWN), repr(OWN + GUEST)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def read_thread(process: subprocess.Popen) -> int:
    return int(process.stdout.readline())


def test_threads_move_and_those_of_the_weight_sync_stay(bound_process: subprocess.Popen) -> None:
    bound = read_thread(bound_process)
    unbound = read_thread(bound_process)
    binding = CoreBinding([bound_process.pid], OWN, GUEST)

    def cores() -> list[set[int]]:
        return [os.sched_getaffinity(thread) for thread in (bound_process.pid, bound, unbound)]

    own, everything = set(OWN), set(OWN + GUEST)
    assert cores() == [own, own, everything]
    binding.bind(wide=True)
    assert cores() == [everything] * 3
    bound_process.stdin.write("another\n")
    bound_process.stdin.flush()
    new_thread = read_thread(bound_process)
    assert os.sched_getaffinity(new_thread) == everything
    binding.bind(wide=False)
    assert cores() == [own, own, everything]
    assert os.sched_getaffinity(new_thread) == own, "it would work on the other side's cores"


def test_a_process_that_has_ended_is_left_out(bound_process: subprocess.Popen) -> None:
    read_thread(bound_process)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    CoreBinding([ended.pid, bound_process.pid], OWN, GUEST).bind(wide=True)
    assert os.sched_getaffinity(bound_process.pid) == set(OWN + GUEST)


class OneProcess(CoreUser):
    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def bound_pids(self) -> list[int]:
        return self.pids


def test_a_change_that_arrives_late_does_nothing(
    bound_process: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_thread(bound_process)
    monkeypatch.setenv(core_binding.OWN_CORES, str(OWN[0]))
    monkeypatch.setenv(core_binding.GUEST_CORES, str(GUEST[0]))
    user = OneProcess([bound_process.pid])
    user.use_cores(1, True)
    assert os.sched_getaffinity(bound_process.pid) == set(OWN + GUEST)
    user.use_cores(4, False)
    user.use_cores(3, True)
    assert os.sched_getaffinity(bound_process.pid) == set(OWN)


def test_without_guest_cores_nothing_moves(
    bound_process: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_thread(bound_process)
    monkeypatch.delenv(core_binding.GUEST_CORES, raising=False)
    OneProcess([bound_process.pid]).use_cores(1, True)
    assert os.sched_getaffinity(bound_process.pid) == set(OWN)


class Recorder:
    """A stand-in for an actor; `wide` is what it heard last."""

    def __init__(self, error: Exception | None = None) -> None:
        self.use_cores = self
        self.error = error
        self.wide = False
        self.numbers: list[int] = []

    def remote(self, number: int, wide: bool) -> Any:
        self.numbers.append(number)
        self.wide = wide
        answer = asyncio.get_running_loop().create_future()
        if self.error:
            answer.set_exception(self.error)
        else:
            answer.set_result(None)
        return answer


def test_a_side_has_all_cores_while_the_other_waits() -> None:
    trainer, replica = Recorder(), Recorder(RuntimeError("the actor is dead"))

    async def run() -> list[tuple[bool, bool]]:
        sharing = CoreSharing({ROLLOUT: lambda: [replica], TRAINER: lambda: [trainer]})
        seen = []
        reported: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))

        def note() -> None:
            seen.append((replica.wide, trainer.wide))

        with sharing.at_work(ROLLOUT):
            note()
            with sharing.at_work(TRAINER):
                note()
                with sharing.at_work(TRAINER):  # the critic's update, say
                    pass
                note()
            note()
        with sharing.at_work(TRAINER):
            note()
            await asyncio.sleep(0.05)
        note()  # the gap before the next call
        with sharing.at_work(TRAINER):
            note()
        metrics = sharing.take_metrics()
        assert metrics["time/trainer_all_cores_s"] >= 0.05
        assert sharing.take_metrics()["time/trainer_all_cores_s"] < 0.05
        with sharing.at_work(ROLLOUT):
            note()
        await asyncio.sleep(0.01)
        gc.collect()  # asyncio reports errors that nobody has taken
        assert not reported
        return seen

    seen = asyncio.run(run())
    alone_rollout, both, alone_trainer = (True, False), (False, False), (False, True)
    assert seen == [
        alone_rollout,
        both,
        both,
        alone_rollout,
        alone_trainer,
        alone_trainer,
        alone_trainer,
        alone_rollout,
    ]
    numbers = sorted(trainer.numbers + replica.numbers)
    assert len(set(numbers)) == len(numbers), "each change has its own number"


def test_a_failed_phase_gives_the_cores_back() -> None:
    trainer, replica = Recorder(), Recorder()

    async def run() -> None:
        sharing = CoreSharing({ROLLOUT: lambda: [replica], TRAINER: lambda: [trainer]})
        with pytest.raises(RuntimeError), sharing.at_work(ROLLOUT):
            raise RuntimeError("the replicas are gone")
        with sharing.at_work(TRAINER):
            assert trainer.wide

    asyncio.run(run())


# A model with the operations of training. Its products are large enough to be divided among
# threads.
TRAINING = """
import hashlib, os, random, sys, threading
cores = eval(sys.argv[1])
os.sched_setaffinity(0, cores[:1])
import torch
from one_step_off.cluster.core_sharing import CoreBinding
assert torch.get_num_threads() == 2

def train(done):
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(128, 2, 512, dropout=0.0, batch_first=True)
    head = torch.nn.Linear(128, 2000)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for step in range(4):
        inputs = torch.randn(8, 128, 128)
        log_probs = head(model(inputs)).log_softmax(-1)
        (-log_probs[..., 0].mean() + log_probs.exp().square().sum(-1).mean()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    done.set()
    weights = b"".join(p.detach().numpy().tobytes() for p in parameters)
    print(hashlib.sha256(weights).hexdigest())

def switch(done):
    binding = CoreBinding([os.getpid()], cores[:1], cores[1:])
    wide = False
    while not done.wait(random.uniform(0.0, 0.01)):
        wide = not wide
        binding.bind(wide)
    binding.bind(False)

train(threading.Event())
done = threading.Event()
switching = threading.Thread(target=switch, args=(done,))
switching.start()
train(done)
switching.join()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)
train(threading.Event())
"""


@pytest.mark.slow
def test_bits_depend_on_the_number_of_threads_and_not_on_the_cores() -> None:
    root = Path(core_sharing.__file__).parents[2]
    environment = os.environ | {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "MKL_DYNAMIC": "FALSE",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-c", TRAINING, repr(OWN + GUEST)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    on_one_core, switched, on_all_cores = done.stdout.split()
    assert switched == on_one_core
    assert on_all_cores == on_one_core


# A rank that is busy on its own thread, and a replica whose event loop is busy.
BUSY_ACTORS = """
import os, sys, time, ray
from one_step_off.cluster.core_sharing import CoreUser
from one_step_off.cluster.placement import create_pools, spawn
from one_step_off.config.loading import load_config

def cores_until(seconds):
    seen = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        cores = sorted(os.sched_getaffinity(0))
        if not seen or seen[-1] != cores:
            seen.append(cores)
        time.sleep(0.01)
    return seen, os.environ["OMP_NUM_THREADS"]

class Rank(CoreUser):
    threads = {"control": 1}
    def busy(self, seconds):
        return cores_until(seconds)

class Replica(CoreUser):
    threads = {"control": 1}
    calls_at_once = 100
    async def busy(self, seconds):
        return cores_until(seconds)

os.sched_setaffinity(0, eval(sys.argv[1]))
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
keys = ["placement.device=cpu", "placement.share_idle_cores=true"]
pools = create_pools(load_config(keys), "cpu")
actors = [spawn(Replica, (), pools["rollout"][0], "cpu"), spawn(Rank, (), pools["actor"][0], "cpu")]
ray.get([actor.busy.remote(0.0) for actor in actors])
answers = [actor.busy.remote(3.0) for actor in actors]
for number, wide in ((1, True), (2, False)):
    time.sleep(0.5)
    ray.get([actor.use_cores.remote(number, wide) for actor in actors])
print(ray.get(answers))
"""


def test_processes_change_their_cores_while_they_work() -> None:
    command = [sys.executable, "-c", BUSY_ACTORS, repr(OWN + GUEST)]
    environment = {n: value for n, value in os.environ.items() if n != "RAY_ADDRESS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    replica, rank = eval(done.stdout.splitlines()[-1])
    assert replica == ([OWN, OWN + GUEST, OWN], "2")
    assert rank == ([GUEST, OWN + GUEST, GUEST], "2")
