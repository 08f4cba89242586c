"""The update phase of PPO: actor and critic in turns on one core, or at the same time on a core each.

    python -m benchmarks.update_phase --out DIR [--config config/ppo_gae.yaml] [--runs 3] [--warmup 3] [section.key=value ...]

Both arms are whole runs at staleness 0, in turns. Split, the phase can at best be (T_actor + T_critic) /
max(T_actor, T_critic) times as fast. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, run_arm
from benchmarks.throughput.cases import UNEVALUATED

TIMES = {
    "T_actor": "time/actor_update_s",
    "T_critic": "time/critic_update_s",
    "update phase": "time/update_s",
    "whole training": "time/train_s",
}
WHERE = {
    "one core": [
        "placement.pools={rollout: [1], train: [1]}",
        "placement.roles={rollout: rollout, actor: train, critic: train, ref: train}",
    ],
    "split": [
        "placement.pools={rollout: [1], actor: [1], critic: [1]}",
        "placement.roles={rollout: rollout, actor: actor, critic: critic, ref: actor}",
    ],
}


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over all steps of an arm, in seconds."""
    return {name: statistics.median(row[column] for row in rows) for name, column in TIMES.items()}


def headline(arms: dict[str, dict[str, float]]) -> dict[str, float]:
    """How many times as fast the split phase is, and could be at best by the arithmetic."""
    one, split = arms["one core"], arms["split"]
    return {
        "speedup": one["update phase"] / split["update phase"],
        "best": (one["T_actor"] + one["T_critic"]) / max(one["T_actor"], one["T_critic"]),
    }


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = ["| arm | " + " | ".join(TIMES) + " |", "| --- |" + " --- |" * len(TIMES)]
    lines += [
        f"| {arm} | " + " | ".join(f"{t[n]:.3g}" for n in TIMES) + " |"
        for arm, t in result["arms"].items()
    ]
    h = result["headline"]
    said = f"Split, the update phase is {h['speedup']:.2f} times as fast; the arithmetic allows {h['best']:.2f}."
    return (
        "\n".join([*lines, "", f"Medians over {result['steps']} steps per arm, seconds.", said])
        + "\n"
    )


def main() -> None:
    """Parse, run the arms in turns, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--config", default=str(ROOT / "config/ppo_gae.yaml"))
    parser.add_argument("--runs", type=int, default=3, help="runs of each arm")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped from each run")
    args, overrides = parser.parse_known_args()
    collected: dict[str, list[dict[str, Any]]] = {arm: [] for arm in WHERE}
    for run in range(args.runs):
        order = list(WHERE.items())
        for arm, keys in order if run % 2 == 0 else reversed(order):
            folder = Path(args.out) / f"{arm.replace(' ', '_')}_run{run}"
            rows = run_arm(
                args.config, [*UNEVALUATED, *keys, "pipeline.staleness=0"], folder, overrides
            )
            collected[arm] += rows[args.warmup :]
            print(
                f"run {run + 1} of {args.runs}, {arm}: {summarise(rows[args.warmup :])}", flush=True
            )
    arms = {arm: summarise(rows) for arm, rows in collected.items()}
    result = {
        "overrides": overrides,
        "steps": len(collected["split"]),
        "arms": arms,
        "headline": headline(arms),
    }
    Path(args.out, "result.json").write_text(json.dumps(result, indent=2) + "\n")
    Path(args.out, "result.md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
