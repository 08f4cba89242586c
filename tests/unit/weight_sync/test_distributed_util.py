"""The bucket plan, and real sends over gloo between threads, each with a group of its own."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.cluster.errors import SyncError
from one_step_off.cluster.network import select_gloo_interface
from one_step_off.weight_sync.bucket_plan import BucketPlan, checksum, weighted_sums
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.shared_memory import SharedMemorySender
from one_step_off.weight_sync.weight_piece import WeightPiece

CPU = torch.device("cpu")


def pieces_of(
    shapes: dict[str, tuple], senders: int, dtype: str = "float32"
) -> list[list[WeightPiece]]:
    """Rows of each tensor cut into contiguous shares, as FSDP does: the last ones may be empty."""
    out: list[list[WeightPiece]] = [[] for _ in range(senders)]
    for name, shape in shapes.items():
        rows = shape[0] if shape else 1
        chunk = -(-rows // senders)
        for s in range(senders):
            start, stop = min(rows, s * chunk), min(rows, (s + 1) * chunk)
            if stop > start:
                out[s].append(WeightPiece(name, dtype, shape, start, stop))
    return out


shapes_strategy = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(shapes_strategy, st.integers(1, 4), st.integers(1, 2000))
def test_plan_covers_everything_once(shapes, senders, bucket_bytes):
    pieces = pieces_of(shapes, senders)
    plan = BucketPlan.build(pieces, bucket_bytes)
    for bucket in plan.buckets:
        for s in range(senders):
            slots = [slot for slot in bucket.slots if slot.sender == s]
            ends = [0] + [slot.offset + slot.nbytes for slot in slots]
            assert all(
                slot.offset >= end and slot.offset % 16 == 0
                for slot, end in zip(slots, ends, strict=False)
            )
            assert ends[-1] <= bucket.nbytes[s] and bucket.nbytes[s] % 16 == 0
        one_row_each = all(slot.piece.stop - slot.piece.start == 1 for slot in bucket.slots)
        assert sum(bucket.nbytes) <= bucket_bytes or (
            one_row_each and len({s.piece.name for s in bucket.slots}) == 1
        )
    assert {slot.piece.name for b in plan.buckets for slot in b.slots} == set(shapes)
    # The senders' data comes in the order of their pieces, so the plan must walk them in that order.
    for s, sent in enumerate(pieces):
        mine = [slot for b in plan.buckets for slot in b.slots if slot.sender == s]
        assert [slot.source for slot in mine if slot.piece.start == slot.source.start] == sent
        for piece in sent:  # all of its rows, once, in order
            rows = [
                n
                for slot in mine
                if slot.source == piece
                for n in range(slot.piece.start, slot.piece.stop)
            ]
            assert rows == list(range(piece.start, piece.stop))
    assert plan.digest == BucketPlan.build(pieces_of(shapes, senders), bucket_bytes).digest


def test_layers_come_together_from_senders_that_own_different_parts_of_them():
    """Two stages of two layers, on each stage two senders with half of the experts and, by turns, of the rest."""

    def whole(name):
        return WeightPiece(name, "float32", (2,), 0, 2)

    pieces = []
    for stage in (0, 2):
        for rank in range(2):
            names = ["embed"] * (stage == rank == 0)
            for layer in (stage, stage + 1):
                names += [
                    f"layers.{layer}.{'qk'[rank]}",
                    *(f"layers.{layer}.experts.{2 * rank + i}" for i in (0, 1)),
                ]
            pieces.append(
                [whole(name) for name in (*names, *["norm"] * (stage == 2 and rank == 1))]
            )
    plan = BucketPlan.build(pieces, 16)
    order = [slot.piece.name for bucket in plan.buckets for slot in bucket.slots]
    assert order[0] == "embed" and [int(name.split(".")[1]) for name in order[1:-1]] == sorted(
        [0, 1, 2, 3] * 6
    )
    for s, sent in enumerate(pieces):
        assert [
            slot.piece for bucket in plan.buckets for slot in bucket.slots if slot.sender == s
        ] == sent


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p[0].pop(0), "missing or sent twice"),
        (lambda p: p[1].append(p[1][0]), "missing or sent twice"),
        (lambda p: p[1].pop(0), "of the 8 rows of a some are missing or sent twice: 0 to 4 came"),
        (
            lambda p: p[1].__setitem__(0, WeightPiece("a", "bfloat16", (8, 2), 4, 8)),
            "disagree about dtype or shape",
        ),
        (lambda p: p[0].append(WeightPiece("b", "float33", (1,), 0, 1)), "no attribute 'float33'"),
        (lambda p: p[1].reverse(), "different orders"),
    ],
)
def test_plan_refuses_pieces_that_do_not_fit(change, words):
    pieces = pieces_of({"a": (8, 2), "c": (8, 2)}, 2)
    change(pieces)
    with pytest.raises((SyncError, AttributeError), match=words):
        BucketPlan.build(pieces, 100)


@pytest.mark.parametrize("checksum", [checksum, weighted_sums])  # of CPUs and of GPUs
@settings(max_examples=60, deadline=None)
@given(words=st.integers(1, 40000), data=st.data())
def test_checksum_sees_one_changed_bit_and_a_swap(checksum, words, data):
    flat = torch.randint(0, 256, (16 * words,), dtype=torch.uint8)
    before = checksum(flat)
    assert torch.equal(before, checksum(flat.clone()))
    at, bit = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(0, 7))
    flat[at] ^= 1 << bit
    assert not torch.equal(before, checksum(flat))
    flat[at] ^= 1 << bit
    i, j = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, words - 1))
    rows = flat.view(-1, 16)
    if not torch.equal(rows[i], rows[j]):
        rows[[i, j]] = rows[[j, i]]
        assert not torch.equal(before, checksum(flat))


class Net:
    """Senders and receivers, each on a thread of its own."""

    def __init__(
        self,
        shapes,
        senders,
        receivers,
        bucket_bytes=64,
        timeout_s=10.0,
        dtype="float32",
        near=None,
    ) -> None:
        near = near or [[] for _ in range(senders)]
        self.pieces = pieces_of(shapes, senders, dtype)
        self.plan = BucketPlan.build(self.pieces, bucket_bytes)
        self.senders = [
            WeightSender(self.plan, i, CPU, "127.0.0.1", timeout_s) for i in range(senders)
        ]
        self.receivers = [
            WeightReceiver(self.plan, i, CPU, "127.0.0.1", timeout_s) for i in range(receivers)
        ]
        self.connect(1, near)

    def connect(self, epoch, near=None) -> None:
        near, receivers = near or [[] for _ in self.senders], len(self.receivers)
        addresses = [s.address for s in self.senders]
        results = self.together(
            [
                lambda s=s, n=n: s.connect(epoch, receivers, n)
                for s, n in zip(self.senders, near, strict=True)
            ]
            + [lambda r=r: r.connect(epoch, addresses, receivers, near) for r in self.receivers]
        )
        assert results == [None] * len(results)

    @staticmethod
    def together(jobs) -> list:
        results: list = [None] * len(jobs)

        def work(i, job):
            try:
                results[i] = job()
            except Exception as e:
                results[i] = e

        threads = [
            threading.Thread(target=work, args=(i, j), daemon=True) for i, j in enumerate(jobs)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        return results

    def sync(self, model, version, receive_as=None, change=None) -> tuple[list, list[dict]]:
        got: list[dict] = [{} for _ in self.receivers]

        def rows(s):
            for p in self.pieces[s]:
                yield model[p.name][p.start : p.stop] if p.shape else model[p.name]

        def load(i):
            def keep(tensors):
                got[i].update({n: t.clone() for n, t in tensors})

            return keep

        jobs = [
            lambda s=s: self.senders[s].send(rows(s), version) for s in range(len(self.senders))
        ]
        jobs += [
            lambda i=i: self.receivers[i].receive(
                load(i), version if receive_as is None else receive_as
            )
            for i in range(len(self.receivers))
        ]
        if change:
            change(jobs)
        return self.together(jobs), got


SHAPES = {"embed": (13, 3), "scalar": (), "w": (4, 4, 2), "tiny": (1,), "last": (5,)}


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_arrive_over_gloo(senders, receivers, dtype):
    net = Net(SHAPES, senders, receivers, dtype=dtype)
    assert len(net.plan.buckets) > 1
    for version in range(3):  # the same buffers serve every sync
        model = {n: torch.randn(s).to(getattr(torch, dtype)) for n, s in SHAPES.items()}
        results, got = net.sync(model, version)
        assert not [r for r in results if isinstance(r, Exception)]
        for one in got:
            assert set(one) == set(model)
            assert all(torch.equal(one[n], model[n]) for n in model)


@pytest.mark.parametrize(
    ("receivers", "near"),
    [
        (1, [[0]]),
        (2, [[0, 1], [0, 1]]),  # one machine's CPU: everything is near
        (2, [[0], [1]]),  # one seat's GPU each: the other receivers need the network
        (3, [[0, 1], [0, 1], [2]]),
        (2, [[1], []]),
    ],
)
def test_bits_arrive_in_shared_memory(receivers, near):
    net = Net(SHAPES, len(near), receivers, near=near)
    assert [s.links[0].readers for s, n in zip(net.senders, near, strict=True) if n] == [
        n for n in near if n
    ]
    for version in range(3):
        model = {n: torch.randn(s) for n, s in SHAPES.items()}
        results, got = net.sync(model, version)
        assert not [r for r in results if isinstance(r, Exception)]
        for one in got:
            assert set(one) == set(model) and all(torch.equal(one[n], model[n]) for n in model)


def test_a_near_receiver_reads_the_senders_own_buffer_and_no_message_is_left():
    net = Net(SHAPES, 1, 1, near=[[0]])
    theirs, mine = net.senders[0].buffers[1], net.receivers[0].links[0].buffers[1]
    theirs[3] = 77
    assert mine[3] == 77 and mine.data_ptr() != theirs.data_ptr()
    net.sync({n: torch.randn(s) for n, s in SHAPES.items()}, 0)
    left = net.senders[0].store.num_keys()
    net.sync({n: torch.randn(s) for n, s in SHAPES.items()}, 1)
    assert net.senders[0].store.num_keys() == left


def test_shared_memory_written_after_it_was_announced_is_caught(monkeypatch):
    import one_step_off.weight_sync.shared_memory as room

    honest = room.SharedMemorySender.publish

    def publish(self, tensor):
        if tensor.dtype == torch.uint8 and self.count == 2:
            tensor[3] ^= 4
        honest(self, tensor)

    monkeypatch.setattr(room.SharedMemorySender, "publish", publish)
    net = Net(SHAPES, 1, 1, near=[[0]], timeout_s=4.0)
    results, _ = net.sync({n: torch.randn(s) for n, s in SHAPES.items()}, 0)
    assert any("checksum of bucket 2" in str(r) for r in results)


@pytest.mark.parametrize("silent", ["sender", "receiver"])
def test_a_near_peer_that_is_missing_ends_in_a_named_error(silent):
    net = Net(SHAPES, 1, 1, near=[[0]], timeout_s=3.0)
    model = {n: torch.randn(s) for n, s in SHAPES.items()}
    begin = time.monotonic()
    results, _ = net.sync(model, 0, change=lambda jobs: jobs.pop(0 if silent == "sender" else 1))
    assert time.monotonic() - begin < 10
    assert isinstance(results[0], SyncError) and "phase header" in str(results[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
def test_cuda_ipc_between_two_processes():
    """A receiver in another process reads the sender's bucket out of the same GPU's memory."""
    import subprocess
    import sys

    device = torch.device("cuda", 0)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outlet = SharedMemorySender(store, [1 << 20], [0], device)
    reader = f"""
