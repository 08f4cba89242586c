"""Token for token: random conversations over every API, with and without edited histories, give
samples that hold each turn once, under exactly the context in which the policy made it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_loop.episode import Episode
from one_step_off.config.schema import Config
from one_step_off.models import tiny_qwen
from tests.unit.endpoint.scripted_policy import PROMPT, ScriptedPolicy, make_serving
from tests.unit.endpoint.simulated_agents import (
    AGENTS,
    MessagesAgent,
    SimulatedAgent,
    TextAgent,
)

# Like Qwen3's: thoughts of earlier turns are stripped, and calls are written anew.
THINKING_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ (m.content or '').split('</think>')[-1] | trim }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=["tiny", "thinking"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    cfg = Config()
    cfg.model.dtype = "float32"
    cfg.model.path = tiny_qwen.build("qwen2", str(tmp_path_factory.mktemp("model")))
    if request.param == "thinking":
        tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=False)
        tokenizer.chat_template = THINKING_TEMPLATE
        tokenizer.save_pretrained(cfg.model.path)
    return make_serving(cfg)


def converse(serving: Any, agent: SimulatedAgent, policy: ScriptedPolicy, turns: int) -> Episode:
    async def main() -> Episode:
        episode = policy.episode()
        for _ in range(turns):
            answer = await serving.answer(episode, agent.path, agent.body())
            agent.receive(answer)
            for turn in answer.turns:
                turn.delivered = True
        return episode

    return asyncio.run(main())


def assert_trains_what_was_sampled(episode: Episode, policy: ScriptedPolicy) -> None:
    samples = episode.samples(PROMPT, 0)
    for context, answer, log_probs in policy.seen:
        places = 0
        for sample in samples:
            tokens = np.concatenate([sample.prompt_ids, sample.response_ids])
            begin = len(context) - len(sample.prompt_ids)
            own = slice(begin, begin + len(answer))
            if begin < 0 or not np.array_equal(tokens[: len(context)], context):
                continue
            if not sample.loss_mask[own].all() or len(sample.loss_mask[own]) < len(answer):
                continue
            is_answer = np.array_equal(sample.response_ids[own], answer)
            # Else another answer to the same context: an agent that edits may ask twice.
            places += is_answer and np.array_equal(sample.log_probs[own], log_probs)
        assert places == 1 or not len(answer)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert trained == sum(len(answer) for _, answer, _ in policy.seen)


@settings(max_examples=150)
@example(kind=MessagesAgent, seed=26565, turns=6, edits=True)  # asks twice with the same context
@given(
    kind=st.sampled_from(AGENTS),
    seed=st.integers(0, 10**6),
    turns=st.integers(1, 6),
    edits=st.booleans(),
)
def test_each_turn_is_trained_once_under_its_own_context(
    serving: Any, kind: type[SimulatedAgent], seed: int, turns: int, edits: bool
) -> None:
    policy = ScriptedPolicy(serving.chat.renderer.tokenizer, seed)
    agent = kind(seed, edits)
    episode = converse(serving, agent, policy, turns)
    assert_trains_what_was_sampled(episode, policy)
    if isinstance(agent, TextAgent):
        contexts = [serving.chat.renderer.tokenizer.decode(context) for context, *_ in policy.seen]
        assert contexts == agent.sent, "the policy saw another text than the agent sent"
    if not agent.edited:
        assert len(episode.segments()) == 1, "what the policy said was tokenized again"
