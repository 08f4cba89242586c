"""The Python API: `load_config`, `train` and its result. Users import them from `one_step_off`.

A run works the same as on the command line, with the same run folder. It may be started in a
notebook: where the thread already runs an event loop, the run gets one in a thread of its own (see
`interrupts.py`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_step_off.config import loading
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import checked_copy
from one_step_off.config.plain_values import plain_value
from one_step_off.config.schema import Config
from one_step_off.monitoring.callbacks import StepCallback
from one_step_off.runtime.failure_report import failure_reported
from one_step_off.runtime.run_folder import locked
from one_step_off.runtime.validation import validate


@dataclass(frozen=True)
class RunResult:
    """The results of a run, read from its folder.

    Attributes:
        output_dir: the run folder; of an evaluation alone the folder val_only in it.
        metrics: the rows of metrics.jsonl, one per step, those before a resume too;
            `pandas.DataFrame(metrics)` takes it.
        evaluations: the rows of evaluations.jsonl, one per evaluation of the held-out set.
        summary: the content of summary.json.
        report: report.html; None if it could not be written.
        hf_model: the folder of the trained model, as save_pretrained writes it; None if none was
            saved.
        checkpoints: the folders of the checkpoints, oldest first.
    """

    output_dir: Path
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    report: Path | None
    hf_model: Path | None
    checkpoints: list[Path]

    def __repr__(self) -> str:
        return f"RunResult({len(self.metrics)} steps in {self.output_dir})"


def load_config(
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> Config:
    """Load a config as the command line does.

    Args:
        config: the path of a YAML file, or the name of a config that comes with the package, as
            "gsm8k_tiny_cpu".
            None: the defaults.
        overrides: "section.key=value" texts as on the command line.
        settings: sections as mappings, as `trainer={"total_steps": 3}`, or dotted keys, as
            `**{"trainer.total_steps": 3}`. They come after `overrides`.

    Raises:
        ConfigError: a file, key or value that cannot be understood, or a value of a wrong type or
            out of bounds.
    """
    if isinstance(overrides, str):
        raise ConfigError(
            f"overrides={overrides!r}: must be a list of strings, such as ['actor.lr=1e-5']"
        )
    arguments = [] if config is None else [f"config={config}"]
    arguments += overrides
    for name, value in settings.items():
        arguments += _setting_arguments(name, value)
    return loading.load_config(arguments)


def _setting_arguments(name: str, value: Any) -> list[str]:
    """A section with its keys, or one dotted key, as arguments of the command line."""
    if "." in name:
        return [f"{name}={_as_yaml(name, value)}"]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name}={value!r}: must be a mapping of keys, such as {name}={{'key': value}}"
        )
    return [f"{name}.{key}={_as_yaml(f'{name}.{key}', item)}" for key, item in value.items()]


def _as_yaml(dotted: str, value: Any) -> str:
    """A value as text that YAML reads back to the same: JSON is YAML."""
    if isinstance(value, Path):
        value = str(value)
    try:
        return json.dumps(plain_value(value, dotted), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{dotted}={value!r}: must be a number, a string, a list or a mapping of these "
            f"({error})"
        ) from None


def train(cfg: Config, callbacks: Sequence[StepCallback] = ()) -> RunResult:
    """Run the training that a config describes, to its end.

    Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and the interrupt of a notebook's cell stop the run at the next
    step with a checkpoint; a second Ctrl-C aborts it. SIGHUP and SIGUSR1 are left alone where they
    are ignored or have a handler. Outside the main thread no signal is handled.

    Args:
        cfg: of `load_config`, or a `Config` built in Python. It is checked, and not changed.
        callbacks: functions that are called after each step with its row of metrics.jsonl, a dict.
            They run on the event loop of the run, so they should return soon. What they return is
            ignored. One that raises `StopTraining` ends the run in good order, with a checkpoint
            and the model; any other exception ends the run and is raised.

    Raises:
        ConfigError: bad input, in one line that says how to fix it, before any engine starts.
        KeyboardInterrupt: the run was interrupted; all its processes have ended.
    """
    cfg = checked_copy(cfg)
    _check_callbacks(callbacks)
    validate(cfg)
    # The slow imports only now: a wrong config is refused before them.
    from one_step_off.runtime import launch

    with locked(cfg):
        with failure_reported(cfg):
            launch.run(cfg, callbacks)
        return read_result(cfg)


def _check_callbacks(callbacks: Sequence[StepCallback]) -> None:
    if callable(callbacks):
        raise ConfigError("callbacks: must be a list of functions, such as callbacks=[function]")
    for index, callback in enumerate(callbacks):
        if not callable(callback):
            raise ConfigError(
                f"callbacks[{index}]={callback!r}: must be a function of the step's metrics"
            )


def read_result(cfg: Config) -> RunResult:
    """The results of a run that has ended, from its folder."""
    from one_step_off import checkpoint
    from one_step_off.monitoring.report import parse_objects, read_lines, read_text

    folder = Path(cfg.trainer.output_dir)
    report = folder / "report.html"
    hf_model = folder / "hf_model"
    # A folder that was used before may hold the model of an earlier run.
    has_model = cfg.trainer.save_hf_model and hf_model.is_dir()
    summaries = parse_objects([read_text(folder / "summary.json")])
    return RunResult(
        output_dir=folder,
        metrics=read_lines(folder / "metrics.jsonl"),
        evaluations=read_lines(folder / "evaluations.jsonl"),
        summary=summaries[0] if summaries else {},
        report=report if report.is_file() else None,
        hf_model=hf_model if has_model else None,
        checkpoints=checkpoint.finished(folder / "checkpoints"),
    )
