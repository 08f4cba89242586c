"""The config section trainer: the run itself."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.keys import config_key, path_key


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
    warm_spares: bool = config_key(
        False,
        "keep an idle process, with its imports done, for each rank that learns: after a death it "
        "takes the rank's place",
    )
    max_skipped_updates: int = config_key(
        10, "end the run after this many skipped optimizer steps in a row", low=1
    )
    profile_step: Optional[int] = config_key(
        None, "write a torch profile of the updates of this step (counted from 0)", low=0
    )
    start_timeout_s: float = config_key(
        900.0, "time limit for starting engines and trainers", above=0.0
    )
    step_timeout_s: float = config_key(3600.0, "time limit for any phase of a step", above=0.0)
