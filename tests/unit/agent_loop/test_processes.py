"""The program that forks confined processes."""

from __future__ import annotations

import asyncio
import gc

import pytest

from agent_loop import processes
from agent_loop.processes import ForkServer


def test_a_first_process_that_never_begins_is_waited_for_only_so_long(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "MAX_START_S", 0.5)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "never_begins.py").write_text("import time; time.sleep(60)")

    async def main() -> None:
        async with ForkServer("never_begins:Class", False).process():
            pass

    with pytest.raises(RuntimeError, match="never_begins:Class: no process began within 0.5 s"):
        asyncio.run(main())


def test_a_dead_fork_server_is_replaced_and_the_new_one_ends_with_its_object():
    async def fork_one(fork_server: ForkServer) -> None:
        async with fork_server.process():
            pass

    fork_server = ForkServer()
    asyncio.run(fork_one(fork_server))
    first = fork_server.server
    first.kill()
    first.wait()
    asyncio.run(fork_one(fork_server))
    second = fork_server.server
    assert second is not first
    assert second.poll() is None
    del fork_server
    gc.collect()
    assert second.returncode is not None
