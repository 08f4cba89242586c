"""The interface of agent loops, and how a config names them.

trajectory = Trajectory(prompt.ids, limits)
while turn := await trajectory.generate(generate):  # a turn of the policy, kept as sampled
    observation = self.encode_messages(messages, turn.ids)
    if not trajectory.observe("tool", observation):  # context, never trained on
        break
return trajectory
"""

from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from agent_loop.chat_template import TurnEncoder
from agent_loop.episode import Episode
from agent_loop.trajectory import (
    Generate,
    Generated,
    Limits,
    ScoreFunction,
    Trajectory,
)
from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.registry import Registry
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import source_of
from one_step_off.data.messages import Message, normalized_messages
from one_step_off.data.samples import Prompt

__all__ = [
    "LOOPS",
    "AgentLoop",
    "Episode",
    "Generate",
    "Generated",
    "Limits",
    "Loops",
    "ScoreFunction",
    "Trajectory",
]

LOOPS = Registry("agent.loop", "module:Class")

CURRENT_PROMPT: ContextVar[Prompt | None] = ContextVar("CURRENT_PROMPT", default=None)
"""The row of the running trajectory, whose settings the chat template receives in every turn. A
loop serves many rows at once, and `encode_messages` does not receive it."""


class AgentLoop:
    """Base of all loops: override `run`. Keyword-only arguments of `__init__` are settings
    (`agent.loop_kwargs`).

    One object serves all trajectories of a replica at once, so what belongs to one of them lives in
    `run`.

    Attributes:
        tools: JSON schemas that the chat template writes into the prompts of this loop.
        observation_role: the role of the messages between turns; "" where there are none. A chat
            template that cannot write such messages is refused at the start.
        needs_endpoint: whether its agents are outside of the replica, and use `endpoint`.
        endpoint: the replica's `endpoint.replica_server.ReplicaServer`; None where the run has no
            endpoint, and outside of replicas.
    """

    tools: list[dict[str, Any]] | None = None
    observation_role = ""
    needs_endpoint = False
    endpoint: Any = None

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        """
        Raises:
            ConfigError: the config or the tokenizer does not fit this loop. Raised before any
                engine starts.
        """
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.turn_encoder = TurnEncoder(tokenizer)
        if not self.observation_role:
            return
        if not tokenizer.chat_template or cfg.data.chat_template == "never":
            raise ConfigError(
                f"agent.loop: {type(self).__name__} has several turns, so it needs a chat "
                "template; use a model that has one, without data.chat_template=never"
            )
        self.turn_encoder.check_roles((self.observation_role,), cfg.data.chat_template_kwargs)

    async def check(self, prompt: Prompt) -> None:
        """Receives the first row of this loop before any engine starts.

        Raises:
            ConfigError: the row cannot be used.
        """

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory | Episode:
        """Make one trajectory, or an episode of an external agent.

        It must not block the event loop, which all trajectories of a replica share. What it raises
        is an error of its sample, see `reward.on_error`.

        Args:
            prompt: the row of data.
            generate: the engine, for `Trajectory.generate`.
            score: the run's reward function.
            limits: of this trajectory.
        """
        raise NotImplementedError

    def text(self, ids: np.ndarray) -> str:
        """Decode tokens, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def encode_messages(
        self,
        messages: list[Message],
        turn_ids: np.ndarray,
        calls: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        """The tokens that the chat template writes between the policy's turn `turn_ids` and its
        next turn, int32 [T]; see `TurnEncoder.encode`. `calls`: the tool calls in that turn."""
        prompt = CURRENT_PROMPT.get()
        settings = self.cfg.data.chat_template_kwargs
        if prompt is not None:
            settings = settings | prompt.chat_template_kwargs
        messages = normalized_messages(messages, "messages")
        return self.turn_encoder.encode(messages, turn_ids, calls, settings)


class Loops:
    """The loops of a run by name, each made once."""

    def __init__(self, cfg: Config, tokenizer: Any, endpoint: Any = None) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.endpoint = endpoint
        self.loaded: dict[str, AgentLoop] = {}

    def get(self, name: str = "") -> AgentLoop:
        """The loop of that name, or `module:Class`; "": `agent.loop`.

        Raises:
            ConfigError: there is no such loop, or its settings or its tools do not fit.
        """
        name = name or self.cfg.agent.loop
        if name not in self.loaded:
            self.loaded[name] = self._load(name)
        return self.loaded[name]

    def _load(self, name: str) -> AgentLoop:
        loop_class = LOOPS.find(name).function
        if not (isinstance(loop_class, type) and issubclass(loop_class, AgentLoop)):
            raise ConfigError(
                f"agent.loop={name!r}: is not an agent loop; name a subclass of "
                "agent_loop.base.AgentLoop"
            )
        settings = self.cfg.agent.loop_kwargs.get(name) or {}
        misfit = f"agent.loop_kwargs={{{name}: {settings}}}: do not fit"
        with as_config_error(misfit, "fix these settings", (TypeError, ValueError)):
            loop = loop_class(self.cfg, self.tokenizer, **settings)
        loop.endpoint = self.endpoint
        return loop

    def limits(self, tokens: int, source: str = "") -> Limits:
        """The limits of one trajectory with at most `tokens` tokens after its prompt.

        `source`: the name of the prompt's source, whose own limits take precedence.
        """
        agent = self.cfg.agent
        own = source_of(self.cfg.data, source)
        return Limits(
            tokens,
            own.max_turns or agent.max_turns,
            own.max_turn_tokens or agent.max_turn_tokens,
            own.timeout_s or agent.timeout_s,
        )


def uses_endpoint(cfg: Config, loop_names: Iterable[str]) -> bool:
    """Whether a run has an endpoint: by `agent.endpoint`, or because of one of its loops."""
    if cfg.agent.endpoint:
        return True
    loops = [LOOPS.find(name or cfg.agent.loop).function for name in loop_names]
    return any(getattr(loop, "needs_endpoint", False) for loop in loops)
