"""Environments with reset and step; the one that ships makes a puzzle of reasoning-gym.

An environment is one episode, in a process of its own, so it may block. `reset(ground_truth) -> str` begins the one that a
data row names and returns the first observation, which is the row's prompt already. `step(action) -> (str, float, bool)`
returns, after what the model said, the observation, this step's reward, and whether the episode is over. Two attributes of
the class may be set: `imports`, names of modules to be imported once and not in every episode, and `confined = True` where
the model's text might be run as code: the process is then limited as the python tool's.
"""

import asyncio
import contextlib
import json
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Generate, Limits, ScoreFunction, Trajectory
from agent_loop.processes import LONGEST_QUEUE, Processes, Streams, core
from one_step_off.config import registry
from one_step_off.config.errors import as_config_error
from one_step_off.config.schema import Config
from one_step_off.config.user_code import find_user_line
from one_step_off.data.samples import Prompt
from one_step_off.rewards.reward import MAX_REWARD


class NoAnswer(Exception):
    """A call of an environment came to nothing: too late, its process died, or what it said is no answer."""


def _failed(what: str, why: str, traceback: str) -> RuntimeError:
    """The exception of an environment's own code, with the user's line and, as a note, its traceback."""
    place = find_user_line(traceback)
    where = f" ({place})" if place else ""
    error = RuntimeError(f"{what}: {why}{where}")
    if traceback:
        error.add_note(traceback)
    return error


class Puzzle:
    """A puzzle of reasoning-gym with some guesses: each that is wrong is told so, and the best one counts.

    The ground truth is `{"dataset": "countdown", "seed": 7, "guesses": 3}`, as `generator:puzzles` writes it.
    """

    imports = ("reasoning_gym",)
    confined = True  # countdown, for one, is scored by eval of the guess

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
        try:
            score = float(self.data.score_answer(action.strip(), self.entry))
        except Exception:  # a guess that it cannot read
            score = 0.0
        gain, self.left = max(0.0, score - self.best), self.left - 1
        self.best += gain
        return (
            f"That is not right (score {score:.2f}). Guess again.",
            gain,
            score >= 1.0 or self.left == 0,
        )


@LOOPS.register("environment")
class EnvironmentLoop(AgentLoop):
    """The model acts, the environment answers, until the episode or a limit ends; the reward sums those of all steps.

    A step that takes longer than `agent.tool_timeout_s`, or of which the process dies, ends the episode with the reward
    so far and is counted as `lost_steps`. An exception in the environment ends the run; not so in a step of a confined
    one, where what the model said might pretend it.
    """

    hears = "user"

    def __init__(
        self, cfg: Config, tokenizer: Any, *, env: str = "agent_loop.environment:Puzzle"
    ) -> None:
        """`env`: your own class as module:Class."""
        super().__init__(cfg, tokenizer)
        self.env, made = env, registry.import_object("agent.loop_kwargs.environment.env", env)
        self.confined = bool(getattr(made, "confined", False))
        self.processes = Processes(env, self.confined)

    async def check(self, prompt: Prompt) -> None:
        """See `AgentLoop.check`."""
        what = f"agent.loop=environment: {self.env} does not begin with the ground truth {prompt.ground_truth!r:.80}"
        with as_config_error(what, "give it rows of its own"):
            async with self.processes.one() as streams:
                await self._ask(streams, "reset", prompt.ground_truth)

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        async with self.processes.one() as streams:
            await self._ask(streams, "reset", prompt.ground_truth)
            talk = Trajectory(
                prompt.ids, limits, reward=0.0
            )  # its clock starts here, so that there is a first turn
            while said := await talk.say(generate):
                talk.count("steps")
                try:
                    # The wait for a core is never shorter than the step may take: the last one has a reward too.
                    wait = max(talk.seconds_left, self.cfg.agent.tool_timeout_s)
                    observation, reward, done = await self._ask(
                        streams, "step", self.text(said.ids), wait
                    )
                except NoAnswer:  # the model's doing, and no reason to end the run
                    talk.count("lost_steps")
                    break
                talk.reward += reward
                if done or not talk.hear(
                    "user", self.turn([{"role": "user", "content": observation}], said.ids)
                ):
                    break
        return talk

    async def _ask(
        self, streams: Streams, method: str, argument: str, wait: float = LONGEST_QUEUE
    ) -> Any:
        """What the method answers. Raises NoAnswer; RuntimeError: it raised, or returned what is none."""
        (reader, writer), seconds, what = (
            streams,
            self.cfg.agent.tool_timeout_s,
            f"{self.env}.{method}",
        )
        try:  # others than the confined may wait for servers, so they need no core
            async with core(wait) if self.confined else contextlib.nullcontext():
                writer.write(json.dumps([method, argument]).encode() + b"\n")
                line = await asyncio.wait_for(reader.readuntil(b"\n"), seconds)
            answer = json.loads(line)
        except TimeoutError as e:
            raise NoAnswer(
                f"{what}: {str(e) or f'took longer than agent.tool_timeout_s={seconds:g}'}"
            ) from e
        except (EOFError, ConnectionError) as e:
            raise NoAnswer(f"{what}: its process ended") from e
        except (ValueError, RecursionError, asyncio.LimitOverrunError):
            answer = None
        match answer:
            case {"error": why} if method == "reset" or not self.confined:
                raise _failed(what, why, str(answer.get("traceback", "")))
            case str() if method == "reset":
                return answer
            case [str(text), int() | float() as reward, done] if (
                method == "step" and abs(reward) <= MAX_REWARD
            ):
                return text, float(reward), bool(done)
        wanted = (
            "a text"
            if method == "reset"
            else "(observation, reward, done) with a text and a finite number"
        )
        raise (NoAnswer if self.confined else RuntimeError)(
            f"{what}: it returned {answer!r:.80}, not {wanted}"
        )
