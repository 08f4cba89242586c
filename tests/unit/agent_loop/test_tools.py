"""Tools that hang, die, flood or lie: each is an answer to the model, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop import processes, tools
from agent_loop.base import Limits, Loops, Trajectory
from agent_loop.processes import ForkServer
from agent_loop.tools import Toolbox
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import AgentConfig
from one_step_off.models import tiny_qwen
from tests.unit.agent_loop.test_agent_loop import Script, config, prompt


def hangs(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def dies(how: str) -> str:
    """End.

    Args:
        how: In which way.
    """
    raise {"exit": SystemExit, "stop": StopIteration, "value": ValueError}[how]("of old age")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to be said")


async def sleeps() -> None:
    """Sleep long."""
    await asyncio.sleep(60)


async def dies_awaited(how: str) -> str:
    """End.

    Args:
        how: In which way.
    """
    await asyncio.sleep(0)
    kinds = {
        "exit": SystemExit,
        "cancel": asyncio.CancelledError,
        "time": TimeoutError,
        "mute": Unspeakable,
    }
    raise kinds[how]("of old age")


BOX = f"calculator, python, {__name__}:hangs, {__name__}:dies, {__name__}:dies_awaited"


def ask(name: str, timeout: float = 5.0, **arguments: object) -> tuple[str, bool]:
    box = Toolbox(AgentConfig(tools=BOX, tool_timeout_s=timeout))
    return asyncio.run(box.call(name, arguments, 600.0))


SERVER = """
import sys
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def double(number: int) -> str:
    "Twice a number."
    if number < 0:
        raise ValueError("negative")
    return str(2 * number)

@server.tool()
async def slow(seconds: float) -> str:
    "Waits."
    import asyncio
    await asyncio.sleep(seconds)
    return "awake"

server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def mcp_url():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stderr=subprocess.DEVNULL)
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_tools_of_an_mcp_server(mcp_url):
    box = Toolbox(AgentConfig(tools=f"calculator, mcp:{mcp_url}", tool_timeout_s=5.0))
    assert [schema["name"] for schema in tools.MCP_SCHEMAS[mcp_url]] == ["double", "slow"]
    assert [s["function"]["name"] for s in box.schemas] == ["calculator", "double", "slow"]
    assert box.schemas[1]["function"]["parameters"]["properties"]["number"]["type"] == "integer"

    async def everyone() -> list[tuple[str, bool]]:
        calls = [("double", {"number": k}, 9.0) for k in range(8)]
        calls += [
            ("double", {"number": -1}, 9.0),
            ("double", {"word": 1}, 9.0),
            ("slow", {"seconds": 9.0}, 0.5),
        ]
        return await asyncio.gather(*(box.call(*call) for call in calls))

    *good, negative, unfit, late = asyncio.run(everyone())
    assert good == [(str(2 * k), True) for k in range(8)]
    assert (
        not negative[1] and not unfit[1] and late == ("error: slow took longer than 0.5 s", False)
    )


def test_faults_of_mcp_servers_are_told_before_engines_start(mcp_url):
    with pytest.raises(
        ConfigError,
        match="agent.tools=mcp:http://127.0.0.1:9/mcp: the server lists no tools.*start it",
    ):
        Toolbox(AgentConfig(tools="mcp:http://127.0.0.1:9/mcp"))
    with pytest.raises(ConfigError, match="a tool before it is named double too"):
        Toolbox(AgentConfig(tools=f"mcp:{mcp_url}, mcp:{mcp_url}"))


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("12 * (3 + 4)", "84"),
        ("-2 ** 2", "-4"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("2 ** 0.5", str(2**0.5)),
    ],
)
def test_the_calculator(expression, answer):
    assert ask("calculator", expression=expression) == (answer, True)


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "9 ** 9 ** 9",
        "2 ** 10000",
        "(-8) ** 0.5",
        "1 / 0",
        "__import__('os')",
        "a",
        "'a' * 9",
        "True + 1",
    ]
    + ["1" * 500, "(" * 150 + "1", "10 ** 99 * 10 ** 99", "[1][0]", "1 if 1 else 2"],
)
def test_what_the_calculator_refuses_in_no_time(expression):
    begin = time.perf_counter()
    answer, good = ask("calculator", expression=expression)
    assert not good and answer.startswith("error: ") and time.perf_counter() - begin < 1


