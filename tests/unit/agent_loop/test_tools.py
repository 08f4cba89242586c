"""Tools that hang, die or lie: each failure is an answer to the model, and delays no other call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from agent_loop import tools
from agent_loop.host.messages import no_proxy_variables
from agent_loop.tools import Toolbox, ToolUnavailable
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import AgentConfig

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "tools.md"

# --- tools of this module -------------------------------------------------------------------------


def hangs(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def dies(way: str) -> str:
    """End.

    Args:
        way: In which way.
    """
    errors = {"exit": SystemExit, "stop": StopIteration, "value": ValueError}
    raise errors[way]("of old age")


class MuteError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


async def sleeps() -> None:
    """Sleep long."""
    await asyncio.sleep(60)


async def dies_awaited(way: str) -> str:
    """End.

    Args:
        way: In which way.
    """
    await asyncio.sleep(0)
    errors = {
        "exit": SystemExit,
        "cancel": asyncio.CancelledError,
        "time": TimeoutError,
        "mute": MuteError,
    }
    raise errors[way]("of old age")


TOOLS = f"calculator, python, {__name__}:hangs, {__name__}:dies, {__name__}:dies_awaited"


def call_tool(name: str, **arguments: object) -> tuple[str, bool]:
    """The answer, and whether the call succeeded."""
    toolbox = Toolbox(AgentConfig(tools=TOOLS, tool_timeout_s=5.0))
    return asyncio.run(toolbox.call(name, arguments, 600.0))


# --- schemas and calls ----------------------------------------------------------------------------


def test_schemas_come_from_types_and_docstrings():
    schema = Toolbox(AgentConfig(tools=TOOLS)).schemas[2]["function"]
    assert schema["name"] == "hangs"
    parameters = schema["parameters"]
    assert parameters["required"] == ["seconds"]
    assert parameters["properties"]["seconds"] == {
        "type": "number",
        "description": "How long.",
    }


def test_the_tool_of_the_page_works(tmp_path, monkeypatch):
    page = PAGE.read_text()
    code = page.partition("```python\n# my_tools.py\n")[2].partition("```")[0]
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    toolbox = Toolbox(AgentConfig(tools="my_tools:shout"))
    answer = asyncio.run(toolbox.call("shout", {"text": "a", "times": 2}, 5.0))
    assert answer == ("AA", True)
    assert toolbox.schemas[0]["function"]["parameters"]["required"] == ["text"]


def test_calls_that_do_not_fit_are_answered():
    answer, _ = call_tool("nothing")
    assert answer.startswith("error: no tool 'nothing'; there are calculator, python")
    answer, _ = call_tool("calculator", formula="1")
    assert answer.startswith("error: TypeError")


def test_a_tool_that_hangs_delays_no_other_call():
    async def main():
        toolbox = Toolbox(AgentConfig(tools=TOOLS, tool_timeout_s=0.3))
        begin = time.perf_counter()
        hanging = [toolbox.call("hangs", {"seconds": 3.0}, 600.0) for _ in range(40)]
        quick = toolbox.call("hangs", {"seconds": 0.0}, 600.0)
        answers = await asyncio.gather(*hanging, quick)
        return answers, time.perf_counter() - begin

    answers, seconds = asyncio.run(main())
    *late, quick = answers
    assert late == [("error: hangs took longer than 0.3 s", False)] * 40
    assert quick == ("awake", True)
    assert seconds < 2.5


@pytest.mark.parametrize("way", ["exit", "stop", "value"])
def test_the_exception_of_a_tool_is_its_answer(way):
    answer, succeeded = call_tool("dies", way=way)
    assert not succeeded
    assert "of old age" in answer


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("exit", "SystemExit: of old"),
        ("cancel", "CancelledError: of old"),
        ("time", "error: TimeoutError: of old age"),
        ("mute", "error: tests.unit.agent_loop.test_tools.MuteError: <"),
    ],
)
def test_a_coroutine_that_dies_ends_neither_its_trajectory_nor_the_event_loop(way, words):
    answer, succeeded = call_tool("dies_awaited", way=way)
    assert not succeeded
    assert words in answer


def test_a_cancelled_trajectory_cancels_its_coroutine_tool():
    async def main():
        toolbox = Toolbox(AgentConfig(tools=f"{__name__}:sleeps"))
        call = asyncio.create_task(toolbox.call("sleeps", {}, 600.0))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())


# --- the calculator -------------------------------------------------------------------------------


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
    assert call_tool("calculator", expression=expression) == (answer, True)


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
        "1" * 500,
        "(" * 150 + "1",
        "10 ** 99 * 10 ** 99",
        "[1][0]",
        "1 if 1 else 2",
    ],
)
def test_the_calculator_refuses_quickly(expression):
    begin = time.perf_counter()
    answer, succeeded = call_tool("calculator", expression=expression)
    assert not succeeded
    assert answer.startswith("error: ")
    assert time.perf_counter() - begin < 5


# --- MCP servers ----------------------------------------------------------------------------------

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


@contextlib.contextmanager
def mcp_server(port: int = 0):
    """(URL, process) of a server."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def mcp_url():
    with mcp_server() as (url, _):
        yield url


def wait_for_port(port: int) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"no server at port {port}")


