"""What a run prints before its start and after its end, as (name, text) pairs."""

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from one_step_off.config.placement import placement_text
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import train_files_text
from one_step_off.config.sync_schedule import waits_for_requests
from one_step_off.monitoring.loggers import EVALUATION_PREFIX, sample_files
from one_step_off.monitoring.summary import sampling_text

Facts = list[tuple[str, str]]
GIB = 2**30
LARGE_NUMBERS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
ROUNDS_UP = 0.9995  # of a power: with three digits this is shown as the power itself

MEDIAN_STEP = (
    "{median/time/step_s:.2f} s: generate {median/time/generate_s:.2f} s, "
    "train {median/time/train_s:.2f} s, sync {median/time/sync_s:.3f} s"
)
# Patterns of figures in `summary.json`, with memory in GiB. A pattern whose figures are not all
# known is left out; of two with one name the first is used.
END_PATTERNS = (
    ("loss", "{sft/first:.4f} -> {sft/last:.4f} nats per token of the answers"),
    ("held out", "loss {val/loss/first:.4f} -> {val/loss/last:.4f}"),
    ("train reward", "{reward/first:.3f} -> {reward/last:.3f} ({sampled}; {averaged})"),
    ("train reward", "{reward/last:.3f} ({sampled})"),
    ("held out", "{val/first:.3f} -> {val/last:.3f} ({held_out_sampled})"),
    ("held out", "{val/last:.3f} ({held_out_sampled})"),
    ("agents", "{agent/failed_share:.1%} of the episodes failed, the mean over the steps"),
    ("distill/kl", "{distill/kl/first:.4f} -> {distill/kl/last:.4f} nats per token (first, last)"),
    ("median step", MEDIAN_STEP),
    ("median step", "{median/time/step_s:.2f} s"),
    ("idle", "rollout {idle_share/rollout:.0%}, trainer {idle_share/trainer:.0%}"),
    ("samples/s", "{samples_per_s:.0f}"),
    ("rows/s", "{rows_per_s:.0f}"),
    (
        "tokens/s",
        "rollout {tokens_per_s/rollout:,.0f}, trainer {tokens_per_s/trainer:,.0f} while they work",
    ),
    ("tokens/s", "{tokens_per_s/trainer:,.0f} while the trainer works"),
    (
        "speculation",
        "{rollout/acceptance_rate:.0%} of the draft tokens accepted, "
        "{rollout/acceptance_length:.2f} tokens per sequence and step",
    ),
    ("MFU", "rollout {mfu/rollout:.1%}, trainer {mfu/trainer:.1%} of {device} in bf16"),
    (
        "peak memory",
        "rollout {memory/rollout_peak_bytes:.2f} GiB, trainer {memory/trainer_peak_bytes:.2f} GiB",
    ),
    ("peak memory", "{memory/trainer_peak_bytes:.2f} GiB per process"),
)


def start_facts(
    cfg: Config, named_model: str, num_parameters: int | None, data: Any, links: Facts
) -> Facts:
    """The run that is about to start.

    Args:
        named_model: model.path as the user gave it (a tiny: name has become a folder since).
        num_parameters: of the model; None if they cannot be counted.
        data: the `RunData` of the run.
        links: more places to look at, as the W&B run's.
    """
    held_out = f"{len(data.val)} prompts of {cfg.data.val_files}" if data.val else "none"
    facts = [
        ("model", f"{_model_text(named_model, num_parameters)}, {cfg.model.dtype}"),
        ("data", f"{len(data.stream)} prompts of {train_files_text(cfg.data)}"),
        ("held out", held_out),
    ]
    if "teacher" in cfg.placement.roles:
        facts.append(("teacher", _teacher_text(cfg)))
    name = "placement"
    for line in placement_text(cfg).splitlines():
        facts.append((name, line))
        name = ""
    facts += [
        ("staleness", f"{cfg.pipeline.staleness} ({_staleness_text(cfg)})"),
        ("steps", _steps_text(cfg, data.stream.total_steps)),
        ("output", cfg.trainer.output_dir),
    ]
    return facts + links


def _teacher_text(cfg: Config) -> str:
    named = [f"{path} for {source}" for source, path in cfg.teacher.by_source.items()]
    teachers = ", ".join(filter(None, [cfg.teacher.path, *named]))
    return f"{teachers}; distill/kl is the student's distance to it"


def _staleness_text(cfg: Config) -> str:
    staleness = cfg.pipeline.staleness
    if staleness == 0:
        return "synchronous, samples are fresh"
    if not waits_for_requests(cfg):
        return f"samples are up to {staleness} versions old, syncs do not wait for requests"
    if staleness == 1:
        return "one step off, samples are 1 version old"
    text = f"samples are 1 to {staleness} versions old, a sync every {staleness} steps"
    if cfg.trainer.test_freq > 0 and cfg.trainer.test_freq % staleness:
        text += "; evaluations wait for the next sync"
    return text


def supervised_start_facts(
    cfg: Config, named_model: str, num_parameters: int | None, data: Any, links: Facts
) -> Facts:
    """As `start_facts`, for a supervised run."""
    held_out = f"{len(data.val)} rows of {cfg.sft.val_files}" if data.val else "none"
    steps = f"{data.stream.total_steps}, each {cfg.data.train_batch_size} rows, lr {cfg.actor.lr:g}"
    if cfg.trainer.val_only:
        steps = "none: the held-out set is evaluated"
    facts = [
        ("model", f"{_model_text(named_model, num_parameters)}, {cfg.model.dtype}"),
        ("data", f"{len(data.stream)} rows with answers of {cfg.sft.train_files}"),
        ("held out", held_out),
        ("placement", placement_text(cfg)),
        ("supervised", steps),
        ("output", cfg.trainer.output_dir),
    ]
    return facts + links


