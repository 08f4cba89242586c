"""rollout.replay_routing under Megatron: in every layout its routers take the experts that FSDP's
take, also where activations are computed again while other micro-batches are under way."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, end, make_batch, start
from tests.unit.training.megatron_helpers import CP, EP, PACKED, PP, SP, TP, VPP, write_models
from tests.unit.training.rank_helpers import join, leave, of_megatron
from tests.unit.training.test_replayed_routing import give_experts, others

RECOMPUTED = {"activation_checkpointing": True}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    # name -> ranks, model, keys of the actor
    "recomputed": (1, "moe", RECOMPUTED),
    "packed": (1, "mixed", PACKED),
    "tensors and experts": (2, "moe", TP | SP | EP | RECOMPUTED),
    "stages": (2, "moe", PP | RECOMPUTED),
    "virtual stages": (2, "mixed", PP | VPP | RECOMPUTED),
    "context": (2, "mixed", CP),
}
COMMON = {"rollout__replay_routing": True, "actor__lr": 1e-3, "actor__micro_batch_tokens": 60}


def passes_of(worker: Any, batch: Any) -> dict[str, Any]:
    """Log-probs, an update, and log-probs with what it changed."""
    before = worker.log_prob(batch)
    metrics = worker.update(batch)
    return {"before": before, "metrics": metrics, "after": worker.log_prob(batch)}


def run_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for name, (count, model, layout) in CASES.items():
        if count != ranks:
            continue
        changes = {f"actor__{key}": value for key, value in layout.items()}
        cfg = config(str(folder / model), **COMMON, **changes, actor__backend="megatron")
        worker = of_megatron()["actor"](cfg, "actor", rank, ranks, "cpu", 10)
        join(worker, name, folder)
        batch = pickle.loads((folder / f"{model}.batch").read_bytes())
        torch.save(passes_of(worker, batch), folder / f"{name}{rank}.pt")
        leave(of_megatron)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what FSDP computes of each model."""
    root = write_models(tmp_path_factory.mktemp("models"))
    for model in ("moe", "mixed"):
        path = str(root / model)
        batch = make_batch(path)
        give_experts(batch, path, others)
        batch.samples[3].prompt_experts = batch.samples[3].response_experts = None
        (root / f"{model}.batch").write_bytes(pickle.dumps(batch))
        torch.save(passes_of(start(config(path, **COMMON)), batch), root / f"{model}.pt")
        end()
    return root


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (CASES[name][0] > 1)) for name in CASES]
)
def test_a_layout_takes_the_experts_that_fsdp_takes(folder, name):
    ranks, model, _ = CASES[name]
    if not (folder / f"{name}0.pt").exists():  # one start of ranks computes all cases of so many
        run_ranks(run_rank, (ranks, folder), ranks)
    expected = torch.load(folder / f"{model}.pt", weights_only=False)
    found = [torch.load(folder / f"{name}{rank}.pt", weights_only=False) for rank in range(ranks)]
    for moment, tolerance in (("before", 5e-6), ("after", 1e-4)):
        shares: dict[int, np.ndarray] = {}
        for rank in found:
            shares |= rank[moment]
        assert shares.keys() == expected[moment].keys()
        for position, log_probs in expected[moment].items():
            np.testing.assert_allclose(shares[position], log_probs, atol=tolerance)
    for key in ("actor/replayed_share", "actor/grad_norm", "actor/loss"):
        wanted = expected["metrics"][key]
        assert found[0]["metrics"][key] == pytest.approx(wanted, rel=1e-4, abs=1e-6), key
    assert 0.8 < found[0]["metrics"]["actor/replayed_share"] < 1
