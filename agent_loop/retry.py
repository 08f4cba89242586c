"""Try again: the verifier says wrong, the model tries once more."""

from __future__ import annotations

from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off.config import Config
from one_step_off.samples import Prompt

AGAIN = "That is wrong. Try again."


@LOOPS.register("retry_with_feedback")
class RetryWithFeedback(AgentLoop):
    """Up to `agent.max_turns` tries; the reward is that of the last one, times `discount` for each try before it."""

    hears = "user"

    def __init__(
        self, cfg: Config, tokenizer: Any, *, feedback: str = AGAIN, passes_at: float = 1.0, discount: float = 1.0
    ) -> None:
        """`feedback`: what the user says then. `passes_at`: the reward from which on an answer counts as right."""
        super().__init__(cfg, tokenizer)
        self.message = [{"role": "user", "content": feedback}]
        self.passes_at, self.discount = passes_at, discount

    async def run(self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        while said := await talk.say(generate):
            found, factor = await score(self.text(said.ids)), self.discount ** (talk.turns - 1)
            parts, talk.late = found if isinstance(found, dict) else {"": found or 0.0}, found is None
            scaled = {name: value * factor for name, value in parts.items()}
            talk.reward = scaled if isinstance(found, dict) else scaled[""]
            done = sum(parts.values()) >= self.passes_at or talk.turns >= limits.turns
            if done or not talk.hear("user", self.turn(self.message, said.ids)):
                break
        talk.count("tries", talk.turns)
        return talk
