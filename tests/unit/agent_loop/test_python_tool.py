"""The tool `python`: what programs may do, and that nothing of them stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from agent_loop import processes, tools
from agent_loop.tools import Toolbox
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import AgentConfig

X86_64_ONLY = pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")


def run_program(code: str, timeout_s: float = 5.0) -> tuple[str, bool]:
    """The answer of the tool, and whether it succeeded."""
    toolbox = Toolbox(AgentConfig(tools="python", tool_timeout_s=timeout_s))
    return asyncio.run(toolbox.call("python", {"code": code}, 600.0))


def test_it_answers_with_what_a_program_printed_or_its_traceback():
    assert run_program("print(6 * 7)") == ("42\n", True)
    answer, succeeded = run_program("1 / 0")
    assert "ZeroDivisionError" in answer
    assert not succeeded, "it counts as a tool's error"
    answer, _ = run_program("import os; os._exit(3)")
    assert "ended itself" in answer
    thread = "import threading as t; t.Thread(target=print, args=[5]).start()"
    assert run_program(thread) == ("5\n", True)
    files = "import os; print(os.listdir(), open('a', 'w').write('x'))"
    assert run_program(files) == ("[] 1\n", True)


CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
found = libc.syscall(*{0})
print("refused" if found < 0 else "DONE", os.strerror(ctypes.get_errno()))
"""
ME = os.getpid()


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.setsid()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "rror"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "File too large"),
        ("import subprocess; subprocess.run(['/bin/true'])", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; print(sorted(os.environ))", "HOME"),
        *((f"open('/proc/{pid}/environ')", "PermissionError") for pid in ("self", ME)),
        ("import os; open(f'/proc/{os.getppid()}/mem', 'r+b')", "PermissionError"),
        (f"import os; os.pidfd_open({ME})", "PermissionError"),
        (f"import os; os.sched_setaffinity({ME}, [0])", "PermissionError"),
        (f"import os; os.setpriority(os.PRIO_PROCESS, {ME}, 5)", "PermissionError"),
        *((CALL.format(f"({number}, {arguments})"), "refused Operation not permitted")
          for number, arguments in [(310, f"{ME}, 0, 0, 0, 0, 0"), (438, "3, 0, 0"),
                                    (29, "0, 4096, 0o1600"), (272, "0x10000000"),
                                    (240, "b'/q', 0o102, 0o600, 0"), (434, f"{ME}, 0")]),
        *((f"import fcntl; fcntl.{call}", "PermissionError")
          for call in (f"fcntl(1, 8, {ME})", "fcntl(1, 10, 9)", "fcntl(1, 15, bytes(8))",
                       f"ioctl(1, 0x8901, b'{ME:04}')")),
        ("import fcntl; print(fcntl.fcntl(1, fcntl.F_GETFL))", "2"),
        ("import os; os.memfd_create('a')", "PermissionError"),
        ("import ctypes; b = (ctypes.c_long * 2)(); ctypes.CDLL(None).syscall(97, 0, b); print(*b)",
         "10 10"),
        ("open('/etc/passwd')", "PermissionError"),
        (f"import os; os.listdir({str(Path(__file__).parent)!r})", "PermissionError"),
        ("open('/tmp/one_step_off_escaped', 'w')", "PermissionError"),
        ("import os; os.chown('.', 5, 5)", "PermissionError"),
    ],
    ids=lambda value: value.replace(str(ME), "ME"),  # the same in every worker of pytest-xdist
)  # fmt: skip
@X86_64_ONLY
def test_forbidden_code_is_refused(code, refused):
    answer, _ = run_program(code, timeout_s=20.0)
    assert refused in answer


BY_NUMBER = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for call in {0}:
    if libc.syscall(*call) != -1 or ctypes.get_errno() != errno.EPERM:
        print(call, "is not refused but", errno.errorcode.get(ctypes.get_errno()))
