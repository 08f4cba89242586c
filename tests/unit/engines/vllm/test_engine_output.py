"""The weight version of every token, and the seeds of samples."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest

from one_step_off.engines.vllm.engine import token_versions
from one_step_off.rollout.sampling import sample_seed


class Span(NamedTuple):
    """As vLLM reports which weights made which tokens."""

    version: str
    start: int
    end: int


def test_versions_are_read_per_token():
    attempt, versions = token_versions([Span("2.7", 0, 3), Span("2.8", 3, 5)], 5)
    assert attempt == 2
    assert versions.tolist() == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [Span("0.1", 0, 2)],
        [Span("0.1", 1, 3)],
        [Span("0.1", 0, 2), Span("1.1", 2, 3)],
    ],
)
def test_a_token_without_one_known_version_is_refused(spans):
    with pytest.raises(RuntimeError, match="stamped 3 tokens"):
        token_versions(spans, 3)


def test_seeds_differ_for_all_neighbors_and_fit_into_63_bits():
    places = list(itertools.product(range(3), range(-1, 3), range(20), range(16)))
    seeds = {sample_seed(seed, (epoch, row), i) for seed, epoch, row, i in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, (0, 5), 2) == sample_seed(1, (0, 5), 2)
    # vLLM makes further seeds by adding: no two of ours may be that close.
    gaps = [b - a for a, b in itertools.pairwise(sorted(seeds))]
    assert min(gaps) > 64


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_a_single_turn():
    assert len({sample_seed(7, (0, 0), 0, turn) for turn in range(5)}) == 5
    assert sample_seed(7, (0, 0), 0, 0) == sample_seed(7, (0, 0), 0)
