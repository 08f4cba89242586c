"""What an external agent asked of the policy for one prompt: a tree of turns, in tokens.

A request names all tokens that the policy sees, its context. A turn whose context begins with
exactly the tokens of an earlier turn continues that turn's segment; any other context begins a new
segment. Each segment becomes one sample, with its own context. So each token is trained on once,
under the context in which it was sampled.

    segment 0:  context 0 | turn 0 | observation | turn 1
    segment 1:  context 0 | turn 0 | another observation | turn 2      (trains turn 2 alone)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_loop.trajectory import Generate, Generated, Limits
from one_step_off.data.samples import NOT_GENERATED, Prompt, Sample
from one_step_off.rewards.reward import Reward


class EpisodeOver(Exception):
    """The episode takes no more turns.

    Attributes:
        reason: a finish reason of `Trajectory`: "turns", "time", "room", or "ended".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(eq=False)
class Turn:
    """One answer of the policy.

    Attributes:
        context_ids: int32 [C], all that the policy saw.
        generated: its answer.
        parent: the turn whose tokens the context begins with; None: there is none.
        continues: whether it belongs to the segment of its parent.
        delivered: whether the agent received the answer. The policy learns nothing from an answer
            that nobody has seen.
        cut_by_agent: the answer was cut off at the agent's own limit of tokens.
        tool_calls: that the endpoint read in it, as {"name": ..., "arguments": ...}.
    """

    context_ids: np.ndarray
    generated: Generated
    parent: "Turn | None"
    continues: bool
    delivered: bool = False
    cut_by_agent: bool = False
    tool_calls: list[dict[str, str]] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        """Context and answer, int32 [C + R]."""
        return np.concatenate([self.context_ids, self.generated.ids])

    def is_followed_by(self, context_ids: np.ndarray) -> bool:
        """Whether a context begins with this turn's context and answer."""
        length = len(self.context_ids) + len(self.generated.ids)
        return len(context_ids) >= length and np.array_equal(self.ids, context_ids[:length])


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
        late: see `Trajectory`.
        facts: numbers to report.
        extra: what each of its samples has in its `extra`, as {"agent_log": PATH}.
        over: why it takes no more turns; "" while it does.
        begin: in seconds of `time.monotonic`.
    """

    late = False

    def __init__(
        self, key: str, prompt: Prompt, generate: Generate, limits: Limits, max_sequence: int
    ) -> None:
        self.key = key
        self.prompt = prompt
        self.name = f"{prompt.id[0]}_{prompt.id[1]}_{key[-6:]}"
        self.generate = generate
        self.limits = limits
        self.max_sequence = max_sequence
        self.turns_begun = 0
        self.turns_done: list[Turn] = []
        self.claimed: set[Turn] = set()  # turns that another turn continues, or is about to
        self.reward: Reward | float | dict[str, float] | None = None
        self.facts: dict[str, float] = {}
        self.extra: dict[str, Any] = {}
        self.over = ""
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

    def end(self, reason: str = "ended") -> None:
        """Take no more turns."""
        self.over = self.over or reason

    async def turn(
        self, context_ids: np.ndarray, max_tokens: int, stop: Sequence[str] = ()
    ) -> Turn:
        """The policy's answer to a context.

        Args:
            context_ids: int32 [C], C > 0.
            max_tokens: of the answer, as the agent asked for.
            stop: texts at which the answer ends.

        Raises:
            EpisodeOver: a limit is reached, or the episode has ended.
            RuntimeError: weights of another incarnation made this turn than the turns before.
        """
        self._raise_if_over()
        parent = self._parent(context_ids)
        continues = parent is not None and parent not in self.claimed
        tokens_left = self._tokens_left(context_ids, parent if continues else None)
        limit = min(tokens_left, self.limits.turn_tokens or tokens_left)
        self.turns_begun += 1
        if continues:
            self.claimed.add(parent)
        try:
            generated = await self.generate(context_ids, min(max_tokens, limit), tuple(stop))
        except BaseException:
            if continues:
                self.claimed.discard(parent)
            raise
        self._check_incarnation(generated)
        turn = Turn(np.asarray(context_ids, np.int32), generated, parent, continues)
        turn.cut_by_agent = len(generated.ids) < tokens_left
        self._raise_if_ended()
        if parent is not None:
            parent.delivered = True  # the agent has built on it
        self.turns_done.append(turn)
        return turn

    def _raise_if_ended(self) -> None:
        if self.over:
            raise EpisodeOver(self.over, f"this episode takes no more turns: {self.over}")

    def _raise_if_over(self) -> None:
        self._raise_if_ended()
        if self.turns_begun >= self.limits.turns:
            self.end("turns")
            raise EpisodeOver("turns", f"agent.max_turns={self.limits.turns} is reached")
        if self.seconds_left == 0:
            self.end("time")
            raise EpisodeOver("time", f"agent.timeout_s={self.limits.seconds:g} is over")

    def _tokens_left(self, context_ids: np.ndarray, parent: Turn | None) -> int:
        """How many tokens an answer may have. Raises EpisodeOver: none."""
        first_context = context_ids if parent is None else self._segment_of(parent)[0].context_ids
        in_segment = self.limits.tokens - (len(context_ids) - len(first_context))
        left = min(in_segment, self.max_sequence - len(context_ids))
        if left <= 0:
            self.end("room")
            raise EpisodeOver(
                "room",
                f"a context of {len(context_ids)} tokens leaves no room for an answer: "
                f"data.max_prompt_length + data.max_response_length = {self.max_sequence}, and "
                f"{self.limits.tokens} tokens may follow the first context of a segment",
            )
        return left

    def _check_incarnation(self, generated: Generated) -> None:
        for turn in self.turns_done[:1]:
            if turn.generated.incarnation != generated.incarnation:
                raise RuntimeError(
                    f"turn {len(self.turns_done)}: weights of incarnation "
                    f"{generated.incarnation}, not {turn.generated.incarnation}"
                )

    def _parent(self, context_ids: np.ndarray) -> Turn | None:
        """The turn that a context continues: the longest one; of several, one that no other turn
        continues."""
        candidates = [turn for turn in self.turns_done if turn.is_followed_by(context_ids)]
        if not candidates:
            return None
        return max(candidates, key=lambda turn: (len(turn.ids), turn not in self.claimed))

    @staticmethod
    def _segment_of(turn: Turn) -> list[Turn]:
        """The turns of its segment up to this one."""
        chain = [turn]
        while chain[0].continues:
            chain.insert(0, chain[0].parent)
        return chain

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
            RuntimeError: there is no turn.
        """
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
        first_context = segment[0].context_ids
        pieces: list[Generated] = []
        length = len(first_context)
        for turn in segment:
            observation = turn.context_ids[length:]
            if len(observation):
                pieces.append(_observation(observation, turn.generated.incarnation))
            pieces.append(turn.generated)
            length += len(observation) + len(turn.generated.ids)
        turns = float(len(segment))
        extra: dict[str, Any] = {"agent": {"turns": turns} | self.facts} | self.extra
        calls = [{"turn": i} | call for i, turn in enumerate(segment) for call in turn.tool_calls]
        if calls:
            extra["tool_calls"] = calls
        return Sample(
            prompt.id,
            index,
            first_context,
            response_ids=np.concatenate([piece.ids for piece in pieces]),
            log_probs=np.concatenate([piece.log_probs for piece in pieces]),
            loss_mask=np.concatenate([np.full(len(p.ids), p.train) for p in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
            incarnation=segment[-1].generated.incarnation,
            finish_reason=self._finish_reason(segment[-1]),
            extra=extra,
        )

    def _finish_reason(self, turn: Turn) -> str:
        """Of a segment that ends with this turn."""
        reason = turn.generated.finish_reason
        if reason == "length" and turn.cut_by_agent:
            return "turn_length"
        return reason


def _observation(ids: np.ndarray, incarnation: int) -> Generated:
    count = len(ids)
    return Generated(
        ids=np.asarray(ids, np.int32),
        log_probs=np.zeros(count, np.float32),
        versions=np.full(count, NOT_GENERATED, np.int32),
        incarnation=incarnation,
        finish_reason="",
        role="context",
        train=False,
    )
