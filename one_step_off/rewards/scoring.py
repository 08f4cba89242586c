"""Scores for finished responses: two built-in verifiers, your own `module:function`, and a time limit for each sample.

The row's `data_source` may choose among several functions (`reward.functions`).

The limit is SIGALRM of this process. It interrupts Python code that never returns, but signals reach only the main
thread: a `Scorer` lives in the main thread of a process, as the methods of a synchronous Ray actor do.
"""

import contextlib
import faulthandler
import importlib
import inspect
import logging
import math as _math
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from one_step_off.config.registry import Registry
from one_step_off.config.schema import ConfigError, RewardConfig, as_config_error
from one_step_off.config.user_code import (
    MAX_MESSAGE_CHARS,
    describe_error,
    find_user_line,
    format_traceback,
    log_traceback,
    quote_response,
)
from one_step_off.config.validation import format_value, mask_secrets
from one_step_off.data.plain_numbers import plain_number
from one_step_off.data.samples import PromptId

GIVEN = (
    "prompt",
    "response",
    "ground_truth",
    "data_source",
)  # to every function: so named, of the item
COLUMNS = "extra_info"  # to functions that take it, beside those
Score = float | dict[str, float] | None
"""A finite reward, of LARGEST at most; or its parts by name, which sum to it; None: not judged in time."""
MAX_REWARD = (
    1e30  # reward, or part of one: beyond, sums over a batch, or weighted ones, might be infinite
)
GRACE_S = (
    3.0  # so much later what still sits in C code, or swallows every alarm, ends with its process
)


class Reward(float):
    """A reward and its parts. It is a float, the total, so that it can be added, compared and weighed as any number.

    Attributes:
        parts: name -> float, which sum to the total; {} where the reward function gives a bare number.
    """

    parts: dict[str, float]

    def __new__(cls, total: float, parts: Mapping[str, float] | None = None) -> "Reward":
        """`parts` None: it has none."""
        made = super().__new__(cls, total)
        made.parts = dict(parts or {})
        return made

    @property
    def total(self) -> float:
        """The reward as a plain float."""
        return float(self)

    @classmethod
    def of(cls, value: Any) -> "Reward | None":
        """What `value` (a number, a dict of parts, a Reward) is as a reward; None where `to_score` takes it for none."""
        given = value.parts or value.total if isinstance(value, Reward) else value
        score = to_score(given)
        if score is None:
            return None
        return cls(sum(score.values()), score) if isinstance(score, dict) else cls(score)

    def scaled(self, factor: float) -> "Reward":
        """The total and each part times `factor`."""
        return Reward(
            self.total * factor, {name: part * factor for name, part in self.parts.items()}
        )


class RewardError(Exception):
    """A reward could not be had. One line without secrets, for samples keep it: the function, the prompt, the sample and
    the cause. `kind`: of FAULTS. `details`, as a traceback, are its note: they travel with it and stand in error.log."""

    def __init__(self, why: str, kind: str = "reward/errors", details: str = "") -> None:
        super().__init__(" ".join(mask_secrets(why[:2000])[:1000].split()))
        self.kind = kind
        if details:
            self.add_note(mask_secrets(details))


