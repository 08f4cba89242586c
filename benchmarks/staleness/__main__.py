"""What older samples gain in speed and cost in learning.

    python -m benchmarks.staleness --out DIR [--ages 0 1 2 4 8] [--modes wait recompute keep]
        [--parts speed learning] [--runs 1] [--seeds 0 1 2] [--corrections none tis mis]
        [--steps 40] [--most 256] [--config FILE] [--model DIR] [section.key=value ...]

speed: response lengths are drawn per sample (log-normal, see benchmarks/common/lengths.py), so all
arms do the same work. learning: the model ends its responses itself, and each arm trains on the
same prompts; it is measured with each rollout correction and seed.
The parts may be run one after another: DIR/result.json keeps what it has. The table and the plot
(result.md, staleness.png) show all of it. The run folders are in DIR too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.lengths import keys_of
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import write_results
from benchmarks.common.runs import NO_EVALUATION, RunFailed, run_arm
from benchmarks.staleness.arms import (
    CORRECTIONS,
    LEARNING,
    MODES,
    PARTS,
    SPEED,
    Arm,
    arms_of,
    correction_keys,
    learning_figures,
    speed_figures,
    steady_rows,
)
from benchmarks.staleness.report import plot, table
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        part: SPEED or LEARNING.
        name: of its arm, with the correction where it learns.
        number: of the repetition, or the seed.
        keys: its config keys.
    """

    part: str
    arm: Arm
    name: str
    number: int
    keys: list[str]

    @property
    def folder_name(self) -> str:
        """Below DIR."""
        words = f"{self.part} {self.name} {self.number}"
        return words.replace(", ", "_").replace(" ", "_").replace("=", "")


def arguments(argv: list[str] | None = None) -> tuple[Parser, argparse.Namespace, list[str]]:
    """Parse the command line. Returns the parser, the flags and the config keys."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--ages", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each arm")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="that learn")
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["none"])
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--most", type=int, default=256, help="longest timed response, in tokens")
    parser.add_argument(
        "--config", help="default: gsm8k_tiny_cpu; smollm2_addition_cpu for --model"
    )
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    args, overrides = parser.parse(argv)
    if args.config is None:
        name = "smollm2_addition_cpu.yaml" if args.model else "gsm8k_tiny_cpu.yaml"
        args.config = config_path(name)
    if args.model:
        overrides = [f"model.path={args.model}", *overrides]
    return parser, args, overrides


def runs_of(args: argparse.Namespace, overrides: list[str], length_keys: list[str]) -> list[Run]:
    """The runs that the flags ask for. Timed arms alternate."""
    common = [*overrides, f"trainer.total_steps={args.steps}", "trainer.save_hf_model=false"]
    arms = arms_of(args.ages, args.modes)
    runs = []
    for number in range(args.runs if SPEED in args.parts else 0):
        for arm in arms:
            keys = [*common, *NO_EVALUATION, *length_keys, *arm.keys]
            runs.append(Run(SPEED, arm, arm.name, number, keys))
    for seed in args.seeds if LEARNING in args.parts else []:
        for correction in args.corrections:
            for arm in arms:
                keys = [*common, "trainer.test_freq=-1", "trainer.val_before_train=false"]
                keys += [*arm.keys, *correction_keys(correction)]
                keys.append(f"trainer.seed={seed}")
                runs.append(Run(LEARNING, arm, f"{arm.name}, {correction}", seed, keys))
    return runs


def checked_config(config: str, runs: list[Run]) -> Config:
    """The config of the last run, after all have been validated. Raises ConfigError."""
    cfg = Config()
    for run in runs:
        cfg = load_config([f"config={config}", *run.keys])
        validate(cfg)
    return cfg


def earlier_result(out: Path) -> dict[str, Any]:
    """What result.json in this folder has; without it, empty parts."""
    path = out / "result.json"
    if path.exists():
        return json.loads(path.read_text())
    return {SPEED: {}, LEARNING: {}}


def measured(args: argparse.Namespace, runs: list[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Run them one after another; yields the figures of each. Raises RunFailed."""
    for run in runs:
        folder = args.out / run.folder_name
        rows = run_arm(args.config, run.keys, folder, [])
        if run.part == SPEED:
            figures = speed_figures(rows, run.arm.staleness)
            shown = f"{figures['samples/s']:.1f} samples/s, idle {figures['rollout idle']:.1%}"
        else:
            figures = learning_figures(rows, folder)
            shown = f"reward {figures['reward, all samples']:.3f}"
        print(f"{run.part}, {run.name}, {run.number}: {shown}", flush=True)
        yield run, figures


def main(argv: list[str] | None = None) -> int:
    """Run the arms and write the results. Returns the exit code."""
    parser, args, overrides = arguments(argv)
    try:
        length_keys, lengths = keys_of(f"longtail:{args.most}")
        runs = runs_of(args, overrides, length_keys)
        cfg = checked_config(args.config, runs)
        for age in args.ages if SPEED in args.parts else []:
            steady_rows([{}] * args.steps, age)
    except (ConfigError, ValueError) as e:
        parser.error(str(e))
    args.out.mkdir(parents=True, exist_ok=True)
    result = earlier_result(args.out)
    work = f"{args.steps} steps of {cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples"
    result["machine"] = machine()
    if SPEED in args.parts or "what" not in result:
        result["what"] = f"{work}; lengths {lengths}."
    if LEARNING in args.parts or "learns" not in result:
        result["learns"] = f"{work}; {Path(args.config).name}."
    try:
        for run, figures in measured(args, runs):
            result[run.part].setdefault(run.name, {})[str(run.number)] = figures
            write_results(args.out, result, table(result), indent=1)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    plot(result, args.out / "staleness.png")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
