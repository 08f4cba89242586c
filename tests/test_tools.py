"""Tools that hang, die, flood or lie: each is an answer to the model, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from agent_loop.tools import Toolbox
from one_step_off.config import AgentConfig, ConfigError


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


BOX = f"calculator, python, {__name__}:hangs, {__name__}:dies"


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
    assert [s["function"]["name"] for s in box.schemas] == ["calculator", "double", "slow"]
    assert box.schemas[1]["function"]["parameters"]["properties"]["number"]["type"] == "integer"

    async def everyone() -> list[tuple[str, bool]]:
        calls = [("double", {"number": k}, 9.0) for k in range(8)]
        calls += [("double", {"number": -1}, 9.0), ("double", {"word": 1}, 9.0), ("slow", {"seconds": 9.0}, 0.5)]
        return await asyncio.gather(*(box.call(*call) for call in calls))

    *good, negative, unfit, late = asyncio.run(everyone())
    assert good == [(str(2 * k), True) for k in range(8)]
    assert not negative[1] and not unfit[1] and late == ("error: slow took longer than 0.5 s", False)


def test_faults_of_mcp_servers_are_told_before_engines_start(mcp_url):
    with pytest.raises(
        ConfigError, match="agent.tools=mcp:http://127.0.0.1:9/mcp: the server lists no tools .*start it"
    ):
        Toolbox(AgentConfig(tools="mcp:http://127.0.0.1:9/mcp"))
    with pytest.raises(ConfigError, match="a tool before it is named double too"):
        Toolbox(AgentConfig(tools=f"mcp:{mcp_url}, mcp:{mcp_url}"))


@pytest.mark.parametrize(
    ("expression", "answer"),
    [("12 * (3 + 4)", "84"), ("-2 ** 2", "-4"), ("7 / 2", "3.5"), ("8 / 2", "4"), ("2 ** 0.5", str(2**0.5))],
)
def test_the_calculator(expression, answer):
    assert ask("calculator", expression=expression) == (answer, True)


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "9 ** 9 ** 9", "2 ** 10000", "(-8) ** 0.5", "1 / 0", "__import__('os')", "a", "'a' * 9", "True + 1"]
    + ["1" * 500, "(" * 150 + "1", "10 ** 99 * 10 ** 99", "[1][0]", "1 if 1 else 2"],
)
def test_what_the_calculator_refuses_in_no_time(expression):
    begin = time.perf_counter()
    answer, good = ask("calculator", expression=expression)
    assert not good and answer.startswith("error: ") and time.perf_counter() - begin < 1


def test_schemas_come_from_types_and_docstrings():
    schema = Toolbox(AgentConfig(tools=BOX)).schemas[2]["function"]
    assert schema["name"] == "hangs" and schema["parameters"]["required"] == ["seconds"]
    assert schema["parameters"]["properties"]["seconds"] == {"type": "number", "description": "How long."}


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


def test_calls_that_do_not_fit():
    assert ask("nothing")[0].startswith("error: no tool 'nothing'; there are calculator, python")
    assert ask("calculator", formula="1")[0].startswith("error: TypeError")


def test_python_says_what_it_printed_and_its_traceback():
    assert ask("python", code="print(6 * 7)") == ("42\n", True)
    assert "ZeroDivisionError" in ask("python", code="1 / 0")[0]
    assert "ended by" in ask("python", code="import os; os._exit(3)")[0]


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.setsid()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))", "rror"),
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))", "File too large"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'])", "Permis"),
        ("import os; print(sorted(os.environ))", "HOME"),
    ],
)
def test_what_python_may_not_do(code, refused, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    answer, _ = ask("python", timeout=20.0, code=code)
    assert refused in answer and "SECRET_KEY" not in answer


def children() -> set[int]:
    return {p.pid for p in psutil.Process(os.getpid()).children(recursive=True)}


def test_python_is_killed_with_its_children():
    code = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""
    before = children()
    answer, good = ask("python", timeout=2.0, code=code)
    assert not good and "longer than 2 s" in answer
    assert children() <= before
    mine = [
        p for p in psutil.process_iter(["cmdline"]) if any("sandbox.py" in word for word in p.info["cmdline"] or [])
    ]
    alive = [p for p in mine if p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, "grandchildren, whose parent is gone, too"


def test_python_that_floods_is_cut():
    begin = time.perf_counter()
    answer, good = ask("python", timeout=20.0, code="while True: print('x' * 1000)")
    assert good and len(answer) < 2100 and "characters)" in answer and time.perf_counter() - begin < 15
