"""The planner against the clock, against published tables, and on paper.

    python -m benchmarks.planner --out DIR [--config FILE] [--rounds 1] [--arms "one step off" ...] [section.key=value ...]
    python -m benchmarks.planner --published      what the simulation makes of the phase times that others have published
    python -m benchmarks.planner --paper          1,024 and 16,384 GPUs by formulas, with this machine's cost of a sample

The first calibrates by two runs in turns, of a whole batch and of a quarter of it, predicts other runs and then makes them:
one step off, half a batch, short responses, colocated. Every round calibrates anew and runs the arms in the opposite order,
so that other work on the machine meets all of them. Writes result.json and result.md into DIR. A round takes about five minutes
with the default config on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command_line import ROOT, run_arm
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.config.validation import resolved_device
from one_step_off.monitoring.tracker import speed
from one_step_off.planner import planner as plan
from one_step_off.planner.simulation import Work, simulate
from one_step_off.runtime.validation import validate

# The weights hardly move, so that responses are as long in all arms and steps.
FIXED = [
    "data.val_files=",
    "trainer.test_freq=-1",
    "trainer.save_hf_model=false",
    "logging.tensorboard=false",
    "actor.lr=1e-9",
]
FIXED += ["trainer.total_steps=20"]
WHOLE, QUARTER = "in turns", "in turns, a quarter of the batch"
FIGURES = {
    "step": "median/time/step_s",
    "generate": "median/time/generate_s",
    "train": "median/time/train_s",
}
FIGURES |= {"idle rollout": "idle_share/rollout", "idle trainer": "idle_share/trainer"}


def arms_of(batch: int) -> dict[str, list[str]]:
    """Arm -> its keys, for pools of one replica and one rank. The first two calibrate."""

    def of(prompts: int) -> list[str]:
        return [f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}"]

    turns, ahead = ["pipeline.staleness=0"], ["pipeline.staleness=1"]
    shared = ["placement.pools={all: [2]}", "placement.roles={rollout: all, actor: all}"]
    return {
        WHOLE: turns + of(batch),
        QUARTER: turns + of(batch // 4),
        "one step off": ahead + of(batch),
        "one step off, half of the batch": ahead + of(batch // 2),
        "one step off, responses of 10 tokens at most": ahead
        + of(batch)
        + ["data.max_response_length=10"],
        "in turns, half of the batch": turns + of(batch // 2),
        "colocated, two of each": turns + of(batch) + shared,
    }


def predict(work: Work, config: str, keys: list[str]) -> dict[str, Any]:
    """What the simulation says of an arm, by the calibration's `work`."""
    cfg = load_config([f"config={config}", *keys])
    lengths = np.minimum(work.lengths, cfg.data.max_response_length)
    work = replace(work, prompts=cfg.data.train_batch_size, lengths=lengths)
    replicas, ranks = plan.devices(cfg)
    shared = cfg.placement.roles["rollout"] == cfg.placement.roles["actor"]
    how = cfg.pipeline.staleness, cfg.weight_sync.overlap, resolved_device(cfg) == "cpu"
    return simulate(work, 0 if shared else replicas, ranks, *how, steps=20)


def validated(args: argparse.Namespace, overrides: list[str]) -> str:
    """Run the rounds; writes the result and returns it in Markdown."""
    out, rounds = Path(args.out), []
    chosen = [WHOLE, QUARTER, *args.arms]
    arms = {
        name: [*FIXED, *overrides, *keys]
        for name, keys in arms_of(args.batch).items()
        if name in chosen
    }
    for keys in arms.values():
        validate(load_config([f"config={args.config}", *keys]))
    out.mkdir(parents=True, exist_ok=True)
    for number in range(args.rounds):
        order, measured, folders = list(arms), {}, {}
        for name in order if number % 2 == 0 else order[::-1]:
            begin = time.perf_counter()
            folders[name] = out / f"round{number}_{name.replace(' ', '_').replace(',', '')}"
            rows = run_arm(args.config, [], folders[name], arms[name])[plan.WARM_UP :]
            measured[name] = {k: v for k, v in speed(rows).items() if k in FIGURES.values()}
            step = measured[name][FIGURES["step"]]
            print(
                f"round {number + 1}, {name}: {step:.3f} s/step (run of {time.perf_counter() - begin:.0f} s)",
                flush=True,
            )
        work = plan.by_runs([str(folders[WHOLE]), str(folders[QUARTER])])
        predicted = {name: predict(work, args.config, keys) for name, keys in arms.items()}
        rounds.append(
            {
                "measured": measured,
                "predicted": {n: {k: p[k] for k in measured[n]} for n, p in predicted.items()},
            }
        )
    result = {"config": args.config, "overrides": overrides, "rounds": rounds}
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "result.md").write_text(table(rounds))
    return table(rounds)


