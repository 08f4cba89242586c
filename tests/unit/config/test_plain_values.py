"""Numbers of other libraries, and what no file can hold."""

from __future__ import annotations

import datetime
import enum
import json
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from one_step_off.config.plain_values import UnstorableValue, plain_number, plain_value


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1),
        (3, 3),
        (0.5, 0.5),
        (Level.HIGH, 3),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float16(0.5), 0.5),
        (np.float64(0.5), 0.5),
        (np.bool_(True), 1),
        (np.array(3), 3),
        (np.array([0.5]), 0.5),
        (torch.tensor(2), 2),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (torch.tensor(True), 1),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
    ],
)
def test_what_is_a_number(value, number):
    plain = plain_number(value, "x")
    assert plain == number
    assert type(plain) is type(number)
    assert json.loads(json.dumps(plain)) == number


@pytest.mark.parametrize(
    "value",
    [
        None,
        "3",
        b"3",
        1j,
        [3],
        {3},
        {"a": 3},
        np.arange(2),
        torch.zeros(2),
        datetime.datetime(2026, 1, 1),
        np.datetime64("2026-01-01"),
        SimpleNamespace(a=3),
        object,
    ],
)
def test_what_is_no_number(value):
    with pytest.raises(UnstorableValue, match=r"fact commas=.* is no number"):
        plain_number(value, "fact commas")


@pytest.mark.parametrize("value", [float("nan"), np.float32("inf"), torch.tensor(float("-inf"))])
def test_what_is_not_finite(value):
    with pytest.raises(UnstorableValue, match=r"fact commas=.* is not finite"):
        plain_number(value, "fact commas")


def test_values_keep_their_shape():
    value = {"a": [1, (2.5, None)], "b": {"c": np.arange(3)}, "d": np.float32(0.5), "e": "text"}
    plain = {"a": [1, [2.5, None]], "b": {"c": [0, 1, 2]}, "d": 0.5, "e": "text"}
    assert plain_value(value, "extra") == plain


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            {"a": [1, {2}]},
            r"extra\.a\[1\]=\{2\} is a builtins.set, which no file of a run can hold",
        ),
        ({"a": {1: 2}}, r"extra\.a: the key 1 is no text"),
        ({"a": b"bytes"}, r"extra\.a=b'bytes' is a builtins.bytes"),
        ({"a": 1j}, r"extra\.a=1j is a builtins.complex"),
        ({"a": SimpleNamespace()}, r"extra\.a=namespace\(\) is a types.SimpleNamespace"),
    ],
)
def test_what_no_file_can_hold_is_named(value, words):
    with pytest.raises(UnstorableValue, match=words):
        plain_value(value, "extra")
