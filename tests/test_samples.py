"""The version assertion and the order of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from one_step_off.samples import Batch, Sample, StalenessError, assert_versions


def sample(versions, incarnation=0, prompt=(0, 1), index=0, tokens=None):
    n = len(versions) if tokens is None else tokens
    return Sample(
        prompt, index, np.arange(2), np.arange(n), np.zeros(n, np.float32), np.ones(n, bool),
        np.array(versions, np.int32), incarnation,
    )  # fmt: skip


def test_every_token_of_the_expected_weights_passes():
    assert_versions(Batch(4, [sample([3, 3, 3]), sample([3])], expected=(0, 3)))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (sample([3, 3, 2]), "token 2: made by weights .*version 2.*version 3"),
        (sample([4]), "token 0: .*version 4"),
        (sample([3, 3], incarnation=1), "incarnation 1"),
        (sample([3], tokens=2), "sample 0"),
        (sample([], tokens=2), "version None"),
    ],
)
def test_any_other_token_is_named(bad, words):
    with pytest.raises(StalenessError, match=words):
        assert_versions(Batch(4, [sample([3]), bad], expected=(0, 3)))


def test_prompt_order_names_each_prompt_once():
    samples = [sample([1], prompt=p, index=i) for p in ((0, 9), (0, 2)) for i in range(3)]
    assert Batch(0, samples, (0, 1)).prompt_order() == [(0, 9), (0, 2)]
