"""What external agents' conversations record is what the trainer's model says of those tokens."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
import torch

from agent_loop.base import Limits
from agent_loop.episode import Episode
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt, Sample
from one_step_off.models import tiny_qwen
from one_step_off.rollout.sampling import Sampling
from tests.unit.endpoint.simulated_agents import AGENTS, SimulatedAgent

CONVERSATIONS = 30  # of each API
VERSION = 4
# Nats. Other kernels compute the same fp32 weights, and vLLM's batches differ from run to run: the
# largest difference was 0.9e-5 to 2.4e-5. Another weight version, position or dtype would differ by
# 1e-3 or more.
TOLERANCE = 1e-4


async def converse(replica: Any, serving: Any, agent: SimulatedAgent, number: int) -> list[Sample]:
    """One conversation; returns its samples."""
    prompt = Prompt((0, number), np.array([1], np.int32), "q", "a")

    async def generate(ids: np.ndarray, most: int, stop: tuple[str, ...] = ()) -> Any:
        return await replica._generate(ids, most, None, Sampling(1, 1.0, None, stop=stop))

    limits = Limits(tokens=500, turns=20)
    episode = Episode(f"ose-0-{number:06d}", prompt, generate, limits, max_sequence=640)
    for _ in range(4):
        answer = await serving.answer(episode, agent.path, agent.body())
        assert answer.status == 200, answer.chunks
        if episode.limit_reached == "length":
            break
        agent.receive(answer)
        for turn in answer.turns:
            turn.delivered = True
    if not agent.edited:
        assert len(episode.segments()) == 1
    return episode.samples(prompt, 0)


async def all_samples(cfg: Config) -> list[Sample]:
    from one_step_off.rollout.replica import RolloutReplica

    replica = RolloutReplica(cfg, 0, "cpu", [])
    engine: Any = replica.engine
    await replica.start()
    try:
        await engine.resume((0, VERSION))
        serving = engine.agent_serving(replica.tokenizer)
        conversations = []
        for kind in AGENTS:
            for seed in range(CONVERSATIONS):
                agent = kind(seed, edits=seed % 2 == 1)
                conversations.append(converse(replica, serving, agent, len(conversations)))
        return [sample for samples in await asyncio.gather(*conversations) for sample in samples]
    finally:
        await replica.stop()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.ci
def test_recorded_log_probs_equal_a_forward_pass(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    from one_step_off.runtime.process_env import COMMON_ENV, ENGINE_ENV

    for name, value in (COMMON_ENV | ENGINE_ENV["cpu"]).items():
        monkeypatch.setitem(os.environ, name, value)
    cfg = Config()
    cfg.model.path = tiny_qwen.ensure("tiny:tools")
    cfg.model.dtype = "float32"
    cfg.data.max_prompt_length = 128
    cfg.data.max_response_length = 512
    cfg.rollout.kv_cache_mb = 64
    samples = asyncio.run(all_samples(cfg))
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model.path, dtype=torch.float32, trust_remote_code=False
    )
    largest = 0.0
    trained = 0
    for sample in samples:
        ids = np.concatenate([sample.prompt_ids, sample.response_ids])
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            log_probs = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(1, tokens[1:, None])[:, 0].numpy()
        of_response = chosen[len(sample.prompt_ids) - 1 :]
        mask = sample.loss_mask
        assert (sample.versions[mask] == VERSION).all()
        assert not sample.log_probs[~mask].any()
        difference = np.abs(of_response[mask] - sample.log_probs[mask])
        largest = max(largest, float(difference.max(initial=0.0)))
        trained += int(mask.sum())
    assert trained > 5000
    assert largest < TOLERANCE
