"""The attempts of a run: after a failed process the next one resumes from the newest checkpoint.

`run_with_restarts` is the entry. Each attempt has new trainers, new engines unless the
one before has handed over its own, and a number: weight versions count trainer steps, so after a
restart the same version may name other weights."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from one_step_off import checkpoint
from one_step_off.checkpoint.in_flight import restored_in_flight
from one_step_off.cluster.resource_usage import watch_usage
from one_step_off.cluster.run_events import RunEvents
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring.loggers import open_loggers, start_remote_loggers
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime.interrupts import LoopRunner, stop_on_interrupt
from one_step_off.runtime.prepare import ResumePoint, RunInputs, load_resume_point
from one_step_off.runtime.scaling import ReplicaScaler

# `RunProcesses`, `Pipeline` and `Resumed` are imported where they are used: they bring torch, Ray
# and transformers, which take seconds, and the first line of output shall not wait for them.


class AttemptFailed(Exception):
    """An attempt ended because a process died or hangs; `__cause__` is that failure."""


@dataclass
class RunState:
    """What changes between the attempts of a run.

    Attributes:
        attempt: the number of the attempt.
        resume_point: the checkpoint with which it starts; None: the initial weights.
        pipeline: the pipeline of the latest attempt that has started training; None before the
            first one.
        engines: the `PersistentActors` that the latest attempt has handed over; None: the next one
            starts its own.
        engines_kept: how many attempts have begun with the engines of the one before.
        scaler: changes the number of rollout replicas on request.
    """

    scaler: ReplicaScaler
    attempt: int = 0
    resume_point: ResumePoint | None = None
    pipeline: Any = None
    engines: Any = None
    engines_kept: int = 0

    @property
    def has_trained(self) -> bool:
        """Whether an attempt has come as far as training."""
        return self.pipeline is not None

    @property
    def stop_requested(self) -> bool:
        """Whether the run was asked to stop, so that it must not be restarted."""
        return self.has_trained and self.pipeline.stopping


def initial_state(prepared: RunInputs, events: RunEvents) -> RunState:
    """The state of the first attempt. One that resumes a checkpoint is the attempt after the
    checkpoint's."""
    resume_point = prepared.resume_point
    scaler = ReplicaScaler(prepared.cfg, events, resumed=resume_point is not None)
    if resume_point is None:
        return RunState(scaler)
    return RunState(scaler, resume_point.state.get("incarnation", 0) + 1, resume_point)


class RestartBudget:
    """How many attempts may still fail: `max_restarts` in a row without a step beyond all earlier
    ones."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.restarts_left = max_restarts
        self.most_steps = -1

    def allows_restart(self, finished_steps: int) -> bool:
        """Count a failed attempt, after which the run has `finished_steps` steps. Whether another
        one may follow."""
        if finished_steps > self.most_steps:
            self.most_steps = finished_steps
            self.restarts_left = self.max_restarts
        self.restarts_left -= 1
        return self.restarts_left >= 0


def run_with_restarts(prepared: RunInputs, tracker: Tracker) -> None:
    """Train to the end, in as many attempts as it takes.

    Raises:
        ConfigError: a start, maybe a repeated one, has found bad input, and nothing has trained.
        Exception: an error that a restart cannot help against; or, with no restarts left, or where
            a run that has trained cannot be started again, the last failure.
    """
    first_position = prepared.data.stream.state_dict()
    state = initial_state(prepared, tracker)
    budget = RestartBudget(prepared.cfg.trainer.max_restarts)
    loop_runner = LoopRunner()
    last_failure: BaseException | None = None
    try:
        while True:
            try:
                loop_runner.run(run_attempt(prepared, state, tracker, loop_runner))
                return
            except ConfigError as error:
                if last_failure is None or not state.has_trained:
                    raise  # the input is bad, whatever process died in an earlier start
                # As where a host has failed: the cluster is now too small for a pool.
                last_failure.add_note(f"the run could not be restarted: {error}")
                raise last_failure from last_failure.__cause__
            except AttemptFailed as failed:
                last_failure = failed.__cause__
                may_restart = budget.allows_restart(len(tracker.steps))
                if not may_restart or state.stop_requested:
                    raise last_failure from last_failure.__cause__
                _prepare_restart(prepared, state, tracker, first_position)
                _begin_files_again(prepared, state, tracker, failed)
    finally:
        if state.engines is not None:  # no attempt has taken them over
            loop_runner.run(state.engines.end())


def _begin_files_again(
    prepared: RunInputs, state: RunState, tracker: Tracker, failed: AttemptFailed
) -> None:
    """Log why the next attempt begins and where, and go back to that step in the run's files."""
    kept = ", the engines are kept" if state.engines is not None else ""
    tracker.log(f"{failed}; {_how_it_continues(state)} as attempt {state.attempt}{kept}")
    tracker.close()
    remote_loggers = start_remote_loggers(prepared.cfg, resumed=True)
    open_files(prepared, state.resume_point, tracker, remote_loggers)