def table(rounds: list[dict[str, Any]]) -> str:
    """Medians over the rounds, in Markdown: seconds a step, the error of each round, and the idle shares."""
    lines = [
        "| arm | step measured, s | predicted, s | error | idle measured: rollout, trainer | predicted |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name in rounds[0]["measured"]:
        sides = {
            side: {k: [r[side][name][k] for r in rounds] for k in FIGURES.values()}
            for side in ("measured", "predicted")
        }
        steps = [sides[side][FIGURES["step"]] for side in sides]
        errors = [f"{p / m - 1:+.1%}" for m, p in zip(*steps, strict=True)]
        idle = [
            ", ".join(
                f"{statistics.median(sides[side][FIGURES[f'idle {role}']]):.0%}"
                for role in ("rollout", "trainer")
            )
            for side in sides
        ]
        fitted = " (calibrates)" if name in (WHOLE, QUARTER) else ""
        middle = " | ".join(f"{statistics.median(step):.3f}" for step in steps)
        lines.append(f"| {name}{fitted} | {middle} | {', '.join(errors)} | {' | '.join(idle)} |")
    return "\n".join(lines) + "\n"


def phases(
    generate: float,
    train: float,
    tail: float = 0.0,
    fixed: float = 0.0,
    sync: float = 0.0,
    gpus: int = 1,
) -> Work:
    """The work of phases that took so long on `gpus` devices: of generation `tail`, of training `fixed`, do not get faster with more."""
    lengths = np.full((64, 1), 1000)  # all alike: nothing is known of them
    each = tail / 1000, (generate - tail) * gpus / 64e3, fixed, (train - fixed) * gpus / 64e3
    return Work(64, lengths, 0.0, *each, sync, places=1 << 20)


# Seconds of a step. In turns on 16 H20: gen, of it generate_sequences, old_log_prob + update_actor, the step. One step off,
# on 4 + 12: generate_sequences, old_log_prob + update_actor, wait_prev_gen, the step. Qwen2.5-Math-7B, DAPO; verl's
# documentation, "One Step Off Policy Async Trainer", July 2025.
VERL = {
    "FSDP2": {"turns": (321, 247, 88 + 286, 749), "ahead": (458, 108 + 337, 45, 520)},
    "Megatron": {"turns": (207, 162, 119 + 344, 699), "ahead": (501, 120 + 347, 59, 566)},
}
# Seconds of a step in turns and one step off. NeMo-RL's documentation, "Performance".
NEMO = {
    "30B-A3B, 32 H100": (192, 152),
    "235B, 256 H100": (312, 231),
    "DeepSeek-V3, 512 H100": (111, 64.1),
    "30B-A3B, 16 GB200": (221, 301),
}


def published() -> str:
    """Tables of what the simulation makes of them."""
    lines = [
        "| verl | step published, s | simulated from its own phases, s | wait published, s | simulated, s |"
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, runs in VERL.items():
        (gen, _, train, step), (ahead_gen, ahead_train, wait, ahead_step) = (
            runs["turns"],
            runs["ahead"],
        )
        turns, ahead = (
            simulate(phases(gen, train), 0, 1),
            simulate(phases(ahead_gen, ahead_train), 1, 1),
        )
        lines.append(f"| {name}, in turns on 16 | {step} | {beside(turns, step)} | | |")
        waited = f"{wait} | {ahead['median/time/wait_rollout_s']:.0f}"
        lines.append(
            f"| {name}, one step off on 4 + 12 | {ahead_step} | {beside(ahead, ahead_step)} | {waited} |"
        )
    lines += [
        "",
        "| verl, 4 + 12 foretold by the run in turns on 16 | generation, s | training, s | step, s |",
    ]
    lines.append("| --- | --- | --- | --- |")
    for name, runs in VERL.items():
        (_, g16, t16, _), (g4, t12, _, step) = runs["turns"], runs["ahead"]
        tail, fixed = (
            (4 * g16 - g4) / 3,
            4 * t16 - 3 * t12,
        )  # of fixed + rest / n, by what both runs took
        lines.append(f"| {name}, published | {g4} | {t12} | {step} |")
        those = phases(g16, t16, tail, fixed, gpus=16)
        best = min(range(1, 16), key=lambda n: simulate(those, n, 16 - n)[FIGURES["step"]])
        arms = [
            (4, phases(g16, t16, gpus=16), "if all gets faster with GPUs"),
            (4, those, "if the fixed parts do not"),
        ]
        for n, work, what in [*arms, (best, those, f"the same on {best} + {16 - best}, the best")]:
            found = simulate(work, n, 16 - n)
            figures = " | ".join(f"{found[FIGURES[x]]:.0f}" for x in ("generate", "train", "step"))
            lines.append(f"| {name}, {what} | {figures} |")
        lines.append(f"| {name}, fixed parts fitted to both runs | {tail:.0f} | {fixed:.0f} | |")
    lines += [
        "",
        "| NeMo-RL | in turns, s | one step off, s | gain | share of both phases that does not get faster with GPUs |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, (turns, ahead) in NEMO.items():
        lines.append(
            f"| {name} | {turns} | {ahead} | {turns / ahead:.2f} | {needed(turns / 2, ahead)} |"
        )
    return "\n".join(lines) + "\n"


def beside(found: dict[str, Any], published_s: float) -> str:
    """A simulated step, and how far it is off."""
    return f"{found[FIGURES['step']]:.0f} ({found[FIGURES['step']] / published_s - 1:+.0%})"


def needed(phase: float, ahead: float) -> str:
    """The least share of two phases of equal length that must take as long on half of the devices for such a step."""
    for share in range(101):
        fixed = share / 100 * phase
        if (
            simulate(phases(phase, phase, fixed, fixed, gpus=32), 16, 16, steps=4)[FIGURES["step"]]
            <= ahead
        ):
            return "does not fit: slower than in turns" if ahead > 2 * phase else f"{share} %"
    return "does not fit: faster than either phase"


# Of a sample: id, log-prob, mask and version of each token.
TOKEN_BYTES = 4 + 4 + 1 + 4
# GPU hours between two unexpected stops: 419 in 54 days on 16,384 H100. Llama 3, arXiv:2407.21783, section 3.3.4.
INTERRUPTED_H = 54 * 24 * 16_384 / 419


def paper() -> str:
    """What grows with the GPUs: 16 samples of 4,096 tokens for each, half of them train, 70B parameters, a step of 300 s."""
    lengths, begin = np.full((64, 16), 4096), time.perf_counter()
    simulate(Work(256, lengths, 0.0, 1e-3, 1e-6, 0.0, 1e-6, 1.0), 8, 8, steps=4)
    sample_s = (time.perf_counter() - begin) / (4 * 256 * 16)
    lines = [
        f"this machine's driver: {sample_s * 1e6:.0f} us a sample (schedule, routing, advantages, metrics; no Ray, no bytes)",
        "",
    ]
    lines += ["| | 1,024 GPUs | 16,384 GPUs |", "| --- | --- | --- |"]
    rows: dict[str, list[str]] = {}
    for gpus in (1024, 16_384):
        samples, senders, nodes = 16 * gpus, gpus // 2, gpus // 8
        volume, stops = samples * 4096 * TOKEN_BYTES, INTERRUPTED_H / gpus
        for name, value in {
            "samples of a step": f"{samples:,}",
            "bytes of a batch: samples x tokens x 13": f"{volume / 1e9:.1f} GB",
            "of which Ray carries, to each trainer node all": f"{volume * nodes / 2 / 1e12:.2f} TB",
            "driver, samples x us": f"{samples * sample_s:.2f} s of a step of 300",
            "groups of the sync, one a sender": f"{senders:,}",
            "of a bucket of 64 MiB, each sender's part": f"{64 * 1024 / senders:.0f} KiB",
            "messages that a receiver gets in a sync (140 GB)": f"{140e9 / 2**26 * senders:,.0f}",
            "the same at 30 us one after the other": f"{140e9 / 2**26 * senders * 3e-5:.0f} s",
            "hours between two stops": f"{stops:.1f}",
            "lost to them: (10 min to restart + half of 5 steps) / that": f"{(600 + 750) / 3600 / stops:.1%}",
        }.items():
            rows.setdefault(name, []).append(value)
    return (
        "\n".join(
            [*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in rows.items())]
        )
        + "\n"
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--out")
    which.add_argument("--published", action="store_true")
    which.add_argument("--paper", action="store_true")
    parser.add_argument("--config", default=str(ROOT / "config/gsm8k_tiny_cpu.yaml"))
    parser.add_argument(
        "--batch", type=int, default=16, help="prompts of a whole batch, at least 4"
    )
    parser.add_argument("--rounds", type=int, default=1)
    predicted = [name for name in arms_of(4) if name not in (WHOLE, QUARTER)]
    told = "the runs to predict, beside the two that calibrate"
    parser.add_argument("--arms", nargs="*", choices=predicted, default=predicted, help=told)
    args, overrides = parser.parse_known_args()
    if args.rounds < 1 or args.batch < 4:
        parser.error(
            f"--rounds {args.rounds} --batch {args.batch}: at least 1 round, and 4 prompts"
        )
    try:
        print(
            published() if args.published else paper() if args.paper else validated(args, overrides)
        )
    except ConfigError as e:
        parser.error(str(e))


if __name__ == "__main__":
    sys.exit(main())
