"""The load-balancing loss of experts: that of transformers' own forward, where config.json asks for
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from one_step_off.training.fsdp.fsdp_model import expert_load
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
    load = expert_load(output.router_logits, model.num_experts_per_tok, mask.float().flatten())
    torch.testing.assert_close(load.loss, output.aux_loss)
    assert load.largest > 1
    even = tuple(torch.zeros(8, 4) for _ in range(2))
    assert expert_load(even, 4, torch.ones(8)).loss == pytest.approx(4.0)
    assert expert_load(even, 4, torch.ones(8)).largest == 1


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
        assert ("actor/expert_load_max" in metrics) is balances
        end()
    assert metrics["actor/load_balancing_loss"] > 1.9
    balancing = balancing_gradient(path, batch)
    added = {name: gradients[False][name] + balancing[name] for name in gradients[False]}
    assert_gradients_equal(gradients[True], added, rtol=1e-5)
    assert abs(balancing["model.layers.0.mlp.gate.weight"]).max() > 1e-4
