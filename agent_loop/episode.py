"""What an external agent asked of the policy for one prompt: a tree of turns, in tokens.

A request names all tokens that the policy sees, its context. A turn whose context begins with
exactly the tokens of an earlier turn continues that turn's segment; any other context begins a new
segment. Each segment becomes one sample, with its own context. So each token is trained on once,
under the context in which it was sampled.

    segment 0:  context 0 | turn 0 | observation | turn 1
    segment 1:  context 0 | turn 0 | another observation | turn 2      (trains turn 2 alone)
"""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.trajectory import (
    Generate,
    Generated,
    Limits,
    experts_of_sample,
    plain_facts,
    without_read,
)
from one_step_off.data.messages import openai_messages
from one_step_off.data.samples import NOT_GENERATED, Prompt, Sample
from one_step_off.rewards.reward import Reward

LIMITS = ("turns", "time")
"""Reasons for which no turn may begin, while those that have begun may end."""

MAX_DEPTH = 32  # of nested values: deeper ones are text


class EpisodeOver(Exception):
    """A limit of the episode refuses a turn, or it has ended.

    Attributes:
        reason: a finish reason of `Trajectory`: "turns", "time", or "ended".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def data_kind(prompt: Prompt) -> tuple[str, str]:
    """Rows of one kind have rewards on one scale."""
    return prompt.source, prompt.data_source


class RewardMissing(RuntimeError):
    """An agent gave no reward, while agents of other episodes did."""

    def __init__(self, reason: str) -> None:
        """`reason`: why its agent ended; "": it ended well."""
        super().__init__(
            f"its agent gave no reward ({reason or 'it ended well'}), but agents of other episodes "
            "did; rewards of agents and of reward.function are not mixed: post a reward in every "
            "episode, or in none"
        )


@dataclass(eq=False)
class Turn:
    """One answer of the policy. A turn holds only what its parent does not, because contexts grow
    with every turn.

    Attributes:
        parent: the turn whose tokens the context begins with; None: there is none.
        new_ids: int32 [C], the context behind the parent's tokens.
        generated: the answer.
        continues: whether it belongs to the segment of its parent.
        delivered: whether the agent received the answer. The policy learns nothing from an answer
            that no agent has seen.
        cut_by_agent: the answer was cut off at the agent's own limit of tokens, which is below
            those of the run.
        cut_within_segment: it was cut off where its segment had room for more: by the agent or at
            agent.max_turn_tokens.
        tool_calls: that the endpoint read in it, as {"name": ..., "arguments": ...}.
        no_room: its context leaves no room for an answer, so it has no tokens. It is for the agent
            alone, and no part of the episode.
    """

    parent: "Turn | None"
    new_ids: np.ndarray
    generated: Generated
    continues: bool
    delivered: bool = False
    cut_by_agent: bool = False
    cut_within_segment: bool = False
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    no_room: bool = False

    def __post_init__(self) -> None:
        self.start = self.parent.length if self.parent else 0
        self.context_length = self.start + len(self.new_ids)
        self.length = self.context_length + len(self.generated.ids)

    @property
    def context_ids(self) -> np.ndarray:
        """All that the policy saw, int32."""
        if self.parent is None:
            return self.new_ids
        return np.concatenate([self.parent.ids, self.new_ids])

    @property
    def ids(self) -> np.ndarray:
        """Context and answer, int32 [length]."""
        pieces: list[np.ndarray] = []
        turn: Turn | None = self
        while turn is not None:
            pieces += [turn.generated.ids, turn.new_ids]
            turn = turn.parent
        return np.concatenate(pieces[::-1])

    def is_in(self, context_ids: np.ndarray) -> bool:
        """Whether a context that has the parent's tokens has this turn's own behind them."""
        if len(context_ids) < self.length:
            return False
        context = context_ids[self.start : self.context_length]
        answer = context_ids[self.context_length : self.length]
        same_context = np.array_equal(context, self.new_ids)
        return same_context and np.array_equal(answer, self.generated.ids)


class Episode:
    """One agent's work on one prompt.

    Attributes:
        key: that the agent's requests carry.
        name: for files and messages: the prompt and some letters of its own.
        limits: `tokens` is the limit of each segment after its first context.
        max_sequence: tokens of context and answer together at most.
        turns_done: in the order in which they ended.
        reward: set by the agent or its environment: a number, or parts by name. None: the run's
            reward function scores the policy's last turn.
        failure: why the agent gave up, as it said; "" if it did not. The sample is an error then.
        late: see `Trajectory`.
        facts: numbers to report.
        extra: what each of its samples has in its `extra`, as {"agent_log": PATH}.
        over: why it takes no more turns; "" while it does.
        over_message: the same in a line for the agent.
        limit_reached: the first limit that ended it, as a finish reason; "": none did. After
            "length", no room for a turn, the agent may go on with a shorter context.
        no_room: why a context left no room for a turn.
        refusal: the last error that a request got, for the message if the agent fails.
        begin: in seconds of `time.monotonic`.
    """

    late = False

    def __init__(
        self, key: str, prompt: Prompt, generate: Generate, limits: Limits, max_sequence: int
    ) -> None:
        self.key = key
        self.prompt = prompt
        epoch, row = prompt.id
        data = f"val{-epoch}" if epoch < 0 else str(epoch)  # a file's name must not begin with "-"
        self.name = f"{data}_{row}_{key[-6:]}"
        self.generate = generate
        self.limits = limits
        self.max_sequence = max_sequence
        self.turns_begun = 0
        self.turns_done: list[Turn] = []
        self.claimed: set[Turn] = set()  # turns that another turn continues, or is about to
        self.failure = ""
        self.reward: Reward | float | dict[str, float] | None = None
        self.facts: dict[str, float] = {}
        self.extra: dict[str, Any] = {}
        self.over = ""
        self.over_message = ""
        self.limit_reached = ""
        self.no_room = ""
        self.refusal = ""
        self.begin = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Until the time limit; not below 0."""
        return max(0.0, self.begin + self.limits.seconds - time.monotonic())

    @property
    def turns(self) -> int:
        """Finished turns that the agent received."""
        return sum(turn.delivered for turn in self.turns_done)

    @property
    def is_single_turn(self) -> bool:
        """Whether one turn is all that it has."""
        return self.turns == 1

    @property
    def last_turn(self) -> Generated:
        """The policy's last turn that the agent received. Raises IndexError: there is none."""
        return [turn for turn in self.turns_done if turn.delivered][-1].generated

    def end(self, reason: str = "ended", message: str = "") -> None:
        """Take no more turns.

        Args:
            reason: see `EpisodeOver`.
            message: one line for the agent.
        """
        if not self.over:
            self.over = reason
            self.over_message = message or f"this episode has ended: {reason}"

    async def turn(
        self, context_ids: np.ndarray, max_tokens: int, stop: Sequence[str] = ()
    ) -> Turn:
        """The policy's answer to a context. Where the context leaves no room for one: a turn
        without tokens that was cut at its length, see `Turn.no_room`. It counts as a turn that has
        begun, so that an agent that asks again and again comes to an end.

        Args:
            context_ids: int32 [C], C > 0.
            max_tokens: of the answer, as the agent asked for.
            stop: texts at which the answer ends.

        Raises:
            EpisodeOver: a limit is reached, or the episode has ended.
            RuntimeError: weights of another attempt made this turn than the turns before.
        """
        self._raise_if_over()
        parent = self._parent(context_ids)
        continues = parent is not None and parent not in self.claimed
        tokens_left = self._tokens_left(context_ids, parent if continues else None)
        self.turns_begun += 1
        if tokens_left <= 0:
            return self._turn_without_room(context_ids)
        limit = min(tokens_left, self.limits.turn_tokens or tokens_left)
        if continues:
            self.claimed.add(parent)
        try:
            generated = await self.generate(context_ids, min(max_tokens, limit), tuple(stop))
        except BaseException:
            if continues:
                self.claimed.discard(parent)
            raise
        if self.over not in LIMITS:  # a limit that refused another request leaves this turn
            self._raise_if_ended()
        if self.limit_reached == "length":  # the agent has shortened its context
            self.limit_reached = ""
        self._check_attempt(generated)
        if continues:
            before = [turn.generated for turn in self._segment_of(parent)]
            generated = without_read(generated, before)
        new_ids = np.array(context_ids[parent.length if parent else 0 :], np.int32)
        turn = Turn(parent, new_ids, generated, continues)
        if generated.finish_reason == "length":
            turn.cut_by_agent = max_tokens <= len(generated.ids) < limit
            turn.cut_within_segment = len(generated.ids) < tokens_left
        if parent is not None:
            parent.delivered = True  # the agent has built on it
        self.turns_done.append(turn)
        return turn

    def _raise_if_ended(self) -> None:
        if self.over:
            raise EpisodeOver(self.over, self.over_message)

    def _raise_if_over(self) -> None:
        self._raise_if_ended()
        if self.turns_begun >= self.limits.turns:
            self.end("turns", f"agent.max_turns={self.limits.turns} is reached")
            raise self._refused("turns", self.over_message)
        if self.seconds_left == 0:
            self.end("time", f"agent.timeout_s={self.limits.seconds:g} is over")
            raise self._refused("time", self.over_message)

    def _refused(self, limit: str, message: str) -> EpisodeOver:
        self.limit_reached = self.limit_reached or limit
        return EpisodeOver(limit, message)

    def _turn_without_room(self, context_ids: np.ndarray) -> Turn:
        self.limit_reached = self.limit_reached or "length"
        self.no_room = (
            f"a context of {len(context_ids)} tokens leaves no room for an answer: "
            f"data.max_prompt_length + data.max_response_length = {self.max_sequence}, and "
            f"{self.limits.tokens} tokens may follow the first context of a segment"
        )
        nothing = np.zeros(0, np.int32)
        answer = Generated(nothing, np.zeros(0, np.float32), nothing, 0, "length")
        return Turn(None, context_ids, answer, continues=False, no_room=True)

    def _tokens_left(self, context_ids: np.ndarray, parent: Turn | None) -> int:
        """How many tokens an answer may have; 0 or less: there is no room for one."""
        first_length = len(context_ids)
        if parent is not None:
            first_length = self._segment_of(parent)[0].context_length
        in_segment = self.limits.tokens - (len(context_ids) - first_length)
        return min(in_segment, self.max_sequence - len(context_ids))

    def _check_attempt(self, generated: Generated) -> None:
        for turn in self.turns_done[:1]:
            if turn.generated.attempt != generated.attempt:
                raise RuntimeError(
                    f"turn {len(self.turns_done)}: weights of attempt "
                    f"{generated.attempt}, not {turn.generated.attempt}"
                )

    def _parent(self, context_ids: np.ndarray) -> Turn | None:
        """The turn that a context continues: the longest one; of several, one that no other turn
        continues."""
        found: set[Turn | None] = {None}
        for turn in self.turns_done:  # parents come before their children
            if turn.parent in found and turn.is_in(context_ids):
                found.add(turn)
        found.discard(None)
        return max(found, key=lambda turn: (turn.length, turn not in self.claimed), default=None)

    @staticmethod
    def _segment_of(turn: Turn) -> list[Turn]:
        """The turns of its segment up to this one."""
        chain = [turn]
        while chain[-1].continues:
            chain.append(chain[-1].parent)
        return chain[::-1]

    def segments(self) -> list[list[Turn]]:
        """The turns that the agent received, by segment, in the order of the segments' first
        turns."""
        by_first: dict[Turn, list[Turn]] = {}
        for turn in self.turns_done:
            if turn.delivered:
                chain = self._segment_of(turn)
                by_first[chain[0]] = max(by_first.get(chain[0], []), chain, key=len)
        return sorted(by_first.values(), key=lambda chain: self.turns_done.index(chain[0]))

    def samples(self, prompt: Prompt, index: int) -> list[Sample]:
        """One sample per segment, as training takes them. All have the same index.

        Raises:
            RuntimeError: there is no turn, or the agent has reported a failure.
        """
        if self.failure:
            raise RuntimeError(f"its agent reported: {self.failure}")
        segments = self.segments()
        if not segments:
            raise RuntimeError(
                f"prompt {prompt.id}, sample {index}: its agent ended without a turn of the policy"
            )
        samples = [self._sample(prompt, index, segment) for segment in segments]
        if len(segments) > 1:
            for i, segment in enumerate(segments):
                parent = segment[0].parent
                positions = [k for k, other in enumerate(segments) if parent in other]
                parent_index = positions[0] if positions else -1
                place = {"index": i, "count": len(segments), "parent": parent_index}
                samples[i].extra["segment"] = place
        return samples

    def _sample(self, prompt: Prompt, index: int, segment: list[Turn]) -> Sample:
        pieces = [segment[0].generated]
        for turn in segment[1:]:
            pieces.append(_observation(turn.new_ids, turn.generated.attempt))
            pieces.append(turn.generated)
        turns = float(len(segment))
        extra: dict[str, Any] = {"agent": {"turns": turns} | plain_facts(self.facts)} | self.extra
        calls = [{"turn": i} | call for i, turn in enumerate(segment) for call in turn.tool_calls]
        if calls:
            extra["tool_calls"] = calls
        return Sample(
            prompt.id,
            index,
            segment[0].context_ids,
            response_ids=np.concatenate([piece.ids for piece in pieces]),
            log_probs=np.concatenate([piece.log_probs for piece in pieces]),
            loss_mask=np.concatenate([np.full(len(p.ids), p.train) for p in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
            attempt=segment[-1].generated.attempt,
            finish_reason=self._finish_reason(segment[-1]),
            extra=extra,
            **experts_of_sample(pieces, segment[0].context_length),
        )

    def _finish_reason(self, turn: Turn) -> str:
        """Of a segment that ends with this turn: the limit that ended the episode behind it, or
        what ended the turn."""
        if self.limit_reached and turn.generated is self.last_turn:
            return self.limit_reached
        return "turn_length" if turn.cut_within_segment else turn.generated.finish_reason


def _observation(ids: np.ndarray, attempt: int) -> Generated:
    count = len(ids)
    return Generated(
        ids=np.asarray(ids, np.int32),
        log_probs=np.zeros(count, np.float32),
        versions=np.full(count, NOT_GENERATED, np.int32),
        attempt=attempt,
        finish_reason="",
        role="context",
        train=False,
    )


def episode_row(prompt: Prompt) -> dict[str, Any]:
    """What an agent receives of a row: `json.dumps(..., allow_nan=False)` takes it.

    Returns:
        id: [epoch, row].
        prompt: the prompt as text, as the model would read it.
        messages: the chat in OpenAI's form, as the endpoint takes it; a prompt without a chat is
            one message of the user.
        tools: the row's own tools, where it has any.
        chat_template_kwargs: settings of the chat template, which the endpoint uses, where there
            are any.
        ground_truth, data_source: arguments of the reward function.
        extra: the row's other columns. NaN and infinities are null, bytes are base64, and what
            JSON has no form for is text.
    """
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    of_template = {"tools": prompt.tools, "chat_template_kwargs": prompt.chat_template_kwargs}
    return {
        "id": list(prompt.id),
        "prompt": prompt.text,
        "messages": _as_json(openai_messages(messages)),
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": _as_json(prompt.extra),
        **{name: _as_json(value) for name, value in of_template.items() if value},
    }


def _as_json(value: Any, depth: int = 0) -> Any:
    """A value in types of JSON."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(name): _as_json(item, depth + 1) for name, item in value.items()}
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, (list, tuple, set)):
            return [_as_json(item, depth + 1) for item in value]
    return str(value)
