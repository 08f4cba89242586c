"""The noise of samples that have no seed of their own: another one for each engine, and after each
of its starts."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.rollout.sampling import Sampling, engine_seed
from tests.conftest import tiny_config

# (seed of the run, attempt, replica, start)
PLACES = list(itertools.product((0, 1), (0, 1, 2), range(9), range(4)))


def test_every_engine_has_a_seed_of_its_own():
    seeds = {place: engine_seed(*place) for place in PLACES}
    assert len(set(seeds.values())) == len(PLACES)
    assert all(0 <= seed < 2**31 for seed in seeds.values()), "numpy takes 32 bits"
    repeated = {place: engine_seed(*place) for place in PLACES}
    assert seeds == repeated, "a repeated run has the same seeds"


def test_numbers_do_not_run_together():
    seeds = {engine_seed(1, 1, 11, 0), engine_seed(1, 11, 1, 0), engine_seed(11, 1, 1, 0)}
    assert len(seeds) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_gets_it(models, device):
    """One seed for all workers of an engine, so that workers of tensor parallelism sample alike."""
    from vllm import AsyncEngineArgs

    cfg = Config()
    cfg.model.path = models()
    for replica in (0, 1):
        seed = engine_seed(cfg.trainer.seed, 0, replica, 0)
        model_config = AsyncEngineArgs(**engine_args(cfg, device, seed)).create_model_config()
        assert model_config.seed == seed


PROMPTS = [Prompt((0, i), np.arange(5 + i, 40 + i, dtype=np.int32), "", "1") for i in range(3)]


async def answers_of(replica, seed: int | None = None) -> list[tuple[int, ...]]:
    """The responses to PROMPTS, one request after the other, so that nothing but the seed
    decides."""
    answers = []
    for prompt in PROMPTS:
        (sample,) = await replica.rollout.remote([prompt], Sampling(1, 1.0, seed))
        answers.append(tuple(sample.response_ids.tolist()))
    return answers


async def start_processes(prepared, attempt: int):
    from one_step_off.runtime.processes import RunProcesses

    team = RunProcesses(prepared, attempt)
    await team.setup()
    await team.roles.sync((attempt, 0))
    return team


async def kill_and_restart(rollout, i: int) -> None:
    replica = rollout.replicas[i]
    pid = await replica.__ray_call__.remote(lambda replica: os.getpid())
    os.kill(pid, signal.SIGKILL)
    rollout.supervisor.mark_failed(i, "killed by the test")
    await rollout.supervisor.restart_tasks[i]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_two_engines_sample_alike_unseeded(models, tmp_path):
    """Real engines, as a run starts them: two replicas, one after its process was killed twice, and
    two of a later attempt give other answers to the same requests; with seeds they give the
    same."""
    import ray

    from one_step_off.runtime import launch

    cfg = tiny_config(
        models(),
        str(tmp_path),
        **{
            "placement.pools": {"rollout": [2], "actor": [1]},
            "rollout.sampling_kwargs": {"ignore_eos": True},
        },
    )

    async def check() -> None:
        prepared = launch.prepare(cfg, lambda line: None)
        team = await start_processes(prepared, attempt=0)
        rollout = team.roles.rollout
        answers = [await answers_of(replica) for replica in rollout.replicas]
        seeded = [await answers_of(replica, 7) for replica in rollout.replicas]
        assert seeded[0] == seeded[1]
        for _ in range(2):
            await kill_and_restart(rollout, 0)
            answers.append(await answers_of(rollout.replicas[0]))
        await team.end()
        team = await start_processes(prepared, attempt=1)
        answers += [await answers_of(replica) for replica in team.roles.rollout.replicas]
        await team.end()
        assert len(answers) == 6
        for k in range(len(PROMPTS)):
            kth_answers = {engine_answers[k] for engine_answers in answers}
            assert len(kth_answers) == 6, f"request {k}: {kth_answers}"

    launch.start_ray(cfg)
    try:
        asyncio.run(check())
    finally:
        ray.shutdown()
