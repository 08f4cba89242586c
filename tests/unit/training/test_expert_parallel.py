"""Expert parallelism under FSDP2: several ranks learn what one process learns, send and save the
same weights, and a checkpoint of any layout is read in any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from one_step_off.models.experts import router_biases
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.models.families import CONFIGS
from tests.unit.training.fsdp_helpers import config, end, hf_model, make_batch, start, write_model
from tests.unit.training.rank_helpers import join, leave, of_fsdp, without_times
from tests.unit.training.test_model_families import assert_same, sent_by, stored_in

STEPS = 4
SETTINGS = {"actor__lr": 1e-3, "actor__grad_clip": 0.05, "actor__weight_decay": 0.1}
"""Every gradient is clipped, so that a wrong norm or scale shows in the weights."""


def steps(worker: Any, path: str, first: int, stop: int) -> list[dict[str, float]]:
    return [
        without_times(worker.update(make_batch(path, seed=step))) for step in range(first, stop)
    ]


def train_rank(rank: int, folder: Path, ranks: int, settings: dict[str, Any]) -> None:
    """Train, with a checkpoint after half of the steps."""
    torch.set_num_threads(1)
    path = str(folder / "model")
    cfg = config(path, actor__expert_parallel_size=2, **SETTINGS, **settings)
    worker = of_fsdp()["actor"](cfg, "actor", rank, ranks, "cpu", 10)
    join(worker, "ranks", folder)
    shapes = [p.to_local().shape for p in worker.model.model.layers[-1].mlp.experts.parameters()]
    metrics = steps(worker, path, 0, STEPS // 2)
    (folder / "checkpoint").mkdir(exist_ok=True)
    worker.save_state(str(folder / "checkpoint"))
    worker.saved()
    metrics += steps(worker, path, STEPS // 2, STEPS)
    sent = (worker.weight_plan(), [tensor.clone() for tensor in worker.weight_tensors()])
    torch.save((metrics, shapes, *sent), folder / f"rank{rank}.pt")
    worker.save_hf(str(folder / "saved"))
    leave(of_fsdp)


def sent_by_ranks(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """The pieces of all ranks put together; each number was sent once, each expert by one rank."""
    whole: dict[str, torch.Tensor] = {}
    sent: dict[str, torch.Tensor] = {}
    for rank in range(ranks):
        _, _, pieces, tensors = torch.load(folder / f"rank{rank}.pt", weights_only=False)
        for piece, tensor in zip(pieces, tensors, strict=True):
            whole.setdefault(piece.name, torch.zeros(piece.shape))
            sent.setdefault(piece.name, torch.zeros(piece.shape))
            piece.slice_of(whole[piece.name]).copy_(tensor)
            piece.slice_of(sent[piece.name]).add_(1)
            if ".experts." in piece.name:
                assert piece.block_shape == piece.shape
    assert all((count == 1).all() for count in sent.values())
    return whole


SIX_EXPERTS = {"num_experts": 6}
CASES = {
    "plain": ("qwen3_moe", {}, 2, {}, [2, 2]),
    # Of the ranks that share three experts one has two of them.
    "shards": ("qwen3_moe", SIX_EXPERTS, 4, {}, [2, 2, 1, 1]),
    "router biases": (
        "glm4_moe",
        {},
        2,
        {"actor__activation_checkpointing": True, "actor__router_bias_update_rate": 0.05},
        [2, 2],
    ),
    "idle rank": ("glm4_moe", {}, 2, {}, [2, 2]),
    # Rank 0 reads and broadcasts; the experts are frozen.
    "lora": (
        "qwen3_moe",
        {},
        2,
        {
            "model__lora_rank": 2,
            "model__lora_alpha": 4,
            "model__lora_target_modules": "q_proj,v_proj",
        },
        [2, 2],
    ),
    "muon": ("mixtral", {}, 2, {"actor__optimizer": "muon"}, [2, 2]),
    "adamw_8bit": ("qwen3_moe", {}, 2, {"actor__optimizer": "adamw_8bit"}, [2, 2]),
}
TOLERANCES = {"muon": 1e-4}
"""In the weights; Muon orthogonalizes in bfloat16."""


FAST = ("plain", "router biases")
"""The others are slow tests."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_ranks_with_whole_experts_learn_what_one_process_learns(case, tmp_path):
    name, changes, ranks, settings, held = CASES[case]
    folder = tmp_path / "model"
    hf_config = CONFIGS[name]()
    hf_config.update(changes)
    write_model(hf_config, folder)
    if case == "idle rank":
        send_all_tokens_to_the_first_experts(str(folder))
    run_ranks(train_rank, (tmp_path, ranks, settings), ranks)
    trained = sent_by_ranks(tmp_path, ranks)
    assert_same(stored_in(tmp_path / "saved"), trained)

    tolerance = TOLERANCES.get(case, 1e-5)
    worker = start(config(str(folder), **SETTINGS, **settings), cls=PolicyWorker)
    alone = steps(worker, str(folder), 0, STEPS)
    assert_near(trained, sent_by(worker), tolerance)
    end()
    for rank in range(ranks):
        metrics, shapes, _, _ = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert [shape[0] for shape in shapes] == [held[rank]] * len(shapes)
        assert metrics == [pytest.approx(figures, rel=tolerance, abs=1e-6) for figures in alone]

    # Another layout goes on from their checkpoint.
    worker = start(config(str(folder), **SETTINGS, **settings), cls=PolicyWorker)
    worker.load_state(str(tmp_path / "checkpoint"))
    steps(worker, str(folder), STEPS // 2, STEPS)
    assert_near(trained, sent_by(worker), tolerance)
    end()


def send_all_tokens_to_the_first_experts(path: str) -> None:
    """The second of two ranks then receives none."""
    model = hf_model(path)
    for bias in router_biases(model).values():
        bias.copy_(torch.tensor([10.0, 10.0, -10.0, -10.0]))
    model.save_pretrained(path)


def score_rank(rank: int, folder: Path) -> None:
    """Log-probs in bfloat16, and the dtypes of what the experts of the last layer receive."""
    torch.set_num_threads(1)
    path = str(folder / "model")
    cfg = config(path, model__dtype="bfloat16", actor__expert_parallel_size=2)
    worker = of_fsdp()["actor"](cfg, "actor", rank, 2, "cpu", 10)
    join(worker, "ranks", folder)
    dtypes = []
    # After FSDP2's own hook.
    worker.model.model.layers[-1].mlp.experts.register_forward_pre_hook(
        lambda module, inputs: dtypes.append([tensor.dtype for tensor in inputs])
    )
    outputs = worker.log_prob(make_batch(path))
    torch.save((dtypes, outputs), folder / f"rank{rank}.pt")
    leave(of_fsdp)


def test_in_bfloat16_the_weights_of_experts_stay_in_float32(tmp_path):
    path = str(tmp_path / "model")
    write_model(CONFIGS["glm4_moe"](), path)
    run_ranks(score_rank, (tmp_path,), 2)
    worker = start(config(path, model__dtype="bfloat16"), cls=PolicyWorker)
    alone = worker.log_prob(make_batch(path))
    end()
    found = {}
    for rank in range(2):
        dtypes, outputs = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        found |= outputs
        assert dtypes
        for hidden, _, weights in dtypes:
            assert (hidden, weights) == (torch.bfloat16, torch.float32)
    assert found.keys() == alone.keys()
    for position, log_probs in alone.items():
        torch.testing.assert_close(found[position], log_probs, atol=0.03, rtol=0)


def assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=name)
