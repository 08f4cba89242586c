"""Sends beside an update: two real FSDP2 ranks whose optimizer waits for the end of the send; all
over gloo."""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.models import tiny_qwen
from one_step_off.training.fsdp.fsdp_workers import WORKERS
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.sender_groups import form_groups
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit import forked_ranks
from tests.unit.training.fsdp_helpers import config, free_port, make_batch, start
from tests.unit.weight_sync.weight_stream import CPU, HOST, Weights, copy_into

RANKS = 2
RECEIVERS = 2
TIMEOUT_S = 30.0
BUCKET_BYTES = 40_000


def digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def delayed(method: Callable, rng: random.Random, longest_s: float) -> Callable:
    """The method, after a random delay."""

    def call_later(*args, **kwargs):
        time.sleep(rng.random() * longest_s)
        return method(*args, **kwargs)

    return call_later


def to_pieces(plans: list) -> Pieces:
    """From the fields of each rank's pieces."""
    return [[WeightPiece(*fields) for fields in plan] for plan in plans]


def digests_of(worker: Any) -> list[tuple[str, int, str]]:
    """(name, first row, digest) of each piece that the worker owns."""
    pairs = zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
    return [(piece.name, piece.start, digest(tensor)) for piece, tensor in pairs]


def connect_rank(worker: Any, rank: int, inbox, outbox) -> None:
    """As the driver connects a trainer rank."""
    outbox.put((rank, [dataclasses.astuple(piece) for piece in worker.weight_plan()]))
    pieces = to_pieces(inbox.get())
    sync_cfg = worker.cfg.weight_sync
    groups = form_groups(pieces, sync_cfg.max_senders)
    address = worker.open_sender(groups, pieces, BUCKET_BYTES, HOST, TIMEOUT_S)
    outbox.put((rank, address))
    leader_address = inbox.get()
    if hasattr(worker, "sender"):
        worker.connect_sync(1, RECEIVERS, [])
    if worker.member is not None:
        worker.join_leader(1, leader_address)


def run_rank(rank: int, cfg, port: int, inbox, outbox, folder: str, syncs: int) -> None:
    """A trainer rank: for every version a send and an update at once, with random delays."""
    torch.set_num_threads(1)
    rng = random.Random(rank)
    worker = start(cfg, rank=rank, world=RANKS, port=port, cls=WORKERS["actor"])
    connect_rank(worker, rank, inbox, outbox)
    WeightSender._pack = delayed(WeightSender._pack, rng, 0.002)
    worker._forward = delayed(worker._forward, rng, 0.01)
    batch = make_batch(cfg.model.path)
    sent = []
    errors = []

    def send(version: int) -> None:
        time.sleep(rng.random() * 0.01)
        try:
            worker.send_weights(version)
            time.sleep(rng.random() * 0.01)
            worker.release(version)  # as the driver does when all replicas have the weights
        except Exception as error:
            errors.append(repr(error))

    for version in range(syncs):
        sent.append(digests_of(worker))
        thread = threading.Thread(target=send, args=(version,))
        thread.start()
        for sample in batch.samples:
            sample.versions[:] = version
        batch.expected_stamp = (0, version)
        if cfg.weight_sync.overlap == "false":
            thread.join()
        # An update has FSDP's collectives, and those of the gradients' norm.
        metrics = worker.update(batch)
        thread.join()
        assert not errors
        assert metrics["actor/sync_wait_s"] >= 0
    torch.save(sent, f"{folder}/{rank}.pt")


def receive_all(
    index: int,
    plan: BucketPlan,
    addresses: list,
    syncs: int,
    received: list[Weights],
    errors: queue.Queue,
) -> None:
    """A receiver with random delays; `received` gets the weights of every version."""
    rng = random.Random(100 + index)
    receiver = WeightReceiver(plan, index, CPU, HOST, TIMEOUT_S)
    try:
        receiver.connect(1, addresses, RECEIVERS)
        for version in range(syncs):
            time.sleep(rng.random() * 0.01)
            weights: Weights = {}
            receiver.receive(delayed(copy_into(weights), rng, 0.001), version)
            received.append(weights)
    except SyncError as error:
        errors.put(error)


