"""Which bytes go to which receivers: every receiver gets what it keeps, once, and nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync import launch_order
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.routes import ALL_RECEIVERS, Routes, ShardsOfReceivers
from one_step_off.weight_sync.shard_blocks import Block
from tests.unit.weight_sync.kept_stream import SHAPES, KeptStream, kept_by_rank, rows
from tests.unit.weight_sync.weight_stream import (
    assert_no_errors,
    perturb,
    random_weights,
    row_pieces,
)

ALL_KEPT = {name: SHAPES[name] for name in ("embed", "q", "k", "o", "norm", "scale", "expert.0")}
"""Of these one rank keeps everything."""


def bytes_kept(kept, itemsize: int = 2) -> int:
    return itemsize * sum(block.numel for blocks in kept.values() for block in blocks)


def routes_for(senders: int, ranks: int, replicas: int = 1, shapes: dict = SHAPES):
    plan = BucketPlan.build(row_pieces(shapes, senders, "bfloat16"), bucket_bytes=300)
    kept = [kept_by_rank(rank, ranks, shapes) for rank in range(ranks)] * replicas
    return plan, kept, Routes.of_shard_blocks(plan, ShardsOfReceivers.by_kind(kept))


def test_receivers_that_keep_everything_get_whole_parts_and_nothing_is_cut():
    plan, _, routes = routes_for(senders=2, ranks=1, replicas=3)
    assert routes.sets == [(0, 1, 2)]
    assert not any(message.is_whole_part for message in itertools.chain(*routes.messages))
    plan, _, routes = routes_for(2, 1, 3, shapes=ALL_KEPT)
    for bucket, messages in zip(plan.buckets, routes.messages, strict=True):
        assert all(message.is_whole_part for message in messages)
        sizes = [size for size in bucket.part_bytes if size]
        assert [message.nbytes for message in messages] == sizes


def test_two_ranks_share_the_norms_and_get_their_own_slices():
    _, kept, routes = routes_for(senders=2, ranks=2, replicas=2)
    assert routes.sets == [(0, 1, 2, 3), (0, 2), (1, 3)]
    assert routes.rounds == [[0], [1, 2]]
    names_of_set: dict[int, set] = {0: set(), 1: set(), 2: set()}
    for message in itertools.chain(*routes.messages):
        names_of_set[message.receivers].update(shard.slot.piece.name for shard in message.shards)
    assert names_of_set[ALL_RECEIVERS] == {"norm", "scale"}
    assert names_of_set[1] == {"embed", "q", "k", "o", "expert.0"}
    assert names_of_set[2] == {"embed", "q", "k", "o", "expert.1"}


def test_ranks_that_share_a_head_are_a_set_of_their_own_in_another_round():
    _, _, routes = routes_for(senders=1, ranks=4)
    by_round = [[routes.sets[number] for number in together] for together in routes.rounds]
    assert by_round[0] == [(0, 1, 2, 3)]
    for together in by_round:
        members = list(itertools.chain(*together))
        assert len(members) == len(set(members)), "side by side"
    shared = {(0, 1), (2, 3)}  # the k heads
    assert shared <= set(routes.sets)
    assert {(0, 2), (1, 3)} <= set(routes.sets), "experts"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("senders", [1, 3])
def test_a_receiver_gets_each_number_that_it_keeps_once(ranks, senders):
    _, kept, routes = routes_for(senders, ranks)
    for receiver in range(ranks):
        counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for message in itertools.chain(*routes.messages_of_receiver(receiver)):
            for shard in message.shards:
                shard.block.slice_of(counts[shard.slot.piece.name]).add_(1)
        for name, shape in SHAPES.items():
            expected = torch.zeros(shape)
            for block in kept[receiver][name]:
                block.slice_of(expected).add_(1)
            assert torch.equal(counts[name], expected), name


def test_what_a_receiver_keeps_and_nobody_sends_is_an_error():
    plan = BucketPlan.build(row_pieces({"a": (4, 2)}, 1, "bfloat16"), 100)
    kept = {"a": (Block.whole((4, 2)),), "b": (Block.whole((3,)),)}
    with pytest.raises(SyncError, match="keeps b, which no rank sends"):
        Routes.of_shard_blocks(plan, ShardsOfReceivers.by_kind([kept]))


@st.composite
def boxes(draw, shape) -> tuple[Block, ...]:
    """One or two disjoint boxes, cut along one dimension, or none."""
    dim = draw(st.integers(0, len(shape) - 1))
    borders = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=4, max_size=4)))
    blocks = [rows(shape, borders[0], borders[1], dim), rows(shape, borders[2], borders[3], dim)]
    return tuple(block for block in blocks if block.numel)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_boxes_of_any_receivers_arrive_as_they_are(data):
    shapes = {"a": (7, 5), "b": (11,), "c": (3, 4, 2)}
    senders = data.draw(st.integers(1, 3))
    plan = BucketPlan.build(row_pieces(shapes, senders), data.draw(st.integers(32, 300)))
    receivers = data.draw(st.integers(1, 4))
    kept = [
        {name: data.draw(boxes(shape)) for name, shape in shapes.items()} for _ in range(receivers)
    ]
    routes = Routes.of_shard_blocks(plan, ShardsOfReceivers.by_kind(kept))
    weights = random_weights(shapes)
    held = [{name: torch.full(shape, float("nan")) for name, shape in shapes.items()} for _ in kept]
    for bucket, messages in zip(plan.buckets, routes.messages, strict=True):
        for message in messages:
            part = torch.zeros(bucket.part_bytes[message.sender], dtype=torch.uint8)
            for slot in bucket.slots_of(message.sender):
                source = slot.piece.slice_of(weights[slot.piece.name])
                slot.view(part).copy_(source)
            sent = part
            if not message.is_whole_part:
                sent = torch.ones(message.nbytes, dtype=torch.uint8)
                message.bind_cut(part, sent).write()
            for receiver in routes.sets[message.receivers]:
                for shard, view in zip(message.shards, message.views(sent), strict=True):
                    target = shard.block.slice_of(held[receiver][shard.slot.piece.name])
                    assert target.isnan().all(), "twice"
                    target.copy_(view)
    for own, found in zip(kept, held, strict=True):
        for name, blocks in own.items():
            expected = torch.full(shapes[name], float("nan"))
            for block in blocks:
                block.slice_of(expected).copy_(block.slice_of(weights[name]))
            assert torch.equal(expected.nan_to_num(9e9), found[name].nan_to_num(9e9))


@pytest.fixture(params=[False, True], ids=["side by side", "ordered as on GPUs"])
def order(request, monkeypatch):
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", request.param)


@pytest.mark.parametrize(("senders", "replicas", "ranks"), [(1, 1, 2), (2, 2, 2), (3, 1, 4)])
def test_workers_get_their_blocks_over_gloo_and_their_bytes_shrink(order, senders, replicas, ranks):
    stream = KeptStream(senders, replicas, ranks)
    whole_bytes = 0.0
    for version in range(4):
        weights = random_weights(SHAPES, "bfloat16")
        results = stream.sync_kept(weights, version, sharded_only=version > 0)
        assert_no_errors(results)
        for layout in stream.layouts:
            layout.assert_holds(weights)
        received = [report["bytes"] for report in results[senders:]]
        if version == 0:
            whole_bytes = received[0]
            continue
        for layout, size in zip(stream.layouts, received, strict=True):
            padding = 16 * len(SHAPES) * senders * 3
            assert bytes_kept(layout.kept) <= size <= bytes_kept(layout.kept) + padding
            assert size < whole_bytes


def test_deltas_and_full_syncs_of_kept_blocks_leave_the_same_bits(order):
    stream = KeptStream(2, 2, 2, bucket_bytes=4000)
    for sender in stream.senders:
        sender.full_every = 4
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(weights, 0, sharded_only=False))
    for version in range(1, 10):
        perturb(weights, 0.3 if version == 5 else 0.02)
        results = stream.sync_kept(weights, version)
        assert_no_errors(results)
        for layout in stream.layouts:
            layout.assert_holds(weights)
    assert all(receiver.mirror is None for receiver in stream.receivers)


def test_a_kept_version_is_sent_again_as_blocks_after_the_weights_have_changed():
    stream = KeptStream(2, 1, 2)
    for sender in stream.senders:
        sender.keep_sent = True
    stream.connect(3)
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(weights, 7, sharded_only=True))
    later = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(later, 7, sharded_only=True))
    for layout in stream.layouts:
        layout.assert_holds(weights)


def test_a_receiver_without_a_proved_layout_refuses_blocks():
    stream = KeptStream(1, 1, 2)
    stream.receivers[1].layout = None
    results = stream.sync_kept(random_weights(SHAPES, "bfloat16"), 1)
    assert "nothing proves its layout" in str(results[2])


def test_ends_that_disagree_about_what_travels_find_it_in_the_header():
    stream = KeptStream(1, 1, 1)

    def change(jobs):
        sender, receiver = stream.senders[0], stream.receivers[0]
        weights = random_weights(SHAPES, "bfloat16")
        jobs[:] = [
            lambda: sender.send(stream.rows(weights, 0), 1, True),
            lambda: receiver.receive(stream.layouts[0].load, 1, False),
        ]

    results, _ = stream.sync({}, 1, change_jobs=change)
    assert "do not agree whether whole tensors travel" in str(results[1])


def test_a_changed_bit_of_a_slice_is_found_by_its_checksum(monkeypatch):
    stream = KeptStream(2, 1, 2)
    sender = stream.senders[1]
    broadcast = sender._broadcast

    def spoil(packed, *messages):
        for by_set in messages:
            if 2 in by_set and by_set[2].dtype == torch.uint8:
                by_set[2][0] ^= 1
        return broadcast(packed, *messages)

    monkeypatch.setattr(sender, "_broadcast", spoil)
    results = stream.sync_kept(random_weights(SHAPES, "bfloat16"), 1)
    assert "from sender 1 differs" in str(results[3])


def test_deltas_from_shared_memory_and_from_buffers_full_of_something_else():
    """What an earlier bucket left between two tensors would travel, and no parameter holds it."""
    stream = KeptStream(2, 1, 1, bucket_bytes=4000, shapes=ALL_KEPT)
    for sender in stream.senders:
        sender.full_every = 20
    stream.connect(3, [[0], []])
    for sender in stream.senders:
        for buffer in sender.buffers:
            buffer.random_(0, 256)
    weights = random_weights(ALL_KEPT, "bfloat16")
    assert_no_errors(stream.sync_kept(weights, 0, sharded_only=False))
    for version in range(1, 5):
        perturb(weights)
        assert_no_errors(stream.sync_kept(weights, version))
        stream.layouts[0].assert_holds(weights)


def test_parameters_that_others_have_changed_are_found_by_the_next_delta():
    stream = KeptStream(2, 1, 2, bucket_bytes=4000)
    for sender in stream.senders:
        sender.full_every = 20
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(weights, 0, sharded_only=False))
    stream.layouts[1].tensors["embed"].view(torch.int16)[25, 3] += 1
    perturb(weights)
    results = stream.sync_kept(weights, 1)
    errors = [str(result) for result in results if isinstance(result, SyncError)]
    assert any("checksum of bucket" in error for error in errors)
