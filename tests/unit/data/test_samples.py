"""The version assertion and the order of a batch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from one_step_off.data.packing import PackedArrays, PackedSamples, PackedShares
from one_step_off.data.samples import Batch, Sample, generated_tokens, share_prompt_experts
from one_step_off.data.staleness import (
    StalenessError,
    age_shares,
    assert_staleness,
)


def sample(versions, attempt=0, prompt=(0, 1), index=0, tokens=None):
    n = len(versions) if tokens is None else tokens
    return Sample(
        prompt, index, np.arange(2), np.arange(n), np.zeros(n, np.float32), np.ones(n, bool),
        np.array(versions, np.int32), attempt,
    )  # fmt: skip


def test_every_token_of_the_expected_weights_passes():
    assert_staleness(Batch(4, [sample([3, 3, 3]), sample([3])], expected_stamp=(0, 3)))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sample([3, 3, 2]), "token 2: generated with weights .*version 2.*version 3"),
        (sample([4]), "token 0: .*version 4"),
        (sample([3, 3], attempt=1), "attempt 1"),
        (sample([3], tokens=2), "sample 0"),
        (sample([], tokens=2), "version None"),
    ],
)
def test_any_other_token_is_named(bad, words):
    with pytest.raises(StalenessError, match=words):
        assert_staleness(Batch(4, [sample([3]), bad], expected_stamp=(0, 3)))


def test_prompt_order_names_each_prompt_once():
    samples = [sample([1], prompt=p, index=i) for p in ((0, 9), (0, 2)) for i in range(3)]
    assert Batch(0, samples, (0, 1)).prompt_order() == [(0, 9), (0, 2)]


def sent(what):
    """As Ray does it: (what arrives, the arrays that travel)."""
    arrays = []
    data = pickle.dumps(what, protocol=5, buffer_callback=arrays.append)
    return pickle.loads(data, buffers=[bytes(array.raw()) for array in arrays]), arrays


@pytest.mark.parametrize("sizes", [(), (0,), (3,), (2, 0, 5), (1, 4, 0)])
def test_samples_arrive_as_they_were_in_a_few_arrays(sizes):
    ids = np.arange(2)
    before = []
    for i, n in enumerate(sizes):
        before.append(sample([i] * n, index=i))
        before[-1].prompt_ids = ids
        before[-1].extra = {"baseline": float(i)}
        before[-1].response = f"so {i}"
    result, arrays = sent(PackedSamples(before))
    assert type(result) is list
    assert len(result) == len(sizes)
    assert len(arrays) == (5 if sizes else 0)
    pairs: list[Any] = list(zip(before, result, strict=True))
    for old, new in pairs:
        for name, value in vars(old).items():
            if isinstance(value, np.ndarray):
                assert value.dtype == getattr(new, name).dtype
                assert np.array_equal(value, getattr(new, name))
            elif name != "reward":
                assert value == getattr(new, name)
        assert np.isnan(new.reward)
        assert new.prompt_ids is result[0].prompt_ids
    shortened = PackedSamples(before)
    shortened.omitted_fields = "response", "extra"
    assert [(s.response, s.extra, s.index) for s in sent(shortened)[0]] == [
        ("", {}, i) for i in range(len(sizes))
    ]


def with_experts(index: int, tokens: int, first: int = 0) -> Sample:
    made = sample([3] * tokens, index=index)
    made.prompt_experts = np.arange(first, first + 4, dtype=np.uint8).reshape(2, 2, 1)
    made.response_experts = np.full((tokens - 1, 2, 1), index, np.uint8)
    return made


def test_equal_experts_of_a_prompt_are_held_and_sent_once():
    samples = [with_experts(0, 3), with_experts(1, 1), with_experts(2, 4, first=9)]
    share_prompt_experts(samples)
    assert samples[1].prompt_experts is samples[0].prompt_experts
    result, arrays = sent(PackedSamples(samples))
    without, fewer = sent(PackedSamples([sample([3] * 3), sample([3]), sample([3] * 4)]))
    # One array for all responses, one for each different prompt.
    assert len(arrays) == len(fewer) + 3
    assert without[0].experts is None
    assert result[1].prompt_experts is result[0].prompt_experts
    for before, after in zip(samples, result, strict=True):
        assert np.array_equal(before.experts, after.experts)
        assert after.experts.dtype == np.uint8
        assert len(after.experts) == after.length - 1


def test_samples_with_and_without_experts_travel_together():
    result, _ = sent(PackedSamples([with_experts(0, 3), sample([3])]))
    assert np.array_equal(result[0].experts, with_experts(0, 3).experts)
    assert result[1].experts is None


def test_a_sample_whose_arrays_disagree_arrives_so_and_is_found():
    torn = sample([3, 3], tokens=3)
    result = sent(PackedSamples([sample([3]), torn, sample([3])]))[0]
    assert [len(s.versions) for s in result] == [1, 2, 1]
    assert [len(s.response_ids) for s in result] == [1, 3, 1]
    with pytest.raises(StalenessError, match="sample 0, token 0"):
        assert_staleness(Batch(4, result, expected_stamp=(0, 3)))


def test_arrays_and_shares_arrive_as_lists_and_dicts():
    given = {7: np.ones((2, 2)), 3: np.zeros((0, 2)), 5: np.arange(6.0).reshape(3, 2)}
    for before, kind in ((PackedArrays(given.values()), list), (PackedShares(given), dict)):
        result, arrays = sent(before)
        assert type(result) is kind
        assert len(arrays) == 1
        keys = given if kind is dict else range(3)
        assert all(np.array_equal(result[key], before[key]) for key in keys)
        assert len(result) == 3
    assert sent(PackedArrays())[0] == []
    assert sent(PackedShares())[0] == {}


def test_what_was_generated_is_counted_in_all_parts_of_a_long_batch():
    """Tokens of others count nowhere, and a wrong stamp is found in whichever part it stands."""
    samples = [sample([3] * (1 + i % 3)) for i in range(600)]
    samples[299].versions[:] = -1
    samples[555].versions[1:] = -1
    samples[299].loss_mask[:] = False
    samples[555].loss_mask[1:] = False
    samples[10].versions[:] = 2
    samples[580].versions[:] = 5
    counts, oldest, newest = generated_tokens(samples)
    assert counts.tolist() == [sum(int(v) != -1 for v in s.versions) for s in samples]
    assert (
        oldest,
        newest,
    ) == (2, 5)
    assert_staleness(Batch(4, samples, expected_stamp=(0, 5), max_version_lag=3))
    with pytest.raises(StalenessError, match="version 5"):
        assert_staleness(Batch(4, samples, expected_stamp=(0, 4), max_version_lag=3))
    none = generated_tokens([sample([-1, -1]), sample([])])
    assert none[0].tolist() == [0, 0]
    assert np.isnan(none[1:]).all()


@pytest.mark.parametrize(
    ("earlier", "words"),
    [
        (sample([2, 4], attempt=0), None),
        (sample([2, 5], attempt=0), "attempt 0, version 5"),
        (sample([1, 4], attempt=0), "version 1"),
        (sample([4], attempt=1), "attempt 1"),
    ],
)
def test_samples_of_an_earlier_attempt_have_versions_of_the_runs_past(earlier, words):
    """Incarnation 2 resumed from step 4 of attempt 0; what 0 made of newer weights is not of
    its past, and of attempt 1 nothing is."""
    batch = Batch(6, [sample([6, 5], 2), earlier], (2, 6), max_version_lag=4, past={0: 4})
    if words is None:
        assert_staleness(batch)
    else:
        with pytest.raises(StalenessError, match=words):
            assert_staleness(batch)


def test_the_shares_of_the_ages_are_of_trained_tokens():
    tool = sample([3, -1, -1, 4])
    tool.loss_mask[1:3] = False
    shares = age_shares(Batch(4, [tool, sample([2])] * 200, (0, 4), 2), 3)
    assert shares == {
        "staleness/age_0": pytest.approx(1 / 3),
        "staleness/age_1": pytest.approx(1 / 3),
        "staleness/age_2": pytest.approx(1 / 3),
        "staleness/age_3": 0.0,
    }
    assert np.isnan(age_shares(Batch(4, [], (0, 4)), 0)["staleness/age_0"])


def test_a_whole_batch_may_not_be_older_than_the_limit():
    assert_staleness(Batch(6, [], (0, 4)), 2)
    for version in (3, 7):
        with pytest.raises(StalenessError, match=f"version {version}, .*versions 4 to 6"):
            assert_staleness(Batch(6, [], (0, version)), 2)
