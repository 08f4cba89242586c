"""Scores for finished responses: two built-in verifiers, your own `module:function`, and a time limit for each sample.

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
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from one_step_off.config import ConfigError, RewardConfig, as_config_error
from one_step_off.config_checks import masked
from one_step_off.registry import Registry
from one_step_off.samples import PromptId

GIVEN = ("prompt", "response", "ground_truth", "data_source")  # to every function: so named, of the item
Score = float | dict[str, float] | None
"""A finite reward, of LARGEST at most; or its parts by name, which sum to it; None: not judged in time."""
LARGEST = 1e30  # reward, or part of one: beyond, sums over a batch, or weighted ones, might be infinite
GRACE_S = 3.0  # so much later what still sits in C code, or swallows every alarm, ends with its process


class RewardError(Exception):
    """A reward could not be had. One line without secrets, for samples keep it: the function, the prompt, the sample and
    the cause. `kind`: of FAULTS."""

    def __init__(self, why: str, kind: str = "reward/errors") -> None:
        super().__init__(" ".join(masked(why[:2000])[:1000].split()))
        self.kind = kind


class _TimeUp(BaseException):
    """Raised by the alarm. Not an Exception, so that `except Exception` in the scored code cannot swallow it."""


@dataclass(frozen=True)
class RewardItem:
    """One finished response to score. `index` is its position in the prompt's group."""

    prompt_id: PromptId
    index: int
    prompt: str
    response: str
    ground_truth: str
    data_source: str = ""


BUILT_IN = Registry("reward.function")

# --- built-in functions -----------------------------------------------------------------------------------------

_PLAIN = r"([-+]?)\$?([-+]?)([0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:/([0-9]+))?\s?%?\s?(?:[A-Za-z]+ ?){0,4}\.?"
# A sum that was not worked out is no final answer; powers and factorials can also take for ever to evaluate.
_UNWORKED = re.compile(r"[+*^!=]|.-|\\(?:times|cdot|sum|prod|int)")
# The same for `math`, whose answers may be formulas: between digits it is a sum of numbers, and the task's own.
_SUM = re.compile(r"[0-9]\s*[-+*]\s*[0-9]")
_LONGEST_ANSWER = 200
_LONGEST_TAIL = 4000


def plain_number(text: str) -> Fraction | None:
    """The number in `1,234`, `$7.50`, `-3`, `1/2`, `45%` or `12 apples.`; None where the text is anything else."""
    match = re.fullmatch(_PLAIN, text) if len(text) <= _LONGEST_ANSWER else None
    if match is None:
        return None
    sign, inner_sign, digits, denominator = match.groups()
    if (sign and inner_sign) or (denominator and not int(denominator)):
        return None
    return Fraction((sign or inner_sign) + digits.replace(",", "")) / int(denominator or 1)


@BUILT_IN.register("gsm8k")
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

    written = ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"
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


@BUILT_IN.register("math")
def math(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the last `\\boxed{...}`, or without one the last expression, equals the ground truth. Never raises. Where
    the truth is a number, sums that are still to be worked out (`68 + 89`) score 0.0."""
    answer = _last_boxed(response)
    if answer is not None:
        return 1.0 if answer.strip() == ground_truth.strip() != "" else _math_equal(answer, ground_truth)
    return _math_equal(response[-_LONGEST_TAIL:], ground_truth, boxed=False)


# --- resolving --------------------------------------------------------------------------------------------------


def resolve(cfg: RewardConfig) -> Callable[..., Any]:
    """The function that `reward.function` names, checked to be callable as the trainer will call it. Raises
    ConfigError: no such module or attribute, not callable, asynchronous, or `reward.kwargs` does not fit."""
    spec, function = cfg.function, BUILT_IN.find(cfg.function).function
    if spec in BUILT_IN and cfg.kwargs:
        raise ConfigError(f"reward.kwargs={dict(cfg.kwargs)!r}: the built-in {spec!r} takes none; remove them")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"reward.function={spec!r}: is asynchronous; name a plain function")
    called = f"reward.function={spec!r}: cannot be called as f({'=, '.join(GIVEN)}=, **reward.kwargs)"
    mend = "add **kwargs to take what you do not need, rename a key that is taken"
    with contextlib.suppress(ValueError), as_config_error(called, mend, TypeError):  # some C functions do not tell
        inspect.signature(function).bind(**dict.fromkeys(GIVEN), **cfg.kwargs)
    return function


# --- scoring ----------------------------------------------------------------------------------------------------


def to_score(result: Any) -> Score:
    """The finite number that a function gave (bare, or a dict's "reward"), or its parts as floats; None: neither."""
    if isinstance(result, dict) and "reward" not in result:
        parts = {name: to_score(None if isinstance(part, dict) else part) for name, part in result.items()}
        good = all(isinstance(name, str) and part is not None for name, part in parts.items())
        return parts if good and parts and "score" not in parts and abs(sum(parts.values())) <= LARGEST else None
    value = result["reward"] if isinstance(result, dict) else result
    try:
        number = _math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if abs(number) <= LARGEST else None


def _on_alarm(signum: int, frame: Any) -> None:
    raise _TimeUp


class Scorer:
    """Scores responses one after the other, each within `reward.timeout_s` seconds; in the main thread only. The limit
    interrupts any Python code and blocking system calls. A call that stays inside C code for `GRACE_S` longer ends this
    process, and Ray starts it anew. A function that sets SIGALRM itself replaces the first limit for its own sample."""

    restarts = -1  # any number

    def __init__(self, cfg: RewardConfig) -> None:
        """Resolve the function. Raises ConfigError, see `resolve`."""
        self.cfg, self.function = cfg, resolve(cfg)
        self.built_in = cfg.function in BUILT_IN
        if self.built_in:
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
        limit = self.cfg.timeout_s
        who = f"reward.function={self.cfg.function!r}, prompt {item.prompt_id}, sample {item.index}"
        start = time.monotonic()
        try:
            score = self._call_within_limit(item)
        except _TimeUp:
            score = None
        except BaseException as e:  # exit() too: Ray would take it for the end of this actor
            score = RewardError(f"{who}: {e if type(e) is RewardError else f'raised {type(e).__name__}: {e}'}")
        # A function that swallowed the alarm (a bare `except:`) was late all the same.
        if score is None or time.monotonic() - start > limit:
            late = RewardError(f"{who}: took longer than reward.timeout_s={limit:g} s", "reward/timeouts")
            return None if self.built_in else late
        return score

    def _call_within_limit(self, item: RewardItem) -> Score:
        # The alarm repeats, so that code which swallows one (a bare `except:` in a loop) meets the next.
        signal.setitimer(signal.ITIMER_REAL, self.cfg.timeout_s, 0.25)
        faulthandler.dump_traceback_later(self.cfg.timeout_s + GRACE_S, exit=True, file=2)  # a thread without the GIL
        try:
            result = self.function(**{name: getattr(item, name) for name in GIVEN}, **self.cfg.kwargs)
            score = to_score(result)
            if score is None:
                wanted = 'not a finite number (at most 1e+30), nor a dict of such, as {"reward": 1.0} or {"right": 1.0, "form": 0.5}'
                others = ' (what others call "score" is "reward" here)' * (type(result) is dict and "score" in result)
                raise RewardError(f"returned {result!r:.200}, {wanted}{others}")
            return score
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
