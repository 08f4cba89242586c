"""Tools that a model may call: a typed function with a docstring becomes a JSON schema.

    async def lookup(city: str) -> str:
        \"\"\"The weather of a city.

        Args:
            city: Its name.
        \"\"\"

`agent.tools: calculator, python, my_tools:lookup`. A plain function runs in a thread of its own, a
coroutine on the event loop of the replica, which it must not block. `mcp:http://HOST:PORT/mcp`
stands for all tools of an MCP server.
"""

import ast
import asyncio
import contextlib
import functools
import inspect
import ipaddress
import json
import operator
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from agent_loop.processes import ForkServer, reserve_core, run_to_completion
from agent_loop.sandbox import END
from one_step_off.config.errors import ConfigError, as_config_error, first_cause
from one_step_off.config.registry import import_object
from one_step_off.config.schema import AgentConfig
from one_step_off.config.user_code import find_user_line, format_traceback, log_traceback

Schema = dict[str, Any]
"""A tool's JSON schema."""

# --- the calculator -------------------------------------------------------------------------------

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
MAX_NUMBER = 10**100
MAX_EXPONENT = 1000
MAX_EXPRESSION_CHARS = 400
MAX_PLAIN_INTEGER = 1e15  # beyond, a float is shown as one, for it may not be exact


def _evaluate(node: ast.AST) -> int | float:
    """The value of an arithmetic expression. Raises ValueError: it is something else, or too
    large."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_evaluate(node.operand)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        result = _evaluate(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            _require_simple_power(left, right)
        result = OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, brackets and + - * / // % ** are allowed")
    if abs(result) > MAX_NUMBER:
        raise ValueError("a number is too large")
    return result


def _require_simple_power(base: float, exponent: float) -> None:
    """Raises ValueError: the power would take too long, or is complex."""
    takes_long = abs(exponent) > MAX_EXPONENT
    is_complex = base < 0 and exponent % 1 != 0
    if takes_long or is_complex:
        raise ValueError("this power is not worked out")


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, brackets and the operators + - * / // % **, as 12 * (3 + 4).
    """
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression is longer than {MAX_EXPRESSION_CHARS} characters")
    result = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(result, float) and result.is_integer() and abs(result) < MAX_PLAIN_INTEGER:
        result = int(result)
    return str(result)


# --- programs -------------------------------------------------------------------------------------

MAX_OUTPUT_BYTES = 1 << 16
_PROGRAMS = ForkServer()


async def python(code: str) -> str:
    """Run a Python program and return what it printed.

    Args:
        code: The program. Use print to see a result.
    """
    # What this does not protect from: docs/tutorials/tools.md.
    folder = tempfile.mkdtemp(prefix="tool_")
    try:
        output = await _run_program(code, folder)
    finally:  # in a thread, because there may be many files
        _run_in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))
    finished = output.endswith(END)
    text = output.removesuffix(END).decode(errors="replace")
    if finished or len(output) >= MAX_OUTPUT_BYTES:
        return text
    raise RuntimeError(text or "the program was killed, or ended itself, and printed nothing")


async def _run_program(code: str, folder: str) -> bytes:
    """What a program prints, until it ends or has printed MAX_OUTPUT_BYTES."""
    output = b""
    async with _PROGRAMS.process() as (reader, writer):
        writer.write(json.dumps({"code": code, "folder": folder}).encode() + b"\n")
        while len(output) < MAX_OUTPUT_BYTES:
            more = await reader.read(MAX_OUTPUT_BYTES)
            if not more:
                break
            output += more
    return output


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}

# --- MCP servers ----------------------------------------------------------------------------------

MCP_TIMEOUT_S = 30.0
MCP_READ_TIMEOUT_S = 300.0
"""As the defaults of the MCP client."""
RESTART_POLL_S = 0.2  # between two attempts to reach a server

MCP_SCHEMAS: dict[str, list[Schema]] = {}
"""The schemas of each MCP server's tools, by URL. The driver asks the servers, and its replicas
receive the answers."""


