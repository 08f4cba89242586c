"""Each rank receives only its share of a batch, and computes what it computed from the whole one,
bit for bit."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import SharingRule
from one_step_off.config.schema import Config
from one_step_off.data.packing import AbsentSample, BatchOutline, SampleSlice, token_ids_of
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.data.staleness import StalenessError, assert_staleness
from one_step_off.training import trainer_group
from one_step_off.training.trainer_group import WorkerGroup, put_slices
from one_step_off.training.worker_interface import BatchShare
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, make_batch
from tests.unit.training.rank_helpers import join, leave, of_fsdp, of_megatron, weights_of

PROMPTS_PER_MINI_BATCH = 3
KEYS = {"actor__lr": 1e-2, "actor__ppo_mini_batch_size": PROMPTS_PER_MINI_BATCH}


def pickled_slices(batch: Batch, share: BatchShare, prompts_per_mini_batch: int) -> list[bytes]:
    """What Ray would store of each share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.put", pickle.dumps)
        return put_slices(copy.copy(batch), share, prompts_per_mini_batch)


def run_of(worker: Any, batch: Batch, sliced: bool) -> dict[str, Any]:
    """Log-probs, metrics of two updates, and the weights after them."""
    share = worker.share_of_batch()

    def sent(prompts_per_mini_batch: int) -> Batch:
        if not sliced:
            return batch
        return pickle.loads(pickled_slices(batch, share, prompts_per_mini_batch)[share.index])

    worker.version = 3
    log_probs = worker.log_prob(sent(0))
    metrics = [worker.update(sent(PROMPTS_PER_MINI_BATCH)) for _ in range(2)]
    for figures in metrics:
        for name in [name for name in figures if name.endswith("_s")]:
            del figures[name]
    return {"log_probs": log_probs, "metrics": metrics, "weights": weights_of(worker)}


def run_rank(rank: int, world: int, workers: Any, cfg: Config, folder: Path) -> None:
    torch.set_num_threads(1)
    batch = make_batch(cfg.model.path)
    for name in ("whole", "sliced"):
        worker = workers()["actor"](cfg, "actor", rank, world, "cpu", total_steps=10)
        join(worker, name, folder)
        torch.save(run_of(worker, batch, name == "sliced"), f"{folder}/{name}_{rank}.pt")
        leave(workers)


def assert_same_results(workers: Any, cfg: Config, folder: Path) -> None:
    world = 2
    run_ranks(run_rank, (world, workers, cfg, folder), world)
    for rank in range(world):
        whole, sliced = (
            torch.load(f"{folder}/{name}_{rank}.pt", weights_only=False)
            for name in ("whole", "sliced")
        )
        assert whole["metrics"] == sliced["metrics"]
        assert whole["log_probs"].keys() == sliced["log_probs"].keys()
        for position, log_probs in whole["log_probs"].items():
            np.testing.assert_array_equal(log_probs, sliced["log_probs"][position])
        for a, b in zip(whole["weights"], sliced["weights"], strict=True):
            np.testing.assert_array_equal(a, b)


def test_fsdp_ranks_compute_the_same_from_their_slices(model_folders, tmp_path):
    cfg = config(model_folders["tied"], **KEYS)
    assert_same_results(of_fsdp, cfg, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, {"actor__tensor_parallel_size": 2, "actor__sequence_parallel": True}],
    ids=["dp2", "tp2"],
)
def test_megatron_ranks_compute_the_same_from_their_slices(tmp_path, layout):
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed (the extra megatron)"
    )
    from tests.unit.training.megatron_helpers import write_models

    path = str(write_models(tmp_path / "models") / "qwen2")
    cfg = config(path, **KEYS, **layout, actor__backend="megatron")
    assert_same_results(of_megatron, cfg, tmp_path)


def random_sample(rng: np.random.Generator, row: int, longest: int = 40) -> Sample:
    length = int(rng.integers(0, longest))
    return Sample(
        prompt_id=(1, row),
        index=0,
        prompt_ids=np.arange(rng.integers(1, longest), dtype=np.int32),
        response_ids=rng.integers(0, 9, length).astype(np.int32),
        log_probs=rng.normal(size=length).astype(np.float32),
        loss_mask=rng.random(length) < 0.7,
        versions=np.full(length, 4, np.int32),
        attempt=2,
        extra={"agent": {"turns": 1.0}},
    )


