"""weight_sync.mode=delta through real engines: changes written straight into the parameters, and by
way of a mirror."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from one_step_off.config.schema import Config
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config
from tests.e2e.test_sync import compare, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def perturb(worker: Any) -> None:
    """What a small learning rate does to the weights of a rank: a few of each tensor move a
    little."""
    import torch

    with torch.no_grad():
        for parameter in worker.model.parameters():
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            own.mul_(1 + 0.01 * torch.randn_like(own) * (torch.rand_like(own) < 0.01))
    worker.version += 1


async def answers(roles: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probs, one prompt at a time: a batch's size may move the last
    bit."""
    out = []
    for prompt in prompts():
        samples, _ = await roles.rollout.generate([prompt], "test", Sampling(1, 0.0, None))
        out.append((samples[0].response_ids.tolist(), samples[0].log_probs.tolist()))
    return out


def delta_config(models, folder: Path, packed: bool, dtype: str) -> Config:
    """A run whose engine begins with another model's weights, and receives changes alone."""
    model = models(tied=True, seed=2)
    engine = {"model": models(tied=True, seed=1), "tokenizer": model, "max_model_len": 160}
    if not packed:
        engine["worker_extension_cls"] = "tests.unpacked_engine.SyncWorkerExtension"
    changes = {
        "model.dtype": dtype,
        "placement.pools": {"rollout": [1], "actor": [2]},
        "rollout.engine_kwargs": engine,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "weight_sync.mode": "delta",
        "weight_sync.full_every": 20,
    }
    return tiny_config(model, str(folder), **changes)


@pytest.mark.parametrize(
    ("packed", "dtype", "syncs"),
    [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((False, "float32", 8), *((p, "bfloat16", 50) for p in (False, True)))
    ],
)
def test_changes_leave_an_engine_as_a_full_sync_would(models, tmp_path, packed, dtype, syncs):
    import ray

    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    cfg = delta_config(models, tmp_path, packed, dtype)

    async def check() -> None:
        roles = RunProcesses(launch.prepare(cfg, lambda line: None)).roles
        await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
        await roles.sync.connect()
        found = [await roles.sync((0, 0))]
        first = await answers(roles)
        for version in range(1, syncs + 1):
            await asyncio.gather(*(rank.__ray_call__.remote(perturb) for rank in roles.actor.ranks))
            found.append(await roles.sync((0, version)))
        assert {metrics["sync/in_place"] for metrics in found} == {float(not packed)}
        full = found[0]["sync/full_bytes"]
        assert [i for i, metrics in enumerate(found) if metrics["sync/bytes"] >= full] == [
            *range(0, syncs + 1, 20)
        ]
        changed = [await answers(roles), await bits(roles)]
        assert changed[0] != first, (
            "the updates changed nothing, so the comparison below proves nothing"
        )
        if dtype == "float32":
            await roles.actor.save_hf(str(tmp_path / "after"))
            await compare(roles, str(tmp_path / "after"))
        await roles.sync._regroup([0])  # the next sync is full, and loaded layer by layer
        metrics = await roles.sync((0, syncs))
        assert metrics["sync/bytes"] >= full
        assert metrics["sync/in_place"] == float(not packed)
        assert [await answers(roles), await bits(roles)] == changed
        await roles.rollout.stop()

    async def bits(roles: Any) -> Any:
        return (
            None if packed else await roles.rollout.replicas[0]._call_workers.remote("fingerprint")
        )

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()
