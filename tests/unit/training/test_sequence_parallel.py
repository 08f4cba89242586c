"""Sequence parallelism under FSDP2: several ranks learn and score what one process does, and a
checkpoint of theirs is read by any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.config.errors import ConfigError
from one_step_off.models.divided_sequences import check_sequence_parallel
from one_step_off.models.model_checks import check_models
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.models.families import CONFIGS
from tests.unit.training.fsdp_helpers import (
    MODELS,
    OBJECTIVES,
    config,
    make_batch,
    write_model,
)
from tests.unit.training.rank_helpers import join, leave, of_fsdp, without_times
from tests.unit.training.test_expert_parallel import assert_near
from tests.unit.training.test_model_families import sent_by, stored_in
from tests.unit.training.test_replayed_routing import give_experts, others

STEPS = 4
SETTINGS = {
    "actor__lr": 1e-3,
    "actor__grad_clip": 0.05,
    "actor__weight_decay": 0.1,
    "actor__micro_batch_tokens": 31,
    "actor__ppo_mini_batch_size": 2,
}
"""Every gradient is clipped, so that a wrong norm or scale shows in the weights. A mini-batch has
several micro-batches, whose rows must be filled up to a multiple of the ranks."""


def hf_config_of(name: str, changes: dict[str, Any]) -> Any:
    make = {**CONFIGS, **MODELS}[name]
    hf_config = make()
    hf_config.update(changes)
    return hf_config


def updates(worker: Any, path: str, first: int, stop: int) -> list[dict[str, float]]:
    return [
        without_times(worker.update(make_batch(path, seed=step))) for step in range(first, stop)
    ]


def train_rank(rank: int, folder: Path, ranks: int, size: int, settings: dict[str, Any]) -> None:
    """Score and train, with a checkpoint after half of the steps."""
    torch.set_num_threads(1)
    path = str(folder / "model")
    cfg = config(path, actor__sequence_parallel_size=size, **(SETTINGS | settings))
    worker = of_fsdp()["actor"](cfg, "actor", rank, ranks, "cpu", 10)
    join(worker, "ranks", folder)
    assert worker.batch_share.sharing is None, "a divided row has no shared prefixes"
    scored = worker.log_prob_and_squares(make_batch(path))
    metrics = updates(worker, path, 0, STEPS // 2)
    (folder / "checkpoint").mkdir(exist_ok=True)
    worker.save_state(str(folder / "checkpoint"))
    worker.saved()
    metrics += updates(worker, path, STEPS // 2, STEPS)
    torch.save((metrics, scored), folder / f"rank{rank}.pt")
    worker.save_hf(str(folder / "saved"))
    leave(of_fsdp)


TIED_LORA = {
    "model__lora_rank": 2,
    "model__lora_alpha": 4,
    "model__lora_target_modules": "q_proj,v_proj",
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
# name: family, changes of its config, ranks, ranks of a sequence, settings.
CASES = {
    "two ranks": ("tied", {}, 2, 2, OBJECTIVES["everything"]),
    "two groups": (
        "untied",
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        4,
        2,
        {"actor__activation_checkpointing": True},
    ),
    "one key-value head": ("tied", {"num_attention_heads": 4}, 4, 4, OBJECTIVES["sequences"]),
    "copies": ("untied", {}, 4, 2, {"actor__fsdp_size": 2}),
    "experts": (
        "qwen3_moe",
        {"output_router_logits": True},
        2,
        2,
        # The load-balancing loss depends on what is in a micro-batch.
        {"actor__expert_parallel_size": 2, "actor__micro_batch_tokens": 1000},
    ),
    "compiled": ("tied", {}, 2, 2, {"actor__torch_compile": True}),
    "lora": ("untied", {}, 2, 2, TIED_LORA),
    "windows": ("untied", WINDOWS, 2, 2, {}),
}
FAST = ("two ranks",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_ranks_that_divide_sequences_learn_what_one_process_learns(case, tmp_path, start_single):
    name, changes, ranks, size, settings = CASES[case]
    folder = tmp_path / "model"
    write_model(hf_config_of(name, changes), folder)
    run_ranks(train_rank, (tmp_path, ranks, size, settings), ranks)
    trained = stored_in(tmp_path / "saved")

    alone_settings = {key: v for key, v in settings.items() if not key.endswith("_size")}
    alone = config(str(folder), **(SETTINGS | alone_settings))
    worker = start_single(alone, cls=PolicyWorker)
    scored = worker.log_prob_and_squares(make_batch(str(folder)))
    metrics = updates(worker, str(folder), 0, STEPS)
    assert_near(trained, sent_by(worker), 1e-5)
    found = {}
    for rank in range(ranks):
        of_rank, scored_of_rank = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert of_rank == [pytest.approx(figures, rel=1e-4, abs=1e-6) for figures in metrics]
        assert bool(scored_of_rank) == (rank % size == 0)
        found |= scored_of_rank
    assert found.keys() == scored.keys()
    for position, expected in scored.items():
        torch.testing.assert_close(found[position], expected, atol=2e-6, rtol=0)

    # Another layout goes on from their checkpoint.
    worker = start_single(alone, cls=PolicyWorker)
    worker.load_state(str(tmp_path / "checkpoint"))
    updates(worker, str(folder), STEPS // 2, STEPS)
    assert_near(trained, sent_by(worker), 1e-5)


def critics_figures(worker: Any, path: str) -> tuple[Any, Any]:
    batch = make_batch(path)
    rng = np.random.default_rng(0)
    lengths = [len(sample.response_ids) for sample in batch.samples]
    batch.values = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    batch.returns = [rng.normal(0, 1, length).astype(np.float32) for length in lengths]
    return worker.values(batch), without_times(worker.update(batch))


def canary(worker: Any, path: str) -> tuple[Any, Any]:
    sequences = [sample.response_ids for sample in make_batch(path).samples]
    return dict(enumerate(worker.score(sequences))), {}


def likeliest(worker: Any, path: str) -> tuple[Any, Any]:
    """A column of two dimensions, as that of the teacher's likeliest tokens."""
    return worker.score_responses(make_batch(path)), {}