@contextlib.asynccontextmanager
async def _mcp_client(url: str) -> AsyncIterator[Any]:
    """A session of an MCP server. One of this machine is reached without the proxy of the
    environment, which does not know it."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    if not _is_loopback(url):
        async with Client(url) as client:
            yield client
        return
    timeout = httpx2.Timeout(MCP_TIMEOUT_S, read=MCP_READ_TIMEOUT_S)
    certificates = httpx2.create_ssl_context()
    async with (
        httpx2.AsyncClient(timeout=timeout, verify=certificates, trust_env=False) as http_client,
        Client(streamable_http_client(url, http_client=http_client)) as client,
    ):
        yield client


def _is_loopback(url: str) -> bool:
    """Whether a URL names this machine by a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def _list_mcp_tools(url: str) -> list[Schema]:
    async with _mcp_client(url) as client:
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return [
        {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        for tool in tools
    ]


class ToolUnavailable(RuntimeError):
    """The server of a tool does not answer: the model's call is not to blame."""


async def _call_mcp_tool(url: str, name: str, restart_s: float, /, **arguments: Any) -> str:
    """
    Args:
        restart_s: how long a server that cannot be reached may take to come back.

    Raises:
        ToolUnavailable: it has not come back, or was lost during the call.
        Exception: it answered with an error.
    """
    from mcp import MCPError

    deadline = time.monotonic() + restart_s
    while True:
        was_asked = False
        try:
            async with _mcp_client(url) as client:
                was_asked = True
                answer = await client.call_tool(name, arguments)
            break
        except Exception as e:
            cause = first_cause(e)
            if was_asked and isinstance(cause, MCPError):
                raise cause from None
            if was_asked or time.monotonic() > deadline:
                reason = f"{type(cause).__name__}: {cause}"
                raise ToolUnavailable(f"mcp:{url} does not answer ({reason})") from e
        await asyncio.sleep(RESTART_POLL_S)
    text = "\n".join(block.text for block in answer.content if block.type == "text")
    if answer.is_error:
        raise RuntimeError(text)
    return text


def mcp_tools(url: str, seconds: float) -> list[tuple[Schema, Callable[..., Any]]]:
    """Schema and function of each tool of an MCP server (streamable HTTP). Each call has a session
    of its own, so that the server may be restarted.

    Raises:
        ConfigError: the server does not list its tools within `seconds`.
    """
    failed = f"agent.tools=mcp:{url}: the server lists no tools"
    with as_config_error(failed, "start it, or remove it"):
        schemas = MCP_SCHEMAS.get(url)
        if not schemas:
            schemas = run_to_completion(asyncio.wait_for(_list_mcp_tools(url), seconds))
        MCP_SCHEMAS[url] = schemas
    tools = []
    for schema in schemas:
        function = functools.partial(_call_mcp_tool, url, schema["name"], seconds / 2)
        tools.append(({"type": "function", "function": schema}, function))
    return tools


# --- calls ----------------------------------------------------------------------------------------


def _run_in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run a function in a thread of its own. One that hangs keeps its thread, but neither the other
    calls nor the run's end."""
    future: Future[Any] = Future()
    # Cannot be canceled: a call whose time is up runs on, and its answer is dropped.
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except StopIteration as e:  # asyncio would take it for its own
            future.set_exception(RuntimeError(repr(e)))
        except BaseException as e:  # SystemExit too, because it is the tool's
            future.set_exception(e)

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(future)


class Toolbox:
    """The tools of `agent.tools`: their `schemas`, and `call`."""

    def __init__(self, cfg: AgentConfig) -> None:
        """
        Raises:
            ConfigError: there is no such tool, its types and docstring make no schema, or its name
                is taken.
        """
        self.cfg = cfg
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[Schema] = []
        names = [name.strip() for name in cfg.tools.split(",")]
        for spec in filter(None, names):
            self._add(spec)
        if python in self.functions.values():
            _require_confinement()

    def _add(self, spec: str) -> None:
        """Add a tool, or all tools of an MCP server."""
        if spec.startswith("mcp:"):
            tools = mcp_tools(spec.removeprefix("mcp:"), self.cfg.tool_timeout_s)
        else:
            tools = [_function_tool(spec)]
        for schema, function in tools:
            name = schema["function"]["name"]
            if name in self.functions:
                raise ConfigError(
                    f"agent.tools={spec!r}: a tool before it is named {name} too; rename one"
                )
            self.functions[name] = function
            self.schemas.append(schema)

    async def call(self, name: str, arguments: Any, seconds: float) -> tuple[str, bool]:
        """Call a tool. The model reads what went wrong.

        Args:
            arguments: by name.
            seconds: that are left for the call, its wait for a core included.

        Returns:
            The answer, cut to `agent.tool_output_chars`, and whether the call succeeded.

        Raises:
            ToolUnavailable: the tool's server is lost.
        """
        if name not in self.functions:
            return f"error: no tool {name!r}; there are {', '.join(self.functions)}", False
        answer, succeeded = await self._answer(name, arguments, seconds)
        longest = self.cfg.tool_output_chars
        if len(answer) > longest:
            answer = f"{answer[:longest]} ... ({len(answer)} characters)"
        return answer, succeeded

    async def _answer(self, name: str, arguments: Any, seconds: float) -> tuple[str, bool]:
        function = self.functions[name]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        limit = asyncio.timeout(None)  # its clock begins when the call has a core
        # Programs take whole cores; the wait for one is not their time.
        core = reserve_core(seconds) if function is python else contextlib.nullcontext()
        try:
            inspect.signature(function).bind(**arguments)
            async with core, limit:
                seconds = min(deadline - loop.time(), self.cfg.tool_timeout_s)
                limit.reschedule(loop.time() + seconds)
                return str(await _run(function, arguments)), True
        except ToolUnavailable:
            raise
        except BaseException as e:  # SystemExit and the tool's own cancellation too
            if isinstance(e, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise
            _log_failure(name, arguments, e)
            if isinstance(e, TimeoutError) and limit.expired():
                return f"error: {name} took longer than {round(seconds, 2):g} s", False
            return f"error: {traceback.format_exception_only(e)[-1].strip()}", False


def _function_tool(spec: str) -> tuple[Schema, Callable[..., Any]]:
    """Schema and function of a built-in tool or of `module:function`."""
    # The import takes a second, which runs without tools need not wait for.
    from transformers.utils import get_json_schema

    function = BUILT_IN.get(spec) or import_object("agent.tools", spec)
    fix = "give every argument a type and a line under Args: in the docstring"
    with as_config_error(f"agent.tools={spec!r}: no JSON schema can be built from it", fix):
        return get_json_schema(function), function


def _require_confinement() -> None:
    """Raises ConfigError: this machine cannot confine programs."""
    try:
        run_to_completion(python("print()"))
    except Exception as e:
        reason = str(e).strip().splitlines()[-1]
        raise ConfigError(
            f"agent.tools=python: programs cannot be confined here ({reason}); it needs Linux 5.13 "
            "with Landlock and seccomp, on x86-64; remove it"
        ) from e


async def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a tool returns: a coroutine's on this event loop, a plain function's from a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await _run_in_thread(lambda: str(function(**arguments)))


def _log_failure(name: str, arguments: Any, error: BaseException) -> None:
    """Log the traceback of a user's own tool: for its author an exception may be a fault."""
    text = format_traceback(error)
    if find_user_line(text):
        log_traceback(f"tool {name}, called with {arguments!r:.200}", text)
