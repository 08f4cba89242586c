"""Environments with reset and step; the one that is included runs a puzzle of reasoning-gym.

An environment is one episode, in a process of its own, so it may block.

- `reset(ground_truth) -> str` begins the episode that a data row names. It returns the first
  observation, which is the row's prompt already.
- `step(action) -> (str, float, bool)` receives the model's turn. It returns the observation, the
  reward of this step, and whether the episode is over.

Two attributes of the class may be set: `imports`, names of modules that are imported once instead
of in every episode, and `confined = True` if the model's text might be run as code: the process
then has the limits of the tool `python`.
"""

import asyncio
import contextlib
import json
import math
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from agent_loop.processes import MAX_QUEUE_S, ForkServer, Streams, reserve_core
from one_step_off.config import registry
from one_step_off.config.errors import as_config_error
from one_step_off.config.schema import Config
from one_step_off.config.text import one_line
from one_step_off.config.user_code import find_user_line
from one_step_off.data.rounding import reaches
from one_step_off.data.samples import Prompt
from one_step_off.rewards.reward import MAX_REWARD


class NoAnswer(Exception):
    """A call of an environment failed: it took too long, its process died, or it returned nothing
    that can be used."""


class Puzzle:
    """A puzzle of reasoning-gym with several guesses, of which the best one counts.

    The ground truth is `{"dataset": "countdown", "seed": 7, "guesses": 3}`, as `generator:puzzles`
    writes it.
    """

    imports = ("reasoning_gym",)
    confined = True  # some puzzles are scored by eval of the guess, as countdown

    def reset(self, ground_truth: str) -> str:
        """The question."""
        import reasoning_gym

        puzzle = json.loads(ground_truth)
        self.guesses_left = puzzle.get("guesses", 3)
        self.best_score = 0.0
        self.data = reasoning_gym.create_dataset(puzzle["dataset"], size=1, seed=puzzle["seed"])
        self.entry = self.data[0]
        return self.entry["question"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """Score a guess. The reward is what it gains over the best guess before it, so that the
        rewards sum to the score of the best guess."""
        try:
            score = float(self.data.score_answer(action.strip(), self.entry))
        except Exception:  # a guess that it cannot read
            score = 0.0
        gain = max(0.0, score - self.best_score)
        self.best_score += gain
        self.guesses_left -= 1
        observation = f"That is not right (score {score:.2f}). Guess again."
        return observation, gain, reaches(score, 1.0) or self.guesses_left == 0


@LOOPS.register("environment")
class EnvironmentLoop(AgentLoop):
    """The model acts, the environment answers, until the episode or a limit ends. The reward is the
    sum over the steps.

    A step that takes longer than `agent.tool_timeout_s`, or kills its process, ends the episode
    with the reward so far; it is counted as `lost_steps` and reported as a failure. An exception in
    the environment ends the run; in a step of a confined environment it is a lost step, because the
    model's text might cause it.
    """

    observation_role = "user"

    def __init__(
        self, cfg: Config, tokenizer: Any, *, env: str = "agent_loop.environment:Puzzle"
    ) -> None:
        """
        Args:
            env: the class of the environment, as module:Class.
        """
        super().__init__(cfg, tokenizer)
        self.env = env
        env_class = registry.import_object("agent.loop_kwargs.environment.env", env)
        self.confined = bool(getattr(env_class, "confined", False))
        self.fork_server = ForkServer(env, self.confined)

    async def check(self, prompt: Prompt) -> None:
        """See `AgentLoop.check`."""
        row = f"the ground truth {prompt.ground_truth!r:.80}"
        refused = f"agent.loop=environment: {self.env} does not begin with {row}"
        with as_config_error(refused, "give it rows of its own"):
            async with self.fork_server.process() as streams:
                await self._call(streams, "reset", prompt.ground_truth)

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        async with self.fork_server.process() as streams:
            await self._call(streams, "reset", prompt.ground_truth)
            # The trajectory's clock begins here, so that there is a first turn.
            trajectory = Trajectory(prompt.ids, limits, reward=0.0)
            rewards = []
            while turn := await trajectory.generate(generate):
                trajectory.count("steps")
                # A step may wait for a core as long as it may take itself, even at the end of the
                # trajectory's time: the last step has a reward too.
                wait_s = max(trajectory.seconds_left, self.cfg.agent.tool_timeout_s)
                try:
                    observation, reward, done = await self._call(
                        streams, "step", self.text(turn.ids), wait_s
                    )
                except NoAnswer as e:  # the model's text may have caused it
                    trajectory.count("lost_steps")
                    trajectory.failure = one_line(str(e))
                    break
                rewards.append(reward)
                trajectory.reward = math.fsum(rewards)
                if done:
                    break
                messages = [{"role": "user", "content": observation}]
                if not trajectory.observe("user", self.encode_messages(messages, turn.ids)):
                    break
        return trajectory

    async def _call(
        self, streams: Streams, method: str, argument: str, core_wait_s: float = MAX_QUEUE_S
    ) -> Any:
        """Call a method of the environment.

        Args:
            core_wait_s: how long a confined environment may wait for a core.

        Returns:
            What `reset` or `step` returned, checked.

        Raises:
            NoAnswer: it took too long, or its process ended; in a confined one also if the answer
                cannot be used.
            RuntimeError: the method raised, or returned something that cannot be used.
        """
        name = f"{self.env}.{method}"
        line = await self._exchange(streams, name, [method, argument], core_wait_s)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        return self._checked(name, method, answer)

    async def _exchange(
        self, streams: Streams, name: str, call: list[str], core_wait_s: float
    ) -> bytes:
        """Send a call and wait for a line; b"" if the line is too long. Raises NoAnswer."""
        reader, writer = streams
        limit_s = self.cfg.agent.tool_timeout_s
        # An unconfined environment may wait for servers, so it needs no core.
        core = reserve_core(core_wait_s) if self.confined else contextlib.nullcontext()
        try:
            async with core:
                writer.write(json.dumps(call).encode() + b"\n")
                return await asyncio.wait_for(reader.readuntil(b"\n"), limit_s)
        except TimeoutError as e:
            reason = str(e) or f"took longer than agent.tool_timeout_s={limit_s:g}"
            raise NoAnswer(f"{name}: {reason}") from e
        except (EOFError, ConnectionError) as e:
            raise NoAnswer(f"{name}: its process ended") from e
        except asyncio.LimitOverrunError:
            return b""

    def _checked(self, name: str, method: str, answer: Any) -> Any:
        """The answer of a method, if it can be used. Raises as `_call`."""
        wanted = "(observation, reward, done) with a text and a finite number"
        if method == "reset":
            wanted = "a text"
        match answer:
            case {"error": reason} if method == "reset" or not self.confined:
                raise failure_of_environment(name, reason, str(answer.get("traceback", "")))
            case str() if method == "reset":
                return answer
            case [str(observation), int() | float() as reward, done] if (
                method == "step" and abs(reward) <= MAX_REWARD
            ):
                return observation, float(reward), bool(done)
        error_type = NoAnswer if self.confined else RuntimeError
        raise error_type(f"{name}: it returned {answer!r:.80}, not {wanted}")


def failure_of_environment(name: str, reason: str, traceback: str) -> RuntimeError:
    """The exception of an environment's own code, with the user's line and, as a note, its
    traceback."""
    line = find_user_line(traceback)
    error = RuntimeError(f"{name}: {reason} ({line})" if line else f"{name}: {reason}")
    if traceback:
        error.add_note(traceback)
    return error
