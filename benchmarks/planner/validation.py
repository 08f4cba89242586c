"""The planner against the clock: it predicts runs from two calibrating ones, and then makes
them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.report import markdown_table, write_results
from benchmarks.common.runs import alternated, run_arm
from one_step_off.config.loading import load_config
from one_step_off.config.placement import resolved_device
from one_step_off.monitoring.summary import speed_summary
from one_step_off.runtime.validation import validate
from one_step_off.tools.planner import calibration
from one_step_off.tools.planner.measured_sync import WARM_UP
from one_step_off.tools.planner.simulation import simulate
from one_step_off.tools.planner.work import Work

STEPS = 20
FIXED_KEYS = [
    "data.val_files=",
    "trainer.test_freq=-1",
    "trainer.save_hf_model=false",
    "logging.tensorboard=false",
    # The weights hardly change, so that responses are equally long in all arms and steps.
    "actor.lr=1e-9",
    f"trainer.total_steps={STEPS}",
]
"""Config keys of all runs."""

WHOLE_BATCH = "synchronous"
QUARTER_BATCH = "synchronous, a quarter of the batch"
CALIBRATING = (WHOLE_BATCH, QUARTER_BATCH)

STEP = "median/time/step_s"
IDLE_ROLLOUT = "idle_share/rollout"
IDLE_TRAINER = "idle_share/trainer"
FIGURES = (STEP, "median/time/generate_s", "median/time/train_s", IDLE_ROLLOUT, IDLE_TRAINER)

Figures = dict[str, float]


def arms_of(batch: int) -> dict[str, list[str]]:
    """Arm -> its config keys, for pools of one replica and one rank. `batch`: prompts of a step."""

    def prompts(count: int) -> list[str]:
        return [f"data.train_batch_size={count}", f"actor.ppo_mini_batch_size={count}"]

    synchronous = ["pipeline.staleness=0"]
    one_step_off = ["pipeline.staleness=1"]
    one_pool = ["placement.pools={all: [2]}", "placement.roles={rollout: all, actor: all}"]
    short = ["data.max_response_length=10"]
    return {
        WHOLE_BATCH: [*synchronous, *prompts(batch)],
        QUARTER_BATCH: [*synchronous, *prompts(batch // 4)],
        "one step off": [*one_step_off, *prompts(batch)],
        "one step off, half of the batch": [*one_step_off, *prompts(batch // 2)],
        "one step off, responses of 10 tokens at most": [*one_step_off, *prompts(batch), *short],
        "synchronous, half of the batch": [*synchronous, *prompts(batch // 2)],
        "colocated, two of each": [*synchronous, *prompts(batch), *one_pool],
    }


def predict(work: Work, config: str, keys: list[str]) -> dict[str, Any]:
    """What the simulation predicts for an arm.

    Args:
        work: the work of a step, from the calibration.
        config: path of the config.
        keys: config keys of the arm.
    """
    cfg = load_config([f"config={config}", *keys])
    lengths = np.minimum(work.lengths, cfg.data.max_response_length)
    arm_work = replace(work, prompts=cfg.data.train_batch_size, lengths=lengths)
    replicas, ranks = calibration.devices(cfg)
    roles = cfg.placement.roles
    if roles["rollout"] == roles["actor"]:
        replicas = 0  # the simulation's sign for one pool
    return simulate(
        arm_work,
        replicas,
        ranks,
        staleness=cfg.pipeline.staleness,
        overlap=cfg.weight_sync.overlap,
        static=resolved_device(cfg) == "cpu",
        steps=STEPS,
    )


def _folder_name(number: int, arm: str) -> str:
    return f"round{number}_{arm.replace(' ', '_').replace(',', '')}"


def run_round(
    number: int, args: argparse.Namespace, arms: dict[str, list[str]]
) -> dict[str, dict[str, Figures]]:
    """Run all arms once, calibrate, and predict all arms.

    Args:
        number: of the round. Odd rounds run the arms in the opposite order.
        args: the flags.
        arms: arm -> its config keys.

    Returns:
        "measured" and "predicted": arm -> figures.

    Raises:
        RunFailed: a run ended with an error.
    """
    folders = {arm: args.out / _folder_name(number, arm) for arm in arms}
    measured: dict[str, Figures] = {}
    for arm in alternated(list(arms), number):
        begin = time.perf_counter()
        rows = run_arm(args.config, [], folders[arm], arms[arm])[WARM_UP:]
        measured[arm] = {
            name: value for name, value in speed_summary(rows).items() if name in FIGURES
        }
        step = measured[arm][STEP]
        seconds = time.perf_counter() - begin
        print(f"round {number + 1}, {arm}: {step:.3f} s/step (run of {seconds:.0f} s)", flush=True)
    work = calibration.by_runs([str(folders[arm]) for arm in CALIBRATING])
    predicted = {}
    for arm, keys in arms.items():
        prediction = predict(work, args.config, keys)
        predicted[arm] = {name: prediction[name] for name in measured[arm]}
    return {"measured": measured, "predicted": predicted}


def validation(args: argparse.Namespace, overrides: list[str]) -> str:
    """Run the rounds and write the results. Returns the table in Markdown.

    Raises:
        ConfigError: a key is wrong.
        RunFailed: a run ended with an error.
    """
    chosen = {*CALIBRATING, *args.arms}
    arms = {}
    for arm, keys in arms_of(args.batch).items():
        if arm in chosen:
            arms[arm] = [*FIXED_KEYS, *overrides, *keys]
            validate(load_config([f"config={args.config}", *arms[arm]]))
    args.out.mkdir(parents=True, exist_ok=True)
    rounds = [run_round(number, args, arms) for number in range(args.rounds)]
    result = {"config": args.config, "overrides": overrides, "rounds": rounds}
    markdown = table(rounds)
    write_results(args.out, result, markdown)
    return markdown


def _idle_shares(runs: list[Figures]) -> str:
    rollout = statistics.median(run[IDLE_ROLLOUT] for run in runs)
    trainer = statistics.median(run[IDLE_TRAINER] for run in runs)
    return f"{rollout:.0%}, {trainer:.0%}"


def table(rounds: list[dict[str, dict[str, Figures]]]) -> str:
    """Medians over the rounds, in Markdown: seconds of a step, the error of each round, idle
    shares.
    """
    rows = []
    for arm in rounds[0]["measured"]:
        measured = [one_round["measured"][arm] for one_round in rounds]
        predicted = [one_round["predicted"][arm] for one_round in rounds]
        errors = [
            f"{prediction[STEP] / measurement[STEP] - 1:+.1%}"
            for measurement, prediction in zip(measured, predicted, strict=True)
        ]
        row = [
            f"{arm} (calibrates)" if arm in CALIBRATING else arm,
            f"{statistics.median(run[STEP] for run in measured):.3f}",
            f"{statistics.median(run[STEP] for run in predicted):.3f}",
            ", ".join(errors),
            _idle_shares(measured),
            _idle_shares(predicted),
        ]
        rows.append(row)
    headings = [
        "arm",
        "step measured, s",
        "predicted, s",
        "error",
        "idle measured: rollout, trainer",
        "predicted",
    ]
    return "\n".join(markdown_table(headings, rows)) + "\n"
