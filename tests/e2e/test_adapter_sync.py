"""weight_sync.lora=adapter through real engines: they hold base model and adapter apart, and
compute what the trainer does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from one_step_off.cluster.errors import RoleError, SyncError
from one_step_off.config.schema import Config
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import assert_same_weights, learned_metrics, read_rows
from tests.e2e.sync_checks import (
    assert_engines_equal_transformers,
    batch_for_update,
    check_syncs_to_another_model,
    make_prompts,
    run_with_ray,
    start_roles,
)
from tests.unit.stand_ins import RecordedEvents

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

RANK = 4
ADAPTER = {"model.lora_rank": RANK, "actor.lr": 1e-2, "weight_sync.lora": "adapter"}


def run_config(models: Any, folder: Path, **changes: object) -> Config:
    """Three synchronous steps: theta is mu, so engine and trainer must give the same log-probs."""
    settings = {
        "reward.function": LETTER_SHARE,
        "pipeline.staleness": 0,
        "trainer.total_steps": 3,
        "trainer.test_freq": 2,
    }
    return tiny_config(models(), str(folder), **settings | ADAPTER | changes)


def assert_ratio_is_one(folder: Path) -> list[dict[str, Any]]:
    rows = read_rows(folder, "metrics.jsonl")
    assert len(rows) == 3
    for row in rows:
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio/max"] == pytest.approx(1.0, abs=2e-4)
        assert row["logprob_diff/max"] < 1e-4
        assert row["canary/logprob_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    return rows


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_sends_kilobytes_and_its_ratio_is_one(models, tmp_path):
    """Also at a temperature that is not 1."""
    from one_step_off.runtime import launch

    changes = {"model.path": models("qwen3"), "rollout.temperature": 0.7}
    assert launch.run(run_config(models, tmp_path, **changes)) == 0
    rows = assert_ratio_is_one(tmp_path)
    files = {path.name: path.stat().st_size for path in tmp_path.rglob("hf_model/**/*.safetensors")}
    for row in rows[1:]:  # the first step needed no other weights than those of the start
        assert row["sync/bytes"] == pytest.approx(files["adapter_model.safetensors"], rel=0.1)
        assert row["sync/bytes"] < files["model.safetensors"] / 10


@pytest.mark.slow
def test_a_run_with_adapters_apart_learns_as_one_with_merged_weights(models, tmp_path):
    from one_step_off.runtime import launch

    rows = {}
    for way in ("merged", "adapter"):
        folder = tmp_path / way
        assert launch.run(run_config(models, folder, **{"weight_sync.lora": way})) == 0
        rows[way] = assert_ratio_is_one(folder)
    for merged, apart in zip(rows["merged"], rows["adapter"], strict=True):
        # A sampled token may differ where two are equally likely to seven digits.
        assert apart["reward/mean"] == pytest.approx(merged["reward/mean"], abs=0.02)
        assert apart["actor/grad_norm"] == pytest.approx(merged["actor/grad_norm"], rel=0.05)
    assert rows["adapter"][0]["reward/mean"] == rows["merged"][0]["reward/mean"]
    assert rows["adapter"][2]["sync/bytes"] < rows["merged"][2]["sync/bytes"] / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "tensor_parallel_size"),
    [(2, 2), (3, 1)],
)
def test_engines_equal_the_merged_model(models, tmp_path, ranks, tensor_parallel_size):
    """Also where the trainers cut the matrices, and where the engine's workers do."""
    changes = {
        "placement.pools": {"rollout": [tensor_parallel_size], "actor": [ranks]},
        "rollout.tensor_parallel_size": tensor_parallel_size,
        "weight_sync.overlap": "auto",
    }
    model = models(tied=True, seed=2)
    first, second = check_syncs_to_another_model(
        model, model, tmp_path, ADAPTER | changes, trained_name="proj.weight"
    )
    assert first["sync/bytes"] == second["sync/bytes"] < 1 << 20


@pytest.mark.slow
def test_an_engine_with_another_base_model_is_refused(models, tmp_path):
    from one_step_off.runtime import launch

    engine_kwargs = {"model": models(tied=True, seed=1)}
    model = models(tied=True, seed=2)
    changes = ADAPTER | {"rollout.engine_kwargs": engine_kwargs}
    cfg = tiny_config(model, str(tmp_path), **changes)
    message = r"base model, rollout 0: worker 0: \d+ tensors of the base model differ"
    with pytest.raises(SyncError, match=message):
        launch.run(cfg)


