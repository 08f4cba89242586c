"""The chaos program's own parts, and what it is there to check: nothing is left when a driver is
killed.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from one_step_off.cluster import process_cleanup as leftovers
from tests.chaos import watch
from tests.chaos.command import complaints
from tests.chaos.kills import Kill, table
from tests.chaos.points import POINTS

INJECT = Path(__file__).parents[2] / "chaos/inject"


def test_every_point_is_a_function_of_the_product():
    """Points are found by name: a renamed function would never be hit."""
    pytest.importorskip("vllm")
    for point in POINTS:
        module, _, path = point.where.partition(":")
        found = importlib.import_module(module)
        for name in path.split("."):
            found = vars(found)[name]
        assert callable(found), point
    assert len({(p.kind, p.name) for p in POINTS}) == len(POINTS)


def scorer(folder: Path) -> subprocess.Popen:
    """A process that scores on and on, as a reward worker does."""
    code = """
        from one_step_off.config.schema import RewardConfig
        from one_step_off.rewards.scoring import RewardItem, Scorer
        worker = Scorer(RewardConfig())
        while True:
            print(worker.score_batch([RewardItem((0, 0), 0, "", "#### 1", "1")]), flush=True)
    """
    paths = f"{INJECT}:{Path(__file__).parents[3]}"
    env = os.environ | {"PYTHONPATH": paths, "CHAOS_FOLDER": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, stdout=subprocess.PIPE, text=True
    )


def test_an_armed_point_kills_the_process_that_passes_it_and_no_other(tmp_path):
    process = scorer(tmp_path)
    assert process.stdout.readline() == "[1.0]\n"
    wish = {"id": 7, "kind": "trainer", "point": "forward", "skip": 0, "signal": "SIGKILL"}
    (tmp_path / "armed").write_text(json.dumps(wish))
    assert [process.stdout.readline() for _ in range(3)] == ["[1.0]\n"] * 3
    assert (tmp_path / "armed").exists(), "it is meant for another kind"
    new = tmp_path / "new"
    new.write_text(json.dumps(wish | {"kind": "scorer", "point": "scoring", "skip": 2}))
    new.replace(tmp_path / "armed")
    assert process.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "armed").exists() and (tmp_path / "claimed_7").exists()
    assert json.loads((tmp_path / "hit_7").read_text())["pid"] == process.pid


CHILD = """
    import multiprocessing, os, subprocess, sys, tempfile, time
    from multiprocessing import resource_tracker, shared_memory
    from one_step_off.runtime.launch import cleanup_after_run
    with cleanup_after_run():
        memory = shared_memory.SharedMemory(create=True, size=64)
        resource_tracker.unregister(memory._name, "shared_memory")  # nobody else cleans up
        code = "import time, multiprocessing.shared_memory as s; m = s.SharedMemory({!r}); "
        code += "print(flush=True); time.sleep(600)"
        command = [sys.executable, "-c", code.format(memory.name)]
        child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.readline()
        print(os.environ["ONE_STEP_OFF_RUN"], child.pid, memory._name, flush=True)
        memory.close()
        time.sleep(600 * (sys.argv[1] == "killed"))
"""


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_whatever_a_run_started_is_gone_soon_after_its_driver(how):
    """Its children, though in sessions of their own, the shared memory they hold, and its temporary
    files.
    """
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), how]
    driver = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    folder, child, memory = driver.stdout.readline().split()
    assert (
        Path(folder).is_dir()
        and Path(f"/dev/shm{memory}").exists()
        and Path(f"/proc/{child}").exists()
    )
    if how == "killed":
        driver.kill()
    driver.wait(30)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (Path(folder).exists() or _alive(child)):
        time.sleep(0.05)
    assert not _alive(child)
    assert not Path(f"/dev/shm{memory}").exists()
    assert not Path(folder).exists()


def test_the_folder_of_a_run_leaves_room_for_the_names_of_sockets(tmp_path, monkeypatch):
    """vLLM's are 37 letters longer than it, those of Python's multiprocessing 32, and the kernel
    takes 107.
    """
    from one_step_off.runtime import launch

    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    for there in (deep, Path("/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", str(there))
        with launch.cleanup_after_run():
            folder = os.environ[leftovers.RUN_FOLDER_VARIABLE]
            assert len(folder) + 38 <= 107 and Path(folder).is_dir()
        assert not Path(folder).exists()


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


LEAVES = """
    import os, subprocess, sys, time
    from multiprocessing import get_context, resource_tracker, shared_memory
    from one_step_off.runtime.launch import cleanup_after_run
    with cleanup_after_run():
        code = "import os, time, multiprocessing as m, multiprocessing.shared_memory as s\\n"
        code += "x, y = s.SharedMemory(create=True, size=64), m.get_context('spawn').Lock()\\n"
        code += "print(x.name, 'sem.' + y._semlock.name.strip('/'), flush=True); "
        code += "os.kill(m.resource_tracker._resource_tracker._pid, 9); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        print(child.stdout.readline().strip(), flush=True)
        child.kill()
        time.sleep(600)