def test_schemas_come_from_types_and_docstrings():
    schema = Toolbox(AgentConfig(tools=BOX)).schemas[2]["function"]
    assert schema["name"] == "hangs" and schema["parameters"]["required"] == ["seconds"]
    assert schema["parameters"]["properties"]["seconds"] == {
        "type": "number",
        "description": "How long.",
    }


def test_the_tool_of_the_page_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs/tutorials/your_own_agent.md").read_text()
    (tmp_path / "my_tools.py").write_text(
        page.partition("```python\n# my_tools.py\n")[2].partition("```")[0]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    box = Toolbox(AgentConfig(tools="my_tools:shout"))
    assert asyncio.run(box.call("shout", {"text": "a", "times": 2}, 5.0)) == ("AA", True)
    assert box.schemas[0]["function"]["parameters"]["required"] == ["text"]


def test_a_tool_that_hangs_delays_nobody_else():
    async def main():
        box = Toolbox(AgentConfig(tools=BOX, tool_timeout_s=0.3))
        begin = time.perf_counter()
        hung = [box.call("hangs", {"seconds": 3.0}, 600.0) for _ in range(40)]
        answers = await asyncio.gather(*hung, box.call("hangs", {"seconds": 0.0}, 600.0))
        return answers, time.perf_counter() - begin

    answers, took = asyncio.run(main())
    assert answers[:-1] == [("error: hangs took longer than 0.3 s", False)] * 40
    assert answers[-1] == ("awake", True) and took < 2.5


@pytest.mark.parametrize("how", ["exit", "stop", "value"])
def test_a_tool_that_dies(how):
    answer, good = ask("dies", how=how)
    assert not good and "of old age" in answer


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "SystemExit: of old"),
        ("cancel", "CancelledError: of old"),
        ("time", "error: TimeoutError: of old age"),
    ]
    + [("mute", "error: tests.unit.agent_loop.test_tools.Unspeakable: <")],
)
def test_a_coroutine_that_dies_takes_neither_its_trajectory_nor_the_event_loop_along(how, words):
    answer, good = ask("dies_awaited", how=how)
    assert not good and words in answer


def test_a_cancelled_trajectory_cancels_its_coroutine_tool():
    async def main():
        box = Toolbox(AgentConfig(tools=f"{__name__}:sleeps"))
        call = asyncio.create_task(box.call("sleeps", {}, 600.0))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())


def test_calls_that_do_not_fit():
    assert ask("nothing")[0].startswith("error: no tool 'nothing'; there are calculator, python")
    assert ask("calculator", formula="1")[0].startswith("error: TypeError")


def test_python_says_what_it_printed_and_its_traceback():
    assert ask("python", code="print(6 * 7)") == ("42\n", True)
    assert "ZeroDivisionError" in ask("python", code="1 / 0")[0]
    assert ask("python", code="1 / 0")[1] is False, "it counts as a tool's error"
    assert "ended itself" in ask("python", code="import os; os._exit(3)")[0]
    assert ask(
        "python", code="import threading as t; t.Thread(target=print, args=[5]).start()"
    ) == ("5\n", True)
    assert ask("python", code="import os; print(os.listdir(), open('a', 'w').write('x'))") == (
        "[] 1\n",
        True,
    )


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
          for number, arguments in [(310, f"{ME}, 0, 0, 0, 0, 0"), (438, "3, 0, 0"), (29, "0, 4096, 0o1600"),
                                    (272, "0x10000000"), (240, "b'/q', 0o102, 0o600, 0"), (434, f"{ME}, 0")]),
        *((f"import fcntl; fcntl.{call}", "PermissionError")
          for call in (f"fcntl(1, 8, {ME})", "fcntl(1, 10, 9)", "fcntl(1, 15, bytes(8))", f"ioctl(1, 0x8901, b'{ME:04}')")),
        ("import fcntl; print(fcntl.fcntl(1, fcntl.F_GETFL))", "2"),
        ("import os; os.memfd_create('a')", "PermissionError"),
        ("import ctypes; b = (ctypes.c_long * 2)(); ctypes.CDLL(None).syscall(97, 0, b); print(*b)", "10 10"),
        ("open('/etc/passwd')", "PermissionError"),
        (f"import os; os.listdir({str(Path(__file__).parent)!r})", "PermissionError"),
        ("open('/tmp/one_step_off_escaped', 'w')", "PermissionError"),
        ("import os; os.chown('.', 5, 5)", "PermissionError"),
    ],
)  # fmt: skip
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_what_python_may_not_do(code, refused):
    answer, _ = ask("python", timeout=20.0, code=code)
    assert refused in answer


