"""Tools that a model may call: a typed function with a docstring in, a JSON schema and an answer in words out.

    async def lookup(city: str) -> str:
        \"\"\"The weather of a city.

        Args:
            city: Its name.
        \"\"\"

`agent.tools: calculator, python, my_tools:lookup`. A plain function runs in a thread of its own, a coroutine on the
event loop of the replica, which it must not block. `mcp:http://HOST:PORT/mcp` stands for all tools of an MCP server.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import operator
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from one_step_off.config import AgentConfig, ConfigError
from one_step_off.registry import load

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_LARGEST = 10**100


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        result = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > 1000 or (left < 0 and right % 1)):
            raise ValueError("this power is not worked out")  # too long, or complex
        result = _BINARY[type(node.op)](left, right)
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
    return str(int(result) if isinstance(result, float) and result.is_integer() and abs(result) < 1e15 else result)


async def python(code: str) -> str:
    """Run a Python program and return what it printed.

    Args:
        code: The program. Use print to see a result.
    """
    # Not protected from: reading, and changing file by file, what the user of the run may; other processes' CPU time
    # while it runs; faults of the kernel. See sandbox.py.
    with tempfile.TemporaryDirectory(prefix="tool_", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(Path(__file__).with_name("sandbox.py")), "10", "512", "16"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            process.stdin.write(code.encode())
            process.stdin.close()
            said, flood = b"", 1 << 16
            while (more := await process.stdout.read(flood)) and len(said) < flood:
                said += more
        finally:  # also where the time limit cancels this
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended = await process.wait()
    text = said.decode(errors="replace")
    # What ended by itself closed its output first; it is then killed too, at the worst.
    return text if text or ended in (0, -signal.SIGKILL) else f"error: the program ended by {ended} and said nothing"


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}


async def _list(url: str) -> list[Any]:
    from mcp import Client

    async with Client(url) as client:
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return tools


def served(url: str, seconds: float) -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """JSON schema and function of each tool of an MCP server (streamable HTTP); a call has a session of its own.

    Raises:
        ConfigError: the server does not list its tools within `seconds`.
    """

    def tool(name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            from mcp import Client

            async with Client(url) as client:
                answer = await client.call_tool(name, arguments)
            text = "\n".join(block.text for block in answer.content if block.type == "text")
            if answer.is_error:
                raise RuntimeError(text)
            return text

        return call

    try:
        with ThreadPoolExecutor(1) as pool:  # the caller may stand in an event loop
            tools = pool.submit(asyncio.run, asyncio.wait_for(_list(url), seconds)).result()
    except Exception as e:
        while isinstance(e, BaseExceptionGroup):
            e = e.exceptions[0]
        why = " ".join(str(e).split()) or type(e).__name__
        raise ConfigError(f"agent.tools=mcp:{url}: the server lists no tools ({why}); start it, or remove it") from e
    schemas = ({"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in tools)
    return [({"type": "function", "function": schema}, tool(schema["name"])) for schema in schemas]


def _in_thread(function: Callable[[], Any]) -> asyncio.Future:
    """Run in a thread of its own: a function that hangs keeps that one, and neither the others nor the run's end."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not future.done():  # its time was not up before
            future.set_exception(error) if error else future.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as e:  # SystemExit too: it is the tool's, not ours; and futures take no StopIteration
            plain = isinstance(e, Exception) and not isinstance(e, StopIteration)
            error = e if plain else RuntimeError(f"{type(e).__name__}: {e}")
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Toolbox:
    """The tools of `agent.tools`: their `schemas`, and `call`."""

    def __init__(self, cfg: AgentConfig) -> None:
        """Raises ConfigError: no such tool, or one whose types and docstring make no schema."""
        from transformers.utils import get_json_schema  # takes a second, which runs without tools need not wait for

        self.cfg, self.functions, self.schemas = cfg, {}, []
        for spec in (name.strip() for name in cfg.tools.split(",") if name.strip()):
            if spec.startswith("mcp:"):
                found = served(spec.removeprefix("mcp:"), cfg.tool_timeout_s)
            else:
                function = BUILT_IN.get(spec) or load("agent.tools", spec)
                try:
                    found = [(get_json_schema(function), function)]
                except Exception as e:
                    why = " ".join(str(e).split())
                    raise ConfigError(
                        f"agent.tools={spec!r}: no JSON schema can be made of it ({why}); give every argument a type "
                        "and a line under Args: in the docstring"
                    ) from e
            for schema, function in found:
                name = schema["function"]["name"]
                if name in self.functions:
                    raise ConfigError(
                        f"agent.tools={spec!r}: a tool before it is named {name} too; rename or remove one"
                    )
                self.functions[name] = function
                self.schemas.append(schema)

    async def call(self, name: str, arguments: Any, seconds: float) -> tuple[str, bool]:
        """What the tool answers, cut to `agent.tool_output_chars`, and whether it did well. Never raises."""
        function, limit = self.functions.get(name), min(seconds, self.cfg.tool_timeout_s)
        if function is None:
            return f"error: no tool {name!r}; there are {', '.join(self.functions)}", False
        try:
            inspect.signature(function).bind(**arguments)
            if inspect.iscoroutinefunction(function):
                work = function(**arguments)
            else:
                work = _in_thread(lambda: function(**arguments))
            answer, good = str(await asyncio.wait_for(work, limit)), True
        except TimeoutError:
            answer, good = f"error: {name} took longer than {limit:g} s", False
        except Exception as e:  # whatever a tool raises is the model's to read
            answer, good = f"error: {type(e).__name__}: {e}", False
        most = self.cfg.tool_output_chars
        return (answer if len(answer) <= most else answer[:most] + f" ... ({len(answer)} characters)"), good
