"""Agents outside of the replica, which reach the policy by HTTP.

For each trajectory the loop opens an episode at the run's endpoint and then

- starts `agent.command`, a program or `module:function`, or the adapter of `agent.environment`; or
- offers the episode to agents that ask the endpoint for work.

The episode ends with its agent.
"""

import asyncio
import contextlib
import itertools
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from agent_loop.base import LOOPS, AgentLoop, Episode, Generate, Limits, ScoreFunction
from agent_loop.environment import failure_of_environment
from agent_loop.episode import LIMITS, RewardMissing, data_kind, episode_row
from agent_loop.host_client import AgentDied, AgentHosts, HostFailed, HostPlan
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.sections.agent import AgentConfig
from one_step_off.config.text import one_line
from one_step_off.config.user_code import AGENT_LOG_FOLDER
from one_step_off.data.samples import Prompt

ADAPTERS = {
    "verifiers": "agent_loop.adapters.verifiers_agent:run",
    "openenv": "agent_loop.adapters.openenv_agent:run",
}
"""The agents of `agent.environment=KIND:NAME`, as module:function. The variable AGENT_ENVIRONMENT
is NAME."""

ENVIRONMENT_VARIABLE = "AGENT_ENVIRONMENT"
FUNCTION = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d][\w.]*")
"""`module:function`; any other `agent.command` is a program with its arguments."""

INTERPRETERS = re.compile(r"python[\d.]*|bash|sh|zsh|node|deno|bun|ruby|perl")
SCRIPT_ENDINGS = (".py", ".sh", ".js", ".mjs", ".cjs", ".ts", ".rb", ".pl")
MAX_FIRST_LINE = 256  # bytes; what Linux reads of it
SETTLE_S = 1.0
POLL_S = 0.01
MAX_RESTARTS = 2
"""How often an agent that was killed from outside begins again, with another episode."""

CUT_OFF = "its last answer was cut off (finish_reason length)"

MAX_LOGS = {".open.log": 2048, ".failed.log": 500, ".log": 500}
"""How many logs of each kind are kept, the newest ones."""

PRUNE_EVERY = 64  # ended episodes


class AgentFailed(RuntimeError):
    """The agent ended with an error."""


def host_plan(agent: AgentConfig) -> HostPlan | None:
    """How the agents of a config are started; None: they ask for work."""
    variables: dict[str, str] = {}
    if agent.environment:
        kind, _, name = agent.environment.partition(":")
        function = ADAPTERS[kind]
        variables[ENVIRONMENT_VARIABLE] = name
    elif FUNCTION.fullmatch(agent.command):
        function = agent.command
    elif agent.command:
        return HostPlan(sys.executable, {"program": shlex.split(agent.command)}, {})
    else:
        return None
    return HostPlan(
        agent.python or sys.executable,
        {"function": function, "folders": _module_folders(agent.python)},
        variables,
    )


def fault_of_program(words: list[str]) -> str:
    """Why a program would not begin, and what to do; "": no such reason is seen.

    Args:
        words: of its command line.
    """
    path = shutil.which(words[0])
    if path is None and os.path.isfile(words[0]):
        return f"{words[0]} is not executable; run chmod +x {words[0]}, or name its interpreter"
    if path is None:
        return f"there is no program {words[0]}; name one that is on PATH, or its path"
    interpreter = _interpreter_of_script(path)
    if interpreter and shutil.which(interpreter) is None:
        return f"its first line names {interpreter}, which does not exist; fix that line"
    script = _script_argument(words)
    if script and not os.path.isfile(script):
        return f"there is no file {script} (working directory {os.getcwd()}); check the path"
    return ""


