"""The program that runs coroutine functions, by its messages."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from agent_loop.host.tasks import TaskAgents


async def returns_one(row: dict, base_url: str, api_key: str) -> float:
    return 1.0


def start_message(name: str, folder: Any) -> dict[str, Any]:
    log = str(folder / name)
    return {"start": name, "row": {}, "base_url": "", "api_key": "", "log": log}


def test_an_agent_whose_end_arrives_with_its_start_is_reported_as_ended(tmp_path):
    async def main() -> list[dict[str, Any]]:
        control, replica = socket.socketpair()
        agents = TaskAgents(control, returns_one)
        messages = [start_message("0", tmp_path), {"end": "0"}, start_message("1", tmp_path)]
        replica.sendall("".join(json.dumps(message) + "\n" for message in messages).encode())
        serving = asyncio.create_task(agents.serve())
        reader, writer = await asyncio.open_connection(sock=replica)
        async with asyncio.timeout(10):
            received = [json.loads(await reader.readline()) for _ in range(3)]
        assert agents.tasks == {}
        writer.close()
        await serving
        return received[1:]

    canceled, finished = asyncio.run(main())
    assert (canceled["ended"], finished["ended"]) == ("0", "1")
    assert canceled["error"].startswith("CancelledError")
    assert finished["value"] == 1.0
