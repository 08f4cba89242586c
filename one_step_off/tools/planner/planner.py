"""Which split of N GPUs is fastest: python -m one_step_off.plan config=FILE [section.key=value ...]
[options]

The model of a step is `work.Work`. `hardware.py` has its constants for a kind of GPU,
`calibration.py` fits them to runs, and `measured_sync.py` applies the config's settings of the
weight sync. Then every split is simulated.
"""

import argparse
import copy
import math
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from one_step_off.config.command_line import CommandParser
from one_step_off.config.errors import ConfigError, noting_what_is_missing
from one_step_off.config.loading import load_config
from one_step_off.config.placement import (
    data_parallel_size,
    devices_of_run,
    on_one_node,
    resolved_device,
)
from one_step_off.config.pool_checks import check_lending
from one_step_off.config.schema import Config
from one_step_off.config.sections.rollout import is_seeded
from one_step_off.engines.vllm.engine_args import MAX_SEQUENCES
from one_step_off.monitoring.console import quiet_libraries
from one_step_off.runtime.validation import validate
from one_step_off.tools.planner.calibration import (
    by_runs,
    by_times,
    devices,
    lines_of_runs,
    lines_of_times,
    run_calibration,
)
from one_step_off.tools.planner.hardware import (
    GPUS,
    LongestSequence,
    Plan,
    by_hardware,
    planned_gpu,
    planned_model,
)
from one_step_off.tools.planner.measured_sync import (
    assumptions_of_given_times,
    with_settings_of_plan,
)
from one_step_off.tools.planner.work import Work

DESCRIPTION = """
Says how to divide GPUs between rollout and trainer, and how long a training step takes then: it
simulates every split. How long generation, training and weight sync take comes from one of these:
--hardware, for GPUs that you do not have (nothing is run); --from, finished runs; --times, seconds
that you know. Without any of them it first runs a few steps of the config on this machine.
"""

EXAMPLE = (
    "for example: python -m one_step_off.plan model.path=Qwen/Qwen2.5-7B-Instruct --hardware H200 "
    "--gpus 8 --response-tokens 300"
)

MAX_SPLITS = 24
"""Splits that are simulated and shown."""

MAX_SAMPLES = 250_000
"""Samples of all simulations together, about a minute's work."""

MIN_SPLITS = 3
"""Of each kind of arrangement, however many samples they have."""

SAMPLES = 20_000
"""Samples of one simulation, from which its number of steps follows."""

STEPS_PER_STALE_VERSION = 4

MAX_GPUS = 1 << 20
"""Where the times are given: then there need be no GPUs."""

MIN_SHOWN_S = 1e-9
"""Shorter times are errors of rounding in a fit."""

STEP_METRIC = "median/time/step_s"
SYNCHRONOUS = "synchronous"
COLOCATED = "colocated, synchronous"
ONE_STEP_OFF = "one step off"
SHARED = "one step off, shared"

ROW = "{:20}{:24}{:>7}{:>15}{:>9}{:>12}"
HEADER = ("rollout + trainer", "arrangement", "step, s", "idle: rollout", "trainer", "samples/s")


@dataclass(frozen=True)
class Arrangement:
    """A way to use the GPUs.

    Attributes:
        split: for the table: "2 + 6", or "8" where all do both.
        name: SYNCHRONOUS, COLOCATED, ONE_STEP_OFF or SHARED: one step off on a single GPU, of which
            rollout and trainer have a share each; or the name of the config's own staleness.
        replicas: 0 where colocated.
        ranks: of the trainer.
        staleness: see `pipeline.staleness`.
        in_flight: see `weight_sync.in_flight`.
    """

    split: str
    name: str
    replicas: int
    ranks: int
    staleness: int = 0
    in_flight: str = "wait"

    @property
    def is_on_all(self) -> bool:
        """Whether every GPU generates and trains."""
        return self.name in (COLOCATED, SHARED)


