"""An engine with quantized weights and KV cache, with real Ray, FSDP2, gloo and vLLM: its syncs
take effect, its log-probs are those of what it samples from, and a layer that stays at the version
before is noticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from one_step_off.ray_trainer import RunGroups
from one_step_off.rollout.sampling import Sampling
from tests.conftest import tiny_config
from tests.e2e.sync_checks import batch_for_update, make_prompts, run_with_ray, start_roles
from tests.stale_engine import STALE_LAYER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


async def mean_difference(roles: RunGroups) -> float:
    """Of the engine's and the trainer's log-probs of the same tokens, in nats."""
    ids = [prompt.ids for prompt in make_prompts()]
    replica = roles.rollout.replicas[0]
    engine = np.concatenate([await replica.score.remote([sequence]) for sequence in ids], axis=None)
    trainer = np.concatenate(await roles.actor.score(ids))
    return float(np.abs(engine.ravel() - trainer).mean())


async def assert_log_probs_are_the_engines(roles: RunGroups) -> None:
    """What a sample says of its tokens is what the engine says of them afterwards."""
    samples, _ = await roles.rollout.generate(make_prompts(), "test", Sampling(1, 1.0, None))
    prompts = {prompt.id: prompt.ids for prompt in make_prompts()}
    for sample in samples:
        ids = np.concatenate([prompts[sample.prompt_id], sample.response_ids])
        (scores,) = await roles.rollout.replicas[0].score.remote([ids])
        own = scores[len(ids) - 1 - len(sample.log_probs) :]
        assert np.abs(own - sample.log_probs).max() < 0.1


@pytest.mark.ci
def test_syncs_take_effect_and_a_stale_layer_ends_the_attempt(models, tmp_path):
    """The engine starts from other weights than the trainer."""
    from one_step_off.cluster.errors import SyncError

    trainer_model = models(tied=True, seed=2)
    engine_kwargs = {
        "model": models(tied=True, seed=1),
        "tokenizer": trainer_model,
        "max_model_len": 160,
        "worker_extension_cls": "tests.stale_engine.SyncWorkerExtension",
    }
    settings: dict[str, Any] = {
        "model.dtype": "bfloat16",
        "rollout.quantization": "fp8_per_channel",
        "rollout.kv_cache_dtype": "fp8",
        "rollout.engine_kwargs": engine_kwargs,
        "rollout.sampling_kwargs": {"ignore_eos": True},
        "actor.lr": 1e-2,
    }
    cfg = tiny_config(trainer_model, str(tmp_path), **settings)

    async def check() -> None:
        roles = await start_roles(cfg)
        metrics = await roles.sync((0, 0))
        quantization = await mean_difference(roles)
        await assert_log_probs_are_the_engines(roles)
        await roles.actor.update(batch_for_update())
        stale = await mean_difference(roles)
        metrics |= await roles.sync((0, 1))
        fresh = await mean_difference(roles)
        print(f"nats: {quantization:.3f}, stale {stale:.3f}, fresh {fresh:.3f}")
        assert stale > 3 * fresh
        assert metrics["sync/in_place"] == 0.0
        assert metrics["canary/logprob_diff_mean"] < 3 * quantization
        await roles.actor.update(batch_for_update())
        with pytest.raises(SyncError, match=f"vLLM has not loaded {STALE_LAYER} again"):
            await roles.sync((0, 2))
        await roles.rollout.stop()

    run_with_ray(cfg, check)


def test_a_worker_that_fails_in_a_load_does_not_keep_the_other_one_waiting(models, tmp_path):
    """Tensor-parallel workers agree on the scales of each layer. The engine is restarted, and the
    sync succeeds: with the limits of this sync, an hour, the test would not end."""
    engine_kwargs = {
        "worker_extension_cls": "tests.stale_engine.FailingWorkerExtension",
        "additional_config": {"fail_once": str(tmp_path / "failed")},
    }
    settings: dict[str, Any] = {
        "model.dtype": "bfloat16",
        "rollout.quantization": "fp8_per_channel",
        "rollout.engine_kwargs": engine_kwargs,
        "rollout.tensor_parallel_size": 2,
        "placement.pools": {"rollout": [2], "actor": [1]},
        "weight_sync.timeout_s": 3600.0,
    }
    cfg = tiny_config(models(tied=True), str(tmp_path), **settings)

    async def check() -> None:
        roles = await start_roles(cfg)
        await roles.sync((0, 0))
        await roles.actor.update(batch_for_update())
        await roles.sync((0, 1))
        assert roles.rollout.supervisor.restarts == 1
        await roles.rollout.stop()

    run_with_ray(cfg, check)
    assert (tmp_path / "failed").exists()