"""


def test_what_a_killed_process_had_for_a_moment_goes_and_what_is_not_ours_stays(tmp_path):
    """A segment and a semaphore, both there for less than a second; and a model that the run
    mapped.
    """
    foreign = [Path(f"/dev/shm/{name}_{os.getpid()}.safetensors") for name in ("model", "psm")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    held, late = (shared_memory.SharedMemory(create=True, size=64) for _ in range(2))
    try:
        for path in foreign:
            path.write_bytes(b"weights")
        driver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(LEAVES)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        made = [Path("/dev/shm") / name for name in driver.stdout.readline().split()]
        assert len(made) == 2 and all(path.exists() for path in made)
        late.buf[0] = 1
        os.utime(f"/dev/shm/{late.name}")
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(path.exists() for path in made):
            time.sleep(0.05)
        assert not [path for path in made if path.exists()]
        assert all(path.exists() for path in foreign), "the user's own"
        assert all(Path(f"/dev/shm/{one.name}").exists() for one in (held, late)), (
            "another program's, in use"
        )
    finally:
        for path in foreign:
            path.unlink(missing_ok=True)
        for one in (held, late):
            one.close()
            one.unlink()


def test_another_run_is_left_alone(tmp_path):
    """The sweeper knows a run by the whole name of its folder."""
    mine, other = tmp_path / "a", tmp_path / "a1"
    for folder in (mine, other):
        folder.mkdir()
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(sleeps, env=os.environ | {leftovers.RUN_FOLDER_VARIABLE: str(other)})
    try:
        subprocess.run(
            [sys.executable, "-P", leftovers.__file__, str(mine), "0"],
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=30,
        )
        assert process.poll() is None and other.exists() and not mine.exists()
    finally:
        process.kill()
        process.wait()


def test_a_process_and_what_it_holds_are_found_by_its_mark():
    holds = watch.Belongings()
    memory = shared_memory.SharedMemory(create=True, size=64)
    mark = f"test-{os.getpid()}."
    code = "import socket, time, multiprocessing.shared_memory as s; "
    code += f"m = s.SharedMemory({memory.name!r})\n"
    # Otherwise its tracker would remove our segment.
    code += "s.resource_tracker.unregister(m._name, 'shared_memory')\n"
    code += "p = socket.create_server(('127.0.0.1', 0)); "
    code += "print(p.getsockname()[1], flush=True); time.sleep(60)"
    env = os.environ | {watch.MARK: f"{mark}3."}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(process.stdout.readline())
        assert process.pid in watch.marked(
            mark
        )  # with Python's tracker of shared memory, a child of it
        assert process.pid in watch.marked(f"{mark}3.")
        assert not watch.marked(f"{mark}2.")
        holds.look([process.pid])
        path = f"/dev/shm/{memory.name}"
        left = holds.left(stay_s=0)
        assert f"port {port}" in left and path not in left, "somebody has it mapped"
        watch.end_all(mark)
        process.wait(10)
        memory.close()
        left = holds.left(stay_s=0)
        assert path in left and f"port {port}" not in left
    finally:
        process.kill()
        memory.close()
        memory.unlink()
        resource_tracker.ensure_running()
    assert path not in holds.left(stay_s=0)


def test_shared_memory_of_another_run_is_not_counted():
    """What another process had mapped, and what is gone a moment later."""
    holds = watch.Belongings()
    foreign, moment, own = (shared_memory.SharedMemory(create=True, size=64) for _ in range(3))
    paths = [f"/dev/shm/{memory.name}" for memory in (foreign, moment, own)]
    try:
        for memory in (moment, own):
            memory.close()  # before anybody looks
        holds.look([])
        foreign.close()
        assert sorted(holds.left(stay_s=0)) == sorted(paths[1:])
        threading.Timer(0.3, moment.unlink).start()
        assert holds.left(stay_s=1.0) == [paths[2]]
    finally:
        foreign.unlink()
        own.unlink()


class Finished:
    """A command that has ended, by its files."""

    def __init__(self, folder: Path, prompts: list[list], stale: float = 1.0) -> None:
        self.folder = folder
        steps = [{"step": i, "staleness/max": min(i, stale)} for i in range(len(prompts))]
        for name, rows in (
            ("metrics", steps),
            ("ledger", [{"step": i, "prompts": p} for i, p in enumerate(prompts)]),
        ):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_complaints_name_what_is_lost_doubled_or_stale(tmp_path):
    expected = [[[0, 1], [0, 2]], [[0, 3], [0, 4]], [[0, 5], [0, 6]]]
    assert complaints(Finished(tmp_path, expected), 3, expected) == []
    assert "once each" in complaints(Finished(tmp_path, expected[:2]), 3, expected)[0]
    swapped = [expected[0], expected[2], expected[1]]
    assert "in steps [1, 2]" in complaints(Finished(tmp_path, swapped), 3, expected)[0]
    doubled = [expected[0], expected[1], expected[1]]
    assert any("twice" in line for line in complaints(Finished(tmp_path, doubled), 3, expected))
    assert "staleness" in complaints(Finished(tmp_path, expected, stale=2.0), 3, expected)[0]
    cut = Finished(tmp_path, expected)
    with open(cut.folder / "metrics.jsonl", "a") as f:
        f.write('{"step": 3')  # being written
    assert complaints(cut, 3, expected) == []


def test_the_table_counts_hits_and_recoveries_apart():
    kills = [
        Kill(0, "engine", "idle", time=1.0, recovered_s=2.0),
        Kill(1, "engine", "idle", time=1.0, wrong="no recovery"),
        Kill(2, "engine", "idle"),
    ]
    assert table(kills).splitlines()[-1] == "| engine | idle | 2 | 1 | 2.0, 2.0 |"
