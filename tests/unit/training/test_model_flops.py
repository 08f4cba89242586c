"""The FLOPs of `monitoring/flops.py` against torch's own counter, on real workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from one_step_off.data.samples import Batch, Sample
from one_step_off.data.token_work import pass_work
from one_step_off.models.adapted_layers import adapted_layers
from one_step_off.models.hf_model import empty_model
from one_step_off.monitoring.flops import Meter, shape_of
from one_step_off.training.fsdp.fsdp_workers import CriticWorker, PolicyWorker, SupervisedWorker
from tests.unit.training.fsdp_helpers import config

WORDS = 401
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MODELS = {
    "untied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "tied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "grouped queries": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32}),
    "fused": ("phi3", {"num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": 1}),
}
PROMPT, RESPONSE = 30, 20
AGREES = 0.02


def saved(folder, name: str, kind=transformers.AutoModelForCausalLM) -> str:
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    changes = {"num_labels": 1} if kind is not transformers.AutoModelForCausalLM else {}
    own = transformers.AutoConfig.for_model(model_type, **SIZES, **settings, **changes)
    kind.from_config(own).save_pretrained(folder)
    return str(folder)


def run_config(path: str, **changes):
    """Eager attention: torch counts no other kernel of CPUs. Of equal lengths, no row is padded."""
    cfg = config(path, **changes)
    cfg.model.attn_implementation = "eager"
    cfg.actor.micro_batch_tokens = 4 * (PROMPT + RESPONSE)
    return cfg


def make_batch() -> Batch:
    """Four samples of which half of each response is a tool's."""
    rng = np.random.default_rng(0)
    samples = []
    for row in range(4):
        is_generated = np.arange(RESPONSE) % 2 == 0
        samples.append(
            Sample(
                (0, row),
                0,
                rng.integers(3, WORDS, PROMPT).astype(np.int32),
                rng.integers(3, WORDS, RESPONSE).astype(np.int32),
                np.where(is_generated, -5.0, 0.0).astype(np.float32),
                is_generated,
                np.where(is_generated, 0, -1).astype(np.int32),
            )
        )
    batch = Batch(0, samples, (0, 0))
    batch.advantages = [np.where(s.loss_mask, 1.0, 0.0).astype(np.float32) for s in samples]
    return batch


def counted(call) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def metered(cfg, shape, batch: Batch) -> float:
    metrics = Meter(cfg, shape).step(batch, 1.0, 1.0, 1.0)
    return metrics["flops_per_s/trainer"]


@pytest.mark.parametrize("name", MODELS)
def test_the_actors_update(start_single, tmp_path, name):
    cfg = run_config(saved(tmp_path, name))
    worker = start_single(cfg, role="actor", cls=PolicyWorker)
    measured = counted(lambda: worker.update(make_batch()))
    shape = shape_of(empty_model(cfg, "actor", None, None))
    assert metered(cfg, shape, make_batch()) == pytest.approx(measured, rel=AGREES)


def test_what_is_recomputed_does_not_count(start_single, tmp_path):
    """Model FLOPs: the same with and without activation checkpointing and chunks of the head."""
    path = saved(tmp_path, "untied")
    flops = {}
    for recomputes in (False, True):
        cfg = run_config(path, actor__activation_checkpointing=recomputes)
        cfg.actor.log_prob_chunk = 8 if recomputes else 4096
        worker = start_single(cfg, role="actor", cls=PolicyWorker)
        flops[recomputes] = counted(lambda worker=worker: worker.update(make_batch()))
    shape = shape_of(empty_model(cfg, "actor", None, None))
    assert metered(cfg, shape, make_batch()) == pytest.approx(flops[False], rel=AGREES)
    assert flops[True] > 1.2 * flops[False]


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_adapters(start_single, tmp_path, targets):
    cfg = run_config(saved(tmp_path, "grouped queries"), model__lora_rank=8)
    cfg.model.lora_target_modules = targets
    worker = start_single(cfg, role="actor", cls=PolicyWorker)
    measured = counted(lambda: worker.update(make_batch()))
    model = empty_model(cfg, "actor", None, None)
    shape = shape_of(model, 8, tuple(adapted_layers(model, targets)))
    assert metered(cfg, shape, make_batch()) == pytest.approx(measured, rel=AGREES)


