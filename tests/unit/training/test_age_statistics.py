"""The statistics of an update by the age of the tokens."""

from __future__ import annotations

import torch

from one_step_off.training.roles import age_sums, means_by_age


def test_means_are_over_all_ranks_and_ages_without_tokens_have_none():
    first = age_sums(
        torch.tensor([0.0, 2.0, 2.0]),
        {"ratio": torch.tensor([1.0, 2.0, 4.0]), "clip_frac": torch.tensor([False, True, False])},
        ages=3,
    )
    second = age_sums(
        torch.tensor([2.0]), {"ratio": torch.tensor([6.0]), "clip_frac": torch.tensor([True])}, 3
    )
    empty = age_sums(
        torch.zeros(0), {"ratio": torch.zeros(0), "clip_frac": torch.zeros(0, dtype=torch.bool)}, 3
    )
    sums = {name: float(first[name] + second[name] + empty[name]) for name in first}
    assert means_by_age(sums | {"tokens": 4.0}) == {
        "staleness/ratio_age_0": 1.0,
        "staleness/ratio_age_2": 4.0,
        "staleness/clip_frac_age_0": 0.0,
        "staleness/clip_frac_age_2": 2 / 3,
    }
