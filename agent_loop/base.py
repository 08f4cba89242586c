"""What every agent loop is made of: the interface, the trajectory that it builds, and how a config names loops.

    talk = Trajectory(prompt.ids, limits)
    while said := await talk.say(generate):                      # the policy's turn, in tokens, kept as sampled
        if not talk.hear("tool", self.turn(messages, said.ids)):  # tokens that others made: context, never trained on
            break
    return talk

What the policy said is never tokenised again: the ids and log-probs that are trained on are those that were sampled.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.registry import Registry
from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_GENERATED, Prompt, Sample
from one_step_off.rewards.reward import Reward

LOOPS = Registry("agent.loop", "module:Class")
AGAIN = "That is wrong. Try again."
_MARKS = secrets.token_hex(16), secrets.token_hex(16)  # nobody can say them by chance or on purpose


@dataclass(frozen=True)
class Generated:
    """What the engine made of one request: ids int32 [R], log_probs float32 [R] (nats), versions int32 [R]. In a
    trajectory also what others said, under their `role`; `train`: it is trained on."""

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    incarnation: int
    finish_reason: str
    role: str = "assistant"
    train: bool = True


Generate = Callable[[np.ndarray, int], Awaitable[Generated]]
"""(token ids so far, most new tokens) to new tokens; sampling settings and seed are bound by the caller."""

ScoreFunction = Callable[[str], Awaitable[Reward | None]]
"""What the run's reward function says of a response, asked in a process of its own: a float with `total` and `parts`.
None: it was not judged, in time or at all."""


@dataclass(frozen=True)
class Limits:
    """Of one trajectory: the policy's turns, tokens after the prompt (`turn_tokens`: of each turn), and seconds.

    The time is looked at between turns: when it is up no new turn begins, but none is cut off.
    """

    tokens: int
    turns: int = 1
    turn_tokens: int | None = None
    seconds: float = float("inf")


@dataclass
class Trajectory:
    """A conversation as it grows.

    Attributes:
        prompt_ids: int32 [P].
        segments: what came after the prompt; "assistant" is the policy.
        finish_reason: the last turn's, as vLLM says it ("length": it was cut at the most tokens after the prompt), or the
            limit that ended it: "turn_length" (that turn was cut by it), "turns", "time", "room" (no more would fit).
        reward: set by a loop that knows it: a number, parts by name, or what `score` gave; None: the run's reward function
            is asked about the policy's last turn.
        late: set by a loop whose reward counts as 0 because the reward function took too long; it is reported as such.
        facts: numbers to report, as {"tool_calls": 2}.
    """

    prompt_ids: np.ndarray
    limits: Limits
    segments: list[Generated] = field(default_factory=list)
    finish_reason: str = ""
    reward: Reward | float | dict[str, float] | None = None
    late: bool = False
    facts: dict[str, float] = field(default_factory=dict)
    incarnation: int = 0
    begin: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def turns(self) -> int:
        """How often the policy spoke."""
        return sum(s.role == "assistant" for s in self.segments)

    @property
    def cut(self) -> bool:
        """Whether the last turn did not come to its end."""
        return self.finish_reason in ("length", "turn_length")

    @property
    def seconds_left(self) -> float:
        """Until the time limit; not below 0."""
        return max(0.0, self.begin + self.limits.seconds - time.monotonic())

    @property
    def ids(self) -> np.ndarray:
        """All tokens so far, int32 [P + R]."""
        return np.concatenate([self.prompt_ids, *(s.ids for s in self.segments)]).astype(np.int32)

    async def say(self, generate: Generate, train: bool = True) -> Generated | None:
        """The policy's next turn; None where a limit is reached (`finish_reason` names it), or the last one was cut.

        Raises:
            RuntimeError: weights of another incarnation made this turn than the turns before.
        """
        room = self.limits.tokens - self.length
        spent = {
            "turns": self.turns >= self.limits.turns,
            "room": room < 1,
            "time": self.seconds_left == 0,
        }
        if self.cut or any(spent.values()):
            self.finish_reason = (
                self.finish_reason if self.cut else next(name for name, up in spent.items() if up)
            )
            return None
        out = await generate(self.ids, min(room, self.limits.turn_tokens or room))
        if self.turns and out.incarnation != self.incarnation:
            raise RuntimeError(
                f"turn {self.turns}: weights of incarnation {out.incarnation}, not {self.incarnation}"
            )
        self.incarnation, self.finish_reason = out.incarnation, out.finish_reason
        if self.cut and len(out.ids) < room:
            self.finish_reason = "turn_length"
        self.segments.append(replace(out, train=train))
        return out

    def hear(self, role: str, ids: np.ndarray) -> bool:
        """Append tokens that the policy did not make. False, and nothing is appended, where no answer would fit."""
        n = len(ids)
        if self.length + n >= self.limits.tokens:
            self.finish_reason = self.finish_reason if self.cut else "room"
            return False
        own = (
            np.asarray(ids, np.int32),
            np.zeros(n, np.float32),
            np.full(n, NOT_GENERATED, np.int32),
        )
        self.segments.append(Generated(*own, self.incarnation, "", role, train=False))
        return True

    def count(self, name: str, number: float = 1) -> None:
        """Add to a fact."""
        self.facts[name] = self.facts.get(name, 0) + number

    def sample(self, prompt: Prompt, index: int) -> Sample:
        """The trajectory as training takes it, without what came after the policy's last turn.

        Raises:
            RuntimeError: the policy never spoke.
        """
        last = max((i for i, s in enumerate(self.segments) if s.role == "assistant"), default=-1)
        if last < 0:
            raise RuntimeError(
                f"prompt {prompt.id}, sample {index}: its agent loop ended without a turn of the policy"
            )
        columns = (
            (s.ids, s.log_probs, np.full(len(s.ids), s.train), s.versions)
            for s in self.segments[: last + 1]
        )
        own = (*map(np.concatenate, zip(*columns, strict=True)), self.incarnation)
        extra = (
            {"agent": {"turns": float(self.turns)} | self.facts}
            if self.facts or self.turns > 1
            else {}
        )
        return Sample(
            prompt.id, index, self.prompt_ids, *own, finish_reason=self.finish_reason, extra=extra
        )


class AgentLoop:
    """Base of all loops: override `run`. Keyword-only arguments of `__init__` are settings (`agent.loop_kwargs`).

    One object serves all trajectories of a replica at once, so what belongs to one of them lives in `run`.
    `tools` are the JSON schemas that the chat template writes into the prompts of this loop. `hears`: the role of what
    comes between turns, "" where nothing does; a chat template that cannot write it is found out at the start.
    """

    tools: list[dict[str, Any]] | None = None
    hears = ""

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        """Raises ConfigError where the config or the tokenizer does not serve this loop: before any engine starts."""
        self.cfg, self.tokenizer = cfg, tokenizer
        self._frame = lru_cache(64)(self._frame)
        if self.hears and (not tokenizer.chat_template or cfg.data.chat_template == "never"):
            mend = "use a model that has one, and not data.chat_template=never"
            raise ConfigError(
                f"agent.loop: {type(self).__name__} has turns, which a chat template writes; {mend}"
            )
        if self.hears:
            self._frame((self.hears,))

    async def check(self, prompt: Prompt) -> None:
        """Told the first row of this loop before any engine starts. Raises ConfigError where it cannot be used."""

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """Make one trajectory. What it raises ends the run; it must not block the event loop that all of them share."""
        raise NotImplementedError

    def text(self, ids: np.ndarray) -> str:
        """Tokens in words, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    @cached_property
    def _special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder
        return {i for i, token in added.items() if token.special} | set(
            self.tokenizer.all_special_ids
        )

    def _tokens(self, text: str, **how: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **how)["input_ids"]

    def _written(self, messages: list[dict[str, str]]) -> str:
        """What the template writes after a turn of the policy. It rewrites earlier turns (drops thoughts, strips
        blanks), so a mark stands for that one. Raises ConfigError: the template does not take such messages."""
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARKS[0]}]
        what = f"agent.loop: the model's chat template does not take {messages[0]['role']!r}"
        with as_config_error(what, "take another model"):
            whole = self.tokenizer.apply_chat_template(
                before + messages, tokenize=False, add_generation_prompt=True
            )
            if whole.count(_MARKS[0]) != 1:
                raise ValueError("it does not show what the assistant said, once")
        return whole.partition(_MARKS[0])[2]

    def _frame(self, roles: tuple[str, ...]) -> tuple[list[str], int]:
        """What the template writes around contents, with their numbers between, and its special tokens. Raises
        ConfigError: it does not show each of them once and in order, so that the policy would miss what was said."""
        mark = _MARKS[1]
        text = self._written(
            [{"role": role, "content": f"{mark}{i}."} for i, role in enumerate(roles)]
        )
        parts = re.split(rf"{mark}(\d+)\.", text)
        if parts[1::2] != [str(i) for i in range(len(roles))]:
            said = (
                f"{len(roles)} messages in a row of {roles[0]!r}"
                if len(roles) > 1
                else f"what {roles[0]!r} says"
            )
            raise ConfigError(
                f"agent.loop: the model's chat template does not show {said}; take another model"
            )
        return parts, sum(i in self._special for i in self._tokens(text))

    def turn(self, messages: list[dict[str, str]], said: np.ndarray) -> np.ndarray:
        """What the chat template writes between the policy's tokens `said` and its next turn, int32 [T].

        That is the end of its turn (as far as the policy did not say it itself), the messages and the next cue. Names of
        special tokens inside of the messages are plain text: a tool's output must not open a turn of its own.

        Raises:
            ConfigError: the template does not take such messages.
        """
        # A lone surrogate is no text that can be tokenised.
        clean = [
            m | {"content": m["content"].encode("utf-8", "replace").decode()} for m in messages
        ]
        tail, (parts, special) = (
            self._tokens(self._written(clean)),
            self._frame(tuple(m["role"] for m in clean)),
        )
        if (
            sum(i in self._special for i in tail) != special
        ):  # more than the template's own: then part by part
            tail = []
            for i, part in enumerate(parts):
                theirs = bool(i % 2)
                tail += self._tokens(
                    clean[int(part)]["content"] if theirs else part, split_special_tokens=theirs
                )
        if len(said) and int(said[-1]) in self._special and tail and tail[0] in self._special:
            tail = tail[1:]
        return np.asarray(tail, np.int32)


