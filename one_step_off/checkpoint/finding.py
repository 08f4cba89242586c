"""Which checkpoints a run has, which one it resumes from, and which are moved aside for a new
run."""

import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from one_step_off.checkpoint.files import read_state
from one_step_off.checkpoint.manifest import find_fault, parameter_shapes
from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import ADAMW, ADAMW_8BIT, BLOCK_SIZE
from one_step_off.config.sections.trainer import free_folder_setting
from one_step_off.training.worker_interface import TRAINED_ROLES

FIXED_KEYS = (
    "pipeline.staleness",
    "pipeline.batch_source",
    "weight_sync.in_flight",
    "rollout.n",
    "trainer.seed",
    "data.train_batch_size",
    "agent.loop",
    "model.dtype",
    "model.lora_rank",
    "model.lora_alpha",
    "model.lora_target_modules",
    "model.freeze",
    "trainer.sft_steps",
)
"""A resumed run must make the same batches of the same age, from the same start: with adapters the
frozen weights, and the reference, are those of the warm-up. Keys that may change (lr, total_steps,
save_freq) are not here."""

MODEL_KEYS = (
    "model.dtype",
    "model.lora_rank",
    "model.lora_alpha",
    "model.lora_target_modules",
    "model.freeze",
)
"""Those of FIXED_KEYS that an evaluation alone must share: they make the model. With adapters
trainer.sft_steps does too."""


def fixed_keys(cfg: Config) -> dict[str, Any]:
    """The values that a resumed run, or an evaluation alone, must share with its checkpoint.

    They include the back ends and the optimizers, which cannot read each other's checkpoints, and
    the size of the blocks of adamw_8bit, by which its state has its shape.
    """
    keys = FIXED_KEYS
    if cfg.trainer.val_only:
        keys = (*MODEL_KEYS, "trainer.sft_steps") if cfg.model.lora_rank else MODEL_KEYS
    values = {key: attrgetter(key)(cfg) for key in keys}
    for role in loaded_roles(cfg):
        if role in cfg.placement.roles:
            settings = role_settings(cfg, role)
            values[f"{role}.backend"] = settings.backend
            values[f"{role}.optimizer"] = settings.optimizer
            if settings.optimizer == ADAMW_8BIT:
                block_size = settings.optimizer_kwargs.get("block_size", BLOCK_SIZE)
                values[f"{role}.optimizer_kwargs.block_size"] = block_size
    return values


def loaded_roles(cfg: Config) -> tuple[str, ...]:
    """The roles whose state is loaded from a checkpoint: an evaluation alone needs the actor's."""
    return ("actor",) if cfg.trainer.val_only else TRAINED_ROLES


def folder_of(cfg: Config) -> Path:
    """The folder of a run's checkpoints."""
    return Path(cfg.trainer.output_dir) / "checkpoints"


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name, `step_000006`."""
    return int(checkpoint.name.removeprefix("step_"))


def finished(folder: Path) -> list[Path]:
    """All checkpoints, oldest first. One that is still being written, or was cut off, has another
    name."""
    checkpoints = [
        path
        for path in folder.glob("step_*")
        if path.name.removeprefix("step_").isdecimal() and path.is_dir()
    ]
    return sorted(checkpoints, key=step_of)


def put_aside(cfg: Config, resumed_from: Path | None) -> None:
    """Move checkpoints that are not of this run's past to checkpoints/earlier, so that nothing
    takes them for this run's. Whatever was in checkpoints/earlier is removed.

    Args:
        resumed_from: the checkpoint from which the run resumes; None: it starts from step 0.
    """
    folder = folder_of(cfg)
    earlier = folder / "earlier"
    foreign = finished(folder)
    if resumed_from is not None and resumed_from.resolve().parent == folder.resolve():
        foreign = [path for path in foreign if path.name > resumed_from.name]
    if foreign:
        shutil.rmtree(earlier, ignore_errors=True)
        earlier.mkdir()
    # Newest first: if this process is killed meanwhile, the remaining checkpoints are of one past.
    for path in reversed(foreign):
        path.rename(earlier / path.name)


def find(cfg: Config, announce: Callable[[str], None] = lambda line: None) -> Path | None:
    """The checkpoint that `trainer.resume` names, or None to start from step 0; every file of it
    has been verified.

    Args:
        announce: receives one line for each newer checkpoint that resume=auto passes over because
            it is broken.

    Raises:
        ConfigError: the checkpoint is broken, or with "auto" all are, or it was made with other
            settings.
    """
    candidates = _candidates(cfg)
    if not candidates:
        return None
    shapes = parameter_shapes(cfg)
    for path in candidates:
        fault = find_fault(path, shapes, loaded_roles(cfg))
        if fault is None:
            _check_fixed_keys(cfg, path)
            return path
        if path == candidates[-1]:
            raise ConfigError(
                f"trainer.resume={cfg.trainer.resume}: checkpoint {path}: {fault}; "
                f"name an intact one, or {_how_to_restart(cfg)}"
            )
        announce(f"warning: checkpoint {path}: {fault}; the one before it is used")
    return None


def _candidates(cfg: Config) -> list[Path]:
    """The checkpoints that `trainer.resume` allows, the preferred one first."""
    if cfg.trainer.resume == "never":
        return []
    if cfg.trainer.resume == "auto":
        return finished(folder_of(cfg))[::-1]
    return [Path(cfg.trainer.resume)]


def _check_fixed_keys(cfg: Config, path: Path) -> None:
    """Raises ConfigError: the checkpoint was made with another value of one of `fixed_keys`."""
    made_with = read_state(path)["fixed"]
    for key, value in fixed_keys(cfg).items():
        made_with_value = made_with.get(key, _value_before_it_was_named(key))
        if made_with_value != value:
            fix = f"resume with it, or {_how_to_restart(cfg)}"
            if cfg.trainer.val_only:
                fix = "evaluate with it"
            raise ConfigError(
                f"{key}={value}: checkpoint {path} was written with {made_with_value}; {fix}"
            )


def _how_to_restart(cfg: Config) -> str:
    """What to add to the command, to begin at step 0."""
    # A checkpoint that is named would be resumed in a new folder too.
    never = "" if cfg.trainer.resume == "auto" else "trainer.resume=never "
    return (
        f"start from step 0 with {never}{free_folder_setting(cfg.trainer)} (a new folder) or with "
        "trainer.resume=never trainer.overwrite=true (replaces the run)"
    )


def _value_before_it_was_named(key: str) -> Any:
    """The value of a key in a checkpoint that is older than the key."""
    if key.endswith(".optimizer"):
        return ADAMW
    if key == "pipeline.batch_source":
        return "auto"
    if key.endswith(".block_size"):
        return BLOCK_SIZE
    if key == "model.freeze":
        return []
    return 0 if key == "trainer.sft_steps" else "none"
