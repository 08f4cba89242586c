"""What a step costs the driver beside the work of replicas and trainers, which take fixed times here.

    python -m benchmarks.overhead --out DIR [--replicas 1 8 64 512] [--samples 64 1024 8192 16384] [--tokens 512]
                                  [--against CHECKOUT] [--repeats 1] [--profile] [--no-loggers] [--full]

Pipeline, groups, weight sync, tracker and loggers are the real ones. Replicas and ranks are stand-ins in this process
that answer after a fixed time with samples made beforehand. Each cell of the table is a process of its own: CPU seconds
of the driver per step, less what the stand-ins take when they are asked the same alone; and by how much a step, and its
generation, take longer than the fixed times. `--against`: another checkout, measured by turns with this one. What Ray
itself costs is in `benchmarks.overhead_ray`. Writes result.json, result.md and overhead.png into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import functools
import gc
import io
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off import ray_trainer
from one_step_off.config.schema import Config
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.monitoring.flops import Meter, ModelShape
from one_step_off.monitoring.loggers import open_loggers
from one_step_off.monitoring.tracker import Tracker
from one_step_off.ray_trainer import Pipeline, Roles
from one_step_off.rollout import batch_sources
from one_step_off.rollout.health import ReplicaState
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.training import trainer_group as groups
from one_step_off.training.trainer_group import TrainGroup
from one_step_off.weight_sync.coordinator import WeightSync

ROOT = Path(__file__).parents[2]
STEP_S = 10.0  # the step of which the overhead is a share in the table
WARM_UP = 2
GROUP = 8  # samples of a prompt


@dataclass
class Cell:
    """One measurement. `slots`: what a replica's engine works on at once; `buckets`: of a weight sync; times in seconds;
    `full`: with critic and reference model, and GAE."""

    replicas: int
    samples: int
    tokens: int = 512
    ranks: int = 8
    slots: int = 256
    buckets: int = 24
    steps: int = 6
    generate_s: float = 0.3
    train_s: float = 0.5
    sync_s: float = 0.05
    routing: str = "least_loaded"
    loggers: bool = True
    full: bool = False
    profile: bool = False

    @property
    def fixed_s(self) -> float:
        """What a step takes if the driver costs nothing: one step off, with the sync beside training."""
        return max(self.train_s * (1 + 0.1 * self.full), self.sync_s + self.generate_s)


class Remote:
    """A method of a stand-in: `remote` answers what `make` gives, after `seconds`."""

    def __init__(
        self, made: Callable[..., Any], seconds: float = 0.0, log: list | None = None
    ) -> None:
        self.made, self.seconds, self.log = made, seconds, log

    def remote(self, *args: Any) -> asyncio.Future:
        """As Ray's: returns at once what can be awaited."""
        if self.log is not None:
            self.log.append((self, args))
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        loop.call_later(self.seconds, self._answer, future, args)
        return future

    def _answer(self, future: asyncio.Future, args: tuple) -> None:
        if not future.done():
            future.set_result(self.made(*args))


