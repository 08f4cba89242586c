"""A sync in two parts: the first buckets while the models are in use, the rest at the pause."""

from __future__ import annotations

import copy

import pytest

from one_step_off.weight_sync import launch_order
from tests.unit.weight_sync.kept_stream import SHAPES, KeptStream
from tests.unit.weight_sync.weight_stream import assert_no_errors, perturb, random_weights

ALL = 1 << 30
ALL_KEPT = {name: SHAPES[name] for name in ("embed", "q", "k", "o", "norm", "scale", "expert.0")}


@pytest.fixture(params=[False, True], ids=["side by side", "ordered as on GPUs"])
def order(request, monkeypatch):
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", request.param)


def held(stream: KeptStream) -> list:
    return [copy.deepcopy(layout.tensors) for layout in stream.layouts]


def assert_unchanged(stream: KeptStream, before: list) -> None:
    for layout, tensors in zip(stream.layouts, before, strict=True):
        for name, tensor in tensors.items():
            assert tensor.equal(layout.tensors[name]) or tensor.isnan().any(), name


@pytest.mark.parametrize("limit_bytes", [0, 500, ALL])
def test_the_model_changes_at_the_pause_only_and_then_holds_the_new_version(order, limit_bytes):
    stream = KeptStream(2, 1, 2)
    count = stream.senders[0].shard_routes.leading_buckets(limit_bytes)
    assert (count == 0) == (limit_bytes == 0)
    assert (count == len(stream.plan.buckets)) == (limit_bytes == ALL)
    assert_no_errors(stream.sync_kept(random_weights(SHAPES, "bfloat16"), 0, sharded_only=False))
    for version in range(1, 4):
        weights = random_weights(SHAPES, "bfloat16")
        before = held(stream)
        assert_no_errors(stream.send_ahead(weights, version, limit_bytes))
        assert_unchanged(stream, before)
        for receiver in stream.receivers:
            assert len(receiver.received_ahead.messages_of_bucket) == count
            assert len(receiver.spare_memory.flat) <= limit_bytes
        results = stream.sync_kept(weights, version)
        assert_no_errors(results)
        for layout, report in zip(stream.layouts, results[2:], strict=True):
            layout.assert_holds(weights)
            assert report["bytes"] > 0


def test_deltas_that_came_ahead_are_applied_at_the_pause(order):
    stream = KeptStream(2, 2, 2, bucket_bytes=2000)
    for sender in stream.senders:
        sender.full_every = 4
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(weights, 0, sharded_only=False))
    for version in range(1, 7):
        perturb(weights)
        assert_no_errors(stream.send_ahead(weights, version, 600))
        assert_no_errors(stream.sync_kept(weights, version))
        for layout in stream.layouts:
            layout.assert_holds(weights)


def test_what_lies_in_a_senders_buffer_is_copied_and_released():
    stream = KeptStream(2, 1, 1, shapes=ALL_KEPT)
    stream.connect(3, [[0], []])
    for version in range(3):
        weights = random_weights(ALL_KEPT, "bfloat16")
        assert_no_errors(stream.send_ahead(weights, version, ALL))
        for sender in stream.senders:
            for buffer in sender.buffers:
                buffer.random_(0, 256)
        assert_no_errors(stream.sync_kept(weights, version))
        stream.layouts[0].assert_holds(weights)


def test_the_rest_must_be_of_the_same_version():
    stream = KeptStream(1, 1, 1)
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.send_ahead(weights, 1, 300))
    results = stream.sync_kept(weights, 2)
    assert "a part of version 1 was sent ahead" in str(results[0])
    assert "of version 1 was received ahead" in str(results[1]) or "given up" in str(results[1])


def test_a_spoiled_byte_of_the_first_part_is_found_at_the_pause():
    stream = KeptStream(2, 1, 2)
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.send_ahead(weights, 1, ALL))
    stream.receivers[1].spare_memory.flat[5] ^= 1
    results = stream.sync_kept(weights, 1)
    assert "phase verify: checksum of bucket 1" in str(results[3])


@pytest.mark.parametrize("full_every", [0, 9])
def test_a_replica_that_is_restarted_meanwhile_gets_the_version_before(full_every):
    stream = KeptStream(2, 1, 2)
    for sender in stream.senders:
        sender.keep_sent = True
        sender.full_every = full_every
    stream.connect(3)
    before, after = (random_weights(SHAPES, "bfloat16") for _ in range(2))
    assert_no_errors(stream.sync_kept(before, 1))
    assert_no_errors(stream.send_ahead(after, 2, 500))
    stream.connect(4)
    assert_no_errors(stream.sync_kept(after, 1))  # from the kept copies
    for layout in stream.layouts:
        layout.assert_holds(before)
    for version in (2, 3):
        assert_no_errors(stream.send_ahead(after, version, 500))
        assert_no_errors(stream.sync_kept(after, version))
        for layout in stream.layouts:
            layout.assert_holds(after)


def test_a_new_epoch_forgets_what_came_ahead():
    stream = KeptStream(2, 1, 2)
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.send_ahead(weights, 1, ALL))
    stream.connect(3)
    later = random_weights(SHAPES, "bfloat16")
    assert_no_errors(stream.sync_kept(later, 2))
    for layout in stream.layouts:
        layout.assert_holds(later)
