"""The config section trainer: the run itself."""

import itertools
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from one_step_off.config.errors import refuse_here, value_error
from one_step_off.config.keys import config_key, path_key
from one_step_off.config.text import did_you_mean


@dataclass
class TrainerConfig:
    """The run."""

    total_steps: Optional[int] = config_key(
        None, "number of steps (set this or total_epochs)", low=1
    )
    total_epochs: Optional[int] = config_key(
        None, "passes over the data (set this or total_steps)", low=1
    )
    test_freq: int = config_key(
        -1, "steps between evaluations; -1: none during training", low=1, also=-1
    )
    val_before_train: bool = config_key(True, "evaluate before the first step")
    val_only: bool = config_key(
        False, "only evaluate the model (or the checkpoint it resumes from), then exit"
    )
    val_after_train: bool = config_key(True, "evaluate after the last step")
    output_dir: str = path_key("outputs/run", "the run folder")
    seed: int = config_key(0, "seed of data order, sampling and initialization", low=0)
    sft_steps: int = config_key(
        0, "supervised steps on the actor before RL, see the section sft; 0: none", low=0
    )
    critic_warmup: int = config_key(0, "number of first steps that train only the critic", low=0)
    save_freq: int = config_key(-1, "steps between checkpoints; -1: none", low=1, also=-1)
    keep_checkpoints: int = config_key(3, "number of newest checkpoints to keep", low=1)
    keep_best: Optional[str] = config_key(
        None, "also keep the checkpoint that is best by this metric, e.g. val/reward; null: off"
    )
    resume: str = path_key(
        "auto",
        "auto: resume from the newest checkpoint in output_dir; never: do not; or a checkpoint's "
        "folder",
    )
    overwrite: bool = config_key(
        False,
        "allow replacing an earlier run in output_dir, or "
        "truncating it to the checkpoint that resume names",
    )
    grace_s: float = config_key(
        120.0,
        "after Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: seconds to finish the step and write its "
        "checkpoint",
        low=0.0,
    )
    save_hf_model: bool = config_key(True, "write hf_model/ at the end")
    max_restarts: int = config_key(
        3,
        "largest number of restarts after failures in a row without completing a new step",
        low=0,
    )
    max_skipped_updates: int = config_key(
        10, "end the run after this many skipped optimizer steps in a row", low=1
    )
    profile_step: Optional[int] = config_key(
        None, "write a torch profile of the updates of this step (counted from 0)", low=0
    )
    start_timeout_s: float = config_key(
        900.0,
        "time limit for starting engines and trainers, and for a turn on a GPU that they share",
        above=0.0,
    )
    step_timeout_s: float = config_key(3600.0, "time limit for any phase of a step", above=0.0)


def check_folders(trainer: TrainerConfig) -> None:
    """Check where the run writes, and what it resumes from. Raises ConfigError."""
    output_dir = trainer.output_dir
    if not output_dir.strip():
        raise value_error(
            "trainer.output_dir", output_dir, "not set; name a folder, such as outputs/run"
        )
    parent = _nearest_existing_folder(output_dir)
    is_writable = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
    if not is_writable or "\0" in output_dir:
        problem = f"{parent} is not a folder that can be written to; name another"
        refuse_here(value_error("trainer.output_dir", output_dir, problem))
    _check_resume(trainer.resume)


def _nearest_existing_folder(path: str) -> Path:
    """The path itself if it exists, or its nearest parent that does."""
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        if os.path.lexists(folder):
            return folder
    return Path("/")


def _check_resume(resume: str) -> None:
    if resume in ("auto", "never") or os.path.isfile(os.path.join(resume, "state.json")):
        return
    fix = did_you_mean(
        resume, ("auto", "never"), "use auto, never, or OUTPUT_DIR/checkpoints/step_000050"
    )
    problem = f"no checkpoint there (state.json is missing); {fix}"
    refuse_here(value_error("trainer.resume", resume, problem))


def free_folder_setting(trainer: TrainerConfig) -> str:
    """`trainer.output_dir=...` with a name that is free, beside the run folder of the config, to be
    added to a command."""
    folder = os.path.normpath(trainer.output_dir)
    names = (f"{folder}_{number}" for number in itertools.count(2))
    free = next(name for name in names if not os.path.lexists(name))
    return shlex.quote(f"trainer.output_dir={free}")