@given(seed=st.integers(0, 10**6), count=st.integers(0, 12), kept=st.sets(st.integers(0, 11)))
@settings(max_examples=60, deadline=None)
def test_absent_samples_have_the_lengths_and_counts_of_the_real_ones(seed, count, kept):
    rng = np.random.default_rng(seed)
    samples = [random_sample(rng, row) for row in range(count)]
    positions = sorted(position for position in kept if position < count)
    outline = BatchOutline.of(samples, (2, 4))
    sent = SampleSlice(samples, positions, outline, ("extra",))
    arrived = pickle.loads(pickle.dumps(sent))
    assert len(arrived) == count
    for position, (got, want) in enumerate(zip(arrived, samples, strict=True)):
        assert got.prompt_id == want.prompt_id
        assert got.length == want.length
        assert len(got.prompt_ids) == len(want.prompt_ids)
        assert got.loss_mask.sum() == want.loss_mask.sum()
        assert len(got.loss_mask) == len(want.loss_mask) == len(got.versions)
        if position in positions:
            np.testing.assert_array_equal(token_ids_of(got), token_ids_of(want))
            np.testing.assert_array_equal(got.loss_mask, want.loss_mask)
            np.testing.assert_array_equal(got.log_probs, want.log_probs)
        else:
            assert isinstance(got, AbsentSample)
            with pytest.raises(RuntimeError, match="its tokens went to another rank"):
                token_ids_of(got)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 9), st.sampled_from([1, 4]))
@settings(max_examples=80, deadline=None)
def test_the_driver_knows_which_share_a_sample_goes_to(lengths, shares, multiple):
    positions = list(range(len(lengths)))
    mini_batches = [positions[::2], positions[1::2]]
    found = batching.positions_of_shares(lengths, mini_batches, shares, multiple)
    expected: list[set[int]] = [set() for _ in range(shares)]
    for mini_batch in mini_batches:
        padded = batching.padded_lengths([lengths[i] for i in mini_batch], multiple)
        plan = batching.plan_micro_batches(padded, shares, 100, packed=True)
        for share, micro_batches in enumerate(plan):
            expected[share] |= {mini_batch[i] for indices in micro_batches for i in indices}
    assert [set(own) for own in found] == expected
    assert all(own == sorted(own) for own in found)


def test_slices_are_small_and_stored_once_for_all_roles_until_the_batch_changes(monkeypatch):
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, row, longest=4000) for row in range(64)]
    batch = Batch(0, samples, (2, 4))
    whole = len(pickle.dumps(trainer_group.PackedSamples(samples)))
    monkeypatch.setattr("ray.put", pickle.dumps)
    share = BatchShare(0, 8)
    slices = put_slices(batch, share, 0)
    assert len(slices) == 8
    assert max(map(len, slices)) < whole / 8 * 1.3
    # The critic's update has one mini-batch, and so the division of the log-probs.
    assert put_slices(batch, BatchShare(3, 8), 64) is slices
    assert put_slices(batch, BatchShare(0, 8, width_multiple=4), 0) is not slices
    assert put_slices(batch, share, 8) is not slices
    assert put_slices(batch, share, 0) is slices
    batch.advantages = [np.ones(len(s.response_ids), np.float32) for s in samples]
    changed = put_slices(batch, share, 0)
    assert changed is not slices
    arrived = pickle.loads(changed[0])
    for sample, advantage in zip(arrived.samples, arrived.advantages, strict=True):
        assert len(advantage) == len(sample.response_ids)
        assert advantage.all() != isinstance(sample, AbsentSample) or not len(advantage)


def test_columns_with_several_numbers_per_token_arrive_as_they_are():
    """As a teacher's likeliest tokens."""
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, row) for row in range(9)]
    batch = Batch(0, samples, (2, 4))
    shapes = [(len(sample.response_ids), 3) for sample in samples]
    batch.teacher_top_ids = [rng.integers(0, 1 << 18, s).astype(np.int32) for s in shapes]
    arrived = [pickle.loads(sent) for sent in pickled_slices(batch, BatchShare(0, 2), 0)]
    owned = 0
    for share in arrived:
        for i, sample in enumerate(share.samples):
            if not isinstance(sample, AbsentSample):
                owned += 1
                assert share.teacher_top_ids[i].dtype == np.int32
                np.testing.assert_array_equal(share.teacher_top_ids[i], batch.teacher_top_ids[i])
    assert owned == len(samples)