"""
METADATA = (
    90,
    91,
    268,
    452,
    92,
    93,
    94,
    260,
    132,
    235,
    261,
    280,
    188,
    189,
    190,
    197,
    198,
    199,
    463,
    466,
    469,
)


@X86_64_ONLY
@pytest.mark.parametrize(
    "calls",
    [
        # chmod, chown, utime, setxattr and their like
        [(number, -1, 0, 0, 0) for number in METADATA],
        [(16, -1, command, 0) for command in (0x40086602, 0x401C5820)],  # by chattr
        [(76, b"/nowhere", 0)],  # truncate
        # open for truncation
        [(2, b"/nowhere", 0o1000), (2, b"/nowhere", 0o1003), (257, -100, b"/nowhere", 0o1000, 0)],
        [(53, 1, kind, 0, 0) for kind in (2, 5, 0x80002)],  # socketpair, but of streams
        [(42, 1, 0, 0), (49, 1, 0, 0)],  # connect, bind
        [(157, 1, 0, 0, 0, 0)],  # to outlive the parent
    ],
    ids=["metadata", "chattr", "truncate", "open", "socketpair", "connect", "death signal"],
)
def test_forbidden_system_calls_are_refused(calls):
    assert run_program(BY_NUMBER.format(calls), timeout_s=20.0) == ("", True)


def test_usual_work_on_files_is_possible():
    code = """
import asyncio, os, shutil, sqlite3, tempfile
with open("a", "w") as f:
    f.write("abc")
    f.truncate(2)
with open("a", "a") as f, tempfile.TemporaryFile() as g, tempfile.NamedTemporaryFile("w") as h:
    print(f.write("c"), g.write(b"d"), h.write("e"))
with tempfile.TemporaryDirectory() as folder:
    copies = shutil.copy("a", folder), shutil.copy2("a", folder + "/b")
    print(*map(os.path.basename, copies))
    shutil.copytree(folder, "tree")
shutil.move("a", "tree/c")
print(sorted(os.listdir("tree")), open("tree/c").read())
shutil.rmtree("tree")
base = sqlite3.connect("base")
base.execute("create table t (x)")
base.commit()
print(sorted(os.listdir()), asyncio.run(asyncio.sleep(0, "awake")))
"""
    printed = "1 1 1\na b\n['a', 'b', 'c'] abc\n['base'] awake\n"
    assert run_program(code) == (printed, True)


OWNER = """
import asyncio
from agent_loop.tools import python
asyncio.run(python("import time; time.sleep(60)"))
"""


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    """All processes below this one, once there are so many."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= count:
            return children
        time.sleep(0.05)
    raise TimeoutError(f"process {pid} has not {count} children")


@pytest.mark.parametrize("killed", ["owner", "fork server"])
def test_programs_end_with_any_killed_process_above_them(killed, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment)
    try:
        children = wait_for_children(owner.pid, 2)
        time.sleep(0.5)  # until the program sleeps
        assert len(children) == 2
        victim = owner if killed == "owner" else children[0]
        victim.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    finally:
        owner.kill()
        owner.wait()


def child_pids() -> set[int]:
    return {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}


def open_file_count() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


HANGS = """
import threading, time
threading.Thread(target=time.sleep, args=[60]).start()
open('a', 'w')
print(1)
time.sleep(60)
"""


def test_a_program_that_hangs_is_killed_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, succeeded = run_program("pass")
    assert succeeded
    children_before = child_pids()
    files_before = open_file_count()
    for _ in range(3):
        answer, succeeded = run_program(HANGS, timeout_s=0.5)
        assert not succeeded
        assert "longer than 0.5 s" in answer
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not list(tmp_path.iterdir()) and child_pids() <= children_before:
            break
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
    assert child_pids() <= children_before
    # Another thread may have opened one or two; three programs that each left one behind are more.
    assert open_file_count() < files_before + 3


