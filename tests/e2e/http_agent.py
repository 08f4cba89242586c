"""Agent loops whose agents talk to the endpoint over HTTP, as agents outside of the replica do."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from agent_loop.base import AgentLoop, Generate, Limits, ScoreFunction
from agent_loop.episode import Episode
from one_step_off.data.samples import Prompt

TURNS = 2
PAUSE_S = 0.2
"""Between two turns, so that a fault finds episodes open."""

RETRIES = 60
RETRY_S = 0.5
OVER = (403, 410)


async def complete(client: aiohttp.ClientSession, url: str, key: str, content: Any) -> Any:
    """An answer of the policy. It is asked for again as the SDKs of OpenAI and Anthropic do it.

    Raises:
        RuntimeError: the endpoint refuses the request, or is gone.
    """
    problem = ""
    for retry in range(RETRIES):
        headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
        try:
            async with client.post(f"{url}/v1/completions", json=content, headers=headers) as reply:
                answer = await reply.json()
                if reply.status == 200:
                    return answer
                problem = f"{reply.status}: {answer}"
                if reply.status < 500 and reply.status != 429:
                    break
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{type(error).__name__}: {error}"
        await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))
    raise RuntimeError(problem)


async def converse(url: str, key: str, text: str) -> None:
    """Ask the policy twice: for an answer, and for more of it."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for turn in range(TURNS):
            content = {"model": "policy", "prompt": text, "max_tokens": 4}
            answer = await complete(client, url, key, content)
            text += answer["choices"][0]["text"] + " "
            if turn == 0:
                await asyncio.sleep(PAUSE_S)


class HttpAgent(AgentLoop):
    """Runs its agent in the replica, beside the server."""

    needs_endpoint = True

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Episode:
        episode = self.endpoint.open(prompt, generate, limits)
        try:
            await converse(self.endpoint.base_url, episode.key, prompt.text)
        finally:
            self.endpoint.close(episode)
        return episode


class OfferedAgent(AgentLoop):
    """Its agents ask the endpoint for work."""

    needs_endpoint = True

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Episode:
        episode = self.endpoint.open(prompt, generate, limits)
        try:
            await self.endpoint.offer(episode)
        finally:
            self.endpoint.close(episode)
        return episode
