"""What users' code hands to a run, in the types that its files hold: numbers of other libraries are
converted at once, and what no file can hold is refused at once, by name."""

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_VALUE_CHARS = 100


class UnstorableValue(ValueError):
    """A value that no file of a run can hold."""


def plain_number(value: Any, name: str) -> int | float:
    """A finite number as Python's own.

    Args:
        value: a number or truth value of Python, numpy or torch, or an array with one of them.
        name: what it is, for messages.

    Raises:
        UnstorableValue: it is something else, or not finite.
    """
    number = _own_type(value)
    if isinstance(number, bool):
        return int(number)
    if not isinstance(number, (int, float)):
        raise UnstorableValue(f"{name}={_shown(value)} is no number")
    if not math.isfinite(number):
        raise UnstorableValue(f"{name}={_shown(value)} is not finite")
    return number


def plain_value(value: Any, name: str) -> Any:
    """A value in types of JSON: lists and dicts with text as keys, down to numbers and text.

    Args:
        name: what it is, for messages.

    Raises:
        UnstorableValue: a part of it has no such type; it is named as in "extra.agent.commas".
    """
    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise UnstorableValue(f"{name}: the key {_shown(key)} is no text")
            plain[key] = plain_value(item, f"{name}.{key}")
        return plain
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist") and getattr(value, "ndim", 0):  # an array
        return plain_value(value.tolist(), name)
    own = _own_type(value)
    if own is None or isinstance(own, (str, bool, int, float)):
        return own
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise UnstorableValue(f"{name}={_shown(value)} is a {kind}, which no file of a run can hold")


def _own_type(value: Any) -> Any:
    """A scalar of another library as Python's own; anything else as it is."""
    if type(value) in (bool, int, float, str) or value is None:
        return value
    if isinstance(value, (Decimal, Fraction)):
        return float(value)
    if hasattr(value, "item") and hasattr(value, "dtype"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # several elements
            return value
    for kind in (bool, int, float, str):  # enumerations, and subclasses such as np.float64
        if isinstance(value, kind):
            return kind(value)
    return value


def _shown(value: Any) -> str:
    return f"{value!r:.{MAX_VALUE_CHARS}}"