def _how_it_continues(state: RunState) -> str:
    """Where the next attempt begins, for the user."""
    if state.resume_point is not None:
        return f"resuming from {state.resume_point.path}"
    return "resuming from the beginning" if state.has_trained else "starting again"


def _prepare_restart(
    prepared: RunInputs, state: RunState, tracker: Tracker, first_position: dict[str, Any]
) -> None:
    """Set the state and the data position for the next attempt: the newest checkpoint, or the
    beginning of the run."""
    cfg = prepared.cfg
    cfg_with_auto = replace(cfg, trainer=replace(cfg.trainer, resume="auto"))
    newest = checkpoint.find(cfg_with_auto, tracker.log)
    if newest is not None:
        state.resume_point = load_resume_point(newest)
    position = first_position
    if state.resume_point is not None and not cfg.trainer.val_only:
        position = state.resume_point.state["stream"]
    prepared.data.stream.load_state_dict(position)
    state.attempt += 1


async def run_attempt(
    prepared: RunInputs, state: RunState, tracker: Tracker, loop_runner: LoopRunner
) -> None:
    """One attempt: start all processes, train to the end, save the model, and end the processes.

    It takes over the engines that the attempt before has handed over. If trainers die, it hands
    them over to the next one in its turn.

    Raises:
        AttemptFailed: a process died or hangs, so another attempt may succeed. An exception that
            a process raised is raised as it is.
    """
    processes: Any = None
    try:
        with tracker.console.working("starting engines and trainers"):
            processes = create_processes(prepared, state, tracker)
            await _start(prepared, state, processes, tracker)
        pipeline = await create_pipeline(prepared, state, processes, tracker)
        state.pipeline = pipeline
        async with _in_training(prepared, state, processes, tracker, loop_runner):
            await pipeline.fit()
        await _save_model(prepared.cfg, processes, tracker)
    except Exception as error:
        tracker.restart_begin = tracker.restart_begin or time.perf_counter()
        has_new_step = len(tracker.steps) > tracker.steps_before
        rejoin_failed = bool(processes) and processes.keeps_engines and not has_new_step
        if processes and await processes.is_process_failure(error, rejoin_failed):
            if not rejoin_failed:
                state.engines = await processes.hand_over_engines()
            raise AttemptFailed(str(error)) from error
        raise
    finally:
        if processes:
            await processes.end()


async def _start(prepared: RunInputs, state: RunState, processes: Any, tracker: Tracker) -> None:
    """Load all models and engines of processes that were created, or let kept engines drop the work
    of the attempt before."""
    state.engines = None
    if processes.keeps_engines:
        state.engines_kept += 1
    else:
        log_pools(prepared.cfg, processes, tracker)
    await processes.setup()
    tracker.report_usage({"restarts/engines_kept": float(state.engines_kept)}, "")
    if processes.endpoint:
        processes.endpoint.report_to(tracker.log, tracker.report_usage)


def create_processes(prepared: RunInputs, state: RunState, events: RunEvents) -> Any:
    """The processes of an attempt, which report to `events`; nothing is loaded yet. Raises
    ConfigError."""
    from one_step_off.runtime import processes

    if prepared.is_supervised:
        return processes.SupervisedProcesses(prepared, events)
    return processes.RunProcesses(
        prepared,
        state.attempt,
        kept=state.engines,
        events=events,
        replicas=state.scaler.target,
    )


def log_pools(cfg: Config, processes: Any, tracker: Tracker) -> None:
    """Log which nodes the pools were created on."""
    from one_step_off.cluster.placement import describe_pools

    tracker.log("created " + describe_pools(cfg, processes.pools))


@contextlib.asynccontextmanager
async def _in_training(
    prepared: RunInputs,
    state: RunState,
    processes: Any,
    tracker: Tracker,
    loop_runner: LoopRunner,
) -> AsyncIterator[None]:
    """While the block trains: show its progress, measure the processes, let replicas come and go,
    and let signals and callbacks stop the pipeline. The block ends normally where a callback has
    stopped it."""
    from one_step_off.ray_trainer import Stopped

    cfg = prepared.cfg
    pipeline = state.pipeline
    console = tracker.console
    if cfg.trainer.val_only:
        progress = console.working("evaluating")
    else:
        progress = console.training(tracker.total_steps, tracker.first_step)
    watched_groups = _watched_groups(processes)
    async with watch_usage(watched_groups, prepared.device == "cuda", tracker.report_usage):
        with (
            state.scaler.watching(processes.engines),
            progress,
            stop_on_interrupt(loop_runner, pipeline, cfg.trainer.grace_s, tracker.log) as interrupt,
        ):
            try:
                yield
            except Stopped as stopped:
                if interrupt.requested or not tracker.callbacks.stop_requested:
                    raise
                tracker.log(f"stopped at {stopped}: {tracker.callbacks.stop_reason}")


