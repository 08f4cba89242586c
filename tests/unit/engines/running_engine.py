"""A started reference engine for a test, and the log-probs that it must have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from one_step_off.config.schema import Config
from one_step_off.engines.engine import GenerationRequest
from one_step_off.engines.transformers.engine import TransformersEngine

VERSION = (2, 5)
TEST_LIMIT_S = 120.0


def run(main: Callable[[], Any]) -> Any:
    """The result of a coroutine function. A test never hangs."""
    return asyncio.run(asyncio.wait_for(main(), TEST_LIMIT_S))


@asynccontextmanager
async def running(cfg: Config, seed: int = 0) -> AsyncIterator[TransformersEngine]:
    """An engine that generates with the weights it has loaded, as VERSION."""
    engine = TransformersEngine(cfg, "cpu", seed)
    await engine.start()
    try:
        await engine.resume(VERSION)
        yield engine
    finally:
        engine.shutdown()


def context(length: int, first: int = 20) -> np.ndarray:
    """Token ids of a prompt, int32 [length]."""
    return (np.arange(length, dtype=np.int32) * 7 + first) % 300


def asks(length: int = 8, max_tokens: int = 12, **settings: Any) -> GenerationRequest:
    """A request with a prompt of this length."""
    settings = {"temperature": 1.0, "seed": length} | settings
    return GenerationRequest(context(length), max_tokens, **settings)


def plain_log_probs(
    model: Any, ids: np.ndarray, answer: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Of the answer's tokens after `ids`, by one forward pass over both."""
    both = torch.tensor(np.concatenate([ids, answer]), dtype=torch.int64)
    with torch.no_grad():
        logits = model(input_ids=both[None], use_cache=False).logits[0, len(ids) - 1 : -1]
    rows = (logits.float() / temperature).log_softmax(-1)
    return rows.gather(1, both[len(ids) :, None])[:, 0].numpy()


async def wait_for_tokens(engine: TransformersEngine, count: int) -> None:
    """Until the oldest open request has this many tokens."""

    def tokens_of_oldest() -> int:
        open_requests = [request for request in engine.thread.requests if request.is_open]
        return len(open_requests[0].tokens) if open_requests else 0

    while tokens_of_oldest() < count:
        await asyncio.sleep(0.001)
