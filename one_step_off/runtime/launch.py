"""A run from its config to its last file: read model and data, start Ray, train, write the summary.

Its parts: `prepare.py` (before any engine starts), `attempts.py` (training, and restarts after
failures), `run_folder.py` (whether a run may use its folder, and the first files in it),
`interrupts.py` (Ctrl-C).
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agent_loop.base import uses_endpoint
from agent_loop.host.messages import no_proxy_variables
from one_step_off import checkpoint
from one_step_off.algorithms import schedule
from one_step_off.cluster.ray_cluster import cleanup_after_run, require_cluster, start_ray
from one_step_off.config.schema import Config
from one_step_off.config.user_code import LOG_FOLDER
from one_step_off.models.adapted_layers import adapted_layers
from one_step_off.monitoring import report
from one_step_off.monitoring.callbacks import StepCallback, StepCallbacks
from one_step_off.monitoring.console import CONSOLE_LOG, RunConsole, quiet_libraries
from one_step_off.monitoring.facts import end_facts, start_facts, supervised_start_facts
from one_step_off.monitoring.flops import Meter, shape_of
from one_step_off.monitoring.loggers import start_remote_loggers
from one_step_off.monitoring.summary import sampling_text
from one_step_off.monitoring.supervised_tracker import SupervisedTracker
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import run_folder
from one_step_off.runtime.attempts import open_files, run_with_restarts
from one_step_off.runtime.interrupts import (
    hint_signals,
    ignore_hints,
    in_main_thread,
    interrupt_once,
    signal_handlers,
)
from one_step_off.runtime.prepare import (
    RunInputs,
    is_complete,
    prepare,
    prepare_supervised,
)
from one_step_off.runtime.sft_phase import sft_phase

__all__ = [
    "RunInputs",
    "cleanup_after_run",
    "prepare",
    "run",
    "ray_session",
    "run_supervised",
    "start_ray",
]


def run(cfg: Config, callbacks: Sequence[StepCallback] = ()) -> int:
    """A whole run.

    Args:
        cfg: a validated config. Its tiny: model paths are replaced by the folders of the built
            models.
        callbacks: called after each step; see `monitoring/callbacks.py`.

    Returns:
        The exit code.

    Raises:
        ConfigError: bad input, before any engine or GPU is taken.
        KeyboardInterrupt: by Ctrl-C or another of `interrupts.stop_signals`; all processes have
            ended by then.
    """
    begin = time.perf_counter()
    with _console_of_run(cfg) as console:
        with console.working("reading model and data"):
            prepared = prepare(cfg, console.print_line, console.progress)
        if is_complete(prepared, console.print_line):
            return 0
        if cfg.trainer.sft_steps:
            sft_phase(prepared, console, train)
        train(prepared, console, begin, callbacks)
    return 0


def run_supervised(cfg: Config) -> int:
    """A whole run of supervised steps. `cfg`: of `validate_supervised`. Returns the exit code, and
    raises as `run`."""
    begin = time.perf_counter()
    with _console_of_run(cfg) as console:
        with console.working("reading model and data"):
            prepared = prepare_supervised(cfg, console.print_line, console.progress)
        if not is_complete(prepared, console.print_line):
            train(prepared, console, begin)
    return 0


def _console_of_run(cfg: Config) -> RunConsole:
    """The console of a run that may use its folder. Raises ConfigError: it may not."""
    quiet_libraries()
    os.environ.update(no_proxy_variables())
    run_folder.require(cfg)
    return RunConsole(log_file=Path(cfg.trainer.output_dir, CONSOLE_LOG))


def train(
    prepared: RunInputs,
    console: RunConsole,
    begin: float,
    callbacks: Sequence[StepCallback] = (),
) -> None:
    """Train a run that has been prepared, and write its files. `begin`: when it began, by
    time.perf_counter. Raises as `run`."""
    cfg = prepared.cfg
    if cfg.trainer.val_only:
        _use_evaluation_folder(prepared, console.print_line)
    tracker = _create_tracker(prepared, console)
    tracker.begin = begin  # reading and building count as part of the run
    tracker.callbacks = StepCallbacks(callbacks)
    with report.at_the_end(tracker.folder, console.print_line):
        with ray_session(cfg, tracker):
            run_with_restarts(prepared, tracker)
        summary = tracker.summary()
    console.table(end_facts(summary, cfg))


def _use_evaluation_folder(prepared: RunInputs, print_line: Callable[[str], None]) -> None:
    """Give an evaluation alone a folder of its own, since the files of the run folder describe the
    training."""
    trainer = prepared.cfg.trainer
    if prepared.resume_point is not None:
        evaluated = str(prepared.resume_point.path)
    else:
        model = prepared.named_models["model"]
        evaluated = f"model.path={model}: no checkpoint in {trainer.output_dir}"
    print_line(f"evaluating {evaluated}")
    trainer.output_dir = str(Path(trainer.output_dir) / "val_only")


def _create_tracker(prepared: RunInputs, console: RunConsole) -> Tracker:
    """Begin the files of the run folder and print the facts of the run. Raises ConfigError: a
    logger does not start."""
    cfg = prepared.cfg
    # An evaluation alone loads a checkpoint, but trains nothing.
    resume_point = None if cfg.trainer.val_only else prepared.resume_point
    total_steps = prepared.data.stream.total_steps
    require_cluster(os.environ.get("RAY_ADDRESS", ""))
    if resume_point is not None:
        schedule.report_resumed_schedules(cfg, resume_point.path, total_steps, console.print_line)
    # Before any file of an earlier run is touched: W&B may not be logged in, a port may be taken.
    remote_loggers = start_remote_loggers(cfg, resumed=resume_point is not None)
    tracker_class = SupervisedTracker if prepared.is_supervised else Tracker
    tracker = tracker_class(cfg.trainer.output_dir, total_steps, console=console)
    replaces_earlier_run = resume_point is None and (tracker.folder / "metrics.jsonl").exists()
    if replaces_earlier_run:
        console.print_line(
            f"{tracker.folder} holds an earlier run, which is not resumed: its files are replaced"
        )
    run_folder.write_config_and_versions(cfg, prepared.named_models, prepared.device)
    if resume_point is None:  # on resuming the logs of the processes are continued
        run_folder.remove_process_logs(cfg, console.log_file if console.log_reasons else None)
    open_files(prepared, prepared.resume_point, tracker, remote_loggers)
    num_parameters = _count_parameters_and_set_meter(prepared, tracker)
    links = _logger_links(tracker)
    named_model = prepared.named_models["model"]
    facts = supervised_start_facts if prepared.is_supervised else start_facts
    console.table(facts(cfg, named_model, num_parameters, prepared.data, links))
    return tracker


def _count_parameters_and_set_meter(prepared: RunInputs, tracker: Tracker) -> int | None:
    """Give the tracker what it needs to count FLOPs and passes. Returns the parameters, None if
    they are not known."""
    cfg = prepared.cfg
    model = checkpoint.empty_models(cfg).get("actor")
    num_parameters = None
    shape = None
    if model is not None:
        num_parameters = sum(p.numel() for p in model.parameters())  # tied ones once
        targets = cfg.model.lora_target_modules if cfg.model.lora_rank else ""
        layers = tuple(adapted_layers(model, targets)) if targets else ()
        shape = shape_of(model, cfg.model.lora_rank, layers)
    tracker.meter = Meter(cfg, shape)
    tracker.val_names = prepared.data.val_names
    tracker.passes_at = cfg.rollout.val_passes_at
    tracker.val_sampling = sampling_text(cfg.rollout.val_temperature)
    tracker.has_external_agents = uses_endpoint(cfg, prepared.loop_names)
    return num_parameters


def _logger_links(tracker: Tracker) -> list[tuple[str, str]]:
    """Where the run can be watched, as (name, address)."""
    wandb_logger = tracker.loggers.live.get("W&B")
    if wandb_logger is None or not wandb_logger.link:
        return []
    return [("wandb", wandb_logger.link)]


@contextlib.contextmanager
def ray_session(cfg: Config, tracker: Tracker) -> Iterator[None]:
    """Start Ray for the block, and end Ray and all processes whatever happens in it.

    Raises:
        KeyboardInterrupt: the run was stopped by a signal.
    """
    from one_step_off.ray_trainer import Stopped

    ray_logs = "none: Ray did not start"
    has_failed = True
    with (
        cleanup_after_run(),
        signal_handlers(signal.default_int_handler, (signal.SIGTERM,)),
        signal_handlers(interrupt_once, hint_signals()),
    ):
        try:
            with (
                tracker.console.working("starting Ray"),
                # All processes of the run inherit that. A terminal's hangup goes to each of them,
                # and without them there is no checkpoint.
                signal_handlers(signal.SIG_IGN, hint_signals()),
            ):
                ray_logs = f"{start_ray(cfg)}/logs"
            # Ray sets a handler of its own, which ends this process without any cleanup.
            if in_main_thread():
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            yield
            has_failed = False
        except Stopped as stopped:
            tracker.log(f"stopped at {stopped}; {_how_to_resume(cfg)}")
            raise KeyboardInterrupt from stopped
        except asyncio.CancelledError as cancelled:
            raise KeyboardInterrupt from cancelled
        except Exception as error:
            process_logs = tracker.folder / LOG_FOLDER
            if process_logs.is_dir():
                error.add_note(f"logs of the replicas and reward functions: {process_logs}")
            error.add_note(f"logs of the other processes: {ray_logs}")
            raise
        finally:
            ignore_hints()
            _end_ray(tracker, has_failed)


def _how_to_resume(cfg: Config) -> str:
    saved = checkpoint.finished(checkpoint.folder_of(cfg))
    if not saved:
        return "no checkpoint"
    if cfg.trainer.resume == "auto":
        return f"the same command resumes from {saved[-1]}"
    return f"with trainer.resume=auto it resumes from {saved[-1]}"


def _end_ray(tracker: Tracker, has_failed: bool) -> None:
    import ray

    with tracker.console.working("ending all processes"):
        ray.shutdown()
        tracker.close(failed=has_failed)
