"""Ways to bring a trainer's weights into vLLM, in one run and in turns, against a raw broadcast of the same bytes.

    python -m benchmarks.weight_sync --out DIR [--model tiny|0.5b|7b|32b] [--ranks N] [--replicas N] [--tp N]
                                     [--arms raw per-tensor gather sharded delta shared file vllm] [--repeats N]
    python -m benchmarks.weight_sync --exposed --out DIR [--repeats N] [--steps N] [--settings "training longer" ...]

Real Ray, FSDP2 and vLLM; every arm uses the same processes (benchmarks/weight_sync/arms.py says what each does). Each update is
checked by the canary, and an arm's first one starts from weights that fail it. Writes result.json, result.md and
weight_sync.png into DIR. `--exposed` measures what a sync adds to the steps of a run (benchmarks/weight_sync/exposed.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import transformers

from benchmarks.common.processes import forget_peak, memory
from benchmarks.weight_sync import arms as sync_arms
from benchmarks.weight_sync import exposed as sync_exposed
from benchmarks.weight_sync import trainer as sync_trainer
from benchmarks.weight_sync.layout import EXTENSION, SHAPES, Layout, make_config
from benchmarks.weight_sync.report import plot, summarise, table
from one_step_off.config.schema import Config
from one_step_off.runtime import launch


def spawn(cfg: Config) -> Any:
    """The product's processes, with the benchmark's methods in the engines'."""
    from benchmarks.weight_sync.replica import BenchReplica
    from one_step_off.runtime import processes as roles

    prepared = launch.prepare(cfg, print)
    prepared.cfg.rollout.engine_kwargs = EXTENSION  # only now: a user may not set it
    roles.RolloutReplica = BenchReplica
    return prepared, roles.RunProcesses(prepared)


async def with_memory(team: sync_arms.Team, arm: sync_arms.Arm, version: int) -> dict[str, int]:
    """Set the arm up and run it once; returns bytes of each side at the peak above those before."""
    pids = {
        "sender": await team.trainers(sync_trainer.process),
        "receiver": [pid for pids in await team.engines("rpc", "bench_process") for pid in pids],
    }
    await arm.prepare()
    before = {pid: memory(pid, "VmRSS") for side in pids.values() for pid in side}
    for pid in before:
        forget_peak(pid)
    await arm.setup()
    await arm.run(version)
    return {
        side: max(memory(pid, "VmHWM") - before[pid] for pid in those)
        for side, those in pids.items()
    }


async def start(
    team: sync_arms.Team, arms: list[sync_arms.Arm], version: int
) -> tuple[int, dict[str, Any]]:
    """Each arm's setup and first updates, from weights that the canary tells from the engine's. Returns the version
    reached, and of each arm memory and what the canary found. Raises RuntimeError: an arm did not load, or the canary
    is blind."""
    found: dict[str, Any] = {}
    for arm in arms:
        loads = arm.name != "raw"
        for first, every in enumerate(arm.changes):
            version += 1
            await team.trainers(sync_trainer.flip, every, version)
            if loads and await team.canary_diff(version) is not None:
                raise RuntimeError(
                    f"{arm.name}: the canary does not see that one in {every} elements changed its sign"
                )
            if first == 0:
                taken = await with_memory(team, arm, version)
            else:
                await arm.run(version)
            diff = await team.canary_diff(version)
            if loads and diff is None:
                raise RuntimeError(f"{arm.name}: the engine does not hold the trainer's weights")
        found[arm.name] = {"memory": taken if loads else {}, "canary_diff": diff, "said": arm.said}
        print(f"{arm.name}: set up, {'loaded and checked' if loads else 'ran'}", flush=True)
    return version, found


async def repeats(
    team: sync_arms.Team, arms: list[sync_arms.Arm], version: int, args: argparse.Namespace
) -> tuple[int, dict[str, list[sync_arms.Took]]]:
    """The arms in turns, each repeat beginning with another one, after one that does not count: in it delta sends what
    the starts of all arms have changed. Returns the version reached, and what each run took."""
    runs: dict[str, list[sync_arms.Took]] = {arm.name: [] for arm in arms}
    for repeat in range(-1, args.repeats):
        version += 1
        await team.trainers(sync_trainer.nudge, args.changed, version)
        turn = repeat % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            runs[arm.name].append(await arm.run(version))
            if arm.name != "raw" and await team.canary_diff(version) is None:
                raise RuntimeError(
                    f"{arm.name}, repeat {repeat}: the engine does not hold the trainer's weights"
                )
    return version, {name: took[1:] for name, took in runs.items()}


def together(arms: list[sync_arms.Arm], apart: bool) -> list[list[sync_arms.Arm]]:
    """Those that hold their buffers at the same time: all of them, or one beside the raw broadcast."""
    raw, *others = arms
    return [[raw, arm] for arm in others] or [arms] if apart else [arms]