def test_no_more_programs_at_once_than_cores_and_the_wait_is_not_counted(monkeypatch):
    """Programs of half a second, from two toolboxes, so many that the last one waits longer than a
    call may take."""
    cores = min(2, len(os.sched_getaffinity(0)))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    code = "import time; print(time.time()); time.sleep(0.5); print(time.time())"

    async def main():
        config = AgentConfig(tools="python", tool_timeout_s=2.0)
        toolboxes = [Toolbox(config), Toolbox(config)]
        calls = []
        for i in range(6 * cores):
            calls.append(toolboxes[i % 2].call("python", {"code": code}, 600.0))
        return await asyncio.gather(*calls)

    answers = asyncio.run(main())
    assert all(succeeded for _, succeeded in answers)
    spans = [tuple(map(float, text.split())) for text, _ in answers]
    at_once = [sum(begin <= t < end for begin, end in spans) for t, _ in spans]
    assert max(at_once) == cores


@pytest.mark.parametrize(("seconds", "longest_queue_s"), [(0.3, 60.0), (float("inf"), 0.3)])
def test_the_wait_for_a_core_is_within_the_time_of_the_conversation(
    seconds, longest_queue_s, monkeypatch
):
    monkeypatch.setattr(processes, "MAX_QUEUE_S", longest_queue_s)

    async def main() -> list[tuple[str, bool]]:
        toolbox = Toolbox(AgentConfig(tools="python", tool_timeout_s=1.0))
        async with contextlib.AsyncExitStack() as stack:
            for _ in os.sched_getaffinity(0):
                await stack.enter_async_context(processes.reserve_core())
            work = toolbox.call("python", {"code": "print(1)"}, seconds)
            waited = await asyncio.wait_for(work, 10)
        sleeps = await toolbox.call("python", {"code": "import time; time.sleep(60)"}, 0.5)
        return [waited, sleeps]

    begin = time.perf_counter()
    waited, sleeps = asyncio.run(main())
    assert waited == ("error: TimeoutError: no core was free within 0.3 s", False)
    assert not sleeps[1]
    assert time.perf_counter() - begin < 5


def test_where_programs_cannot_be_confined_the_start_is_refused(monkeypatch):
    async def refused(code: str) -> str:
        """Run.

        Args:
            code: It.
        """
        raise RuntimeError("Traceback:\nOSError: [Errno 38] Landlock is not available")

    monkeypatch.setattr(tools, "python", refused)
    monkeypatch.setitem(tools.BUILT_IN, "python", refused)
    words = "agent.tools=python: programs cannot be confined here .*Landlock is not"
    with pytest.raises(ConfigError, match=words):
        Toolbox(AgentConfig(tools="python"))


TOO_DEEP = """
import asyncio, ctypes, struct, sys
sys.path += {path}
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
for _ in range(16):  # as many as can lie over each other
    libc.syscall(446, libc.syscall(444, struct.pack("Q", 1 << 11), 8, 0), 0)
from tests.unit.agent_loop.test_environment import *
from tests.unit.agent_loop.test_tools import *
try:
    {what}
except ConfigError as e:
    print(e)
"""


@pytest.mark.parametrize(
    "what",
    [
        "Toolbox(AgentConfig(tools='python'))",
        "loop = environment_loop('Busy'); asyncio.run(loop.check(make_prompt(loop.tokenizer)))",
    ],
    ids=["tool", "environment"],
)
def test_where_the_kernel_refuses_to_confine_the_cause_is_named(what):
    code = TOO_DEEP.format(path=sys.path, what=what)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    words = r"^agent\.(tools|loop)=.*\[Errno 7\] Landlock is not available"
    assert re.search(words, done.stdout), done.stdout + done.stderr


# Also with as large a buffer as the program can make itself, of a size that is read and left.
FLOODS = """
import socket
s = socket.socket(fileno=1)
s.setsockopt(1, 7, 1 << 22)
s.setblocking(False)
while True:
    try: s.send(b'x' * 1000)
    except OSError: 0
"""


def test_the_output_of_a_program_that_floods_is_cut():
    begin = time.perf_counter()
    answer, succeeded = run_program(FLOODS, timeout_s=20.0)
    assert succeeded
    assert len(answer) < 2100
    assert "characters)" in answer
    assert time.perf_counter() - begin < 15
