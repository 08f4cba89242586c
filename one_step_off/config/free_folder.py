"""The setting that gives a run a folder that no other run has."""

import itertools
import os
import shlex

from one_step_off.config.schema import Config


def free_folder_setting(cfg: Config) -> str:
    """`trainer.output_dir=...` with a name that is free, beside the run folder of the config, to be
    added to a command."""
    folder = os.path.normpath(cfg.trainer.output_dir)
    names = (f"{folder}_{number}" for number in itertools.count(2))
    free = next(name for name in names if not os.path.lexists(name))
    return shlex.quote(f"trainer.output_dir={free}")