BY_NUMBER = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for call in {0}:
    if libc.syscall(*call) != -1 or ctypes.get_errno() != errno.EPERM:
        print(call, "is not refused but", errno.errorcode.get(ctypes.get_errno()))
"""
METADATA = [
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
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize(
    "calls",
    [
        [
            (number, -1, 0, 0, 0) for number in METADATA
        ],  # chmod, chown, utime, setxattr and their like
        [(16, -1, command, 0) for command in (0x40086602, 0x401C5820)],  # what chattr asks
        [(76, b"/nowhere", 0)],  # truncate
        [
            (2, b"/nowhere", 0o1000),
            (2, b"/nowhere", 0o1003),
            (257, -100, b"/nowhere", 0o1000, 0),
        ],  # by opening
        [(53, 1, kind, 0, 0) for kind in (2, 5, 0x80002)],  # socketpair, but of streams
        [(42, 1, 0, 0), (49, 1, 0, 0)],  # connect, bind
        [(157, 1, 0, 0, 0, 0)],  # to outlive the parent
    ],
)
def test_calls_that_python_may_not_make(calls):
    assert ask("python", timeout=20.0, code=BY_NUMBER.format(calls)) == ("", True)


def test_usual_work_on_files_goes_on():
    code = """
import asyncio, os, shutil, sqlite3, tempfile
with open("a", "w") as f:
    f.write("abc")
    f.truncate(2)
with open("a", "a") as f, tempfile.TemporaryFile() as g, tempfile.NamedTemporaryFile("w") as h:
    print(f.write("c"), g.write(b"d"), h.write("e"))
with tempfile.TemporaryDirectory() as folder:
    print(os.path.basename(shutil.copy("a", folder)), os.path.basename(shutil.copy2("a", folder + "/b")))
    shutil.copytree(folder, "tree")
