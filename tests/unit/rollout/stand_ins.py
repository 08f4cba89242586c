"""Stand-ins for the parts around a replica: reward workers, the engine, the tokenizer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_loop.base import Generated
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines.vllm.engine import VllmEngine
from one_step_off.rewards.reward import RewardError, RewardItem
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling
from tests.unit.stand_ins import tiny_tokenizer


class FakeScorer:
    """Answers like a Ray actor's method, and records how many items each call had.

    The reward is the index of the sample; for the responses "late" and "parts" it is missing, or in
    parts; `failing_response` is an error.
    """

    def __init__(self, delay: float = 0.0, failing_response: str = "") -> None:
        self.delay = delay
        self.failing_response = failing_response
        self.call_sizes: list[int] = []
        self.items: list[RewardItem] = []
        self.score_batch = self

    async def remote(self, items: list[RewardItem]) -> list[Any]:
        self.items = items
        self.call_sizes.append(len(items))
        await asyncio.sleep(self.delay)
        return [self.score(item) for item in items]

    def score(self, item: RewardItem) -> Any:
        if self.failing_response and item.response == self.failing_response:
            return RewardError("bad reward")
        if item.response == "late":
            return None
        if item.response == "parts":
            return {"right": 1.0, "form": 0.5}
        return float(item.index)


def reward_item(index: int, response: str = "x") -> RewardItem:
    return RewardItem((0, 0), index, "q", response, "1")


async def generate_two_tokens(ids, max_tokens, seed, sampling) -> Generated:
    """In place of `RolloutReplica._generate`: two tokens, whose log-probs are the temperature."""
    return Generated(
        np.arange(2),
        np.full(2, sampling.temperature),
        np.zeros(2),
        attempt=0,
        finish_reason="stop",
    )


def plain_tokenizer(response: str = "x") -> SimpleNamespace:
    """A tokenizer that decodes everything as `response`."""
    return SimpleNamespace(decode=lambda *_, **__: response)


def vllm_engine(llm: Any, device: str = "cpu") -> VllmEngine:
    """A started engine, with `llm` in place of vLLM's `AsyncLLM`."""
    engine = VllmEngine(Config(), device)
    engine.llm = llm
    return engine


def replica_of(
    cfg: Config | None = None,
    scorers: list[Any] | None = None,
    tokenizer: Any = None,
    generate: Any = generate_two_tokens,
) -> RolloutReplica:
    """A replica with verified weights, whose engine is `generate`."""
    replica = RolloutReplica(cfg or Config(), 0, "cpu", scorers or [FakeScorer()])
    replica.tokenizer = tokenizer or tiny_tokenizer()
    replica._generate = generate
    replica.stamp = (0, 0)
    return replica


def make_prompt(row: int = 0, **fields: Any) -> Prompt:
    return Prompt((0, row), np.arange(2), "q", "1", **fields)


UNSEEDED = Sampling(1, 1.0, None)
