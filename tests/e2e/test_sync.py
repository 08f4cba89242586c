"""Weight sync with real Ray, FSDP2, gloo and vLLM, over layouts chosen so that every pair of
choices occurs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config

pytestmark = pytest.mark.e2e

# (tied, tensor_parallel_size, replicas, trainer ranks): a covering array of strength 2.
LAYOUTS = [
    (True, 2, 1, 1),
    (False, 1, 1, 2),
    (True, 1, 2, 2),
    pytest.param(False, 2, 2, 2, marks=pytest.mark.ci),
    (False, 1, 2, 1),
]


def test_layouts_cover_all_pairs():
    for i in range(4):
        for j in range(i):
            rows = [getattr(row, "values", row) for row in LAYOUTS]
            pairs = {(row[i], row[j]) for row in rows}
            assert len(pairs) == 4


def prompts() -> list[Prompt]:
    # Longer than two blocks of the KV cache (32 tokens), so that blocks of older weights could be
    # found again.
    return [Prompt((0, i), np.arange(5 + i, 85 + 3 * i, dtype=np.int32), "", "1") for i in range(6)]


def batch_for_update() -> Batch:
    """Random tokens with random advantages: enough to move every weight."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(16):
        ids = rng.integers(0, 300, 12).astype(np.int32)
        logs = np.full(12, -5.9, np.float32)
        samples.append(
            Sample(
                (0, i // 4),
                i % 4,
                np.arange(8, dtype=np.int32),
                ids,
                logs,
                np.ones(12, bool),
                np.zeros(12, np.int32),
            )
        )
    batch = Batch(0, samples, expected_stamp=(0, 0))
    batch.advantages = [rng.normal(size=12).astype(np.float32) for _ in samples]
    return batch


def hf_answers(
    path: str, sequences: list[np.ndarray], new_tokens: int
) -> list[tuple[list[int], np.ndarray]]:
    """Greedy continuation and its log-probs by transformers, without a cache: the plainest
    reference there is."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    out = []
    for ids in sequences:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        for _ in range(new_tokens):
            with torch.no_grad():
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        with torch.no_grad():
            logs = model(tokens).logits.float().log_softmax(-1)[0, len(ids) - 1 : -1]
        new = tokens[0, len(ids) :]
        out.append((new.tolist(), logs.gather(1, new[:, None])[:, 0].numpy()))
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("tied", "tp", "replicas", "ranks"), LAYOUTS)
def test_engine_equals_hf_after_sync(models, tmp_path, tied, tp, replicas, ranks):
    """The engine starts from other weights than the trainer; after a sync it must answer as the
    trainer's model."""
    other = models(tied=tied, seed=1)
    mine = models(tied=tied, seed=2)
    pools = {"rollout": [replicas * tp], "actor": [ranks]}
    sync_and_compare(
        other, mine, tmp_path, {"placement.pools": pools, "rollout.tensor_parallel_size": tp}
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_engine_equals_hf_with_adapters(models, tmp_path):
    """LoRA: the engine loads the merged weights that the trainer streams, and answers as the merged
    model it saves."""
    changes = {"model.lora_rank": 4, "actor.lr": 1e-2}
    sync_and_compare(
        models(tied=True, seed=1), models(tied=True, seed=2), tmp_path, changes, "proj.weight"
    )


def sync_and_compare(
    other: str, mine: str, tmp_path: Path, changes: dict, trained: str = ""
) -> None:
    """From `other` in the engine to `mine`, an update, and again: after each sync the engine
    answers as transformers. `trained`: what stands in the names of the weights that an update
    moves."""
    import ray

    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    cfg = tiny_config(
        mine,
        str(tmp_path),
        **{
            "rollout.engine_kwargs": {"model": other, "tokenizer": mine, "max_model_len": 160},
            "rollout.sampling_kwargs": {"ignore_eos": True},
            **changes,
        },
    )

    async def check() -> None:
        prepared = launch.prepare(cfg, lambda line: None)
        roles = RunProcesses(prepared).roles
        await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
        await roles.sync.connect()
        first = await roles.sync((0, 0))
        assert first["canary/logprob_diff_max"] < 1e-4
        await compare(roles, mine)
        await roles.actor.update(batch_for_update())
        await roles.sync((0, 1))
        saved = str(tmp_path / "after")
        await roles.actor.save_hf(saved)
        await compare(roles, saved)
        assert moved(mine, saved, trained), (
            "the update changed nothing, so the second comparison proves nothing"
        )
        await roles.rollout.stop()

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()


async def compare(roles, path: str) -> None:
    """Every replica, so each prompt goes to each of them."""
    n = len(roles.rollout.replicas)
    repeated = [
        Prompt((k, p.id[1]), p.ids, p.text, p.ground_truth) for p in prompts() for k in range(n)
    ]
    samples, _ = await roles.rollout.generate(repeated, "test", Sampling(1, 0.0, None))
    expected = hf_answers(path, [p.ids for p in prompts()], 16)
    diffs = []
    for sample in samples:
        ids, logs = expected[sample.prompt_id[1]]
        assert sample.response_ids.tolist() == ids, "greedy tokens differ from HF's"
        # At temperature 0 vLLM reports the log-probs of the unscaled logits.
        diffs.append(np.abs(sample.log_probs - logs))
    assert len(samples) == 6 * n
    assert np.concatenate(diffs).mean() <= 1e-5
    assert np.concatenate(diffs).max() <= 1e-4


def moved(before: str, after: str, trained: str) -> bool:
    from safetensors.torch import load_file

    a, b = (load_file(Path(p) / "model.safetensors") for p in (before, after))
    return all(
        (a[n] != b[n]).float().mean() > 0.5 if trained in n else torch.equal(a[n], b[n]) for n in a
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_sync_whose_canary_fails_stops_the_run(models, tmp_path):
    """A trainer whose layers compute something else than the engine's: same names, same bytes,
    other rope base."""
    import json

    from one_step_off.cluster.errors import SyncError
    from one_step_off.runtime import launch

    mine = models(tied=True, seed=2)
    twisted = shutil.copytree(mine, tmp_path / "twisted")
    config = json.loads((twisted / "config.json").read_text())
    for holder in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in holder:
            holder["rope_theta"] = 37.0
    (twisted / "config.json").write_text(json.dumps(config))
    cfg = tiny_config(
        mine, str(tmp_path / "run"), **{"rollout.engine_kwargs": {"model": str(twisted)}}
    )
    with pytest.raises(
        SyncError, match=r"canary after the sync of version 0: rollout replica 0.*canary_tolerance"
    ):
        launch.run(cfg)
    assert not (tmp_path / "run" / "ledger.jsonl").exists(), (
        "nothing may be trained after a failed canary"
    )


@pytest.mark.slow  # the one with the killed replica goes further
@pytest.mark.timeout(200)
def test_a_sync_that_breaks_inside_vllm_is_named_and_leaves_the_replica_unused(models, tmp_path):
    """The sender says nothing: the engine's receiver runs into its time limit."""
    import ray

    from one_step_off.cluster.errors import RoleError, SyncError
    from one_step_off.cluster.remote_calls import name_failures
    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    cfg = tiny_config(models(), str(tmp_path), **{"weight_sync.timeout_s": 3.0})

    async def check() -> None:
        roles = RunProcesses(launch.prepare(cfg, lambda line: None)).roles
        await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
        await roles.sync.connect()
        await roles.sync((0, 0))
        replica = roles.rollout.replicas[0]
        with pytest.raises(
            SyncError, match=r"rollout 0: receiver 0, phase header, bucket 0 of \d+: .*[Tt]imed out"
        ):
            await name_failures("rollout 0", replica.sync.remote((0, 1)))
        with pytest.raises(RoleError, match="rollout replica 0 has no verified weights"):
            await name_failures(
                "rollout 0", replica.rollout.remote(prompts(), Sampling(1, 1.0, None))
            )

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()


def kill_at_third_bucket(worker, pid: int) -> None:
    """On a trainer rank: end another process while this one packs."""
    honest = worker.sender._pack
    packed = []

    def pack(*args):
        packed.append(1)
        if len(packed) == 3:
            os.kill(pid, signal.SIGKILL)
        honest(*args)

    worker.sender._pack = pack


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"


def assert_ended(processes: list) -> None:
    """The child processes of a replica, as (pid, start time), have ended."""
    assert processes
    left = [pid for pid, _ in processes if is_running(pid)]
    assert not left, "the engine of the killed replica must not live on"


def two_replicas_config(models, folder: Path, extension: str | None) -> Config:
    """A run of two replicas that begin with another model's weights. `extension`: a module with a
    worker extension that loads into the parameters themselves."""
    model = models(tied=True, seed=2)
    engine = {"model": models(tied=True, seed=1), "tokenizer": model, "max_model_len": 160}
    if extension:
        engine["worker_extension_cls"] = f"{extension}.SyncWorkerExtension"
    changes = {
        "placement.pools": {"rollout": [2], "actor": [1]},
        "rollout.engine_kwargs": engine,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "weight_sync.bucket_mb": 1,
        "weight_sync.mode": "delta",
        "weight_sync.timeout_s": 30.0,
    }
    return tiny_config(model, str(folder), **changes)


@pytest.mark.slow  # test_e2e_chaos.py has a shorter one
@pytest.mark.timeout(400)
@pytest.mark.parametrize("extension", [None, "tests.unpacked_engine"])
def test_a_replica_killed_in_mid_sync_is_left_out_and_comes_back(models, tmp_path, extension):
    """kill -9 between two buckets. The other replica receives everything again without a restart,
    also where the broken sync has written into its parameters (`extension`). The killed one is
    restarted meanwhile, and takes part from the next sync on."""
    import ray

    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    cfg = two_replicas_config(models, tmp_path / "run", extension)
    messages: list[str] = []

    async def check() -> None:
        roles = RunProcesses(launch.prepare(cfg, lambda line: None)).roles
        roles.rollout.on_message = messages.append
        await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
        await roles.sync.connect()
        first = await roles.sync((0, 0))
        assert first["sync/bytes"] >= 3 << 20
        assert first["sync/in_place"] == bool(extension)
        await roles.actor.update(batch_for_update())
        survivor = roles.rollout.replicas[0]
        pid = await roles.rollout.replicas[1].__ray_call__.remote(lambda replica: os.getpid())
        former = roles.rollout.supervisor.child_processes[1]
        await roles.actor.ranks[0].__ray_call__.remote(kill_at_third_bucket, pid)
        begin = time.monotonic()
        await roles.sync((0, 1))
        assert time.monotonic() - begin < 60, "no rank waits for the killed replica"
        assert roles.rollout.active == [0]
        assert len(messages) == 1
        assert "rollout 1" in messages[0]
        saved = str(tmp_path / "after")
        await roles.actor.save_hf(saved)
        await compare(roles, saved)
        # The trainer trains meanwhile: what was sent is kept.
        await roles.actor.update(batch_for_update())
        await roles.rollout.supervisor.restart_tasks[1]
        assert roles.rollout.active == [0, 1]
        assert roles.rollout.replicas[0] is survivor
        assert await roles.rollout.supervisor.wait_for_healthy() == [0, 1]
        assert_ended(former)
        await compare(roles, saved)
        await roles.rollout.stop()

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()