def start_receivers(
    plan: BucketPlan, addresses: list, syncs: int
) -> tuple[list[threading.Thread], list[list[Weights]], queue.Queue]:
    """The threads; per receiver the weights of each version; and the errors."""
    received: list[list[Weights]] = [[] for _ in range(RECEIVERS)]
    errors: queue.Queue = queue.Queue()
    threads = []
    for index in range(RECEIVERS):
        args = (index, plan, addresses, syncs, received[index], errors)
        threads.append(threading.Thread(target=receive_all, args=args, daemon=True))
    for thread in threads:
        thread.start()
    return threads, received, errors


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("max_senders", "syncs"),
    [
        pytest.param(2, 10, id="10 beside updates"),
        pytest.param(2, 200, id="200 beside updates", marks=pytest.mark.slow),
        pytest.param(1, 40, id="40 by one leader", marks=pytest.mark.slow),
    ],
)
def test_syncs_with_random_delays_on_every_rank(tmp_path, max_senders, syncs):
    path = tiny_qwen.build("qwen2", str(tmp_path / "model"), dtype="float32")
    cfg = config(path, actor__lr=1e-3, weight_sync__timeout_s=TIMEOUT_S)
    cfg.weight_sync.max_senders = max_senders
    cfg.weight_sync.overlap = "true"
    context = forked_ranks.context()
    port = free_port()
    outbox = context.Queue()
    inboxes = [context.Queue() for _ in range(RANKS)]
    processes = []
    for rank in range(RANKS):
        args = (rank, cfg, port, inboxes[rank], outbox, str(tmp_path), syncs)
        processes.append(forked_ranks.process(run_rank, args))
    for process in processes:
        process.start()

    def answers() -> list:
        """Of every rank, in their order."""
        answer_of = dict(outbox.get(timeout=120) for _ in range(RANKS))
        return [answer_of[rank] for rank in range(RANKS)]

    plans = answers()
    pieces = to_pieces(plans)
    groups = form_groups(pieces, max_senders)
    plan = BucketPlan.build([group.pieces for group in groups], BUCKET_BYTES)
    assert len(plan.buckets) > 3
    for inbox in inboxes:
        inbox.put(plans)
    addresses = [address for address in answers() if address]
    assert len(addresses) == max_senders
    for inbox in inboxes:
        inbox.put(addresses[0].for_members)

    threads, received, errors = start_receivers(
        plan, [address.store for address in addresses], syncs
    )
    for thread in threads:
        thread.join(240)
    for process in processes:
        process.join(30)
    assert errors.empty(), errors.get()
    assert [process.exitcode for process in processes] == [0] * RANKS
    sent = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    assert_all_versions_arrived(pieces, sent, received, syncs)
    assert sent[0][0] != sent[0][-1], "the weights have changed"


def assert_all_versions_arrived(
    pieces: Pieces, sent: list[list], received: list[list[Weights]], syncs: int
) -> None:
    """`sent`: per rank and version its `digests_of`."""
    all_pieces = [piece for owned in pieces for piece in owned]
    for version in range(syncs):
        expected = [entry for rank_sent in sent for entry in rank_sent[version]]
        for weights_of_version in received:
            weights = weights_of_version[version]
            found = []
            for piece in all_pieces:
                rows = weights[piece.name][piece.start : piece.stop]
                found.append((piece.name, piece.start, digest(rows)))
            assert found == expected, f"version {version} arrived changed"


def test_an_update_whose_weights_were_never_sent_ends_in_a_named_error(tmp_path):
    path = tiny_qwen.build("qwen2", str(tmp_path / "model"), dtype="float32")
    cfg = config(path, trainer__step_timeout_s=2.0)
    worker = start(cfg, port=free_port(), cls=WORKERS["actor"])
    try:
        groups = form_groups([worker.weight_plan()], 1)
        worker.open_sender(groups, [], 1 << 20, HOST, 2.0)
        with pytest.raises(
            SyncError, match=r"trainer rank 0: version 0 was not sent and accepted in 2 s"
        ):
            worker.update(make_batch(path))
        assert worker.version == 0
    finally:
        torch.distributed.destroy_process_group()
