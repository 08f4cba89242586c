"""Runs whose processes die: whether another attempt begins, and what a checkpoint saves."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.checkpoint.in_flight import restored_in_flight
from one_step_off.cluster import remote_calls
from one_step_off.cluster.errors import PhaseTimeout, ProcessDied, RoleError, SyncError
from one_step_off.config.errors import ConfigError
from one_step_off.ray_trainer import Pipeline, Resumed
from one_step_off.rollout.replica_supervisor import NoReplica
from one_step_off.runtime.processes import RunProcesses
from tests.unit.ray_trainer.stand_ins import FakeSync, MemoryCheckpointer, World, build
from tests.unit.stand_ins import ActorMethod, StandInActor


class ActorDiedError(Exception):
    """Named as Ray's."""


WELL = ActorMethod(None)
GONE = ActorMethod(ActorDiedError("gone"))
HANGS = ActorMethod(None, delay=30.0)


@pytest.mark.parametrize(
    ("error", "other_rank", "begins"),
    [
        (ProcessDied("actor 0"), WELL, True),
        (PhaseTimeout("step 3, actor"), WELL, True),
        (SyncError("trainer rank 0 waited in vain"), GONE, True),
        (SyncError("trainer rank 0 waited in vain"), HANGS, True),
        (ConfigError("checkpoint: the part of the actor does not fit its model"), GONE, True),
        (ConfigError("checkpoint: the part of the actor does not fit its model"), WELL, False),
        (SyncError("checksum"), WELL, False),
        (RoleError("rollout 0: the reward raised"), WELL, False),
        (ValueError("a mistake of ours"), GONE, False),
        (NoReplica("all starts failed"), GONE, False),
    ],
)
def test_another_attempt_begins_only_where_a_process_is_gone_or_hangs(
    error, other_rank, begins, monkeypatch
):
    """A process that waited for that one may have failed first. Real processes that are busy:
    tests/unit/weight_sync/test_sync_failures.py."""
    monkeypatch.setattr(remote_calls, "LIVENESS_TIMEOUT_S", 0.2)
    ranks = [StandInActor(alive=None), StandInActor(alive=other_rank)]
    rollout = SimpleNamespace(replicas=[], active=[], has_answered=True)
    actor = SimpleNamespace(ranks=ranks, has_answered=True)
    team: Any = SimpleNamespace(roles=SimpleNamespace(rollout=rollout), groups={"actor": actor})
    assert asyncio.run(RunProcesses.is_process_failure(team, error)) is begins


class KeepsList(MemoryCheckpointer):
    """A checkpointer that keeps in memory what it receives."""

    def __init__(self) -> None:
        self.saved: list[tuple] = []

    def keep(self, step, samples, state):
        self.saved.append((step, samples, state))


def resumed_pipeline(fresh: Pipeline, state: dict[str, Any], samples: Any) -> Pipeline:
    """A pipeline with the parts of a fresh one that starts with a checkpoint."""
    fresh.stream.load_state_dict(state["stream"])
    by_row = {prompt.id[1]: prompt for prompt in fresh.stream.prompts}
    in_flight = restored_in_flight(state, samples or [], lambda prompt: by_row[prompt[1]])
    resumed = Resumed(state["step"], in_flight)
    return Pipeline(fresh.cfg, fresh.roles, fresh.stream, None, fresh.tracker, None, resumed)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("where", ["generate", "sync"])
def test_with_no_replica_left_a_checkpoint_is_written_and_no_prompt_is_skipped(
    tmp_path, staleness, where
):
    """At step 3. The trainer ends the step that it trains. The checkpoint has the samples that are
    complete, and the data position before the others: resumed, every prompt is trained on once."""
    steps = 7
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, steps, staleness, rows=30)
    checkpointer: Any = KeepsList()
    pipeline.checkpointer = checkpointer
    roles: Any = pipeline.roles
    generate = roles.rollout.generate

    async def generate_until_step_3(prompts, purpose, sampling, *on_group):
        if where == "generate" and purpose == "step 3":
            await asyncio.sleep(0.005)  # in the middle of the update beside it
            raise NoReplica("none is left")
        return await generate(prompts, purpose, sampling)

    class SyncUntilStep3(FakeSync):
        async def __call__(self, stamp, expected=None):
            if where == "sync" and stamp[1] == 3:
                raise NoReplica("none is left")
            return await super().__call__(stamp, expected)

    roles.rollout.generate = generate_until_step_3
    roles.sync = SyncUntilStep3(world)
    with pytest.raises(NoReplica, match="none is left"):
        asyncio.run(pipeline.fit())
    ((step, samples, state),) = checkpointer.saved
    assert step == len(world.trained) == world.version
    if staleness < 3:
        # Beside a sync of v3 the trainer still trains step 3, whose samples it has.
        trains_step_3 = staleness == 1 and where == "sync"
        assert samples is None
        assert step == (4 if trains_step_3 else 3)
    else:
        # Steps 1 to 3 have the same weights, and a failure of one is seen by all.
        assert step == 4 if where == "sync" else step <= 3

    world.engine_version = None
    again = build(tmp_path / "again", world, steps, staleness, rows=30)
    asyncio.run(resumed_pipeline(again, state | {"step": step}, samples).fit())
    assert [trained.step for trained in world.trained] == list(range(steps))
    trained_prompts = [prompt for trained in world.trained for prompt in trained.prompts]
    fresh = build(tmp_path / "fresh", World(random.Random(0)), steps, staleness, rows=30).stream
    drawn = [prompt.id for _ in range(steps) for prompt in fresh.next_batch()]
    assert trained_prompts == drawn, "each once, in the order of the data"
