"""Whether a run may have its folder, `trainer.output_dir`: nothing of an earlier run is lost unasked, and it can be written.

Asked before anything slow is imported or read, so a command that is given twice is answered at once.
"""

import json
import os
import tempfile
from pathlib import Path

from one_step_off.checkpoint import checkpoints as checkpoint
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config


def steps_in(folder: Path) -> int:
    """How many steps a run in this folder has finished, by its metrics. Raises OSError: they cannot be read."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    with open(path, "rb") as f:
        return sum(bool(line.strip()) for line in f)


def next_step(folder: Path) -> int:
    """The step after the last one that a run in this folder has finished: by the last row of its metrics that is whole,
    as a run that began with another one's checkpoint has no rows before that. Raises OSError: they cannot be read."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    for line in reversed(path.read_bytes().splitlines()):
        try:
            return int(json.loads(line)["step"]) + 1
        except (ValueError, TypeError, KeyError):  # cut off by a kill
            continue
    return 0


def resumes(cfg: Config) -> bool:
    """Whether the run goes on from a checkpoint in its own folder. Which one, and whether it is good, `checkpoint.find`
    looks at."""
    own = checkpoint.folder_of(cfg)
    if cfg.trainer.resume == "auto":
        return bool(checkpoint.finished(own))
    return (
        cfg.trainer.resume != "never" and Path(cfg.trainer.resume).resolve().parent == own.resolve()
    )


def replaced_by(cfg: Config) -> str | None:
    """What an earlier run would lose by this one, in a line that names the ways on; None if there is nothing to lose."""
    folder = Path(cfg.trainer.output_dir)
    if cfg.trainer.overwrite or cfg.trainer.val_only:  # an evaluation has a folder of its own
        return None
    others = "name another trainer.output_dir, or replace it with trainer.overwrite=true"
    if resumes(cfg):
        return _dropped_by(cfg, others)
    steps = steps_in(folder)
    saved = checkpoint.finished(checkpoint.folder_of(cfg))
    if not steps and not saved:
        return None
    holds = f"a run of {steps} steps" if steps else f"the checkpoint {saved[-1].name} of a run"
    if saved:
        ways = f"resume it with trainer.resume=auto, {others}"
    else:
        ways = f"{others}; it cannot be resumed, for it has no checkpoint (trainer.save_freq=10 writes one every 10 steps)"
    return f"trainer.output_dir={folder}: holds {holds}, which this one would replace; {ways}"


def _dropped_by(cfg: Config, others: str) -> str | None:
    """What a run that goes back to an earlier checkpoint of its own folder would drop, as `replaced_by`. With "auto"
    that is only what no checkpoint holds, and meant."""
    folder = Path(cfg.trainer.output_dir)
    saved = [path.name for path in checkpoint.finished(checkpoint.folder_of(cfg))]
    named = Path(cfg.trainer.resume).name
    if (
        cfg.trainer.resume == "auto" or named not in saved
    ):  # one that is not there is refused when it is read
        return None
    step, steps = int(named[5:]), next_step(folder)
    if steps > step:
        holds = f"{steps} steps"
    elif named != saved[-1]:
        holds = f"the checkpoint {saved[-1]}"
    else:
        return None
    back = f"trainer.resume={cfg.trainer.resume}: {folder} holds {holds}, and what lies beyond step {step} would go"
    return f"{back}; go on from the newest checkpoint with trainer.resume=auto, {others}"


def require(cfg: Config) -> None:
    """Refuse to replace an earlier run unasked, and a folder that cannot be written. Raises ConfigError."""
    folder = Path(os.path.abspath(cfg.trainer.output_dir))
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        if line := replaced_by(cfg):
            raise ConfigError(line)
        # Permissions alone do not tell: of a quota, of /proc, or of a network's file system that trusts nobody's root.
        os.rmdir(tempfile.mkdtemp(prefix=".one_step_off_", dir=parent))
    except OSError as e:
        where = f"trainer.output_dir={cfg.trainer.output_dir}: {parent} cannot be written to"
        raise ConfigError(f"{where}: {e.strerror}; name another folder") from e
