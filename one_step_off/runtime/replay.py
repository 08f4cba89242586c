"""A skipped update once more, on the trainers alone: main_ppo config=FILE --replay OUTPUT_DIR/skipped/step_000012.

The weights are those of the run's newest checkpoint at or before that step, or the initial ones; so log-probs and ratios
are those of the run only where it saved then. Nothing of the run is changed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.checkpoint import checkpoints as checkpoint
from one_step_off.config.schema import Config
from one_step_off.data.samples import TRAINER_FIELDS, Batch, Sample
from one_step_off.monitoring.console import RunConsole
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import launch


def describe_quantities(samples: list[Sample], found: dict[str, list[np.ndarray]]) -> list[str]:
    """A line per quantity, of which each sample has float [R]: the trained tokens where it is not finite, three at most,
    where it is smallest and where it is largest."""
    lines, places = [], [(s, t) for s in samples for t in np.flatnonzero(s.loss_mask)]
    for name, arrays in found.items():
        values = np.concatenate([x[s.loss_mask] for x, s in zip(arrays, samples, strict=True)])
        order, bad = values.argsort(), np.flatnonzero(~np.isfinite(values))
        finite = [i for i in order if np.isfinite(values[i])]
        lines.append(f"{name}: {len(bad)} of {len(values)} trained tokens are not finite")
        for i in (*bad[:3], *finite[:1], *finite[-1:]):
            sample, token = places[i]
            where = f"prompt {sample.prompt_id}, sample {sample.index} (reward {sample.reward:.4g}), token {token}"
            lines.append(f"  {values[i]:.6g} at {where}")
    return lines


async def replay_update(
    batch: Batch, prepared: "launch.Prepared", team: Any, tracker: Tracker
) -> None:
    await launch.resume(prepared, team, tracker)
    mu, now = [s.log_probs for s in batch.samples], await team.groups["actor"].log_prob(batch)
    found = {"engine's log-prob": mu, "trainer's log-prob": now}
    found["ratio"] = [np.exp(x - y) for x, y in zip(now, mu, strict=True)]
    found |= {
        name: getattr(batch, name) for name in TRAINER_FIELDS if getattr(batch, name) is not None
    }
    for line in describe_quantities(batch.samples, found):
        tracker.log(line)
    for role, group in team.groups.items():
        told = await group.update(batch)
        tracker.log(
            f"{role}: "
            + ", ".join(f"{name} {x:.6g}" for name, x in told.items() if name.startswith(role))
        )


def replay(cfg: Config, folder: str) -> int:
    """Make the update of the batch in `folder` and print what is found; returns the exit code. Raises ConfigError."""
    batch = checkpoint.read_batch(Path(folder))
    before = [
        p for p in checkpoint.finished(checkpoint.folder_of(cfg)) if int(p.name[5:]) <= batch.step
    ]
    cfg.trainer.resume, cfg.trainer.output_dir = str(before[-1]) if before else "never", folder
    with RunConsole() as run_console:
        run_console.print_line(
            f"step {batch.step} again, with the weights of {before[-1] if before else 'the initial model'}"
        )
        prepared = launch.prepare(
            cfg, run_console.print_line, run_console.progress, scores=False
        )  # the batch holds its rewards
        launch.run_on_ray(
            prepared, Tracker(folder, 0, console=run_console), partial(replay_update, batch)
        )
    return 0