@LOOPS.register("single_turn")
class SingleTurn(AgentLoop):
    """One prompt, one answer."""

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        await talk.say(generate)
        return talk


@LOOPS.register("retry_with_feedback")
class RetryWithFeedback(AgentLoop):
    """Up to `agent.max_turns` tries, while the verifier says wrong; the reward is that of the last one, times `discount`
    for each try before it."""

    hears = "user"

    def __init__(
        self,
        cfg: Config,
        tokenizer: Any,
        *,
        feedback: str = AGAIN,
        passes_at: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        """`feedback`: what the user says then. `passes_at`: the reward from which on an answer counts as right."""
        super().__init__(cfg, tokenizer)
        self.message = [{"role": "user", "content": feedback}]
        self.passes_at, self.discount = passes_at, discount

    async def run(
        self, prompt: Prompt, generate: Generate, score: ScoreFunction, limits: Limits
    ) -> Trajectory:
        """See `AgentLoop.run`."""
        talk = Trajectory(prompt.ids, limits)
        while said := await talk.say(generate):
            found = Reward.of(await score(self.text(said.ids)))
            talk.late = found is None
            reward = Reward(0.0) if found is None else found
            talk.reward = reward.scaled(self.discount ** (talk.turns - 1))
            done = reward.total >= self.passes_at or talk.turns >= limits.turns
            if done or not talk.hear("user", self.turn(self.message, said.ids)):
                break
        talk.count("tries", talk.turns)
        return talk


class Loops:
    """The loops of a run by name, each made once."""

    def __init__(self, cfg: Config, tokenizer: Any) -> None:
        self.cfg, self.tokenizer, self.made = cfg, tokenizer, {}

    def get(self, name: str = "") -> AgentLoop:
        """The loop of that name, or `module:Class`; "": `agent.loop`.

        Raises:
            ConfigError: no such loop, or its settings or its tools do not fit.
        """
        name = name or self.cfg.agent.loop
        if name not in self.made:
            own, found = self.cfg.agent.loop_kwargs.get(name) or {}, LOOPS.find(name).function
            if not (isinstance(found, type) and issubclass(found, AgentLoop)):
                raise ConfigError(
                    f"agent.loop={name!r}: is no agent loop; name a class over agent_loop.base.AgentLoop"
                )
            what = f"agent.loop_kwargs={{{name}: {own}}}: do not fit"
            with as_config_error(what, "fix these settings", (TypeError, ValueError)):
                self.made[name] = found(self.cfg, self.tokenizer, **own)
        return self.made[name]

    def limits(self, tokens: int) -> Limits:
        """Of one trajectory with at most `tokens` tokens after its prompt."""
        own = self.cfg.agent
        return Limits(tokens, own.max_turns, own.max_turn_tokens, own.timeout_s)