import torch
from one_step_off.weight_sync.shared_memory import SharedMemoryReceiver
inlet = SharedMemoryReceiver(torch.distributed.TCPStore("127.0.0.1", {store.port}), 0, torch.device("cuda", 0), 60.0)
for expected in (1, 2):
    room = torch.empty(1 << 20, dtype=torch.uint8, device="meta")
    assert (inlet.take(room) == expected).all()
    inlet.release()
"""
    process = subprocess.Popen([sys.executable, "-c", reader])
    for value in (1, 2):
        outlet.buffers[0].fill_(value)
        torch.cuda.synchronize()
        outlet.publish(outlet.buffers[0])
        outlet.wait(60.0)
    assert process.wait(60) == 0


def test_one_sender_may_own_several_parts_of_a_tensor():
    whole = torch.randn(6, 2)
    plan = BucketPlan.build(
        [[WeightPiece("a", "float32", (6, 2), i, i + 2) for i in (0, 2, 4)]], 1000
    )
    slots = plan.buckets[0].slots
    part = torch.zeros(plan.buckets[0].nbytes[0], dtype=torch.uint8)
    for slot in slots:
        slot.view(part).copy_(whole[slot.piece.start : slot.piece.stop])
    assert torch.equal(torch.cat([slot.view(part) for slot in slots]), whole)


def test_a_default_group_is_never_made():
    Net(SHAPES, 1, 1)
    assert not torch.distributed.is_initialized()


def test_corruption_on_the_wire_is_caught(monkeypatch):
    import one_step_off.distributed_util as room

    net = Net(SHAPES, 2, 1)
    receiver, honest, flipped, seen = net.receivers[0], room.DedicatedGroup.publish, [], []

    class Corrupted:
        def __init__(self, work, tensor):
            self.work, self.tensor = work, tensor

        def is_completed(self):
            return self.work.is_completed()

        def wait(self, limit):
            self.work.wait(limit)
            self.tensor[3] ^= 4
            flipped.append(1)

    def ask(link, tensor):
        honest(link, tensor)
        if link is receiver.links[0] and tensor.dtype == torch.uint8:
            seen.append(1)
            link.work = Corrupted(link.work, tensor) if len(seen) == 2 else link.work

    monkeypatch.setattr(room.DedicatedGroup, "ask", ask)
    model = {n: torch.randn(s) for n, s in SHAPES.items()}
    results, _ = net.sync(model, 0)
    errors = [r for r in results if isinstance(r, SyncError)]
    assert flipped == [1]
    assert errors and "checksum of bucket 2" in str(errors[0]) and "sender 0" in str(errors[0])


def test_wrong_version_and_wrong_plan_are_refused():
    net = Net(SHAPES, 1, 1, timeout_s=4.0)
    model = {n: torch.randn(s) for n, s in SHAPES.items()}
    results, got = net.sync(model, 7, receive_as=8)
    assert any("sends version 7, expected 8" in str(r) for r in results) and not got[0]
    net = Net(SHAPES, 1, 1, timeout_s=4.0)
    net.receivers[0].plan = dataclasses.replace(net.plan, digest=1)
    results, got = net.sync(model, 0)
    assert any("another bucket plan" in str(r) for r in results) and not got[0]


def test_a_missing_peer_ends_in_a_named_error_in_bounded_time():
    net = Net(SHAPES, 1, 2, timeout_s=3.0)
    model = {n: torch.randn(s) for n, s in SHAPES.items()}
    begin = time.perf_counter()
    results, _ = net.sync(model, 0, change=lambda jobs: jobs.pop(0))  # the sender never sends
    assert time.perf_counter() - begin < 10
    assert all(isinstance(r, SyncError) and "phase header" in str(r) for r in results)


def test_a_tensor_that_is_not_as_planned_is_named():
    net = Net(SHAPES, 1, 1, timeout_s=3.0)
    model = {n: torch.randn(s) for n, s in SHAPES.items()}
    model["w"] = torch.randn(4, 4, 3)
    results, _ = net.sync(model, 0)
    assert any("w is (4, 4, 3)" in str(r) and "planned (4, 4, 2)" in str(r) for r in results)


def normal(shapes, dtype="float32"):
    return {n: torch.randn(s).to(getattr(torch, dtype)) for n, s in shapes.items()}


def same(got: list[dict], model: dict) -> bool:
    return all(
        one.keys() == model.keys() and all(torch.equal(one[n], model[n]) for n in model)
        for one in got
    )


@pytest.mark.parametrize("near", [None, [[0], [0]]])
def test_a_tensor_larger_than_a_bucket_arrives_in_strips_and_memory_stays_bounded(near):
    shapes = {"small": (3, 5), "huge": (1000, 64), "column": (6, 300), "last": (7,)}
    net = Net(shapes, 2, 1, bucket_bytes=20_000, near=near)
    largest, piece = 1000 * 64 * 4, 500 * 64 * 4
    assert sum("huge" in b.joined for b in net.plan.buckets) == 13 and net.plan.largest <= 20_000
    for sender in net.senders:  # two buffers; what is packed is the live rows, without a copy
        assert sum(buffer.nbytes for buffer in sender.buffers) <= 2 * 20_000
    receiver = net.receivers[0]
    assert (
        sum(buffer.nbytes for buffer in receiver.buffers) <= 2 * 20_000
        and len(receiver.room) == largest > piece
    )
    places = [b.data_ptr() for end in (*net.senders, receiver) for b in end.buffers]
    for version in range(3):
        model = normal(shapes)
        results, got = net.sync(model, version)
        assert not [r for r in results if isinstance(r, Exception)] and same(got, model)
    assert places == [b.data_ptr() for end in (*net.senders, receiver) for b in end.buffers], (
        "the buffers are reused"
    )


def test_pieces_cut_along_columns_are_joined():
    whole = torch.arange(60.0).view(6, 10)
    pieces = [[WeightPiece("o", "float32", (6, 10), i, i + 5, dim=1)] for i in (0, 5)]
    for limit in (1000, 64):  # in one bucket, and in strips
        plan, joined = BucketPlan.build(pieces, limit), torch.zeros(6, 10)
        for slot in (slot for bucket in plan.buckets for slot in bucket.slots):
            slot.piece.slice_of(joined).copy_(whole[:, slot.piece.start : slot.piece.stop])
        assert torch.equal(joined, whole)


@pytest.mark.parametrize("near", [None, [[0, 1], [0, 1]], [[0], [1]]])
def test_changes_alone_leave_the_same_bits_as_everything_would(near):
    """Random sparse updates of bf16 weights, a dense one among them, and a full sync every 20."""
    shapes = {"embed": (400, 64), "w": (64, 64), "norm": (64,), "scalar": ()}
    net = Net(shapes, 2, 2, bucket_bytes=16_000, dtype="bfloat16", near=near)
    for sender in net.senders:
        sender.full_every = 20
    model, sizes = normal(shapes, "bfloat16"), []
    for version in range(50):
        results, got = net.sync(model, version)
        assert not [r for r in results if isinstance(r, Exception)] and same(got, model), version
        sizes.append(sum(r["bytes"] for r in results[:2]))
        for tensor in model.values():
            words = tensor.view(torch.int16)
            step = torch.randint(-2, 3, words.shape, dtype=torch.int16)
            words += torch.where(torch.rand(words.shape) < 0.02, step, torch.zeros_like(step))
            if version == 7:
                tensor.copy_(torch.randn(tensor.shape))
    full = net.plan.total_bytes
    assert [i for i, size in enumerate(sizes) if size >= full] == [0, 8, 20, 40]
    assert max(size for i, size in enumerate(sizes) if i not in (0, 8, 20, 40)) < 0.1 * full


def test_a_wrong_base_of_changes_is_caught():
    shapes = {"w": (64, 64)}
    net = Net(shapes, 1, 1, dtype="bfloat16")
    net.senders[0].full_every = 20
    model = normal(shapes, "bfloat16")
    net.sync(model, 0)
    net.receivers[0].mirror.flats[0][5] ^= 1
    model["w"].view(torch.int16)[3, 3] += 1
    results, _ = net.sync(model, 1)
    assert any("checksum of bucket 1" in str(r) for r in results)


def test_groups_are_made_anew_without_a_lost_receiver_and_with_a_late_one():
    net = Net(SHAPES, 2, 3, timeout_s=20.0)
    for sender in net.senders:
        sender.full_every = 20
    model = normal(SHAPES)
    net.sync(model, 0)
    lost, begin = net.receivers.pop(1), time.monotonic()

    lost.close()
    results, _ = net.sync(normal(SHAPES), 1)
    assert all(isinstance(r, SyncError) for r in results), "every end is told"
    assert time.monotonic() - begin < 10, "and soon"
    net.receivers = [
        WeightReceiver(net.plan, i, CPU, "127.0.0.1", 20.0) if i else net.receivers[0]
        for i in range(2)
    ]
    net.connect(2)
    results, got = net.sync(model := normal(SHAPES), 1)
    assert not [r for r in results if isinstance(r, Exception)] and same(got, model)
    net.receivers.append(WeightReceiver(net.plan, 2, CPU, "127.0.0.1", 20.0))
    net.connect(3)
    for version in (2, 3):  # with changes: the first sync after a newcomer is full
        results, got = net.sync(model := normal(SHAPES), version)
        assert not [r for r in results if isinstance(r, Exception)] and same(got, model)


def test_each_bucket_is_timed_on_the_wire():
    net = Net({"w": (1000, 64)}, 2, 1, bucket_bytes=50_000)
    results, _ = net.sync(normal({"w": (1000, 64)}), 0)
    received = results[2]
    assert received["bytes"] == net.plan.total_bytes == sum(r["bytes"] for r in results[:2])
    for one in results:
        assert [i for i, _ in one["bucket_wire"]] == list(range(len(net.plan.buckets))) and min(
            one["bucket_wire"]
        )[1] > 0
    assert received["bare_wire"] > 0 and {"wait", "verify", "load"} <= received.keys()
    assert {phase for _, phase, *_ in received["spans"]} >= {"wire", "load", "verify"}


def sends_in_a_process(pieces: list, size: int, outbox) -> None:
    """One sender, with a model of `size` bytes; tells by how much its memory grew at most while it sent twice."""
    torch.set_num_threads(1)
    model = [torch.ones(p.shape) for own in pieces for p in own]
    sender = WeightSender(BucketPlan.build(pieces, size // 16), 0, CPU, "127.0.0.1", 30.0)
    outbox.put(sender.address)
    before = memory_kb("VmRSS")
    sender.connect(1, 1)
    for version in range(2):
        sender.send((tensor for tensor in model), version)
    outbox.put((memory_kb("VmHWM") - before) * 1024)


def memory_kb(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))


def test_the_memory_of_a_sender_grows_by_two_buckets_and_a_piece():
    """Of the process itself: 256 MiB in tensors of 1 to 64 MiB, buckets of 16 MiB, sent in half as many bytes."""
    shapes = {
        "embed": (64, 262144),
        **{f"layers.{i}.w": (48, 65536) for i in range(15)},
        "norm": (4, 65536),
    }
    pieces, size = pieces_of(shapes, 1, "bfloat16"), 256 << 20
    context = torch.multiprocessing.get_context("spawn")
    outbox = context.Queue()
    process = context.Process(target=sends_in_a_process, args=(pieces, size, outbox), daemon=True)
    process.start()
    receiver = WeightReceiver(BucketPlan.build(pieces, size // 16), 0, CPU, "127.0.0.1", 30.0)
    receiver.connect(1, [outbox.get(timeout=60)], 1)
    for version in range(2):
        receiver.receive(lambda tensors: None, version)
    grown = outbox.get(timeout=60)
    process.join(30)
    assert receiver.plan.largest <= 16 << 20
    assert grown < 2 * (16 << 20) + (24 << 20), "buffers, and what torch and gloo themselves take"


def test_gloo_listens_where_rank_0_is_reached(monkeypatch):
    """Not at the address of the machine's name, which may be a loopback; what the environment says goes before."""
    import psutil

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")
    select_gloo_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "x"
    reached = [
        (name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and psutil.net_if_stats()[name].isup
    ]
    assert ("lo", "127.0.0.1") in reached
    for name, address in reached:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        select_gloo_interface(address)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name
