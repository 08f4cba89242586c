"""Families of sequences with a common prefix, how they are laid out, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import (
    SharingRule,
    families_of,
    find_prefixes,
    tokens_saved,
)

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


def most_tokens(ordered: list[list[int]]) -> int:
    """That any cut of sequences in lexical order can save, by trying all of them."""
    best = 0
    for size in range(1, len(ordered) + 1):
        family = ordered[:size]
        columns = [{sequence[k] for sequence in family} for k in range(min(map(len, family)) - 1)]
        common = next((k for k, c in enumerate(columns) if len(c) > 1), len(columns))
        best = max(best, (size - 1) * common + most_tokens(ordered[size:]))
    return best


@given(groups_of_sequences(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_families_have_a_common_prefix_and_save_the_most_tokens(drawn, is_ended):
    """The most, where each sequence has an end of its own: none is the beginning of another."""
    groups, sequences = drawn
    if is_ended:
        sequences = [np.append(sequence, 10 + i) for i, sequence in enumerate(sequences)]
    prefixes = find_prefixes(groups, sequences)
    for own, prefix in families_of(prefixes):
        assert len({groups[i] for i in own}) == 1
        assert len({tuple(sequences[i][:prefix]) for i in own}) == 1
        assert (prefixes[own, 1] == prefix).all()
        assert all(prefix < len(sequences[i]) for i in own)
        assert len(own) > 1 or not prefix
    possible = 0
    for group in set(groups):
        own_group = [s.tolist() for g, s in zip(groups, sequences, strict=True) if g == group]
        possible += most_tokens(sorted(own_group))
    assert tokens_saved(prefixes) <= possible
    if is_ended:
        assert tokens_saved(prefixes) == possible


def test_the_samples_of_a_prompt_are_one_family_though_two_of_them_begin_alike():
    prompt = list(range(10))
    sequences = [np.array(prompt + rest) for rest in ([20, 21], [30], [20, 22, 23], [40, 1])]
    prefixes = find_prefixes([(0, 0)] * 4, sequences)
    assert len(families_of(prefixes)) == 1
    assert (prefixes[:, 1] == 10).all()


def test_turns_that_continue_one_another_are_cut_where_the_contexts_part():
    """Segments of episodes: two contexts that have only the system prompt in common."""
    system, first, second = [1, 2, 3], [4] * 20, [5] * 30
    contexts = [first + [6], first + [7, 8], second + [9], second + [6]]
    sequences = [np.array(system + context) for context in contexts]
    prefixes = find_prefixes(["episode"] * 4, sequences)
    found = {tuple(own.tolist()): prefix for own, prefix in families_of(prefixes)}
    assert found == {(0, 1): 23, (2, 3): 33}


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
        assert micro.prefix_of is None
        return
    assert micro.input_ids.size == sum(lengths) - tokens_saved(rows)
    assert micro.max_seqlen == np.diff(micro.cu_seqlens).max()
    assert micro.uses.sum() == sum(lengths)
    keys, cu_keys = micro.keys()
    ids, positions = micro.input_ids[0], micro.position_ids[0]
    answers = np.split(micro.logit_index, np.cumsum(micro.counts)[:-1])
    for sequence, own_wanted, places in zip(sequences, wanted, answers, strict=True):
        for token, place in zip(own_wanted, places, strict=True):
            segment = np.searchsorted(micro.cu_seqlens, place, side="right") - 1
            own_keys = keys[cu_keys[segment] : cu_keys[segment + 1]]
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
    st.sampled_from([0.0, 1.0, 30.0]),
)
@settings(max_examples=120, deadline=None)
def test_plans_keep_rows_whole_within_their_limits_and_the_driver_plans_alike(
    drawn, ranks, budget, packed, segment
):
    groups, sequences = drawn
    rule = replace(ALWAYS, row_tokens=budget, segment=segment)
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
            assert own[:, 1].all() or not own[:, 1].any()
    for own, prefix in families_of(rows):
        homes = {
            (share, number)
            for share, micro_batches in enumerate(plan)
            for number, micro in enumerate(micro_batches)
            if set(own.tolist()) & set(micro)
        }
        assert len(homes) == 1 or not prefix
    everything = [list(range(len(lengths)))]
    found = batching.positions_of_shares(lengths, everything, ranks, 1, prefixes, rule)
    assert found == [sorted(i for micro in share for i in micro) for share in plan]


def family(n: int, prefix: int, rest: int) -> tuple[list[int], np.ndarray]:
    return [prefix + rest] * n, np.array([[0, prefix]] * n)


def test_a_family_shares_only_where_it_saves_enough():
    rule = SharingRule(2.0, 0.01, 50.0, least_saving=100.0, least_gain=0.1, row_tokens=10_000)

    def is_shared(n: int, prefix: int, rest: int, rule: SharingRule = rule) -> bool:
        lengths, prefixes = family(n, prefix, rest)
        return bool(batching.rows_that_pay(lengths, prefixes, rule, 1)[:, 1].any())

    assert is_shared(8, 512, 128)
    assert not is_shared(1, 512, 128)
    assert not is_shared(8, 10, 500), "the gain is below a tenth"
    assert not is_shared(2, 20, 10), "a segment costs more than it saves"
    assert not is_shared(8, 512, 128, replace(rule, least_saving=1e6))
    assert not is_shared(8, 512, 128, replace(rule, row_tokens=700)), "no two fit into a row"


def test_a_long_family_is_cut_into_rows_that_fit():
    lengths, prefixes = family(8, 20, 10)
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=50), 1)
    sizes = [(len(own), prefix) for own, prefix in families_of(rows)]
    assert sizes == [(3, 20), (3, 20), (2, 20)]


@pytest.mark.parametrize(("ranks", "rows_of"), [(1, [8]), (2, [4, 4]), (8, [1] * 8)])
def test_a_family_is_cut_for_ranks_that_would_have_nothing_to_do(ranks, rows_of):
    lengths, prefixes = family(8, 20, 100)
    rule = replace(ALWAYS, row_tokens=10_000)
    rows = batching.rows_that_pay(lengths, prefixes, rule, ranks)
    assert [len(own) for own, _ in families_of(rows)] == rows_of


def test_one_long_sequence_leaves_the_rest_of_its_family_shared():
    lengths = [1500] * 7 + [17_000]
    prefixes = np.array([[0, 1000]] * 8)
    rule = replace(ALWAYS, row_tokens=16_384)
    rows = batching.rows_that_pay(lengths, prefixes, rule, 1)
    assert tokens_saved(rows) == 6 * 1000
    assert rows[7, 1] == 0


@pytest.mark.parametrize(("prefix", "rest", "count"), [(8192, 64, 64), (15_000, 100, 8)])
def test_a_micro_batch_has_a_bounded_number_of_keys(prefix, rest, count):
    """Each response has keys of the prefix of its own."""
    budget = 16_384
    lengths = [prefix + rest] * count
    prefixes = np.array([[0, prefix]] * count)
    rows = batching.rows_that_pay(lengths, prefixes, replace(ALWAYS, row_tokens=budget), 1)
    assert tokens_saved(rows) > 0
    (micro_batches,) = batching.plan_micro_batches(lengths, 1, budget, True, rows=rows)
    for micro_batch in micro_batches:
        parts = families_of(rows[micro_batch])
        keys = sum(len(own) * (prefix + rest) + (prefix if len(own) > 1 else 0) for own, _ in parts)
        assert keys <= batching.KEYS_PER_TOKEN * budget


def test_rows_that_ranks_divide_share_nothing():
    sequences = [np.arange(5), np.arange(6)]
    with pytest.raises(ValueError, match="divide"):
        batching.collate(
            sequences, [np.array([4]), np.array([5])], True, 2, rows=np.array([[0, 3]] * 2)
        )
