"""The supervised update: the loss of transformers, on any number of ranks, packed or padded, by
both back ends."""

from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.data.samples import Batch, Sample
from one_step_off.training.fsdp.fsdp_workers import SupervisedWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import (
    VOCAB,
    assert_gradients_equal,
    config,
    end,
    hf_model,
    start,
    token_ids,
    whole,
)
from tests.unit.training.rank_helpers import join, leave, of_fsdp, of_megatron, without_times

IGNORED = -100
ROWS = 9


class Recording(SupervisedWorker):
    """Keeps whole gradients as they are before each optimizer step."""

    def _optimizer_step(self, stats):
        named: Any = self.model.named_parameters()
        self.gradients = {
            name: parameter.grad.full_tensor().numpy().copy()
            for name, parameter in named
            if parameter.grad is not None
        }
        return super()._optimizer_step(stats)


def rows(version=3):
    """Rows of many lengths, some with several answers."""
    rng = np.random.default_rng(0)
    samples = []
    for row in range(ROWS):
        length = int(rng.integers(1, 20))
        mask = rng.random(length) < 0.6
        mask[0] = True  # a row's response begins with its first answer
        samples.append(
            Sample(
                prompt_id=(0, row),
                index=0,
                prompt_ids=rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32),
                response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                log_probs=np.zeros(length, np.float32),
                loss_mask=mask,
                versions=np.full(length, version, np.int32),
            )
        )
    return Batch(version, samples, (0, version))


def supervised_cfg(path, **changes):
    """As `supervised_config` makes it: one optimizer step per batch; rollouts have another
    temperature."""
    sizes = {"data__train_batch_size": ROWS, "actor__ppo_mini_batch_size": ROWS}
    return config(path, **sizes, **changes)


def transformers_loss(path):
    """Loss and gradients by transformers' own loss on the rows, padded, with labels."""
    model = hf_model(path)
    samples = rows().samples
    width = max(sample.length for sample in samples)
    input_ids = torch.zeros(ROWS, width, dtype=torch.long)
    labels = torch.full((ROWS, width), IGNORED)
    attention = torch.zeros(ROWS, width, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids = token_ids(sample)
        trained = len(sample.prompt_ids) + np.flatnonzero(sample.loss_mask)
        input_ids[row, : len(ids)] = ids
        attention[row, : len(ids)] = 1
        labels[row, trained] = ids[trained]
    loss = model(input_ids=input_ids, attention_mask=attention, labels=labels, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
    return float(loss), gradients


def trained_tokens():
    return sum(int(sample.loss_mask.sum()) for sample in rows().samples)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"actor__micro_batch_tokens": 30},
        {"actor__packing": "on"},
        {"actor__packing": "on", "actor__micro_batch_tokens": 50},
        {"actor__log_prob_chunk": 4},
        {"algorithm__loss_agg": "sequence-mean", "algorithm__entropy_coef": 0.5},
    ],
    ids=["one_pass", "several_passes", "packed", "packed_passes", "chunks", "settings_of_rl"],
)
def test_loss_and_gradients_are_those_of_transformers(model_folders, changes):
    path = model_folders["tied"]
    expected, gradients = transformers_loss(path)
    worker = start(supervised_cfg(path, **changes), cls=Recording)
    try:
        before = worker.log_prob(rows())
        metrics = worker.update(rows())
        after = worker.log_prob(rows())
    finally:
        end()
    assert metrics["actor/loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["actor/tokens"] == trained_tokens()
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)
    assert mean_loss(before) == pytest.approx(expected, abs=1e-5), "at temperature 1"
    assert mean_loss(after) < expected
    assert worker.version == 1
    assert "actor/clip_frac" not in metrics


def mean_loss(log_probs):
    """Of the answers' tokens, by position -> log-probs of the responses."""
    samples = rows().samples
    chosen = [log_probs[i][sample.loss_mask] for i, sample in enumerate(samples)]
    return -float(np.concatenate(chosen).mean(dtype=np.float64))


def test_adapters_alone_are_trained_with_lora(model_folders):
    path = model_folders["tied"]
    expected, _ = transformers_loss(path)
    worker = start(supervised_cfg(path, model__lora_rank=4, actor__lr=1e-2), cls=Recording)
    try:
        metrics = worker.update(rows())
        after = worker.log_prob(rows())
    finally:
        end()
    assert metrics["actor/loss"] == pytest.approx(expected, abs=1e-5)
    assert all("lora_" in name for name in worker.gradients)
    assert mean_loss(after) < expected


def run_rank(rank, world, cases, out):
    """In a process of its own: each case, name -> (module of the worker, its class, config)."""
    import importlib

    torch.set_num_threads(1)
    for name, (module, cls, cfg) in cases.items():
        worker = getattr(importlib.import_module(module), cls)(
            cfg, "actor", rank, world, "cpu", total_steps=10
        )
        join(worker, name, out)
        metrics = worker.update(rows())
        log_probs = worker.log_prob(rows())
        worker.save_hf(f"{out}/{name}_hf")
        torch.save((metrics, log_probs), f"{out}/{name}_{rank}.pt")
        leave(of_megatron if "megatron" in module else of_fsdp)


def check_ranks(path, cases, out, world=2):
    """What ranks computed together, against one rank and transformers."""
    expected, _ = transformers_loss(path)
    worker = start(supervised_cfg(path), cls=Recording)
    try:
        metrics = without_times(worker.update(rows()))
        weights = whole(worker)
    finally:
        end()
    run_ranks(run_rank, (world, cases, str(out)), world)
    for name in cases:
        results = [
            torch.load(f"{out}/{name}_{rank}.pt", weights_only=False) for rank in range(world)
        ]
        for other_metrics, _ in results:
            assert other_metrics["actor/loss"] == pytest.approx(expected, abs=1e-5)
            for key, value in without_times(other_metrics).items():
                assert value == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
        log_probs = {}
        for _, share in results:
            log_probs |= share
        assert len(log_probs) == ROWS
        assert mean_loss(log_probs) < expected
        saved = hf_model(f"{out}/{name}_hf").state_dict()
        for key, value in weights.items():
            # AdamW makes the gradients' last bits larger: see FSDP's tests.
            assert np.abs(saved[key].numpy() - value).max() < 3e-6, key


def test_two_ranks_equal_one(model_folders, tmp_path):
    path = model_folders["tied"]
    module = "one_step_off.training.fsdp.fsdp_workers"
    cases = {
        "padded": (module, "SupervisedWorker", supervised_cfg(path)),
        "packed": (module, "SupervisedWorker", supervised_cfg(path, actor__packing="on")),
    }
    check_ranks(path, cases, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp2"),
        pytest.param({"actor__tensor_parallel_size": 2}, id="tp2", marks=pytest.mark.slow),
    ],
)
def test_megatron_equals_fsdp(megatron_models, tmp_path, layout):
    path = str(megatron_models / "qwen2")
    module = "one_step_off.training.megatron.megatron_workers"
    cfg = supervised_cfg(path, actor__backend="megatron", **layout)
    check_ranks(path, {"megatron": (module, "MegatronSupervisedWorker", cfg)}, tmp_path)
