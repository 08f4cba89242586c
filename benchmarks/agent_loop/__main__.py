"""What the agent loop itself costs: CPU time per turn, idle share with slow rewards, throughput against the bare engine.

    python -m benchmarks.agent_loop --out DIR [--conversations 500] [--reward-s 0.5] [--repeats 7]

First with a stand-in for the engine that has a fixed number of slots and a fixed time per token, so that nothing but the
loop differs. Then with vLLM: conversations of tiny:tools with its calculator, and single turns of a more usual length;
beside them the very same requests, each after the one that it builds on, given to the engine alone; all in turns. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import copy
import json
import os
import random
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_loop.base import Generated
from benchmarks.common.command_line import ROOT
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.vllm_replica import RolloutReplica

LONG = 128
CALL = tiny_qwen.CALL.format(expression="12 * 13")


class FakeEngine:
    """Calls the calculator as often as a conversation's row says, then answers; `busy` are its slot-seconds."""

    def __init__(self, tokenizer: Any, turns: list[int], slots: int, token_s: float) -> None:
        eos = [tokenizer.eos_token_id]
        self.call = np.array(tokenizer.encode(CALL) + eos, np.int32)
        self.answer = np.array(tokenizer.encode(" #### 156") + eos, np.int32)
        self.turns, self.token_s, self.busy, self.requests = turns, token_s, 0.0, 0
        self.slots = asyncio.Semaphore(slots)

    async def generate(self, row: int, turn: int) -> Generated:
        ids = self.call if turn < self.turns[row] else self.answer
        async with self.slots:
            self.busy, self.requests = self.busy + self.token_s * len(ids), self.requests + 1
            await asyncio.sleep(self.token_s * len(ids))
        return Generated(
            ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), 0, "stop"
        )


FIRST = 1000
"""The first token of each prompt is this plus its row: no id of the vocabulary, so that none is taken for the end."""


class Scorer:
    """Takes `seconds` for each call, in a process of its own as it were."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.score_batch = seconds, self

    async def remote(self, items: list[Any]) -> list[float]:
        await asyncio.sleep(self.seconds * len(items))
        return [1.0] * len(items)


def bare(engine: FakeEngine) -> float:
    """Seconds in which the engine alone serves the same requests."""

    async def one(row: int) -> None:
        for turn in range(engine.turns[row] + 1):
            await engine.generate(row, turn)

    async def everyone() -> None:
        await asyncio.gather(*map(one, range(len(engine.turns))))

    begin = time.perf_counter()
    asyncio.run(everyone())
    return time.perf_counter() - begin


def looped(engine: FakeEngine, tokenizer: Any, workers: int, reward_s: float) -> dict[str, float]:
    """Through a replica's agent loop: seconds until the last turn was generated, until all is scored, and CPU time."""
    cfg = Config()
    cfg.agent.loop, cfg.agent.tools, cfg.agent.max_turns = "tool", "calculator", 20
    cfg.agent.loop_kwargs = {"tool": {"taught": True}}
    replica = RolloutReplica(cfg, 0, "cpu", [Scorer(reward_s) for _ in range(workers)])
    replica.tokenizer, replica.stamp = tokenizer, (0, 0)
    last = 0.0

    async def generate(ids: np.ndarray, max_tokens: int, seed: Any, sampling: Any) -> Generated:
        nonlocal last
        row = int(ids[0]) - FIRST
        out = await engine.generate(row, sum(ids == tokenizer.eos_token_id))
        last = time.perf_counter()
        return out

    replica._generate = generate
    rows = range(len(engine.turns))
    prompts = [Prompt((0, row), np.array([FIRST + row, 5], np.int32), "q", "156") for row in rows]
    _ = replica.loops.get()  # made once for a whole run
    begin, cpu = time.perf_counter(), time.process_time()
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, None)))
    cpu = time.process_time() - cpu
    turns = sum(s.extra["agent"]["turns"] for s in samples)
    return {
        "generated_s": last - begin,
        "whole_s": time.perf_counter() - begin,
        "cpu_ms_per_turn": 1e3 * cpu / turns,
        "cpu_ms_per_trajectory": 1e3 * cpu / len(samples),
    }


def measure(
    conversations: int, reward_s: float, slots: int = 64, token_s: float = 0.005
) -> dict[str, Any]:
    """All arms; the stand-in engine's slots are the same in each."""
    tokenizer, rng = tiny_qwen.build_tokenizer(), random.Random(0)
    turns = [rng.randrange(0, 12) for _ in range(conversations)]

    def engine() -> FakeEngine:
        return FakeEngine(tokenizer, turns, slots, token_s)

    found = {"bare_s": bare(engine()), "instant_rewards": looped(engine(), tokenizer, 1, 0.0)}
    workers = 32
    found["slow_rewards"] = looped(engine(), tokenizer, workers, reward_s)
    busy = engine()
    bare(busy)
    for arm in ("instant_rewards", "slow_rewards"):
        found[arm]["engine_idle_share"] = 1 - busy.busy / (slots * found[arm]["generated_s"])
    found["throughput_ratio"] = found["bare_s"] / found["instant_rewards"]["generated_s"]
    found |= {"conversations": conversations, "turns": sum(turns) + conversations, "slots": slots}
    return found | {"reward_s": reward_s, "reward_workers": workers}


