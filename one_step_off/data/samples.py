"""What flows through the pipeline: prompts, samples and batches. Plain numpy, no torch."""

import itertools
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

PromptId = tuple[int, int]
"""A prompt's name: (epoch, row). It is unique in a run."""

Stamp = tuple[int, int]
"""Which weights made a token: (incarnation of the trainer, weight version)."""

NOT_GENERATED = -1
"""The version of a token that no weights made: a tool or the user said it. Never trained on."""


@dataclass(frozen=True)
class Prompt:
    """One row of data, tokenised. `ids` are the token ids of the prompt, int32 [P]; `text` is what they came from,
    `messages` the chat; `ground_truth` and `data_source` go to the reward function, and so does `extra`, the row's other
    columns, where it takes `extra_info`. `agent_loop` "": the one of the config. `where` is "file:row" for people, from
    1."""

    id: PromptId
    ids: np.ndarray
    text: str
    ground_truth: str
    data_source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    agent_loop: str = ""
    where: str = ""


FAULT_METRICS = "reward/errors", "reward/timeouts", "agent/errors"
"""What may be wrong with a sample; each is the metric that counts it."""

PromptLookup = Callable[[PromptId], Prompt | None]
"""The prompt of an id, where it is known."""


@dataclass
class Sample:
    """One trajectory. All per-token arrays have the length R of the response, which may have several turns.

    Attributes:
        prompt_id: (epoch, row) of its prompt; samples with the same prompt_id form a group.
        index: position in the group, 0 .. n-1.
        prompt_ids: int32 [P].
        response_ids: int32 [R]; exactly the ids the engine sampled, and between turns those of tools.
        log_probs: float32 [R], in nats: log mu(token), from the engine, after temperature; 0 for others' tokens.
        loss_mask: bool [R]; True where the policy made the token and it is trained on.
        versions: int32 [R]; the weight version that made each token, stamped by the engine; OTHERS for others' tokens.
        incarnation: which life of the trainer made those weights.
        reward: score of the whole trajectory; NaN until scored.
        finish_reason: "stop" or "length", as vLLM says it; else a limit of the conversation: agent_loop.base.Trajectory.
        response: the decoded response, of all turns, without special tokens.
        extra: what only some have: reward_parts (name -> float), baseline (reward of the prompt's greedy response),
            greedy (this is that response: scored, never trained on), replaces, error (one line: why its reward is 0) and
            fault (which of FAULTS that is), dropped (taken out of its batch: there was an error in its group),
            carried (steps by which it is late, see carry.py), agent (name -> float: turns, tool_calls and the like of a conversation).
    """

    prompt_id: PromptId
    index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    log_probs: np.ndarray
    loss_mask: np.ndarray
    versions: np.ndarray
    incarnation: int = 0
    reward: float = float("nan")
    finish_reason: str = ""
    response: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


TOKEN_FIELDS = "response_ids", "log_probs", "loss_mask", "versions"  # of a sample: [R] each
TRAINER_FIELDS = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "values",
    "returns",
)  # of a batch, for trainers
NOT_STORED = ([None] * (1 + len(TRAINER_FIELDS)), None)  # a batch that is not in Ray's object store


@dataclass
class Batch:
    """The samples of one training step, ordered by (position of the prompt in the step, index).

    `advantages`, `old_log_probs` and `ref_log_probs` hold one float32 [R] array per sample, or are None
    where the step does not use them; so do `values` (the critic's, before the update) and `returns` (what it is to
    learn). `old_log_probs` is the proximal policy of decoupled PPO, `prob_squares` sums its squared probabilities.
    `expected` is the one stamp that every token must carry, or with `older` the newest: a version may be so much older.
    `dropped` are samples that `drop` took out; `stored` is what was put into Ray's object store last, and where.
    """

    step: int
    samples: list[Sample]
    expected_stamp: Stamp
    max_version_lag: int = 0
    advantages: list[np.ndarray] | None = None
    old_log_probs: list[np.ndarray] | None = None
    ref_log_probs: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None
    prob_squares: list[np.ndarray] | None = None
    dropped: list[Sample] = field(default_factory=list)
    stored: tuple[list, Any] = NOT_STORED

    def prompt_order(self) -> list[PromptId]:
        """The prompts of this step, each once, in order; those that were dropped come last."""
        return list(dict.fromkeys(s.prompt_id for s in self.samples + self.dropped))

    def drop(self, prompts: Collection[PromptId]) -> None:
        """Take all samples of these prompts out, and what goes with each."""
        stays, all_of_it = [s.prompt_id not in prompts for s in self.samples], self.samples
        for name, values in vars(self).items():
            if isinstance(values, list) and name != "dropped":
                setattr(self, name, list(itertools.compress(values, stays)))
        self.dropped = [
            replace(s, extra=s.extra | {"dropped": True})
            for s in all_of_it
            if s.prompt_id in prompts
        ]


