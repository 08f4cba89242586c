"""What every role computes where samples share their first tokens is what it computes for each
alone."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
import transformers

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import SharingRule, prefixes_of, rows_of
from one_step_off.data.packing import AbsentSample
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import (
    MODELS,
    OBJECTIVES,
    SIZES,
    Recorder,
    RecordingCritic,
    assert_gradients_equal,
    config,
    end,
    make_batch,
    write_model,
)
from tests.unit.training.rank_helpers import join
from tests.unit.training.test_batch_slices import pickled_slices
from tests.unit.training.test_packed_roles import assert_same_arrays, assert_same_metrics

ALWAYS = SharingRule(1.0, 0.0, 0.0, least_saving=0.0, least_gain=0.0, row_tokens=60)
PACKINGS = ("auto", "on")


def grouped(path, seed):
    """Trees: of the samples of a prompt, two begin with it alone, others continue tokens of those.

    So there are tokens that the policy generated and that are trained for several samples, or for
    some of them, each with an advantage of its own.
    """
    batch = make_batch(path, prompts=4, n=5, seed=seed)
    for before, sample in itertools.pairwise(batch.samples):
        if sample.index not in (0, 3):
            common = min(len(sample.response_ids), len(before.response_ids)) - 1
            sample.response_ids[:common] = before.response_ids[:common]
    return batch


def worker_of(start_single, rule, role, cls, path, packing="auto", **changes):
    """A worker whose batches make several micro-batches, most of them with shared prefixes."""
    settings = {"actor__packing": packing, "actor__micro_batch_tokens": 60} | changes
    worker = start_single(config(path, **settings), role=role, cls=cls)
    assert worker.batch_share.sharing.row_tokens == 60
    worker.batch_share.sharing = rule
    return worker


def assert_alike_but_for_the_share(shared, plain):
    assert shared.pop("actor/shared_prefix_share") > 0.4
    assert_same_metrics(shared, plain)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_the_actor_trains_alike(model_folders, start_single, name, seed, packing):
    path = model_folders[name]
    objective = OBJECTIVES["sequences" if seed == 2 else "everything"]
    gradients = []
    metrics = []
    for rule in (ALWAYS, None):
        worker = worker_of(start_single, rule, "actor", Recorder, path, packing, **objective)
        metrics.append(worker.update(grouped(path, seed)))
        gradients.append(worker.gradients)
    assert_gradients_equal(*gradients)
    assert_alike_but_for_the_share(*metrics)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_reference_scores_alike(model_folders, start_single, packing):
    """Log-probs, and sums of squared probabilities."""
    path = model_folders["untied"]
    batch = grouped(path, 4)
    squares = []
    for rule in (ALWAYS, None):
        worker = worker_of(start_single, rule, "ref", PolicyWorker, path, packing)
        squares.append(worker.log_prob_and_squares(batch))
    assert_same_arrays(*squares)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_critic_trains_alike(model_folders, start_single, packing):
    path = model_folders["tied"]
    batch = grouped(path, 5)
    rng = np.random.default_rng(0)
    lengths = [len(s.response_ids) for s in batch.samples]
    batch.values = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    batch.returns = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    values = []
    gradients = []
    metrics = []
    for rule in (ALWAYS, None):
        worker = worker_of(start_single, rule, "critic", RecordingCritic, path, packing)
        values.append(worker.values(batch))
        metrics.append(worker.update(batch))
        gradients.append(worker.gradients)
    assert_same_arrays(*values)
    assert_gradients_equal(*gradients)
    assert metrics[0].pop("critic/shared_prefix_share") > 0.4
    assert_same_metrics(*metrics)


def test_the_batches_of_these_tests_have_trees_of_several_levels(model_folders):
    """Some row goes back from a long common part to a shorter one, and to a longer one again."""
    prefixes = prefixes_of(grouped(model_folders["untied"], 0).samples)
    rows = [prefixes[row, 1].tolist() for row in rows_of(prefixes)]
    triples = [triple for row in rows for triple in itertools.combinations(row, 3)]
    assert any(first > back > 0 and back < again for first, back, again in triples)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=1),
    "experts": transformers.Qwen3MoeConfig(**SIZES, num_key_value_heads=1, **EXPERTS),
    "window": transformers.MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=7),
}


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_train_alike(tmp_path, start_single, family, recomputes):
    """The load of experts included; with recomputed activations."""
    path = str(tmp_path / "model")
    write_model(FAMILIES[family], path)
    batch = grouped(path, 1)
    keys = {"actor__activation_checkpointing": recomputes, **OBJECTIVES["everything"]}
    gradients = []
    metrics = []
    for rule in (ALWAYS, None):
        worker = worker_of(start_single, rule, "actor", Recorder, path, "on", **keys)
        metrics.append(worker.update(batch))
        gradients.append(worker.gradients)
    assert_gradients_equal(*gradients)
    assert_alike_but_for_the_share(*metrics)


def test_adapters_train_alike(model_folders, start_single):
    path = model_folders["tied"]
    batch = grouped(path, 3)
    norms = []
    for rule in (ALWAYS, None):
        keys = {"model__lora_rank": 2, "model__lora_alpha": 4}
        worker = worker_of(start_single, rule, "actor", PolicyWorker, path, **keys)
        norms.append([worker.update(batch)["actor/grad_norm"] for _ in range(3)])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def run_rank(rank, world, path, folder):
    torch.set_num_threads(1)
    cfg = config(path, actor__micro_batch_tokens=60, **OBJECTIVES["everything"])
    worker = Recorder(cfg, "actor", rank, world, "cpu", total_steps=10)
    join(worker, "shared", folder)
    worker.batch_share.sharing = ALWAYS
    share = worker.share_of_batch()
    sent = pickle.loads(pickled_slices(grouped(path, 2), share, 4)[share.index])
    assert any(isinstance(sample, AbsentSample) for sample in sent.samples)
    metrics = worker.update(sent)
    torch.save((worker.gradients, metrics), f"{folder}/{rank}.pt")
    end()


def test_compilation_begins_with_a_plain_and_a_shared_row(model_folders, start_single, monkeypatch):
    """What is compiled at the start is not compiled here, but runs."""
    worker = worker_of(start_single, ALWAYS, "actor", PolicyWorker, model_folders["untied"])
    layouts = []
    lay_out = worker._lay_out
    monkeypatch.setattr(PolicyWorker, "_is_compiled", True)
    monkeypatch.setattr(
        worker,
        "_lay_out",
        lambda *args, **rows: layouts.append(lay_out(*args, **rows)) or layouts[-1],
    )
    worker._warm_up()
    plain, shared = layouts
    assert plain.common is None
    assert shared.common.tolist() == [0, 32]
    assert len(shared.tokens) == len(plain.tokens)
    assert shared.input_ids.size == plain.input_ids.size - 32


def test_two_ranks_with_a_slice_each_train_as_one_alone(model_folders, start_single, tmp_path):
    path = model_folders["untied"]
    run_ranks(run_rank, (2, path, str(tmp_path)), 2)
    worker = worker_of(start_single, None, "actor", Recorder, path, **OBJECTIVES["everything"])
    metrics = worker.update(grouped(path, 2))
    for rank in range(2):
        found, metrics_of_rank = torch.load(f"{tmp_path}/{rank}.pt", weights_only=False)
        assert_gradients_equal(found, worker.gradients)
        assert_alike_but_for_the_share(metrics_of_rank, metrics)


def test_a_row_in_which_a_sequence_sees_another_one_changes_the_log_probs(
    model_folders, start_single, monkeypatch
):
    """The comparisons above see keys that are wrong."""
    path = model_folders["tied"]
    batch = grouped(path, 6)
    worker = worker_of(start_single, ALWAYS, "ref", PolicyWorker, path)
    right = worker.log_prob(batch)
    collate = batching.collate

    def with_wrong_prefixes(*args):
        layout = collate(*args)
        if layout.common is not None:
            layout.common = np.maximum(layout.common - 1, 0)
        return layout

    monkeypatch.setattr(batching, "collate", with_wrong_prefixes)
    wrong = worker.log_prob(batch)
    differing = [np.abs(wrong[i] - right[i]).max() > 1e-3 for i in right]
    assert sum(differing) > len(right) / 2


def test_the_rule_leaves_tiny_batches_plain(model_folders, start_single):
    """So that small runs on CPUs repeat bit for bit."""
    path = model_folders["tied"]
    worker = start_single(config(path), cls=Recorder)
    assert worker.batch_share.sharing is not None
    assert "actor/shared_prefix_share" not in worker.update(grouped(path, 0))


@pytest.mark.parametrize(
    "changes",
    [{"actor__packing": "off"}, {"model__attn_implementation": "eager"}],
)
def test_what_is_not_shared(model_folders, start_single, changes):
    worker = start_single(config(model_folders["tied"], **changes))
    assert worker.batch_share.sharing is None


def test_models_whose_experts_are_balanced_by_a_loss_do_not_share(tmp_path, start_single):
    hf_config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=1, **EXPERTS, output_router_logits=True
    )
    write_model(hf_config, tmp_path)
    assert start_single(config(str(tmp_path))).batch_share.sharing is None


def test_a_padded_model_with_a_window_does_not_share(tmp_path, start_single):
    write_model(FAMILIES["window"], tmp_path)
    assert start_single(config(str(tmp_path))).batch_share.sharing is None
