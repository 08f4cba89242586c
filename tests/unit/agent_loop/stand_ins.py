"""A scripted engine, and what the tests of agent loops share."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from agent_loop.base import Generated, Limits, Loops, ScoreFunction, Trajectory
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen

CHATML = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}"
    "<|start|>{{ 'ipython' if m['role'] == 'tool' else m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<|im_end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
USUAL_LIMITS = Limits(tokens=800, turns=8)
LONG_LIMITS = Limits(tokens=4000, turns=8)


def make_config(**agent_settings: Any) -> Config:
    """The tool loop, with these settings of `agent`."""
    cfg = Config()
    cfg.agent.loop = "tool"
    cfg.agent.tools = "calculator, python"
    cfg.agent.loop_kwargs = {"tool": {"taught": True}}
    for name, value in agent_settings.items():
        setattr(cfg.agent, name, value)
    return cfg


class ScriptedEngine:
    """Generates these turns, one after the other, by one version. `requests` has the token ids of
    each request."""

    def __init__(self, tokenizer: Any, *turns: str, version: int = 3) -> None:
        self.tokenizer = tokenizer
        self.turns = list(turns)
        self.version = version
        self.requests: list[list[int]] = []

    async def __call__(self, ids: np.ndarray, max_tokens: int) -> Generated:
        self.requests.append(ids.tolist())
        turn = self.tokenizer.encode(self.turns.pop(0)) + [self.tokenizer.eos_token_id]
        tokens = turn[:max_tokens]
        return Generated(
            np.array(tokens, np.int32),
            log_probs=-0.01 * np.arange(1, len(tokens) + 1, dtype=np.float32),
            versions=np.full(len(tokens), self.version, np.int32),
            attempt=0,
            finish_reason="stop" if tokens == turn else "length",
        )


def make_prompt(
    tokenizer: Any, question: str = "What is 12 * 13?", truth: str = "156", **extra: Any
) -> Prompt:
    ids = np.array(tiny_qwen.prompt_ids(tokenizer, question), np.int32)
    return Prompt((0, 0), ids, question, truth, extra=extra)


def run_loop(
    cfg: Config,
    tokenizer: Any,
    engine: Any,
    score: ScoreFunction | None = None,
    limits: Limits = USUAL_LIMITS,
    **prompt: Any,
) -> Trajectory:
    """One trajectory of the config's loop."""
    loop = Loops(cfg, tokenizer).get()
    given: Any = (make_prompt(tokenizer, **prompt), engine, score, limits)
    return asyncio.run(loop.run(*given))


def calculator_call(expression: str) -> str:
    """A turn of the policy that calls the calculator."""
    arguments = f'{{"expression": "{expression}"}}'
    return f' <tool_call>{{"name": "calculator", "arguments": {arguments}}}</tool_call>'


def observations(trajectory: Trajectory, tokenizer: Any) -> list[str]:
    """What the policy read between its turns."""
    return [tokenizer.decode(s.ids) for s in trajectory.segments if s.role != "assistant"]


FOUR_TURNS = (
    calculator_call("12 * 13"),
    calculator_call("1 +") + calculator_call("2 * 3"),
    " <tool_call>{oops</tool_call>",
    " #### 156",
)
