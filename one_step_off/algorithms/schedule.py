"""Where the learning rate's decay stands, in a new run and in one that is resumed with other settings.

A decay (cosine, linear) goes its way from the end of the warm-up to the run's last optimiser step. A run that is resumed
with another number of steps, or with more or fewer optimiser steps in each, must not jump on that way: it goes on from
where it stood, and goes the rest by the new last step. A decay that the checkpoint's run did not have begins at the
resume. The rate itself is `core_algos.learning_rate`.
"""

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config.schema import Config, ConfigError, role_settings


@dataclass(frozen=True)
class Decay:
    """The way of a decay, in optimiser steps: at step `begin` it has gone the share `done`, at the last one, `total` - 1,
    all of it, evenly in between."""

    total: int
    begin: int
    done: float = 0.0

    def progress(self, step: int) -> float:
        """The share of its way that it has gone at `step`, 0 to 1."""
        return min(
            self.done
            + (1.0 - self.done) * (step - self.begin) / max(self.total - 1 - self.begin, 1),
            1.0,
        )


@dataclass(frozen=True)
class DecayPlan:
    """The settings that a decay is made for.

    Attributes:
        lr_schedule: as in the config.
        trainer_steps: of the whole run.
        first_step: the first trainer step in which the role learns.
        per_step: optimiser steps in one trainer step, where no group of its batch was dropped.
    """

    lr_schedule: str
    trainer_steps: int
    first_step: int
    per_step: int

    def optimizer_steps_from(self, trainer_step: int) -> int:
        """How many optimiser steps are to come when `trainer_step` begins."""
        return max(self.trainer_steps - max(trainer_step, self.first_step), 0) * self.per_step


@dataclass(frozen=True)
class SavedSchedule:
    """What a checkpoint notes of one role. Earlier versions noted no `plan`, and before them no `decay`."""

    optimizer_steps: int
    trainer_steps: int
    decay: Decay | None
    plan: DecayPlan | None


def decay_plan(cfg: Config, role: str, total_steps: int) -> DecayPlan:
    """Of a role that learns, in a run of `total_steps` trainer steps."""
    own = role_settings(cfg, role)
    per_step = own.ppo_epochs * -(-cfg.data.train_batch_size // own.ppo_mini_batch_size)
    first_step = cfg.trainer.critic_warmup if role == "actor" else 0
    return DecayPlan(own.lr_schedule, total_steps, first_step, per_step)


def new_decay(plan: DecayPlan, warmup_steps: int) -> Decay:
    """The decay of a run that begins anew."""
    return Decay(plan.optimizer_steps_from(0), warmup_steps)


def resumed_decay(plan: DecayPlan, warmup_steps: int, saved: SavedSchedule) -> Decay:
    """The decay of a run that is resumed. `plan`: what the settings ask for now."""
    if saved.decay is None:
        return new_decay(plan, warmup_steps)
    step = saved.optimizer_steps
    total = step + plan.optimizer_steps_from(saved.trainer_steps)
    if _same_plan(plan, saved):
        # Not counted again: a step whose groups were dropped made fewer optimiser steps than planned, and an unbroken
        # run does not mind either.
        total = saved.decay.total
    other_schedule = saved.plan is not None and saved.plan.lr_schedule != plan.lr_schedule
    not_begun = step <= saved.decay.begin and saved.decay.done == 0.0
    if other_schedule or not_begun:
        return Decay(total, max(step, warmup_steps))
    if total == saved.decay.total:
        return saved.decay
    return Decay(total, step, saved.decay.progress(step))


def _same_plan(plan: DecayPlan, saved: SavedSchedule) -> bool:
    if saved.plan is None:  # the total alone tells
        return saved.decay is not None and saved.decay.total == plan.optimizer_steps_from(0)
    return saved.plan == plan


def to_arrays(decay: Decay, plan: DecayPlan) -> dict[str, np.ndarray]:
    """As a checkpoint keeps them: `decay` float64 [3], which holds whole numbers exactly, `decay_plan` int64 [3], and
    `lr_schedule`, a text."""
    lr_schedule, *counts = astuple(plan)
    return {
        "decay": np.array(astuple(decay)),
        "decay_plan": np.array(counts, np.int64),
        "lr_schedule": np.array(lr_schedule),
    }


def from_arrays(file: Mapping[str, np.ndarray]) -> SavedSchedule:
    """What `packed` made, with the counters of the role beside it."""
    decay, plan = None, None
    if "decay" in file:
        total, begin, done = file["decay"].tolist()
        decay = Decay(int(total), int(begin), done)
    if "decay_plan" in file:
        plan = DecayPlan(str(file["lr_schedule"]), *file["decay_plan"].tolist())
    return SavedSchedule(int(file["optimizer_steps"]), int(file["version"]), decay, plan)


def report_resumed_schedules(
    cfg: Config, checkpoint: Path, total_steps: int, say: Callable[[str], None]
) -> None:
    """Say what becomes of the learning rates where the run is resumed with another schedule or length than its
    checkpoint's. Raises ConfigError: a decay had come to a rate of zero, so that nothing would be learned in the steps
    that are added."""
    for role in (role for role in ("actor", "critic") if role in cfg.placement.roles):
        own: Any = role_settings(cfg, role)
        if own.lr_schedule == "constant":
            continue
        with np.load(checkpoint / f"{role}_rank_0.npz", allow_pickle=False) as file:
            saved = from_arrays(file)
        plan = decay_plan(cfg, role, total_steps)
        if not plan.optimizer_steps_from(saved.trainer_steps):
            continue  # only its model is to be written
        if saved.decay is None:
            say(
                f"warning: {role}.lr_schedule={own.lr_schedule}: {checkpoint} does not tell its length; the rate may jump"
            )
        else:
            _announce_one(role, own, saved, saved.decay, plan, say)


def _announce_one(
    role: str,
    own: Any,
    saved: SavedSchedule,
    was: Decay,
    plan: DecayPlan,
    say: Callable[[str], None],
) -> None:
    from one_step_off.algorithms.core_algos import learning_rate  # torch: slow to import

    decay, step = resumed_decay(plan, own.warmup_steps, saved), saved.optimizer_steps
    how = own.lr, own.lr_schedule, own.warmup_steps, own.min_lr_ratio, decay.begin, decay.done
    name = f"{role}.lr_schedule={own.lr_schedule}"
    end = learning_rate(decay.total - 1, decay.total, *how)
    if saved.plan is not None and saved.plan.lr_schedule != plan.lr_schedule:
        peak = learning_rate(decay.begin, decay.total, *how)
        begins = f"the decay begins at step {decay.begin}, with a rate of {peak:.3g}"
        say(
            f"{name}: was {saved.plan.lr_schedule}; {begins}, and ends at step {decay.total - 1} with {end:.3g}"
        )
        return
    untold = f"the checkpoint does not tell its schedule, and counts as {own.lr_schedule}"
    if decay.total == was.total:
        if saved.plan is None:
            say(f"warning: {name}: {untold}")
        return
    change = f"{name}: was for {was.total} optimiser steps, and is for {decay.total} now"
    if saved.plan is None:
        change += f" ({untold})"
    rate = learning_rate(step, decay.total, *how)
    if rate == 0.0:
        mend = f"set {role}.lr_schedule=constant and {role}.lr, or {role}.min_lr_ratio, or resume an earlier checkpoint"
        raise ConfigError(
            f"{change}; at step {step} it had come to its end, a rate of 0, and would stay there; {mend}"
        )
    say(
        f"{change}; it goes on from its rate at step {step}, {rate:.3g}, to {end:.3g}, without a jump"
    )