@pytest.mark.slow
def test_a_bit_that_flips_behind_the_wire_is_found_and_nothing_is_generated(models, tmp_path):
    extension = "tests.broken_adapter.FlippedBitExtension"
    engine_kwargs = {"worker_extension_cls": extension, "max_model_len": 160}
    changes = ADAPTER | {"rollout.engine_kwargs": engine_kwargs}
    cfg = tiny_config(models(), str(tmp_path), **changes)

    async def check() -> None:
        from one_step_off.cluster.remote_calls import name_failures

        roles = await start_roles(cfg)
        await roles.sync((0, 0))
        await roles.actor.update(batch_for_update())
        with pytest.raises(SyncError, match=r"worker 0, phase verify: 1 buffers of vLLM's LoRA"):
            await roles.sync((0, 1))
        replica = roles.rollout.replicas[0]
        generation = replica.rollout.remote(make_prompts(), Sampling(1, 1.0, None))
        with pytest.raises(RoleError, match="rollout replica 0 has no verified weights"):
            await name_failures("rollout 0", generation)
        await roles.rollout.stop()

    run_with_ray(cfg, check)


def kill_when_packing(worker: Any, pid: int) -> None:
    """On a trainer rank: kill another process when this one packs the next bucket."""
    real_pack = worker.sender._pack

    def pack(*arguments: Any) -> None:
        worker.sender._pack = real_pack
        os.kill(pid, signal.SIGKILL)
        real_pack(*arguments)

    worker.sender._pack = pack


@pytest.mark.slow
def test_a_killed_replica_comes_back_with_the_base_and_the_adapter(models, tmp_path):
    """It dies in a sync. Restarted, it proves its base and gets the adapter that was sent last."""
    changes = {
        "placement.pools": {"rollout": [2], "actor": [1]},
        "rollout.engine_kwargs": {"max_model_len": 160},
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "weight_sync.timeout_s": 30.0,
    }
    cfg = tiny_config(models(), str(tmp_path / "run"), **ADAPTER | changes)
    updated_model = str(tmp_path / "after")
    events = RecordedEvents()

    async def check() -> None:
        roles = await start_roles(cfg, events)
        await roles.sync((0, 0))
        await roles.actor.update(batch_for_update())
        pid = await roles.rollout.replicas[1].__ray_call__.remote(lambda replica: os.getpid())
        await roles.actor.ranks[0].__ray_call__.remote(kill_when_packing, pid)
        await roles.sync((0, 1))
        assert roles.rollout.active == [0]
        assert "rollout 1" in events.lines[0]
        await roles.actor.save_hf(updated_model)
        await roles.actor.update(batch_for_update())  # the sender keeps what it sent last
        await roles.rollout.supervisor.restart_tasks[1]
        assert roles.rollout.active == [0, 1]
        await assert_engines_equal_transformers(roles, updated_model)
        await roles.rollout.stop()

    run_with_ray(cfg, check)


@pytest.mark.slow
def test_two_and_two_steps_equal_four(models, tmp_path, monkeypatch):
    """With adapters apart, and one step off: a resumed run has the same bits."""
    from one_step_off import ray_trainer
    from one_step_off.runtime import launch

    changes = {
        "pipeline.staleness": 1,
        "trainer.total_steps": 4,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
    }
    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    assert launch.run(run_config(models, whole, **changes)) == 0
    real_train = ray_trainer.Pipeline._train

    async def fail_in_step_3(self, batch):
        if batch.step == 3:
            raise RuntimeError("pulled the plug")
        return await real_train(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ray_trainer.Pipeline, "_train", fail_in_step_3)
        with pytest.raises(RuntimeError, match="pulled the plug"):
            launch.run(run_config(models, halves, **changes))
    assert launch.run(run_config(models, halves, **changes)) == 0
    assert read_rows(whole, "ledger.jsonl") == read_rows(halves, "ledger.jsonl")
    assert learned_metrics(whole) == learned_metrics(halves)
    assert_same_weights(whole, halves)
