"""Bucket deltas: every change comes back bit by bit, in few bytes, and what is damaged is
refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.weight_sync import delta

KINDS = ("ulp", "random", "sign", "nan", "same", "byte")


def weights(words: int, seed: int) -> torch.Tensor:
    """bf16 numbers like weights, as int16 [words]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(words, generator=generator) * 0.02).bfloat16().view(torch.int16)


def changed(base: torch.Tensor, where: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """A copy of `base` (int16 [n]) in which the words at `where` have changed in a way of KINDS."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(where),)
    old = base[where].int()
    if kind == "ulp":
        words = old + torch.randint(0, 2, size, generator=generator) * 2 - 1
    elif kind == "random":
        words = torch.randint(-(2**15), 2**15, size, generator=generator)
    elif kind == "sign":
        words = old ^ 0x8000
    elif kind == "nan":
        words = 0x7F80 + torch.randint(0, 128, size, generator=generator)
    elif kind == "byte":
        words = old + torch.randint(-140, 140, size, generator=generator)
    else:
        words = old
    new = base.clone()
    new[where] = words.to(torch.int16)
    return new


def assert_round_trip(new: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """Encode and apply; the payload, or None where it would not be smaller."""
    payload, count = delta.encode(new.view(torch.uint8), base.view(torch.uint8))
    assert count == int((new != base).sum())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(delta._COUNTS_FIRST, "cpu", True)  # as on GPUs
        as_on_gpus, same_count = delta.encode(new.view(torch.uint8), base.view(torch.uint8))
    assert same_count == count
    assert (payload is None) == (as_on_gpus is None)
    if payload is not None:
        assert torch.equal(payload, as_on_gpus)
        assert payload.dtype == torch.uint8
        assert len(payload) % 16 == 0
        assert len(payload) < 2 * len(new)
        words = base.clone()
        delta.apply(payload, words.view(torch.uint8))
        assert torch.equal(words, new)
    return payload


@settings(max_examples=200)
@given(
    size=st.integers(1, 400),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    share=st.sampled_from([0.0, 0.003, 0.05, 0.5, 1.0]),
    run=st.sampled_from([1, 1, 50]),
    small=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_change_comes_back(size, kinds, share, run, small, seed):
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setitem(delta._BLOCK_WORDS, "cpu", 96)
        new = base = weights(8 * size, seed)
        generator = torch.Generator().manual_seed(seed)
        # Single words, or runs of them, as when only some rows of an embedding change.
        for kind in kinds:
            starts = (torch.rand(len(base), generator=generator) < share / run).nonzero().flatten()
            where = (starts[:, None] + torch.arange(run)).flatten().unique()
            new = changed(new, where[where < len(base)], kind, seed)
        assert_round_trip(new, base)


@pytest.mark.parametrize(
    "where", [[], [0], [-1], [0, -1], [0, 70_000, 17_000_000, -1], [65_535], [65_536, 131_071]]
)
def test_gaps_of_any_length(where, monkeypatch):
    monkeypatch.setitem(delta._BLOCK_WORDS, "cpu", 1 << 25)
    base = torch.zeros(17_000_008 if 17_000_000 in where else 131_080, dtype=torch.int16)
    for kind in ("ulp", "sign", "byte"):
        payload = assert_round_trip(
            changed(base, torch.tensor(where, dtype=torch.int64), kind, 0), base
        )
        assert len(payload) <= 32 + 16 * len(where)


@pytest.mark.parametrize("kind", ["ulp", "random"])
@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1, 0.2])
def test_a_payload_is_small(kind, share):
    base = weights(3 << 20, 0)
    where = (
        (torch.rand(len(base), generator=torch.Generator().manual_seed(1)) < share)
        .nonzero()
        .flatten()
    )
    payload = assert_round_trip(changed(base, where, kind, 2), base)
    if kind == "ulp" or share >= 0.01:
        assert len(payload) <= 1.6 * 2 * len(where)


def test_changed_rows_cost_little_more_than_their_values():
    base = weights(1 << 20, 0)
    where = (
        torch.randperm(4096, generator=torch.Generator().manual_seed(1))[:40, None] * 256
        + torch.arange(256)
    ).flatten()
    assert len(assert_round_trip(changed(base, where, "random", 2), base)) <= 3.1 * len(where)
    assert len(assert_round_trip(base, base)) == 32


def test_dense_changes_are_sent_whole():
    base = weights(1 << 12, 0)
    new = changed(base, torch.arange(len(base)), "random", 1)
    assert assert_round_trip(new, base) is None
    new = changed(base, torch.arange(0, len(base), 4), "ulp", 1)
    assert assert_round_trip(new, base) is not None


def example(words: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """A payload with every stream in use, and its base."""
    base = torch.zeros(words + 70_000, dtype=torch.int16)
    where = torch.cat([torch.arange(0, words, 9), torch.tensor([words + 300, words + 69_999])])
    new = changed(base, where, "ulp", 1)
    new[where[::20]] = torch.arange(-(2**15), 2**15, 97, dtype=torch.int16)[: len(where[::20])]
    payload, _ = delta.encode(new.view(torch.uint8), base.view(torch.uint8))
    assert all(payload[8:32].view(torch.int32).tolist())
    return payload, base.view(torch.uint8)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_payload_is_refused_or_stays_inside(data):
    """It raises with nothing written, or it is a valid payload of other changes, which only a
    checksum can tell."""
    payload, base = example()
    at = data.draw(st.integers(0, 63) | st.integers(0, len(payload) - 1))
    payload[at] = data.draw(st.integers(0, 255))
    guarded = torch.cat(
        [torch.full((64,), 7, dtype=torch.uint8), base, torch.full((64,), 7, dtype=torch.uint8)]
    )
    words = guarded[64:-64]
    try:
        delta.apply(payload, words)
    except ValueError:
        assert torch.equal(words, base)
    assert (guarded[:64] == 7).all() and (guarded[-64:] == 7).all()


def test_what_does_not_fit_raises():
    payload, base = example()
    for wrong in (payload[:-16], payload[:16], payload[:0], torch.cat([payload, payload[:16]])):
        with pytest.raises(ValueError, match="does not fit"):
            delta.apply(wrong, base)
    for words in (base[:-16], base[:0], torch.cat([base, base[:16]])):
        with pytest.raises(ValueError, match="does not fit"):
            delta.apply(payload, words)
    for field in range(8):  # words, block, and the lengths of the streams
        for value in (-1, 0, 1, 2**31 - 1):
            wrong = payload.clone()
            header = wrong[:32].view(torch.int32)
            is_larger_block = field == 1 and value == 2**31 - 1  # which is allowed
            if header[field] == value or is_larger_block:
                continue
            header[field] = value
            with pytest.raises(ValueError, match="delta: "):
                delta.apply(wrong, base)
    assert not base.any()


def test_nothing_is_written_when_a_later_block_is_wrong(monkeypatch):
    monkeypatch.setitem(delta._BLOCK_WORDS, "cpu", 1024)
    base = torch.zeros(2048, dtype=torch.int16)
    new = changed(base, torch.tensor([3, 2047]), "ulp", 0)
    payload, _ = delta.encode(new.view(torch.uint8), base.view(torch.uint8))
    # The gap of the second block's word is the only number of two bytes.
    gap = payload[56:58].view(torch.int16)
    assert gap.item() == 1023
    gap += 1
    with pytest.raises(ValueError, match="not within a block"):
        delta.apply(payload, base.view(torch.uint8))
    assert not base.any()