def _steps_text(cfg: Config, total_steps: int) -> str:
    if cfg.trainer.val_only:
        return "none: the held-out set is evaluated"
    return f"{total_steps}, each {cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples"


def _model_text(named_model: str, num_parameters: int | None) -> str:
    if num_parameters is None:
        return named_model
    return f"{named_model}, {short_count(num_parameters)} parameters"


def short_count(number: int) -> str:
    """A large number in three digits: 345k, 494M, 1.54B."""
    for size, letter in LARGE_NUMBERS:
        if number >= ROUNDS_UP * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def end_facts(summary: dict[str, Any], cfg: Config) -> Facts:
    """The results of a run, where its files are, and how to train further. `summary` is that of
    `Tracker.summary`."""
    figures = _end_figures(summary)
    figures["sampled"] = sampling_text(cfg.rollout.temperature)
    figures["held_out_sampled"] = sampling_text(cfg.rollout.val_temperature)
    facts: dict[str, str] = {}
    for name, pattern in END_PATTERNS:
        with contextlib.suppress(KeyError):
            facts.setdefault(name, pattern.format_map(figures))
    steps_before = figures.get("steps_before", 0)
    name = "this run" if "steps_before" in figures else "whole run"
    facts[name] = f"{figures['steps'] - steps_before} steps in {figures['seconds']:.0f} s"
    return [*facts.items(), *_result_files(cfg)]


def _end_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """The known figures of a summary: memory in GiB, and no first value where it is the last one
    too."""
    figures = {name: value for name, value in summary.items() if value is not None}
    for name, value in figures.items():
        if name.startswith("memory/"):
            figures[name] = value / GIB
    if figures["steps"] == 1:
        figures.pop("reward/first", None)
    if len(figures.get("val/versions", ())) == 1:
        figures.pop("val/first", None)
    averaged_steps = figures.get("reward/averaged_steps", 0)
    if averaged_steps == 1:
        figures["averaged"] = "first and last step"
    else:
        figures["averaged"] = f"means of the first and last {averaged_steps} steps"
    return figures


def _result_files(cfg: Config) -> Facts:
    """Where the files of the run are, and the commands that show them; only those that exist."""
    folder = Path(cfg.trainer.output_dir)
    python = python_command()
    facts = []
    metrics_files = [
        str(folder / name)
        for name in ("metrics.jsonl", "evaluations.jsonl", "summary.json")
        if (folder / name).exists()
    ]
    if metrics_files:
        facts.append(("metrics", ", ".join(metrics_files)))
    if (folder / "report.html").exists():
        facts.append(("report", str(folder / "report.html")))
    if any(folder.glob("tensorboard/*")):
        events = shlex.quote(str(folder / "tensorboard"))
        facts.append(("tensorboard", f"{python} -m tensorboard.main --logdir {events}"))
    if any(folder.glob("wandb/offline-run-*")):
        wandb_folder = shlex.quote(str(folder / "wandb"))
        facts.append(("wandb", f"{python} -m wandb sync {wandb_folder}/offline-run-*"))
    if any(folder.glob("samples/*.jsonl")):
        facts.append(("samples", _view_command(cfg)))
    trains = not cfg.trainer.val_only
    if trains and cfg.trainer.save_hf_model and (folder / "hf_model").is_dir():
        facts.append(("model", str(folder / "hf_model")))
        facts.append(("next run", train_further_command(cfg)))
    if trains and metrics_files:
        facts.append(("longer run", _longer_text(cfg)))
    return facts


def _longer_text(cfg: Config) -> str:
    """How this run can be made longer."""
    folder = Path(cfg.trainer.output_dir) / "checkpoints"
    saved = sorted(folder.glob("step_*"))
    if not saved:
        return "no checkpoint; set trainer.save_freq to be able to make a run longer"
    key = "trainer.total_steps" if cfg.trainer.total_steps else "trainer.total_epochs"
    return f"the same command with a larger {key} continues from {saved[-1]}"


def _view_command(cfg: Config) -> str:
    """The command that shows the samples of the run, or of its evaluation where it trained
    nothing."""
    folder = Path(cfg.trainer.output_dir)
    command = f"{python_command()} -m one_step_off.view {shlex.quote(str(folder))}"
    if cfg.trainer.val_only:
        newest_version = max(sample_files(folder, EVALUATION_PREFIX), default=0)
        command += f" --val {newest_version}"
    return command


def python_command() -> str:
    """This Python as a shell command that works in the current directory without an activated
    environment."""
    relative = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if relative.startswith("..") else relative)


def train_further_command(cfg: Config) -> str:
    """The command that trains the resulting model further, into a folder beside this one."""
    folder = Path(cfg.trainer.output_dir)
    next_folder = folder.with_name(folder.name + "_next") if folder.name else "outputs/next"
    # A supervised run has no rollouts: its config is not one for RL.
    is_supervised = "rollout" not in cfg.placement.roles
    program = "one_step_off.main_sft" if is_supervised else "one_step_off.main_ppo"
    command = [
        program,
        f"config={folder / 'config.yaml'}",
        f"model.path={folder / 'hf_model'}",
        f"trainer.output_dir={next_folder}",
    ]
    if cfg.trainer.sft_steps:  # the model has made them
        command.append("trainer.sft_steps=0")
    return f"{python_command()} -m {shlex.join(command)}"
