"""Every request of an engine with the adapters apart carries the adapter."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from one_step_off.config.schema import Config
from one_step_off.engines.vllm.engine import VllmEngine, request_of_policy
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.weight_sync.base_weights import ADAPTER_ID
from tests.unit.rollout.stand_ins import UNSEEDED

IDS = np.arange(3, dtype=np.int32)


class RecordingEngine:
    """Answers each request with one token, and keeps what it carried."""

    def __init__(self) -> None:
        self.carried: list[Any] = []

    async def generate(self, prompt: Any, params: Any, name: str, lora_request: Any):
        self.carried.append(lora_request)
        rows = [None, *({int(token): SimpleNamespace(logprob=-1.0)} for token in IDS[1:])]
        log_probs = SimpleNamespace(logprobs=[-1.0], start_indices=[0])
        completion = SimpleNamespace(
            token_ids=[1],
            logprobs=log_probs,
            finish_reason="length",
            weight_versions=[SimpleNamespace(version="0.1", start=0, end=1)],
            spec_decode_metrics=None,
        )
        yield SimpleNamespace(outputs=[completion], prompt_logprobs=rows, kv_transfer_params=None)


async def generate_and_score(lora: str) -> list[Any]:
    cfg = Config()
    cfg.model.lora_rank = 8
    cfg.weight_sync.lora = lora
    replica = RolloutReplica(cfg, 0, "cpu", [])
    replica.engine = engine = VllmEngine(cfg, "cpu")
    engine.llm = RecordingEngine()
    engine.lora_request = request_of_policy(cfg)
    await replica._generate(IDS, 1, None, UNSEEDED)
    await replica.score([IDS])
    return engine.llm.carried


def test_rollouts_and_the_canary_carry_the_adapter():
    carried = asyncio.run(generate_and_score("adapter"))
    assert [request.lora_int_id for request in carried] == [ADAPTER_ID, ADAPTER_ID]
    # vLLM would load anew, from a path that is none.
    assert not any(request.load_inplace for request in carried)


def test_merged_weights_need_none():
    assert asyncio.run(generate_and_score("merged")) == [None, None]
