"""Repeat a skipped update on the trainers alone: --replay OUTPUT_DIR/skipped/step_000012.

The weights are those of the run's newest checkpoint at or before that step, or the initial ones. So
log-probs and ratios are those of the run only where it saved a checkpoint of that step. Nothing of
the run is changed."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off import checkpoint
from one_step_off.config.schema import Config
from one_step_off.config.supervised import WARM_UP_FOLDER
from one_step_off.data.samples import TRAINER_FIELDS, Batch, Sample
from one_step_off.monitoring.console import CONSOLE_LOG, RunConsole
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import launch, run_folder
from one_step_off.runtime.attempts import load_checkpoint, log_pools
from one_step_off.runtime.interrupts import LoopRunner
from one_step_off.runtime.prepare import RunInputs
from one_step_off.runtime.sft_phase import finished_model

SHOWN_NOT_FINITE = 3


def replay(cfg: Config, folder: str) -> int:
    """Repeat the update of the batch in `folder` and print what it finds; returns the exit code.
    Raises ConfigError."""
    batch = checkpoint.read_batch(Path(folder))
    resume_path = _newest_checkpoint_until(cfg, batch.step)
    cfg.trainer.resume = str(resume_path) if resume_path else "never"
    model = finished_model(Path(cfg.trainer.output_dir) / WARM_UP_FOLDER)
    if cfg.trainer.sft_steps and model is not None:
        cfg.model.path = str(model)
    cfg.trainer.output_dir = folder
    log_file = Path(folder, CONSOLE_LOG)
    with run_folder.locked(cfg), RunConsole(log_file=log_file) as console:
        weights = resume_path or "the initial model"
        console.print_line(f"step {batch.step} again, with the weights of {weights}")
        # The batch holds its rewards: no reward function is called.
        prepared = launch.prepare(cfg, console.print_line, console.progress, calls_rewards=False)
        tracker = Tracker(folder, 0, console=console)
        with launch.ray_session(cfg, tracker):
            LoopRunner().run(_replay_on_trainers(batch, prepared, tracker))
    return 0


def _newest_checkpoint_until(cfg: Config, step: int) -> Path | None:
    earlier = [
        path
        for path in checkpoint.finished(checkpoint.folder_of(cfg))
        if int(path.name.removeprefix("step_")) <= step
    ]
    return earlier[-1] if earlier else None


async def _replay_on_trainers(batch: Batch, prepared: RunInputs, tracker: Tracker) -> None:
    """Start the trainable roles, repeat the update, and end them."""
    from one_step_off.runtime.processes import RunProcesses

    processes: RunProcesses | None = None
    try:
        with tracker.console.working("starting engines and trainers"):
            processes = RunProcesses(prepared, trainers_only=True)
            log_pools(prepared.cfg, processes, tracker)
            await asyncio.gather(*(group.setup() for group in processes.groups.values()))
        await replay_update(batch, prepared, processes, tracker)
    finally:
        if processes:
            await processes.end()


async def replay_update(
    batch: Batch, prepared: RunInputs, processes: Any, tracker: Tracker
) -> None:
    """Load the checkpoint, compare the log-probs of engine and trainer, repeat the update, and log
    what it finds."""
    await load_checkpoint(prepared, prepared.resume_point, processes, tracker)
    engine_log_probs = [sample.log_probs for sample in batch.samples]
    trainer_log_probs = await processes.groups["actor"].log_prob(batch)
    log_prob_pairs = zip(trainer_log_probs, engine_log_probs, strict=True)
    quantities = {
        "engine's log-prob": engine_log_probs,
        "trainer's log-prob": trainer_log_probs,
        "ratio": [np.exp(trainer - engine) for trainer, engine in log_prob_pairs],
    }
    for name in TRAINER_FIELDS:
        values = getattr(batch, name)
        if values is not None and values[0].ndim == 1:
            quantities[name] = values
    for line in describe_quantities(batch.samples, quantities):
        tracker.log(line)
    for role, group in processes.groups.items():
        metrics = await group.update(batch)
        own_metrics = [f"{name} {x:.6g}" for name, x in metrics.items() if name.startswith(role)]
        tracker.log(f"{role}: " + ", ".join(own_metrics))


def describe_quantities(
    samples: list[Sample], quantities: dict[str, list[np.ndarray]]
) -> list[str]:
    """Lines about each quantity: the trained tokens where it is not finite (three at most),
    smallest and largest.

    Args:
        quantities: name -> per sample the value of each response token, float [R].
    """
    trained_tokens = [
        (sample, position) for sample in samples for position in np.flatnonzero(sample.loss_mask)
    ]
    lines = []
    for name, values_by_sample in quantities.items():
        pairs = zip(values_by_sample, samples, strict=True)
        values = np.concatenate([array[sample.loss_mask] for array, sample in pairs])
        not_finite = np.flatnonzero(~np.isfinite(values))
        lines.append(f"{name}: {len(not_finite)} of {len(values)} trained tokens are not finite")
        ascending = [index for index in values.argsort() if np.isfinite(values[index])]
        smallest = ascending[:1]
        largest = ascending[-1:]
        for index in (*not_finite[:SHOWN_NOT_FINITE], *smallest, *largest):
            sample, position = trained_tokens[index]
            where = (
                f"prompt {sample.prompt_id}, sample {sample.index} (reward {sample.reward:.4g}), "
                f"token {position}"
            )
            lines.append(f"  {values[index]:.6g} at {where}")
    return lines