@dataclass(frozen=True)
class Simulated:
    """An arrangement and the figures of its simulation, see `simulation.simulate`. `samples`: of a
    step."""

    arrangement: Arrangement
    figures: dict[str, Any]
    samples: int

    @property
    def shown_step(self) -> str:
        """Seconds of a step, as the table shows them: the median, or the mean where a part of the
        steps waits for several batches."""
        is_even = self.arrangement.staleness < 2 and self.arrangement.in_flight == "wait"
        seconds = self.figures[STEP_METRIC]
        if not is_even:
            seconds = self.samples / self.figures["samples_per_s"]
        return f"{seconds:.4g}"

    @property
    def shown_idle(self) -> tuple[str, str]:
        """The idle shares of rollout and trainer, as the table shows them."""
        if self.arrangement.is_on_all:
            return "-", "-"
        rollout, trainer = (self.figures[f"idle_share/{side}"] for side in ("rollout", "trainer"))
        return f"{rollout:.0%}", f"{trainer:.0%}"


def arrangements(cfg: Config, gpus: int, min_ranks: int = 1) -> list[Arrangement]:
    """The arrangements of `gpus` devices that are compared.

    Args:
        min_ranks: of the trainer, by the memory that it needs.

    Raises:
        ConfigError: no split fits.
    """
    replica_gpus = cfg.rollout.tensor_parallel_size
    _, ranks = devices(cfg)
    model_gpus = ranks // data_parallel_size(cfg, "actor")
    mini_batch_samples = cfg.actor.ppo_mini_batch_size * cfg.rollout.n

    def can_train(ranks: int) -> bool:
        is_whole = ranks % model_gpus == 0 and ranks // model_gpus <= mini_batch_samples
        return is_whole and ranks >= min_ranks

    def rollout_gpus_of(gpus: int) -> list[int]:
        counts = range(replica_gpus, gpus, replica_gpus)
        return [count for count in counts if can_train(gpus - count)]

    found = []
    if replica_gpus == 1 and can_train(gpus):
        found.append(Arrangement(str(gpus), COLOCATED, 0, gpus))
    if gpus == 1 and found:
        return [*found, Arrangement("1", SHARED, 1, 1, staleness=1)]
    rollout_gpus = rollout_gpus_of(gpus)
    if not rollout_gpus and not found:
        trainer_gpus = math.ceil(min_ranks / model_gpus) * model_gpus
        if not can_train(trainer_gpus):
            raise ConfigError(
                f"actor.ppo_mini_batch_size={cfg.actor.ppo_mini_batch_size}: its "
                f"{mini_batch_samples} samples are too few for the {trainer_gpus} GPUs that the "
                "trainer needs; raise it"
            )
        least = replica_gpus + trainer_gpus
        parts = f"{replica_gpus} for a replica and {trainer_gpus} for the trainer"
        if gpus >= least:
            fitting = next(n for n in range(gpus, gpus + replica_gpus + 1) if rollout_gpus_of(n))
            raise ConfigError(
                f"--gpus {gpus}: cannot be divided into replicas of {replica_gpus} and copies of "
                f"the model that trains of {model_gpus}; give {fitting}"
            )
        colocated = f"; or {trainer_gpus}, colocated" if replica_gpus == 1 else ""
        raise ConfigError(f"--gpus {gpus}: at least {least} are needed, {parts}{colocated}")
    shown = min(MAX_SPLITS, len(rollout_gpus))
    positions = np.linspace(0, len(rollout_gpus) - 1, shown)
    for position in positions:
        count = rollout_gpus[round(position)]
        split = f"{count} + {gpus - count}"
        for name, staleness, in_flight in _modes(cfg):
            replicas = count // replica_gpus
            found.append(Arrangement(split, name, replicas, gpus - count, staleness, in_flight))
    return found


