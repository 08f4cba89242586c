"""Sleep and wake-up, part by part, as vLLM's own executor does it."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.v1.executor.abstract import SLEEP_TAGS, Executor

from one_step_off.config.schema import Config
from one_step_off.engines.vllm.engine import VllmEngine


class AsleepInParts:
    """An `AsyncLLM` with vLLM's `Executor`, whose workers only record what they are asked."""

    sleep_of_executor = Executor.sleep
    wake_up_of_executor = Executor.wake_up
    is_sleeping = Executor.is_sleeping

    def __init__(self) -> None:
        self.sleeping_tags: set[str] = set()
        self.asked: list[Any] = []

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.asked.append((method, kwargs.get("tags")))

    async def sleep(self, level: int) -> None:
        assert level == 2, "the weights come with the next sync"
        self.sleep_of_executor(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.wake_up_of_executor(tags)


def test_after_a_sync_that_failed_the_weights_sleep_again():
    async def main():
        engine = VllmEngine(Config(), "cuda")
        engine.llm = AsleepInParts()
        await engine.wake_up(["weights"])
        await engine.sleep()
        await engine.sleep()
        await engine.wake_up(["weights"])  # the sync fails after it
        await engine.sleep()
        assert engine.llm.sleeping_tags == SLEEP_TAGS
        await engine.wake_up(["weights"])  # it fails again, and is repeated
        await engine.wake_up(["weights"])
        await engine.wake_up(["kv_cache"])
        assert engine.llm.sleeping_tags == set()
        assert engine.llm.asked == [
            ("sleep", None),
            ("wake_up", ["weights"]),
            ("sleep", None),
            ("wake_up", ["weights"]),
            ("wake_up", ["kv_cache"]),
        ]

    asyncio.run(main())


def test_on_cpus_an_engine_never_sleeps():
    async def main():
        engine = VllmEngine(Config(), "cpu")
        engine.llm = AsleepInParts()
        await engine.sleep()
        await engine.wake_up(["weights"])
        assert engine.llm.asked == []

    asyncio.run(main())
