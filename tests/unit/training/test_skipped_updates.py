"""An optimizer step that may not be made is made on no rank, whatever the back end, and leaves no
trace."""

from __future__ import annotations

import asyncio
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from one_step_off.algorithms.policy_losses import ppo_clip
from one_step_off.checkpoint import read_batch, write_batch
from one_step_off.data.samples import Batch
from one_step_off.monitoring.tracker import Tracker
from one_step_off.tools.replay import replay_update
from one_step_off.training.fsdp.fsdp_workers import WORKERS, CriticWorker
from one_step_off.training.trainer_group import merged
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, free_port, make_batch
from tests.unit.training.rank_helpers import (
    join,
    leave,
    of_fsdp,
    of_megatron,
    weights_of,
    without_times,
)

MARK = 77.0  # the advantage of the sample whose loss is to be no number


def nan_loss(x, **_):
    """The PPO clip loss; and no number, without a gradient, for one sample: only the rank that has
    it sees it."""
    loss, clipped = ppo_clip(x)
    return loss + torch.where(x.advantage == MARK, torch.nan, 0.0), clipped


def are_same(first, second) -> bool:
    """Whether two lists of arrays are equal, bit for bit."""
    return all((a == b).all() for a, b in zip(first, second, strict=True))


def batches_to_skip(path) -> dict[str, Batch]:
    """Batches whose step must be skipped: for their loss, or for the norm of their gradient."""
    broken_loss = make_batch(path)
    broken_loss.advantages[0][:] = MARK
    infinite_norm = make_batch(path)
    infinite_norm.advantages[0][:] = np.inf
    return {"loss": broken_loss, "norm": infinite_norm}


def run_skips(worker, path) -> dict:
    """Steps that must be skipped, one after the other, then some of few samples that must be made.

    Returns:
        For each step how many were skipped in it, and in a row; all metrics; and the weights after
        the first step that was made, and after the second.
    """
    result: dict = {"metrics": []}

    def step(name, batch, learn=True):
        metrics = without_times(worker.update(batch, learn))
        result["metrics"].append(repr(sorted(metrics.items())))
        skipped = metrics.get("actor/skipped_updates")
        result[name] = (skipped, metrics.get("actor/skipped_in_a_row"))

    start = weights_of(worker)
    for name, batch in batches_to_skip(path).items():
        step(name, batch)
    worker.role_config.max_grad_norm_skip = 1e-9
    step("large", make_batch(path))
    worker.role_config.max_grad_norm_skip = None
    empty = make_batch(path)
    empty.drop({s.prompt_id for s in empty.samples})
    step("empty", empty, learn=False)
    result["unchanged"] = are_same(start, weights_of(worker))
    step("good", make_batch(path))
    result["once"] = weights_of(worker)
    step("few", one_sample(path))
    result["twice"] = weights_of(worker)
    result["version"] = worker.version
    return result


def one_sample(path) -> Batch:
    """A batch with fewer samples than ranks."""
    batch = make_batch(path)
    batch.drop({s.prompt_id for s in batch.samples if s.prompt_id != (0, 2)})
    batch.samples = batch.samples[:1]
    batch.advantages = batch.advantages[:1]
    return batch


def run_good_step(worker, path) -> list[np.ndarray]:
    """The weights after the one good step alone."""
    worker.update(make_batch(path))
    return weights_of(worker)


def run_rank(rank, world, workers, cfg, out):
    torch.set_num_threads(1)
    for name, work in (("skips", run_skips), ("control", run_good_step)):
        worker = workers()["actor"](cfg, "actor", rank, world, "cpu", total_steps=10)
        join(worker, name, out)
        torch.save(work(worker, cfg.model.path), f"{out}/{name}_{rank}.pt")
        leave(workers)


def check(out, ranks):
    first_rank = torch.load(f"{out}/skips_0.pt", weights_only=False)
    for rank in range(ranks):
        result = torch.load(f"{out}/skips_{rank}.pt", weights_only=False)
        control = torch.load(f"{out}/control_{rank}.pt", weights_only=False)
        assert result["loss"] == (1, 1)
        assert result["norm"] == (1, 2)
        assert result["large"] == (1, 3), "one skipped step each, in a row"
        assert result["empty"] == (None, None)
        assert result["unchanged"]
        assert result["good"] == (0, 0)
        assert result["few"] == (0, 0)
        assert result["version"] == 6
        assert are_same(result["once"], control), "skipped steps leave no trace in the optimizer"
        assert not are_same(result["once"], result["twice"]), "fewer samples than ranks train too"
        assert result["metrics"] == first_rank["metrics"], "the same on all ranks"


