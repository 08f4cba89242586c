"""From shards to buckets: coverage, order, strips and checksums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.bucket_plan import (
    Bucket,
    BucketPlan,
    BucketSlot,
    automatic_bucket_mb,
    checksum,
    weighted_sums,
)
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.weight_sync.weight_stream import row_pieces

ANY_SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=12,
)


def all_slots(plan: BucketPlan, sender: int | None = None) -> list[BucketSlot]:
    """In the order in which they travel; of one sender or of all."""
    slots = [slot for bucket in plan.buckets for slot in bucket.slots]
    return [slot for slot in slots if sender is None or slot.sender == sender]


def assert_slots_are_aligned_and_apart(bucket: Bucket, sender: int) -> None:
    previous_end = 0
    for slot in bucket.slots:
        if slot.sender == sender:
            assert slot.offset >= previous_end
            assert slot.offset % 16 == 0
            previous_end = slot.offset + slot.nbytes
    assert previous_end <= bucket.part_bytes[sender]
    assert bucket.part_bytes[sender] % 16 == 0


def assert_within_limit(bucket: Bucket, bucket_bytes: int) -> None:
    """Only one row of each piece of one tensor may be larger."""
    if bucket.nbytes <= bucket_bytes:
        return
    assert all(slot.piece.stop - slot.piece.start == 1 for slot in bucket.slots)
    assert len({slot.piece.name for slot in bucket.slots}) == 1


def assert_walks_pieces_in_order(plan: BucketPlan, sender: int, sent: list[WeightPiece]) -> None:
    """The sender's data comes in the order of its pieces, and all rows of each travel once."""
    slots = all_slots(plan, sender)
    firsts = [slot.source for slot in slots if slot.piece.start == slot.source.start]
    assert firsts == sent
    for piece in sent:
        rows: list[int] = []
        for slot in slots:
            if slot.source == piece:
                rows += range(slot.piece.start, slot.piece.stop)
        assert rows == list(range(piece.start, piece.stop))


@settings(max_examples=150, deadline=None)
@given(ANY_SHAPES, st.integers(1, 4), st.integers(1, 2000))
def test_plan_covers_everything_once(shapes, senders, bucket_bytes):
    pieces = row_pieces(shapes, senders)
    plan = BucketPlan.build(pieces, bucket_bytes)
    for bucket in plan.buckets:
        assert_within_limit(bucket, bucket_bytes)
        for sender in range(senders):
            assert_slots_are_aligned_and_apart(bucket, sender)
    assert {slot.piece.name for slot in all_slots(plan)} == set(shapes)
    for sender, sent in enumerate(pieces):
        assert_walks_pieces_in_order(plan, sender, sent)
    same_plan = BucketPlan.build(row_pieces(shapes, senders), bucket_bytes)
    assert plan.digest == same_plan.digest


def test_layers_stay_together_when_senders_own_different_parts_of_them():
    """Two stages of two layers; on each stage two senders, each with half of the experts and of the
    rest."""

    def names_of(stage: int, rank: int) -> list[str]:
        names = []
        if stage == 0 and rank == 0:
            names.append("embed")
        for layer in (stage, stage + 1):
            names.append(f"layers.{layer}.{'qk'[rank]}")
            names.append(f"layers.{layer}.experts.{2 * rank}")
            names.append(f"layers.{layer}.experts.{2 * rank + 1}")
        if stage == 2 and rank == 1:
            names.append("norm")
        return names

    pieces = []
    for stage in (0, 2):
        for rank in range(2):
            names = names_of(stage, rank)
            pieces.append([WeightPiece(name, "float32", (2,), 0, 2) for name in names])
    plan = BucketPlan.build(pieces, 16)
    order = [slot.piece.name for slot in all_slots(plan)]
    assert order[0] == "embed"
    layers = [int(name.split(".")[1]) for name in order[1:-1]]
    assert layers == sorted([0, 1, 2, 3] * 6)
    for sender, sent in enumerate(pieces):
        assert [slot.piece for slot in all_slots(plan, sender)] == sent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pieces: pieces[0].pop(0), "missing or sent twice"),
        (lambda pieces: pieces[1].append(pieces[1][0]), "missing or sent twice"),
        (
            lambda pieces: pieces[1].pop(0),
            "of the 8 rows of a some are missing or sent twice: 0 to 4 came",
        ),
        (
            lambda pieces: pieces[1].__setitem__(0, WeightPiece("a", "bfloat16", (8, 2), 4, 8)),
            "disagree about dtype or shape",
        ),
        (
            lambda pieces: pieces[0].append(WeightPiece("b", "float33", (1,), 0, 1)),
            "no attribute 'float33'",
        ),
        (lambda pieces: pieces[1].reverse(), "different orders"),
    ],
)
def test_plan_refuses_pieces_that_do_not_fit(change, message):
    pieces = row_pieces({"a": (8, 2), "c": (8, 2)}, 2)
    change(pieces)
    with pytest.raises((SyncError, AttributeError), match=message):
        BucketPlan.build(pieces, 100)


