"""The agent loop on vLLM, against the same requests given to the engine alone."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from agent_loop.base import Generated
from benchmarks.agent_loop.endpoint import EndpointArm
from benchmarks.agent_loop.stand_in_engine import RewardWorker
from benchmarks.common.paths import config_path
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines.vllm.engine import VllmEngine
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling

AGENT_LOOP = "agent loop"
BARE_VLLM = "bare vLLM"
ENDPOINT = "endpoint"
SLOW_REWARDS = "agent loop, slow rewards"
SLOW_REWARD_WORKERS = 512
SINGLE_TURN_TOKENS = 128
SINGLE_TURNS = f"single turns of {SINGLE_TURN_TOKENS} tokens"


@dataclass(frozen=True)
class EngineRequest:
    """What the agent loop gave to the engine."""

    prompt: Any
    params: Any


class Workload:
    """Trajectories through the agent loop, and the requests that they made.

    Attributes:
        arms: arm -> what runs it. "bare vLLM" repeats the requests of the arm before it.
    """

    def __init__(
        self, cfg: Config, started: RolloutReplica, prompts: list[Prompt], sampling: Sampling
    ) -> None:
        self.cfg = cfg
        self.started = started
        started_engine: Any = started.engine
        self.llm = started_engine.llm
        self.prompts = prompts
        self.sampling = sampling
        self.current_trajectory = contextvars.ContextVar("current_trajectory")
        self.last_answer_at = 0.0
        self.requests: dict[Any, list[EngineRequest]] = {}
        loop = self.recording_replica([RewardWorker(0.0)])
        self.arms: dict[str, Callable[..., Awaitable[Any]]] = {
            AGENT_LOOP: loop.rollout,
            BARE_VLLM: self.repeat_requests,
        }

    def recording_replica(self, reward_workers: list[RewardWorker]) -> RolloutReplica:
        """Another replica on the started engine, which records its requests and the last answer."""
        replica = RolloutReplica(self.cfg, 0, "cpu", reward_workers)
        replica.tokenizer = self.started.tokenizer
        replica.stamp = (0, 0)
        replica.engine = engine = VllmEngine(self.cfg, "cpu")
        engine.llm = SimpleNamespace(generate=self.generate_recorded)
        generate = replica._generate
        make_trajectory = replica._trajectory

        async def generate_timed(*request: Any) -> Generated:
            generated = await generate(*request)
            self.note_answer()
            return generated

        async def make_named_trajectory(prompt: Prompt, index: int, sampling: Sampling) -> Any:
            self.current_trajectory.set((prompt.id, index))
            return await make_trajectory(prompt, index, sampling)

        replica._generate = generate_timed
        replica._trajectory = make_named_trajectory
        return replica

    def generate_recorded(
        self, prompt: Any, params: Any, request_id: str, lora_request: Any = None
    ) -> Any:
        """Record the request of the current trajectory, and give it to the engine."""
        requests = self.requests.setdefault(self.current_trajectory.get(), [])
        requests.append(EngineRequest(prompt, params))
        return self.llm.generate(prompt, params, request_id, lora_request=lora_request)

    async def repeat_requests(self, *_: Any) -> None:
        """Give the recorded requests to the engine, each after the one that it builds on."""

        async def repeat(trajectory: Any, requests: list[EngineRequest]) -> None:
            for turn, request in enumerate(requests):
                request_id = f"{trajectory} {turn}"
                answers = self.llm.generate(request.prompt, request.params, request_id)
                async for _ in answers:
                    pass
                self.note_answer()

        await asyncio.gather(*(repeat(*item) for item in self.requests.items()))

    def note_answer(self) -> None:
        """The engine has given an answer."""
        self.last_answer_at = time.perf_counter()

    async def run(self, arm: str) -> float:
        """Run an arm once. Returns the seconds until the last token."""
        await self.llm.reset_prefix_cache()
        if arm not in (BARE_VLLM, ENDPOINT):
            self.requests.clear()
        begin = time.perf_counter()
        await self.arms[arm](self.prompts, self.sampling)
        return self.last_answer_at - begin


def make_workloads(
    cfg: Config, started: RolloutReplica, prompts: list[Prompt], max_tokens: int, reward_s: float
) -> dict[str, Workload]:
    """Conversations with a calculator, and single turns of a more usual length.

    Args:
        cfg: config of the conversations.
        started: the replica with the engine.
        prompts: of both.
        max_tokens: of a turn of a conversation.
        reward_s: seconds of a slow reward.
    """
    conversation_sampling = Sampling(cfg.rollout.n, 1.0, 0, max_tokens=max_tokens)
    conversations = Workload(cfg, started, prompts, conversation_sampling)
    slow_workers = [RewardWorker(reward_s) for _ in range(SLOW_REWARD_WORKERS)]
    conversations.arms[SLOW_REWARDS] = conversations.recording_replica(slow_workers).rollout
    single_turn_cfg = copy.deepcopy(cfg)
    single_turn_cfg.agent.loop = "single_turn"
    single_turn_cfg.rollout.sampling_kwargs = {"ignore_eos": True}
    single_turns = Workload(single_turn_cfg, started, prompts, Sampling(4, 1.0, 0))
    return {
        "conversations with a calculator": conversations,
        SINGLE_TURNS: single_turns,
    }


async def measure(repeats: int, reward_s: float) -> dict[str, dict[str, list[float]]]:
    """Workload -> arm -> seconds until the last token, of each repeat. A first repeat warms up."""
    from one_step_off.runtime.prepare import prepare

    cfg = load_config(
        [
            f"config={config_path('tool_agent.yaml')}",
            "data.train_batch_size=32",
            "actor.ppo_mini_batch_size=32",
        ]
    )
    prompts = prepare(cfg, print).data.stream.next_batch()
    conversation_tokens = cfg.data.max_response_length
    cfg.data.max_response_length = SINGLE_TURN_TOKENS
    started = RolloutReplica(cfg, 0, "cpu", [])
    await started.start()
    await started.engine.resume((0, 0))
    workloads = make_workloads(cfg, started, prompts, conversation_tokens, reward_s)
    single_turns = workloads[SINGLE_TURNS]
    endpoint = EndpointArm(single_turns.cfg, started, single_turns.note_answer)
    single_turns.arms[ENDPOINT] = endpoint.rollout
    async with endpoint.serving():
        found = await _alternate(workloads, repeats)
    await started.stop()
    return found


async def _alternate(
    workloads: dict[str, Workload], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """See `measure`."""
    found: dict[str, dict[str, list[float]]] = {
        name: {arm: [] for arm in workload.arms} for name, workload in workloads.items()
    }
    for repeat in range(repeats + 1):
        for name, workload in workloads.items():
            for arm in workload.arms:
                seconds = await workload.run(arm)
                if repeat > 0:
                    found[name][arm].append(seconds)
    return found
