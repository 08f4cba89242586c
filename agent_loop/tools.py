"""Tools that a model may call: a typed function with a docstring in, a JSON schema and an answer in words out.

    async def lookup(city: str) -> str:
        \"\"\"The weather of a city.

        Args:
            city: Its name.
        \"\"\"

`agent.tools: calculator, python, my_tools:lookup`. A plain function runs in a thread of its own, a coroutine on the
event loop of the replica, which it must not block. `mcp:http://HOST:PORT/mcp` stands for all tools of an MCP server.
"""

import ast
import asyncio
import contextlib
import functools
import inspect
import json
import operator
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from agent_loop.processes import Processes, completed, core
from agent_loop.sandbox import END
from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.registry import import_object
from one_step_off.config.schema import AgentConfig
from one_step_off.config.user_code import find_user_line, format_traceback, log_traceback

# By the names that ast has for them.
_BINARY = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Pow": operator.pow}
_BINARY |= {"Div": operator.truediv, "FloorDiv": operator.floordiv, "Mod": operator.mod}
_LARGEST = 10**100


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        result = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op).__name__ in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 1000 or (left < 0 and right % 1)):
            raise ValueError("this power is not worked out")  # too long, or complex
        result = _BINARY[type(node.op).__name__](left, right)
    else:
        raise ValueError("only numbers, brackets and + - * / // % ** are allowed")
    if abs(result) > _LARGEST:
        raise ValueError("a number is too large")
    return result


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, brackets and the operators + - * / // % **, as 12 * (3 + 4).
    """
    if len(expression) > 400:
        raise ValueError("the expression is longer than 400 characters")
    result = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(
        int(result)
        if isinstance(result, float) and result.is_integer() and abs(result) < 1e15
        else result
    )


_PROGRAMS = Processes()


async def python(code: str) -> str:
    """Run a Python program and return what it printed.

    Args:
        code: The program. Use print to see a result.
    """
    # What this does not protect from stands in docs/tutorials/your_own_agent.md, section Tools.
    folder, said, flood = tempfile.mkdtemp(prefix="tool_"), b"", 1 << 16
    try:
        async with _PROGRAMS.one() as (reader, writer):
            writer.write(json.dumps({"code": code, "folder": folder}).encode() + b"\n")
            while len(said) < flood and (more := await reader.read(flood)):
                said += more
    finally:  # in a thread, because there may be many files
        _in_thread(lambda: shutil.rmtree(folder, ignore_errors=True))
    text, good = (
        said.removesuffix(END).decode(errors="replace"),
        said.endswith(END) or len(said) >= flood,
    )
    if not good:
        raise RuntimeError(text or "the program was killed, or ended itself, and said nothing")
    return text


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}


LISTED: dict[str, list[dict[str, Any]]] = {}
"""JSON schemas of each MCP server's tools. The driver asks for them; replicas are told what it found."""


async def _list(url: str) -> list[dict[str, Any]]:
    from mcp import Client

    async with Client(url) as client:
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return [
        {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
        for t in tools
    ]


async def _call(url: str, name: str, /, **arguments: Any) -> str:
    from mcp import Client

    async with Client(url) as client:
        answer = await client.call_tool(name, arguments)
    text = "\n".join(block.text for block in answer.content if block.type == "text")
    if answer.is_error:
        raise RuntimeError(text)
    return text


def served(url: str, seconds: float) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """JSON schema and function of each tool of an MCP server (streamable HTTP); a call has a session of its own.

    Raises:
        ConfigError: the server does not list its tools within `seconds`.
    """
    with as_config_error(
        f"agent.tools=mcp:{url}: the server lists no tools", "start it, or remove it"
    ):
        found = LISTED[url] = LISTED.get(url) or completed(asyncio.wait_for(_list(url), seconds))
    return [
        ({"type": "function", "function": own}, functools.partial(_call, url, own["name"]))
        for own in found
    ]


def _in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run in a thread of its own: a function that hangs keeps that one, and neither the others nor the run's end."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # whose time is up goes on, and its answer is dropped

    def work() -> None:
        try:
            future.set_result(function())
        except (
            BaseException
        ) as e:  # SystemExit too: it is the tool's, not ours; and asyncio takes one for its own
            future.set_exception(RuntimeError(repr(e)) if isinstance(e, StopIteration) else e)

    threading.Thread(target=work, daemon=True).start()
    return asyncio.wrap_future(future)


class Toolbox:
    """The tools of `agent.tools`: their `schemas`, and `call`."""

    def __init__(self, cfg: AgentConfig) -> None:
        """Raises ConfigError: no such tool, or one whose types and docstring make no schema."""
        from transformers.utils import (
            get_json_schema,
        )  # takes a second, which runs without tools need not wait for

        self.cfg, self.functions, self.schemas = cfg, {}, []
        for spec in (name.strip() for name in cfg.tools.split(",") if name.strip()):
            if spec.startswith("mcp:"):
                found = served(spec.removeprefix("mcp:"), cfg.tool_timeout_s)
            else:
                function = BUILT_IN.get(spec) or import_object("agent.tools", spec)
                mend = "give every argument a type and a line under Args: in the docstring"
                with as_config_error(
                    f"agent.tools={spec!r}: no JSON schema can be made of it", mend
                ):
                    found = [(get_json_schema(function), function)]
            for schema, function in found:
                name = schema["function"]["name"]
                if name in self.functions:
                    raise ConfigError(
                        f"agent.tools={spec!r}: a tool before it is named {name} too; rename one"
                    )
                self.functions[name] = function
                self.schemas.append(schema)
        if python in self.functions.values():
            try:
                completed(python("print()"))
            except Exception as e:
                why = str(e).strip().splitlines()[-1]
                mend = "needs Linux 5.13 with Landlock and seccomp, on x86-64; remove it"
                raise ConfigError(
                    f"agent.tools=python: programs cannot be confined here ({why}); it {mend}"
                ) from e

    async def call(self, name: str, arguments: Any, seconds: float) -> tuple[str, bool]:
        """What the tool answers, cut to `agent.tool_output_chars`, and whether it did well. Never raises."""
        function, limit, loop = (
            self.functions.get(name),
            asyncio.timeout(None),
            asyncio.get_running_loop(),
        )
        end = loop.time() + seconds
        if function is None:
            return f"error: no tool {name!r}; there are {', '.join(self.functions)}", False
        try:
            inspect.signature(function).bind(**arguments)
            # Programs take whole cores; the wait for one is not theirs.
            async with core(seconds) if function is python else contextlib.nullcontext(), limit:
                seconds = min(end - loop.time(), self.cfg.tool_timeout_s)
                limit.reschedule(loop.time() + seconds)
                made = functools.partial(function, **arguments)
                work = (
                    made()
                    if inspect.iscoroutinefunction(function)
                    else _in_thread(lambda: str(made()))
                )
                answer, good = str(await work), True
        except (
            BaseException
        ) as e:  # whatever a tool raises is the model's to read, SystemExit and its cancelling too
            if isinstance(e, asyncio.CancelledError) and asyncio.current_task().cancelling():
                raise
            answer, good = f"error: {traceback.format_exception_only(e)[-1].strip()}", False
            whole = format_traceback(e)
            if find_user_line(whole):  # a user's tool: to its author it is a fault, or may be one
                log_traceback(f"tool {name}, called with {arguments!r:.200}", whole)
            if isinstance(e, TimeoutError) and limit.expired():
                answer = f"error: {name} took longer than {round(seconds, 2):g} s"
        most = self.cfg.tool_output_chars
        return (
            answer if len(answer) <= most else answer[:most] + f" ... ({len(answer)} characters)"
        ), good