def replayed(worker: Any, path: str) -> tuple[Any, Any]:
    batch = make_batch(path)
    give_experts(batch, path, others)
    return worker.log_prob(batch), without_times(worker.update(batch))


# name: role, model, what it computes, settings.
ROLES = {
    "critic": ("critic", "tied", critics_figures, {}),
    "canary": ("ref", "tied", canary, {}),
    "teacher": ("teacher", "tied", likeliest, {"teacher__top_k": 3}),
    "replay": ("actor", "qwen3_moe", replayed, {"rollout__replay_routing": True}),
}


def figures_of_role(
    name: str, folder: Path, rank: int, ranks: int, meeting: Path
) -> tuple[Any, Any]:
    role, model, compute, settings = ROLES[name]
    path = str(folder / model)
    cfg = config(
        path, actor__sequence_parallel_size=ranks, actor__micro_batch_tokens=31, **settings
    )
    cfg.teacher.path = path
    worker = of_fsdp()[role](cfg, role, rank, ranks, "cpu", 10)
    join(worker, name, meeting)
    figures = compute(worker, path)
    leave(of_fsdp)
    return figures


def kept_bytes(folder: Path, rank: int, ranks: int, meeting: Path) -> int:
    """What this rank keeps for the backward pass of one sequence of 48 tokens."""
    cfg = config(str(folder / "tied"), actor__sequence_parallel_size=ranks, actor__packing="on")
    worker = of_fsdp()["ref"](cfg, "ref", rank, ranks, "cpu", 10)
    join(worker, "kept", meeting)
    worker.model.requires_grad_(True)
    layout = worker._lay_out([np.arange(48)], [np.arange(1, 48)])
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor if tensor._base is None else tensor._base
        if not isinstance(whole, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        worker._forward(layout, 1.0, "none")
    leave(of_fsdp)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def all_roles(rank: int, folder: Path, ranks: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name in ROLES:
        figures[name] = figures_of_role(name, folder, rank, ranks, meeting)
    figures["kept"] = kept_bytes(folder, rank, ranks, meeting)
    torch.save(figures, meeting / f"rank{rank}.pt")


@pytest.mark.slow
def test_every_role_computes_what_one_process_computes(tmp_path):
    for model in ("tied", "qwen3_moe"):
        write_model(hf_config_of(model, {}), tmp_path / model)
    found = []
    for ranks in (1, 2):
        meeting = tmp_path / f"of {ranks}"
        meeting.mkdir()
        run_ranks(all_roles, (tmp_path, ranks, meeting), ranks)
        found.append(torch.load(meeting / "rank0.pt", weights_only=False))
    other_rank = torch.load(tmp_path / "of 2" / "rank1.pt", weights_only=False)
    assert max(found[1]["kept"], other_rank["kept"]) < 0.6 * found[0]["kept"]
    for name in ROLES:
        columns, metrics = found[1][name]
        expected_columns, expected_metrics = found[0][name]
        assert other_rank[name] == ({}, metrics)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
        assert columns.keys() == expected_columns.keys()
        for position, expected in expected_columns.items():
            np.testing.assert_allclose(columns[position], expected, atol=2e-6, err_msg=name)


def test_models_that_cannot_be_divided_are_refused(tmp_path):
    cases = {
        "qwen3": "does not divide the 2 attention heads of .*; use 2",
        "qwen3_5_text": "has layers whose state runs along the whole sequence; set it to 1",
    }
    for family, words in cases.items():
        write_model(CONFIGS[family](), tmp_path / family)
        cfg = config(str(tmp_path / family), actor__sequence_parallel_size=3)
        cfg.placement.roles = {"rollout": "rollout", "actor": "actor", "critic": "critic"}
        cfg.placement.pools = {"rollout": [1], "actor": [3], "critic": [1]}
        with pytest.raises(ConfigError, match=f"actor.sequence_parallel_size=3: .*{words}"):
            check_models(cfg, 32)
    # The actor's size holds for a critic that sets none.
    cfg.actor.sequence_parallel_size = 2
    cfg.model.path = str(tmp_path / "qwen3")
    cfg.critic.path = str(tmp_path / "qwen3_5_text")
    with pytest.raises(ConfigError, match="critic.sequence_parallel_size=2: .* state runs"):
        check_sequence_parallel(cfg)
    cfg.critic.sequence_parallel_size = 1
    check_sequence_parallel(cfg)