class _TimeUp(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in the scored code cannot swallow it."""


@dataclass(frozen=True)
class RewardItem:
    """One finished response to score. `index` is its position in the prompt's group; `extra_info` are the row's other
    columns, {} where no function is the user's own; `where` is the row's place in the data, for people."""

    prompt_id: PromptId
    index: int
    prompt: str
    response: str
    ground_truth: str
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    def __str__(self) -> str:
        """Which sample it is, in an error message."""
        row = f", data row {self.where}" if self.where else ""
        return f"prompt {self.prompt_id}, sample {self.index}{row}"


REWARD_FUNCTIONS = Registry("reward.function")

# --- built-in functions -----------------------------------------------------------------------------------------

# A sum that was not worked out is no final answer; powers and factorials can also take for ever to evaluate.
_UNWORKED = re.compile(r"[+*^!=]|.-|\\(?:times|cdot|sum|prod|int)")
# The same for `math`, whose answers may be formulas: between digits it is a sum of numbers, and the task's own.
_SUM = re.compile(r"[0-9]\s*[-+*]\s*[0-9]")
_LONGEST_ANSWER = 200
_LONGEST_TAIL = 4000


@REWARD_FUNCTIONS.register("gsm8k")
def gsm8k(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the number after the response's last `####` equals the ground truth, else 0.0. Never raises. Plain numbers
    are compared exactly, without thousands commas, `$`, `%`, a unit or a final period. Another form, as `\\frac{1}{2}`,
    goes to math-verify. An answer that is still to be worked out (`36 + 36`) scores 0.0."""
    _, _, rest = response.rpartition("####")
    answer = rest.split("\n", 1)[0].strip(" \t\r*")  # chat models like bold answers
    if "####" not in response or not answer:
        return 0.0
    truth, got = plain_number(ground_truth.strip()), plain_number(answer)
    if truth is not None and got is not None:
        return float(truth == got)
    if len(answer) > _LONGEST_ANSWER or _UNWORKED.search(answer):
        return 0.0
    return _math_equal(answer, ground_truth)


def _last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}`, or None."""
    _, marker, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, letter in enumerate(rest if marker else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:i]
    return None


@lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str) -> list[Any]:
    from math_verify import parse

    written = (
        ground_truth
        if "\\boxed" in ground_truth or "$" in ground_truth
        else f"\\boxed{{{ground_truth}}}"
    )
    return parse(written, parsing_timeout=None)


def _math_equal(answer: str, ground_truth: str, boxed: bool = True) -> float:
    """1.0 if math-verify finds the two equal. Our own alarm limits it: its timers would replace ours."""
    from math_verify import parse, verify

    try:
        got = parse(f"\\boxed{{{answer}}}" if boxed else answer, parsing_timeout=None)
        # [value, text]: a repeated question, `68 + 89`, has the right value too, and a policy would find that out.
        if got and _SUM.search(str(got[-1])) and plain_number(ground_truth.strip()) is not None:
            return 0.0
        return float(bool(got) and verify(_parse_truth(ground_truth), got, timeout_seconds=None))
    except Exception:  # what cannot be parsed is not the answer
        return 0.0


@REWARD_FUNCTIONS.register("math")
def math(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the last `\\boxed{...}`, or without one the last expression, equals the ground truth. Never raises. Where
    the truth is a number, sums that are still to be worked out (`68 + 89`) score 0.0."""
    answer = _last_boxed(response)
    if answer is not None:
        return (
            1.0
            if answer.strip() == ground_truth.strip() != ""
            else _math_equal(answer, ground_truth)
        )
    return _math_equal(response[-_LONGEST_TAIL:], ground_truth, boxed=False)


# --- resolving --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardFunction:
    """One function that a config names.

    Attributes:
        name: the key and its value, for messages: `reward.function='my_rewards:score'`.
        kwargs: `reward.kwargs`.
        built_in: it is ours, and takes too long only where the model made it so.
        takes_columns: it takes `extra_info`.
    """

    name: str
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    built_in: bool
    takes_columns: bool

    @property
    def file(self) -> str:
        """Its source file; empty where it has none."""
        with contextlib.suppress(TypeError, OSError):
            return inspect.getsourcefile(inspect.unwrap(self.function)) or ""
        return ""

    def __call__(self, item: RewardItem) -> Any:
        """What the function returns for this response, whatever that is."""
        given = {name: getattr(item, name) for name in GIVEN}
        if self.takes_columns:
            given[COLUMNS] = item.extra_info
        return self.function(**given, **self.kwargs)


def named_functions(cfg: RewardConfig) -> list[str]:
    """The names of all functions of a config: those of `reward.functions`, or `reward.function` alone."""
    return list(cfg.functions.values()) or [cfg.function]


class RewardFunctions:
    """The functions of a config: one for each `data_source` of `reward.functions`, or `reward.function` for all."""

    def __init__(self, cfg: RewardConfig) -> None:
        """Raises ConfigError: no such module or attribute, not callable, asynchronous, or `reward.kwargs` does not fit."""
        self.by_source = {
            source: _resolved(f"reward.functions.{format_value(source)}", spec, cfg)
            for source, spec in cfg.functions.items()
        }
        self.for_all = None if cfg.functions else _resolved("reward.function", cfg.function, cfg)

    def find(self, data_source: str) -> RewardFunction:
        """The function of a row. Raises ConfigError: `reward.functions` has none for its data_source."""
        found = self.for_all or self.by_source.get(data_source)
        if found is None:
            there = ", ".join(map(format_value, self.by_source))
            raise ConfigError(
                f"reward.functions: none for the data_source {format_value(data_source)!r}; add one (there are those of {there})"
            )
        return found


def _resolved(key: str, spec: str, cfg: RewardConfig) -> RewardFunction:
    """The function `spec`, checked to be callable as the trainer will call it. Raises ConfigError."""
    name = f"{key}={spec!r}"
    built_in = spec in REWARD_FUNCTIONS
    function = REWARD_FUNCTIONS.find(spec, key).function
    if built_in and cfg.kwargs and all(other in REWARD_FUNCTIONS for other in named_functions(cfg)):
        raise ConfigError(
            f"reward.kwargs={dict(cfg.kwargs)!r}: the built-in {spec!r} takes none; remove them"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name}: is asynchronous; name a plain function")
    if built_in:
        return RewardFunction(name, function, {}, True, False)
    takes_columns = False
    with contextlib.suppress(ValueError):  # some C functions do not tell
        parameters = inspect.signature(function).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        takes_columns = COLUMNS in parameters or any_keyword
        given = (*GIVEN, COLUMNS) if takes_columns else GIVEN
        called = f"{name}: cannot be called as f({'=, '.join(given)}=, **reward.kwargs)"
        mend = "add **kwargs to take what you do not need, rename a key that is taken"
        with as_config_error(called, mend, TypeError):
            inspect.signature(function).bind(**dict.fromkeys(given), **cfg.kwargs)
    return RewardFunction(name, function, dict(cfg.kwargs), False, takes_columns)


# --- scoring ----------------------------------------------------------------------------------------------------


def to_score(result: Any) -> Score:
    """The finite number that a function gave (bare, or a dict's "reward"), or its parts as floats; None: neither."""
    if isinstance(result, dict) and "reward" not in result:
        parts = {
            name: to_score(None if isinstance(part, dict) else part)
            for name, part in result.items()
        }
        good = all(isinstance(name, str) and part is not None for name, part in parts.items())
        return (
            parts
            if good and parts and "score" not in parts and abs(sum(parts.values())) <= MAX_REWARD
            else None
        )
    value = result["reward"] if isinstance(result, dict) else result
    try:
        number = _math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) <= MAX_REWARD else None


def _on_alarm(signum: int, frame: Any) -> None:
    raise _TimeUp


class Scorer:
    """Scores responses one after the other, each within `reward.timeout_s` seconds; in the main thread only. The limit
    interrupts any Python code and blocking system calls. A call that stays inside C code for `GRACE_S` longer ends this
    process, and Ray starts it anew. A function that sets SIGALRM itself replaces the first limit for its own sample."""

    restarts = -1  # any number

    def __init__(self, cfg: RewardConfig) -> None:
        """Resolve the functions. Raises ConfigError, see `RewardFunctions`."""
        self.cfg, self.functions = cfg, RewardFunctions(cfg)
        if any(name in REWARD_FUNCTIONS for name in named_functions(cfg)):
            # Import now: it takes about a second, which is no response's fault. Its warnings say that we, the
            # caller, must limit the time, which we do.
            importlib.import_module("math_verify")
            logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def score_batch(self, items: list[RewardItem]) -> list[Score | RewardError]:
        """One finite reward, or its parts, per item, in order; None where a built-in verifier could not judge in time.

        That is the model's doing (`9^{9^{9^9}}`) and must not stop the run: it counts as 0.0. A RewardError, not raised,
        where your function took too long, raised, or returned something else than a finite number, a dict with one under
        "reward", or one of parts: {name: finite number}. Raises ValueError: this is not the main thread."""
        signal.signal(signal.SIGALRM, _on_alarm)
        try:
            return [self._score(item) for item in items]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _score(self, item: RewardItem) -> Score | RewardError:
        function = self.functions.find(item.data_source)
        begin = time.monotonic()
        score: Any
        try:
            score = self._call_within_limit(function, item)
        except BaseException as e:  # exit() too: Ray would take it for the end of this actor
            score = e
        # A function that swallowed the alarm (a bare `except:`) was late all the same.
        late = isinstance(score, _TimeUp) or time.monotonic() - begin > self.cfg.timeout_s
        if late and function.built_in:
            return None
        if late:
            return self._late(function, item, score)
        if isinstance(score, RewardError):
            return RewardError(f"{function.name}, {item}: {score}")
        if isinstance(score, BaseException):
            return self._raised(function, item, score)
        return score

    def _late(self, function: RewardFunction, item: RewardItem, outcome: Any) -> RewardError:
        """The error of a sample that was not judged in time. `outcome`: an exception that tells where the alarm met the
        function, or what it returned too late."""
        details = format_traceback(outcome) if isinstance(outcome, BaseException) else ""
        place = find_user_line(details, function.file)
        where = f" at {place}" if place else ""
        limit = f"took longer than reward.timeout_s={self.cfg.timeout_s:g} s"
        why = f"{function.name}, {item}: {limit}{where}; {quote_response(item.response)}"
        log_traceback(why, details)
        return RewardError(why, "reward/timeouts", details)

    def _raised(
        self, function: RewardFunction, item: RewardItem, error: BaseException
    ) -> RewardError:
        """The error of a sample on which the function raised."""
        what = f"{function.name}, {item}: raised {describe_error(error, function.file)}: {str(error):.{MAX_MESSAGE_CHARS}}"
        why = f"{what}; {quote_response(item.response)}"
        details = format_traceback(error)
        log_traceback(why, details)
        return RewardError(why, details=details)

    def _call_within_limit(self, function: RewardFunction, item: RewardItem) -> Score:
        # The alarm repeats, so that code which swallows one (a bare `except:` in a loop) meets the next.
        signal.setitimer(signal.ITIMER_REAL, self.cfg.timeout_s, 0.25)
        faulthandler.dump_traceback_later(
            self.cfg.timeout_s + GRACE_S, exit=True, file=2
        )  # a thread without the GIL
        try:
            result = function(item)
            score = to_score(result)
            if score is None:
                wanted = 'not a finite number (at most 1e+30), nor a dict of such, as {"reward": 1.0} or {"right": 1.0, "form": 0.5}'
                others = ' (what others call "score" is "reward" here)' * (
                    type(result) is dict and "score" in result
                )
                raise RewardError(
                    f"returned {result!r:.200}, {wanted}{others}; {quote_response(item.response)}"
                )
            return score
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
