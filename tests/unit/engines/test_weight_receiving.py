"""Weights into the reference engine: real senders over gloo, the model's bits afterwards."""

from __future__ import annotations

import asyncio
import time
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from one_step_off.cluster.errors import SyncError
from one_step_off.engines.transformers.engine import TransformersEngine
from one_step_off.engines.transformers.weight_receiving import WholeModelLayout
from one_step_off.models.stored_weights import StoredWeights
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.routes import ShardsOfReceivers
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.shard_blocks import plain_shards, shards_from_plain
from tests.conftest import tiny_config
from tests.unit.engines.running_engine import VERSION, asks, context, plain_log_probs, run, running
from tests.unit.weight_sync.weight_stream import (
    CPU,
    HOST,
    Weights,
    assert_no_errors,
    row_pieces,
    run_together,
)

BUCKET_BYTES = 200_000
MODELS = [("qwen2", True), ("qwen2", False), ("qwen3_moe", False)]


@pytest.fixture
def config(models, tmp_path):
    """config(kind, tied): of a run with such a model."""
    return lambda kind="qwen2", tied=True: tiny_config(models(kind, tied), str(tmp_path))


def stored_weights(folder: str, without: tuple[str, ...] = ()) -> Weights:
    """The tensors of a checkpoint, by name."""
    stored = StoredWeights.find(folder)
    assert stored is not None
    return {name: stored.read_whole(name) for name in stored.file_of if name not in without}


class Trainers:
    """Ranks that send to one engine."""

    def __init__(self, weights: Weights, ranks: int = 2, timeout_s: float = 20.0) -> None:
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.pieces = row_pieces(self.shapes, ranks)
        self.timeout_s = timeout_s
        plan = BucketPlan.build(self.pieces, BUCKET_BYTES)
        assert len(plan.buckets) > 1
        self.senders = [WeightSender(plan, rank, CPU, HOST, timeout_s) for rank in range(ranks)]
        for sender in self.senders:
            sender.full_every = 20  # deltas, where few weights have changed

    async def connect(self, engine: TransformersEngine) -> None:
        shapes = {name: ["float32", list(shape)] for name, shape in self.shapes.items()}
        (answer,) = await engine.call_workers("learn_shards", shapes, False)
        assert answer["reason"] == ""
        kept = ShardsOfReceivers.by_kind([shards_from_plain(answer["kept"])])
        info = {
            "epoch": 1,
            "addresses": [sender.address for sender in self.senders],
            "receivers": 1,
            "same_device": [[] for _ in self.senders],
            "bucket_bytes": BUCKET_BYTES,
            "first_receiver": 0,
            "host": HOST,
            "timeout_s": self.timeout_s,
            "pieces": [[astuple(piece) for piece in sent] for sent in self.pieces],
            "kept": {
                "blocks": [plain_shards(blocks) for blocks in kept.blocks],
                "kind_of_receiver": list(kept.kind_of_receiver),
            },
        }
        jobs = [lambda s=sender: s.connect(1, 1, (), kept) for sender in self.senders]
        sent = asyncio.to_thread(run_together, jobs)
        results, _ = await asyncio.gather(sent, engine.call_workers("connect_sync", info))
        assert_no_errors(results)

    async def sync(
        self, engine: TransformersEngine, weights: Weights, version: int, sharded_only: bool
    ) -> dict[str, Any]:
        """One sync as the replica does it; returns the worker's report."""
        await engine.pause(wait=False, clear_cache=True)
        jobs = []
        for rank, sender in enumerate(self.senders):
            rows = self.rows(weights, rank)
            jobs.append(lambda s=sender, r=rows: s.send(r, version, sharded_only))
        sent = asyncio.to_thread(run_together, jobs)
        received = engine.call_workers("sync_weights", version, sharded_only)
        results, (report,) = await asyncio.gather(sent, received)
        assert_no_errors(results)
        await engine.resume((VERSION[0], version))
        return report

    def rows(self, weights: Weights, rank: int) -> Any:
        for piece in self.pieces[rank]:
            tensor = weights[piece.name]
            yield tensor[piece.start : piece.stop] if piece.shape else tensor


