"""Sender groups: max_senders ranks send what all ranks own, bit by bit, and a failure of any of
them ends the sync for all."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.cluster.errors import GIVEN_UP, SyncError
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces
from one_step_off.weight_sync.sender_groups import form_groups, message_bytes, shards_of_rank
from tests.unit.weight_sync.grouped_stream import (
    GroupedStream,
    hsdp_pieces,
    megatron_pieces,
    weights_of,
)
from tests.unit.weight_sync.weight_stream import (
    HOST,
    SHAPES,
    Job,
    assert_no_errors,
    assert_received,
    perturb,
    row_pieces,
)

pytestmark = pytest.mark.timeout(60)

DTYPE = "bfloat16"
MATRICES = {"embed": (13, 3), "w": (24, 8), "v": (9, 4), "last": (6, 2)}
LAYOUTS = {
    "FSDP": row_pieces(SHAPES, 5, DTYPE),
    "HSDP": hsdp_pieces(MATRICES, 3, 2, DTYPE),
    "Megatron": megatron_pieces(2, 3, DTYPE),
}


@pytest.fixture(params=LAYOUTS)
def pieces(request) -> Pieces:
    return LAYOUTS[request.param]


@given(ranks=st.integers(1, 12), max_senders=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_groups_are_neighbors_of_almost_equal_size_that_own_everything_once(ranks, max_senders):
    pieces = row_pieces(MATRICES, ranks)
    groups = form_groups(pieces, max_senders)
    owners = [rank for rank in range(ranks) if pieces[rank]]
    assert [rank for group in groups for rank in group.ranks] == owners
    assert len(groups) == min(max_senders, len(owners))
    sizes = [len(group.ranks) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    # Building the plan checks that each row is there once.
    BucketPlan.build([group.pieces for group in groups], 256)
    for group in groups:
        names = [piece.name for piece in group.pieces]
        assert len(names) == len(set(names)), "neighboring rows leave as one piece"


@pytest.mark.parametrize("all_send", [True, False], ids=["0", "as many as ranks"])
def test_as_many_senders_as_ranks_change_nothing(pieces, all_send):
    groups = form_groups(pieces, 0 if all_send else len(pieces))
    assert [group.pieces for group in groups] == [owned for owned in pieces if owned]
    assert not [group for group in groups if group.members]


def test_the_plan_of_grouped_ranks_does_not_grow_with_them():
    def slots(ranks: int) -> int:
        groups = form_groups(row_pieces({"w": (4096, 4)}, ranks), 4)
        plan = BucketPlan.build([group.pieces for group in groups], 1 << 20)
        return sum(len(bucket.slots) for bucket in plan.buckets)

    assert slots(4) == slots(1024) == 4


def test_members_shards_cover_the_leaders_part_once(pieces):
    groups = form_groups(pieces, 2)
    plan = BucketPlan.build([group.pieces for group in groups], 128)
    for sender, group in enumerate(groups):
        covered = [
            torch.zeros(bucket.part_bytes[sender], dtype=torch.uint8) for bucket in plan.buckets
        ]
        for rank in group.ranks:
            shards_of_bucket = shards_of_rank(plan, sender, pieces[rank])
            for part, shards in zip(covered, shards_of_bucket, strict=True):
                for shard in shards:
                    shard.place_in(part).view(torch.int16).add_(1)
                assert message_bytes(shards) <= len(part) + 16 * len(shards)
        for bucket, part in zip(plan.buckets, covered, strict=True):
            for slot in bucket.slots_of(sender):
                assert (slot.view(part).view(torch.int16) == 1).all()


@pytest.mark.parametrize("max_senders", [1, 2])
def test_full_syncs_arrive_bit_by_bit(pieces, max_senders):
    stream = GroupedStream(pieces, max_senders)
    assert len(stream.senders) == max_senders
    assert stream.members
    for version in range(3):
        weights = weights_of(pieces, DTYPE)
        results, received = stream.sync(weights, version)
        assert_no_errors(list(results.values()))
        assert_received(received, weights)
        sent = sum(results[f"rank {group.leader}"]["bytes"] for group in stream.groups)
        assert sent == stream.plan.total_bytes
        assert {results[f"rank {rank}"]["bytes"] for rank in stream.members} == {0.0}


def test_deltas_and_versions_sent_again_arrive_bit_by_bit(pieces):
    stream = GroupedStream(pieces, 2, full_every=4, keep_sent=True, bucket_bytes=1024)
    weights = weights_of(pieces, DTYPE)
    for version in range(4):
        perturb(weights, 0.2)
        results, received = stream.sync(weights, version)
        assert_no_errors(list(results.values()))
        assert_received(received, weights)
    assert not stream.connect(2)[0]
    sent = {name: tensor.clone() for name, tensor in weights.items()}
    perturb(weights, 1.0)
    # The members have trained on: their tensors must not be asked for.
    results, received = stream.sync(weights, 3, held_version=4)
    assert_no_errors(list(results.values()))
    assert_received(received, sent)
    results, received = stream.sync(weights, 4)
    assert_no_errors(list(results.values()))
    assert_received(received, weights)


def test_tensors_in_strips_arrive_bit_by_bit_and_buffers_stay_bounded():
    pieces = row_pieces({"big": (96, 16), "small": (5,)}, 6, DTYPE)
    stream = GroupedStream(pieces, 2, bucket_bytes=512)
    assert len(stream.plan.buckets) > 5
    weights = weights_of(pieces, DTYPE)
    results, received = stream.sync(weights, 1)
    assert_no_errors(list(results.values()))
    assert_received(received, weights)
    buffers = [member.host_buffer for member in stream.members.values()]
    buffers += [leader.host_buffer for leader in stream.leader_of.values()]
    assert max(len(buffer) for buffer in buffers) <= stream.plan.largest_bucket_bytes


def failures(results: dict[str, Any]) -> dict[str, str]:
    assert not [who for who, result in results.items() if result is None], "all have ended"
    return {who: str(result) for who, result in results.items() if isinstance(result, SyncError)}


def test_a_member_that_fails_ends_the_sync_for_all_with_its_reason(pieces):
    stream = GroupedStream(pieces, 2, timeout_s=20.0)
    rank = max(stream.members)
    reason = f"member {rank} of sender 1, phase gather, bucket"

    def fail(tensors: Any) -> Any:
        yield from ()
        raise RuntimeError("no memory")

    def change(jobs: dict[str, Job]) -> None:
        jobs[f"rank {rank}"] = lambda: stream.members[rank].send(fail(()), 1, 1)

    begin = time.monotonic()
    results, _ = stream.sync(weights_of(pieces, DTYPE), 1, change=change)
    assert time.monotonic() - begin < 15
    messages = failures(results)
    leader = f"rank {stream.groups[1].leader}"
    assert {f"rank {rank}", leader, "receiver 0", "receiver 1"} <= messages.keys()
    assert messages[f"rank {rank}"].startswith(reason)
    assert "no memory" in messages[leader]
    assert GIVEN_UP in messages[leader], "the leader does not count as the cause"
    others = [message for who, message in messages.items() if who != f"rank {rank}"]
    assert all(GIVEN_UP in message or "phase" in message for message in others)
    # The groups form again.
    assert_no_errors(stream.connect(2))
    weights = weights_of(pieces, DTYPE)
    results, received = stream.sync(weights, 2)
    assert_no_errors(list(results.values()))
    assert_received(received, weights)


def test_a_member_that_does_not_answer_is_named_within_the_limit():
    pieces = LAYOUTS["FSDP"]
    stream = GroupedStream(pieces, 2, timeout_s=1.0)
    for receiver in stream.receivers:  # its own limit would else pass at the same moment
        receiver.timeout_s = 5.0
    stream.connect(2)
    rank = max(stream.members)
    begin = time.monotonic()
    results, _ = stream.sync(
        weights_of(pieces, DTYPE), 1, change=lambda jobs: jobs.pop(f"rank {rank}")
    )
    assert time.monotonic() - begin < 10
    messages = failures(results)
    leader = messages[f"rank {stream.groups[1].leader}"]
    assert f"phase gather, bucket 1 of {len(stream.plan.buckets)}" in leader
    assert f"trainer rank {rank} did not answer in 1 s" in leader


def test_a_member_that_does_not_connect_is_named_within_the_limit():
    stream = GroupedStream(LAYOUTS["FSDP"], 1, timeout_s=1.0)
    rank = max(stream.members)
    results = stream.connect(2, without=rank)
    assert f"such as trainer rank {rank}" in str(results[0])


def test_an_abort_ends_a_members_wait_with_its_reason():
    stream = GroupedStream(LAYOUTS["FSDP"], 2)
    rank, member = next(iter(stream.members.items()))

    def only_member(jobs: dict[str, Job]) -> None:
        job = jobs[f"rank {rank}"]
        jobs.clear()
        jobs[f"rank {rank}"] = job
        jobs["abort"] = lambda: (time.sleep(0.3), member.abort(1, "rollout 0 died"))

    results, _ = stream.sync(weights_of(LAYOUTS["FSDP"], DTYPE), 1, change=only_member)
    assert f"{GIVEN_UP}rollout 0 died" in failures(results)[f"rank {rank}"]
    member.abort(5, "rollout 0 died again")
    with pytest.raises(SyncError, match="phase connect.*rollout 0 died again"):
        member.connect(5, stream.leader_of[rank].links.address)


def test_a_leader_that_gives_up_ends_its_members_waits():
    stream = GroupedStream(LAYOUTS["FSDP"], 2)
    rank, member = next(iter(stream.members.items()))
    sender = stream.senders[0]

    def member_and_leader(jobs: dict[str, Job]) -> None:
        job = jobs[f"rank {rank}"]
        jobs.clear()
        jobs[f"rank {rank}"] = job
        jobs["leader"] = lambda: (time.sleep(0.3), sender.give_up(RuntimeError("no memory")))

    assert stream.leader_of[rank] is sender.leader
    results, _ = stream.sync(weights_of(LAYOUTS["FSDP"], DTYPE), 1, change=member_and_leader)
    message = failures(results)[f"rank {rank}"]
    assert f"{GIVEN_UP}the leader of its sender group closed its link" in message


def test_a_member_with_other_weights_is_refused():
    stream = GroupedStream(LAYOUTS["FSDP"], 2, timeout_s=5.0)
    results, _ = stream.sync(weights_of(LAYOUTS["FSDP"], DTYPE), 3, held_version=2)
    messages = failures(results)
    rank = max(stream.members)
    assert "holds version 2, asked to send 3" in messages[f"rank {rank}"]


def test_damage_on_the_way_to_the_leader_is_detected(monkeypatch):
    stream = GroupedStream(LAYOUTS["FSDP"], 2, timeout_s=5.0)
    rank = max(stream.members)
    link = stream.members[rank].link
    real_send = link.send

    def flip(content: Any, limit_s: float) -> None:
        damaged = bytearray(content)
        if isinstance(content, memoryview):  # not a header
            damaged[0] ^= 1
        real_send(damaged, limit_s)

    monkeypatch.setattr(link, "send", flip)
    results, _ = stream.sync(weights_of(LAYOUTS["FSDP"], DTYPE), 1)
    leader = failures(results)[f"rank {stream.groups[1].leader}"]
    assert f"trainer rank {rank}: checksum of its part of bucket 1 differs" in leader


def test_strangers_and_members_of_another_epoch_are_not_let_in():
    stream = GroupedStream(LAYOUTS["FSDP"], 2)
    rank, member = next(iter(stream.members.items()))
    host, port, token = stream.leader_of[rank].links.address
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"x" * 48)
        member.connect(7, (host, port, token))
        assert_no_errors(stream.connect(2))
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    weights = weights_of(LAYOUTS["FSDP"], DTYPE)
    results, received = stream.sync(weights, 1)
    assert_no_errors(list(results.values()))
    assert_received(received, weights)