async def _save_model(cfg: Config, processes: Any, tracker: Tracker) -> None:
    """Write hf_model, if the run is to have one."""
    if cfg.trainer.save_hf_model and not cfg.trainer.val_only:
        with tracker.console.working("writing hf_model"):
            folder = Path(cfg.trainer.output_dir).resolve() / "hf_model"
            await processes.roles.actor.save_hf(str(folder))


async def create_pipeline(
    prepared: RunInputs, state: RunState, processes: Any, tracker: Tracker
) -> Any:
    """The pipeline of an attempt. What learns has the checkpoint from which it resumes."""
    from one_step_off.ray_trainer import Pipeline
    from one_step_off.supervised_trainer import SupervisedPipeline

    cfg = prepared.cfg
    checkpointer = checkpoint.Checkpointer(cfg, processes.save_state)
    data = prepared.data
    given = (cfg, processes.roles, data.stream, data.val, tracker, checkpointer)
    if prepared.is_supervised:
        await load_weights(prepared, state.resume_point, processes, tracker)
        start = state.resume_point.step if state.resume_point else 0
        return SupervisedPipeline(*given, start=start, attempt=state.attempt)
    resumed = await load_checkpoint(prepared, state.resume_point, processes, tracker)
    return Pipeline(*given, resumed=resumed, attempt=state.attempt)


def _watched_groups(processes: Any) -> dict[str, list[Any]]:
    """Group name -> its actors, for the metrics of memory and utilization, where the actor's group
    is "trainer"."""
    groups = {}
    for role, group in processes.groups.items():
        name = "trainer" if role == "actor" else role
        groups[name] = group.ranks
    if processes.roles.rollout is not None:
        groups["rollout"] = processes.roles.rollout.replicas
    return groups


async def load_weights(
    prepared: RunInputs, resume_point: ResumePoint | None, processes: Any, tracker: Tracker
) -> None:
    """Load a checkpoint into the trainable roles, if there is one."""
    if resume_point is None:
        return
    await processes.load_state(str(resume_point.path.resolve()))
    if not prepared.cfg.trainer.val_only:
        total_steps = prepared.data.stream.total_steps
        tracker.log(
            f"resuming from step {resume_point.step} of {total_steps}, from {resume_point.path}"
        )


async def load_checkpoint(
    prepared: RunInputs, resume_point: ResumePoint | None, processes: Any, tracker: Tracker
) -> Any:
    """Load a checkpoint into the trainable roles. Returns what the pipeline resumes with, or None
    without one."""
    from one_step_off.ray_trainer import Resumed

    if resume_point is None:
        return None
    path = resume_point.path
    state = resume_point.state
    await load_weights(prepared, resume_point, processes, tracker)
    if prepared.cfg.trainer.val_only:  # trains on nothing, so that the samples are not needed
        return Resumed(step=resume_point.step)
    samples = checkpoint.read_samples(path) if state["has_samples"] else []
    return Resumed(
        step=resume_point.step,
        in_flight=restored_in_flight(state, samples, prepared.data.find),
        kl_coef=state["kl_coef"],
    )


def open_files(
    prepared: RunInputs,
    resume_point: ResumePoint | None,
    tracker: Tracker,
    remote_loggers: dict[str, Any],
) -> None:
    """Open the loggers and begin the files of the run folder at the step of the resume point, or at
    step 0.

    Args:
        remote_loggers: see `loggers.start_remote_loggers`.
    """
    cfg = prepared.cfg
    checkpoint.put_aside(cfg, resume_point.path if resume_point else None)
    first_step = 0
    evaluations: list[dict[str, float]] = []
    unwritten: dict[str, float] = {}
    # The folder of an evaluation alone is its own, and begins at step 0.
    if resume_point is not None and not cfg.trainer.val_only:
        first_step = resume_point.step
        evaluations = resume_point.state["evaluations"]
        unwritten = resume_point.state["unwritten"]
    tracker.loggers = open_loggers(
        cfg,
        first_step,
        prepared.data.find,
        tracker.log,
        remote_loggers,
        decode=prepared.tokenizer.decode,
    )
    tracker.start(first_step, evaluations, unwritten)