async def measure(cfg: Config, args: argparse.Namespace) -> dict[str, Any]:
    """All arms, the first update of each as a warm-up."""
    prepared, spawned = spawn(cfg)
    roles = spawned.roles
    await asyncio.gather(roles.actor.setup(), roles.rollout.setup())
    team = sync_arms.Team(roles, prepared.device, prepared.canary, spawned.host)
    await team.join()
    every = [sync_arms.ARMS[name](team) for name in dict.fromkeys(["raw", *args.arms])]
    skipped = {arm.name: arm.why_not for arm in every if arm.why_not}
    arms = [arm for arm in every if not arm.why_not]
    version, found, every_raw = 0, {}, []
    for group in together(arms, args.apart):
        version, begun = await start(team, group, version)
        version, runs = await repeats(team, group, version, args)
        raws = [run.seconds for run in runs["raw"]]
        every_raw += runs["raw"]
        found |= {arm.name: begun[arm.name] | summarise(runs[arm.name], raws) for arm in group}
        for arm in group:
            await arm.leave()
    found["raw"] |= summarise(every_raw, [run.seconds for run in every_raw])
    tensors = len((await team.first(sync_trainer.metadata))[0])
    await spawned.end()
    return {
        "bytes": team.total_bytes,
        "tensors": tensors,
        "repeats": args.repeats,
        "arms": found,
        "skipped": skipped,
    }


def heading(args: argparse.Namespace, total_bytes: int) -> str:
    """What was measured."""
    return (
        f"{SHAPES[args.model][1]}, bf16, {total_bytes / 1e6:.1f} MB; {args.ranks} trainer rank(s), {args.replicas} "
        f"replica(s) of TP={args.tp}, buckets of {args.bucket_mb} MiB, {args.changed:.1%} of the elements changed between "
        f"repeats; {'one arm after the other' if args.apart else 'the arms in turns'}; "
        f"{len(os.sched_getaffinity(0))} cores, {args.device}, huge pages in all processes."
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument(
        "--model",
        choices=tuple(SHAPES),
        default="tiny",
        help="whose shape; 7b and 32b are cut down",
    )
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    parser.add_argument("--replicas", type=int, default=1, help="vLLM engines")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each engine")
    parser.add_argument(
        "--arms", nargs="+", choices=tuple(sync_arms.ARMS), default=list(sync_arms.ARMS)
    )
    parser.add_argument(
        "--repeats", type=int, default=9, help="measured updates of each arm, after one"
    )
    parser.add_argument(
        "--bucket-mb", type=int, default=64, help="weight_sync.bucket_mb, and the raw buffers' size"
    )
    parser.add_argument(
        "--changed", type=float, default=0.02, help="share of elements that change between repeats"
    )
    parser.add_argument(
        "--apart",
        action=argparse.BooleanOptionalAction,
        help="one arm after the other, each in turns with the raw broadcast alone, so that one at a time has buffers; "
        "default: for all models but tiny",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--exposed", action="store_true", help="what a sync adds to the steps of a run"
    )
    settings = list(sync_exposed.SETTINGS)
    parser.add_argument(
        "--settings", nargs="+", choices=settings, default=settings, help="of --exposed"
    )
    syncs = [sync_exposed.PLAIN, sync_exposed.OVERLAPPED]
    parser.add_argument(
        "--against", nargs="+", choices=syncs, default=syncs, help="how --exposed synchronises"
    )
    fewest = sync_exposed.WARMUP + 2
    parser.add_argument(
        "--steps",
        type=int,
        default=sync_exposed.STEPS,
        help=f"of a run of --exposed, {fewest} or more",
    )
    args = parser.parse_args()
    args.apart = args.model != "tiny" if args.apart is None else args.apart
    if not 0 < args.changed <= 0.5 or args.repeats < 1:
        parser.error(
            f"--changed {args.changed} --repeats {args.repeats}: above 0 up to 0.5, and at least 1"
        )
    if args.steps < fewest:
        parser.error(
            f"--steps {args.steps}: at least {fewest}, since the first {sync_exposed.WARMUP} and the last drop out"
        )
    return args


def main() -> None:
    """Parse, measure, write."""
    import ray

    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    if args.exposed:
        return sync_exposed.measure(args.out, args.repeats, args.steps, args.settings, args.against)
    print(
        "making the model, starting trainer and engines, measuring: a minute or two for tiny, ten for 0.5b",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(args.model, args.ranks, args.replicas, args.tp, args.bucket_mb, args.device)
        cfg = make_config(layout, folder + "/model")
        cfg.trainer.output_dir = folder
        launch.start_ray(cfg)
        try:
            found = asyncio.run(measure(cfg, args))
        finally:
            ray.shutdown()
    shown = {key: str(value) if key == "out" else value for key, value in vars(args).items()}
    result = {"what": heading(args, found["bytes"]), "arguments": shown} | found
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "result.md").write_text(table(result))
    plot(result, args.out / "weight_sync.png")
    print(table(result))


if __name__ == "__main__":
    main()
