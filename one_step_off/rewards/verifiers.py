"""The built-in reward functions: `gsm8k` and `math`.

To add one, write a function here with `@register("name")` and repeat the name in
`config.data_checks.BUILT_IN_REWARDS`.
"""

import re
from functools import lru_cache
from typing import Any

from one_step_off.config.registry import Registry
from one_step_off.data.plain_numbers import plain_number
from one_step_off.data.rows import last_boxed

REWARD_FUNCTIONS = Registry("reward.function")
register = REWARD_FUNCTIONS.register

MAX_ANSWER_CHARS = 200
MAX_TAIL_CHARS = 4000

# An answer that is still to be worked out, such as `36 + 36`, is not a final answer. Powers and
# factorials can also take forever to evaluate.
_UNEVALUATED = re.compile(r"[+*^!=]|.-|\\(?:times|cdot|sum|prod|int)")
# The same for `math`, whose answers may be formulas: an operation between two digits.
_ARITHMETIC = re.compile(r"[0-9]\s*[-+*]\s*[0-9]")


@register("gsm8k")
def gsm8k(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the number after the last `####` of the response equals the ground truth, else 0.0.
    Never raises.

    Plain numbers are compared exactly, without thousands commas, `$`, `%`, a unit or a final
    period. Other forms, such as `\\frac{1}{2}`, go to math-verify. An answer that is still to be
    worked out (`36 + 36`) scores 0.0.
    """
    _, marker, rest = response.rpartition("####")
    answer = rest.split("\n", 1)[0].strip(" \t\r*")  # chat models like bold answers
    if not marker or not answer:
        return 0.0
    truth = plain_number(ground_truth.strip())
    number = plain_number(answer)
    if truth is not None and number is not None:
        return float(truth == number)
    if len(answer) > MAX_ANSWER_CHARS or _UNEVALUATED.search(answer):
        return 0.0
    return _equals(f"\\boxed{{{answer}}}", ground_truth)


@register("math")
def math(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the last `\\boxed{...}`, or without one the last expression, equals the ground truth.
    Never raises.

    Where the truth is a number, an operation that is still to be worked out (`68 + 89`) scores 0.0.
    """
    answer = last_boxed(response)
    if answer is None:
        return _equals(response[-MAX_TAIL_CHARS:], ground_truth)
    truth = ground_truth.strip()
    if truth and answer.strip() == truth:
        return 1.0
    return _equals(f"\\boxed{{{answer}}}", ground_truth)


@lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str) -> list[Any]:
    from math_verify import parse

    is_latex = "\\boxed" in ground_truth or "$" in ground_truth
    text = ground_truth if is_latex else f"\\boxed{{{ground_truth}}}"
    return parse(text, parsing_timeout=None)


def _equals(text: str, ground_truth: str) -> float:
    """1.0 if math-verify finds that the answer in `text` equals the ground truth.

    math-verify's own time limits are off: its alarm would replace that of `time_limit.py`.
    """
    from math_verify import parse, verify

    try:
        parsed = parse(text, parsing_timeout=None)
        if not parsed:
            return 0.0
        # `parsed` is [value, text]. A repeated question, `68 + 89`, has the right value too, and a
        # policy would learn to repeat it.
        is_number = plain_number(ground_truth.strip()) is not None
        if is_number and _ARITHMETIC.search(str(parsed[-1])):
            return 0.0
        return float(verify(_parse_truth(ground_truth), parsed, timeout_seconds=None))
    except Exception:  # what cannot be parsed is not the answer
        return 0.0
