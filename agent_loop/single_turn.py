"""One turn: the prompt goes in, the response comes out."""

from __future__ import annotations

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off.samples import Prompt


@LOOPS.register("single_turn")
class SingleTurn(AgentLoop):
    """One prompt, one answer; every response token is the policy's own."""

    async def run(self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        await talk.say(generate)
        return talk