def test_tools_of_an_mcp_server(mcp_url):
    toolbox = Toolbox(AgentConfig(tools=f"calculator, mcp:{mcp_url}", tool_timeout_s=5.0))
    assert [schema["name"] for schema in tools.MCP_SCHEMAS[mcp_url]] == ["double", "slow"]
    functions = [schema["function"] for schema in toolbox.schemas]
    assert [function["name"] for function in functions] == ["calculator", "double", "slow"]
    assert functions[1]["parameters"]["properties"]["number"]["type"] == "integer"

    async def main() -> list[tuple[str, bool]]:
        calls = [toolbox.call("double", {"number": k}, 9.0) for k in range(8)]
        calls.append(toolbox.call("double", {"number": -1}, 9.0))
        calls.append(toolbox.call("double", {"word": 1}, 9.0))
        calls.append(toolbox.call("slow", {"seconds": 9.0}, 0.5))
        return await asyncio.gather(*calls)

    *good, negative, unfit, late = asyncio.run(main())
    assert good == [(str(2 * k), True) for k in range(8)]
    assert not negative[1]
    assert not unfit[1]
    assert not late[1]
    assert re.fullmatch(r"error: slow took longer than 0\.\d+ s", late[0])


@pytest.fixture
def proxy(monkeypatch):
    """A proxy that the environment names, and the first lines of what it was asked."""
    asked: list[str] = []

    class Refuse(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(self.rfile.readline().decode().strip())
            self.wfile.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_address[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield asked
        server.shutdown()


def test_a_proxy_is_asked_for_servers_of_other_machines_alone(mcp_url, proxy, monkeypatch):
    for host in ("127.0.0.1", "localhost"):
        url = mcp_url.replace("127.0.0.1", host)
        toolbox = Toolbox(AgentConfig(tools=f"mcp:{url}", tool_timeout_s=5.0))
        assert asyncio.run(toolbox.call("double", {"number": 4}, 9.0)) == ("8", True)
    assert not proxy
    with pytest.raises(ConfigError, match="lists no tools"):
        Toolbox(AgentConfig(tools="mcp:http://tools.invalid/mcp", tool_timeout_s=5.0))
    assert proxy[0].startswith("POST http://tools.invalid/mcp")
    # Other clients read the variables that a run sets for its processes and its agents.
    monkeypatch.setenv("NO_PROXY", "corp.example, 10.0.0.1")
    for name, value in no_proxy_variables("10.0.0.7").items():
        monkeypatch.setenv(name, value)
    hosts = ["127.0.0.1", "localhost", "::1", "10.0.0.7", "corp.example", "a.corp.example"]
    assert all(urllib.request.proxy_bypass(host) for host in hosts)
    assert not urllib.request.proxy_bypass("pypi.example")
    assert no_proxy_variables("10.0.0.7")["NO_PROXY"] == os.environ["no_proxy"], "once each"
    monkeypatch.setenv("NO_PROXY", "upper.example")
    monkeypatch.setenv("no_proxy", "lower.example")
    for names in no_proxy_variables().values():
        assert {"upper.example", "lower.example", "127.0.0.1"} <= set(names.split(","))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("no_proxy", "*")
    assert no_proxy_variables() == {"NO_PROXY": "*", "no_proxy": "*"}


def test_faults_of_mcp_servers_are_refused_before_engines_start(mcp_url):
    words = "agent.tools=mcp:http://127.0.0.1:9/mcp: the server lists no tools.*start it"
    with pytest.raises(ConfigError, match=words):
        Toolbox(AgentConfig(tools="mcp:http://127.0.0.1:9/mcp"))
    with pytest.raises(ConfigError, match="a tool before it is named double too"):
        Toolbox(AgentConfig(tools=f"mcp:{mcp_url}, mcp:{mcp_url}"))


def test_a_server_that_is_lost_is_no_answer_for_the_model():
    """The policy must not learn from a world in which all calls fail."""
    with mcp_server() as (url, process):
        toolbox = Toolbox(AgentConfig(tools=f"mcp:{url}", tool_timeout_s=6.0))

        async def lose_it() -> None:
            call = asyncio.create_task(toolbox.call("slow", {"seconds": 30.0}, 9.0))
            await asyncio.sleep(2.0)
            process.kill()
            with pytest.raises(ToolUnavailable, match="does not answer"):
                await call

        asyncio.run(lose_it())
    begin = time.monotonic()
    with pytest.raises(ToolUnavailable, match=r"mcp:http://.* does not answer \(ConnectError"):
        asyncio.run(toolbox.call("double", {"number": 2}, 9.0))
    assert 2.5 < time.monotonic() - begin < 6.0


def test_a_server_that_is_restarted_is_waited_for():
    with mcp_server() as (url, _):
        toolbox = Toolbox(AgentConfig(tools=f"mcp:{url}", tool_timeout_s=60.0))
    port = int(url.split(":")[2].split("/")[0])

    async def main() -> tuple[str, bool]:
        call = asyncio.create_task(toolbox.call("double", {"number": 2}, 60.0))
        await asyncio.sleep(1.0)
        assert not call.done()
        with mcp_server(port):
            return await call

    assert asyncio.run(main()) == ("4", True)
