"""The built-in verifiers: what counts as right."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.data.plain_numbers import plain_number
from one_step_off.rewards.verifiers import gsm8k, math

GSM8K_RIGHT = [
    ("7 + 2 = 9\n#### 9", "9"),
    ("####72", "72"),
    ("#### 72\nQuestion: something else", "72"),
    ("#### 5\n#### 72", "72"),
    ("#### 1,234", "1234"),
    ("#### 1234", "1,234"),
    ("#### $72", "72"),
    ("#### -$72", "-72"),
    ("#### 72.", "72"),
    ("#### 72.00", "72"),
    ("#### 45%", "45"),
    ("#### 72 apples.", "72"),
    ("#### **72**", "72"),
    ("#### 1/2", "0.5"),
    ("#### 4/2", "2"),
    ("#### \\frac{1}{2}", "0.5"),
    ("#### $72$", "72"),
    ("#### \\boxed{72}", "72"),
    ("#### 72\r", "72"),
    ("#### 0", "-0"),
    ("#### 0.00001", "1e-05"),
    ("#### 1e-5", "0.00001"),
    ("#### 10000000000000000", "1e+16"),
    ("#### 150,000,000,000,000,000,000", "1.5e20"),
    ("#### 37", "37.0"),
    ("#### 1,234,567.5", "1234567.5"),
    ("#### 1{,}234", "1234"),
    ("#### 1,\\!234", "1234"),
    ("#### +5", "5"),
    ("#### .5", "0.5"),
    ("#### Paris", "paris"),
]

GSM8K_WRONG = [
    ("", "72"),
    ("72", "72"),
    ("The answer is 72", "72"),
    ("####", "72"),
    ("#### \n72", "72"),
    ("#### 71", "72"),
    ("#### 72\n#### 71", "72"),
    ("#### 72 or 73", "73"),
    ("#### 73 or 72", "73"),
    ("#### 36 + 36", "72"),
    ("#### 75-3", "72"),
    ("#### 72 = 72", "72"),
    ("#### 1/0", "0"),
    ("#### 1/000", "0"),
    ("#### +-72", "72"),
    ("#### 72.0000000000000000000001", "72"),
    ("#### seventy", "72"),
    ("#### 9^{9^{9^9}}", "72"),
    ("#### 99999999!", "72"),
    ("#### " + "(" * 100_000, "72"),
    ("#### " + "9" * 100_000, "72"),
    ("#### \\frac{", "72"),
    ("#### \ud800", "72"),
    ("#### \u0667", "7"),
    ("#### \uff11\uff12", "12"),
    ("#### 1,8", "18"),
    ("#### 1,2,3", "123"),
    ("#### 12,5", "125"),
    ("#### 12,5", "12.5"),
    ("#### 0,123", "123"),
    ("#### 0,123", "0.123"),
    ("#### 1,23,456", "123456"),
    ("#### 1234,567", "1234567"),
    ("#### 1{,}8", "18"),
    ("#### 125", "12,5"),
    ("#### 1_000", "1000"),
    ("#### 1_000", "1"),
    ("#### 1 000", "1000"),
    ("#### 1'000", "1000"),
    ("#### 5 6", "11"),
    ("#### 1\\,234", "235"),
    ("#### 0x1A", "26"),
    ("#### 0x1A", "0"),
    ("#### 0xFF", "0"),
    ("#### 5e", "1e5"),
    ("#### 1e999999999", "1"),
    ("#### nan", "0"),
    ("#### silent", "listen"),
]


@pytest.mark.parametrize(("response", "truth"), GSM8K_RIGHT)
def test_gsm8k_right(response: str, truth: str) -> None:
    assert gsm8k(response=response, ground_truth=truth, prompt="", data_source="") == 1.0


@pytest.mark.parametrize(("response", "truth"), GSM8K_WRONG)
def test_gsm8k_wrong(response: str, truth: str) -> None:
    assert gsm8k(response, truth) == 0.0


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{:d}", "{:,d}", "{:d}.", "{:d}.0", " {:d} ", "{:d} km"]),
)
def test_gsm8k_takes_every_spelling_of_an_integer(n: int, spelling: str) -> None:
    assert gsm8k("so\n#### " + spelling.format(n), str(n)) == 1.0
    assert gsm8k("so\n#### " + spelling.format(n + 1), str(n)) == 0.0


def test_gsm8k_is_fast() -> None:
    start = time.process_time()
    for _ in range(2000):
        gsm8k("7 + 2 = 9\n#### 9", "9")
    assert (time.process_time() - start) / 2000 < 50e-6


def test_a_long_unit_takes_no_time() -> None:
    start = time.process_time()
    assert plain_number("1" + "a" * 190 + "!") is None
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize("response", ["1e999 " * 600, "1e-999+" * 600])
def test_many_exponents_take_no_time(response: str) -> None:
    math("\\boxed{1+1}", "5")  # imports math-verify
    start = time.process_time()
    for text in (f"#### {response}", f"\\boxed{{{response}}}", response):
        assert gsm8k(text, "5") == math(text, "5") == 0.0
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so \\boxed{72}", "72", 1.0),
        ("\\boxed{\\frac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{0.5}", "1/2", 1.0),
        ("\\boxed{3} no, \\boxed{4}", "4", 1.0),
        ("\\boxed{4} no, \\boxed{3}", "4", 0.0),
        ("\\boxed{(1,2)}", "(1,2)", 1.0),
        ("\\boxed{A}", "A", 1.0),
        ("\\boxed{B}", "A", 0.0),
        ("the answer is 12", "12", 1.0),
        ("7 + 5 = 12", "12", 1.0),
        ("to add 7 + 5 we need", "12", 0.0),
        ("\\boxed{7+5}", "12", 0.0),
        ("\\boxed{2^3}", "8", 1.0),
        ("we get $x^2+1$", "x^2+1", 1.0),
        ("x " * 50_000 + "the answer is 12", "12", 1.0),
        ("", "12", 0.0),
        ("\\boxed{", "12", 0.0),
        ("\\boxed{}", "", 0.0),
        ("no idea", "12", 0.0),
        ("\ud800 \\boxed{\ud800}", "12", 0.0),
        ("\\boxed{0.00001}", "1e-05", 1.0),
        ("\\boxed{1e-5}", "0.00001", 1.0),
        ("\\boxed{10^{-5}}", "1e-05", 1.0),
        ("\\boxed{10000000000000000}", "1e+16", 1.0),
        ("\\boxed{1 \\times 10^{16}}", "1e16", 1.0),
        ("the answer is 100000", "1e5", 1.0),
        ("the answer is 1e5", "100000", 1.0),
        ("the answer is 1e5", "1", 0.0),
        ("\\boxed{37}", "37.0", 1.0),
        ("\\boxed{5.}", "5", 1.0),
        ("\\boxed{5x}", "5", 0.0),
        ("\\boxed{1,234}", "1234", 1.0),
        ("\\boxed{1,8}", "18", 0.0),
        ("\\boxed{1,8}", "1,8", 1.0),
        ("\\boxed{0,123}", "0.123", 0.0),
        ("it is 0,123", "0.123", 0.0),
        ("\\boxed{0.0000001}", "0.0000002", 0.0),
        ("\\boxed{10^{-7}}", "2e-07", 0.0),
        ("\\boxed{0.333333}", "1/3", 1.0),
        ("\\boxed{1_000}", "1", 0.0),
        ("it is 1_000", "1", 0.0),
        ("\\boxed{0x1A}", "0", 0.0),
        ("it is 0x10.", "0", 0.0),
        ("\\boxed{5 6}", "11", 0.0),
        ("\\boxed{1\\,234}", "235", 0.0),
        ("\\boxed{silent}", "listen", 0.0),
    ],
)
def test_math(response: str, truth: str, score: float) -> None:
    assert math(response=response, ground_truth=truth, prompt="", data_source="") == score
