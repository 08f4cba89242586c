"""Weight sync with real Ray, FSDP2, gloo and vLLM. The layouts are chosen so that every pair of
choices occurs."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from one_step_off.config.schema import Config
from one_step_off.ray_trainer import RunGroups
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config
from tests.e2e.sync_checks import (
    assert_engines_equal_transformers,
    batch_for_update,
    check_syncs_to_another_model,
    make_prompts,
    run_with_ray,
    start_roles,
)
from tests.unit.stand_ins import RecordedEvents

pytestmark = pytest.mark.e2e

# (tied, tensor_parallel_size, replicas, trainer ranks): a covering array of strength 2.
LAYOUTS = [
    (True, 2, 1, 1),
    (False, 1, 1, 2),
    (True, 1, 2, 2),
    (False, 2, 2, 2),
    (False, 1, 2, 1),
]


def test_layouts_cover_all_pairs():
    for first, second in itertools.combinations(range(4), 2):
        pairs = {(layout[first], layout[second]) for layout in LAYOUTS}
        assert len(pairs) == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tied", "tensor_parallel_size", "replicas", "ranks"), LAYOUTS)
def test_engine_equals_hf_after_sync(models, tmp_path, tied, tensor_parallel_size, replicas, ranks):
    """The engine starts from other weights than the trainer. After a sync it must answer as the
    trainer's model does."""
    engine_model = models(tied=tied, seed=1)
    trainer_model = models(tied=tied, seed=2)
    changes = {
        "placement.pools": {"rollout": [replicas * tensor_parallel_size], "actor": [ranks]},
        "rollout.tensor_parallel_size": tensor_parallel_size,
    }
    check_syncs_to_another_model(engine_model, trainer_model, tmp_path, changes)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [pytest.param(2, "fsdp", marks=pytest.mark.ci), (1, "megatron")],
)
def test_workers_receive_what_they_keep_after_the_first_sync(models, tmp_path, ranks, backend):
    """On engines that use parameters as loaded, as GPUs do. Each of two tensor-parallel workers
    gets half of the model, and norms whole."""
    changes = {
        "placement.pools": {"rollout": [2], "actor": [ranks]},
        "rollout.tensor_parallel_size": 2,
        "actor.backend": backend,
    }
    first, second = check_syncs_to_another_model(
        models(tied=False, seed=1),
        models(tied=False, seed=2),
        tmp_path,
        changes,
        engine_changes={"worker_extension_cls": "tests.unpacked_engine.SyncWorkerExtension"},
    )
    assert (first["sync/in_place"], second["sync/in_place"]) == (0.0, 1.0)
    assert first["sync/worker_bytes"] == first["sync/full_bytes"]
    assert 0.5 < second["sync/worker_bytes"] / first["sync/worker_bytes"] < 0.52


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_engine_equals_hf_with_adapters(models, tmp_path):
    """LoRA: the engine loads the merged weights that the trainer streams. It answers as the merged
    model that the trainer saves."""
    engine_model = models(tied=True, seed=1)
    trainer_model = models(tied=True, seed=2)
    changes = {"model.lora_rank": 4, "actor.lr": 1e-2}
    check_syncs_to_another_model(
        engine_model, trainer_model, tmp_path, changes, trained_name="proj.weight"
    )


def copy_with_another_rope_base(model: str, folder: Path) -> str:
    """A copy of the model whose layers compute something else: same names and same bytes."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in section:
            section["rope_theta"] = 37.0
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_sync_whose_canary_fails_stops_the_run(models, tmp_path):
    from one_step_off.cluster.errors import SyncError
    from one_step_off.runtime import launch

    trainer_model = models(tied=True, seed=2)
    engine_model = copy_with_another_rope_base(trainer_model, tmp_path / "other_rope_base")
    run_folder = tmp_path / "run"
    engine_kwargs = {"model": engine_model}
    cfg = tiny_config(trainer_model, str(run_folder), **{"rollout.engine_kwargs": engine_kwargs})
    message = r"canary after the sync of version 0: rollout replica 0.*canary_tolerance"
    with pytest.raises(SyncError, match=message):
        launch.run(cfg)
    assert not (run_folder / "ledger.jsonl").exists(), (
        "nothing may be trained after a failed canary"
    )


@pytest.mark.slow  # the test with the killed replica goes further
@pytest.mark.timeout(200)
def test_a_sync_that_breaks_inside_vllm_is_named_and_leaves_the_replica_unused(models, tmp_path):
    """The sender sends nothing: the engine's receiver reaches its time limit."""
    from one_step_off.cluster.errors import RoleError, SyncError
    from one_step_off.cluster.remote_calls import name_failures

    cfg = tiny_config(models(), str(tmp_path), **{"weight_sync.timeout_s": 3.0})

    async def check() -> None:
        roles = await start_roles(cfg)
        await roles.sync((0, 0))
        replica = roles.rollout.replicas[0]
        timed_out = r"rollout 0: receiver 0, phase header, bucket 0 of \d+: .*[Tt]imed out"
        with pytest.raises(SyncError, match=timed_out):
            await name_failures("rollout 0", replica.sync.remote((0, 1)))
        generation = replica.rollout.remote(make_prompts(), Sampling(1, 1.0, None))
        with pytest.raises(RoleError, match="rollout replica 0 has no verified weights"):
            await name_failures("rollout 0", generation)

    run_with_ray(cfg, check)


