"""Numbers as people write them: `1,234`, `$7.50`, `45%`, `1e-5`, `12 apples.`; and as text."""

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np

MAX_NUMBER_CHARS = 200

# Digits, which commas may group by thousands: `1,234`, but neither `12,5` nor `0,123`.
_DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])|[0-9]+(?!,[0-9]))"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
# With three digits an exponent covers all floats, and the number stays small.
_EXPONENT = r"[eE][-+]?[0-9]{1,3}(?![0-9])"
_NUMBER = re.compile(
    r"([-+]?)\$?([-+]?)"  # a sign before or after the dollar
    r"(?!0[xX][0-9A-Fa-f])"  # 0x1A is not 0 with a unit
    rf"({_DECIMAL}(?:{_EXPONENT})?)"
    r"(?:/([0-9]+))?"  # denominator
    r"\s?%?\s?(?:[A-Za-z]++ ?){0,4}\.?"  # percent, a unit of up to four words, a final period
)
_NUMBER_LIKE = re.compile(r"[-+$]*[0-9][0-9.,_' ]*%?")
_WITH_EXPONENT = re.compile(rf"(?<![\w.,]){_DECIMAL}{_EXPONENT}(?!\w)")

# Digits of a float that was computed, such as those of 0.1 + 0.2, begin behind these.
_TYPED_DIGITS = 15
_SHORT_DIGITS = 12


def plain_number(text: str) -> Fraction | None:
    """The number in `1,234`, `$7.50`, `-3`, `1/2`, `1e-5`, `45%` or `12 apples.`; None where the
    text is anything else, as `12,5`, `1_000`, `0x1A` and `nan` are.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, inner_sign, digits, denominator = match.groups()
    has_two_signs = sign and inner_sign
    divides_by_zero = denominator and not int(denominator)
    if has_two_signs or divides_by_zero:
        return None
    numerator = Fraction((sign or inner_sign) + digits.replace(",", ""))
    return numerator / int(denominator or 1)


def looks_like_number(text: str) -> bool:
    """Whether the text consists of digits and what people write between them, though it may be no
    plain number, as `12,5`.
    """
    return _NUMBER_LIKE.fullmatch(text.strip()) is not None


def without_exponents(text: str) -> str:
    """The text with each number such as `1.5e3` written without an exponent: `1500`."""

    def positional(match: re.Match) -> str:
        return f"{Decimal(match[0].replace(',', '')):f}"

    return _WITH_EXPONENT.sub(positional, text)


def number_text(value: int | float | Decimal | np.number) -> str:
    """A finite number as people write it, without an exponent: 37.0 is "37", 1e-05 is "0.00001".

    A float is written with the digits that were typed: 0.1 + 0.2 is "0.3", and so is 0.3 that went
    through a column of float32.
    """
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    number = value if isinstance(value, Decimal) else _typed_decimal(float(value))
    text = f"{number:f}"
    if "." in text:
        text = text.rstrip("0").removesuffix(".")
    return "0" if text == "-0" else text


def _typed_decimal(value: float) -> Decimal:
    """The decimal number that the float stands for."""
    number = Decimal(repr(value))
    if len(number.as_tuple().digits) <= _TYPED_DIGITS or value.is_integer():
        return number
    shorter = [Decimal(f"{value:.{_TYPED_DIGITS}g}")]
    if float(np.float32(value)) == value:
        shorter.append(Decimal(str(np.float32(value))))
    shortest = min(shorter, key=lambda d: len(d.normalize().as_tuple().digits))
    if len(shortest.normalize().as_tuple().digits) <= _SHORT_DIGITS:
        return shortest
    return number