async def assert_holds(engine: TransformersEngine, folder: str) -> None:
    """The engine's model is that of a checkpoint, bit by bit, and it computes with it."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(engine.thread.model.named_parameters())
    assert parameters.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    ids = context(30)
    scores = plain_log_probs(expected, ids[:1], ids[1:])
    np.testing.assert_allclose(await engine.score(ids), scores, atol=1e-5)


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_weights_arrive_bit_by_bit_whole_and_straight_into_the_parameters(
    models, config, kind, tied
):
    async def main():
        folders = [models(kind, tied, seed) for seed in (1, 2, 3)]
        weights = list(map(stored_weights, folders))
        async with running(config(kind, tied)) as engine:
            trainers = Trainers(weights[0])
            await trainers.connect(engine)
            addresses = [p.data_ptr() for p in engine.thread.model.parameters()]
            report = await trainers.sync(engine, weights[0], 6, sharded_only=False)
            assert (report["in_place"], report["layout_proved"]) == (0.0, 1.0)
            await assert_holds(engine, folders[0])
            report = await trainers.sync(engine, weights[1], 7, sharded_only=True)
            assert (report["in_place"], report["layout_proved"]) == (1.0, 1.0)
            await assert_holds(engine, folders[1])
            generated = await engine.generate(asks())
            assert set(generated.versions.tolist()) == {7}
            few_changed = {name: tensor.clone() for name, tensor in weights[1].items()}
            few_changed["model.norm.weight"] *= 1.5
            report = await trainers.sync(engine, few_changed, 8, sharded_only=True)
            assert report["bytes"] < 0.1 * sum(t.nbytes for t in few_changed.values())
            norm = engine.thread.model.model.norm.weight
            assert torch.equal(norm, few_changed["model.norm.weight"])
            assert addresses == [p.data_ptr() for p in engine.thread.model.parameters()]

    run(main)


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_the_models_memory_has_the_checkpoints_names_and_shapes(models, kind, tied):
    """Of a mixture of experts too, whose experts transformers keeps as one tensor per layer."""
    folder = models(kind, tied)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    views = WholeModelLayout(model).views
    weights = stored_weights(folder)
    assert views.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(views[name], tensor), name
    other = stored_weights(models(kind, tied, 1))
    for name, tensor in other.items():
        views[name].copy_(tensor)
    expected = transformers.AutoModelForCausalLM.from_pretrained(models(kind, tied, 1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(expected.named_parameters())[name]), name


def test_a_parameter_that_is_not_sent_is_named(models, config):
    async def main():
        weights = stored_weights(models(), without=("model.norm.weight",))
        async with running(config()) as engine:
            trainers = Trainers(weights)
            await trainers.connect(engine)
            missing = r"1 parameters were not loaded, such as \['model.norm.weight'\]"
            with pytest.raises(SyncError, match=missing):
                await trainers.sync(engine, weights, 6, sharded_only=False)
            await assert_stays_paused(engine)

    run(main)


async def assert_stays_paused(engine: TransformersEngine) -> None:
    """It answers, and generates nothing."""
    request = asyncio.create_task(engine.generate(asks()))
    await engine.heartbeat()
    await asyncio.sleep(0.05)
    assert not request.done()
    assert not engine.errored
    request.cancel()


def test_tensors_that_the_model_has_not_are_refused(models, config):
    async def main():
        async with running(config()) as engine:
            for shapes, problem in (
                ({"model.other": ["float32", [3]]}, "no tensor model.other"),
                ({"model.norm.weight": ["float32", [3]]}, r"the shape \(256,\), and .* \(3,\)"),
            ):
                with pytest.raises(SyncError, match=problem):
                    await engine.call_workers("learn_shards", shapes, False)

    run(main)


def test_an_aborted_sync_ends_and_the_engine_stays_paused(models, config):
    async def main():
        weights = stored_weights(models())
        async with running(config()) as engine:
            trainers = Trainers(weights)
            await trainers.connect(engine)
            await engine.pause(wait=False, clear_cache=True)
            received = asyncio.create_task(engine.call_workers("sync_weights", 6, False))
            begin = time.perf_counter()
            await asyncio.sleep(0.1)
            assert time.perf_counter() - begin < 5, "the event loop answers meanwhile"
            await asyncio.to_thread(trainers.senders[0].abort, 1, "rank 1 died")
            with pytest.raises(SyncError, match="rank 1 died"):
                await received
            await assert_stays_paused(engine)

    run(main)
