"""FLOPs by hand, and what is made of them."""

from __future__ import annotations

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.data.token_work import generation_work, pass_work
from one_step_off.monitoring.flops import Meter, ModelShape, peak_flops
from one_step_off.rollout.dynamic_sampling import notes_of_replaced
from tests.unit.data.episode_helpers import cut


class NoVisits:
    """A stream of prompts that takes no notes."""

    def visits(self, samples: list[Sample]) -> list:
        return []


SHAPE = ModelShape(matmul_params=1000, layers=2, attention_width=8)


def sample(row: int, index: int, prompt: int, response: int) -> Sample:
    z = np.zeros(response)
    return Sample((0, row), index, np.arange(prompt), z, z, z > -1, z.astype(int), reward=0.0)


def forward(lengths: list[int], head_tokens: float | None = None) -> float:
    return SHAPE.forward_flops(pass_work(lengths, head_tokens))


def generation(samples: list[Sample]) -> float:
    return SHAPE.forward_flops(generation_work(samples))


def test_palm_formula_by_hand():
    # One sequence of 10 tokens: 6 * 1000 * 10 + 12 * 2 * 8 * 10 * 10
    assert SHAPE.train_flops(pass_work([10])) == 60_000 + 19_200
    assert forward([10, 20]) == forward([10]) + forward([20])


def test_the_head_counts_where_it_is_computed():
    shape = ModelShape(matmul_params=1000, layers=2, attention_width=8, head_params=400)
    whole = shape.forward_flops(pass_work([10]))
    assert whole == SHAPE.forward_flops(pass_work([10]))
    assert shape.forward_flops(pass_work([10], 3)) == whole - 2 * 400 * 7


def test_generation_by_hand():
    # The prompt of 3 once, then two samples of 2 tokens that see 3 and 4 tokens each: 4 * 2 * 8 =
    # 64 per token seen.
    prompt = 2 * 1000 * 3 + 64 * 9
    token_by_token = 2 * (2 * 1000 * 2 + 64 * (3 + 4))
    assert generation([sample(0, 0, 3, 2), sample(0, 1, 3, 2)]) == prompt + token_by_token
    assert generation([sample(0, 0, 3, 0)]) == prompt


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


def batch_of(**extra: object) -> Batch:
    return Batch(0, [sample(0, 0, 3, 2), sample(0, 1, 3, 4)], (0, 0), **extra)


def step(meter: Meter, batch: Batch, *times: float, **named: float) -> dict[str, float | None]:
    """As the tracker asks for it."""
    return meter.step(batch, *times, **named)


def test_rates_and_mfu_of_both_groups():
    cfg = Config()
    cfg.placement.pools["actor"] = [2]
    meter = Meter(cfg, SHAPE, device_name="NVIDIA H100 80GB HBM3")
    metrics = step(meter, batch_of(), generate_s=0.5, update_s=2.0, step_s=4.0)
    assert metrics["tokens_per_s/rollout"] == 6 / 0.5
    assert metrics["tokens_per_s/trainer"] == 12 / 2.0
    assert metrics["flops_per_s/trainer"] == 3 * forward([5, 7]) / 2.0
    assert metrics["mfu/trainer"] == pytest.approx(metrics["flops_per_s/trainer"] / (2 * 989e12))
    assert metrics["mfu/trainer_of_step"] == pytest.approx(metrics["mfu/trainer"] / 2)
    assert metrics["mfu/rollout"] == pytest.approx(generation(batch_of().samples) / 0.5 / 989e12)


def test_what_prefixes_share_is_computed_once():
    """Tokens count where they are computed, pairs and tokens/s for each sample."""
    meter = Meter(Config(), SHAPE, device_name="NVIDIA H100 80GB HBM3")
    plain = step(meter, batch_of(), generate_s=0.5, update_s=2.0, step_s=4.0)
    shared = step(meter, batch_of(), generate_s=0.5, update_s=2.0, step_s=4.0, shared=0.25)
    layer_params = SHAPE.matmul_params - SHAPE.head_params
    saved = 3 * 2 * layer_params * 12 * 0.25 / 2.0
    found = plain["flops_per_s/trainer"] - shared["flops_per_s/trainer"]
    assert found == pytest.approx(saved)
    assert shared["tokens_per_s/trainer"] == plain["tokens_per_s/trainer"]


