"""One episode of an agent loop against a policy of canned answers: no engine, no Ray.

The loop, its tools, its environment or its external program, the endpoint and the reward function
are the real ones. Only the engine is missing: each turn is a text by the policy's tokenizer.
"""

import asyncio
import copy
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.base import LOOPS, AgentLoop, Generated, Loops
from agent_loop.external import ExternalLoop
from agent_loop.tool_loop import ToolLoop, detect_format
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.user_code import describe_error, find_user_line
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rewards import trial_call
from one_step_off.rewards.functions import RewardFunctions
from one_step_off.rewards.reward import RewardError, RewardItem, Score
from one_step_off.rollout.concurrency import ConcurrencyLimiter
from one_step_off.rollout.sampling import Sampling
from one_step_off.rollout.trajectory_run import TrajectoryRun

LIMIT_S = 30.0
"""For the episode, unless `agent.timeout_s` is shorter."""

START_S = 120.0
"""For what begins before the clock of an episode with an endpoint: imports and other programs."""

MAX_TOKENS = 4096
"""Of all turns and tool outputs: a canned answer is longer than a policy's may be."""

WRONG_RESPONSE = "I do not know."
# Answers of a tool that say that its code is broken, whatever it was called with.
BROKEN_CODE = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")


def right_response(ground_truth: str) -> str:
    """A response with the ground truth as its answer, as `gsm8k`, `math` and most rewards read
    it."""
    return f"The answer is \\boxed{{{ground_truth}}}.\n#### {ground_truth}"


@dataclass
class EpisodeResult:
    """What became of a trial episode.

    Attributes:
        samples: of the episode.
        faults: what is wrong, a line each.
        warnings: what may be wrong, a line each.
        notes: what else happened, a line each.
        seconds: of the episode.
    """

    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def try_agent_loop(
    cfg: Config, tokenizer: Any, name: str, prompt: Prompt, calls_rewards: bool
) -> EpisodeResult:
    """Let a loop make one episode of a prompt.

    Args:
        cfg: the run's, with the model's folder.
        name: of the loop.
        prompt: a row of that loop.
        calls_rewards: whether the reward function works; else each response has the reward 0.
    """
    result = EpisodeResult()
    limit_s = 2 * LIMIT_S
    if getattr(LOOPS.find(name).function, "needs_endpoint", False):
        limit_s += START_S
    with tempfile.TemporaryDirectory() as folder:
        trial_cfg = copy.deepcopy(cfg)
        trial_cfg.trainer.output_dir = folder  # agents' logs do not belong into the run folder
        trial_cfg.reward.on_error = "stop"
        trial_cfg.agent.timeout_s = min(cfg.agent.timeout_s, LIMIT_S)
        trial_cfg.agent.tool_timeout_s = min(cfg.agent.tool_timeout_s, LIMIT_S)
        trial_cfg.agent.max_turn_tokens = None
        work = _Trial(trial_cfg, tokenizer, name, prompt, result)
        work.calls_rewards = calls_rewards
        try:
            _in_time(work.run, limit_s)
        except (ConfigError, RewardError) as error:
            result.faults.append(str(error))
        except Exception as error:
            result.faults.append(f"{describe_error(error)}: {error}")
    return result