class Workload:
    """Trajectories through the agent loop, and the very requests that they made, given to the engine alone.

    `arms`: what each takes to its last token, in seconds; "bare vLLM" repeats what the arm before it asked for.
    """

    def __init__(
        self, cfg: Config, started: RolloutReplica, prompts: list[Prompt], how: Sampling
    ) -> None:
        self.cfg, self.started, self.prompts, self.how = cfg, started, prompts, how
        self.who, self.last = contextvars.ContextVar("who"), 0.0
        self.requests: dict[Any, list[tuple[Any, Any]]] = {}
        self.arms = {"agent loop": self.replica([Scorer(0.0)]).rollout, "bare vLLM": self.bare}

    def replica(self, scorers: list[Scorer]) -> RolloutReplica:
        """Another one on the started engine, which notes what it asks for, and when the last answer came."""
        new = RolloutReplica(self.cfg, 0, "cpu", scorers)
        new.tokenizer, new.stamp, new.engine = (
            self.started.tokenizer,
            (0, 0),
            SimpleNamespace(generate=self.recorded),
        )
        ask, make = new._generate, new._trajectory

        async def timed(*request: Any) -> Generated:
            out, self.last = await ask(*request), time.perf_counter()
            return out

        async def named(prompt: Prompt, index: int, how: Sampling) -> Any:
            self.who.set((prompt.id, index))
            return await make(prompt, index, how)

        new._generate, new._trajectory = timed, named
        return new

    def recorded(self, prompt: Any, params: Any, name: str) -> Any:
        """The engine's `generate`."""
        self.requests.setdefault(self.who.get(), []).append((prompt, params))
        return self.started.engine.generate(prompt, params, name)

    async def bare(self, *_: Any) -> None:
        """Each request after the one that it builds on."""

        async def alone(key: Any, turns: list[tuple[Any, Any]]) -> None:
            for turn, (prompt, params) in enumerate(turns):
                _ = [
                    out
                    async for out in self.started.engine.generate(prompt, params, f"{key} {turn}")
                ]
                self.last = time.perf_counter()

        await asyncio.gather(*(alone(*one) for one in self.requests.items()))

    async def seconds(self, arm: str) -> float:
        """One run of an arm."""
        await self.started.engine.reset_prefix_cache()
        if arm != "bare vLLM":
            self.requests.clear()
        begin = time.perf_counter()
        await self.arms[arm](self.prompts, self.how)
        return self.last - begin


async def on_vllm(repeats: int, reward_s: float) -> dict[str, dict[str, list[float]]]:
    """Seconds until the last token was made, by workload and arm, of each repeat; one of each before that warms up."""
    from one_step_off.runtime.launch import prepare

    cfg = load_config(
        [
            f"config={ROOT}/config/tool_agent.yaml",
            "data.train_batch_size=32",
            "actor.ppo_mini_batch_size=32",
        ]
    )
    prompts, most = prepare(cfg, print).data.stream.next_batch(), cfg.data.max_response_length
    cfg.data.max_response_length = LONG
    started = RolloutReplica(cfg, 0, "cpu", [])
    await started.start()
    await started.engine.update_weight_version("0.0")
    long = copy.deepcopy(cfg)
    long.agent.loop, long.rollout.sampling_kwargs = "single_turn", {"ignore_eos": True}
    short = Workload(cfg, started, prompts, Sampling(cfg.rollout.n, 1.0, 0, max_tokens=most))
    short.arms["agent loop, slow rewards"] = short.replica(
        [Scorer(reward_s) for _ in range(512)]
    ).rollout
    loads = {
        "conversations with a calculator": short,
        f"single turns of {LONG} tokens": Workload(long, started, prompts, Sampling(4, 1.0, 0)),
    }
    found = {name: {arm: [] for arm in one.arms} for name, one in loads.items()}
    for repeat in range(repeats + 1):
        for name, one in loads.items():
            for arm in one.arms:
                seconds = await one.seconds(arm)
                found[name][arm] += [seconds] if repeat else []
    await started.stop()
    return found


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(found: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "| rewards | generated, s | all scored, s | engine idle | CPU ms/turn | CPU ms/trajectory |"
    ]
    lines.append("| --- |" + " --- |" * 5)
    for arm in ("instant_rewards", "slow_rewards"):
        f = found[arm]
        figures = f"{f['generated_s']:.2f} | {f['whole_s']:.2f} | {f['engine_idle_share']:.1%}"
        lines.append(
            f"| {arm} | {figures} | {f['cpu_ms_per_turn']:.2f} | {f['cpu_ms_per_trajectory']:.2f} |"
        )
    lines.append(
        f"\n{found['conversations']} conversations, {found['turns']} turns, a stand-in for the engine with"
    )
    lines.append(
        f"{found['slots']} slots; bare it takes {found['bare_s']:.2f} s, so that the agent loop reaches"
    )
    lines.append(
        f"{found['throughput_ratio']:.3f} of its throughput. Slow rewards: {found['reward_s']} s."
    )
    lines += [
        "",
        "Median (range); the throughput is that of the bare engine in the same repeat, as 1.",
        "",
    ]
    lines += [
        "| with vLLM | arm | seconds until the last token | throughput |",
        "| --- |" + " --- |" * 3,
    ]
    for name, arms in found["vllm"].items():
        for arm, seconds in arms.items():
            ratios = [bare / own for bare, own in zip(arms["bare vLLM"], seconds, strict=True)]
            lines.append(f"| {name} | {arm} | {spread(seconds)} | {spread(ratios)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--reward-s", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from one_step_off.runtime.processes import COMMON_ENV, ENGINE_ENV

    os.environ.update(
        COMMON_ENV | ENGINE_ENV["cpu"]
    )  # as replicas have it; tokenizers, for one, behave by it
    found = measure(args.conversations, args.reward_s)
    found["vllm"] = asyncio.run(on_vllm(args.repeats, args.reward_s))
    (args.out / "result.json").write_text(json.dumps(found, indent=2) + "\n")
    (args.out / "result.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
