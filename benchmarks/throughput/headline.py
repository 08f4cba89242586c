"""How close a step comes to its longer phase, in four regimes: `benchmarks.throughput --headline`.

SmolLM2-135M where generation takes 0.6, 0.9 and 1.8 times as long as training, and the tiny model.
The batches are those with which an Intel Xeon with AMX comes near these ratios. `--regimes` gives
others, since another CPU has other ratios. On GPUs: the model of the command line with three
lengths of responses, in all arrangements that the GPUs allow. Each repeat runs every regime once
and starts with another one. The phases are those of the same run, so no other arm is needed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.common.lengths import keys_of
from benchmarks.common.machine import machine, machine_line
from benchmarks.common.paths import config_path
from benchmarks.common.report import markdown_table, spread, with_range, write_results
from benchmarks.common.runs import NO_EVALUATION, rotated, run_arm
from benchmarks.throughput.cases import ARMS, DISAGGREGATED, Case, arms_of, default_arms
from benchmarks.throughput.report import Row, exposed_sync, needed_columns
from one_step_off.config import hardware
from one_step_off.config.loading import load_config
from one_step_off.runtime.validation import validate

LIMIT = 1.05
"""Up to here a step counts as hidden behind its longer phase."""

DEFAULT_ARMS = ["auto"]
SECONDS = ("step", "T_gen", "T_train", "longer", "T_sync", "exposed sync", "canary", "rest")


@dataclass(frozen=True)
class Regime:
    """A ratio of generation to training.

    Attributes:
        name: in tables.
        folder: of its runs.
        config: file in config/.
        case: the lengths and the batch.
        steps: of a run.
        warmup: steps dropped from it. The phases of steps 1 to 3 decide whether step 4 overlaps.
        is_pretrained: it takes the model of the command line, not the config's.
    """

    name: str
    folder: str
    config: str
    case: Case
    steps: int
    warmup: int
    is_pretrained: bool = True


def _smollm2(ratio: str, length: int, batch: str, steps: int, warmup: int) -> Regime:
    """SmolLM2-135M with responses of a fixed length in tokens."""
    return Regime(
        name=f"SmolLM2-135M, generate/train about {ratio}",
        folder=f"smollm2_{ratio}",
        config="smollm2_addition_cpu.yaml",
        case=Case(length=f"fixed:{length}", batch=batch),
        steps=steps,
        warmup=warmup,
    )


REGIMES = [
    _smollm2("0.6", 48, "3x4", steps=8, warmup=4),
    _smollm2("0.9", 96, "2x5", steps=8, warmup=4),
    _smollm2("1.8", 240, "1x4", steps=5, warmup=1),
    Regime(
        name="tiny, 345k parameters",
        folder="tiny",
        config="gsm8k_tiny_cpu.yaml",
        case=Case(),
        steps=40,
        warmup=5,
        is_pretrained=False,
    ),
]


def _on_gpus(batch: str, length: int) -> Regime:
    """The model of the command line, on GSM8K with responses of a fixed length in tokens."""
    return Regime(
        name=f"{batch}, {length} tokens",
        folder=f"gpu_{batch}_{length}",
        config="qwen_gsm8k_fsdp.yaml",
        case=Case(length=f"fixed:{length}", batch=batch),
        steps=8,
        warmup=3,
    )


GPU_REGIMES = [_on_gpus("64x8", length) for length in (128, 512, 1024)]
ONE_GPU = "placement.pools={rollout: [0.5], actor: [0.5]}"


def regimes_of(batches: list[str], gpus: int) -> list[Regime]:
    """The regimes of this machine.

    Args:
        batches: PROMPTSxSAMPLES:TOKENS of each; none: the default ones.
        gpus: of this machine.

    Raises:
        ValueError: one is no such text.
    """
    if not batches:
        return GPU_REGIMES if gpus else REGIMES
    regimes = []
    for text in batches:
        batch, colon, length = text.partition(":")
        if not colon or not length.isdigit():
            raise ValueError(f"--regimes {text}: must be PROMPTSxSAMPLES:TOKENS, such as 3x4:48")
        if gpus:
            regimes.append(_on_gpus(batch, int(length)))
            continue
        name = f"SmolLM2-135M, {batch}, {length} tokens"
        folder = f"smollm2_{batch}_{length}"
        case = Case(length=f"fixed:{length}", batch=batch)
        regimes.append(Regime(name, folder, "smollm2_addition_cpu.yaml", case, steps=8, warmup=4))
    if gpus:
        return regimes
    return [*regimes, *(regime for regime in REGIMES if not regime.is_pretrained)]


@dataclass(frozen=True)
class PlannedRegime:
    """A regime with its validated config keys. `arms`: name of each arm -> the keys that only this
    arm has."""

    regime: Regime
    config: str
    keys: list[str]
    arms: dict[str, list[str]]
    warmup: int
    words: str


def plan(args: argparse.Namespace, overrides: list[str]) -> list[PlannedRegime]:
    """The regimes with their keys.

    Args:
        args: the flags. Where --steps is given, it and --warmup hold for every regime.
        overrides: config keys of the command line.

    Raises:
        ConfigError, ValueError: a flag or a key is wrong. The message is one line.
    """
    planned = []
    gpus = 0 if "placement.device=cpu" in overrides else hardware.count_gpus()
    if gpus == 1:
        overrides = [ONE_GPU, *overrides]
    for regime in regimes_of(args.regimes, gpus):
        steps, warmup = regime.steps, regime.warmup
        if args.steps is not None:
            steps, warmup = args.steps, args.warmup
        if steps - warmup < 2:
            raise ValueError(f"--warmup {warmup} of {steps} steps leaves none to measure")
        config = config_path(regime.config)
        keys = [*NO_EVALUATION, *overrides, f"trainer.total_steps={steps}"]
        if regime.is_pretrained:
            keys.append(f"model.path={args.headline}")
        keys += regime.case.keys(load_config([f"config={config}", *keys]))
        cfg = load_config([f"config={config}", *keys])
        all_arms = arms_of(cfg)
        names = [ARMS[flag] for flag in args.arms or DEFAULT_ARMS]
        if gpus and not args.arms:
            names = default_arms(cfg)
        missing = [name for name in names if name not in all_arms]
        if missing:
            offered = ", ".join(flag for flag, name in ARMS.items() if name in all_arms)
            raise ValueError(f"--arms: these devices cannot have {missing[0]!r}; give of {offered}")
        arms = {name: all_arms[name] for name in names}
        for arm_keys in arms.values():
            validate(load_config([f"config={config}", *keys, *arm_keys]))
        _, lengths = keys_of(regime.case.length)
        words = f"{cfg.data.train_batch_size} prompts x {cfg.rollout.n}; {lengths}"
        planned.append(PlannedRegime(regime, config, keys, arms, warmup, words))
    return planned


def figures(rows: list[Row], arm: str) -> dict[str, float]:
    """Medians over the steps of one run.

    A step is taken from the arrival of its samples to the arrival of the next step's: within these
    bounds lie one sync, one training, and the generation whose seconds are in the next row. (By
    time/step_s it would begin at the end of the training before. The mean is the same, but the end
    of a long generation would count in the step after it.) The time above the longer phase is the
    exposed sync, of which the canary may be a part, and the rest: the driver's work, and processes
    that wait for it or for a core.

    Args:
        rows: the steps after the warm-up. The last one tells how the step before it ended; nothing
            is generated beside it.
        arm: name of the arm.
    """
    steps = rows[:-1]
    step = []
    longer = []
    exposed = []
    canary = []
    rest = []
    for row, following_row in itertools.pairwise(rows):
        waits_s = following_row["time/wait_rollout_s"] - row["time/wait_rollout_s"]
        step_s = row["time/step_s"] + waits_s
        exposed_s = exposed_sync(row, following_row, arm)
        longer_s = max(following_row["time/generate_s"], row["time/train_s"])
        exposed.append(exposed_s)
        canary.append(min(row["time/canary_s"] or 0.0, exposed_s))
        step.append(step_s)
        longer.append(longer_s)
        rest.append(step_s - longer_s - exposed_s)
    columns = {
        "step": step,
        "T_gen": [row["time/generate_s"] for row in rows[1:]],
        "T_train": [row["time/train_s"] for row in steps],
        "T_sync": [row["time/sync_s"] for row in steps],
        "longer": longer,
        "exposed sync": exposed,
        "canary": canary,
        "rest": rest,
    }
    found = {name: statistics.median(values) for name, values in columns.items()}
    found["overlapped"] = statistics.fmean(row["sync/overlapped"] or 0.0 for row in steps)
    found["step / longer phase"] = found["step"] / max(found["T_gen"], found["T_train"])
    found["gen / train"] = found["T_gen"] / found["T_train"]
    return found


def summarize(runs: dict[str, list[list[Row]]]) -> dict[str, Any]:
    """Per arm each figure's median and range over the runs. `runs`: arm -> rows of each run.

    With the disaggregated synchronous arm also "step / its phases": a step over the longer phase of
    that arm, whose phases have the machine to themselves.
    """
    arms: dict[str, Any] = {}
    for arm, rows_of_runs in runs.items():
        of_runs = [figures(rows, arm) for rows in rows_of_runs]
        arms[arm] = {name: spread([run[name] for run in of_runs]) for name in of_runs[0]}
    if DISAGGREGATED in arms:
        alone = arms[DISAGGREGATED]
        longer_s = max(alone["T_gen"]["median"], alone["T_train"]["median"])
        for arm in arms.values():
            arm["step / phases alone"] = spread([step / longer_s for step in arm["step"]["runs"]])
    return arms


def measure(args: argparse.Namespace, overrides: list[str]) -> str:
    """Run all regimes and write result.json and result.md after each repeat. Returns the tables.

    Raises:
        ConfigError, ValueError: as `plan`.
        RunFailed: a run ended with an error.
    """
    planned_regimes = plan(args, overrides)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "runs": 0, "overrides": overrides}
    rows: dict[str, dict[str, list[list[Row]]]] = {}
    for planned in planned_regimes:
        rows[planned.regime.name] = {arm: [] for arm in planned.arms}
    for run in range(args.runs):
        for planned in rotated(planned_regimes, run):
            for arm, arm_keys in rotated(list(planned.arms.items()), run):
                folder = args.out / f"{planned.regime.folder}_{arm.replace(' ', '_')}_run{run}"
                found = run_arm(planned.config, [*planned.keys, *arm_keys], folder, [])
                measured = [needed_columns(row) for row in found[planned.warmup :]]
                rows[planned.regime.name][arm].append(measured)
                ratio = figures(measured, arm)["step / longer phase"]
                name = f"{planned.regime.name}, {arm}"
                print(f"run {run + 1} of {args.runs}, {name}: {ratio:.3f}", flush=True)
        result["runs"] = run + 1
        result["regimes"] = [
            {
                "name": planned.regime.name,
                "what": planned.words,
                "keys": planned.keys,
                "arms": summarize(rows[planned.regime.name]),
                "rows": rows[planned.regime.name],
            }
            for planned in planned_regimes
        ]
        write_results(args.out, result, table(result), indent=1)
    return table(result)


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    ratios = []
    seconds = []
    for regime in result["regimes"]:
        for arm, found in regime["arms"].items():
            ratio = found["step / longer phase"]
            verdict = "yes" if ratio["median"] <= LIMIT else "no"
            cells = [with_range(found["gen / train"], "{:.2f}"), with_range(ratio, "{:.3f}")]
            alone = found.get("step / phases alone")
            cells += [verdict, with_range(alone, "{:.3f}") if alone else ""]
            overlapped = f"{found['overlapped']['median']:.0%}"
            ratios.append([regime["name"], regime["what"], arm, *cells, overlapped])
            parts = [with_range(found[name], "{:.3g}") for name in SECONDS]
            seconds.append([regime["name"], arm, *parts])
    headings = ["regime", "batch", "arm", "T_gen / T_train", "step / max(T_gen, T_train)"]
    headings += [f"{LIMIT} or less", "over the phases alone", "overlapped steps"]
    lines = [machine_line(result["machine"]), "", *markdown_table(headings, ratios), ""]
    lines += markdown_table(["regime", "arm", *(f"{name}, s" for name in SECONDS)], seconds)
    lines += [
        "",
        f"Medians over {result['runs']} run(s), the regimes alternating (range of the runs' "
        "medians). The phases are those of the same run. A step is its longer phase, the exposed "
        "sync (of which the canary is a part) and the rest. Longer: the median of each step's "
        "longer phase; where the phases are about equal and vary, it is above the medians of both. "
        "Over the phases alone: the longer phase of the disaggregated synchronous arm, where "
        "nothing runs beside it.",
    ]
    return "\n".join(lines) + "\n"
