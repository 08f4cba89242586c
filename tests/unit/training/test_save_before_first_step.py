"""A checkpoint of a role that has made no optimizer step yet, as of an actor while the critic warms
up, changes nothing: the steps after it are those of a run without it, bit for bit; so are those of
a run resumed from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from one_step_off.checkpoint.manifest import file_facts
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, make_batch, whole
from tests.unit.training.rank_helpers import join, leave, of_fsdp, of_megatron, weights_of

RUNS = ("without", "saves", "resumed")
PLAIN = {"actor__lr": 1e-2, "actor__weight_decay": 0.1}
LORA = {"model__lora_rank": 2, "model__lora_alpha": 4}


def run_of(name: str, start, path: str, folder: Path) -> list[list[np.ndarray]]:
    """Two steps of warm-up and two updates; what the weights are before the updates, and after
    each. `start`: makes a worker. "saves": a checkpoint after each step of warm-up; "resumed": from
    the first of these."""
    worker = start()
    batch = make_batch(path)
    if name == "resumed":
        worker.load_state(str(folder / "saves1"))
    while worker.version < 2:
        worker.update(batch, learn=False)
        if name == "saves":
            checkpoint = folder / f"{name}{worker.version}"
            checkpoint.mkdir(exist_ok=True)
            worker.save_state(str(checkpoint))
            worker.saved()
    found = [weights_of(worker)]
    for _ in range(2):
        worker.update(batch)
        found.append(weights_of(worker))
    assert (worker.version, worker.optimizer_steps) == (4, 2)
    return found


def assert_alike(found: dict[str, list[list[np.ndarray]]]) -> None:
    before, once, twice = found["without"]
    size = max(float(np.abs(a - b).max()) for a, b in zip(before, once, strict=True))
    assert size > 0
    for name in RUNS[1:]:
        for got, want in zip(found[name], (before, once, twice), strict=True):
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize(
    "keys", [{}, {"model__dtype": "bfloat16"}, LORA], ids=["float32", "bfloat16", "lora"]
)
def test_fsdp_on_one_rank(model_folders, start_single, tmp_path, keys):
    path = model_folders["tied"]

    def start():
        return start_single(config(path, **PLAIN, **keys), cls=PolicyWorker)

    assert_alike({name: run_of(name, start, path, tmp_path) for name in RUNS})


def test_the_moments_are_those_that_the_first_step_would_make(model_folders, start_single):
    """Names, types, shapes and devices of AdamW's state: what is made for a checkpoint, and what a
    step makes."""

    def kinds(worker):
        states = [
            worker.optimizer.state[p]
            for group in worker.optimizer.param_groups
            for p in group["params"]
        ]
        return [
            [(name, type(x), x.dtype, x.shape, x.device) for name, x in state.items()]
            for state in states
        ]

    path = model_folders["tied"]
    saving = start_single(config(path, **PLAIN), cls=PolicyWorker)
    before = whole(saving)
    saving._create_moments()
    made = kinds(saving)
    assert all(not x.any() for state in saving.optimizer.state.values() for x in state.values())
    assert all(np.array_equal(before[name], x) for name, x in whole(saving).items())
    stepping = start_single(config(path, **PLAIN), cls=PolicyWorker)
    stepping.update(make_batch(path))
    assert made
    assert made == kinds(stepping)


def after_skipped_steps(start, path: str, folder: Path | None) -> list[np.ndarray]:
    """The weights after a step that is skipped, a checkpoint in `folder` if one is given, and a
    step that is made."""
    worker = start()
    batch = make_batch(path)
    worker.role_config.max_grad_norm_skip = 1e-9
    worker.update(batch)
    if folder:
        folder.mkdir(exist_ok=True)
        worker.save_state(str(folder))
        torch.save(worker.saved(), folder.parent / f"facts_{worker.rank}.pt")
    assert worker.skipped_in_a_row == 1, "saving must not end the row"
    worker.role_config.max_grad_norm_skip = None
    worker.update(batch)
    return weights_of(worker)


def test_fsdp_after_skipped_steps(model_folders, start_single, tmp_path):
    path = model_folders["tied"]

    def start():
        return start_single(config(path, **PLAIN), cls=PolicyWorker)

    without = after_skipped_steps(start, path, None)
    with_save = after_skipped_steps(start, path, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(without, with_save, strict=True))


def run_rank(rank, world, workers, cfg, folder):
    torch.set_num_threads(1)

    def starter(name):
        def start():
            worker = workers()["actor"](cfg, "actor", rank, world, "cpu", total_steps=10)
            join(worker, name, folder)
            return worker

        return start

    path = cfg.model.path
    for name in RUNS:
        torch.save(run_of(name, starter(name), path, folder), f"{folder}/{name}_{rank}.pt")
        leave(workers)
    for name, checkpoint in (("skips", None), ("skips_and_saves", folder / "skipped")):
        torch.save(
            after_skipped_steps(starter(name), path, checkpoint), f"{folder}/{name}_{rank}.pt"
        )
        leave(workers)


def assert_ranks_counted_their_files_once(folder: Path, world: int) -> None:
    """All files of the checkpoint `folder`/skipped, each by one rank, as they are on the disk."""
    counted = [torch.load(folder / f"facts_{rank}.pt") for rank in range(world)]
    checkpoint = folder / "skipped"
    facts = {}
    for facts_of_rank in counted:
        assert facts_of_rank
        assert not facts.keys() & facts_of_rank.keys()
        facts |= facts_of_rank
    on_disk = file_facts(checkpoint)
    assert {name: size for name, (size, _) in facts.items()} == on_disk["bytes"]
    assert {name: checksum for name, (_, checksum) in facts.items()} == on_disk["checksum"]


def check_ranks(workers, cfg, world, folder):
    run_ranks(run_rank, (world, workers, cfg, folder), world)
    assert_ranks_counted_their_files_once(folder, world)
    for rank in range(world):
        found = {
            n: torch.load(f"{folder}/{n}_{rank}.pt", weights_only=False)
            for n in (*RUNS, "skips", "skips_and_saves")
        }
        assert all(
            np.array_equal(a, b)
            for a, b in zip(found.pop("skips"), found.pop("skips_and_saves"), strict=True)
        )
        assert_alike(found)


def test_fsdp_on_two_ranks(model_folders, tmp_path):
    check_ranks(of_fsdp, config(model_folders["untied"], **PLAIN), 2, tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp2", marks=pytest.mark.slow),
        pytest.param(
            {"actor__tensor_parallel_size": 2}, id="tp2", marks=[pytest.mark.slow, pytest.mark.ci]
        ),
    ],
)
def test_megatron(tmp_path, layout):
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed (the extra megatron)"
    )
    from tests.unit.training.megatron_helpers import write_models

    path = str(write_models(tmp_path / "models") / "qwen2")
    check_ranks(
        of_megatron, config(path, **PLAIN, **layout, actor__backend="megatron"), 2, tmp_path
    )
