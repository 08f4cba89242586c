"""The plan of micro-batches: each sample once, the budget kept, the ranks alike."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import batching

cases = st.tuples(
    st.lists(st.integers(1, 60), max_size=40), st.integers(1, 5), st.integers(1, 120), st.booleans()
)


def cost(micro, lengths, packed):
    return sum(lengths[i] for i in micro) if packed else max(lengths[i] for i in micro) * len(micro)


@given(cases)
@settings(max_examples=200, deadline=None)
def test_plan_properties(case):
    lengths, ranks, budget, packed = case
    plan = batching.plan_micro_batches(lengths, ranks, budget, packed)
    assert len(plan) == ranks
    assert len({len(micros) for micros in plan}) == 1, (
        "a rank with fewer micro-batches would hang the others"
    )
    assert sorted(i for micros in plan for micro in micros for i in micro) == list(
        range(len(lengths))
    )
    for micro in (m for micros in plan for m in micros if len(m) > 1):
        assert cost(micro, lengths, packed) <= budget
    assert plan == batching.plan_micro_batches(
        np.array(lengths, dtype=np.int64), ranks, budget, packed
    )


@given(cases)
@settings(max_examples=100, deadline=None)
def test_ranks_are_balanced(case):
    lengths, ranks, budget, packed = case
    loads = [
        sum(lengths[i] for m in micros for i in m)
        for micros in batching.plan_micro_batches(lengths, ranks, budget, packed)
    ]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_padded_neighbours_are_alike():
    plan = batching.plan_micro_batches([10, 2, 9, 1, 10, 2], 1, 30, packed=False)
    assert plan == [[[0, 4, 2], [1, 5, 3]]]
    assert batching.plan_micro_batches([10, 2, 9, 1, 10, 2], 1, 34, packed=True) == [
        [[0, 4, 2, 1, 5, 3]]
    ]


def test_a_sequence_above_the_budget_stands_alone():
    for packed in (True, False):
        assert batching.plan_micro_batches([50, 3], 1, 10, packed) == [[[0], [1]]]


@given(cases)
def test_virtual_stages_keep_the_budget_when_all_are_padded_alike(case):
    lengths, ranks, budget, _ = case
    plan = batching.plan_micro_batches(lengths, ranks, budget, packed=False, rounds=2)
    assert len({len(micros) for micros in plan}) == 1
    assert len(plan[0]) % 2 == 0
    for micros in plan:
        rows = max((len(micro) for micro in micros), default=0)
        widest = max((lengths[i] for micro in micros for i in micro), default=0)
        assert rows <= 1 or rows * widest <= budget


def test_more_ranks_than_sequences():
    assert batching.plan_micro_batches([5], 3, 10, False) == [[[0]], [[]], [[]]]
    assert batching.plan_micro_batches([], 2, 10, True) == [[], []]


def test_mini_batches_keep_groups_whole():
    assert batching.split_into_mini_batches(["a", "a", "b", "c", "b"], 2) == [[0, 1, 2, 4], [3]]
    assert batching.split_into_mini_batches([], 2) == []


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 8))
def test_mini_batches_properties(prompts, size):
    minis = batching.split_into_mini_batches(prompts, size)
    assert sorted(i for m in minis for i in m) == list(range(len(prompts)))
    for m in minis:
        assert 0 < len({prompts[i] for i in m}) <= size
    seen = [{prompts[i] for i in m} for m in minis]
    assert sum(len(s) for s in seen) == len(set(prompts)), "a group was cut"


def test_collate_points_at_the_position_before_each_wanted_token():
    sequences = [np.array([5, 6, 7]), np.array([8, 9])]
    wanted = [np.array([1, 2]), np.array([1])]
    padded = batching.collate(sequences, wanted, packed=False)
    assert padded.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert padded.logit_index.tolist() == [0, 1, 3]
    assert padded.tokens.tolist() == [6, 7, 9]
    assert padded.counts == [2, 1]
    assert padded.position_ids is None
    packed = batching.collate(sequences, wanted, packed=True)
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.cu_seqlens.dtype == np.int32
    assert packed.max_seqlen == 3
    assert packed.logit_index.tolist() == [0, 1, 3]
    assert packed.tokens.tolist() == [6, 7, 9]


@given(st.lists(st.integers(2, 9), max_size=5), st.integers(1, 4))
@settings(deadline=None)
def test_a_packed_row_is_filled_up_by_a_sequence_of_its_own(lengths, multiple):
    sequences = [np.arange(length) + 100 * i for i, length in enumerate(lengths)]
    wanted = [np.arange(1, length) for length in lengths]
    packed = batching.collate(sequences, wanted, True, multiple)
    width = packed.input_ids.shape[1]
    assert width % multiple == 0
    assert 0 <= width - (sum(lengths) or 2) < multiple
    assert packed.cu_seqlens[-1] == packed.position_ids.shape[1] == width
    assert packed.max_seqlen == np.diff(packed.cu_seqlens).max()
    assert len(packed.counts) == max(len(lengths), 1)
    for i, sequence in enumerate(sequences):
        begin, end = packed.cu_seqlens[i : i + 2]
        assert packed.input_ids[0, begin:end].tolist() == sequence.tolist()
        assert packed.position_ids[0, begin:end].tolist() == list(range(len(sequence)))
    # The logits of a token predict the next one of the same sequence.
    assert (packed.input_ids[0, packed.logit_index + 1] == packed.tokens).all()
    assert packed.position_ids[0, packed.logit_index + 1].all()


@pytest.mark.parametrize("packed", [True, False])
def test_collate_edges(packed):
    empty = batching.collate([], [], packed)
    assert empty.input_ids.shape == (1, 2)
    assert len(empty.logit_index) == len(empty.tokens) == 0
    with pytest.raises(ValueError, match="first token"):
        batching.collate([np.array([1, 2])], [np.array([0])], packed)


@given(st.lists(st.integers(2, 20), min_size=1, max_size=4), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_parts_of_a_micro_batch_make_it_whole(lengths, ranks, packed):
    sequences = [np.arange(n) + 100 * i for i, n in enumerate(lengths)]
    wanted = [np.arange(1, n, 2) for n in lengths]
    laid = batching.collate(sequences, wanted, packed, 2 * ranks if ranks > 1 else 1)
    slice_of = batching.sequence_parallel_slice if packed else batching.context_parallel_slice
    parts = [slice_of(laid, rank, ranks) for rank in range(ranks)]
    if packed:  # neighbours, which attention joins in the order of the ranks
        for name in ("input_ids", "position_ids"):
            joined = np.concatenate([getattr(part, name) for part, _ in parts], 1)
            assert (joined == getattr(laid, name)).all()
    assert sorted(k for _, mine in parts for k in mine) == list(range(len(laid.logit_index)))
    for part, mine in parts:
        assert part.input_ids.size * ranks == laid.input_ids.size
        assert (part.tokens == laid.tokens[mine]).all()
        assert (
            part.input_ids.ravel()[part.logit_index]
            == laid.input_ids.ravel()[laid.logit_index[mine]]
        ).all()
