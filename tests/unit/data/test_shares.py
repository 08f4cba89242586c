"""Sources take turns by their weights: exactly, from the first prompt on."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.data import mixture
from one_step_off.data.mixture import SourceTurns

weights = st.lists(
    st.one_of(st.integers(1, 9).map(float), st.floats(0.001, 100.0)), min_size=1, max_size=5
)


@settings(deadline=None)
@given(weights=weights, prompts=st.integers(1, 200))
def test_no_source_is_ever_a_whole_prompt_off_its_share(weights: list[float], prompts: int) -> None:
    turns = SourceTurns(weights)
    assert sum(turns.shares) == 1
    for drawn in range(1, prompts + 1):
        turns.next()
        assert sum(turns.counts) == drawn
        for count, share in zip(turns.counts, turns.shares, strict=True):
            assert abs(count - share * drawn) < 1


def test_shares_are_the_weights_as_they_are_written() -> None:
    """Not the nearest binary numbers: 0.7 and 0.3 repeat after ten prompts."""
    turns = SourceTurns([0.7, 0.3])
    assert turns.shares == [Fraction(7, 10), Fraction(3, 10)]
    first = [turns.next() for _ in range(10)]
    assert first.count(1) == 3
    assert [turns.next() for _ in range(10)] == first


def fewest_prompts(weights: list[float], needed: list[int]) -> int:
    """Until each source has had at least so many, one prompt after the other."""
    turns = SourceTurns(weights)
    while any(count < least for count, least in zip(turns.counts, needed, strict=True)):
        turns.next()
    return sum(turns.counts)


@settings(deadline=None)
@given(weights=weights, data=st.data())
def test_prompts_until_is_the_fewest(weights: list[float], data: st.DataObject) -> None:
    needed = [data.draw(st.integers(1, 30)) for _ in weights]
    scaled = [max(weight, 0.2 * max(weights)) for weight in weights]  # bounds the time
    turns = SourceTurns(scaled)
    fewest = 0
    while any(count < least for count, least in zip(turns.counts, needed, strict=True)):
        turns.next()
        fewest += 1
    assert SourceTurns(scaled).prompts_until(needed) == fewest
    with pytest.MonkeyPatch.context() as patch:  # as with too many prompts to draw them
        patch.setattr(mixture, "MAX_DRAWN", -1)
        enough = SourceTurns(scaled).prompts_until(needed)
    assert fewest <= enough < fewest + 1 / min(turns.shares) + 1


@pytest.mark.parametrize("weight", [0.0012345, 1e-5, 1.2345e-9])
def test_a_source_of_a_tiny_share_costs_a_bounded_number_of_turns(
    monkeypatch: pytest.MonkeyPatch, weight: float
) -> None:
    """It would have its rows after millions of them."""
    drawn = 0
    real_next = SourceTurns.next

    def count_turn(turns: SourceTurns) -> int:
        nonlocal drawn
        drawn += 1
        assert drawn <= mixture.MAX_DRAWN
        return real_next(turns)

    monkeypatch.setattr(SourceTurns, "next", count_turn)
    turns = SourceTurns([1.0, weight])
    assert abs(turns.prompts_until([100, 7473]) * turns.shares[1] - 7473) <= 1
