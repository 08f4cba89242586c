"""The config section agent: agent loops and external agents."""

from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config.keys import config_key, path_key


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
        1024, "trajectories, and open episodes of agents, at the same time in each replica", low=1
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
