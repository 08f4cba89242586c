"""Numbers as people write them: `1,234`, `$7.50`, `45%`, `12 apples.`"""

import re
from fractions import Fraction

MAX_NUMBER_CHARS = 200

_NUMBER = re.compile(
    r"([-+]?)\$?([-+]?)"  # a sign before or after the dollar
    r"([0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:/([0-9]+))?"  # denominator
    r"\s?%?\s?(?:[A-Za-z]+ ?){0,4}\.?"  # percent, a unit of up to four words, a final period
)


def plain_number(text: str) -> Fraction | None:
    """The number in `1,234`, `$7.50`, `-3`, `1/2`, `45%` or `12 apples.`; None where the text is
    anything else.
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
