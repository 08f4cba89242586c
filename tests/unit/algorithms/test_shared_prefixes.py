"""Trees of sequences with common prefixes, how they are laid out, and when it pays."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import SharingRule, find_prefixes, rows_of

ALWAYS = SharingRule(1.0, 0.0, 0.0, least_saving=0.0, least_gain=0.0, row_tokens=40)


@st.composite
def groups_of_sequences(draw):
    """Sequences of few different tokens, so that many begin alike, and their groups."""
    sequences = []
    groups = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
        for _ in range(draw(st.integers(1, 6))):
            response = draw(st.lists(st.integers(0, 2), max_size=8))
            sequences.append(np.array(prompt + response, np.int32))
            groups.append(group)
    order = draw(st.permutations(range(len(sequences))))
    return [groups[i] for i in order], [sequences[i] for i in order]


@given(groups_of_sequences())
@settings(max_examples=60, deadline=None)
def test_every_token_of_a_tree_is_there_once(drawn):
    """But for the last one of equal sequences, of which each has one of its own."""
    groups, sequences = drawn
    prefixes = find_prefixes(groups, sequences)
    for row in rows_of(prefixes):
        assert len({groups[i] for i in row}) == 1
        for before, own in itertools.pairwise(row):
            common = prefixes[own, 1]
            assert 0 < common < len(sequences[own])
            np.testing.assert_array_equal(sequences[before][:common], sequences[own][:common])
    named = [(g, *s.tolist()) for g, s in zip(groups, sequences, strict=True)]
    tokens = {own[:end] for own in named for end in range(2, len(own) + 1)}
    repeated = len(named) - len(set(named))
    computed = sum(map(len, sequences)) - prefixes[:, 1].sum()
    assert computed == len(tokens) + repeated


def test_segments_share_their_episode_and_episodes_their_prompt():
    prompt, first, second = [1, 2, 3], [4] * 20, [5] * 30
    contexts = [second + [6], first + [7, 8], second + [9], first + [6], first]
    sequences = [np.array(prompt + context) for context in contexts]
    prefixes = find_prefixes(["episode"] * 5, sequences)
    (row,) = rows_of(prefixes)
    assert row.tolist() == [4, 3, 1, 0, 2]
    assert prefixes[row, 1].tolist() == [0, 23, 23, 3, 33]


@pytest.mark.parametrize("rows", [[[0, 2], [1, 2]], [[0, 0], [1, 5]]])
def test_a_row_that_begins_with_nothing_to_share_is_refused(rows):
    sequences = [np.arange(4), np.arange(6)]
    wanted = [np.array([3]), np.array([5])]
    with pytest.raises(ValueError, match=r"share more than \[0, 4\] tokens"):
        batching.collate(sequences, wanted, packed=True, rows=np.array(rows))


@given(groups_of_sequences(), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_the_layout_shows_each_token_its_own_sequence_and_nothing_else(drawn, seed):
    groups, sequences = drawn
    rng = np.random.default_rng(seed)
    lengths = [len(s) for s in sequences]
    rows = batching.rows_that_pay(lengths, find_prefixes(groups, sequences), ALWAYS, 1)
    wanted = [1 + np.flatnonzero(rng.random(length - 1) < 0.7) for length in lengths]
    micro = batching.collate(sequences, wanted, packed=bool(seed % 2), rows=rows)
    plain = batching.collate(sequences, wanted, packed=True)
    np.testing.assert_array_equal(micro.tokens, plain.tokens)
    assert micro.counts == plain.counts
    if not rows[:, 1].any():
        assert micro.common is None
        return
    assert micro.input_ids.size == sum(lengths) - rows[:, 1].sum()
    assert micro.max_seqlen == np.diff(micro.cu_seqlens).max()
    assert micro.uses.sum() == sum(lengths)
    keys = micro.keys()
    ids, positions = micro.input_ids[0], micro.position_ids[0]
    answers = np.split(micro.logit_index, np.cumsum(micro.counts)[:-1])
    for sequence, own_wanted, places in zip(sequences, wanted, answers, strict=True):
        for token, place in zip(own_wanted, places, strict=True):
            segment = np.searchsorted(micro.cu_seqlens, place, side="right") - 1
            own_keys = keys[segment]
            # Aligned at the last query and the last key.
            later = micro.cu_seqlens[segment + 1] - 1 - place
            seen = own_keys[: len(own_keys) - later]
            np.testing.assert_array_equal(ids[seen], sequence[:token])
            np.testing.assert_array_equal(positions[seen], np.arange(token))


@given(
    groups_of_sequences(),
    st.integers(1, 4),
    st.integers(8, 60),
    st.booleans(),
    st.sampled_from([0.0, 10.0, 30.0]),
)
@settings(max_examples=120, deadline=None)
def test_plans_keep_rows_whole_within_their_limits_and_the_driver_plans_alike(
    drawn, ranks, budget, packed, least_saving
):
    groups, sequences = drawn
    rule = replace(ALWAYS, row_tokens=budget, least_saving=least_saving)
    lengths = [len(s) for s in sequences]
    prefixes = find_prefixes(groups, sequences)
    rows = batching.rows_that_pay(lengths, prefixes, rule, ranks)
    plan = batching.plan_micro_batches(lengths, ranks, budget, packed, rows=rows)
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    placed = [index for share in plan for micro in share for index in micro]
    assert sorted(placed) == list(range(len(lengths)))
    for micro in (micro for share in plan for micro in share if micro):
        own = rows[micro]
        layout = batching.collate(
            [sequences[i] for i in micro], [np.zeros(0, int)] * len(micro), packed, rows=own
        )
        assert layout.input_ids.size <= budget or len(micro) == 1
        if not packed:  # padded sequences and shared rows are apart
            assert len({len(row) > 1 for row in rows_of(own)}) == 1
    for own in rows_of(rows):
        homes = {
            (share, number)
            for share, micro_batches in enumerate(plan)
            for number, micro in enumerate(micro_batches)
            if set(own.tolist()) & set(micro)
        }
        assert len(homes) == 1
    everything = [list(range(len(lengths)))]
    found = batching.positions_of_shares(lengths, everything, ranks, 1, prefixes, rule)
    assert found == [sorted(i for micro in share for i in micro) for share in plan]


def tree(*rests: int | tuple[int, list[int]], prefix: int) -> tuple[list[int], np.ndarray]:
    """Lengths and prefixes of sequences that begin with `prefix` tokens: the tokens that each has
    after these, or, of episodes, those that its segments share, and those of each segment."""
    lengths, common = [], []
    for rest in rests:
        shared, segments = rest if isinstance(rest, tuple) else (0, [rest])
        lengths += [prefix + shared + own for own in segments]
        common += [prefix] + [prefix + shared] * (len(segments) - 1)
    common[0] = 0
    return lengths, np.column_stack([np.arange(len(common)), common])


def test_the_cost_counts_the_pairs_that_are_computed():
    """Of a token with those before it and half of its own; where a mask is computed, too, of each
    own token with all."""
    lengths, common = np.array([10, 10, 7]), np.array([0, 4, 6])
    pairs = [[sum(p + 0.5 for p in range(c, n)) for c, n in zip(common, lengths, strict=True)]]
    pairs.append([50.0, 6 * 10.0, 7.0])
    for masked, own in enumerate(pairs):
        rule = replace(ALWAYS, token=100.0, pair=3.0, masked=float(masked))
        wanted = 100.0 * (lengths - common) + 3.0 * np.array(own)
        np.testing.assert_array_equal(rule.cost(lengths, common), wanted)


def test_a_row_is_shared_only_where_it_saves_enough():
    rule = SharingRule(2.0, 0.01, 1.0, least_saving=100.0, least_gain=0.1, row_tokens=10_000)

    def is_shared(n: int, prefix: int, rest: int, rule: SharingRule = rule) -> bool:
        lengths, prefixes = tree(*[rest] * n, prefix=prefix)
        return bool(batching.rows_that_pay(lengths, prefixes, rule, 1)[:, 1].any())

    assert is_shared(8, 512, 128)
    assert not is_shared(1, 512, 128)
    assert not is_shared(8, 10, 500), "the gain is below a tenth"
    assert not is_shared(2, 20, 10), "too little is saved"
    assert not is_shared(8, 512, 128, replace(rule, least_saving=1e6))
    assert not is_shared(8, 512, 128, replace(rule, row_tokens=700)), "no two fit into a row"


def test_every_node_of_a_tree_shares_where_that_pays():
    """A short prompt, whose long samples share nothing worth it; the segments of two do."""
    rule = replace(ALWAYS, least_gain=0.1, row_tokens=10_000)
    lengths, prefixes = tree(500, 600, (500, [30, 40]), (700, [10, 20, 5]), 9, prefix=20)
    rows = batching.rows_that_pay(lengths, prefixes, rule, 1)
    assert rows[:, 1].tolist() == [0, 0, 0, 520, 0, 720, 720, 20]
    assert [row.tolist() for row in rows_of(rows)] == [[0], [1], [2, 3], [4, 5, 6, 7]]


def test_a_long_row_is_cut_into_rows_that_fit():
    lengths, prefixes = tree(*[10] * 8, prefix=20)
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=50), 1)
    assert sorted(len(row) for row in rows_of(rows)) == [2, 3, 3]


def test_a_long_row_is_cut_where_the_least_must_be_repeated():
    """Between episodes, though a part of the third one would still fit beside the first two."""
    lengths, prefixes = tree(*[(100, [10, 10, 10, 10])] * 4, prefix=20)
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=430), 1)
    assert [len(row) for row in rows_of(rows)] == [8, 8]
    assert rows[:, 1].sum() == prefixes[:, 1].sum() - 20


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.data())
@settings(max_examples=60, deadline=None)
def test_cuts_repeat_the_fewest_tokens(lengths, data):
    """By trying all cuts."""
    pairs = itertools.pairwise(lengths)
    common = [0] + [data.draw(st.integers(0, min(a, b - 1))) for a, b in pairs]
    budget = data.draw(st.integers(9, 40))
    most = data.draw(st.integers(1, 9))
    lengths, common = np.array(lengths), np.array(common)

    def repeated(cuts: tuple[int, ...]) -> float:
        """How many tokens are; infinite where a part does not fit."""
        for part in np.split(np.arange(len(lengths)), cuts[1:]):
            tokens = lengths[part].sum() - common[part[1:]].sum()
            if max(tokens, lengths[part].sum() / 8) > budget or len(part) > most:
                return np.inf
        return common[list(cuts)].sum()

    others = range(1, len(lengths))
    every = [(0, *c) for n in range(len(lengths)) for c in itertools.combinations(others, n)]
    padded = (
        np.stack([np.pad(a, (0, 3)), np.pad(a[:1], (0, len(a) + 2))]) for a in (lengths, common)
    )
    found = np.flatnonzero(batching._cheapest_cuts(*padded, budget, most)[0])
    own = tuple(i for i in found if i < len(lengths))
    assert repeated(own) == min(map(repeated, every)) < np.inf


@pytest.mark.parametrize(("ranks", "rows"), [(1, [8]), (2, [4, 4]), (8, [1] * 8)])
def test_a_row_is_cut_for_ranks_that_would_have_nothing_to_do(ranks, rows):
    lengths, prefixes = tree(*[100] * 8, prefix=20)
    rule = replace(ALWAYS, row_tokens=10_000)
    found = batching.rows_that_pay(lengths, prefixes, rule, ranks)
    assert [len(row) for row in rows_of(found)] == rows


def test_a_sequence_that_is_too_long_leaves_the_others_shared():
    """Those beside it have the least in common that it has with either."""
    lengths, prefixes = tree((100, [500, 20_000, 600, 700]), 500, prefix=1000)
    prefixes[2:4, 1] += [200, 0]
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=16_384), 1)
    assert rows[:, 1].tolist() == [0, 0, 1100, 1100, 1000]
    assert [row.tolist() for row in rows_of(rows)] == [[0, 2, 3, 4], [1]]


@pytest.mark.parametrize(("prefix", "rest", "count"), [(8192, 64, 64), (15_000, 100, 8)])
def test_a_micro_batch_has_a_bounded_number_of_keys(prefix, rest, count):
    """Each response has keys of the prefix of its own."""
    budget = 16_384
    lengths = [prefix + rest] * count
    _, prefixes = tree(*[rest] * count, prefix=prefix)
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=budget), 1)
    assert rows[:, 1].any()
    (micro_batches,) = batching.plan_micro_batches(lengths, 1, budget, True, rows=rows)
    for micro_batch in micro_batches:
        assert len(micro_batch) * (prefix + rest) <= batching.KEYS_PER_TOKEN * budget


def test_rows_that_ranks_divide_share_nothing():
    sequences = [np.arange(5), np.arange(6)]
    with pytest.raises(ValueError, match="divide"):
        batching.collate(
            sequences, [np.array([4]), np.array([5])], True, 2, rows=np.array([[0, 0], [1, 3]])
        )
