"""Does a student learn sooner from a teacher than from a reward? Held-out reward at equal samples.

    python -m benchmarks.distillation --out DIR [--seeds 0 1 2] [--arms grpo distill both top_k]
        [--teacher DIR] [--teacher-steps 40] [--test-freq 2] [--reuse] [section.key=value ...]

First it trains the teacher: tiny:qwen2 by GRPO, as the default config does (--teacher: a model of
your own). Then the student of config/distill_tiny_cpu.yaml, which has one layer in place of two,
from the same start in each arm: by GRPO, by distillation alone, by both, and by the loss over the
teacher's likeliest tokens. Writes result.json, result.md and distillation.png into DIR. With
--reuse the runs that DIR already has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.machine import machine
from benchmarks.common.paths import config_path
from benchmarks.common.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    markdown_table,
    pyplot,
    save_figure,
    write_results,
)
from benchmarks.common.runs import RunFailed, rotated, run_arm, run_process

ARMS = {
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "placement.roles={rollout: rollout, actor: actor}",
        "teacher.path=",
    ],
    "distill": ["algorithm.adv_estimator=none"],
    "both": ["algorithm.adv_estimator=grpo"],
    "top_k": ["algorithm.adv_estimator=none", "teacher.top_k=8"],
}
"""Arm -> its config keys over config/distill_tiny_cpu.yaml."""

SHARES = (0.5, 0.9, 0.95)
"""Of the teacher's held-out reward: the samples until a student has so much are reported."""

