"""Plays tasks by the verifiers adapter, in the venv that has the package. Arguments: the adapter, a
base URL, and the tasks. Prints what each gives, as JSON. The key of task N is key-N."""

import asyncio
import importlib.util
import json
import sys


async def outcome(adapter, base_url: str, task: int):
    try:
        return await adapter.run({"extra": {"task": task}}, base_url, f"key-{task}")
    except RuntimeError as error:
        return str(error)


async def play(adapter, base_url: str, tasks: list[int]) -> None:
    results = await asyncio.gather(*(outcome(adapter, base_url, task) for task in tasks))
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    path, base_url, *tasks = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("adapter", path)
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    asyncio.run(play(adapter, base_url, [int(task) for task in tasks]))
