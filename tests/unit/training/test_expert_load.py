"""The load of experts: counted as transformers' own routers choose; the load-balancing loss of
transformers' own forward, where config.json asks for it; and the balancing by biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from one_step_off.models.experts import ROUTER_BIAS, fused_experts, router_biases
from one_step_off.training.fsdp.experts import load_balancing_loss
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.models.families import CONFIGS
from tests.unit.training.fsdp_helpers import (
    assert_gradients_equal,
    config,
    end,
    hf_model,
    make_batch,
    start,
    token_ids,
    write_model,
)

COEFFICIENT = 0.5


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "ernie4_5_moe"])
def test_it_is_transformers_own_loss_and_leaves_padding_out(name):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    ids = torch.randint(1, 60, (3, 9))
    mask = torch.arange(9) < torch.tensor([9, 4, 6])[:, None]
    with torch.no_grad():
        output = model(ids, attention_mask=mask.long(), output_router_logits=True)
    top_k = model.num_experts_per_tok
    loss = load_balancing_loss(output.router_logits, top_k, mask.long().flatten())
    torch.testing.assert_close(loss, output.aux_loss)
    even = tuple(torch.zeros(8, 4) for _ in range(2))
    assert load_balancing_loss(even, 4, torch.ones(8)) == pytest.approx(4.0)


def balancing_gradient(path: str, batch: Any) -> dict[str, Any]:
    """Of the loss alone, by transformers' own forward on all samples."""
    model = hf_model(path)
    model.get_input_embeddings().padding_idx = None  # as in training
    sequences = [token_ids(sample) for sample in batch.samples]
    mask = pad_sequence([torch.ones(len(ids)) for ids in sequences], True)
    ids = pad_sequence(sequences, True)
    aux_loss = model(ids, attention_mask=mask.long(), output_router_logits=True).aux_loss
    (COEFFICIENT * aux_loss).backward()
    return {name: 0.0 if p.grad is None else p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_update_adds_its_gradient_only_where_the_models_config_says_so(tmp_path, recomputes):
    gradients = {}
    for balances in (False, True):
        hf_config = CONFIGS["qwen3_moe"]()
        hf_config.output_router_logits = balances
        hf_config.router_aux_loss_coef = COEFFICIENT
        path = str(tmp_path / str(balances))
        write_model(hf_config, path)
        batch = make_batch(path)
        worker = start(config(path, actor__activation_checkpointing=recomputes))
        metrics = worker.update(batch)
        gradients[balances] = worker.gradients
        assert ("actor/load_balancing_loss" in metrics) is balances
        end()
    assert metrics["actor/load_balancing_loss"] > 1.9
    balancing = balancing_gradient(path, batch)
    added = {name: gradients[False][name] + balancing[name] for name in gradients[False]}
    assert_gradients_equal(gradients[True], added, rtol=1e-5)
    assert abs(balancing["model.layers.0.mlp.gate.weight"]).max() > 1e-4


def counts_of(path: str, batch: Any) -> torch.Tensor:
    """Tokens of each expert [layers, experts], by transformers' own model, sample by sample."""
    model = hf_model(path)
    experts = list(fused_experts(model).values())
    counts = torch.zeros(len(experts), experts[0].num_experts)

    def count(module: Any, inputs: Any) -> None:
        layer = experts.index(module)
        counts[layer] += torch.bincount(inputs[1].flatten(), minlength=counts.shape[1])

    for module in experts:
        module.register_forward_pre_hook(count)
    with torch.no_grad():
        for sample in batch.samples:
            model(token_ids(sample)[None])
    return counts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"actor__activation_checkpointing": True},
        {"actor__packing": "on"},
        {"actor__micro_batch_tokens": 40},
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_the_load_is_that_of_transformers_routers_without_padding(tmp_path, name, settings):
    path = str(tmp_path / "model")
    write_model(CONFIGS[name](), path)
    batch = make_batch(path)
    counts = counts_of(path, batch)
    worker = start(config(path, **settings))
    metrics = worker.update(batch)
    load = counts / counts.mean(1, keepdim=True)
    assert metrics["actor/expert_load_max"] == pytest.approx(load.max().item())
    assert metrics["actor/expert_load_min"] == pytest.approx(load.min().item())
    assert metrics["actor/unused_experts"] == (counts == 0).sum()
    again = worker.update(make_batch(path, seed=1))
    assert again["actor/expert_load_max"] != metrics["actor/expert_load_max"], "counted anew"
    end()


def test_a_dense_model_has_no_load(tmp_path):
    path = str(tmp_path / "model")
    write_model(CONFIGS["qwen3"](), path)
    worker = start(config(path))
    assert not [name for name in worker.update(make_batch(path)) if "expert" in name]
    end()


@pytest.mark.parametrize("rate", [0.0, 0.125])
def test_biases_move_by_the_rate_towards_an_even_load(tmp_path, rate):
    """arXiv:2408.15664, algorithm 1; the weights then choose other experts, so one step is
    compared."""
    path = str(tmp_path / "model")
    write_model(CONFIGS["glm4_moe"](), path)
    model = hf_model(path)
    for bias in router_biases(model).values():
        bias.copy_(torch.tensor([0.2, -0.1, 0.0, 0.1]))
    model.save_pretrained(path)
    batch = make_batch(path)
    counts = counts_of(path, batch)
    worker = start(config(path, actor__router_bias_update_rate=rate), cls=PolicyWorker)
    before = dict(zip(worker.weight_plan(), map(torch.clone, worker.weight_tensors()), strict=True))
    worker.update(batch)
    after = dict(zip(worker.weight_plan(), worker.weight_tensors(), strict=True))
    [bias] = [piece for piece in before if ROUTER_BIAS in piece.name]
    assert bias.dtype == "float32"
    moved = rate * torch.sign(counts.mean(1, keepdim=True) - counts)
    torch.testing.assert_close(after[bias], before[bias] + moved[0], atol=1e-7, rtol=0)
    assert bool(moved.any()) is (rate > 0)
    end()


def test_a_skipped_update_moves_no_bias(tmp_path):
    path = str(tmp_path / "model")
    write_model(CONFIGS["glm4_moe"](), path)
    settings = {"actor__router_bias_update_rate": 0.1, "actor__max_grad_norm_skip": 1e-9}
    worker = start(config(path, **settings))
    worker.update(make_batch(path))
    biases = router_biases(worker.model).values()
    assert biases
    assert not any(bias.any() for bias in biases)
    end()
