"""The learning rate, and the position of its decay, in a new run and in one that is resumed with
other settings.

A decay (cosine, linear) runs from the end of the warm-up to the end of the run: it is complete at
the step after the last one, so that the last step still learns. A run that is resumed with another
number of steps, or with more or fewer optimizer steps in each, must not jump: the decay continues
from the progress that it had made, and covers the rest by the new end. A decay that was complete is
planned anew for the whole length, as if the run had been that long from its beginning.
A decay that the checkpoint's run did not have begins at the resume.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config


@dataclass(frozen=True)
class Decay:
    """A decay over optimizer steps. Its progress goes evenly from `done` at `begin` to 1 at
    `total`, after the last step.

    Attributes:
        total: optimizer steps of the run; the last one is total - 1.
        begin: the optimizer step at which the decay, or its rest, begins.
        done: the progress at `begin`, 0 to 1.
    """

    total: int
    begin: int
    done: float = 0.0

    def progress(self, step: int) -> float:
        """The progress at optimizer step `step`, 0 to 1."""
        remaining_steps = max(self.total - self.begin, 1)
        progress = self.done + (1.0 - self.done) * (step - self.begin) / remaining_steps
        return min(progress, 1.0)


def learning_rate(
    step: int,
    total: int | None,
    peak: float,
    schedule: str = "constant",
    warmup: int = 0,
    min_ratio: float = 0.0,
    begin: int | None = None,
    done: float = 0.0,
) -> float:
    """The learning rate of an optimizer step: linear warm-up, then constant, cosine or linear.

    Warm-up step s uses peak * (s + 1) / warmup, so that the first step does not have a rate of
    zero. cosine (SGDR, arXiv:1608.03983, eq. 5) and linear would reach peak * min_ratio at step
    `total`, after the last one: no step has a rate of zero.

    Args:
        step: from 0.
        total: optimizer steps of the run.
        warmup: optimizer steps of the warm-up.
        begin, done: as in `Decay`; None: the decay begins after the warm-up.

    Raises:
        ValueError: there is no such schedule.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if begin is None:
        begin = warmup
    progress = Decay(total, begin, done).progress(step)
    if schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif schedule == "linear":
        share = 1.0 - progress
    else:
        raise ValueError(f"unknown learning rate schedule {schedule!r}")
    return peak * (min_ratio + (1.0 - min_ratio) * share)


@dataclass(frozen=True)
class DecayPlan:
    """The settings that a decay is made for.

    Attributes:
        lr_schedule: as in the config.
        trainer_steps: of the whole run.
        first_step: the first trainer step in which the role is trained.
        per_step: optimizer steps in one trainer step, if no group of its batch is dropped.
    """

    lr_schedule: str
    trainer_steps: int
    first_step: int
    per_step: int

    def optimizer_steps_from(self, trainer_step: int) -> int:
        """The number of optimizer steps from the beginning of `trainer_step` on."""
        remaining_steps = self.trainer_steps - max(trainer_step, self.first_step)
        return max(remaining_steps, 0) * self.per_step


@dataclass(frozen=True)
class SavedSchedule:
    """What a checkpoint holds of one role's schedule.

    Checkpoints of earlier versions have no `plan`, and still earlier ones no `decay`.
    """

    optimizer_steps: int
    trainer_steps: int
    decay: Decay | None
    plan: DecayPlan | None


