"""The config section agent: agent loops and external agents."""

import errno
import os
import shlex
import shutil
import socket
from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config.errors import ConfigError, refuse_here, value_error
from one_step_off.config.keys import config_key, path_key
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import (
    USER_CLASS_FORM,
    USER_FUNCTION_FORM,
    did_you_mean_function,
    is_user_spec,
)

# The names that other packages register. They are repeated here because importing their owners
# takes long; a test keeps them equal.
BUILT_IN_LOOPS = ("single_turn", "tool", "retry_with_feedback", "environment", "external")
BUILT_IN_TOOLS = ("calculator", "python")
ENVIRONMENT_KINDS = ("verifiers", "openenv")
EXTERNAL_LOOP = "external"  # agents in processes of their own


@dataclass
class AgentConfig:
    """Agent loops. data.max_response_length limits all turns and tool outputs together."""

    loop: str = config_key(
        "single_turn",
        "a loop from docs/tutorials/your_own_agent.md, or your own as module:Class; "
        "a data row may name another",
    )
    loop_kwargs: dict[str, Any] = config_key(
        {}, "settings of loops by name, e.g. {tool: {format: llama}}"
    )
    tools: str = config_key(
        "",
        "tools for agent.loop=tool, comma-separated: calculator, python, your own as "
        "module:function, mcp:URL",
    )
    max_turns: int = config_key(8, "model turns per trajectory", low=1)
    max_turn_tokens: Optional[int] = config_key(
        None, "longest model turn, in tokens; null: no separate limit", low=1
    )
    timeout_s: float = config_key(
        600.0,
        "a trajectory starts no new turn after this time; an external agent is killed",
        above=0.0,
    )
    tool_timeout_s: float = config_key(
        10.0, "time limit for one tool call or one environment step", above=0.0
    )
    tool_output_chars: int = config_key(
        2000, "longest tool output, in characters; the rest is cut off", low=1
    )
    max_concurrency: int = config_key(
        1024,
        "trajectories, and open episodes of agents, at the same time in each replica at most, for "
        "tools and environments; how many of them generate follows the engine's KV cache",
        low=1,
    )
    endpoint: bool = config_key(
        False,
        "serve the APIs of OpenAI and Anthropic to agents outside of the replicas; loop=external "
        "switches it on",
    )
    endpoint_host: str = config_key(
        "127.0.0.1", "address of this machine on which the endpoint listens"
    )
    endpoint_port: int = config_key(0, "port of the endpoint; 0: a free one", low=0, high=65535)
    command: str = config_key(
        "",
        "loop=external: the agent, a program with its arguments that is started for each episode, "
        "or module:function; empty: agents ask the endpoint for work",
    )
    python: str = path_key(
        "", "Python interpreter of command=module:function; empty: that of the run"
    )
    environment: str = config_key(
        "", "loop=external: an environment in place of command: verifiers:NAME or openenv:URL"
    )
    tool_parser: str = config_key(
        "auto", "the endpoint's parser of tool calls: one of vLLM's, auto, or none"
    )
    reasoning_parser: str = config_key(
        "", "the endpoint's parser of thoughts: one of vLLM's; empty: thoughts are text"
    )


def check_agent(agent: AgentConfig) -> None:
    """Check the names of agent loops and tools, and external agents. Raises ConfigError."""
    check_loop("agent.loop", agent.loop)
    for name in agent.loop_kwargs:
        check_loop("agent.loop_kwargs", name)
    for tool in agent.tools.split(","):
        _check_tool(tool.strip())
    for name, settings in agent.loop_kwargs.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"agent.loop_kwargs.{name}={format_value(settings)}: "
                "must be a mapping of this loop's settings, such as {format: llama}"
            )
    _check_external_agents(agent)


def check_loop(key: str, spec: str) -> None:
    """Check the name of a loop. Raises ConfigError."""
    if spec in BUILT_IN_LOOPS or is_user_spec(spec):
        return
    otherwise = f"use {', '.join(BUILT_IN_LOOPS)}, or your own as {USER_CLASS_FORM}"
    fix = did_you_mean_function(spec, BUILT_IN_LOOPS, otherwise)
    raise ConfigError(f"{key}={format_value(spec)}: no such name; {fix}")


def _check_tool(spec: str) -> None:
    if not spec or spec in BUILT_IN_TOOLS or spec.startswith("mcp:http") or is_user_spec(spec):
        return
    otherwise = f"use {', '.join(BUILT_IN_TOOLS)}, or your own as {USER_FUNCTION_FORM}"
    fix = did_you_mean_function(spec, BUILT_IN_TOOLS, otherwise)
    raise ConfigError(f"agent.tools={format_value(spec)}: no such name; {fix}")


def _check_external_agents(agent: AgentConfig) -> None:
    """Check the keys of loop=external and of the endpoint. Raises ConfigError."""
    if agent.command and agent.environment:
        raise ConfigError(
            f"agent.command={format_value(agent.command)} and "
            f"agent.environment={format_value(agent.environment)}: "
            "an environment brings its own agent; remove one of the two"
        )
    if agent.environment:
        _check_environment(agent.environment)
    if agent.command:
        _check_command(agent.command)
    if agent.python and shutil.which(agent.python) is None:
        problem = "no such program; name a Python interpreter, such as /my/venv/bin/python"
        refuse_here(value_error("agent.python", agent.python, problem))
    if agent.endpoint or agent.loop == EXTERNAL_LOOP:
        _check_host(agent)


def _check_environment(environment: str) -> None:
    kind, _, name = environment.partition(":")
    if kind not in ENVIRONMENT_KINDS:
        fix = did_you_mean(kind, ENVIRONMENT_KINDS, "use verifiers:NAME or openenv:URL")
        raise value_error("agent.environment", environment, f"no such kind of environment; {fix}")
    if not name.strip():
        raise value_error(
            "agent.environment", environment, "names none; use verifiers:NAME or openenv:URL"
        )


def _check_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise value_error("agent.command", command, f"{e}; check the quotes") from e
    if not words:
        raise value_error("agent.command", command, "blank; name a program, or leave it empty")


def _check_host(agent: AgentConfig) -> None:
    """Raises ConfigError: the endpoint cannot listen there."""
    host = agent.endpoint_host
    ours = "an address of this machine, 127.0.0.1, or 0.0.0.0 for all of them"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, agent.endpoint_port, type=socket.SOCK_STREAM
        )[0]
        if not host:
            raise OSError(None, "empty")
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as e:
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise value_error(
                "agent.endpoint_port",
                agent.endpoint_port,
                f"{os.strerror(e.errno)}; name another, or 0",
            ) from e
        refuse_here(value_error("agent.endpoint_host", host, f"{e.strerror}; name {ours}"))
