"""Environments with reset and step; the one that ships makes a puzzle of reasoning-gym."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Protocol

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from one_step_off import registry
from one_step_off.config import Config
from one_step_off.samples import Prompt


class Environment(Protocol):
    """One episode. Its methods run in a thread, so they may block; what `reset` says is the row's prompt already."""

    def reset(self, ground_truth: str) -> str:
        """Begin the episode that a data row names; returns the first observation."""

    def step(self, action: str) -> tuple[str, float, bool]:
        """(observation, reward of this step, whether the episode is over) after what the model said."""


class Puzzle:
    """A puzzle of reasoning-gym with some guesses: each that is wrong is told so, and the best one counts.

    The ground truth is `{"dataset": "countdown", "seed": 7, "guesses": 3}`, as `generator:puzzles` writes it.
    """

    def reset(self, ground_truth: str) -> str:
        """The question."""
        import reasoning_gym

        own = json.loads(ground_truth)
        self.left, self.best = own.get("guesses", 3), 0.0
        self.data = reasoning_gym.create_dataset(own["dataset"], size=1, seed=own["seed"])
        self.entry = self.data[0]
        return self.entry["question"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """The reward is what a guess gains over the best before it, so that they sum to the score of the best."""
        score = float(self.data.score_answer(action.strip(), self.entry))
        gain, self.left = max(0.0, score - self.best), self.left - 1
        self.best += gain
        return f"That is not right (score {score:.2f}). Guess again.", gain, score >= 1.0 or self.left == 0


@LOOPS.register("environment")
class EnvironmentLoop(AgentLoop):
    """The model acts, the environment answers, until the episode or a limit ends; the reward sums those of all steps."""

    def __init__(self, cfg: Config, tokenizer: Any, *, env: str = "agent_loop.environment:Puzzle") -> None:
        """`env`: your own class as module:Class."""
        super().__init__(cfg, tokenizer)
        self.env = registry.load("agent.loop_kwargs.environment.env", env)

    async def run(self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits) -> Trajectory:
        """See `AgentLoop.run`."""
        talk, env = Trajectory(prompt.ids, limits, reward=0.0), self.env()
        await asyncio.to_thread(env.reset, prompt.ground_truth)
        while said := await talk.say(generate):
            observation, reward, done = await asyncio.to_thread(env.step, self.text(said.ids))
            talk.reward += reward
            talk.count("steps")
            if done or not talk.hear("user", self.turn([{"role": "user", "content": observation}], said.ids)):
                break
        return talk
