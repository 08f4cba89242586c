"""rollout.replay_routing through real engines: each token's experts are those that its request
used, whatever the engine had in its cache, and the trainer takes them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from one_step_off.checkpoint import finished, read_samples
from one_step_off.engines.engine import GenerationRequest
from one_step_off.runtime.process_env import CPU_ENGINE_ENV, process_env
from tests.conftest import tiny_config
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import model_weights, read_rows
from tests.e2e.test_agent_loop import config_of_two_loops
from tests.unit.models.test_router_replay import recorded_choice

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDING = 1e-5  # nats, float32; another expert shows as 1e-3 and more
PROMPT_TOKENS = 70  # more than two blocks of the KV cache
ANSWER_TOKENS = 50
REQUESTS = 12


def test_conversations_train_with_the_experts_of_their_requests(models, tmp_path):
    """Several turns with observations between them. In the first step theta is mu."""
    from one_step_off.runtime import launch

    model = models("qwen3_moe")
    cfg = config_of_two_loops(model, tmp_path, "vllm", 1)
    cfg.rollout.replay_routing = True
    assert launch.run(cfg) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert len(rows) == 3
    assert {row["actor/replayed_share"] for row in rows} == {1.0}
    assert max(row["canary/logprob_diff_max"] for row in rows) < ROUNDING
    assert rows[0]["logprob_diff/max"] < ROUNDING
    assert min(row["agent/turns/mean"] for row in rows) > 1.5

    samples = read_samples(finished(tmp_path / "checkpoints")[0])
    for sample in samples:
        assert sample.experts.dtype == np.uint8
        assert sample.experts.shape == (sample.length - 1, 2, 2)
        assert (sample.experts[..., 0] != sample.experts[..., 1]).all()
    shared = {id(sample.prompt_experts) for sample in samples}
    assert len(shared) < len(samples)

    stored = load_file(f"{model}/model.safetensors")
    trained = model_weights(tmp_path)
    learned = [name for name in stored if not torch.equal(stored[name], trained[name])]
    assert any(".experts." in name for name in learned)
    assert any(name.endswith("mlp.gate.weight") for name in learned)


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_samples_of_several_versions_have_the_experts_of_all(models, tmp_path, in_flight):
    """As tests/e2e/test_staleness.py: a sync comes in the middle of a step's samples."""
    from one_step_off.runtime import launch

    settings: dict[str, Any] = {
        "rollout.replay_routing": True,
        "pipeline.staleness": 2,
        "weight_sync.in_flight": in_flight,
        "agent.max_concurrency": 4,
        "data.max_response_length": 256,
        "algorithm.old_log_probs": "recompute",
        "algorithm.rollout_correction": "tis",
        "trainer.total_steps": 5,
        "reward.function": LETTER_SHARE,
    }
    assert launch.run(tiny_config(models("qwen3_moe"), str(tmp_path), **settings)) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert max(row["carry/interrupted"] for row in rows) > 0
    assert {row["actor/replayed_share"] for row in rows} == {1.0}
    assert rows[0]["logprob_diff/max"] < ROUNDING


class Expected:
    """The experts that transformers' model chooses for the tokens of a request."""

    def __init__(self, path: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.eval()

    def check(self, ids: np.ndarray, made: Any) -> None:
        whole = np.concatenate([ids, made.ids])
        chosen = recorded_choice(self.model, torch.from_numpy(whole).long()[None])[:-1]
        found = np.sort(made.experts.astype(np.int16), -1)
        assert np.array_equal(found, np.sort(chosen.numpy(), -1))


def request(ids: np.ndarray, seed: int) -> GenerationRequest:
    return GenerationRequest(ids, ANSWER_TOKENS, 1.0, seed=seed)


async def check_engine(engine: Any, expected: Expected) -> None:
    await engine.start()
    assert "router replay: 4 bytes per token" in engine.start_note
    await engine.llm.collective_rpc("return_experts")
    await engine.resume((0, 0))
    rng = np.random.default_rng(0)
    prefix = rng.integers(10, 300, PROMPT_TOKENS).astype(np.int32)
    first = await engine.generate(request(prefix, 1))
    expected.check(prefix, first)
    # The same prompt comes from the cache, and so does most of a conversation that goes on.
    again = await engine.generate(request(prefix, 2))
    expected.check(prefix, again)
    longer = np.concatenate([prefix, again.ids, prefix[:5]]).astype(np.int32)
    expected.check(longer, await engine.generate(request(longer, 3)))
    # The client ends this one, in the middle of what the engine has made.
    stopped = await engine.generate(replace(request(prefix, 4), stop=("e",)))
    assert len(stopped.ids) < ANSWER_TOKENS
    expected.check(prefix, stopped)
    # More tokens at once than the cache holds, so that requests are preempted; and a pause in the
    # middle, after which what was computed is computed again or kept.
    for clear_cache in (True, False):
        prompts = [rng.integers(10, 300, PROMPT_TOKENS).astype(np.int32) for _ in range(REQUESTS)]
        tasks = []
        for number, ids in enumerate(prompts):
            tasks.append(asyncio.create_task(engine.generate(request(ids, number))))
        await asyncio.sleep(0.1)
        await engine.pause(wait=False, clear_cache=clear_cache)
        await engine.resume((0, 1))
        for ids, made in zip(prompts, await asyncio.gather(*tasks), strict=True):
            expected.check(ids, made)


def test_an_engine_returns_what_its_routers_chose(models, tmp_path, monkeypatch):
    from one_step_off.engines.vllm.engine import VllmEngine

    for name, value in {**process_env("cpu", "127.0.0.1"), **CPU_ENGINE_ENV}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    model = models("qwen3_moe")
    settings: dict[str, Any] = {
        "rollout.replay_routing": True,
        "data.max_response_length": 64,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "rollout.kv_cache_mb": 2,  # 1024 tokens of 2 kB, and the requests have 1440
        "rollout.engine_kwargs": {
            "worker_extension_cls": "tests.routing_engine.SyncWorkerExtension"
        },
    }
    engine = VllmEngine(tiny_config(model, str(tmp_path), **settings), "cpu")
    try:
        asyncio.run(asyncio.wait_for(check_engine(engine, Expected(model)), 240))
    finally:
        engine.shutdown()
