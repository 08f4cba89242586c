"""rollout.speculation through a real engine: what comes back is what the policy would have sampled,
with the policy's log-probs, whatever was proposed."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from agent_loop.trajectory import Generated
from one_step_off.engines.engine import GenerationRequest
from one_step_off.runtime import launch
from one_step_off.runtime.process_env import CPU_ENGINE_ENV, process_env
from tests.conftest import tiny_config
from tests.e2e.run_folder import read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TEMPERATURE = 0.25  # at which a random model repeats itself, and not always
ROUNDING = 2e-5  # nats, float32
BLOCK_TOKENS = 32
SAMPLES = 1500
SHORT = 3  # tokens; the first one is made with the prompt, without draft tokens


class Policy:
    """The same model in transformers."""

    def __init__(self, path: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.eval()

    def log_probs(self, rows: np.ndarray, temperature: float = TEMPERATURE) -> torch.Tensor:
        """Of the next token at each place, [B, T, V]."""
        with torch.no_grad():
            logits = self.model(torch.from_numpy(rows).long()).logits
        return (logits / temperature).log_softmax(-1)

    def check(self, ids: np.ndarray, made: Generated) -> None:
        """The log-probs of a response are those of the policy."""
        whole = np.concatenate([ids, made.ids])[None]
        expected = self.log_probs(whole)[0, len(ids) - 1 : -1]
        expected = expected.gather(-1, torch.from_numpy(made.ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(made.log_probs, expected.numpy(), atol=ROUNDING)

    def check_greedy(self, ids: np.ndarray, made: Generated) -> None:
        """Each token of a response is the likeliest one, where rounding leaves one."""
        whole = np.concatenate([ids, made.ids])[None]
        rows = self.log_probs(whole, 1.0)[0, len(ids) - 1 : -1]
        found = rows.gather(-1, torch.from_numpy(made.ids).long()[:, None])[:, 0]
        np.testing.assert_allclose(found.numpy(), rows.max(-1).values.numpy(), atol=ROUNDING)

    def with_likeliest(self, ids: np.ndarray, count: int) -> np.ndarray:
        """The token ids and those that the policy is most likely to add: a loop."""
        for _ in range(count):
            ids = np.append(ids, self.log_probs(ids[None])[0, -1].argmax().numpy())
        return ids.astype(np.int32)

    def short_responses(self, ids: np.ndarray) -> list[tuple[int, ...]]:
        """True samples."""
        rng = torch.Generator().manual_seed(0)
        rows = np.repeat(ids[None], SAMPLES, 0)
        for _ in range(SHORT):
            chances = self.log_probs(rows)[:, -1].exp()
            tokens = torch.multinomial(chances, 1, generator=rng).numpy()
            rows = np.concatenate([rows, tokens.astype(np.int32)], 1)
        return [tuple(row) for row in rows[:, len(ids) :].tolist()]

    def distance(self, ids: np.ndarray, responses: list[tuple[int, ...]]) -> float:
        """The total variation between short responses and the policy's distribution."""
        counts = Counter(responses)
        seen = np.array(list(counts), np.int32)
        rows = np.concatenate([np.repeat(ids[None], len(seen), 0), seen], 1)
        log_probs = self.log_probs(rows)[:, len(ids) - 1 : -1]
        chosen = log_probs.gather(-1, torch.from_numpy(seen).long()[..., None])[..., 0]
        chances = chosen.sum(-1).exp().numpy()
        shares = np.array(list(counts.values())) / len(responses)
        return float((np.abs(shares - chances).sum() + 1 - chances.sum()) / 2)


