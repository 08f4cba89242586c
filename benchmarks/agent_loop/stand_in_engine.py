"""The agent loop on a stand-in for the engine, so that nothing but the loop differs.

The stand-in has a fixed number of slots and takes a fixed time per token.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np

from agent_loop.base import Generated
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling

TOOL_CALL = tiny_qwen.CALL.format(expression="12 * 13")
ANSWER = " #### 156"
MAX_TOOL_CALLS = 11
SLOW_REWARD_WORKERS = 32

FIRST_ROW_TOKEN = 1000
"""The first token of each prompt is this plus its row. No token of the vocabulary has such an id,
so none is taken for the end.
"""


class StandInEngine:
    """Calls the calculator as often as its conversation needs, and then answers.

    Args:
        tokenizer: of the tiny model.
        tool_calls: of each conversation, by row.
        slots: requests that are served at the same time.
        token_s: seconds per token.
    """

    def __init__(self, tokenizer: Any, tool_calls: list[int], slots: int, token_s: float) -> None:
        end = [tokenizer.eos_token_id]
        self.tool_call_ids = np.array(tokenizer.encode(TOOL_CALL) + end, np.int32)
        self.answer_ids = np.array(tokenizer.encode(ANSWER) + end, np.int32)
        self.tool_calls = tool_calls
        self.token_s = token_s
        self.slots = asyncio.Semaphore(slots)
        self.busy_slot_seconds = 0.0
        self.requests = 0

    async def generate(self, row: int, turn: int) -> Generated:
        """The turn of a conversation."""
        ids = self.tool_call_ids if turn < self.tool_calls[row] else self.answer_ids
        seconds = self.token_s * len(ids)
        async with self.slots:
            self.busy_slot_seconds += seconds
            self.requests += 1
            await asyncio.sleep(seconds)
        log_probs = np.zeros(len(ids), np.float32)
        versions = np.zeros(len(ids), np.int32)
        return Generated(ids, log_probs, versions, 0, "stop")


class RewardWorker:
    """Stands in for a process that scores. Each sample takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.score_batch = self  # called as `worker.score_batch.remote(items)`

    async def remote(self, items: list[Any]) -> list[float]:
        """The rewards, as a Ray actor's method returns them."""
        await asyncio.sleep(self.seconds * len(items))
        return [1.0] * len(items)


def serve_alone(engine: StandInEngine) -> float:
    """Seconds in which the engine alone serves all conversations."""

    async def conversation(row: int) -> None:
        for turn in range(engine.tool_calls[row] + 1):
            await engine.generate(row, turn)

    async def all_conversations() -> None:
        rows = range(len(engine.tool_calls))
        await asyncio.gather(*(conversation(row) for row in rows))

    begin = time.perf_counter()
    asyncio.run(all_conversations())
    return time.perf_counter() - begin


def make_replica(tokenizer: Any, reward_workers: int, reward_s: float) -> RolloutReplica:
    """A replica with the calculator, without an engine. `reward_s`: seconds of a reward."""
    cfg = Config()
    cfg.agent.loop = "tool"
    cfg.agent.tools = "calculator"
    cfg.agent.max_turns = 20
    cfg.agent.loop_kwargs = {"tool": {"taught": True}}
    workers = [RewardWorker(reward_s) for _ in range(reward_workers)]
    replica = RolloutReplica(cfg, 0, "cpu", workers)
    replica.tokenizer = tokenizer
    replica.stamp = (0, 0)
    return replica


def serve_through_loop(
    engine: StandInEngine, tokenizer: Any, reward_workers: int, reward_s: float
) -> dict[str, float]:
    """Serve all conversations through a replica's agent loop.

    Returns:
        "generated_s": seconds until the last turn was generated. "whole_s": seconds until all was
        scored. "cpu_ms_per_turn" and "cpu_ms_per_trajectory": CPU time of this process.
    """
    replica = make_replica(tokenizer, reward_workers, reward_s)
    last_generated = 0.0

    async def generate(ids: np.ndarray, max_tokens: int, seed: Any, sampling: Any) -> Generated:
        nonlocal last_generated
        row = int(ids[0]) - FIRST_ROW_TOKEN
        turn = sum(ids == tokenizer.eos_token_id)
        generated = await engine.generate(row, turn)
        last_generated = time.perf_counter()
        return generated

    replica._generate = generate
    prompts = []
    for row in range(len(engine.tool_calls)):
        ids = np.array([FIRST_ROW_TOKEN + row, 5], np.int32)
        prompts.append(Prompt((0, row), ids, "q", "156"))
    replica.loops.get()  # a run creates the loop once
    begin = time.perf_counter()
    cpu_begin = time.process_time()
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, None)))
    cpu_ms = 1e3 * (time.process_time() - cpu_begin)
    turns = sum(sample.extra["agent"]["turns"] for sample in samples)
    return {
        "generated_s": last_generated - begin,
        "whole_s": time.perf_counter() - begin,
        "cpu_ms_per_turn": cpu_ms / turns,
        "cpu_ms_per_trajectory": cpu_ms / len(samples),
    }


def measure(
    conversations: int, reward_s: float, slots: int = 64, token_s: float = 0.005
) -> dict[str, Any]:
    """The engine alone, the loop with instant rewards, and the loop with slow rewards.

    Args:
        conversations: how many.
        reward_s: seconds of a slow reward.
        slots: of the engine.
        token_s: seconds per token.
    """
    tokenizer = tiny_qwen.build_tokenizer()
    rng = random.Random(0)
    tool_calls = [rng.randrange(0, MAX_TOOL_CALLS + 1) for _ in range(conversations)]

    def make_engine() -> StandInEngine:
        return StandInEngine(tokenizer, tool_calls, slots, token_s)

    bare_engine = make_engine()
    bare_s = serve_alone(bare_engine)
    instant = serve_through_loop(make_engine(), tokenizer, 1, 0.0)
    slow = serve_through_loop(make_engine(), tokenizer, SLOW_REWARD_WORKERS, reward_s)
    for arm in (instant, slow):
        busy_share = bare_engine.busy_slot_seconds / (slots * arm["generated_s"])
        arm["engine_idle_share"] = 1 - busy_share
    return {
        "bare_s": bare_s,
        "instant_rewards": instant,
        "slow_rewards": slow,
        "throughput_ratio": bare_s / instant["generated_s"],
        "conversations": conversations,
        "turns": sum(tool_calls) + conversations,
        "slots": slots,
        "reward_s": reward_s,
        "reward_workers": SLOW_REWARD_WORKERS,
    }
