"""vLLM's serving classes without an engine, and a policy that says what a script says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.base import Limits
from agent_loop.episode import Episode
from agent_loop.trajectory import Generated
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines.vllm.chat.trial_serving import serving_without_engine

PROMPT = Prompt((0, 7), np.array([3, 4], np.int32), "q", "156")


def make_serving(cfg: Config) -> Any:
    """`Serving` as in a replica, with vLLM's renderer and parsers; only the engine is missing."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, trust_remote_code=False)
    return serving_without_engine(cfg, tokenizer)


@dataclass
class ScriptedPolicy:
    """Says `texts` in order, or at random what policies say: answers, calls good and broken,
    thoughts, nothing at all, and turns that are cut off.

    Attributes:
        seen: (context, answer, log-probs) of each turn, as the engine had them.
    """

    tokenizer: Any
    seed: int = 0
    texts: list[str] | None = None
    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def next_text(self) -> str:
        if self.texts is not None:
            return self.texts.pop(0)
        call = '<tool_call>{"name": "calculator", "arguments": {"expression":  "3*4"}}</tool_call>'
        thought = "<think>\nlet me see\n</think>\n\n"
        answers = (" #### 12", "12 ", "", " so  be it\n", "Straße 十", " <tool_call>{broken")
        text = self.rng.choice(answers)
        if self.rng.random() < 0.4:
            text = self.rng.choice(["", " ", "Let me compute. "]) + call
            if self.rng.random() < 0.3:
                text += "\n" + call
        if self.rng.random() < 0.2:
            text = thought + text
        return text + (self.rng.choice(["<|im_end|>", "<|im_end|>", ""]) if text else "<|im_end|>")

    async def generate(
        self, ids: np.ndarray, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> Generated:
        answer = np.array(self.tokenizer.encode(self.next_text()), np.int32)[:max_tokens]
        ended = len(answer) > 0 and answer[-1] == self.tokenizer.eos_token_id
        log_probs = -np.array([self.rng.random() for _ in answer], np.float32)
        self.seen.append((ids.copy(), answer, log_probs))
        versions = np.full(len(answer), len(self.seen), np.int32)
        return Generated(answer, log_probs, versions, 0, "stop" if ended else "length")

    def episode(self, limits: Limits | None = None, max_sequence: int = 1536) -> Episode:
        """An episode with this policy."""
        limits = limits or Limits(tokens=1024, turns=50)
        return Episode("ose-0-key", PROMPT, self.generate, limits, max_sequence)