def decay_plan(cfg: Config, role: str, total_steps: int) -> DecayPlan:
    """The plan of a trained role, in a run of `total_steps` trainer steps."""
    settings = role_settings(cfg, role)
    mini_batches = -(-cfg.data.train_batch_size // settings.ppo_mini_batch_size)
    first_step = cfg.trainer.critic_warmup if role == "actor" else 0
    return DecayPlan(
        lr_schedule=settings.lr_schedule,
        trainer_steps=total_steps,
        first_step=first_step,
        per_step=settings.ppo_epochs * mini_batches,
    )


def new_decay(plan: DecayPlan, warmup_steps: int) -> Decay:
    """The decay of a new run."""
    return Decay(plan.optimizer_steps_from(0), warmup_steps)


def resumed_decay(plan: DecayPlan, warmup_steps: int, saved: SavedSchedule) -> Decay:
    """The decay of a resumed run. `plan`: that of the current settings."""
    if saved.decay is None:
        return new_decay(plan, warmup_steps)
    step = saved.optimizer_steps
    if _is_same_plan(plan, saved):
        # Not counted again: a step with dropped groups made fewer optimizer steps than planned, and
        # an uninterrupted run keeps its total too.
        total = saved.decay.total
    else:
        total = step + plan.optimizer_steps_from(saved.trainer_steps)
    other_schedule = saved.plan is not None and saved.plan.lr_schedule != plan.lr_schedule
    not_begun = step <= saved.decay.begin and saved.decay.done == 0.0
    if other_schedule or not_begun:
        return Decay(total, max(step, warmup_steps))
    if total == saved.decay.total:
        return saved.decay
    if saved.decay.progress(step) >= 1.0:
        return Decay(total, warmup_steps)
    return Decay(total, step, saved.decay.progress(step))


def _is_same_plan(plan: DecayPlan, saved: SavedSchedule) -> bool:
    if saved.plan is not None:
        return saved.plan == plan
    # Without a saved plan only the totals can be compared.
    return saved.decay is not None and saved.decay.total == plan.optimizer_steps_from(0)


def to_arrays(decay: Decay, plan: DecayPlan) -> dict[str, np.ndarray]:
    """The arrays that a checkpoint holds of them.

    `decay` float64 [3], which represents these whole numbers exactly; `decay_plan` int64 [3];
    `lr_schedule`, a text.
    """
    lr_schedule, *counts = astuple(plan)
    return {
        "decay": np.array(astuple(decay)),
        "decay_plan": np.array(counts, np.int64),
        "lr_schedule": np.array(lr_schedule),
    }


def from_arrays(file: Mapping[str, np.ndarray]) -> SavedSchedule:
    """The reverse of `to_arrays`, with the counters of the role, which are in the same file."""
    decay = None
    if "decay" in file:
        total, begin, done = file["decay"].tolist()
        decay = Decay(int(total), int(begin), done)
    plan = None
    if "decay_plan" in file:
        plan = DecayPlan(str(file["lr_schedule"]), *file["decay_plan"].tolist())
    return SavedSchedule(int(file["optimizer_steps"]), int(file["version"]), decay, plan)


def report_resumed_schedules(
    cfg: Config, checkpoint: Path, total_steps: int, print_line: Callable[[str], None]
) -> None:
    """Tell the user how the learning rates continue where the schedule or length differs from the
    checkpoint's."""
    for role in ("actor", "critic"):
        if role not in cfg.placement.roles:
            continue
        settings = role_settings(cfg, role)
        if settings.lr_schedule == "constant":
            continue
        with np.load(checkpoint / f"{role}_rank_0.npz", allow_pickle=False) as file:
            saved = from_arrays(file)
        plan = decay_plan(cfg, role, total_steps)
        if plan.optimizer_steps_from(saved.trainer_steps) == 0:
            continue  # no step is left; only the model is to be written
        if saved.decay is None:
            print_line(
                f"warning: {role}.lr_schedule={settings.lr_schedule}: "
                f"{checkpoint} does not record its length; the rate may jump"
            )
            continue
        decay = resumed_decay(plan, settings.warmup_steps, saved)
        if saved.plan is not None and saved.plan.lr_schedule != plan.lr_schedule:
            print_line(_other_schedule_text(role, settings, saved.plan, decay))
        else:
            _report_length(role, settings, saved, saved.decay, decay, print_line)


def _rate(settings: Any, decay: Decay, step: int) -> float:
    """The learning rate of a role at an optimizer step."""
    return learning_rate(
        step,
        decay.total,
        settings.lr,
        settings.lr_schedule,
        settings.warmup_steps,
        settings.min_lr_ratio,
        decay.begin,
        decay.done,
    )


def _other_schedule_text(role: str, settings: Any, saved_plan: DecayPlan, decay: Decay) -> str:
    """What the user reads where the checkpoint's run had another schedule."""
    peak = _rate(settings, decay, decay.begin)
    last_step = decay.total - 1
    end = _rate(settings, decay, last_step)
    return (
        f"{role}.lr_schedule={settings.lr_schedule}: was {saved_plan.lr_schedule}; "
        f"the decay begins at step {decay.begin}, with a rate of {peak:.3g}, "
        f"and ends at step {last_step} with {end:.3g}"
    )


def _report_length(
    role: str,
    settings: Any,
    saved: SavedSchedule,
    saved_decay: Decay,
    decay: Decay,
    print_line: Callable[[str], None],
) -> None:
    """Tell the user where the length of the decay changes, or where the checkpoint does not record
    the schedule."""
    name = f"{role}.lr_schedule={settings.lr_schedule}"
    unrecorded = (
        "the checkpoint does not record its schedule, which is assumed to be "
        f"{settings.lr_schedule}"
    )
    if decay.total == saved_decay.total:
        if saved.plan is None:
            print_line(f"warning: {name}: {unrecorded}")
        return
    change = f"{name}: was for {saved_decay.total} optimizer steps, and is for {decay.total} now"
    if saved.plan is None:
        change += f" ({unrecorded})"
    step = saved.optimizer_steps
    rate = _rate(settings, decay, step)
    end = _rate(settings, decay, decay.total - 1)
    if saved_decay.progress(step) >= 1.0:
        print_line(
            f"{change}; it was complete, and is planned anew: {rate:.3g} at step {step}, and "
            f"{end:.3g} at the end, as in a run of this length"
        )
        return
    print_line(
        f"{change}; it continues from its rate at step {step}, {rate:.3g}, to {end:.3g}, "
        "without a jump"
    )
