"""Where the learning rate's decay stands, in a new run and in one that is resumed with another length.

A decay (cosine, linear) goes its way from the end of the warm-up to the run's last optimiser step. A run that is resumed
with another number of steps must not jump on that way: it goes on from where it stood, and goes the rest by the new last
step. The rate itself is `core_algos.learning_rate`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config import Config, ConfigError, settings_of


@dataclass(frozen=True)
class Decay:
    """The way of a decay, in optimiser steps: at step `begin` it has gone the share `done`, at the last one, `total` - 1,
    all of it, evenly in between."""

    total: int
    begin: int
    done: float = 0.0

    def progress(self, step: int) -> float:
        """The share of its way that it has gone at `step`, 0 to 1."""
        return min(self.done + (1.0 - self.done) * (step - self.begin) / max(self.total - 1 - self.begin, 1), 1.0)


def of_run(cfg: Config, role: str, total_steps: int) -> Decay:
    """The decay of a role that learns, in a run of `total_steps` trainer steps that begins anew."""
    own = settings_of(cfg, role)
    per_step = own.ppo_epochs * -(-cfg.data.train_batch_size // own.ppo_mini_batch_size)
    waits = cfg.trainer.critic_warmup if role == "actor" else 0
    return Decay((total_steps - waits) * per_step, own.warmup_steps)


def resumed(new: Decay, saved: Decay, step: int) -> Decay:
    """The decay of a run that goes on at optimiser step `step`. `new`: what it would be of a run that begins anew; `saved`:
    what it was in the checkpoint."""
    if step <= saved.begin and saved.done == 0.0:  # it has not begun
        return new
    if new.total == saved.total:
        return saved
    return Decay(new.total, step, saved.progress(step))


def packed(decay: Decay) -> np.ndarray:
    """As a checkpoint keeps it: float64 [3], which holds whole numbers exactly."""
    return np.array([decay.total, decay.begin, decay.done])


def unpacked(array: np.ndarray) -> Decay:
    """What `packed` made."""
    total, begin, done = array.tolist()
    return Decay(int(total), int(begin), done)


def announce(cfg: Config, checkpoint: Path, total_steps: int, say: Callable[[str], None]) -> None:
    """Say what becomes of the learning rates where the run is resumed with another length than its checkpoint's. Raises
    ConfigError: a decay had come to a rate of zero, so that nothing would be learned in the steps that are added."""
    for role in (role for role in ("actor", "critic") if role in cfg.placement.roles):
        own: Any = settings_of(cfg, role)
        if own.lr_schedule == "constant":
            continue
        with np.load(checkpoint / f"{role}_rank_0.npz", allow_pickle=False) as file:
            step = int(file["optimizer_steps"])
            saved = unpacked(file["decay"]) if "decay" in file else None
        new = of_run(cfg, role, total_steps)
        if saved is None:  # of a version that did not note it
            say(
                f"warning: {role}.lr_schedule={own.lr_schedule}: {checkpoint} does not tell its length; the rate may jump"
            )
        elif new.total != saved.total:
            _announce_one(role, own, step, saved, new, say)


def _announce_one(role: str, own: Any, step: int, saved: Decay, new: Decay, say: Callable[[str], None]) -> None:
    from one_step_off.core_algos import learning_rate  # torch: slow to import

    decay = resumed(new, saved, step)
    how = own.lr, own.lr_schedule, own.warmup_steps, own.min_lr_ratio, decay.begin, decay.done
    rate = learning_rate(step, decay.total, *how)
    was = f"{role}.lr_schedule={own.lr_schedule}: was for {saved.total} optimiser steps, and is for {new.total} now"
    if rate == 0.0:
        mend = f"set {role}.lr_schedule=constant and {role}.lr, or {role}.min_lr_ratio, or resume an earlier checkpoint"
        raise ConfigError(f"{was}; at step {step} it had come to its end, a rate of 0, and would stay there; {mend}")
    end = learning_rate(decay.total - 1, decay.total, *how)
    say(f"{was}; it goes on from its rate at step {step}, {rate:.3g}, to {end:.3g}, without a jump")