def split_by_lengths(flat: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """The parts of `flat`, which stand in a row there, as views."""
    return [
        flat[end - length : end]
        for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)
    ]


def chunks(items: Any, size: int = 256) -> Iterator[Any]:
    """A list or array in parts of so many items. What is made of arrays one by one takes a slow call for each, and what is
    made of all at once fresh memory, which may cost more than the work."""
    return (items[i : i + size] for i in range(0, len(items), size))


def generated_tokens(samples: list[Sample]) -> tuple[np.ndarray, float, float]:
    """Of the tokens that the policy made: how many each response has, int64 [B], and the oldest and newest of their
    versions (NaN: there are none)."""
    counts, found = [], []
    for some in chunks([s.versions for s in samples]):
        made = np.concatenate(some)
        if NOT_GENERATED in made:
            made, some = (
                made[made != NOT_GENERATED],
                [versions[versions != NOT_GENERATED] for versions in some],
            )
        counts += map(len, some)
        found += [made.min(), made.max()] if len(made) else []
    return (
        np.array(counts, np.int64),
        float(min(found, default=np.nan)),
        float(max(found, default=np.nan)),
    )


class PackedArrays(list[np.ndarray]):
    """Goes to another process as one long array, and is a list of its parts there, read-only. Ray takes longer over each
    of a hundred thousand arrays than over its bytes."""

    def __reduce__(self) -> tuple:
        return (split_by_lengths, (np.concatenate(self), [*map(len, self)])) if self else (list, ())


class PackedSamples(list[Sample]):
    """Goes to another process as a few long arrays, and is a list there. `leave`: fields that stay behind, and have their
    defaults there."""

    leave: tuple[str, ...] = ()

    def __reduce__(self) -> tuple:
        names = [f.name for f in fields(Sample) if f.name not in (*TOKEN_FIELDS, *self.leave)]
        rows = [*map(operator.attrgetter(*names), self)]
        return _arrived, (
            names,
            rows,
            [PackedArrays(getattr(s, name) for s in self) for name in TOKEN_FIELDS],
        )


class PackedShares(dict[int, np.ndarray]):
    """Position -> array of some samples of a batch: goes to another process like `Arrays`, and is a dict there."""

    def __reduce__(self) -> tuple:
        return _share, ([*self], PackedArrays(self.values()))


def _share(positions: list[int], arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
    return dict(zip(positions, arrays, strict=True))


def _arrived(names: list[str], rows: list[tuple], columns: list[list[np.ndarray]]) -> list[Sample]:
    known = (*names, *TOKEN_FIELDS)
    return [
        Sample(**dict(zip(known, (*row, *own), strict=True)))
        for row, *own in zip(rows, *columns, strict=True)
    ]


class StalenessError(AssertionError):
    """A token was made by other weights than the pipeline promises."""


def assert_staleness(batch: Batch) -> None:
    """Check for every token of the policy, trained or not, that exactly the weights `batch.expected_stamp` made it, or with
    `batch.max_version_lag` some of the versions before. Raises StalenessError: names the step, the sample, the token and the stamps."""
    (incarnation, version), samples = batch.expected_stamp, batch.samples
    oldest = version - batch.max_version_lag

    def first_wrong(some: list[Sample]) -> int | None:
        """Which of their tokens, all in a row; 0 where these are not whole, or of another incarnation."""
        whole = (len(s.versions) == len(s.loss_mask) == len(s.response_ids) for s in some)
        if not all(whole) or any(s.incarnation != incarnation for s in some):
            return 0
        made = np.concatenate([s.versions for s in some])
        if oldest <= made.min(initial=version) and made.max(initial=oldest) <= version:
            return None  # whatever is trained
        trained = np.concatenate([s.loss_mask for s in some])
        wrong = np.flatnonzero(
            ((made < oldest) | (made > version)) & ((made != NOT_GENERATED) | trained)
        )
        return int(wrong[0]) if len(wrong) else None

    # All at once, for calls on thousands of small arrays are slow; one by one where it is to be told what is wrong.
    for s in itertools.chain(*(some for some in chunks(samples) if first_wrong(some) is not None)):
        if (at := first_wrong([s])) is not None:
            made = f"incarnation {s.incarnation}, version {s.versions[at] if len(s.versions) > at else None}"
            where = f"step {batch.step}, prompt {s.prompt_id}, sample {s.index}, token {at}: made by weights ({made})"
            right = (
                f"versions {oldest} to {version}" if batch.max_version_lag else f"version {version}"
            )
            raise StalenessError(
                f"{where}, but this step trains on (incarnation {incarnation}, {right})"
            )