def _modes(cfg: Config) -> list[tuple[str, int, str]]:
    """The modes that are compared, each as (name, staleness, in_flight): synchronous, one step off,
    and the config's own if it is another one."""
    modes = [(SYNCHRONOUS, 0, "wait"), (ONE_STEP_OFF, 1, "wait")]
    staleness = cfg.pipeline.staleness
    in_flight = cfg.weight_sync.in_flight
    if staleness > 1 or in_flight != "wait":
        modes.append((f"staleness {staleness}, {in_flight}", staleness, in_flight))
    return modes


def compare(cfg: Config, work: Work, gpus: int, min_ranks: int = 1) -> list[Simulated]:
    """Simulate every arrangement of `gpus` devices. `min_ranks`: see `arrangements`. Raises
    ConfigError: no split fits."""
    from one_step_off.tools.planner.simulation import simulate

    steps = int(np.clip(SAMPLES // (work.prompts * cfg.rollout.n), 3, 8))
    samples = work.prompts * cfg.rollout.n
    results = []
    for arrangement in _likely(arrangements(cfg, gpus, min_ranks), work, samples * steps):
        figures = simulate(
            work,
            arrangement.replicas,
            arrangement.ranks,
            staleness=arrangement.staleness,
            in_flight=arrangement.in_flight,
            overlap=cfg.weight_sync.overlap,
            static=_has_static_routing(cfg),
            # The first and the last steps of a run have less in flight.
            steps=steps + STEPS_PER_STALE_VERSION * max(0, arrangement.staleness - 1),
            shared=arrangement.name == SHARED,
        )
        results.append(Simulated(arrangement, figures, samples))
    return results


def _likely(found: list[Arrangement], work: Work, samples: int) -> list[Arrangement]:
    """Of each kind of arrangement those that are fastest by the means of their phases, where
    simulating all of them would take minutes. `samples`: of one simulation."""
    kinds = {arrangement.name for arrangement in found}
    kept = max(MIN_SPLITS, MAX_SAMPLES // samples // len(kinds))

    def step_s(arrangement: Arrangement) -> float:
        """Without waits for single samples."""
        replicas = arrangement.replicas or arrangement.ranks
        response_tokens = work.prompts * work.lengths.shape[1] * work.lengths.mean()
        tokens = response_tokens + work.prompts * work.lengths.shape[1] * work.prompt_tokens
        generate_s = work.sequence_s * response_tokens / replicas
        generate_s += work.decode_s * work.lengths.max()
        train_s = work.train_fixed_s + work.train_token_s * tokens / arrangement.ranks
        if arrangement.staleness:
            return max(generate_s, train_s)
        return generate_s + train_s

    likely: list[Arrangement] = []
    for kind in kinds:
        likely += sorted((a for a in found if a.name == kind), key=step_s)[:kept]
    return [arrangement for arrangement in found if arrangement in likely]


def _has_static_routing(cfg: Config) -> bool:
    rollout = cfg.rollout
    if rollout.routing != "auto":
        return rollout.routing == "static"
    return is_seeded(rollout, resolved_device(cfg))


def report(work: Work, assumptions: list[str], results: list[Simulated]) -> None:
    """Print what was assumed, the table, and the best in one line. `assumptions`: a line each."""
    samples = results[0].samples
    print(f"Assumed for a step of {work.prompts} prompts and {samples} samples:")
    lines = [*assumptions, *_phase_lines(work)]
    if any(result.arrangement.name == COLOCATED for result in results):
        lines.append("colocated, all GPUs do both in turn; the change takes no time")
    if any(result.arrangement.name == SHARED for result in results):
        lines.append("on a shared GPU both work at half speed while both work")
    for line in lines:
        print(f"  {line}")
    print()
    print(ROW.format(*HEADER))
    for result in results:
        arrangement = result.arrangement
        print(
            ROW.format(
                arrangement.split,
                arrangement.name,
                result.shown_step,
                *result.shown_idle,
                f"{result.figures['samples_per_s']:.4g}",
            )
        )
    print("GPUs of rollout + trainer; step: seconds from one update to the next; idle: share of a")
    print("step in which these GPUs wait; samples/s: samples trained in a second")
    if any(result.arrangement.is_on_all for result in results):
        print("-: all GPUs generate and train, so none waits for the other side")
    print()
    # By what is shown: of those that look equal the first is the best.
    ranked = sorted(results, key=lambda result: float(result.shown_step))
    best = ranked[0]
    synchronous = next(r for r in ranked if r.arrangement.staleness == 0)
    print(
        f"best: {best.arrangement.name}, {best.arrangement.split}: {best.shown_step} s a step; "
        f"synchronous at best {synchronous.shown_step} s ({synchronous.arrangement.split})"
    )


def _phase_lines(work: Work) -> list[str]:
    """Response lengths, and what generation, training and sync take; parts of no time are left
    out."""
    generation = f"generation: a token takes {_seconds(work.decode_s + work.sequence_s)} "
    if work.sequence_s < MIN_SHOWN_S:
        generation += "however many sequences a replica runs"
    else:
        more = _seconds(work.sequence_s)
        generation += f"in a replica that runs one sequence, and {more} more for each further one"
    training = f"training: {_seconds(work.train_token_s)} for each token of prompts and responses, "
    training += "divided by the trainer's GPUs"
    if work.train_fixed_s >= MIN_SHOWN_S:
        training += f", and {_seconds(work.train_fixed_s)} more on any number of them"
    sync = f"weight sync: {_seconds(work.sync_s)} on every split"
    if work.canary_s + work.replica_canary_s >= MIN_SHOWN_S:
        trainer, replicas = _seconds(work.canary_s), _seconds(work.replica_canary_s)
        sync += f", of which the trainer checks it for {trainer} and the replicas for {replicas}"
    lengths = f"responses of {work.lengths.mean():.0f} tokens in the mean, of "
    lengths += f"{work.lengths.max()} in the longest"
    return [lengths, generation, training, sync]


def lending_line(cfg: Config, work: Work, results: list[Simulated]) -> str:
    """What it would bring if the trainer's GPUs generated while the trainer waits; "" where no
    arrangement has GPUs of its own for the trainer beside which replicas generate, or where the
    config forbids it."""
    from one_step_off.tools.planner.simulation import step_with_lending

    try:
        check_lending(_lending_config(cfg))
    except ConfigError:
        return ""
    split_of_step: dict[float, str] = {}
    for result in results:
        arrangement = result.arrangement
        if arrangement.staleness == 1 and not arrangement.is_on_all:
            figures, replicas, ranks = result.figures, arrangement.replicas, arrangement.ranks
            step_s = step_with_lending(work, figures, replicas, ranks)
            split_of_step[step_s] = arrangement.split
    if not split_of_step:
        return ""
    best_s = min(float(result.shown_step) for result in results)
    lent_s = min(split_of_step)
    what = "placement.lend=true, trainer GPUs that generate while the trainer waits, would bring"
    gain = 1 - lent_s / best_s
    if gain < 0.005:
        return f"{what} nothing"
    return f"{what} {gain:.0%} at most: {lent_s:.4g} s a step ({split_of_step[lent_s]})"


def _lending_config(cfg: Config) -> Config:
    """The config on separate GPUs one step off, with lending."""
    lending = copy.deepcopy(cfg)
    lending.placement.lend = True
    lending.placement.roles |= {"rollout": "rollout", "actor": "actor"}
    lending.placement.pools = {"rollout": [1], "actor": [1]}
    lending.pipeline.staleness = 1
    return lending


def _seconds(seconds: float) -> str:
    """A time with a unit that suits it."""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if not seconds or seconds * factor >= 0.1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def advice(
    cfg: Config,
    results: list[Simulated],
    knows_lengths: bool,
    longest: LongestSequence | None = None,
) -> list[str]:
    """What to set for the fastest arrangement, and what to change next: a line each.
    `knows_lengths`: the user has given the mean length of a response. `longest`: see `Plan`."""
    ranked = sorted(results, key=lambda result: float(result.shown_step))
    best = ranked[0]
    arrangement = best.arrangement
    roles = cfg.placement.roles
    staleness = f"pipeline.staleness={arrangement.staleness}"
    without_lending = " placement.lend=false" if cfg.placement.lend else ""
    if arrangement.is_on_all:
        staleness += without_lending
        lines = [f"set {staleness} and put all roles into one pool, see config/colocated.yaml"]
    else:
        count = arrangement.replicas * cfg.rollout.tensor_parallel_size
        pools = f"{{{roles['rollout']}: [{count}], {roles['actor']}: [{arrangement.ranks}]}}"
        lines = [f"set {staleness} placement.pools='{pools}'"]
    idle = {side: best.figures[f"idle_share/{side}"] for side in ("rollout", "trainer")}
    waiting = max(idle, key=lambda side: idle[side])
    if not arrangement.is_on_all and idle[waiting] > 0.25:
        slower = "trainer" if waiting == "rollout" else "rollout"
        lines.append(
            f"the {waiting} waits for {idle[waiting]:.0%} of a step: more GPUs for the {slower} "
            "shorten it, or fewer for the other cost nothing"
        )
    if longest is not None:
        lines += longest.advice([result.arrangement.ranks for result in ranked])
    if not knows_lengths:
        lines.append("give --response-tokens: the mean length of a response decides most of this")
    lines.append(
        f"run 10 synchronous steps with these GPUs (pipeline.staleness=0{without_lending}), and "
        "plan again with --from and its trainer.output_dir: the times are then measured ones"
    )
    return lines


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        "python -m one_step_off.plan",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        allow_abbrev=False,
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY=VALUE", help="config=FILE, section.key=value"
    )
    parser.add_argument(
        "--gpus", type=int, help="number of GPUs to divide; default: all of placement.pools"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        dest="runs",
        action="append",
        metavar="FOLDER",
        help="trainer.output_dir of a finished run with pipeline.staleness=0; give --from twice "
        "for two batch sizes",
    )
    source.add_argument(
        "--hardware",
        metavar="GPU",
        help=f"{', '.join(GPUS)}: times follow from the GPU and from the shape of model.path; no "
        "data is needed",
    )
    parser.add_argument(
        "--response-tokens",
        type=int,
        metavar="MEAN",
        help="with --hardware: mean length of a response; default: all lengths up to "
        "data.max_response_length are as likely",
    )
    source.add_argument(
        "--times",
        metavar="GEN,TRAIN,SYNC[,TAIL]",
        help="seconds of generation, training and weight sync in a synchronous step, measured on "
        "the GPUs of placement.pools; TAIL: of generation, with only the longest response running",
    )
    return parser.parse_intermixed_args(argv)


def _check_roles(cfg: Config) -> None:
    """Raises ConfigError: a role is in a third pool."""
    roles = cfg.placement.roles
    for role, pool in roles.items():
        if role != "rollout" and pool != roles["actor"]:
            raise ConfigError(
                f"placement.roles.{role}={pool}: the planner supports only two pools; "
                "put it into the actor's"
            )


def _places(cfg: Config) -> int:
    """Sequences that a replica runs at once. Raises ConfigError: the engine's setting is no
    number."""
    most = cfg.rollout.engine_kwargs.get("max_num_seqs", MAX_SEQUENCES[resolved_device(cfg)])
    if type(most) is not int or most < 1:
        raise ConfigError(
            f"rollout.engine_kwargs.max_num_seqs={most}: must be a whole number above 0"
        )
    return min(cfg.agent.max_concurrency, most)


def _calibrated(args: argparse.Namespace, cfg: Config) -> tuple[Work, list[str]]:
    """The work of a step, and what is assumed of its sync; by given times, by finished runs, or by
    runs that are made now."""
    if args.times:
        work = by_times(cfg, args.times)
        return work, [*lines_of_times(cfg, args.times), *assumptions_of_given_times(cfg)]
    if args.runs:
        work, lines = with_settings_of_plan(by_runs(args.runs), args.runs[0], cfg)
        return work, [*lines_of_runs(args.runs), *lines]
    with tempfile.TemporaryDirectory() as folder:
        runs = run_calibration(args.keys, cfg, folder)
        return with_settings_of_plan(by_runs(runs), runs[0], cfg)


def _planned(args: argparse.Namespace, cfg: Config) -> Plan:
    """The work of a step by what the command line names. Raises ConfigError: bad input."""
    if args.hardware:
        model = planned_model(cfg.model.path)
        return by_hardware(cfg, model, planned_gpu(args.hardware), args.response_tokens)
    if args.response_tokens is not None:
        raise ConfigError(
            f"--response-tokens {args.response_tokens}: needs --hardware; runs and times have "
            "lengths of their own"
        )
    work, assumptions = _calibrated(args, cfg)
    return Plan(work, places=_places(cfg), min_ranks=1, lines=assumptions)


def _validate(cfg: Config, needs_model: bool) -> None:
    """Check a config whose GPUs and data are not here: nothing is run. Raises ConfigError.

    `needs_model`: else a config.json will do, without the tokenizer that a run needs.
    """
    path = cfg.model.path
    if not needs_model and path.strip():
        cfg.model.path = "a/model"  # of the hub, whose files are not looked for
    # What only a run needs.
    cfg.data.train_files = cfg.data.train_files or "some/data"
    if cfg.trainer.total_steps is None and cfg.trainer.total_epochs is None:
        cfg.trainer.total_steps = 1
    try:
        with noting_what_is_missing():
            validate(cfg, MAX_GPUS)
    finally:
        cfg.model.path = path


def _enlarge_for_replicas(cfg: Config) -> None:
    """Give the rollout's pool whole replicas: by --hardware the planner divides GPUs, and the
    config's sizes stand for nothing."""
    width = cfg.rollout.tensor_parallel_size
    pool = cfg.placement.roles.get("rollout", "")
    if width > 1 and pool in cfg.placement.pools:
        (size,) = cfg.placement.pools[pool]
        cfg.placement.pools[pool] = [math.ceil(size / width) * width]


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: bad input."""
    args = _parse(argv)
    quiet_libraries()
    cfg = load_config(args.keys)
    if args.hardware:
        planned_gpu(args.hardware)  # before anything slow
        cfg.placement.device = "cuda"
    pools = cfg.placement.pools
    gpus = args.gpus
    if gpus is None:
        gpus = devices_of_run(cfg)
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"--gpus {gpus}: must be a whole number from 1 to {MAX_GPUS}")
    if args.runs or args.times or args.hardware:  # this machine need not have the GPUs
        cfg.placement.pools = {name: [on_one_node(sizes)] for name, sizes in pools.items()}
        if args.hardware:
            _enlarge_for_replicas(cfg)
        _validate(cfg, needs_model=not args.hardware)
    else:
        validate(cfg, None)
    _check_roles(cfg)
    plan = _planned(args, cfg)
    mini_batches = cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size
    optimizer_steps = mini_batches * cfg.actor.ppo_epochs
    work = replace(
        plan.work,
        places=min(plan.places, _places(cfg)),
        prompts=cfg.data.train_batch_size,
        before_step=1 / optimizer_steps,
    )
    results = compare(cfg, work, gpus, plan.min_ranks)
    report(work, plan.lines, results)
    lending = lending_line(cfg, work, results)
    if lending:
        print(lending)
    if args.hardware:
        knows_lengths = args.response_tokens is not None
        for line in advice(cfg, results, knows_lengths, plan.longest):
            print(f"next: {line}")
    return 0
