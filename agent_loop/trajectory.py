"""A trajectory as it grows, turn by turn, in tokens.

The policy's tokens are never tokenized again: the ids and log-probs that are trained on are those
that were sampled.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from one_step_off.config.plain_values import plain_number
from one_step_off.data.samples import NOT_GENERATED, Prompt, Sample
from one_step_off.rewards.reward import Reward


@dataclass(frozen=True)
class Generated:
    """What the engine made of one request; in a trajectory also an observation, under its `role`.

    Attributes:
        ids: int32 [R].
        log_probs: float32 [R], nats.
        versions: int32 [R], of the weights that made each token.
        attempt: of the trainer that made these weights.
        finish_reason: as vLLM reports it.
        role: "assistant" is the policy.
        train: whether it is trained on.
        experts: with `rollout.replay_routing` those that the engine chose for each token that it
            read: uint8 or uint16 [tokens, layers, experts per token], of context and answer but the
            last token. A trajectory keeps of each turn those of the tokens that no turn before has
            read.
        draft_tokens: with `rollout.speculation` how many were proposed and how many of them
            accepted; None where the engine has not counted: for an answer that ended at a stop
            text.
        queue_s: how long the request waited in the engine, in seconds; 0 where it does not say.
        prefill_s: from then until the first token; 0 where it does not say.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    attempt: int
    finish_reason: str
    role: str = "assistant"
    train: bool = True
    experts: np.ndarray | None = None
    draft_tokens: tuple[int, int] | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0


class Generate(Protocol):
    """The engine, bound to the sampling settings and the seeds of one trajectory."""

    def __call__(
        self, ids: np.ndarray, max_tokens: int, stop: tuple[str, ...] = ()
    ) -> Awaitable[Generated]:
        """The tokens that follow `ids`, int32 [T], at most `max_tokens`; a turn also ends at the
        texts in `stop`."""
        ...


ScoreFunction = Callable[[str], Awaitable[Reward | None]]
"""The reward of a response by the run's reward function, which runs in a process of its own: a
float with `total` and `parts`. None: it was not scored, in time or at all."""


@dataclass(frozen=True)
class Limits:
    """The limits of one trajectory.

    Time is checked between turns: when it is up no new turn begins, but a running one ends.

    Attributes:
        tokens: after the prompt.
        turns: of the policy.
        turn_tokens: of each turn; None: `tokens` is the only limit.
        seconds: for the whole trajectory.
    """

    tokens: int
    turns: int = 1
    turn_tokens: int | None = None
    seconds: float = float("inf")