def _interpreter_of_script(path: str) -> str:
    """The program in the first line of a script, as "#!/usr/bin/env NAME"; "": it is no script."""
    with open(path, "rb") as file:
        first_line = file.readline(MAX_FIRST_LINE)
    if not first_line.startswith(b"#!"):
        return ""
    words = first_line[2:].decode("utf-8", "replace").split()
    named = [word for word in words if not word.startswith("-") and "=" not in word]
    if not named:
        return ""
    is_env = os.path.basename(named[0]) == "env" and len(named) > 1
    return named[1] if is_env else named[0]


def _script_argument(words: list[str]) -> str:
    """The script that an interpreter is to run; "": the program is another one, or runs no file."""
    if not INTERPRETERS.fullmatch(os.path.basename(words[0])):
        return ""
    for word in words[1:]:
        if not word.startswith("-"):
            return word if word.endswith(SCRIPT_ENDINGS) else ""
        if word in ("-m", "-c", "-e"):
            return ""
    return ""


def _module_folders(python: str) -> list[str]:
    """Where the function's module is searched for: the working directory, and with the run's own
    interpreter all that its path has. Another interpreter has packages of its own, and PYTHONPATH.
    """
    folders = [str(Path.cwd())]
    if not python:
        folders += [folder for folder in sys.path if folder]
    return folders


