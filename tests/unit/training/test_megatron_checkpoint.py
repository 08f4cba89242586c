"""Checkpoints of the Megatron back end: loaded in another layout they go on with the same weights
and moments."""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra megatron)")

from one_step_off.training.megatron.megatron_workers import WORKERS
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config
from tests.unit.training.megatron_helpers import (
    CP,
    EP,
    PP,
    SP,
    TP,
    VPP,
    assembled,
    assert_close,
    case,
    end,
    held_by,
    with_values,
)
from tests.unit.training.rank_helpers import join

# Name -> model, layout, and the checkpoint that it loads; "": it saves one.
LAYOUTS = {
    "saved": ("qwen2", TP, ""),
    "tp2": ("qwen2", TP, "saved"),
    "pp2": ("qwen2", PP, "saved"),
    "vpp2": ("qwen2", {**PP, **VPP}, "saved"),
    "cp2": ("qwen2", CP, "saved"),
    "dp2": ("qwen2", {}, "saved"),
    "vpp2_saved": ("qwen2", {**PP, **VPP}, ""),
    "tp2_of_vpp2": ("qwen2", TP, "vpp2_saved"),
    "critic_saved": ("qwen2", TP, ""),
    "critic_pp2": ("qwen2", PP, "critic_saved"),
    "bf16_saved": ("qwen2", TP, ""),
    "bf16_tp2": ("qwen2", TP, "bf16_saved"),
    "bf16_pp2": ("qwen2", PP, "bf16_saved"),
    "fresh": ("qwen2", TP, ""),
    "of_fresh": ("qwen2", TP, "fresh"),
    "moe_saved": ("moe", EP, ""),
    "moe_tp2": ("moe", {**TP, **SP}, "moe_saved"),
    "moe_tp2_ep2": ("moe", {**TP, **SP, **EP}, "moe_saved"),
}

# Masters and moments of the same layout are equal; in another one sums have another order.
TOLERANCES = {"bf16_pp2": 0.01, "tp2": 1e-6, "bf16_tp2": 1e-6}


def run_checkpoint(rank, cases, folder):
    """One case after the other: train one update and save, or load; then one more update."""
    torch.set_num_threads(1)
    for name, cfg, load in cases:
        role = "critic" if name.startswith("critic") else "actor"
        worker = WORKERS[role](cfg, role, rank, 2, "cpu", total_steps=10)
        join(worker, name, folder)
        batch = with_values(cfg.model.path)
        if load:
            worker.load_state(f"{folder}/{load}")
        else:
            if name != "fresh":
                worker.update(batch)
            (folder / name).mkdir(exist_ok=True)
            worker.save_state(f"{folder}/{name}")
            worker.saved()
        result = {
            "before": held_by(worker),
            "counters": (worker.version, worker.optimizer_steps),
            "masters": masters_of(worker),
        }
        worker.update(batch)
        result["after"] = held_by(worker)
        torch.save(result, f"{folder}/{name}_{rank}.pt")
        end()


def masters_of(worker):
    """Copies of the parameters that the optimizer steps."""
    masters = []
    for chained in worker.optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            masters += [parameter.detach().clone() for parameter in group["params"]]
    return masters


@pytest.fixture(scope="module")
def ranks_of(megatron_models, tmp_path_factory):
    """What both ranks found in every layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = []
    for name, (model, layout, load) in LAYOUTS.items():
        changes = case(name, model, 2, **layout).changes
        cfg = config(str(megatron_models / model), **changes, critic__lr=1e-3)
        cases.append((name, cfg, load))
    run_ranks(run_checkpoint, (cases, folder), 2)
    found = {}
    for name in LAYOUTS:
        files = [f"{folder}/{name}_{rank}.pt" for rank in range(2)]
        found[name] = [torch.load(file, weights_only=False) for file in files]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, _, load) in LAYOUTS.items() if load])
def test_a_checkpoint_loads_in_another_layout(ranks_of, name):
    """The same weights, then the same step; of a critic, and of a mixture of experts saved spread
    out, too."""
    saved = LAYOUTS[name][2]
    before = assembled(ranks_of[saved], "before")
    after = assembled(ranks_of[saved], "after")
    assert any((before[n] != after[n]).any() for n in before)
    updates = 0 if saved == "fresh" else 1
    assert ranks_of[name][0]["counters"] == (updates, updates)
    for n, tensor in assembled(ranks_of[name], "before").items():
        np.testing.assert_array_equal(tensor, before[n])
    # The moments came along: without them AdamW's second step would be another first one.
    assert_close(assembled(ranks_of[name], "after"), after, TOLERANCES.get(name, 1e-5))


@pytest.mark.slow
def test_masters_are_saved_in_float32(ranks_of):
    saved = [master for rank in ranks_of["bf16_saved"] for master in rank["masters"]]
    loaded = [master for rank in ranks_of["bf16_tp2"] for master in rank["masters"]]
    for was, now in zip(saved, loaded, strict=True):
        assert torch.equal(was, now)
        assert (was != was.bfloat16()).any(), "float32, and none of it rounded"


@pytest.mark.slow
def test_a_checkpoint_from_before_the_first_step_does_not_change_that_step(ranks_of):
    after_first_step = assembled(ranks_of["fresh"], "after")
    assert_close(after_first_step, assembled(ranks_of["saved"], "before"), 1e-6)