shutil.move("a", "tree/c")
print(sorted(os.listdir("tree")), open("tree/c").read())
shutil.rmtree("tree")
base = sqlite3.connect("base")
base.execute("create table t (x)")
base.commit()
print(sorted(os.listdir()), asyncio.run(asyncio.sleep(0, "awake")))
"""
    assert ask("python", code=code) == ("1 1 1\na b\n['a', 'b', 'c'] abc\n['base'] awake\n", True)


OWNER = """
import asyncio
from agent_loop.tools import python
asyncio.run(python("import time; time.sleep(60)"))
"""


@pytest.mark.parametrize("who", ["owner", "parent"])
def test_programs_end_with_whoever_is_killed_above_them(who, tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    try:
        deadline = time.monotonic() + 60
        while (
            len(below := psutil.Process(owner.pid).children(recursive=True)) < 2
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        time.sleep(0.5)  # until it sleeps
        assert len(below) == 2
        (owner if who == "owner" else below[0]).send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(below, timeout=5)
        assert not alive
    finally:
        owner.kill()
        owner.wait()


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_a_program_that_hangs_is_killed_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()\nopen('a', 'w')\nprint(1)\ntime.sleep(60)"
    assert ask("python", code="pass")[1]
    before, fds = children(), open_files()
    for _ in range(3):
        answer, good = ask("python", timeout=0.5, code=code)
        assert not good and "longer than 0.5 s" in answer
    deadline = time.monotonic() + 10
    while (list(tmp_path.iterdir()) or not children() <= before) and time.monotonic() < deadline:
        time.sleep(0.05)
    # One or two may be of another thread's doing; three programs that each left one behind are more.
    assert not list(tmp_path.iterdir()) and children() <= before and open_files() < fds + 3


def test_no_more_programs_at_once_than_cores_and_waiting_is_not_counted(monkeypatch):
    """Programs of half a second, from two toolboxes, so many that the last waits longer than a call may take."""
    cores = min(2, len(os.sched_getaffinity(0)))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))

    async def main():
        boxes = [Toolbox(AgentConfig(tools="python", tool_timeout_s=2.0)) for _ in range(2)]
        code = "import time; print(time.time()); time.sleep(0.5); print(time.time())"
        return await asyncio.gather(
            *(boxes[i % 2].call("python", {"code": code}, 600.0) for i in range(6 * cores))
        )

    answers = asyncio.run(main())
    assert all(good for _, good in answers)
    times = [tuple(map(float, text.split())) for text, _ in answers]
    assert max(sum(begin <= t < end for begin, end in times) for t, _ in times) == cores


def test_the_wait_for_a_core_is_within_the_time_of_the_conversation(monkeypatch):
    async def main(seconds: float, longest: float = 60.0) -> tuple[list[tuple[str, bool]], float]:
        monkeypatch.setattr(processes, "LONGEST_QUEUE_S", longest)
        box, begin = Toolbox(AgentConfig(tools="python", tool_timeout_s=1.0)), time.perf_counter()
        async with contextlib.AsyncExitStack() as stack:
            for _ in os.sched_getaffinity(0):
                await stack.enter_async_context(processes.reserve_core())
            waits = await asyncio.wait_for(box.call("python", {"code": "print(1)"}, seconds), 10)
        sleeps = await box.call("python", {"code": "import time; time.sleep(60)"}, 0.5)
        return [waits, sleeps], time.perf_counter() - begin

    for seconds, longest in ((0.3, 60.0), (float("inf"), 0.3)):
        (waits, sleeps), took = asyncio.run(main(seconds, longest))
        assert waits == ("error: TimeoutError: no core was free within 0.3 s", False)
        assert not sleeps[1] and took < 5


def test_where_programs_cannot_be_confined_it_is_told_at_the_start(monkeypatch):
    async def refused(code: str) -> str:
        raise RuntimeError("Traceback:\nOSError: [Errno 38] Landlock is not available")

    monkeypatch.setattr(tools, "python", refused)
    monkeypatch.setitem(tools.BUILT_IN, "python", refused)
    refused.__doc__ = "Run.\n\nArgs:\n    code: It."
    with pytest.raises(
        ConfigError, match="agent.tools=python: programs cannot be confined here .*Landlock is not"
    ):
        Toolbox(AgentConfig(tools="python"))


TOO_DEEP = """
import asyncio, ctypes, struct, sys
sys.path += {path}
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
for _ in range(16):  # as many as can lie over each other
    libc.syscall(446, libc.syscall(444, struct.pack("Q", 1 << 11), 8, 0), 0)
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
        "t = tiny_qwen.build_tokenizer(); asyncio.run(environment('Busy').check(prompt(t)))",
    ],
)
def test_where_the_kernel_refuses_to_confine_the_cause_is_told(what):
    code = TOO_DEEP.format(path=sys.path, what=what)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(
        r"^agent\.(tools|loop)=.*\[Errno 7\] Landlock is not available", said.stdout
    ), said.stdout + said.stderr


def test_a_first_process_that_never_begins_is_waited_for_no_longer_than_this(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "LONGEST_START_S", 0.5)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "never_begins.py").write_text("import time; time.sleep(60)")

    async def main() -> None:
        async with ForkServer("never_begins:Class", False).process():
            pass

    with pytest.raises(RuntimeError, match="never_begins:Class: no process began within 0.5 s"):
        asyncio.run(main())


