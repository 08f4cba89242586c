"""One prompt, one answer."""

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off.data.samples import Prompt


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
