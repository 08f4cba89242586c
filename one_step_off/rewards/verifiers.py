"""The built-in reward functions: `gsm8k` and `math`.

To add one, write a function here with `@register("name")` and repeat the name in
`config.sections.reward.BUILT_IN_REWARDS`.
"""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from one_step_off.config.registry import Registry
from one_step_off.data.plain_numbers import looks_like_number, plain_number, without_exponents
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
# What is no number, but is one to math-verify: it reads `1_000` as 1, `0x1A` as 0, `5 6` as 11,
# `1\,234` as 235 and `0,123` as 0.123.
_MISREAD = re.compile(
    r"[0-9]_[0-9]{3}|[0-9][A-Za-z]+[0-9]|0[xX][0-9A-Fa-f]|[0-9](?:[,'~\s]|\\[,;:! ])+[0-9]"
)
_GROUPED = re.compile(r"(?<![0-9,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_LETTER = re.compile(r"[A-Za-z]")
_LATEX_COMMA = re.compile(r"\{,\}|,\\!")
_WITH_DIGIT = re.compile(r"\S*[0-9]\S*")
# math-verify reads a word as the product of its letters: `silent` equals `listen`.
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")


@register("gsm8k")
def gsm8k(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the number after the last `####` of the response equals the ground truth, else 0.0.
    Never raises.

    Plain numbers are compared exactly, without thousands commas, `$`, `%`, a unit or a final
    period. Other forms, such as `\\frac{1}{2}`, go to math-verify. An answer that is still to be
    worked out (`36 + 36`) scores 0.0, and so does what is no number, as `12,5` or `1_000`.
    """
    _, marker, rest = response.rpartition("####")
    answer = rest.split("\n", 1)[0].strip(" \t\r*")  # chat models like bold answers
    if not marker or not answer:
        return 0.0
    truth = plain_number(ground_truth.strip())
    number = plain_number(_LATEX_COMMA.sub(",", answer))
    if truth is not None and number is not None:
        return float(truth == number)
    if len(answer) > MAX_ANSWER_CHARS or _UNEVALUATED.search(answer):
        return 0.0
    if looks_like_number(ground_truth) and truth is None:
        return 0.0
    return _equals_boxed(answer, ground_truth)


@register("math")
def math(response: str, ground_truth: str, **_: Any) -> float:
    """1.0 if the last `\\boxed{...}`, or without one the last expression, equals the ground truth.
    Never raises.

    Where the truth is a number, an operation that is still to be worked out (`68 + 89`) scores 0.0,
    and so does what is no number, as `12,5` or `1_000`.
    """
    answer = last_boxed(response)
    truth = ground_truth.strip()
    number = plain_number(truth)
    if answer is None:
        tail = response[-MAX_TAIL_CHARS:]
        last = _WITH_DIGIT.findall(without_exponents(tail))[-1:]
        if number is not None and last and _is_misread(last[0]):
            return 0.0
        return _equals(tail, ground_truth)
    if truth and answer.strip() == truth:
        return 1.0
    # A letter may be a variable, where the answer to gsm8k has a unit: 5x is not 5.
    plain = without_exponents(_LATEX_COMMA.sub(",", answer.strip()))
    if number is not None and number == plain_number(plain) and not _LETTER.search(plain):
        return 1.0
    return _equals_boxed(answer, ground_truth)


def _is_misread(text: str) -> bool:
    """Whether math-verify would take for a number what is none."""
    text = _GROUPED.sub(lambda match: match[0].replace(",", ""), _LATEX_COMMA.sub(",", text))
    return _MISREAD.search(text) is not None


def _equals_boxed(answer: str, ground_truth: str) -> float:
    """1.0 if the answer alone, out of its box, equals the ground truth."""
    answer = answer.strip()
    truth = ground_truth.strip()
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(truth):
        return float(answer.casefold() == truth.casefold())
    if plain_number(truth) is not None and _is_misread(without_exponents(answer)):
        return 0.0
    return _equals(f"\\boxed{{{answer}}}", ground_truth)


@lru_cache(maxsize=4096)
def _parse_truth(ground_truth: str) -> list[Any]:
    from math_verify import parse

    is_latex = "\\boxed" in ground_truth or "$" in ground_truth
    text = ground_truth if is_latex else f"\\boxed{{{ground_truth}}}"
    return parse(text, parsing_timeout=None)


def _decimals(number: Fraction | None) -> int:
    """To how many decimals two numbers must agree: 6, but more where the truth is small."""
    if not number or abs(number) >= Fraction(1, 1000):
        return 6
    return 3 + len(str(int(1 / abs(number))))


def _equals(text: str, ground_truth: str) -> float:
    """1.0 if math-verify finds that the answer in `text` equals the ground truth.

    math-verify's own time limits are off: its alarm would replace that of `time_limit.py`.
    """
    from math_verify import parse, verify

    try:
        number = plain_number(ground_truth.strip())
        truth = ground_truth
        if number is not None:  # math-verify takes the e of an exponent for Euler's number
            given = text
            text = without_exponents(given)
            if len(text) > max(len(given), MAX_TAIL_CHARS):  # it would take minutes
                return 0.0
            truth = without_exponents(truth)
        parsed = parse(text, parsing_timeout=None)
        if not parsed:
            return 0.0
        # `parsed` is [value, text]. A repeated question, `68 + 89`, has the right value too, and a
        # policy would learn to repeat it.
        if number is not None and _ARITHMETIC.search(str(parsed[-1])):
            return 0.0
        decimals = _decimals(number)
        return float(verify(_parse_truth(truth), parsed, decimals, timeout_seconds=None))
    except Exception:  # what cannot be parsed is not the answer
        return 0.0