@pytest.mark.parametrize("checksum_function", [checksum, weighted_sums], ids=["CPU", "GPU"])
@settings(max_examples=60, deadline=None)
@given(words=st.integers(1, 40000), data=st.data())
def test_checksum_detects_one_changed_bit_and_a_swap(checksum_function, words, data):
    flat = torch.randint(0, 256, (16 * words,), dtype=torch.uint8)
    before = checksum_function(flat)
    assert torch.equal(before, checksum_function(flat.clone()))

    position = data.draw(st.integers(0, len(flat) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    flat[position] ^= bit
    assert not torch.equal(before, checksum_function(flat))
    flat[position] ^= bit

    i = data.draw(st.integers(0, words - 1))
    j = data.draw(st.integers(0, words - 1))
    rows = flat.view(-1, 16)
    if not torch.equal(rows[i], rows[j]):
        rows[[i, j]] = rows[[j, i]]
        assert not torch.equal(before, checksum_function(flat))


@pytest.mark.parametrize("words", [2, 1022, 1024, 1026, 5000])
def test_the_gpu_checksum_is_its_definition(words):
    flat = torch.randint(0, 256, (8 * words,), dtype=torch.uint8)
    sums = [0, 0]
    for i, word in enumerate(flat.view(torch.int64).tolist()):
        sums[0] += word * (2 * (i % 1024) + 1)
        sums[1] += word * (2 * (i // 1024) + 1)
    signed = [(total + 2**63) % 2**64 - 2**63 for total in sums]
    assert weighted_sums(flat).tolist() == signed
    written = torch.zeros(3, 2, dtype=torch.int64)
    weighted_sums(flat, written[1])
    assert written[1].tolist() == signed


@pytest.mark.parametrize(
    ("gib", "expected_mb"), [(0, 64), (4, 64), (24, 128), (80, 512), (141, 1024), (288, 1024)]
)
def test_the_automatic_size_of_a_bucket_grows_with_the_device(gib, expected_mb):
    assert automatic_bucket_mb(gib << 30, gib << 30) == expected_mb


@pytest.mark.parametrize(
    ("beside_engine_gib", "expected_mb"), [(12, 512), (3, 256), (1, 128), (0, 64)]
)
def test_a_replica_with_little_memory_beside_its_engine_gets_small_buckets(
    beside_engine_gib, expected_mb
):
    assert automatic_bucket_mb(80 << 30, beside_engine_gib << 30) == expected_mb


def test_one_sender_may_own_several_parts_of_a_tensor():
    whole = torch.randn(6, 2)
    pieces = [WeightPiece("a", "float32", (6, 2), start, start + 2) for start in (0, 2, 4)]
    plan = BucketPlan.build([pieces], 1000)
    (bucket,) = plan.buckets
    part = torch.zeros(bucket.part_bytes[0], dtype=torch.uint8)
    for slot in bucket.slots:
        slot.view(part).copy_(whole[slot.piece.start : slot.piece.stop])
    assert torch.equal(torch.cat([slot.view(part) for slot in bucket.slots]), whole)


@pytest.mark.parametrize("bucket_bytes", [1000, 64], ids=["one bucket", "strips"])
def test_pieces_cut_along_columns_are_joined(bucket_bytes):
    whole = torch.arange(60.0).view(6, 10)
    pieces = [[WeightPiece("o", "float32", (6, 10), i, i + 5, dim=1)] for i in (0, 5)]
    plan = BucketPlan.build(pieces, bucket_bytes)
    joined = torch.zeros(6, 10)
    for slot in all_slots(plan):
        slot.piece.slice_of(joined).copy_(whole[:, slot.piece.start : slot.piece.stop])
    assert torch.equal(joined, whole)