def test_a_forward_pass_of_the_reference(start_single, tmp_path):
    cfg = run_config(saved(tmp_path, "tied"))
    worker = start_single(cfg, role="ref", cls=PolicyWorker)
    measured = counted(lambda: worker.log_prob(make_batch()))
    shape = shape_of(empty_model(cfg, "ref", None, None))
    work = pass_work([PROMPT + RESPONSE] * 4, 4 * RESPONSE)
    assert shape.forward_flops(work) == pytest.approx(measured, rel=AGREES)


def test_the_critic(start_single, tmp_path):
    path = saved(tmp_path, "untied", transformers.AutoModelForSequenceClassification)
    cfg = run_config(path)
    cfg.critic.path = path
    batch = make_batch()
    batch.values = [np.zeros(RESPONSE, np.float32) for _ in batch.samples]
    batch.returns = [np.ones(RESPONSE, np.float32) for _ in batch.samples]
    worker = start_single(cfg, role="critic", cls=CriticWorker)
    shape = shape_of(empty_model(cfg, "critic", None, None))
    work = pass_work([PROMPT + RESPONSE] * 4, 4 * RESPONSE)
    measured = counted(lambda: worker.values(batch))
    assert shape.forward_flops(work) == pytest.approx(measured, rel=AGREES)
    measured = counted(lambda: worker.update(batch))
    assert shape.train_flops(work) == pytest.approx(measured, rel=AGREES)


def test_supervised_steps(start_single, tmp_path):
    cfg = run_config(saved(tmp_path, "tied"))
    worker = start_single(cfg, role="actor", cls=SupervisedWorker)
    measured = counted(lambda: worker.update(make_batch()))
    shape = shape_of(empty_model(cfg, "actor", None, None))
    metrics = Meter(cfg, shape).training_step(make_batch(), 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == pytest.approx(measured, rel=AGREES)


def test_experts_count_as_far_as_a_token_passes_them():
    """By transformers' own model: each token goes to 2 of 8 experts."""
    own = transformers.AutoConfig.for_model(
        "qwen3_moe",
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        attn_implementation="eager",
    )
    model = transformers.AutoModelForCausalLM.from_config(own)
    model.set_experts_implementation("eager")
    ids = torch.arange(3, 53)[None]
    measured = counted(lambda: model(ids).logits.sum().backward())
    assert shape_of(model).train_flops(pass_work([50])) == pytest.approx(measured, rel=AGREES)


def test_layers_with_a_state_are_not_counted():
    own = transformers.Qwen2Config(**SIZES, num_key_value_heads=4)
    model = transformers.AutoModelForCausalLM.from_config(own)
    assert shape_of(model) is not None
    model.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    assert shape_of(model) is None


@pytest.mark.parametrize("name", ["qwen2", "moe", "mixed"])
def test_megatrons_update(megatron_models, start_single, name):
    """Its attention on CPUs is a kernel that torch's counter does not know."""
    from one_step_off.training.megatron.megatron_workers import WORKERS
    from tests.unit.training.megatron_helpers import end

    cfg = run_config(str(megatron_models / name), actor__backend="megatron")
    cfg.actor.ppo_mini_batch_size = 4
    worker = start_single(cfg, role="actor", cls=WORKERS["actor"])
    batch = make_batch()
    for sample in batch.samples:
        sample.prompt_ids %= 67
        sample.response_ids %= 67
    measured = counted(lambda: worker.update(batch))
    end()
    shape = shape_of(empty_model(cfg, "actor", None, None))
    without_attention = replace(shape, layers=0)
    assert metered(cfg, without_attention, batch) == pytest.approx(measured, rel=AGREES)