class AgentLogs:
    """The logs of external agents: a file per episode, of those that printed something.

    NAME.open.log     of an agent that runs
    NAME.log          of one that has ended
    NAME.failed.log   of one that has failed, or was killed

    Several replicas may share the folder, RUN/agents.
    """

    def __init__(self, output_dir: str) -> None:
        self.folder = Path(os.path.abspath(output_dir)) / AGENT_LOG_FOLDER
        self.ended = itertools.count(1)

    def open(self, name: str) -> str:
        """Where the agent of episode `name` writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return str(self.folder / f"{name}.open.log")

    def end(self, name: str, failed: bool) -> str:
        """Give the log of an agent that has ended its name.

        Returns:
            The log, relative to the run's folder; "": it printed nothing.
        """
        suffix = ".failed.log" if failed else ".log"
        ended = self.folder / f"{name}{suffix}"
        if next(self.ended) % PRUNE_EVERY == 0:
            self.prune()
        try:
            (self.folder / f"{name}.open.log").rename(ended)
        except OSError:
            return ""
        return f"{AGENT_LOG_FOLDER}/{ended.name}"

    def prune(self) -> None:
        """Remove the oldest logs beyond the number that is kept."""
        logs: dict[str, list[tuple[float, str]]] = {suffix: [] for suffix in MAX_LOGS}
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                suffix = next((suffix for suffix in MAX_LOGS if entry.name.endswith(suffix)), "")
                if suffix:
                    with contextlib.suppress(OSError):  # another replica removed it
                        logs[suffix].append((entry.stat().st_mtime, entry.path))
        for suffix, found in logs.items():
            for _, path in sorted(found, reverse=True)[MAX_LOGS[suffix] :]:
                with contextlib.suppress(OSError):
                    os.unlink(path)


@LOOPS.register("external")
class ExternalLoop(AgentLoop):
    """An agent that talks to the run's endpoint, in any framework and any language.

    Its reward is what its function returns, what it has sent to the endpoint, or that of the run's
    reward function for the policy's last turn. With `agent.environment` it is always that of the
    environment. The agents' own rewards and the function's are not mixed: once an agent has given
    one, an episode without is an error.

    An agent that ends with an error is an error of its sample, unless its episode was refused a
    turn: then its error says nothing of it, and `extra["agent_failure"]` reports it. One that was
    killed from outside begins again.

    Attributes:
        rewarded: the kinds of rows, as `data_kind`, for which an agent has given a reward.
    """

    needs_endpoint = True

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        super().__init__(cfg, tokenizer)
        plan = host_plan(cfg.agent)
        self.name = cfg.agent.environment or cfg.agent.command
        self.hosts = AgentHosts(plan) if plan else None
        self.logs = AgentLogs(cfg.trainer.output_dir)
        self.rewarded: set[tuple[str, str]] = set()

    async def check(self, prompt: Prompt) -> None:
        """See `AgentLoop.check`."""
        if self.hosts is None:
            return
        program = self.hosts.plan.task.get("program")
        if program:
            fault = fault_of_program(program)
            if fault:
                raise ConfigError(f"agent.command={self.name}: {fault}")
            return
        key = "agent.environment" if self.cfg.agent.environment else "agent.command"
        try:
            await self.hosts.check()
        except HostFailed as e:
            raise ConfigError(
                f"{key}={self.name}: with the interpreter {self.hosts.plan.python}: {e}; "
                "fix it, start in the folder of the module, or set agent.python"
            ) from e

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Episode:
        """See `AgentLoop.run`."""
        if self.endpoint is None:
            raise ConfigError("agent.loop=external: this run has no endpoint; see agent.endpoint")
        begin = time.monotonic()
        restarts = 0
        while True:
            episode = self.endpoint.open(prompt, generate, limits)
            episode.begin = begin  # a restart has what is left of the time
            episode.facts = {"restarts": restarts, "killed": 0}
            try:
                await self._drive(episode)
                self._settle_reward(episode)
                return episode
            except AgentDied as e:
                if restarts == MAX_RESTARTS or episode.seconds_left == 0:
                    raise AgentFailed(f"{self.name}: {e}, {restarts + 1} times") from e
                restarts += 1
            finally:
                self.endpoint.close(episode)

    async def _drive(self, episode: Episode) -> None:
        """Until the agent has ended.

        Raises:
            AgentFailed: it ended with an error, or without a turn of the policy.
            AgentDied: it was killed from outside.
        """
        if self.hosts is None:
            await self._offer(episode)
        else:
            await self._run_in_time(self.hosts, episode)
        if episode.failure:
            raise AgentFailed(f"{self._agent}: reported {episode.failure}")
        if not episode.turns:
            raise AgentFailed(self._why_no_turn(episode))

    async def _offer(self, episode: Episode) -> None:
        try:
            await self.endpoint.offer(episode)
        except TimeoutError as e:
            raise AgentFailed(f"{e}: GET {self.endpoint.base_url}/v1/episodes/next") from e
        time_over = episode.over in LIMITS and episode.seconds_left == 0
        if not episode.over or time_over:
            self._end_at_time(episode, "its agent did not end it")

    async def _run_in_time(self, hosts: AgentHosts, episode: Episode) -> None:
        try:
            async with asyncio.timeout(episode.seconds_left):
                end = await self._run_agent(hosts, episode)
        except TimeoutError:
            episode.facts["killed"] = 1
            self._end_at_time(episode, "its agent was killed")
            self._end_log(episode, failed=True)
        else:
            await self._judge(episode, end)

    @staticmethod
    def _end_at_time(episode: Episode, what: str) -> None:
        message = f"agent.timeout_s={episode.limits.seconds:g} is over"
        episode.end("time", message)
        episode.limit_reached = episode.limit_reached or "time"
        _note_failure(episode, f"{message}; {what}")

    def _why_no_turn(self, episode: Episode) -> str:
        if episode.facts["killed"]:
            seconds = f"agent.timeout_s={episode.limits.seconds:g}"
            return f"{self.name}: killed at {seconds}, before the first turn of the policy"
        reason = episode.no_room or episode.extra.get("agent_failure", "")
        because = f"; {reason}" if reason else ""
        return f"{self._agent}: ended without a turn of the policy{because}{self._notes(episode)}"

    @property
    def _agent(self) -> str:
        return self.name or "an agent that asked for work"

    async def _run_agent(self, hosts: AgentHosts, episode: Episode) -> dict[str, Any]:
        """Until it has ended. Returns the last message about it."""
        message = {
            "row": episode_row(episode.prompt),
            "base_url": f"{self.endpoint.local_url}/v1",
            "api_key": episode.key,
            "log": self.logs.open(episode.name),
        }
        try:
            end = await hosts.run(message)
        except HostFailed as e:
            raise AgentFailed(f"{self.name}: {e}") from e
        return end

    async def _judge(self, episode: Episode, end: dict[str, Any]) -> None:
        """
        Args:
            end: the last message about the agent.

        Raises:
            AgentFailed: it ended with an error.
            AgentDied: it was killed from outside.
        """
        was_refused = episode.over in LIMITS
        episode.end()  # what the agent has left running gets no more turns
        if end.get("value") is not None:
            episode.reward = end["value"]
        await _settle(episode)
        failed = bool(end["exit"] or "error" in end)
        self._end_log(episode, failed)
        exit_code = end["exit"] or 0
        if exit_code < 0 and not was_refused:
            raise AgentDied(f"it was killed by signal {-exit_code}")
        if not failed:
            return
        error = self._failure(episode, end)
        # The runner of an environment is not the user's, and may raise at an answer that was cut.
        excused = was_refused or (self.cfg.agent.environment and _met_a_limit(episode))
        if not excused:
            raise error
        _note_failure(episode, str(error))

    def _failure(self, episode: Episode, end: dict[str, Any]) -> Exception:
        """
        Args:
            end: the last message about the agent.
        """
        notes = self._notes(episode)
        if episode.no_room:
            notes += f"; {episode.no_room}"
        elif _met_a_limit(episode):
            notes += f"; a limit of the run came before it: {episode.limit_reached or CUT_OFF}"
        if "error" in end:
            reason = f"{end['error']}{notes}"
            return failure_of_environment(self.name, reason, end.get("traceback", ""))
        lines = end["log"].splitlines()
        shown = f"; its last line: {lines[-1]}" if lines else ""
        error = AgentFailed(f"{self.name}: exit code {end['exit']}{notes}{shown}")
        error.add_note(end["log"])
        return error

    def _settle_reward(self, episode: Episode) -> None:
        """See that the episode's reward is of the same kind as the others'.

        Raises:
            RewardMissing: its agent gave none, where agents do.
        """
        has_reward = episode.reward is not None
        if self.cfg.agent.environment:
            # The run's reward function knows nothing of the environment's tasks. Only a limit
            # excuses that there is no reward.
            episode.facts["lost_rewards"] = float(not has_reward)
            if not has_reward:
                episode.reward = 0.0
            return
        episode.facts["own_reward"] = float(has_reward)
        kind = data_kind(episode.prompt)
        if has_reward:
            self.rewarded.add(kind)
        elif kind in self.rewarded:
            raise RewardMissing(episode.extra.get("agent_failure", ""))

    def _end_log(self, episode: Episode, failed: bool) -> None:
        path = self.logs.end(episode.name, failed)
        if path:
            episode.extra["agent_log"] = path

    def _notes(self, episode: Episode) -> str:
        """Where the agent's log is, and what the endpoint refused it."""
        path = episode.extra.get("agent_log")
        notes = f" ({path})" if path else ""
        if episode.refusal:  # most clients show the status alone
            notes += f"; the endpoint last refused: {episode.refusal}"
        return notes


def _met_a_limit(episode: Episode) -> bool:
    """Whether the agent was refused a turn, or its last one was cut off at a limit of the run."""
    is_cut = [
        turn.generated.finish_reason == "length" and not turn.cut_by_agent
        for turn in episode.turns_done[-1:]
    ]
    return bool(episode.limit_reached) or any(is_cut)


def _note_failure(episode: Episode, reason: str) -> None:
    """Report why an agent ended, in an episode that is trained on. Samples keep it."""
    episode.extra["agent_failure"] = one_line(reason)


async def _settle(episode: Episode) -> None:
    """An agent may end before its last answer is recorded as received."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        if all(turn.delivered for turn in episode.turns_done):
            return
        await asyncio.sleep(POLL_S)