def test_programs_go_on_after_their_parent_died_and_it_ends_with_its_object():
    async def one(processes: ForkServer) -> None:
        async with processes.process():
            pass

    processes = ForkServer()
    asyncio.run(one(processes))
    first = processes.server
    first.kill()
    first.wait()
    asyncio.run(one(processes))
    second = processes.server
    assert second is not first and second.poll() is None
    del processes
    gc.collect()
    assert second.returncode is not None


def children() -> set[int]:
    return {p.pid for p in psutil.Process(os.getpid()).children(recursive=True)}


def test_python_that_floods_is_cut():
    begin = time.perf_counter()
    # Also with as large a buffer as the program can make itself, of a size that is read and left.
    code = "import socket; s = socket.socket(fileno=1); s.setsockopt(1, 7, 1 << 22); s.setblocking(False)\n"
    answer, good = ask(
        "python",
        timeout=20.0,
        code=code + "while True:\n  try: s.send(b'x' * 1000)\n  except OSError: 0",
    )
    assert (
        good and len(answer) < 2100 and "characters)" in answer and time.perf_counter() - begin < 15
    )


LONG = Limits(4000, 8)


def environment(name: str, **changes: object) -> Any:
    """The loop with one of tests/environments.py."""
    kwargs = {"environment": {"env": f"tests.environments:{name}"}}
    cfg = config(loop="environment", loop_kwargs=kwargs, **changes)
    return Loops(cfg, tiny_qwen.build_tokenizer()).get()


def episode(name: str, *turns: str, limits: Limits = LONG, **changes: object) -> Trajectory:
    loop = environment(name, **changes)
    script = Script(loop.tokenizer, *(f" {turn}" for turn in turns))
    return asyncio.run(loop.run(prompt(loop.tokenizer, truth="good"), script, None, limits))


WRITES = """
import os
for fd in range(3, 9):
    try:
        os.write(fd, {0} + b"\\n")
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "line",
    [
        b"nope",
        b'{"error": "x"}',
        b'["x", NaN, false]',
        b'["x", 1e999, false]',
        b'["x", 1e31, false]',
        b'["x", "1", 2]',
        b'["x", 1.0]',
    ]
    + [b"[null, 1.0, true]", b'["x", "1", true]', b"\xff", "b'[' * 99999", "b'x' * 1100000"],
)
def test_what_a_guess_writes_for_its_environment_is_a_lost_step(line):
    talk = episode("Runs", "pass", WRITES.format(line), "pass")
    assert talk.reward == 0.5 and talk.facts == {"steps": 2, "lost_steps": 1}


@pytest.mark.parametrize("how", ["none", "bytes", "set", "pair", "nothing", "long", "word"])
def test_an_environment_that_answers_wrongly_ends_the_run_by_name(how):
    with pytest.raises(
        RuntimeError,
        match="environments:Moody.step: (TypeError: float|ValueError: .*(MiB|float)|it returned .*, not)",
    ):
        episode("Moody", "x", how)


def test_an_environment_that_cannot_be_made_says_why():
    loop = environment("Unmade")
    with pytest.raises(ConfigError, match="Unmade does not begin .*OSError: its book is missing"):
        asyncio.run(loop.check(prompt(loop.tokenizer)))


def test_the_clock_of_an_episode_begins_with_its_first_turn():
    assert episode("Busy", "x", limits=Limits(400, 8, seconds=0.05)).turns == 1


def test_an_episode_waits_for_a_core_no_longer_than_its_time():
    loop = environment("Busy", tool_timeout_s=1.0)

    async def main() -> Trajectory:
        script, stack = Script(loop.tokenizer, " x"), contextlib.AsyncExitStack()

        async def generate(*asked: object) -> object:
            for _ in os.sched_getaffinity(0):
                await stack.enter_async_context(processes.reserve_core())
            return await script(*asked)

        async with stack:
            ask = prompt(loop.tokenizer)
            return await asyncio.wait_for(
                loop.run(ask, generate, None, Limits(400, 8, seconds=0.5)), 20
            )

    assert asyncio.run(main()).facts == {"steps": 1, "lost_steps": 1}
