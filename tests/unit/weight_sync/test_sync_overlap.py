"""Sends beside an update: two real FSDP2 ranks, their optimiser waiting for the end of the send; gloo between all."""

from __future__ import annotations

import dataclasses
import hashlib
import queue
import random
import threading
import time

import pytest
import torch
import torch.multiprocessing as mp

from one_step_off.cluster.errors import SyncError
from one_step_off.models import tiny_qwen
from one_step_off.training.fsdp_workers import WORKERS
from one_step_off.weight_sync.bucket_plan import BucketPlan, pieces_of_senders
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.training.test_fsdp_workers import config, free_port, make_batch, start

RANKS, RECEIVERS, LIMIT_S = 2, 2, 30.0


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()


def delayed(method, rng, most):
    def after_a_while(*args, **kwargs):
        time.sleep(rng.random() * most)
        return method(*args, **kwargs)

    return after_a_while


def run_rank(rank: int, cfg, port: int, inbox, outbox, out: str, syncs: int) -> None:
    """A trainer rank: for every version a send and an update at once, each delayed at random wherever it can be."""
    torch.set_num_threads(1)
    rng = random.Random(rank)
    worker = start(cfg, rank=rank, world=RANKS, port=port, cls=WORKERS["actor"])
    outbox.put((rank, [dataclasses.astuple(piece) for piece in worker.weight_plan()]))
    pieces = [[WeightPiece(*piece) for piece in plan] for plan in inbox.get()]
    outbox.put((rank, worker.open_sender(pieces, 40_000, "127.0.0.1", LIMIT_S)))
    inbox.get()
    if hasattr(worker, "sender"):  # rank 0 alone, where it gathers
        worker.connect_sync(1, RECEIVERS, [])
    WeightSender._pack = delayed(WeightSender._pack, rng, 0.002)
    worker._forward = delayed(worker._forward, rng, 0.01)
    sent, batch, problems = [], make_batch(cfg.model.path), []

    def send(version: int) -> None:
        time.sleep(rng.random() * 0.01)
        try:
            worker.send_weights(version)
            time.sleep(rng.random() * 0.01)
            worker.release(version)  # as the driver does when all replicas have them
        except Exception as e:
            problems.append(repr(e))

    for version in range(syncs):
        now = [
            (p.name, p.start, digest(t))
            for p, t in zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
        ]
        sent.append(now)
        thread = threading.Thread(target=send, args=(version,))
        thread.start()
        for sample in batch.samples:
            sample.versions[:] = version
        batch.expected_stamp = (0, version)
        if not cfg.weight_sync.overlap:
            thread.join()
        metrics = worker.update(
            batch
        )  # it has FSDP's collectives, and those of the gradients' norm
        thread.join()
        assert not problems and metrics["actor/sync_wait_s"] >= 0
    torch.save(sent, f"{out}/{rank}.pt")


def receive_all(
    index: int, plan: BucketPlan, addresses: list, syncs: int, got: list, errors: queue.Queue
) -> None:
    """A receiver, late at random too; keeps what it got of every version."""
    rng, receiver = (
        random.Random(100 + index),
        WeightReceiver(plan, index, torch.device("cpu"), "127.0.0.1", LIMIT_S),
    )
    try:
        receiver.connect(1, addresses, RECEIVERS)
        for version in range(syncs):
            time.sleep(rng.random() * 0.01)
            seen: dict = {}

            def load(tensors, seen=seen):
                time.sleep(rng.random() * 0.001)
                seen.update({name: tensor.clone() for name, tensor in tensors})

            receiver.receive(load, version)
            got.append(seen)
    except SyncError as e:
        errors.put(e)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sender", "syncs"),
    [("sharded", 200), ("gather", 5)],
    ids=["200 beside updates", "5 gathered by rank 0"],
)
def test_syncs_with_random_delays_on_every_rank(tmp_path, sender, syncs):
    path = tiny_qwen.build("qwen2", str(tmp_path / "model"), dtype="float32")
    overlap = sender == "sharded"
    cfg = config(path, actor__lr=1e-3, weight_sync__timeout_s=LIMIT_S, weight_sync__sender=sender)
    cfg.weight_sync.overlap = overlap
    context, port = mp.get_context("spawn"), free_port()
    outbox, inboxes = context.Queue(), [context.Queue() for _ in range(RANKS)]
    args = [(rank, cfg, port, inboxes[rank], outbox, str(tmp_path), syncs) for rank in range(RANKS)]
    ranks = [context.Process(target=run_rank, args=a, daemon=True) for a in args]
    for process in ranks:
        process.start()

    def gather() -> list:
        found = dict(outbox.get(timeout=120) for _ in range(RANKS))
        return [found[rank] for rank in range(RANKS)]

    plans = gather()
    pieces = [[WeightPiece(*piece) for piece in plan] for plan in plans]
    plan = BucketPlan.build(
        [*pieces_of_senders(pieces, "sharded" if overlap else "gather").values()], 40_000
    )
    assert len(plan.buckets) > 3
    for inbox in inboxes:
        inbox.put(plans)
    addresses = [address for address in gather() if address]
    assert len(addresses) == (RANKS if overlap else 1)
    for inbox in inboxes:
        inbox.put("connect")
    got, errors = [[] for _ in range(RECEIVERS)], queue.Queue()
    common = (plan, addresses, syncs)
    threads = [
        threading.Thread(target=receive_all, args=(i, *common, got[i], errors))
        for i in range(RECEIVERS)
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(240)
    for process in ranks:
        process.join(30)
    assert errors.empty(), errors.get()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    sent = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for version in range(syncs):
        expected = [row for rank in range(RANKS) for row in sent[rank][version]]
        for seen in (one[version] for one in got):
            rows = [
                (p.name, p.start, digest(seen[p.name][p.start : p.stop]))
                for own in pieces
                for p in own
            ]
            assert rows == expected, f"version {version} arrived changed"
    assert sent[0][0] != sent[0][-1]


def test_an_update_whose_weights_were_never_sent_ends_in_a_named_error(tmp_path):
    path = tiny_qwen.build("qwen2", str(tmp_path / "model"), dtype="float32")
    worker = start(
        config(path, trainer__step_timeout_s=2.0), port=free_port(), cls=WORKERS["actor"]
    )
    try:
        worker.open_sender([worker.weight_plan()], 1 << 20, "127.0.0.1", 2.0)
        with pytest.raises(SyncError, match=r"trainer rank 0: version 0 was not sent in 2 s"):
            worker.update(make_batch(path))
        assert worker.version == 0
    finally:
        torch.distributed.destroy_process_group()
