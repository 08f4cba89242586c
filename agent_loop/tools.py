"""Tools that a model may call: a typed function with a docstring in, a JSON schema and an answer in words out.

    async def lookup(city: str) -> str:
        \"\"\"The weather of a city.

        Args:
            city: Its name.
        \"\"\"

`agent.tools: calculator, python, my_tools:lookup`. A plain function runs in a thread of its own, a coroutine on the
event loop of the replica, which it must not block.
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
            function = BUILT_IN.get(spec) or load("agent.tools", spec)
            try:
                schema = get_json_schema(function)
            except Exception as e:
                why = " ".join(str(e).split())
                raise ConfigError(
                    f"agent.tools={spec!r}: no JSON schema can be made of it ({why}); give every argument a type and a "
                    "line under Args: in the docstring"
                ) from e
            self.functions[schema["function"]["name"]] = function
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
