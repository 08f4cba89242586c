"""weight_sync.mode=delta through real engines. An engine applies the changes directly to its
parameters, or, where vLLM packs these, to a plain copy of them that it packs again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from one_step_off.config.schema import Config
from one_step_off.ray_trainer import RunGroups
from one_step_off.weight_sync.kind_choice import KindChoice
from tests.conftest import tiny_config
from tests.e2e.sync_checks import (
    GREEDY,
    assert_engines_equal_transformers,
    make_prompts,
    run_with_ray,
    start_roles,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

FULL_EVERY = 20


def perturb(worker: Any) -> None:
    """Move a few elements of each tensor of a rank a little, as a small learning rate does."""
    import torch

    with torch.no_grad():
        for parameter in worker.model.parameters():
            shard = parameter
            if hasattr(parameter, "to_local"):
                shard = parameter.to_local()
            chosen = torch.rand_like(shard) < 0.01
            shard.mul_(1 + 0.01 * torch.randn_like(shard) * chosen)
    worker.version += 1


@dataclass
class EngineState:
    """What an engine's weights compute, and their bits.

    Attributes:
        token_ids: the greedy response to each prompt.
        log_probs: of these tokens.
        fingerprint: the hash of all parameters, by worker; None where vLLM packs them.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]
    fingerprint: Any


async def engine_state(roles: RunGroups, is_packed: bool) -> EngineState:
    """Ask for one prompt at a time: the size of a batch may move the last bit."""
    token_ids = []
    log_probs = []
    for prompt in make_prompts():
        samples, _ = await roles.rollout.generate([prompt], "test", GREEDY)
        token_ids.append(samples[0].response_ids.tolist())
        log_probs.append(samples[0].log_probs.tolist())
    fingerprint = None
    if not is_packed:
        fingerprint = await roles.rollout.replicas[0].call_workers.remote("fingerprint")
    return EngineState(token_ids, log_probs, fingerprint)


def delta_config(models: Any, folder: Path, is_packed: bool, dtype: str) -> Config:
    """One engine and two trainer ranks that start from different weights, with delta syncs.

    Args:
        models: the fixture that builds tiny models.
        folder: the run's folder.
        is_packed: whether vLLM packs the parameters for its CPU kernels.
        dtype: of the model.
    """
    trainer_model = models(tied=True, seed=2)
    engine_kwargs = {
        "model": models(tied=True, seed=1),
        "tokenizer": trainer_model,
        "max_model_len": 160,
    }
    if not is_packed:
        engine_kwargs["worker_extension_cls"] = "tests.unpacked_engine.SyncWorkerExtension"
    settings = {
        "model.dtype": dtype,
        "placement.pools": {"rollout": [1], "actor": [2]},
        "rollout.engine_kwargs": engine_kwargs,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "weight_sync.mode": "delta",
        "weight_sync.full_every": FULL_EVERY,
    }
    return tiny_config(trainer_model, str(folder), **settings)


class OnlyDeltas(KindChoice):
    """Whatever takes less time on this machine: what is tested here are deltas."""

    def wants_full(self) -> bool:
        return False


async def sync_perturbed_weights(roles: RunGroups, version: int) -> dict[str, float]:
    """Move the weights of all ranks, and sync them. Returns the metrics of the sync."""
    await asyncio.gather(*(rank.__ray_call__.remote(perturb) for rank in roles.actor.ranks))
    return await roles.sync((0, version))


def assert_full_syncs(syncs: list[dict[str, float]]) -> None:
    """All syncs but the first, which proves the layout, are in place, and every FULL_EVERY-th one
    sends all weights."""
    assert syncs[0]["sync/in_place"] == 0.0
    assert {metrics["sync/in_place"] for metrics in syncs[1:]} == {1.0}
    full_bytes = syncs[0]["sync/full_bytes"]
    full_syncs = []
    for index, metrics in enumerate(syncs):
        if metrics["sync/bytes"] >= full_bytes:
            full_syncs.append(index)
    assert full_syncs == list(range(0, len(syncs), FULL_EVERY))


async def assert_a_full_sync_changes_nothing(
    roles: RunGroups, version: int, full_bytes: float, is_packed: bool
) -> None:
    """Send all weights of this version again: the engine loads them layer by layer."""
    before = await engine_state(roles, is_packed)
    await roles.sync._regroup([0])  # after it the next sync is full
    roles.sync.layouts.forget_proofs(roles.rollout.replicas)  # and brings whole tensors
    metrics = await roles.sync((0, version))
    assert metrics["sync/bytes"] >= full_bytes
    assert metrics["sync/in_place"] == 0.0
    assert await engine_state(roles, is_packed) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_packed", "dtype", "sync_count"),
    [(False, "float32", 8), (False, "bfloat16", 50), (True, "bfloat16", 50)],
)
def test_changes_leave_an_engine_as_a_full_sync_would(
    models, tmp_path, is_packed, dtype, sync_count
):
    cfg = delta_config(models, tmp_path, is_packed, dtype)
    updated_model = str(tmp_path / "after")

    async def check() -> None:
        roles = await start_roles(cfg)
        roles.sync.kind_choice = OnlyDeltas(FULL_EVERY)
        syncs = [await roles.sync((0, 0))]
        before = await engine_state(roles, is_packed)
        for version in range(1, sync_count + 1):
            syncs.append(await sync_perturbed_weights(roles, version))
        assert_full_syncs(syncs)
        after = await engine_state(roles, is_packed)
        answers_changed = after.token_ids != before.token_ids or after.log_probs != before.log_probs
        assert answers_changed, (
            "the updates changed nothing, so the comparison below proves nothing"
        )
        if dtype == "float32":
            await roles.actor.save_hf(updated_model)
            await assert_engines_equal_transformers(roles, updated_model)
        full_bytes = syncs[0]["sync/full_bytes"]
        await assert_a_full_sync_changes_nothing(roles, sync_count, full_bytes, is_packed)
        await roles.rollout.stop()

    run_with_ray(cfg, check)
