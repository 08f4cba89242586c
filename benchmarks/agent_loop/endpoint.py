"""Single turns through the endpoint: the agents are coroutines of another process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from agent_loop.base import Generated
from agent_loop.external import ExternalLoop
from benchmarks.agent_loop import single_turn_agent
from benchmarks.agent_loop.stand_in_engine import RewardWorker
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt, Sample
from one_step_off.endpoint.episodes import make_service_key
from one_step_off.endpoint.replica_server import EndpointAccess, ReplicaServer
from one_step_off.engines.vllm.engine import VllmEngine
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling


class EndpointArm:
    """Another replica on a started engine, whose loop is `external`."""

    def __init__(
        self, cfg: Config, started: RolloutReplica, note_answer: Callable[[], None]
    ) -> None:
        """
        Args:
            cfg: of single turns.
            started: the replica with the engine.
            note_answer: called with each answer of the engine.
        """
        self.cfg = copy.deepcopy(cfg)
        self.cfg.agent.loop = "external"
        self.cfg.agent.command = f"{single_turn_agent.__name__}:run"
        self.started = started
        self.note_answer = note_answer

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """The endpoint of the replica, during the block."""
        data = self.cfg.data
        access = EndpointAccess("", make_service_key())
        longest = data.max_prompt_length + data.max_response_length
        self.endpoint = ReplicaServer(0, access, longest)
        started_engine: Any = self.started.engine
        self.endpoint.serving = started_engine.agent_serving(self.started.tokenizer)
        await self.endpoint.start("127.0.0.1")
        self.replica = RolloutReplica(self.cfg, 0, "cpu", [RewardWorker(0.0)])
        self.replica.tokenizer = self.started.tokenizer
        self.replica.stamp = (0, 0)
        self.replica.engine = engine = VllmEngine(self.cfg, "cpu")
        engine.llm = SimpleNamespace(generate=started_engine.llm.generate)
        self.replica.endpoint = self.endpoint
        generate = self.replica._generate

        async def generate_timed(*request: Any) -> Generated:
            generated = await generate(*request)
            self.note_answer()
            return generated

        self.replica._generate = generate_timed
        try:
            yield
        finally:
            loop = self.replica.loops.get()
            if isinstance(loop, ExternalLoop) and loop.hosts is not None:
                loop.hosts.close()
            await self.endpoint.stop()

    async def rollout(self, prompts: list[Prompt], sampling: Sampling) -> list[Sample]:
        """All samples, through the endpoint.

        Raises:
            RuntimeError: they are not those of the same requests.
        """
        samples = await self.replica.rollout(prompts, sampling)
        ids = {prompt.id: prompt.ids for prompt in prompts}
        for sample in samples:
            if not np.array_equal(sample.prompt_ids, ids[sample.prompt_id]):
                raise RuntimeError(f"prompt {sample.prompt_id}: the policy saw other tokens")
        return samples
