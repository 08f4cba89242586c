"""What visits change: the pass rates, which prompts are dropped, and when each comes back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.sections.data import Curriculum, DifficultyFilter
from one_step_off.data.difficulty import PromptHistory, epochs_between


def visit(history: PromptHistory, position: int, solved: int, epoch: int = 0) -> list:
    """One visit of four samples, while the only source is in the visit's epoch."""
    return history.apply([position], [[epoch, position, 4, solved]], [epoch])


def test_the_pass_rate_follows_the_newest_visits() -> None:
    history = PromptHistory([3], None, None)
    for epoch, solved in enumerate((4, 2, 0)):
        visit(history, 1, solved, epoch)
    assert history.rate.tolist() == [0.0, ((1.0 + 0.5) / 2 + 0.0) / 2, 0.0]
    assert history.visits.tolist() == [0, 3, 0]
    assert history.due.tolist() == [0, 3, 0]


@pytest.mark.parametrize(
    ("drop", "solved", "dropped"),
    [
        (["always", "never"], [4, 4], "always"),
        (["always", "never"], [0, 0], "never"),
        (["never"], [4, 4], ""),
        (["always"], [0, 0], ""),
        (["always", "never"], [4, 0], ""),
        (["always", "never"], [4, 3, 4], ""),
        (["always", "never"], [0, 0, 1], ""),
        (["always", "never"], [1, 0, 0], "never"),
    ],
)
def test_only_agreeing_last_visits_drop_a_prompt(drop, solved, dropped) -> None:
    history = PromptHistory([4], DifficultyFilter(2, drop, return_after=3), None)
    for epoch, count in enumerate(solved):
        found = visit(history, 2, count, epoch)
    last = len(solved) - 1
    assert [prompt.solved for prompt in found] == [dropped] * bool(dropped)
    assert history.due[2] == (last + 1 + 3 if dropped else last + 1)
    if dropped:
        assert found[0].prompt_id == (last, 2)
        assert found[0].until == last + 4
        assert history.metrics([last])["difficulty/dropped"] == 1
        assert history.metrics([last + 3])["difficulty/dropped"] == 1
        assert history.metrics([last + 4])["difficulty/dropped"] == 0, "it is back"


def test_a_prompt_that_comes_back_as_it_was_is_dropped_again_at_once() -> None:
    history = PromptHistory([4], DifficultyFilter(2, return_after=3), None)
    visit(history, 0, 4, 0)
    visit(history, 0, 4, 1)
    assert history.due[0] == 5
    (again,) = visit(history, 0, 4, 5)
    assert again.until == 9
    assert visit(history, 0, 3, 9) == []
    assert history.due[0] == 10


def test_the_bound_holds_for_each_source_alone() -> None:
    history = PromptHistory([4, 10], DifficultyFilter(1, max_dropped=0.5), None)
    visits = [[0, row, 4, 4] for row in range(14)]
    dropped = history.apply(range(14), visits, [0, 0])
    assert [prompt.prompt_id[1] for prompt in dropped] == [0, 1, 4, 5, 6, 7, 8]
    metrics = history.metrics([0, 0])
    assert metrics["difficulty/dropped"] == metrics["difficulty/dropped_always"] == 7
    assert metrics["difficulty/kept_at_limit"] == 7


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(1, 12),
    max_dropped=st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    return_after=st.integers(1, 5),
    max_interval=st.integers(2, 6),
    target=st.floats(0.0, 1.0),
)
def test_whatever_happens_each_prompt_comes_back_in_time_and_the_bound_holds(
    seed, prompts, max_dropped, return_after, max_interval, target
) -> None:
    rng = random.Random(seed)
    rules = DifficultyFilter(rng.randint(1, 3), max_dropped=max_dropped, return_after=return_after)
    history = PromptHistory([prompts], rules, Curriculum(target, max_interval))
    for epoch in range(12):
        positions = [p for p in range(prompts) if history.due[p] <= epoch and rng.random() < 0.8]
        visits = [[epoch, p, 4, rng.choice([0, 0, 2, 4, 4])] for p in positions]
        history.apply(positions, visits, [epoch])
        dropped = history.metrics([epoch])["difficulty/dropped"]
        assert dropped <= max_dropped * prompts
        longest = max(max_interval, 1 + return_after)
        assert (history.due <= epoch + longest).all()


def test_intervals_of_the_curriculum() -> None:
    rates = np.linspace(0, 1, 9)
    assert [epochs_between(r, Curriculum()) for r in rates] == [4, 3, 3, 2, 1, 2, 3, 3, 4]
    assert [epochs_between(r, Curriculum(0.25, 4)) for r in rates[::2]] == [2, 1, 2, 3, 4]
    assert [epochs_between(r, Curriculum(1.0, 2)) for r in (0.0, 1.0)] == [2, 1]


def test_a_saved_history_is_the_same() -> None:
    rules = DifficultyFilter(1)
    history = PromptHistory([3, 2], rules, Curriculum())
    history.apply([0, 4], [[0, 0, 4, 4], [0, 4, 4, 1]], [0, 0])
    again = PromptHistory([3, 2], rules, Curriculum())
    again.load_arrays(history.arrays())
    for name, array in history.arrays().items():
        assert array.dtype == again.arrays()[name].dtype
        assert array.tolist() == again.arrays()[name].tolist()
    visit_before = history.arrays()
    history.apply([1], [[0, 1, 4, 4]], [0, 0])
    assert visit_before["visits"].tolist() == [1, 0, 0, 0, 1], "a copy"
