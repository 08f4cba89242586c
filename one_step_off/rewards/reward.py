"""Rewards: the types that reward functions, agent loops and trainers share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from one_step_off.config.text import mask_secrets, one_line
from one_step_off.data.samples import PromptId

Score = float | dict[str, float] | None
"""A finite reward; or its parts by name, which sum to it; None: it was not judged in time."""

MAX_REWARD = 1e30
"""The largest absolute value of a reward and of each part: beyond it, sums over a batch might be
infinite.
"""

ERROR = "reward/errors"
TIMEOUT = "reward/timeouts"


class Reward(float):
    """A reward and its parts. It is a float, the total, so it can be added, compared and
    multiplied.

    Attributes:
        parts: name -> float, which sum to the total; {} where the reward function returns a plain
            number.
    """

    parts: dict[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float] | None = None) -> "Reward":
        """`parts` None: it has none."""
        reward = super().__new__(cls, total)
        reward.parts = dict(parts or {})
        return reward

    @property
    def total(self) -> float:
        """The reward as a plain float."""
        return float(self)

    @classmethod
    def of(cls, value: Any) -> "Reward | None":
        """A number, a dict of parts or a Reward as a Reward; None where `to_score` refuses it."""
        if isinstance(value, Reward):
            value = value.parts or value.total
        score = to_score(value)
        if score is None:
            return None
        if isinstance(score, dict):
            return cls(math.fsum(score.values()), score)
        return cls(score)

    def scaled(self, factor: float) -> "Reward":
        """The total and each part times `factor`."""
        parts = {name: part * factor for name, part in self.parts.items()}
        return Reward(self.total * factor, parts)


class RewardError(Exception):
    """A sample could not be scored.

    The message is one line without secrets, because samples keep it: the function, the prompt, the
    sample and the cause.

    Attributes:
        kind: one of `samples.FAULT_METRICS`.
    """

    def __init__(self, message: str, kind: str = ERROR, details: str = "") -> None:
        """`details`, such as a traceback, travel with the error as its note and are written to
        error.log.
        """
        super().__init__(one_line(message))
        self.kind = kind
        if details:
            self.add_note(mask_secrets(details))


@dataclass(frozen=True)
class RewardItem:
    """One finished response to score.

    Attributes:
        index: its position in the prompt's group.
        extra_info: the row's other columns; {} where all reward functions are built in.
        where: the row's location in the data, for messages.
        source: the row's source in `data.train_files`, see `Prompt`.
    """

    prompt_id: PromptId
    index: int
    prompt: str
    response: str
    ground_truth: str
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    source: str = ""

    def __str__(self) -> str:
        """Which sample it is, in an error message."""
        row = f", data row {self.where}" if self.where else ""
        return f"prompt {self.prompt_id}, sample {self.index}{row}"


def to_score(result: Any) -> Score:
    """The score in what a reward function returned; None where there is none.

    A finite number, alone or under "reward" in a dict; or the parts of a dict without "reward".
    """
    if not isinstance(result, dict):
        return _finite_number(result)
    if "reward" in result:
        return _finite_number(result["reward"])
    return _parts(result)


def _finite_number(value: Any) -> float | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if math.isnan(number) or abs(number) > MAX_REWARD:
        return None
    return number


def _parts(result: dict) -> dict[str, float] | None:
    """The reward's parts as floats; None where one is no number, or one is called "score"."""
    if not result or "score" in result:
        return None
    parts = {}
    for name, value in result.items():
        number = None if isinstance(value, dict) else _finite_number(value)
        if number is None or not isinstance(name, str):
            return None
        parts[name] = number
    if abs(math.fsum(parts.values())) > MAX_REWARD:
        return None
    return parts
