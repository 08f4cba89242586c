"""The loops that call no tool: one answer, or several tries at it."""

from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off.config.schema import Config
from one_step_off.data.rounding import reaches
from one_step_off.data.samples import Prompt
from one_step_off.rewards.reward import Reward

DEFAULT_FEEDBACK = "That is wrong. Try again."


@LOOPS.register("single_turn")
class SingleTurn(AgentLoop):
    """One prompt, one answer."""

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        trajectory = Trajectory(prompt.ids, limits)
        await trajectory.generate(generate)
        return trajectory


@LOOPS.register("retry_with_feedback")
class RetryWithFeedback(AgentLoop):
    """Up to `agent.max_turns` tries, as long as the reward function rates the answer as wrong.

    The reward is that of the last try, times `discount` for each try before it.
    """

    observation_role = "user"

    def __init__(
        self,
        cfg: Config,
        tokenizer: Any,
        *,
        feedback: str = DEFAULT_FEEDBACK,
        passes_at: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """
        Args:
            feedback: the user's message after a wrong answer.
            passes_at: an answer with at least this reward is right.
        """
        super().__init__(cfg, tokenizer)
        self.feedback = [{"role": "user", "content": feedback}]
        self.passes_at = passes_at
        self.discount = discount

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        trajectory = Trajectory(prompt.ids, limits)
        while turn := await trajectory.generate(generate):
            reward = Reward.of(await score(self.text(turn.ids)))
            trajectory.late = reward is None
            if reward is None:
                reward = Reward(0.0)
            trajectory.reward = reward.scaled(self.discount ** (trajectory.turns - 1))
            if reaches(reward.total, self.passes_at) or trajectory.turns >= limits.turns:
                break
            if not trajectory.observe("user", self.encode_messages(self.feedback, turn.ids)):
                break
        trajectory.count("tries", trajectory.turns)
        return trajectory
