"""FLOPs by hand, and what is made of them."""

from __future__ import annotations

import types

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample, generated_tokens
from one_step_off.monitoring.flops import Meter, ModelShape, peak_flops, shape_of
from tests.unit.data.episode_helpers import cut

SHAPE = ModelShape(matmul_params=1000, layers=2, attention_width=8)


def sample(row: int, index: int, prompt: int, response: int) -> Sample:
    z = np.zeros(response)
    return Sample((0, row), index, np.arange(prompt), z, z, z > -1, z.astype(int), reward=0.0)


def test_palm_formula_by_hand():
    # One sequence of 10 tokens: 6 * 1000 * 10 + 12 * 2 * 8 * 10 * 10
    assert 3 * SHAPE.forward_flops([10]) == 60_000 + 19_200
    assert SHAPE.forward_flops([10, 20]) == SHAPE.forward_flops([10]) + SHAPE.forward_flops([20])


def test_generation_by_hand():
    # The prompt of 3 once, then two samples of 2 tokens that see 3 and 4 tokens each: 4 * 2 * 8 =
    # 64 per token seen.
    prompt = 2 * 1000 * 3 + 64 * 9
    token_by_token = 2 * (2 * 1000 * 2 + 64 * (3 + 4))
    assert SHAPE.generate_flops([3], [3, 3], [2, 2]) == prompt + token_by_token
    assert SHAPE.generate_flops([3], [3], [0]) == prompt


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 2060", None),
        ("", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert peak_flops(name) == peak


def hf_config(**keys: object) -> types.SimpleNamespace:
    config = types.SimpleNamespace(
        **{
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_size": 8,
            "vocab_size": 10,
            **keys,
        }
    )
    config.get_text_config = lambda: config
    return config


def test_shapes():
    assert shape_of(hf_config(tie_word_embeddings=True), 500) == ModelShape(500, 2, 8)
    assert shape_of(hf_config(head_dim=5), 500) == ModelShape(420, 2, 20), (
        "an untied embedding is only looked up"
    )
    assert shape_of(hf_config(num_experts=8), 500) is None
    assert shape_of(hf_config(hidden_size=None), 500) is None


def batch_of(**extra: object) -> Batch:
    return Batch(0, [sample(0, 0, 3, 2), sample(0, 1, 3, 4)], (0, 0), **extra)


def step(meter: Meter, batch: Batch, *times: float, **named: float) -> dict[str, float | None]:
    """As the tracker asks for it."""
    return meter.step(batch, generated_tokens(batch.samples)[0], *times, **named)


def test_rates_and_mfu_of_both_groups():
    cfg = Config()
    cfg.placement.pools["actor"] = [2]
    meter = Meter(cfg, SHAPE, device_name="NVIDIA H100 80GB HBM3")
    metrics = step(meter, batch_of(), generate_s=0.5, update_s=2.0, step_s=4.0)
    assert metrics["tokens_per_s/rollout"] == 6 / 0.5
    assert metrics["tokens_per_s/trainer"] == 12 / 2.0
    assert metrics["flops_per_s/trainer"] == 3 * SHAPE.forward_flops([5, 7]) / 2.0
    assert metrics["mfu/trainer"] == pytest.approx(metrics["flops_per_s/trainer"] / (2 * 989e12))
    assert metrics["mfu/trainer_of_step"] == pytest.approx(metrics["mfu/trainer"] / 2)
    assert metrics["mfu/rollout"] == pytest.approx(
        SHAPE.generate_flops([3], [3, 3], [2, 4]) / 0.5 / 989e12
    )


def test_the_output_of_tools_is_read_and_not_generated():
    batch = batch_of()
    batch.samples[1].versions[1:3] = -1
    metrics = step(Meter(Config(), SHAPE), batch, generate_s=0.5, update_s=2.0, step_s=4.0)
    assert metrics["tokens_per_s/rollout"] == 4 / 0.5
    assert metrics["tokens_per_s/trainer"] == 12 / 2.0
    assert metrics["flops_per_s/rollout"] == SHAPE.generate_flops([3], [3, 5], [2, 2]) / 0.5


def test_epochs_count_and_steps_in_which_the_critic_warms_up_alone_do_not():
    cfg = Config()
    cfg.actor.ppo_epochs = 2
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == 6 * SHAPE.forward_flops([5, 7])
    assert metrics["tokens_per_s/trainer"] == 24
    cfg.trainer.critic_warmup = 1
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == 0 == metrics["tokens_per_s/trainer"]
    assert metrics["flops_per_s/rollout"] > 0


def test_weights_that_adapters_leave_frozen_have_no_gradients_to_compute():
    cfg = Config()
    cfg.model.lora_rank = 8
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == 2 * SHAPE.forward_flops([5, 7])


def test_unknown_hardware_shape_or_time_is_none_and_not_a_guess():
    metrics = step(Meter(Config(), SHAPE), batch_of(), 0.0, 1.0, 1.0)
    assert metrics["mfu/trainer"] is None
    assert metrics["flops_per_s/trainer"] > 0
    assert metrics["tokens_per_s/rollout"] is None
    assert set(step(Meter(Config(), None), batch_of(), 1.0, 1.0, 1.0)) == {
        "tokens_per_s/rollout",
        "tokens_per_s/trainer",
    }
    fp32 = Config()
    fp32.model.dtype = "float32"
    assert step(Meter(fp32, SHAPE, "NVIDIA H100"), batch_of(), 1.0, 1.0, 1.0)["mfu/rollout"] is None


def test_each_context_of_an_episode_is_read():
    whole = sample(0, 0, 3, 6)
    first, second = cut(whole, [2])
    batch = Batch(0, [first, second, sample(0, 1, 3, 4)], (0, 0))
    metrics = step(Meter(Config(), SHAPE), batch, generate_s=0.5, update_s=2.0, step_s=4.0)
    # The two episodes share a prompt of 3 tokens; the second segment has a context of 5.
    expected = SHAPE.generate_flops([3, 5], [3, 5, 3], [2, 4, 4]) / 0.5
    assert metrics["flops_per_s/rollout"] == expected
