"""A replica against the bare engine, which gets the same requests: tokens per second.

Both engines have a core process of their own and a client in this one, as in a run. The bare one
has vLLM's own scheduler, and its answers are only awaited. They alternate.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.rollout.report import BARE, REPLICA
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines.engine import GenerationRequest
from one_step_off.engines.vllm.core_process import start_engine
from one_step_off.engines.vllm.engine import sampling_params
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling
from one_step_off.runtime.prepare import prepare

OURS_ALONE = ("scheduler_cls", "weight_transfer_config", "worker_extension_cls")


class InstantScores:
    """Stands in for the process that scores."""

    def __init__(self) -> None:
        self.score_batch = self  # called as `scorer.score_batch.remote(items)`

    async def remote(self, items: list[Any]) -> list[float]:
        """The rewards, as a Ray actor's method returns them."""
        return [1.0] * len(items)


async def start_replica(cfg: Config, device: str) -> RolloutReplica:
    """A replica that generates with the weights of the checkpoint."""
    replica = RolloutReplica(cfg, 0, device, [InstantScores()])
    await replica.start()
    await replica.engine.resume((0, 0))
    replica.stamp = (0, 0)
    return replica


def start_bare(cfg: Config, device: str) -> Any:
    """vLLM's engine with the arguments of a run, and nothing of ours in it."""
    from vllm import AsyncEngineArgs

    arguments = engine_args(cfg, device)
    plain = {name: value for name, value in arguments.items() if name not in OURS_ALONE}
    return start_engine(AsyncEngineArgs(**plain).create_engine_config(), plain, device)


async def generate_bare(cfg: Config, llm: Any, prompts: list[Prompt], sampling: Sampling) -> int:
    """The requests that the replica makes. Returns the tokens."""

    async def respond(name: str, prompt: Prompt) -> int:
        ids = prompt.ids
        most = cfg.data.max_response_length
        params = sampling_params(cfg, GenerationRequest(ids, most, sampling.temperature))
        params.extra_args = None
        tokens = {"type": "token", "prompt_token_ids": ids.tolist()}
        outputs = [output async for output in llm.generate(tokens, params, name)]
        return len(outputs[-1].outputs[0].token_ids)

    names = [
        (f"{row}-{i}", prompt) for row, prompt in enumerate(prompts) for i in range(sampling.n)
    ]
    return sum(await asyncio.gather(*(respond(*one) for one in names)))


async def tokens_per_second(generate: Callable[[], Awaitable[int]]) -> float:
    """One run of an arm."""
    begin = time.perf_counter()
    tokens = await generate()
    return tokens / (time.perf_counter() - begin)


async def measure(cfg: Config, device: str, repeats: int) -> dict[str, list[float]]:
    """Arm -> tokens per second, of each repeat. A first one warms up.

    Args:
        device: "cpu" or "cuda".
    """
    prompts = prepare(cfg, print, calls_rewards=False).data.stream.next_batch()
    cfg.rollout.sampling_kwargs = cfg.rollout.sampling_kwargs | {"ignore_eos": True}
    sampling = Sampling(cfg.rollout.n, cfg.rollout.temperature, None)
    replica = await start_replica(cfg, device)
    bare = start_bare(cfg, device)
    engine: Any = replica.engine

    async def through_replica() -> int:
        samples = await replica.rollout(prompts, sampling)
        return sum(len(sample.response_ids) for sample in samples)

    arms = {
        BARE: (bare, lambda: generate_bare(cfg, bare, prompts, sampling)),
        REPLICA: (engine.llm, through_replica),
    }
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    try:
        for repeat in range(repeats + 1):
            for arm, (llm, generate) in arms.items():
                await llm.reset_prefix_cache()
                speed = await tokens_per_second(generate)
                if repeat > 0:
                    found[arm].append(speed)
    finally:
        bare.shutdown()
        await replica.stop()
        # The replica has frozen all objects, for a process that is killed in the end. Here Python
        # ends, and Triton's bindings would report each frozen object as leaked.
        gc.unfreeze()
    return found
