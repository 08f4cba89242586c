"""`trainer.sft_steps`: supervised steps before RL, in one command.

They are a run of their own, in OUTPUT_DIR/sft, with checkpoints, interrupts and restarts like any
run. Then RL starts at version 0 with OUTPUT_DIR/sft/hf_model as its model.path: actor, engines,
critic and reference begin as that model, unless they have a path of their own. When the command is
repeated, a warm-up that has ended is not made again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.supervised import WARM_UP_FOLDER, warm_up_config
from one_step_off.config.text import format_value
from one_step_off.config.yaml_io import parse_yaml, resolved_yaml
from one_step_off.monitoring.console import RunConsole
from one_step_off.runtime import run_folder
from one_step_off.runtime.prepare import RunInputs, is_complete, prepare_supervised

COMPARED_SECTIONS = ("model", "sft")
COMPARED_KEYS = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.chat_template",
    "data.chat_template_kwargs",
    "data.instruction",
    "data.shuffle",
    "data.generator_size",
    "actor.optimizer",
    "actor.optimizer_kwargs",
    "actor.lr",
    "actor.lr_schedule",
    "actor.warmup_steps",
    "actor.min_lr_ratio",
    "actor.betas",
    "actor.eps",
    "actor.weight_decay",
    "actor.grad_clip",
    "actor.max_grad_norm_skip",
    "trainer.total_steps",
    "trainer.seed",
)
"""What the model of a warm-up is made with. Where these differ, it is another model."""

FIX = "start over with trainer.resume=never trainer.overwrite=true, or name another output_dir"


Train = Callable[[RunInputs, RunConsole, float], None]
"""`launch.train`: it trains a prepared run that began at that time."""


def sft_phase(prepared: RunInputs, console: RunConsole, train: Train) -> None:
    """Make the supervised steps of a run that is about to start RL, or find what an earlier attempt
    made, and let RL start with that model.

    Raises:
        ConfigError: bad input; or the run is to resume, and its warm-up is missing or another one.
        KeyboardInterrupt: the run was interrupted; the same command resumes it.
    """
    cfg = prepared.cfg
    supervised = warm_up_config(cfg)
    folder = Path(supervised.trainer.output_dir)
    if prepared.resume_point is not None:
        folder = prepared.resume_point.path.parents[1] / WARM_UP_FOLDER
        model = finished_model(folder)
        if model is None:
            raise ConfigError(
                f"trainer.sft_steps={cfg.trainer.sft_steps}: {prepared.resume_point.path} is to be "
                f"resumed, and {folder} holds no finished warm-up; put back that folder, or {FIX}"
            )
    elif cfg.trainer.val_only:
        model = finished_model(folder)
        if model is not None:
            console.print_line(f"the supervised steps have been made: {model}")
    else:
        model = _warmed_up(prepared, supervised, folder, console, train)
    if model is not None:
        cfg.model.path = str(model)


def finished_model(folder: Path) -> Path | None:
    """The model of a warm-up in this folder; None: none has ended there."""
    model = folder / "hf_model"
    # The summary is the last file of a run.
    return model if model.is_dir() and (folder / "summary.json").exists() else None


def _warmed_up(
    prepared: RunInputs, supervised: Config, folder: Path, console: RunConsole, train: Train
) -> Path:
    """The model of the supervised steps, made now or before."""
    model = finished_model(folder)
    if model is not None and supervised.trainer.resume != "never":
        _require_same_settings(prepared, supervised, folder)
        console.print_line(f"the supervised steps have been made: {model}")
        return model
    begin = time.perf_counter()
    with run_folder.locked(supervised):
        run_folder.require(supervised)
        console.print_line(f"{supervised.trainer.total_steps} supervised steps first, in {folder}")
        with console.working("reading the rows with answers"):
            warm_up_run = prepare_supervised(supervised, console.print_line, console.progress)
        # As the user named it, for config.yaml.
        warm_up_run.named_models["model"] = prepared.named_models["model"]
        if not is_complete(warm_up_run, console.print_line):
            train(warm_up_run, console, begin)
    model = finished_model(folder)
    if model is None:  # the run has ended, and its files were removed
        raise ConfigError(f"{folder}: its warm-up has ended, but hf_model is missing; {FIX}")
    return model


def _require_same_settings(prepared: RunInputs, supervised: Config, folder: Path) -> None:
    """Raises ConfigError: the warm-up in the folder was made with other settings."""
    config_file = folder / "config.yaml"
    if not config_file.is_file():
        return
    made_with: Any = parse_yaml(config_file.read_text(encoding="utf-8"))[0]
    wanted: Any = parse_yaml(resolved_yaml(supervised))[0]
    wanted["model"]["path"] = prepared.named_models["model"]
    for section in COMPARED_SECTIONS:
        for name, value in wanted[section].items():
            _compare(f"{section}.{name}", value, made_with, folder)
    for key in COMPARED_KEYS:
        section, name = key.split(".")
        _compare(key, wanted[section].get(name), made_with, folder)


def _compare(key: str, value: Any, made_with: Any, folder: Path) -> None:
    section, name = key.split(".")
    earlier = made_with.get(section, {}).get(name)
    if earlier != value:
        raise ConfigError(
            f"{folder}: holds a warm-up with {key}={format_value(earlier)}, and this one has "
            f"{format_value(value)}; {FIX}"
        )