def test_the_output_of_tools_is_read_and_not_generated():
    shape = ModelShape(matmul_params=1000, layers=2, attention_width=8, head_params=400)
    batch = batch_of()
    batch.samples[1].versions[1:3] = -1
    batch.samples[1].loss_mask[1:3] = False
    metrics = step(Meter(Config(), shape), batch, generate_s=0.5, update_s=2.0, step_s=4.0)
    assert metrics["tokens_per_s/rollout"] == 4 / 0.5
    assert metrics["tokens_per_s/trainer"] == 12 / 2.0
    # All of 3 + 2 + 4 tokens pass the layers, and 4 were generated.
    pairs = 3 * 3 + (3 + 4) + (3 + 4 + 5 + 6)
    assert metrics["flops_per_s/rollout"] == (2 * 600 * 9 + 2 * 400 * 4 + 64 * pairs) / 0.5
    trained = 2 * 600 * 12 + 2 * 400 * 4 + 64 * (25 + 49)
    assert metrics["flops_per_s/trainer"] == 3 * trained / 2.0


def test_what_was_generated_in_vain_counts_where_its_seconds_do():
    meter = Meter(Config(), SHAPE)
    plain = step(meter, batch_of(), 1.0, 1.0, 1.0)
    batch = batch_of(dropped=[sample(1, 0, 4, 3)], greedy=[sample(0, 2, 3, 5)])
    replaced = [sample(2, 0, 6, 1), sample(2, 1, 6, 2)]
    batch.samples[0].extra = notes_of_replaced(NoVisits(), [(0, 2)], replaced)
    metrics = step(meter, batch, 1.0, 1.0, 1.0)
    assert metrics["tokens_per_s/rollout"] == 6 + 3 + 5 + 3
    others = generation([*batch.dropped, *batch.greedy, *replaced]) - forward([3])  # read once
    assert metrics["flops_per_s/rollout"] == plain["flops_per_s/rollout"] + others
    for name in ("tokens_per_s/trainer", "flops_per_s/trainer"):
        assert metrics[name] == plain[name]


def test_replacements_of_replacements_hand_their_work_on():
    first = [sample(2, 0, 6, 1)]
    second = [sample(3, 0, 4, 2)]
    second[0].extra = notes_of_replaced(NoVisits(), [(0, 2)], first)
    notes = notes_of_replaced(NoVisits(), [(0, 3)], second)
    assert notes["replaced_work"] == list(generation_work([*first, *second]))


def test_epochs_count_and_steps_in_which_the_critic_warms_up_alone_do_not():
    cfg = Config()
    cfg.actor.ppo_epochs = 2
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == 6 * forward([5, 7])
    assert metrics["tokens_per_s/trainer"] == 24
    cfg.trainer.critic_warmup = 1
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    assert metrics["flops_per_s/trainer"] == 0 == metrics["tokens_per_s/trainer"]
    assert metrics["flops_per_s/rollout"] > 0


def test_weights_that_adapters_leave_frozen_have_no_gradients_to_compute():
    cfg = Config()
    cfg.model.lora_rank = 8
    metrics = step(Meter(cfg, SHAPE), batch_of(), 1.0, 1.0, 1.0)
    attention = 64 * (25 + 49)  # of it the gradients of two activations
    assert metrics["flops_per_s/trainer"] == 2 * forward([5, 7]) + attention


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
    read = forward([3]) + forward([5])
    written = 2 * 1000 * 10 + 64 * ((3 + 4) + (5 + 6 + 7 + 8) + (3 + 4 + 5 + 6))
    assert metrics["flops_per_s/rollout"] == (read + written) / 0.5


def test_the_mfu_of_rollout_counts_the_replicas_that_serve():
    """They may come and go."""
    cfg = Config()
    cfg.rollout.tensor_parallel_size = 2
    cfg.placement.pools = {"rollout": [4], "actor": [1]}
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    meter = Meter(cfg, SHAPE, device_name="NVIDIA H100 80GB HBM3")
    of_config = step(meter, batch_of(), 1.0, 1.0, 1.0)
    meter.replicas = 4
    of_four = step(meter, batch_of(), 1.0, 1.0, 1.0)
    assert of_config["mfu/rollout"] == pytest.approx(2 * of_four["mfu/rollout"])
    assert of_config["mfu/trainer"] == of_four["mfu/trainer"]