Curve = list[tuple[float, float]]
"""(samples trained on, held-out reward), in order."""


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns the flags and the config keys, which hold for the
    students."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--teacher", default="", help="a model directory; empty: train one")
    parser.add_argument("--teacher-steps", type=int, default=40)
    parser.add_argument("--test-freq", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--reuse", action="store_true", help="do not repeat finished runs in DIR")
    args, keys = parser.parse(argv)
    if len(set(args.seeds)) < len(args.seeds) or len(set(args.arms)) < len(args.arms):
        parser.error(f"--seeds {args.seeds} --arms {args.arms}: each one once")
    if args.test_freq < 1 or args.teacher_steps < 1:
        parser.error(
            f"--test-freq {args.test_freq} --teacher-steps {args.teacher_steps}: at least 1"
        )
    return args, keys


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of NAME.jsonl in a run folder."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder has ended: its summary is its last file."""
    return (folder / "summary.json").exists()


def train_teacher(args: argparse.Namespace) -> str:
    """Train the teacher by GRPO. Returns its model directory."""
    folder = args.out / "teacher"
    if not (args.reuse and is_finished(folder)):
        keys = [f"trainer.total_steps={args.teacher_steps}", "trainer.test_freq=-1"]
        run_arm(config_path("gsm8k_tiny_cpu.yaml"), keys, folder, [])
    return str((folder / "hf_model").resolve())


def score_of(teacher: str, out: Path, overrides: list[str]) -> float:
    """The teacher's held-out reward, on the students' questions."""
    keys = [f"model.path={teacher}", "trainer.val_only=true", *ARMS["grpo"]]
    config = config_path("distill_tiny_cpu.yaml")
    folder = out / "teacher_score"
    _evaluate(config, keys, folder, overrides)
    return rows_of(folder / "val_only", "evaluations")[-1]["val/reward"]


def _evaluate(config: str, keys: list[str], folder: Path, overrides: list[str]) -> None:
    """Run the program once with trainer.val_only."""
    command = [sys.executable, "-P", "-m", "one_step_off.main_ppo", f"config={config}"]
    command += [*overrides, *keys, "trainer.resume=never", "trainer.overwrite=true"]
    run_process([*command, f"trainer.output_dir={folder}"])


def curve_of(rows: list[dict[str, Any]], evaluated: list[dict[str, Any]]) -> Curve:
    """The held-out reward by samples. Version v has trained on the samples of the first v steps."""
    samples = [0.0]
    for row in rows:
        samples.append(samples[-1] + row["samples"])
    return [(samples[int(e["val/version"])], e["val/reward"]) for e in evaluated]


def samples_until(curve: Curve, score: float) -> float | None:
    """The samples of the first evaluation with at least this score; None: there is none."""
    for samples, reward in curve:
        if reward >= score:
            return samples
    return None


def measure(
    args: argparse.Namespace, overrides: list[str], teacher: str
) -> dict[str, dict[int, Curve]]:
    """Run every arm with every seed. Raises RunFailed: a run ended with an error."""
    curves: dict[str, dict[int, Curve]] = {arm: {} for arm in args.arms}
    for number, seed in enumerate(args.seeds):
        for arm in rotated(args.arms, number):
            folder = args.out / f"{arm}_seed_{seed}"
            keys = [f"trainer.seed={seed}", f"trainer.test_freq={args.test_freq}"]
            keys += ["trainer.save_hf_model=false", f"teacher.path={teacher}", *ARMS[arm]]
            if not (args.reuse and is_finished(folder)):
                run_arm(config_path("distill_tiny_cpu.yaml"), keys, folder, overrides)
            curves[arm][seed] = curve_of(rows_of(folder, "metrics"), rows_of(folder, "evaluations"))
            print(f"{arm}, seed {seed}: {curves[arm][seed][-1][1]:.3f} at the end", flush=True)
    return curves


def _until_text(of_seeds: dict[int, Curve], score: float) -> str:
    """ "1,536; 1,280; never" of the seeds."""
    found = [samples_until(curve, score) for curve in of_seeds.values()]
    return "; ".join("not reached" if value is None else f"{value:,.0f}" for value in found)


def table(curves: dict[str, dict[int, Curve]], teacher_score: float) -> str:
    """The results in Markdown."""
    headings = ["arm", "before", "at the end, mean (by seed)"]
    headings += [f"samples until {share:.0%} of the teacher's" for share in SHARES]
    rows = []
    for arm, of_seeds in curves.items():
        first = statistics.fmean(curve[0][1] for curve in of_seeds.values())
        last = [curve[-1][1] for curve in of_seeds.values()]
        by_seed = ", ".join(f"{value:.3f}" for value in last)
        cells = [arm, f"{first:.3f}", f"{statistics.fmean(last):.3f} ({by_seed})"]
        rows.append(cells + [_until_text(of_seeds, share * teacher_score) for share in SHARES])
    lines = [f"The teacher's held-out reward: {teacher_score:.3f}.", ""]
    return "\n".join(lines + markdown_table(headings, rows)) + "\n"


def plot(curves: dict[str, dict[int, Curve]], teacher_score: float, path: Path) -> None:
    """Held-out reward by samples: a thin line per seed, a thick one for their mean."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.4))
    axes.axhline(teacher_score, color=GREY, linestyle="--", label="teacher")
    for (arm, of_seeds), color in zip(curves.items(), (BLUE, ORANGE, GREEN, RED), strict=False):
        rewards = []
        x: list[float] = []
        for curve in of_seeds.values():
            x = [samples for samples, _ in curve]
            rewards.append([reward for _, reward in curve])
            axes.plot(x, rewards[-1], color=color, alpha=0.3, linewidth=1)
        mean = [statistics.fmean(values) for values in zip(*rewards, strict=True)]
        axes.plot(x, mean, color=color, linewidth=2, label=f"{arm}, mean of {len(rewards)} seeds")
    axes.set(xlabel="samples trained on", title="reward held out, greedy", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Run all arms and write the results. Returns the exit code."""
    args, overrides = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        teacher = args.teacher or train_teacher(args)
        teacher_score = score_of(teacher, args.out, overrides)
        print(f"teacher: {teacher_score:.3f}", flush=True)
        curves = measure(args, overrides, teacher)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    text = table(curves, teacher_score)
    plot(curves, teacher_score, args.out / "distillation.png")
    result = {
        "machine": machine(),
        "overrides": overrides,
        "teacher": {"path": teacher, "held out": teacher_score},
        "curves": curves,
    }
    write_results(args.out, result, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
