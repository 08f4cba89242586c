"""rollout.replay_routing in the trainer: log-probs and updates take the samples' experts, however
sequences are laid out, recomputed or compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.algorithms.batching import (
    MicroBatch,
    collate,
    context_parallel_slice,
    pad_to_same_shape,
)
from one_step_off.models.router_replay import RouterReplay
from tests.unit.models.families import CONFIGS
from tests.unit.models.test_router_replay import recorded_choice
from tests.unit.training.fsdp_helpers import (
    assert_gradients_equal,
    config,
    end,
    hf_log_probs,
    hf_model,
    make_batch,
    start,
    token_ids,
    write_model,
)

TEMPERATURE = 0.7
REPLAY = {"rollout__replay_routing": True}
LAYOUTS = {
    "padded": {"actor__packing": "off"},
    "packed": {"actor__packing": "on"},
    "one by one": {"actor__micro_batch_tokens": 1},
    "recomputed": {"actor__activation_checkpointing": True},
    "compiled": {"actor__torch_compile": True},
    "recomputed and compiled": {
        "actor__activation_checkpointing": True,
        "actor__torch_compile": True,
    },
}
COMPILED = ("compiled", "recomputed and compiled")  # compiling takes a minute


@pytest.fixture
def path(tmp_path):
    write_model(CONFIGS["qwen3_moe"](), tmp_path / "model")
    yield str(tmp_path / "model")
    end()


def give_experts(batch: Any, path: str, change: Any) -> None:
    """Give each sample `change` of the experts that the model chooses itself."""
    model = hf_model(path)
    for sample in batch.samples:
        chosen = recorded_choice(model, token_ids(sample)[None])[:-1].numpy().astype(np.uint8)
        experts = change(chosen)
        first = len(sample.prompt_ids)
        sample.prompt_experts, sample.response_experts = experts[:first], experts[first:]


def others(chosen: np.ndarray) -> np.ndarray:
    """Two other experts for every token, in every layer."""
    return ((chosen + 1) % 4).astype(np.uint8)


def log_probs_by_hand(path: str, batch: Any) -> list[np.ndarray]:
    """Of transformers' model whose routers are given the experts, one sequence at a time."""
    model = hf_model(path)
    replay = RouterReplay(model)
    rows = []
    for sample in batch.samples:
        experts = torch.from_numpy(sample.experts.astype(np.int16))
        last = torch.full((1, *experts.shape[1:]), -1, dtype=torch.int16)
        replay.use(torch.cat([experts, last]))
        with torch.no_grad():
            rows.append(hf_log_probs(model, sample, TEMPERATURE).numpy())
    return rows


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in COMPILED)) for name in LAYOUTS],
)
def test_log_probs_and_gradients_are_those_of_the_given_experts(path, layout):
    torch._dynamo.reset()
    batch = make_batch(path)
    give_experts(batch, path, others)
    expected = log_probs_by_hand(path, batch)
    reference = start(config(path, **REPLAY))
    reference.update(batch)
    gradients = reference.gradients
    end()
    worker = start(config(path, **REPLAY, **LAYOUTS[layout]))
    found = worker.log_prob(batch)
    for position, log_probs in enumerate(expected):
        np.testing.assert_allclose(found[position], log_probs, atol=2e-6)
    metrics = worker.update(batch)
    assert metrics["actor/replayed_share"] == 1
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)
    end()
    # Without replay the routers choose other experts.
    free = start(config(path))
    own = free.log_prob(batch)
    assert max(abs(own[i] - expected[i]).max() for i in own) > 1e-4


def test_its_own_experts_change_no_bit_and_the_last_token_chooses_itself(path):
    batch = make_batch(path)
    give_experts(batch, path, lambda chosen: chosen)
    free = start(config(path))
    own = free.log_prob(batch)
    free.update(batch)
    end()
    worker = start(config(path, **REPLAY))
    found = worker.log_prob(batch)
    worker.update(batch)
    for position, log_probs in own.items():
        assert np.array_equal(found[position], log_probs)
    for name, gradient in free.gradients.items():
        assert np.array_equal(worker.gradients[name], gradient), name


def test_samples_without_experts_fall_back_and_are_counted(path):
    batch = make_batch(path)
    give_experts(batch, path, others)
    for sample in batch.samples[:6]:
        sample.prompt_experts = sample.response_experts = None
    worker = start(config(path, **REPLAY))
    found = worker.log_prob(batch)
    metrics = worker.update(batch)
    read = [sample.length - 1 for sample in batch.samples]
    assert metrics["actor/replayed_share"] == pytest.approx(sum(read[6:]) / sum(read))
    end()
    free = start(config(path))
    own = free.log_prob(batch)
    for position in range(6):
        np.testing.assert_allclose(found[position], own[position], atol=1e-6)


def test_the_reference_policy_chooses_itself(path):
    batch = make_batch(path)
    give_experts(batch, path, others)
    cfg = config(path, **REPLAY)
    cfg.ref.path = path
    reference = start(cfg, role="ref")
    found = reference.log_prob(batch)
    end()
    own = start(config(path)).log_prob(batch)
    for position, log_probs in own.items():
        assert np.array_equal(found[position], log_probs)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_lie_where_their_tokens_lie(packed):
    sequences = [np.arange(5), np.arange(3), np.arange(4)]
    wanted = [np.array([2]), np.array([1]), np.array([3])]
    experts = [np.full((4, 2, 1), 7, np.uint8), None, np.full((3, 2, 1), 300, np.uint16)]
    layout = collate(sequences, wanted, packed, 2, experts)
    tokens = [7, 7, 7, 7, -1], [-1, -1, -1], [300, 300, 300, -1]
    if packed:
        flat = [*tokens[0], *tokens[1], *tokens[2]]
    else:
        flat = [number for row in tokens for number in [*row, *[-1] * (6 - len(row))]]
    assert layout.experts.dtype == np.int16
    assert layout.experts[:, 0, 0].tolist() == flat
    assert layout.experts.shape[0] == layout.input_ids.size


def positions_as_experts(lengths: list[int]) -> MicroBatch:
    """A padded micro-batch whose token at position p of row r has the expert 10 r + p, and so has
    its id."""
    sequences = [np.arange(length) + 10 * row for row, length in enumerate(lengths)]
    experts = [ids[:, None, None].astype(np.uint8) for ids in sequences]
    return collate(sequences, [np.array([1])] * len(lengths), False, 4, experts)


def test_experts_stay_with_their_tokens_where_micro_batches_grow():
    small, large = positions_as_experts([3, 4]), positions_as_experts([2, 7, 5])
    pad_to_same_shape([small, large])
    for micro in (small, large):
        ids, experts = micro.input_ids.reshape(-1), micro.experts[:, 0, 0]
        assert len(ids) == len(experts) == 24
        assert np.array_equal(ids[experts >= 0], experts[experts >= 0])
    assert (small.experts >= 0).sum() == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_stay_with_their_tokens_where_columns_are_divided(rank):
    micro = positions_as_experts([8, 6])
    part, _ = context_parallel_slice(micro, rank, 2)
    assert part.input_ids.shape == (2, 4)
    ids, experts = part.input_ids.reshape(-1), part.experts[:, 0, 0]
    assert np.array_equal(ids[experts >= 0], experts[experts >= 0])
    assert (experts >= 0).sum() == (6 if rank == 0 else 8)


def test_without_experts_nothing_is_laid_out():
    sequences = [np.arange(5)]
    assert collate(sequences, [np.array([2])], True, 1, [None]).experts is None
    assert collate([], [], True, 1, []).experts is None