@dataclass
class Trajectory:
    """A conversation as it grows: turns of the policy (`generate`) and observations (`observe`).

    Attributes:
        prompt_ids: int32 [P].
        segments: what came after the prompt, in order.
        finish_reason: of the last turn, as vLLM reports it ("length": it was cut at the most tokens
            after the prompt), or the limit that ended the trajectory: "turn_length" (the turn was
            cut at its own limit), "turns", "time", "room" (nothing more would fit).
        reward: set by a loop that knows it: a number, parts by name, or what `score` returned.
            None: the run's reward function scores the policy's last turn.
        late: set by a loop whose reward is 0 because the reward function took too long; the sample
            is reported as such.
        failure: one line: what broke it off, though it is trained on. The sample reports it as
            `extra["agent_failure"]`.
        facts: numbers to report, as {"tool_calls": 2}.
        attempt: of the trainer whose weights made the turns.
        begin: when the trajectory began, in seconds of `time.monotonic`.
    """

    prompt_ids: np.ndarray
    limits: Limits
    segments: list[Generated] = field(default_factory=list)
    finish_reason: str = ""
    reward: Reward | float | dict[str, float] | None = None
    late: bool = False
    failure: str = ""
    facts: dict[str, float] = field(default_factory=dict)
    attempt: int = 0
    begin: float = field(default_factory=time.monotonic)

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return sum(len(segment.ids) for segment in self.segments)

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(segment.role == "assistant" for segment in self.segments)

    @property
    def truncated(self) -> bool:
        """Whether the last turn was cut off by a limit."""
        return self.finish_reason in ("length", "turn_length")

    @property
    def seconds_left(self) -> float:
        """Until the time limit; not below 0."""
        return max(0.0, self.begin + self.limits.seconds - time.monotonic())

    @property
    def ids(self) -> np.ndarray:
        """All tokens so far, int32 [P + R]."""
        parts = [self.prompt_ids, *(segment.ids for segment in self.segments)]
        return np.concatenate(parts).astype(np.int32)

    async def generate(self, generate: Generate, train: bool = True) -> Generated | None:
        """Generate the policy's next turn.

        Args:
            generate: what the loop's `run` received.
            train: whether this turn is trained on.

        Returns:
            The turn; None where a limit is reached (`finish_reason` names it), or the last turn was
            cut off.

        Raises:
            RuntimeError: weights of another attempt made this turn than the turns before.
        """
        limit = self._limit_reached()
        if limit:
            self.finish_reason = limit
            return None
        tokens_left = self.limits.tokens - self.length
        max_tokens = min(tokens_left, self.limits.turn_tokens or tokens_left)
        turn = await generate(self.ids, max_tokens)
        if self.turns and turn.attempt != self.attempt:
            raise RuntimeError(
                f"turn {self.turns}: weights of attempt {turn.attempt}, not {self.attempt}"
            )
        self.attempt = turn.attempt
        self.finish_reason = turn.finish_reason
        if self.truncated and len(turn.ids) < tokens_left:
            self.finish_reason = "turn_length"
        self.segments.append(replace(without_read(turn, self.segments), train=train))
        return turn

    def _limit_reached(self) -> str:
        """The finish reason because of which no turn may follow; "" if one may."""
        if self.truncated:
            return self.finish_reason
        if self.turns >= self.limits.turns:
            return "turns"
        if self.length >= self.limits.tokens:
            return "room"
        if self.seconds_left == 0:
            return "time"
        return ""

    def observe(self, role: str, ids: np.ndarray) -> bool:
        """Append tokens that the policy did not make: context, never trained on.

        Args:
            role: whose message it is, as "tool" or "user".
            ids: int32 [T].

        Returns:
            Whether they were appended: not where no answer would fit behind them.
        """
        count = len(ids)
        if self.length + count >= self.limits.tokens:
            if not self.truncated:
                self.finish_reason = "room"
            return False
        observation = Generated(
            ids=np.asarray(ids, np.int32),
            log_probs=np.zeros(count, np.float32),
            versions=np.full(count, NOT_GENERATED, np.int32),
            attempt=self.attempt,
            finish_reason="",
            role=role,
            train=False,
        )
        self.segments.append(observation)
        return True

    def count(self, name: str, number: float = 1) -> None:
        """Add to a fact. Raises UnstorableValue: by no number."""
        self.facts[name] = self.facts.get(name, 0) + plain_number(number, f"fact {name}")

    @property
    def is_single_turn(self) -> bool:
        """Whether one turn of the policy is all that came after the prompt."""
        return len(self.segments) == 1

    @property
    def last_turn(self) -> Generated:
        """The policy's last turn. Raises IndexError: there is none."""
        return [segment for segment in self.segments if segment.role == "assistant"][-1]

    def samples(self, prompt: Prompt, index: int) -> list[Sample]:
        """The one `sample`, in a list: see `Episode.samples`."""
        return [self.sample(prompt, index)]

    def sample(self, prompt: Prompt, index: int) -> Sample:
        """The trajectory as training takes it, without what came after the policy's last turn.

        Raises:
            RuntimeError: it has no turn of the policy.
            UnstorableValue: a fact is no number.
        """
        last_turn = -1
        for i, segment in enumerate(self.segments):
            if segment.role == "assistant":
                last_turn = i
        if last_turn < 0:
            raise RuntimeError(
                f"prompt {prompt.id}, sample {index}: its agent loop ended without a turn of the "
                "policy"
            )
        segments = self.segments[: last_turn + 1]
        extra: dict[str, Any] = {}
        if self.facts or self.turns > 1:
            extra["agent"] = {"turns": float(self.turns)} | plain_facts(self.facts)
        if self.failure:
            extra["agent_failure"] = self.failure
        return Sample(
            prompt.id,
            index,
            self.prompt_ids,
            response_ids=np.concatenate([s.ids for s in segments]),
            log_probs=np.concatenate([s.log_probs for s in segments]),
            loss_mask=np.concatenate([np.full(len(s.ids), s.train) for s in segments]),
            versions=np.concatenate([s.versions for s in segments]),
            attempt=self.attempt,
            finish_reason=self.finish_reason,
            extra=extra,
            **experts_of_sample(segments, len(self.prompt_ids)),
        )


def without_read(turn: Generated, before: Sequence[Generated]) -> Generated:
    """A turn with the experts of those tokens alone that no turn before it has read. Those of the
    others were chosen when these tokens were generated.

    Args:
        before: the turns that its context holds, with their experts as this function leaves them.
    """
    if turn.experts is None:
        return turn
    read = sum(len(other.experts) for other in before if other.experts is not None)
    return replace(turn, experts=turn.experts[read:])


def experts_of_sample(pieces: Sequence[Generated], prompt_length: int) -> dict[str, np.ndarray]:
    """The fields of a `Sample` for the experts of its tokens; {} where those of a token are not
    known.

    Args:
        pieces: all that came after the prompt, in order, as `without_read` leaves it.
        prompt_length: in tokens.
    """
    parts = [piece.experts for piece in pieces if piece.experts is not None]
    length = prompt_length + sum(len(piece.ids) for piece in pieces)
    if sum(map(len, parts)) != length - 1:
        return {}
    experts = np.concatenate(parts)
    # Copies: the prompt's part may be dropped for that of another sample.
    return {
        "prompt_experts": experts[:prompt_length].copy(),
        "response_experts": experts[prompt_length:].copy(),
    }


def plain_facts(facts: dict[str, float]) -> dict[str, float]:
    """The numbers that an agent loop reports, as Python's own. Raises UnstorableValue: one is no
    finite number."""
    return {name: plain_number(number, f"fact {name}") for name, number in facts.items()}
