"""The loop `external` at a stand-in endpoint, for its tests."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from agent_loop.base import Limits, Loops
from agent_loop.external import ExternalLoop
from one_step_off.config.schema import Config
from tests.unit.agent_loop import agents
from tests.unit.agent_loop.stand_in_endpoint import StandInEndpoint
from tests.unit.agent_loop.stand_ins import ScriptedEngine, make_prompt

LIMITS = Limits(tokens=800, turns=8, seconds=60.0)
PROGRAM = f"{sys.executable} {agents.__file__}"
MODULE = agents.__name__
WAIT_S = 30.0


class EndlessEngine(ScriptedEngine):
    """Says the same at each turn."""

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        self.turns = [" #### 156"]
        return await super().__call__(ids, max_tokens)


class Setting:
    """A loop at a stand-in endpoint."""

    def __init__(self, tokenizer: Any, folder: Path, **agent_settings: Any) -> None:
        cfg = Config()
        cfg.agent.loop = "external"
        cfg.trainer.output_dir = str(folder)
        for name, value in agent_settings.items():
            setattr(cfg.agent, name, value)
        self.folder = folder
        self.tokenizer = tokenizer
        self.endpoint = StandInEndpoint(tokenizer)
        loop = Loops(cfg, tokenizer, self.endpoint).get()
        assert isinstance(loop, ExternalLoop)
        self.loop = loop

    async def episode(self, limits: Limits = LIMITS, engine: Any = None, **extra: Any) -> Any:
        """One episode by the loop."""
        engine = engine or EndlessEngine(self.tokenizer)
        score: Any = None
        prompt = make_prompt(self.tokenizer, **extra)
        return await self.loop.run(prompt, engine, score, limits)

    def run(self, limits: Limits = LIMITS, started: bool = False, **extra: Any) -> Any:
        """One episode, and the end of the program. `started`: the program starts before the
        episode's time begins, so that a short limit leaves time for turns."""

        async def main() -> Any:
            async with self.endpoint.serving():
                try:
                    if started:
                        await self.loop.hosts._host()
                    return await self.episode(limits, **extra)
                finally:
                    await self.close()

        return asyncio.run(main())

    async def close(self) -> None:
        if self.loop.hosts is not None:
            await asyncio.to_thread(self.loop.hosts.close)

    def log(self, name: str = "*.log") -> str:
        """The only log."""
        (path,) = self.folder.glob(f"agents/{name}")
        return path.read_text()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


async def wait_for_file(path: Path) -> list[int]:
    """The ids of processes in a file that an agent writes."""
    await asyncio.to_thread(wait_for, path.exists)
    return [int(pid) for pid in path.read_text().split()]


def sample_of(episode: Any) -> Any:
    (sample,) = episode.samples(episode.prompt, 0)
    return sample