def request(ids: np.ndarray, seed: int | None, tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(ids, tokens, TEMPERATURE, seed=seed)


def prompts_that_repeat(count: int) -> list[np.ndarray]:
    """Of different lengths; one leaves a single token after the last whole block of the cache."""
    rng = np.random.default_rng(0)
    lengths = [BLOCK_TOKENS + 1, *range(12, 12 + count - 1)]
    return [np.resize(rng.integers(10, 300, 4), length).astype(np.int32) for length in lengths]


async def check_responses(engine: Any, policy: Policy) -> None:
    prompts = prompts_that_repeat(12)
    requests = [request(ids, seed, 40 + seed) for seed, ids in enumerate(prompts)]
    made = await asyncio.gather(*map(engine.generate, requests))
    for asked, response in zip(requests, made, strict=True):
        assert len(response.ids) == asked.max_tokens, "ignore_eos"
        assert response.finish_reason == "length"
        policy.check(asked.ids, response)
    proposed, accepted = np.sum([response.draft_tokens for response in made], 0)
    assert 50 < accepted < proposed
    # A seeded sample does not depend on its neighbours.
    for asked, response in list(zip(requests, made, strict=True))[:4]:
        alone = await engine.generate(asked)
        assert alone.ids.tolist() == response.ids.tolist()
    greedy = [replace(asked, temperature=0.0) for asked in requests]
    made = await asyncio.gather(*map(engine.generate, greedy))
    for asked, response in zip(greedy, made, strict=True):
        policy.check_greedy(asked.ids, response)
    assert sum(response.draft_tokens[1] for response in made) > 50
    # Words to stop at are found in the middle of what one step has made.
    stopping = [replace(asked, stop=("e", "1", "a")) for asked in requests]
    made = await asyncio.gather(*map(engine.generate, stopping))
    assert {response.finish_reason for response in made} == {"stop", "length"}
    for asked, response in zip(stopping, made, strict=True):
        policy.check(asked.ids, response)


async def check_versions(engine: Any, policy: Policy) -> None:
    """Pauses in the middle of responses, after which keys and values are computed again or kept."""
    for clear_cache in (True, False):
        prompts = prompts_that_repeat(6)
        requests = [request(ids, seed, 60) for seed, ids in enumerate(prompts)]
        await engine.resume((0, 0))
        tasks = [asyncio.create_task(engine.generate(asked)) for asked in requests]
        await engine.generate(request(prompts[0], 0, 6))  # the others have about as many tokens
        await engine.pause(wait=False, clear_cache=clear_cache)
        await engine.resume((0, 1))
        made = await asyncio.gather(*tasks)
        for asked, response in zip(requests, made, strict=True):
            policy.check(asked.ids, response)
            assert (np.diff(response.versions) >= 0).all()
        assert {0, 1} == set(np.concatenate([response.versions for response in made]).tolist())


async def check_distribution(engine: Any, policy: Policy) -> None:
    ids = policy.with_likeliest(np.array([5, 6, 7, 8] * 3, np.int32), 24)
    tasks = [engine.generate(request(ids, seed, SHORT)) for seed in range(SAMPLES)]
    made = await asyncio.gather(*tasks)
    responses = [tuple(response.ids.tolist()) for response in made]
    found = policy.distance(ids, responses)
    true_samples = policy.short_responses(ids)
    expected = policy.distance(ids, true_samples)
    proposed, accepted = np.sum([response.draft_tokens for response in made], 0)
    assert len(set(true_samples)) > 20
    assert 0.1 < accepted / proposed < 0.9
    assert found < 1.25 * expected


async def check_scores(engine: Any, policy: Policy) -> None:
    """The canary's half of an engine."""
    for ids in prompts_that_repeat(4):
        found = await engine.score(ids)
        rows = policy.log_probs(ids[None], 1.0)[0, :-1]
        expected = rows.gather(-1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
        np.testing.assert_allclose(found, expected.numpy(), atol=ROUNDING)


async def check_engine(engine: Any, policy: Policy) -> None:
    await engine.start()
    await engine.resume((0, 0))
    for check in (check_responses, check_versions, check_distribution, check_scores):
        await check(engine, policy)


@pytest.mark.slow
def test_a_run_trains_on_draft_tokens(models, tmp_path):
    """Weights arrive in the middle of samples. They stay what they were, so that the trainer's
    log-probs of all tokens are the engine's."""
    settings: dict[str, Any] = {
        "rollout.speculation": "ngram",
        "rollout.temperature": TEMPERATURE,
        "pipeline.staleness": 2,
        "weight_sync.in_flight": "recompute",
        "agent.max_concurrency": 4,
        "data.max_response_length": 128,
        "actor.lr": 0.0,
    }
    assert launch.run(tiny_config(models("qwen2"), str(tmp_path), **settings)) == 0
    rows = read_rows(tmp_path, "metrics.jsonl")
    assert len(rows) == 3
    assert max(row["logprob_diff/max"] for row in rows) < ROUNDING
    assert max(row["carry/interrupted"] for row in rows) > 0
    assert all(0 < row["rollout/acceptance_rate"] < 1 for row in rows)
    assert all(1.2 < row["rollout/acceptance_length"] <= 5 for row in rows)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollout/acceptance_length"] > 1.2


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_speculation_changes_no_probability(models, tmp_path, monkeypatch, method):
    from one_step_off.engines.vllm.engine import VllmEngine

    for name, value in {**process_env("cpu", "127.0.0.1"), **CPU_ENGINE_ENV}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    model = models("qwen2")
    settings: dict[str, Any] = {
        "rollout.speculation": method,
        "data.max_prompt_length": 64,
        "data.max_response_length": 64,
        "rollout.sampling_kwargs": {"ignore_eos": True},
    }
    engine = VllmEngine(tiny_config(model, str(tmp_path), **settings), "cpu")
    try:
        asyncio.run(asyncio.wait_for(check_engine(engine, Policy(model)), 240))
    finally:
        engine.shutdown()
