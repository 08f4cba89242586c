"""An optimiser step that may not be made is made on no rank, whatever the back end, and leaves no trace."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from one_step_off.algorithms.policy_losses import vanilla
from one_step_off.checkpoint import read_batch, write_batch
from one_step_off.data.samples import Batch
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime.replay import replay_update
from one_step_off.training.fsdp_workers import WORKERS, CriticWorker
from one_step_off.training.trainer_group import merged
from tests.unit.training.fsdp_helpers import config, free_port, make_batch

MARK = 77.0  # the advantage of the sample whose loss is to be no number


def nan_loss(x, **_):
    """The vanilla loss; and no number, without a gradient, for one sample: only the rank that has it sees it."""
    loss, clipped = vanilla(x)
    return loss + torch.where(x.advantage == MARK, torch.nan, 0.0), clipped


def weights_of(worker) -> list[np.ndarray]:
    return [t.float().clone().numpy() for t in worker.weight_tensors()]


def same(a, b) -> bool:
    return all((x == y).all() for x, y in zip(a, b, strict=True))


def join(worker, name, folder):
    """Meet at a port that rank 0 chooses."""
    file = Path(folder) / f"{name}.port"
    if worker.rank == 0:
        file.with_suffix(".tmp").write_text(str(free_port()))
        file.with_suffix(".tmp").rename(file)
    while not file.exists():
        time.sleep(0.02)
    worker.setup("127.0.0.1", int(file.read_text()))


def in_turn(worker, path) -> dict:
    """Steps that must not be made, each alone, then some of few samples that must be."""
    good, broken, found = make_batch(path), make_batch(path), {"told": []}
    broken.advantages[0][:] = MARK
    start = weights_of(worker)

    def step(name, batch, learn=True):
        metrics = worker.update(batch, learn)
        told = {k: v for k, v in metrics.items() if not k.endswith("_s")}
        found["told"].append(repr(sorted(told.items())))
        found[name] = told.get("actor/skipped_updates"), told.get("actor/skipped_in_a_row")

    step("loss", broken)
    huge = copy.deepcopy(good)
    huge.advantages[0][:] = np.inf
    step("norm", huge)
    worker.role_config.max_grad_norm_skip = 1e-9
    step("large", good)
    worker.role_config.max_grad_norm_skip = None
    empty = copy.deepcopy(good)
    empty.drop({s.prompt_id for s in good.samples})
    step("empty", empty, learn=False)
    found["untouched"] = same(start, weights_of(worker))
    step("good", good)
    found["once"] = weights_of(worker)
    few = copy.deepcopy(good)
    few.drop({s.prompt_id for s in good.samples if s.prompt_id != (0, 2)})
    few.samples, few.advantages = few.samples[:1], few.advantages[:1]  # fewer than ranks
    step("few", few)
    found["twice"], found["version"] = weights_of(worker), worker.version
    return found


def fresh(worker, path) -> list[np.ndarray]:
    """The weights after the one good step alone."""
    worker.update(make_batch(path))
    return weights_of(worker)


def run_rank(rank, world, workers, cfg, out):
    torch.set_num_threads(1)
    for name, work in (("skips", in_turn), ("fresh", fresh)):
        worker = workers()["actor"](cfg, "actor", rank, world, "cpu", total_steps=10)
        join(worker, name, out)
        torch.save(work(worker, cfg.model.path), f"{out}/{name}_{rank}.pt")
        if hasattr(worker, "chunks"):
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def of_fsdp():
    return WORKERS


def of_megatron():
    from one_step_off.training import megatron_workers

    return megatron_workers.WORKERS


def check(out, ranks):
    found, alone = (
        [torch.load(f"{out}/{n}_{r}.pt", weights_only=False) for r in range(ranks)]
        for n in ("skips", "fresh")
    )
    for own, control in zip(found, alone, strict=True):
        assert (own["loss"], own["norm"], own["large"]) == ((1, 1), (1, 2), (1, 3)), (
            "one skipped step each, in a row"
        )
        assert own["empty"] == (None, None) and own["untouched"]
        assert own["good"] == own["few"] == (0, 0) and own["version"] == 6
        assert same(own["once"], control), (
            "the steps that were not made must leave no trace in the optimiser"
        )
        assert not same(own["once"], own["twice"]), (
            "a batch with fewer samples than ranks is learnt from"
        )
        assert own["told"] == found[0]["told"], "all ranks tell the same"


KEYS = {"algorithm__policy_loss": f"{__name__}:nan_loss", "actor__lr": 1e-2}


def test_fsdp_skips_on_all_ranks_or_none(model_folders, tmp_path):
    cfg = config(model_folders["tied"], **KEYS)
    mp.spawn(run_rank, args=(2, of_fsdp, cfg, str(tmp_path)), nprocs=2)
    check(tmp_path, 2)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp2", marks=pytest.mark.slow),
        pytest.param({"actor__pipeline_parallel_size": 2}, id="pp2"),
    ],
)
def test_megatron_skips_on_all_ranks_or_none(tmp_path, layout):
    """Two copies, of which one has the sample; two stages, of which the last has the loss."""
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed (the extra megatron)"
    )
    from tests.unit.training.test_megatron_workers import make_checkpoints

    path = str(make_checkpoints(tmp_path / "models") / "qwen2")
    cfg = config(path, actor__backend="megatron", **layout, **KEYS)
    mp.spawn(run_rank, args=(2, of_megatron, cfg, str(tmp_path)), nprocs=2)
    check(tmp_path, 2)


def test_a_critic_skips_too(model_folders):
    cfg = config(model_folders["tied"])
    cfg.critic.ppo_mini_batch_size, cfg.critic.lr = 2, 1e-2
    worker = CriticWorker(cfg, "critic", 0, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", free_port())
    try:
        batch: Batch = make_batch(model_folders["tied"])
        batch.values = [np.zeros(len(s.response_ids), np.float32) for s in batch.samples]
        batch.returns = [np.full(len(v), np.nan, np.float32) for v in batch.values]
        for count in itertools.islice(itertools.count(2, 2), 2):
            metrics = worker.update(batch)
            assert (metrics["critic/skipped_updates"], metrics["critic/skipped_in_a_row"]) == (
                2,
                count,
            )
        batch.returns = [np.ones(len(v), np.float32) for v in batch.values]
        metrics = worker.update(batch)
        assert (metrics["critic/skipped_updates"], metrics["critic/skipped_in_a_row"]) == (0, 0)
    finally:
        dist.destroy_process_group()


def test_a_replay_tells_what_it_finds(model_folders, tmp_path):
    """With one real rank; the whole command is in test_e2e_misbehaviour.py."""
    cfg, path = config(model_folders["tied"]), model_folders["tied"]
    worker = WORKERS["actor"](cfg, "actor", 0, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", free_port())

    class Group:
        async def log_prob(self, batch):
            return merged([worker.log_prob(batch)])

        async def update(self, batch):
            return worker.update(batch)

    batch, out = make_batch(path), io.StringIO()
    batch.advantages[0][:] = np.nan
    batch.samples[0].loss_mask[:] = True
    batch.old_log_probs = batch.ref_log_probs = None
    write_batch(batch, tmp_path / "step_000004")
    team = SimpleNamespace(groups={"actor": Group()})
    prepared = SimpleNamespace(resume_point=None)
    try:
        again = read_batch(tmp_path / "step_000004")
        asyncio.run(replay_update(again, prepared, team, Tracker(str(tmp_path / "t"), 0, out=out)))
    finally:
        dist.destroy_process_group()
    said = out.getvalue()
    count = len(batch.samples[0].response_ids)
    assert (
        f"advantages: {count} of " in said
        and "ratio: 0 of" in said
        and "trainer's log-prob: 0 of" in said
    )
    assert "nan at prompt (0, 0), sample 0" in said
    told = re.search(r"^actor: (.*)$", said, re.M)[1].split(", ")
    assert {"actor/loss nan", "actor/grad_norm nan", "actor/skipped_updates 1"} <= {*told}, said