class Replica:
    """Stands in for a vLLM replica with the samples `ready` of every prompt."""

    def __init__(self, number: int, cell: Cell, ready: dict[Any, list[Sample]], log: list) -> None:
        self.ready, self.away, self.waiting = ready, 0, []
        waves = (
            -(-cell.samples // (cell.replicas * cell.slots))
            if cell.routing == "least_loaded"
            else 1
        )
        self.rollout = Remote(self._rollout, cell.generate_s / waves, log)
        self.wait_for_capacity = Vacancy(self)
        self.ping = Remote(lambda: (0, 0), log=log)
        self.score = Remote(lambda sequences: [np.zeros(7, np.float32) for _ in sequences], log=log)
        self.sync = Remote(functools.partial(self._sync, cell), cell.sync_s, log)

    def _rollout(self, prompts: list[Prompt], _: Any) -> list[Sample]:
        found = [s for p in prompts for s in self.ready[p.id]]
        self.away += len(found)
        waiting, self.waiting = self.waiting, []
        for ask in waiting:
            self.wait_for_capacity.answer(*ask)
        return found

    @staticmethod
    def _sync(cell: Cell, _: Any) -> list[dict[str, Any]]:
        now, phases = time.time(), ("wait", "apply", "load")
        each = [[i, 0.001] for i in range(cell.buckets)]
        spans = [["", phase, now - 0.01, now] for _ in range(cell.buckets) for phase in phases]
        return [
            {"bytes": 1e9, "bucket_wire": each, "spans": spans[:200], "bare_wire": 0.01}
            | dict.fromkeys(phases, 0.02)
        ]


class Vacancy:
    """A replica's `wait_for_capacity`: answers when it has room."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def remote(self, sent: int, most: int) -> asyncio.Future:
        """As Ray's."""
        future = asyncio.get_running_loop().create_future()
        self.answer(sent, most, future)
        return future

    def answer(self, sent: int, most: int, future: asyncio.Future) -> None:
        """Now, or keep the question."""
        if future.done():
            return
        if sent - self.replica.away < most:
            future.set_result(self.replica.away)
        else:
            self.replica.waiting.append((sent, most, future))


class Rank:
    """Stands in for one training process of any role. `given`: the log-probs or values of its share of the batch."""

    def __init__(self, number: int, cell: Cell, given: list[np.ndarray], log: list) -> None:
        share = {i: given[i] for i in range(number, cell.samples, cell.ranks)}
        self.update = Remote(self._update, cell.train_s, log)
        self.log_prob = self.values = Remote(lambda batch: share, cell.train_s / 10, log)
        first = number == 0
        self.score = Remote(
            lambda seqs: [np.zeros(7, np.float32) for _ in seqs] if first else None, log=log
        )
        self.release, self.connect_sync = (
            Remote(lambda version: None, log=log),
            Remote(lambda *_: None, log=log),
        )
        self.send_weights = Remote(functools.partial(self._send, cell), cell.sync_s, log)

    @staticmethod
    def _update(batch: Batch, learn: bool, profile: str) -> dict[str, float]:
        return {f"actor/figure_{i}": 0.5 for i in range(30)} | {
            "ratio/mean": 1.0,
            "actor/sync_wait_s": 0.0,
        }

    @staticmethod
    def _send(cell: Cell, _: Any) -> dict[str, Any]:
        now, phases = time.time(), ("gather", "checksum", "wire")
        spans = [["", phase, now - 0.01, now] for _ in range(cell.buckets) for phase in phases]
        own = {
            "bytes": 1e9 / cell.ranks,
            "changed": 1.0,
            "bucket_wire": [[i, 0.002] for i in range(cell.buckets)],
        }
        return own | {"spans": spans[:200]} | dict.fromkeys(phases, 0.02)


def ready_samples(cell: Cell, stream: PromptStream) -> dict[Any, list[Sample]]:
    """The samples of every prompt that the run will ask for, stamped with the version that will be asked. Every sample has
    arrays of its own, as after unpickling; only those of versions are made anew for each step."""
    rng, shape, found = np.random.default_rng(0), (cell.samples, cell.tokens), {}
    ids, logs = rng.integers(0, 32000, shape, np.int32), -rng.random(shape, np.float32)
    masks, text = np.ones(shape, bool), "so it is 27 " * (cell.tokens // 4)
    for step in range(stream.total_steps):
        versions = np.full(shape, max(0, step - 1), np.int32)
        for k, prompt in enumerate(stream.next_batch()):
            found[prompt.id] = [
                Sample(
                    prompt.id, i, prompt.ids, ids[at], logs[at], masks[at], versions[at],
                    reward=float(rng.integers(2)), finish_reason="stop", response=text,
                )
                for i, at in enumerate(range(k * GROUP, (k + 1) * GROUP))
            ]  # fmt: skip
    return found


def sync_of(cell: Cell, actor: TrainGroup, rollout: RolloutGroup) -> WeightSync:
    """The weight sync, connected."""
    sync = WeightSync(actor, rollout.supervisor, [np.arange(8)] * 3, "127.0.0.1", [[]] * cell.ranks)
    sync.senders, sync.sending_ranks, sync.connected_replicas = (
        actor.ranks,
        actor.ranks,
        list(rollout.replicas),
    )
    sync.info, sync.total_bytes = {}, 10**9
    for health in rollout.supervisor.health:
        health.transition_to(ReplicaState.HEALTHY)
    return sync


def built(cell: Cell, folder: str) -> tuple[Pipeline, list]:
    """The pipeline, and the list into which the stand-ins write what they are asked."""
    cfg, log = Config(), []
    cfg.rollout.n, cfg.rollout.routing, cfg.trainer.output_dir = GROUP, cell.routing, folder
    cfg.data.train_batch_size, cfg.data.max_response_length = cell.samples // GROUP, cell.tokens
    cfg.agent.max_concurrency = cell.slots
    cfg.trainer.val_before_train = cfg.trainer.val_after_train = False
    if cell.full:
        cfg.algorithm.adv_estimator, cfg.algorithm.kl_in_reward, cfg.algorithm.kl_coef = (
            "gae",
            True,
            0.01,
        )
    rows, ids = cell.samples // GROUP * cell.steps, np.arange(128, dtype=np.int32)
    prompts = [Prompt((0, r), ids, "how many apples are there? " * 8, "27") for r in range(rows)]
    streams = [PromptStream(prompts, cell.samples // GROUP, True, 0, cell.steps) for _ in range(2)]
    ready = ready_samples(cell, streams[0])
    given = [s.log_probs for group in list(ready.values())[: cell.samples // GROUP] for s in group]

    def group(role: str) -> TrainGroup:
        return TrainGroup(role, [Rank(i, cell, given, log) for i in range(cell.ranks)], cfg)

    rollout = RolloutGroup([Replica(i, cell, ready, log) for i in range(cell.replicas)], cfg, False)
    actor = group("actor")
    more = {"ref": group("ref"), "critic": group("critic")} if cell.full else {}
    roles = Roles(actor, rollout, sync_of(cell, actor, rollout), **more)
    tracker = Tracker(folder, cell.steps, out=io.StringIO())
    tracker.meter = Meter(cfg, ModelShape(10**9, 24, 2048))
    if cell.loggers:
        tracker.loggers = open_loggers(cfg, 0, {p.id: p for p in prompts}.get, tracker.log, {})
    return Pipeline(cfg, roles, streams[1], None, tracker), log


PHASES = {
    "check stamps": (batch_sources, "assert_staleness"),
    "advantages": (ray_trainer, "fill_advantages"),
    "record": (Tracker, "step"),
    "report of the sync": (WeightSync, "_metrics"),
}


class Phases:
    """Counts the CPU seconds of the driver's thread within some functions while the block runs."""

    def __enter__(self) -> dict[str, float]:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.real = {name: getattr(*where) for name, where in PHASES.items()}
        for name, (owner, attribute) in PHASES.items():
            setattr(owner, attribute, self._timed(name, self.real[name]))
        return self.seconds

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - begin

        return timed

    def __exit__(self, *_: Any) -> None:
        for name, (owner, attribute) in PHASES.items():
            setattr(owner, attribute, self.real[name])


async def alone(calls: list[tuple[Remote, tuple]]) -> float:
    """CPU seconds of the stand-ins when they are asked these calls and nothing else is done."""
    begin = time.process_time()
    await asyncio.gather(*(method.remote(*args) for method, args in calls))
    return time.process_time() - begin


def measure(cell: Cell) -> dict[str, Any]:
    """Run the pipeline once. Per step, medians: `cpu_ms`, `excess_ms` of the step, `generate_excess_ms`, `phases_ms` (means)."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline, log = built(cell, folder)
        gc.collect()
        gc.freeze()  # the samples made beforehand: a run has those of two steps, and no need to look through all
        marks, record, real_put = [], pipeline.tracker.step, groups.put_batch
        groups.put_batch = lambda batch: batch  # see `benchmarks.overhead_ray`
        profile = cProfile.Profile() if cell.profile else None

        def marked(*args: Any) -> None:
            pipeline_tracker_step(*args)
            marks.append((time.perf_counter(), time.process_time(), len(log), dict(phases)))

        try:
            with Phases() as phases:
                pipeline_tracker_step = functools.partial(Tracker.step, pipeline.tracker)
                pipeline.tracker.step = marked
                if profile:
                    profile.enable()
                asyncio.run(pipeline.fit())
                if profile:
                    profile.disable()
        finally:
            groups.put_batch, pipeline.tracker.step = real_put, record
        pipeline.tracker.close()
        rows = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
    found = summarised(cell, marks, rows)
    calls = log[marks[WARM_UP - 1][2] : marks[-2][2]]
    for remote, _ in calls:
        remote.seconds, remote.log = 0.0, None
    found["stand_in_ms"] = 1e3 * asyncio.run(alone(calls)) / found["steps"]
    found["cpu_ms"] = found["with_stand_ins_ms"] - found["stand_in_ms"]
    found["calls"] = len(calls) / found["steps"]
    if profile:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
        found["profile"] = text.getvalue()
    return found


def summarised(cell: Cell, marks: list[tuple], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """From what stood on the clocks (wall, CPU, calls, phases) at the end of each step. The first steps warm up, and the last
    one generates nothing."""
    first, used = marks[WARM_UP - 1], marks[WARM_UP - 1 : -1]
    steps = len(used) - 1
    walls = [b[0] - a[0] - cell.fixed_s for a, b in zip(used, used[1:], strict=False)]
    generated = [row["time/generate_s"] - cell.generate_s for row in rows[WARM_UP:-1]]
    phases = {name: 1e3 * (used[-1][3][name] - first[3][name]) / steps for name in first[3]}
    return {
        "steps": steps,
        "with_stand_ins_ms": 1e3 * (used[-1][1] - first[1]) / steps,
        "excess_ms": 1e3 * statistics.median(walls),
        "generate_excess_ms": 1e3 * statistics.median(generated),
        "phases_ms": phases,
    }


def in_a_process(cell: Cell, checkout: Path) -> dict[str, Any]:
    """`measure` with the package of that checkout, and this file's benchmark."""
    env = os.environ | {"PYTHONPATH": str(checkout)}  # and -P: not of the folder of this file
    command = [sys.executable, "-P", __file__, "--cell", json.dumps(asdict(cell))]
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"replicas {cell.replicas}, samples {cell.samples}: {done.stderr[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats of a cell."""
    middle = {
        k: statistics.median(run[k] for run in runs)
        for k, v in runs[0].items()
        if isinstance(v, (int, float))
    }
    phases = {
        name: statistics.median(run["phases_ms"][name] for run in runs)
        for name in runs[0]["phases_ms"]
    }
    return middle | {"phases_ms": phases, "runs": [run["cpu_ms"] for run in runs]}


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    columns = ["replicas", "samples"]
    for who in result["arms"]:
        columns += [
            f"{who}: CPU ms",
            f"% of {STEP_S:g} s",
            "step longer by, ms",
            "generation longer by, ms",
            "calls",
        ]
    lines = ["| " + " | ".join(columns) + " |", "| --- |" + " --- |" * (len(columns) - 1)]
    for key in next(iter(result["arms"].values())):
        cells = key.split(" x ")
        for arm in result["arms"].values():
            f = arm[key]
            cells += [f"{f['cpu_ms']:.0f}", f"{f['cpu_ms'] / 10 / STEP_S:.2f}"]
            cells += [
                f"{f['excess_ms']:.0f}",
                f"{f['generate_excess_ms']:.0f}",
                f"{f['calls']:.0f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    cell = result["cell"]
    lines += [
        "",
        f"{cell['tokens']} tokens per sample, {GROUP} samples per prompt, {cell['ranks']} ranks, {cell['routing']} routing,",
    ]
    lines += [
        f"loggers {'on' if cell['loggers'] else 'off'}. Medians of {result['repeats']} runs, by turns. Of the CPU time, in ms:",
        "",
    ]
    for who, arm in result["arms"].items():
        key = list(arm)[-1]
        lines += [
            f"- {who}, {key}: "
            + ", ".join(f"{name} {ms:.0f}" for name, ms in arm[key]["phases_ms"].items())
        ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """CPU per step over samples, a line per number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for (who, arm), style in zip(result["arms"].items(), ("-o", "--x"), strict=False):
        points = [(*map(int, key.split(" x ")), found["cpu_ms"]) for key, found in arm.items()]
        for replicas in dict.fromkeys(p[0] for p in points):
            own = [(samples, ms) for r, samples, ms in points if r == replicas]
            axes.loglog(*zip(*own, strict=True), style, label=f"{who}, {replicas} replicas")
    axes.axhline(10 * STEP_S, color="grey", linewidth=0.8)
    axes.set_xlabel("samples per step")
    axes.set_ylabel(f"CPU of the driver per step, ms (line: 1 % of {STEP_S:g} s)")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 1024, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--routing", choices=["static", "least_loaded"], default="least_loaded")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--no-loggers", action="store_true")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        return print(json.dumps(measure(Cell(**json.loads(args.cell)))))
    if (
        not args.out
        or args.steps < WARM_UP + 2
        or any(n < GROUP or n % GROUP for n in args.samples)
    ):
        parser.error(
            f"--out is needed, --samples in multiples of {GROUP}, and --steps of {WARM_UP + 2} or more"
        )
    names = "tokens", "ranks", "steps", "routing", "full", "profile"
    how = {name: getattr(args, name) for name in names} | {"loggers": not args.no_loggers}
    checkouts = ({"before": args.against} if args.against else {}) | {"now": ROOT}
    cells = [
        Cell(replicas, samples, **how) for replicas in args.replicas for samples in args.samples
    ]
    arms: dict[str, dict[str, Any]] = {who: {} for who in checkouts}
    for cell in cells:
        runs: dict[str, list] = {who: [] for who in checkouts}
        for _ in range(args.repeats):
            for who, checkout in checkouts.items():
                runs[who].append(in_a_process(cell, checkout.resolve()))
                if cell.profile:
                    print(
                        f"{who}, {cell.replicas} replicas, {cell.samples} samples",
                        runs[who][-1]["profile"],
                    )
        for who, found in runs.items():
            arms[who][f"{cell.replicas} x {cell.samples}"] = merged(found)
    result = {"arms": arms, "repeats": args.repeats, "cell": asdict(cells[-1])}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "result.md").write_text(table(result))
    plot(result, args.out / "overhead.png")
    print(table(result))


if __name__ == "__main__":
    main()