def kill_at_third_bucket(worker: Any, pid: int) -> None:
    """On a trainer rank: kill another process while this one packs its third bucket."""
    real_pack = worker.sender._pack
    packed_buckets = 0

    def pack(*arguments: Any) -> None:
        nonlocal packed_buckets
        packed_buckets += 1
        if packed_buckets == 3:
            os.kill(pid, signal.SIGKILL)
        real_pack(*arguments)

    worker.sender._pack = pack


def config_of_two_replicas(models: Any, folder: Path, extension: str | None) -> Config:
    """A run with two replicas that start from other weights than the trainer, and delta syncs.

    Args:
        models: the fixture that builds tiny models.
        folder: the run's folder.
        extension: the module of another SyncWorkerExtension for the engines.
    """
    trainer_model = models(tied=True, seed=2)
    engine_kwargs = {
        "model": models(tied=True, seed=1),
        "tokenizer": trainer_model,
        "max_model_len": 160,
    }
    if extension:
        engine_kwargs["worker_extension_cls"] = f"{extension}.SyncWorkerExtension"
    settings = {
        "placement.pools": {"rollout": [2], "actor": [1]},
        "rollout.engine_kwargs": engine_kwargs,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "weight_sync.bucket_mb": 1,
        "weight_sync.mode": "delta",
        "weight_sync.timeout_s": 30.0,
    }
    return tiny_config(trainer_model, str(folder), **settings)


async def kill_replica_1_in_the_next_sync(roles: RunGroups) -> None:
    """Let the trainer rank kill replica 1 when it packs the third bucket."""
    replica = roles.rollout.replicas[1]
    pid = await replica.__ray_call__.remote(lambda replica: os.getpid())
    await roles.actor.ranks[0].__ray_call__.remote(kill_at_third_bucket, pid)


async def assert_sync_without_replica_1(roles: RunGroups, messages: list[str]) -> None:
    """A sync in which replica 1 is killed ends soon, with replica 0 alone and one message."""
    await kill_replica_1_in_the_next_sync(roles)
    begin = time.monotonic()
    await roles.sync((0, 1))
    assert time.monotonic() - begin < 60, "no process waits for the killed one"
    assert roles.rollout.active == [0]
    assert len(messages) == 1
    assert "rollout 1" in messages[0]


def assert_ended(processes: list[tuple[int, Any]]) -> None:
    """The child processes of the killed replica, by process id, have ended."""
    assert processes
    running = []
    for pid, _ in processes:
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            running.append(pid)
    assert not running, "the engine of the killed replica must not survive it"


@pytest.mark.slow  # test_broken_syncs.py has a shorter one
@pytest.mark.timeout(400)
@pytest.mark.parametrize("extension", [None, "tests.unpacked_engine"])
def test_a_replica_killed_in_mid_sync_is_left_out_and_comes_back(models, tmp_path, extension):
    """kill -9 between two buckets. The other replica receives everything again without a restart,
    also where the broken sync has written into its parameters (`extension`). The failed replica
    restarts meanwhile, and takes part from the next sync on."""
    cfg = config_of_two_replicas(models, tmp_path / "run", extension)
    events = RecordedEvents()
    updated_model = str(tmp_path / "after")

    async def check() -> None:
        roles = await start_roles(cfg, events)
        metrics = await roles.sync((0, 0))
        assert metrics["sync/bytes"] >= 3 << 20
        assert metrics["sync/in_place"] == bool(extension)
        await roles.actor.update(batch_for_update())
        supervisor = roles.rollout.supervisor
        survivor = roles.rollout.replicas[0]
        children_of_killed = supervisor.child_processes[1]
        await assert_sync_without_replica_1(roles, events.lines)
        await roles.actor.save_hf(updated_model)
        await assert_engines_equal_transformers(roles, updated_model)
        # The trainer continues during the restart: the sender keeps what it sent last.
        await roles.actor.update(batch_for_update())
        await supervisor.restart_tasks[1]
        assert roles.rollout.active == [0, 1]
        assert roles.rollout.replicas[0] is survivor
        assert await supervisor.wait_for_healthy() == [0, 1]
        assert_ended(children_of_killed)
        await assert_engines_equal_transformers(roles, updated_model)
        await roles.rollout.stop()

    run_with_ray(cfg, check)
