"""Numbers as people write them: `1,234`, `$7.50`, `45%`, `12 apples.`"""

import re
from fractions import Fraction

_LONGEST_ANSWER = 200


_PLAIN = r"([-+]?)\$?([-+]?)([0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:/([0-9]+))?\s?%?\s?(?:[A-Za-z]+ ?){0,4}\.?"


def plain_number(text: str) -> Fraction | None:
    """The number in `1,234`, `$7.50`, `-3`, `1/2`, `45%` or `12 apples.`; None where the text is anything else."""
    match = re.fullmatch(_PLAIN, text) if len(text) <= _LONGEST_ANSWER else None
    if match is None:
        return None
    sign, inner_sign, digits, denominator = match.groups()
    if (sign and inner_sign) or (denominator and not int(denominator)):
        return None
    return Fraction((sign or inner_sign) + digits.replace(",", "")) / int(denominator or 1)