KEYS = {"algorithm__policy_loss": f"{__name__}:nan_loss", "actor__lr": 1e-2}


def test_fsdp_skips_on_all_ranks_or_none(model_folders, tmp_path):
    cfg = config(model_folders["tied"], **KEYS)
    run_ranks(run_rank, (2, of_fsdp, cfg, str(tmp_path)), 2)
    check(tmp_path, 2)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="dp2", marks=pytest.mark.slow),
        pytest.param(
            {"actor__pipeline_parallel_size": 2}, id="pp2", marks=[pytest.mark.slow, pytest.mark.ci]
        ),
    ],
)
def test_megatron_skips_on_all_ranks_or_none(tmp_path, layout):
    """Two copies, of which one has the sample; two stages, of which the last has the loss."""
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed (the extra megatron)"
    )
    from tests.unit.training.megatron_helpers import write_models

    path = str(write_models(tmp_path / "models") / "qwen2")
    cfg = config(path, actor__backend="megatron", **layout, **KEYS)
    run_ranks(run_rank, (2, of_megatron, cfg, str(tmp_path)), 2)
    check(tmp_path, 2)


def test_a_critic_skips_too(model_folders):
    cfg = config(model_folders["tied"])
    cfg.critic.ppo_mini_batch_size = 2
    cfg.critic.lr = 1e-2
    worker = CriticWorker(cfg, "critic", 0, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", free_port())
    try:
        batch: Batch = make_batch(model_folders["tied"])
        batch.values = [np.zeros(len(s.response_ids), np.float32) for s in batch.samples]
        batch.returns = [np.full(len(v), np.nan, np.float32) for v in batch.values]
        for skipped_in_a_row in (2, 4):
            metrics = worker.update(batch)
            assert metrics["critic/skipped_updates"] == 2
            assert metrics["critic/skipped_in_a_row"] == skipped_in_a_row
        batch.returns = [np.ones(len(v), np.float32) for v in batch.values]
        metrics = worker.update(batch)
        assert metrics["critic/skipped_updates"] == 0
        assert metrics["critic/skipped_in_a_row"] == 0
    finally:
        dist.destroy_process_group()


def test_a_replay_tells_what_it_finds(model_folders, tmp_path):
    """With one real rank; the whole command is in test_e2e_misbehaviour.py."""
    path = model_folders["tied"]
    cfg = config(path)
    worker = WORKERS["actor"](cfg, "actor", 0, 1, "cpu", total_steps=10)
    worker.setup("127.0.0.1", free_port())

    class Group:
        async def log_prob(self, batch):
            return merged([worker.log_prob(batch)])

        async def update(self, batch):
            return worker.update(batch)

    batch = make_batch(path)
    out = io.StringIO()
    batch.advantages[0][:] = np.nan
    batch.samples[0].loss_mask[:] = True
    batch.old_log_probs = None
    batch.ref_log_probs = None
    write_batch(batch, tmp_path / "step_000004")
    team = SimpleNamespace(groups={"actor": Group()})
    prepared = SimpleNamespace(resume_point=None)
    try:
        again = read_batch(tmp_path / "step_000004")
        asyncio.run(replay_update(again, prepared, team, Tracker(str(tmp_path / "t"), 0, out=out)))
    finally:
        dist.destroy_process_group()
    output = out.getvalue()
    count = len(batch.samples[0].response_ids)
    assert f"advantages: {count} of " in output
    assert "ratio: 0 of" in output
    assert "trainer's log-prob: 0 of" in output
    assert "nan at prompt (0, 0), sample 0" in output
    metrics = re.search(r"^actor: (.*)$", output, re.M)[1].split(", ")
    for metric in ("actor/loss nan", "actor/grad_norm nan", "actor/skipped_updates 1"):
        assert metric in metrics, output
