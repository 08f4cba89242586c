"""The noise of samples that have no seed of their own: another one for each engine, and after each of its starts."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.rollout.vllm_replica import Sampling, engine_args, engine_seed
from tests.conftest import tiny_config

PLACES = [(seed, incarnation, replica, start) for seed in (0, 1) for incarnation in (0, 1, 2) for replica in range(9)
          for start in range(4)]  # fmt: skip


def test_every_engine_has_a_seed_of_its_own():
    seeds = {place: engine_seed(*place) for place in PLACES}
    assert len(set(seeds.values())) == len(PLACES)
    assert all(0 <= seed < 2**31 for seed in seeds.values()), "numpy takes 32 bits"
    assert seeds == {place: engine_seed(*place) for place in PLACES}, (
        "a run that is repeated has the same"
    )


def test_numbers_do_not_run_together():
    assert engine_seed(1, 1, 11, 0) != engine_seed(1, 11, 1, 0) != engine_seed(11, 1, 1, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_gets_it(models, device):
    """One seed for all workers of an engine, so those of tensor parallelism sample alike."""
    from vllm import AsyncEngineArgs

    cfg = Config()
    cfg.model.path = models()
    seeds = [engine_seed(cfg.trainer.seed, 0, replica, 0) for replica in (0, 1)]
    assert [
        AsyncEngineArgs(**engine_args(cfg, device, seed)).create_model_config().seed
        for seed in seeds
    ] == seeds


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(400)
def test_no_two_engines_sample_alike_unseeded(models, tmp_path):
    """Real engines, as a run starts them: two replicas, one after its process was killed, and one of a later incarnation
    give other answers to the same three requests; with seeds they give the same."""
    import ray

    from one_step_off.runtime import launch
    from one_step_off.runtime.processes import RunProcesses

    pools = {"rollout": [2], "actor": [1]}
    cfg = tiny_config(
        models(),
        str(tmp_path),
        **{"placement.pools": pools, "rollout.sampling_kwargs": {"ignore_eos": True}},
    )
    prompts = [Prompt((0, i), np.arange(5 + i, 40 + i, dtype=np.int32), "", "1") for i in range(3)]

    async def answers(replica, seed: int | None = None) -> list[list[int]]:
        """One request after the other, so that nothing but the seed decides."""
        samples = [
            await replica.rollout.remote([prompt], Sampling(1, 1.0, seed)) for prompt in prompts
        ]
        return [sample.response_ids.tolist() for (sample,) in samples]

    async def started(prepared, incarnation: int) -> RunProcesses:
        team = RunProcesses(prepared, incarnation)
        await team.setup()
        await team.roles.sync((incarnation, 0))
        return team

    async def check() -> None:
        prepared = launch.prepare(cfg, lambda line: None)
        team = await started(prepared, incarnation=0)
        rollout = team.roles.rollout
        found = [await answers(replica) for replica in rollout.replicas]
        assert await answers(rollout.replicas[0], 7) == await answers(rollout.replicas[1], 7)
        for _ in range(2):
            pid = await rollout.replicas[0].__ray_call__.remote(lambda replica: os.getpid())
            os.kill(pid, signal.SIGKILL)
            rollout.mark_failed(0, "killed by the test")
            await rollout.restart_tasks[0]
            found.append(await answers(rollout.replicas[0]))
        await team.end()
        team = await started(prepared, incarnation=1)
        found += [await answers(replica) for replica in team.roles.rollout.replicas]
        await team.end()
        for k in range(len(prompts)):
            kth = [tuple(one[k]) for one in found]
            assert len(set(kth)) == len(kth) == 6, f"request {k}: {kth}"

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()