class RecordingRank:
    """A rank that keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.update = self.log_prob = self

    async def remote(self, batch: Any, *_: Any) -> dict:
        self.sent.append(batch)
        return {}


def test_ranks_of_one_share_get_the_same_slice(monkeypatch):
    monkeypatch.setattr("ray.put", pickle.dumps)
    rng = np.random.default_rng(1)
    batch = Batch(0, [random_sample(rng, row) for row in range(8)], (2, 4))
    ranks = [RecordingRank() for _ in range(4)]
    cfg = Config()
    group = WorkerGroup("actor", ranks, cfg)
    group.shares = [BatchShare(0, 2), BatchShare(0, 2), BatchShare(1, 2), BatchShare(1, 2)]
    asyncio.run(group.log_prob(batch))
    sent = [rank.sent[0] for rank in ranks]
    assert sent[0] is sent[1]
    assert sent[2] is sent[3]
    assert sent[0] != sent[2]


def test_a_stale_token_is_seen_by_the_ranks_of_its_share_and_no_others():
    rng = np.random.default_rng(1)
    batch = Batch(0, [random_sample(rng, row) for row in range(8)], (2, 4))
    stale = max(batch.samples, key=lambda sample: sample.length)
    stale.versions[:] = 3
    arrived = [pickle.loads(sent) for sent in pickled_slices(batch, BatchShare(0, 2), 0)]
    raised = []
    for share in arrived:
        try:
            assert_staleness(share)
        except StalenessError as error:
            raised.append(str(error))
    (message,) = raised
    assert f"prompt {stale.prompt_id}" in message


def samples_of(prompt: int, length: int, n: int) -> list[Sample]:
    """Of one prompt, all of one length."""
    ids = np.zeros(length, np.int32)
    numbers = np.zeros(length, np.float32)
    mask = np.ones(length, bool)
    return [Sample((0, prompt), index, ids, ids, numbers, mask, ids) for index in range(n)]


def test_images_travel_once_per_prompt_and_only_where_they_are_needed():
    samples = [*samples_of(0, 40, 1), *samples_of(1, 10, 4)]
    batch = Batch(0, samples, (0, 0), images={(0, 0): (b"a" * 100_000,), (0, 1): (b"b" * 100_000,)})
    slices = pickled_slices(batch, BatchShare(0, 2), 0)
    sent = [pickle.loads(data).images for data in slices]
    assert [set(images) for images in sent] == [{(0, 0)}, {(0, 1)}]
    assert all(100_000 < len(data) < 110_000 for data in slices)


def test_a_group_finds_the_images_of_its_samples():
    images = {(3, 0): (b"x",), (3, 1): ()}

    def find(prompt_id):
        return Prompt(prompt_id, np.zeros(1, np.int32), "", "", images=images[prompt_id])

    samples = [sample for prompt in range(2) for sample in samples_of(prompt, 4, 2)]
    for sample in samples:
        sample.prompt_id = (3, sample.prompt_id[1])
    assert trainer_group.images_of(samples, find) == {(3, 0): (b"x",)}


def test_prefixes_are_found_once_and_again_when_samples_are_taken_out(monkeypatch):
    """They travel with each slice, and divide the batch otherwise than without sharing."""
    monkeypatch.setattr("ray.put", pickle.dumps)
    rng = np.random.default_rng(0)
    rule = SharingRule(1.0, 0.0, 0.0, least_saving=0.0, least_gain=0.0, row_tokens=1000)
    batch = Batch(0, [sample for row in range(4) for sample in samples_of(row, 10, 3)], (0, 0))
    for sample in batch.samples:
        sample.response_ids = rng.integers(0, 99, 6).astype(np.int32)
    share = BatchShare(0, 2, sharing=rule)
    slices = put_slices(batch, share, 0)
    assert put_slices(batch, BatchShare(0, 2), 0) is not slices
    first = batch.prefixes
    batch.advantages = [np.ones(6, np.float32)] * 12
    for sent in map(pickle.loads, put_slices(batch, share, 0)):
        np.testing.assert_array_equal(sent.prefixes, first)
    assert batch.prefixes is first
    batch.drop([(0, 1)])
    put_slices(batch, share, 0)
    assert len(batch.prefixes) == 9
    batch.samples = batch.samples[:3]
    batch.advantages = None
    put_slices(batch, share, 0)
    assert sorted(batch.prefixes.tolist()) == [[0, 0], [1, 10], [2, 10]]
    assert pickle.loads(trainer_group.put_batch(batch)).prefixes is None
