"""The update phase of PPO: actor and critic one after another on one core, or at the same time on a
core each.

    python -m benchmarks.update_phase --out DIR [--config config/ppo_gae.yaml] [--runs 3]
        [--warmup 3] [section.key=value ...]

Both arms are whole runs at staleness 0, in alternating order. Split, the phase can at best be
(T_actor + T_critic) / max(T_actor, T_critic) times as fast. Writes result.json and result.md into
DIR.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.paths import config_path
from benchmarks.common.report import markdown_table, write_results
from benchmarks.common.runs import NO_EVALUATION, RunFailed, alternated, run_arm

TIMES = {
    "T_actor": "time/actor_update_s",
    "T_critic": "time/critic_update_s",
    "update phase": "time/update_s",
    "whole training": "time/train_s",
}
ARMS = {
    "one core": [
        "placement.pools={rollout: [1], train: [1]}",
        "placement.roles={rollout: rollout, actor: train, critic: train, ref: train}",
    ],
    "split": [
        "placement.pools={rollout: [1], actor: [1], critic: [1]}",
        "placement.roles={rollout: rollout, actor: actor, critic: critic, ref: actor}",
    ],
}


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all steps of an arm, in seconds."""
    return {name: statistics.median(row[column] for row in rows) for name, column in TIMES.items()}


def headline(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    """How many times as fast the split phase is, and at best could be."""
    one_core = arms["one core"]
    split = arms["split"]
    actor = one_core["T_actor"]
    critic = one_core["T_critic"]
    return {
        "speedup": one_core["update phase"] / split["update phase"],
        "best": (actor + critic) / max(actor, critic),
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    rows = []
    for arm, seconds in result["arms"].items():
        rows.append([arm, *(f"{seconds[name]:.3g}" for name in TIMES)])
    found = result["headline"]
    lines = markdown_table(["arm", *TIMES], rows)
    lines += [
        "",
        f"Medians over {result['steps']} steps per arm, seconds.",
        f"Split, the update phase is {found['speedup']:.2f} times as fast; "
        f"the arithmetic allows {found['best']:.2f}.",
    ]
    return "\n".join(lines) + "\n"


def measure(args: argparse.Namespace, overrides: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run the arms. Returns per arm the steps of all runs after the warm-up.

    Raises:
        RunFailed: a run ended with an error.
    """
    collected: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for run in range(args.runs):
        for arm, arm_keys in alternated(list(ARMS.items()), run):
            folder = args.out / f"{arm.replace(' ', '_')}_run{run}"
            keys = [*NO_EVALUATION, *arm_keys, "pipeline.staleness=0"]
            rows = run_arm(args.config, keys, folder, overrides)[args.warmup :]
            collected[arm] += rows
            print(f"run {run + 1} of {args.runs}, {arm}: {summarize(rows)}", flush=True)
    return collected


def main() -> int:
    """Run the arms and write the results. Returns the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder for the results")
    parser.add_argument("--config", default=config_path("ppo_gae.yaml"))
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    args, overrides = parser.parse()
    try:
        collected = measure(args, overrides)
    except RunFailed as e:
        print(e, file=sys.stderr)
        return e.code
    arms = {arm: summarize(rows) for arm, rows in collected.items()}
    result = {
        "overrides": overrides,
        "steps": len(collected["split"]),
        "arms": arms,
        "headline": headline(arms),
    }
    markdown = table(result)
    write_results(args.out, result, markdown)
    print(markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