def _in_time(work: Callable[[], Coroutine[Any, Any, None]], limit_s: float) -> None:
    """Run a coroutine in a thread of its own, which a loop that blocks cannot leave.

    Raises:
        TimeoutError: it did not end; the message names the user's line that it is in.
        Exception: what it raised.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            asyncio.run(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        place = find_user_line("".join(traceback.format_stack(frame))) if frame else ""
        location = f"; it is at {place}" if place else ""
        raise TimeoutError(f"the episode did not end within {limit_s:g} s{location}")
    if errors:
        raise errors[0]


class _Trial:
    """One episode: passes for the replica of its `TrajectoryRun`.

    Attributes: see `trajectory_run.Replica`.
    """

    attempt = 0

    def __init__(
        self, cfg: Config, tokenizer: Any, name: str, prompt: Prompt, result: EpisodeResult
    ) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.name = name
        self.prompt = prompt
        self.result = result
        self.turns = 0
        self.calls_tool = False
        self.calls_rewards = True
        self.rewards: Any = self  # its `score` stands for that of the queue

    async def run(self) -> None:
        """Make the episode, and put what it gives into the result."""
        # Made here, since they belong to the event loop.
        self.limiter = ConcurrencyLimiter(self.cfg.agent.max_concurrency)
        self.loops = Loops(self.cfg, self.tokenizer)
        loop = self.loops.get(self.name)
        if isinstance(loop, ExternalLoop) and loop.hosts is None:
            self.result.warnings.append(
                "its agents ask the run's endpoint for work; they are not tried, since they are no "
                "part of the run"
            )
            return
        if isinstance(loop, ToolLoop):
            await self._call_tools(loop)
        self.calls_tool = isinstance(loop, ToolLoop)
        begin = time.monotonic()
        if loop.needs_endpoint:
            await self._with_endpoint()
        else:
            await self._episode()
        self.result.seconds = time.monotonic() - begin
        self._judge(loop)

    async def _call_tools(self, loop: ToolLoop) -> None:
        """Call each tool once, with arguments that fit its schema."""
        for schema in loop.toolbox.schemas:
            name = schema["function"]["name"]
            arguments = sample_arguments(schema)
            seconds = self.cfg.agent.tool_timeout_s
            answer, succeeded = await loop.toolbox.call(name, arguments, seconds)
            line = f"tool {name}({json.dumps(arguments)[:200]}) answered {answer[:200]!r}"
            if succeeded:
                self.result.notes.append(line)
            elif answer.removeprefix("error: ").startswith(BROKEN_CODE):
                self.result.faults.append(f"{line}")
            else:
                self.result.warnings.append(f"{line}; fix it unless the arguments are to blame")

    async def _with_endpoint(self) -> None:
        """The episode of an external agent, with an endpoint of its own."""
        from one_step_off.endpoint.episodes import make_service_key
        from one_step_off.endpoint.http_server import limits_for
        from one_step_off.endpoint.replica_server import EndpointAccess, ReplicaServer
        from one_step_off.engines.vllm.chat.trial_serving import serving_without_engine

        data = self.cfg.data
        server = ReplicaServer(
            0,
            EndpointAccess("", make_service_key()),
            data.max_prompt_length + data.max_response_length,
            limits_for(self.cfg.agent.max_concurrency),
        )
        server.serving = serving_without_engine(self.cfg, self.tokenizer)
        await server.start("127.0.0.1", None)
        self.loops = Loops(self.cfg, self.tokenizer, server)
        try:
            await self._episode()
        finally:
            loop = self.loops.get(self.name)
            if isinstance(loop, ExternalLoop) and loop.hosts is not None:
                loop.hosts.close()
            await server.stop()

    async def _episode(self) -> None:
        is_external = self.loops.endpoint is not None
        tokens = None if is_external else MAX_TOKENS
        sampling = Sampling(n=1, temperature=1.0, seed=None, max_tokens=tokens)
        run = TrajectoryRun(self, self.prompt, 0, sampling)
        self.result.samples = await run.samples()

    async def _generate(
        self, ids: np.ndarray, max_tokens: int, seed: int | None, sampling: Sampling, *images: Any
    ) -> Generated:
        """The next canned turn: first a call of a tool where the loop has tools, then answers."""
        self.turns += 1
        text = right_response(self.prompt.ground_truth)
        if self.calls_tool and self.turns == 1:
            text = self._tool_call()
        answer = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.eos_token_id is not None:
            answer = [*answer, self.tokenizer.eos_token_id]
        finish_reason = "stop" if len(answer) <= max_tokens else "length"
        answer = np.asarray(answer[:max_tokens], np.int32)
        log_probs = np.zeros(len(answer), np.float32)
        versions = np.zeros(len(answer), np.int32)
        return Generated(answer, log_probs, versions, self.attempt, finish_reason)

    def _tool_call(self) -> str:
        """A call of the first tool, as the model's family writes it."""
        schema = self.loops.get(self.name).tools[0]
        name = schema["function"]["name"]
        arguments = sample_arguments(schema)
        settings = self.cfg.agent.loop_kwargs.get(self.name) or {}
        call_format = settings.get("format", "auto")
        if call_format == "auto":
            call_format = detect_format(str(self.tokenizer.chat_template))
        if call_format == "llama":
            return json.dumps({"name": name, "parameters": arguments})
        call = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    async def score(self, item: RewardItem) -> Score | RewardError:
        """The answer of the run's reward function, called in a process of its own."""
        if not self.calls_rewards:
            return 0.0
        called = await asyncio.to_thread(trial_call.call_in_process, self.cfg, [item])
        if called.trials:
            return called.trials[0].score
        functions = RewardFunctions(self.cfg.reward)
        fault = trial_call.find_fault(self.cfg, functions, [item], called, "called by the agent")
        return RewardError(fault)

    def _judge(self, loop: AgentLoop) -> None:
        """Find what an episode that ended well says of its parts."""
        facts = self.result.samples[0].extra.get("agent", {}) if self.result.samples else {}
        if facts.get("killed"):
            self.result.faults.append(
                f"the agent did not end within {self.cfg.agent.timeout_s:g} s and was killed; its "
                "policy answers at once here"
            )
        if facts.get("lost_steps"):
            self.result.warnings.append(
                "the environment gave no answer to a step: it raised, took longer than "
                f"agent.tool_timeout_s={self.cfg.agent.tool_timeout_s:g} s, or its process ended"
            )
        if facts.get("lost_rewards"):
            self.result.warnings.append("the environment gave no reward")
        if isinstance(loop, ToolLoop) and not facts.get("tool_calls"):
            self.result.warnings.append("the canned call was not read as a call of a tool")


def sample_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that fit the JSON schema of a tool; only those that it requires."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    names = parameters.get("required", list(properties))
    return {name: _sample_value(properties.get(name, {})) for name in names}


def _sample_value(schema: dict[str, Any]) -> Any:
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if "default" in schema:
        return schema["default"]
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0]
    samples = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    return samples.get(kind, "1")
