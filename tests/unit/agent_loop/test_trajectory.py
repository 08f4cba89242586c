"""Conversations in tokens: what is trained on, its versions, its limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_loop.base import Generated, Limits, Trajectory
from one_step_off.algorithms.advantages import estimate_advantages
from one_step_off.algorithms.trajectories import Options, Trajectories
from one_step_off.data.samples import NOT_GENERATED, Batch
from one_step_off.data.staleness import StalenessError, assert_staleness
from one_step_off.models import tiny_qwen
from tests.unit.agent_loop.stand_ins import (
    FOUR_TURNS,
    ScriptedEngine,
    make_config,
    make_prompt,
    observations,
    run_loop,
)


def four_turns_sample(tokenizer):
    trajectory = run_loop(make_config(), tokenizer, ScriptedEngine(tokenizer, *FOUR_TURNS))
    return trajectory.sample(make_prompt(tokenizer), 0)


def test_a_conversation_of_four_turns_in_tokens(tokenizer):
    engine = ScriptedEngine(tokenizer, *FOUR_TURNS)
    trajectory = run_loop(make_config(), tokenizer, engine)
    first, second, third = observations(trajectory, tokenizer)
    assert first == "\n156\nAnswer:"
    assert second.startswith("\nerror: SyntaxError")
    assert second.endswith("\n6\nAnswer:")
    assert third.startswith("\nerror: the call is not valid JSON")
    assert trajectory.facts == {"tool_calls": 4, "tool_errors": 2, "used_tools": 1}

    sample = trajectory.sample(make_prompt(tokenizer), 5)
    whole = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    for request in engine.requests:
        assert whole[: len(request)] == request, "every request continues the tokens before it"
    turns = [tokenizer.encode(turn) + [tokenizer.eos_token_id] for turn in FOUR_TURNS]
    trained = sample.loss_mask
    assert sample.response_ids[trained].tolist() == sum(turns, [])
    log_probs = np.concatenate([-0.01 * np.arange(1, len(turn) + 1) for turn in turns])
    np.testing.assert_allclose(sample.log_probs[trained], log_probs, rtol=1e-6)
    assert set(sample.versions[trained]) == {3}
    assert set(sample.versions[~trained]) == {NOT_GENERATED}
    assert not sample.log_probs[~trained].any()
    assert sample.extra["agent"]["turns"] == 4
    assert sample.finish_reason == "stop"


class ReadingEngine:
    """Answers with three tokens; the "experts" of a token that it reads are the number of the
    request. Without them where the number is in `silent`."""

    def __init__(self, silent: tuple[int, ...] = ()) -> None:
        self.silent = silent
        self.requests = 0

    async def __call__(self, ids: np.ndarray, max_tokens: int) -> Generated:
        self.requests += 1
        experts = np.full((len(ids) + 2, 1, 1), self.requests, np.uint8)
        if self.requests in self.silent:
            experts = None
        new = np.arange(3, dtype=np.int32)
        versions = np.zeros(3, np.int32)
        made = Generated(new, np.zeros(3, np.float32), versions, 0, "stop")
        return replace(made, experts=experts)


def conversation(engine: ReadingEngine) -> Trajectory:
    """Three turns with two tokens between them, after a prompt of four, and two tokens behind."""
    trajectory = Trajectory(np.arange(4, dtype=np.int32), Limits(tokens=100, turns=3))
    for _ in range(3):
        asyncio.run(trajectory.generate(engine))
        trajectory.observe("tool", np.arange(2, dtype=np.int32))
    return trajectory


def test_each_token_has_the_experts_of_the_request_that_read_it_first(tokenizer):
    sample = conversation(ReadingEngine()).sample(make_prompt(tokenizer), 0)
    assert sample.prompt_experts[:, 0, 0].tolist() == [1] * 4
    # The last token of a turn is read by the next request, and that of the last turn by none.
    assert sample.response_experts[:, 0, 0].tolist() == [1] * 2 + [2] * 5 + [3] * 5
    assert len(sample.experts) == sample.length - 1


@pytest.mark.parametrize("silent", [(3,), (1, 2, 3)])
def test_a_conversation_with_a_token_of_unknown_experts_has_none(tokenizer, silent):
    sample = conversation(ReadingEngine(silent)).sample(make_prompt(tokenizer), 0)
    assert sample.prompt_experts is sample.response_experts is sample.experts is None


def test_a_later_request_knows_the_experts_of_all_tokens_before_it(tokenizer):
    sample = conversation(ReadingEngine(silent=(1,))).sample(make_prompt(tokenizer), 0)
    assert sample.experts[:, 0, 0].tolist() == [2] * 11 + [3] * 5


def test_every_token_of_the_policy_is_checked_whether_trained_or_not(tokenizer):
    sample = four_turns_sample(tokenizer)
    batch = Batch(4, [sample], (0, 3))
    assert_staleness(batch)
    generated = int(np.flatnonzero(sample.loss_mask)[-1])
    observed = int(np.flatnonzero(~sample.loss_mask)[0])

    sample.versions[generated] = 2
    sample.loss_mask[generated] = False
    with pytest.raises(StalenessError, match=f"token {generated}"):
        assert_staleness(batch)

    sample.versions[generated] = 3
    sample.loss_mask[generated] = True
    sample.loss_mask[observed] = True  # trained on, though no weights made it
    with pytest.raises(StalenessError, match=f"token {observed}"):
        assert_staleness(batch)


def test_log_probs_of_a_conversation_are_those_of_one_forward_pass(tokenizer):
    """In fp32. The engine is a stand-in made of the same model, asked turn by turn; then the model
    scores the whole conversation once. So this is about what the loop hands on; the real engine is
    in tests/e2e/test_agent_loop.py."""
    model = tiny_qwen.build_model("qwen2", tokenizer, 1)
    script = ScriptedEngine(tokenizer, *FOUR_TURNS)
    generator = torch.Generator().manual_seed(0)

    def log_probs_of(ids: np.ndarray, start: int) -> np.ndarray:
        """The log-probs of the tokens from `start` on, in one forward pass."""
        with torch.no_grad():
            tokens = torch.tensor(ids[None], dtype=torch.long)
            logits = model(tokens, use_cache=False).logits[0]
        rows = torch.log_softmax(logits, -1)[start - 1 : -1]
        targets = torch.tensor(ids[start:], dtype=torch.long)
        return rows[torch.arange(len(targets)), targets].numpy()

    async def generate(ids, max_tokens):
        scripted = await script(ids, max_tokens)
        # Ids that the tokenizer itself would not make of this text: they must survive.
        noise = torch.randint(2, 300, (5,), generator=generator).numpy().astype(np.int32)
        turn = np.concatenate([noise, scripted.ids])
        log_probs = log_probs_of(np.concatenate([ids, turn]), len(ids))
        return Generated(turn, log_probs, np.zeros(len(turn), np.int32), 0, "stop")

    trajectory = run_loop(make_config(), tokenizer, generate)
    assert trajectory.turns == 4
    sample = trajectory.sample(make_prompt(tokenizer), 0)
    whole = np.concatenate([sample.prompt_ids, sample.response_ids])
    once = log_probs_of(whole, len(sample.prompt_ids))
    difference = np.abs(once - sample.log_probs)[sample.loss_mask]
    assert difference.mean() < 1e-5
    assert difference.max() < 1e-4
    turn_lengths = [5 + len(tokenizer.encode(turn)) + 1 for turn in FOUR_TURNS]
    assert sample.loss_mask.sum() == sum(turn_lengths)


def test_gae_steps_from_turn_to_turn_over_the_observations(tokenizer):
    mask = four_turns_sample(tokenizer).loss_mask
    gamma = 0.9
    lam = 0.8
    values = np.random.default_rng(0).normal(size=len(mask)).astype(np.float32)
    # The critic's values of observed tokens must not matter.
    values_with_noise = np.where(mask, values, 1e6).astype(np.float32)
    batch = Trajectories(np.array([1.0]), [0], [mask], values=[values_with_noise])
    advantages, _ = estimate_advantages("gae", batch, Options(gamma, lam, True), whiten=False)

    trained_values = values[mask].astype(float)
    expected = []
    next_advantage = 0.0
    next_value = 0.0
    for t in reversed(range(len(trained_values))):
        reward = float(t == len(trained_values) - 1)
        delta = reward + gamma * next_value - trained_values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = trained_values[t]
        expected.append(next_advantage)
    np.testing.assert_allclose(advantages[0][mask], expected[::-1], rtol=1e-5)
    assert not advantages[0][~mask].any()


FIRST_TURN_TOKENS = len(tiny_qwen.build_tokenizer().encode(FOUR_TURNS[0])) + 1


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        (Limits(400, 2), "turns", 2),
        (Limits(30, 8), "length", 1),
        # The answer is whole; the observation does not fit.
        (Limits(FIRST_TURN_TOKENS + 2, 8), "room", 1),
        (Limits(400, 8, turn_tokens=10), "turn_length", 1),
        (Limits(400, 8, seconds=0.0), "time", 0),
    ],
)
def test_limits_end_a_conversation_and_are_its_finish_reason(tokenizer, limits, reason, turns):
    engine = ScriptedEngine(tokenizer, *FOUR_TURNS)
    trajectory = run_loop(make_config(), tokenizer, engine, limits=limits)
    assert trajectory.finish_reason == reason
    assert trajectory.turns == turns
    assert trajectory.length <= limits.tokens
    if turns:
        sample = trajectory.sample(make_prompt(tokenizer), 0)
        assert sample.loss_mask[-1], "what came after the last turn of the policy is left out"
    else:
        with pytest.raises(RuntimeError, match="without a turn of the policy"):
            trajectory.sample(make_prompt(tokenizer), 0)
