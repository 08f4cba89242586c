"""Runs the arms of the weight-sync benchmark on one set of processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmarks.common.processes import memory, reset_peak_memory
from benchmarks.common.runs import rotated
from benchmarks.weight_sync import trainer
from benchmarks.weight_sync.arms import ARMS, Arm, Took
from benchmarks.weight_sync.report import summarize
from benchmarks.weight_sync.team import Team
from one_step_off.config.schema import Config
from one_step_off.runtime.prepare import prepare
from one_step_off.runtime.processes import RunProcesses

RAW = "raw"
EXTENSION = "benchmarks.weight_sync.engine.BenchmarkExtension"
UNPACKED_EXTENSION = "benchmarks.weight_sync.unpacked_engine.BenchmarkExtension"
WARM_UP_REPEAT = -1


@dataclass(frozen=True)
class Settings:
    """What the flags set.

    Attributes:
        arms: names of the arms, in addition to the raw broadcast.
        repeats: measured updates of each arm.
        changed: share of the elements that change between repeats.
        apart: one arm after the other, each with the raw broadcast alone; else all arms at once.
        unpacked: vLLM does not pack its parameters for CPU kernels.
    """

    arms: list[str]
    repeats: int
    changed: float
    apart: bool
    unpacked: bool = False


def start_processes(cfg: Config, extension: str = EXTENSION) -> tuple[Any, RunProcesses]:
    """Start the product's processes, with the benchmark's methods in the engines'."""
    from benchmarks.weight_sync.replica import BenchmarkReplica
    from one_step_off.runtime import persistent_actors

    prepared = prepare(cfg, print)
    # After the validation: users may not set it.
    prepared.cfg.rollout.engine_kwargs = {"worker_extension_cls": extension}
    persistent_actors.RolloutReplica = BenchmarkReplica
    return prepared, RunProcesses(prepared)


async def first_run_with_memory(team: Team, arm: Arm, version: int) -> dict[str, int]:
    """Set the arm up and run it once.

    Returns:
        "sender" and "receiver": resident bytes at the peak above those before, in the largest
        process.
    """
    worker_pids = await team.call_replicas("call_workers", "bench_process_id")
    pids = {
        "sender": await team.run_on_ranks(trainer.process_id),
        "receiver": [pid for replica_pids in worker_pids for pid in replica_pids],
    }
    await arm.prepare()
    before = {pid: memory(pid, "VmRSS") for side_pids in pids.values() for pid in side_pids}
    for pid in before:
        reset_peak_memory(pid)
    await arm.setup()
    await arm.run(version)
    return {
        side: max(memory(pid, "VmHWM") - before[pid] for pid in side_pids)
        for side, side_pids in pids.items()
    }


async def start_arm(team: Team, arm: Arm, version: int) -> tuple[int, dict[str, Any]]:
    """An arm's setup and first updates, from weights that the canary tells from the engine's.

    Args:
        team: the processes.
        arm: to set up.
        version: of the weights now.

    Returns:
        The version reached; and the arm's memory, canary and description.

    Raises:
        RuntimeError: the arm did not load, or the canary cannot tell the weights apart.
    """
    loads = arm.name != RAW
    first_memory: dict[str, int] = {}
    difference = None
    for number, every in enumerate(arm.sign_changes):
        version += 1
        await team.run_on_ranks(trainer.flip_signs, every, version)
        if loads and await team.canary_difference(version) is not None:
            raise RuntimeError(
                f"{arm.name}: the canary does not detect that one in {every} elements changed "
                "its sign"
            )
        if number == 0:
            first_memory = await first_run_with_memory(team, arm, version)
        else:
            await arm.run(version)
        difference = await team.canary_difference(version)
        if loads and difference is None:
            raise RuntimeError(f"{arm.name}: the engine does not hold the trainer's weights")
    print(f"{arm.name}: set up, {'loaded and checked' if loads else 'ran'}", flush=True)
    found = {
        "memory": first_memory if loads else {},
        "canary_diff": difference,
        "said": arm.description,
    }
    return version, found


async def repeat_arms(
    team: Team, arms: list[Arm], version: int, settings: Settings
) -> tuple[int, dict[str, list[Took]]]:
    """Run the arms in alternating order.

    A first repeat does not count: in it delta sends what the starts of all arms have changed.

    Returns:
        The version reached; and per arm what each run took.

    Raises:
        RuntimeError: an engine does not hold the trainer's weights after an update.
    """
    runs: dict[str, list[Took]] = {arm.name: [] for arm in arms}
    for repeat in range(WARM_UP_REPEAT, settings.repeats):
        version += 1
        await team.run_on_ranks(trainer.nudge, settings.changed, version)
        for arm in rotated(arms, repeat):
            took = await arm.run(version)
            if repeat != WARM_UP_REPEAT:
                runs[arm.name].append(took)
            if arm.name != RAW and await team.canary_difference(version) is None:
                raise RuntimeError(
                    f"{arm.name}, repeat {repeat}: the engine does not hold the trainer's weights"
                )
    return version, runs


def groups_of_arms(arms: list[Any], apart: bool) -> list[list[Any]]:
    """Which arms hold their buffers at the same time.

    Args:
        arms: the raw broadcast, and the others.
        apart: each of the others alone with the raw broadcast; else all that can share the
            engine's model.
    """
    raw, *others = arms
    if not others:
        return [arms]
    together = [] if apart else [arm for arm in others if not arm.needs_own_model]
    groups = [[raw, *together]] if together else []
    return groups + [[raw, arm] for arm in others if arm not in together]


async def measure_group(
    team: Team, arms: list[Arm], version: int, settings: Settings
) -> tuple[int, dict[str, Any], list[Took]]:
    """Start and repeat the arms of a group, and free what they hold.

    Returns:
        The version reached; per arm its entry in result.json; the runs of the raw broadcast.
    """
    started = {}
    for arm in arms:
        version, started[arm.name] = await start_arm(team, arm, version)
    version, runs = await repeat_arms(team, arms, version, settings)
    raw_seconds = [run.seconds for run in runs[RAW]]
    found = {arm.name: started[arm.name] | summarize(runs[arm.name], raw_seconds) for arm in arms}
    for arm in arms:
        await arm.leave()
    return version, found, runs[RAW]


async def measure(cfg: Config, settings: Settings) -> dict[str, Any]:
    """Run all arms. Returns the figures of result.json."""
    extension = UNPACKED_EXTENSION if settings.unpacked else EXTENSION
    prepared, processes = start_processes(cfg, extension)
    roles = processes.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    team = Team(roles, prepared.device, prepared.canary, processes.host)
    await team.join_group()
    all_arms = [ARMS[name](name, team) for name in dict.fromkeys([RAW, *settings.arms])]
    arms = [arm for arm in all_arms if not arm.why_not]
    version = 0
    found: dict[str, Any] = {}
    raw_runs: list[Took] = []
    for group in groups_of_arms(arms, settings.apart):
        version, group_found, group_raw_runs = await measure_group(team, group, version, settings)
        found |= group_found
        raw_runs += group_raw_runs
    # Of the raw broadcast the runs of all groups count.
    found[RAW] |= summarize(raw_runs, [run.seconds for run in raw_runs])
    tensors = len(await team.run_on_rank_0(trainer.metadata))
    await processes.end()
    return {
        "bytes": team.total_bytes,
        "tensors": tensors,
        "repeats": settings.repeats,
        "arms": found,
        "skipped": {arm.name: arm.why_not for arm in all_arms if arm.why_not},
    }
