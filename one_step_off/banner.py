"""What a run says of itself before it starts and after it has ended, as (name, text) pairs for the screen."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from one_step_off.config import Config
from one_step_off.config_io import placement_text
from one_step_off.loggers import SAMPLES

Facts = list[tuple[str, str]]


def start_facts(cfg: Config, asked_model: str, params: int | None, used: list[int], steps: int, links: Facts) -> Facts:
    """The run that is about to start.

    Args:
        asked_model: `model.path` as the user gave it (a tiny: name has become a folder since).
        params: the model's parameters, None if they cannot be counted yet.
        used: prompts in the training set and, if there is one, in the held-out set.
        links: more places to look at, as the W&B run's.
    """
    size = "" if params is None else f", {count(params)} parameters"
    found = [("model", f"{asked_model}{size}, {cfg.model.dtype}")]
    found.append(("data", f"{used[0]} prompts of {cfg.data.train_files}"))
    found.append(("held out", f"{used[1]} prompts of {cfg.data.val_files}" if len(used) > 1 else "none"))
    for i, line in enumerate(placement_text(cfg).splitlines()):
        found.append(("placement" if i == 0 else "", line))
    how = "one step off, samples are 1 version old" if cfg.pipeline.staleness else "synchronous, samples are fresh"
    found.append(("staleness", f"{cfg.pipeline.staleness} ({how})"))
    found.append(("steps", f"{steps}, each {cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples"))
    return [*found, ("output", cfg.trainer.output_dir), *links]


def count(number: int) -> str:
    """A large number for people: 345k, 494M, 1.54B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def end_facts(summary: dict[str, Any], cfg: Config) -> Facts:
    """What the run came to, where things lie, and how to go on. `summary` is that of `Tracker.summary`."""
    found: Facts = []
    if "reward/first" in summary:
        found.append(
            (
                "reward",
                f"{summary['reward/first']:.3f} -> {summary['reward/last']:.3f} "
                f"(means of the first and last {summary['reward/averaged_steps']} steps)",
            )
        )
    if "val/first" in summary:
        text = f"{summary['val/first']:.3f} -> {summary['val/last']:.3f}"
        found.append(("held out", text if len(summary["val/versions"]) > 1 else f"{summary['val/last']:.3f}"))
    if "median/time/step_s" in summary:
        found += _speed(summary)
    found.append(("whole run", f"{summary['steps']} steps in {summary['seconds']:.0f} s"))
    return found + _places(cfg)


def _speed(summary: dict[str, Any]) -> Facts:
    found = [
        (
            "median step",
            f"{summary['median/time/step_s']:.2f} s: generate {summary['median/time/generate_s']:.2f} s, train "
            f"{summary['median/time/train_s']:.2f} s, sync {summary['median/time/sync_s']:.3f} s",
        ),
        ("idle", f"rollout {summary['idle_share/rollout']:.0%}, trainer {summary['idle_share/trainer']:.0%}"),
        ("samples/s", f"{summary['samples_per_s']:.0f}"),
        ("tokens/s", _of_groups(summary, "tokens_per_s", "{:,.0f}") + " while they work"),
    ]
    if summary.get("mfu/rollout") is not None:
        found.append(("MFU", _of_groups(summary, "mfu", "{:.1%}") + f" of {summary['device']} in bf16"))
    elif "flops_per_s/rollout" in summary:
        found.append(("GFLOP/s", _of_groups(_scaled(summary, 1e-9), "flops_per_s", "{:.3g}")))
    memory = _of_groups(_scaled(summary, 2**-30), "memory", "{:.2f} GiB", "_peak_bytes")
    return found + ([("peak memory", memory)] if memory else [])


def _scaled(summary: dict[str, Any], factor: float) -> dict[str, float]:
    return {k: v * factor for k, v in summary.items() if isinstance(v, (int, float))}


def _of_groups(summary: dict[str, Any], name: str, pattern: str, end: str = "") -> str:
    """The figure `name` of each group that has it, as "rollout 1, trainer 2"."""
    values = {g: summary.get(f"{name}/{g}{end}") for g in ("rollout", "trainer")}
    return ", ".join(f"{g} {pattern.format(v)}" for g, v in values.items() if v is not None)


def _places(cfg: Config) -> Facts:
    folder = Path(cfg.trainer.output_dir)
    found = [("metrics", f"{folder / 'metrics.jsonl'}, {folder / 'summary.json'}")]
    if cfg.logging.tensorboard:
        found.append(("tensorboard", f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"))
    if cfg.logging.wandb and cfg.logging.wandb_mode == "offline":
        found.append(("wandb", f"wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"))
    if cfg.logging.sample_dump and (folder / SAMPLES).is_dir():
        found.append(("samples", f"python -m one_step_off.view {shlex.quote(str(folder))}"))
    if cfg.trainer.save_hf_model:
        found += [("model", str(folder / "hf_model")), ("to go on", going_on(cfg))]
    return found


def going_on(cfg: Config) -> str:
    """The command that trains the resulting model further, into a folder beside this one."""
    folder = Path(cfg.trainer.output_dir)
    parts = [
        f"config={folder / 'config.yaml'}",
        f"model.path={folder / 'hf_model'}",
        f"trainer.output_dir={folder.with_name(folder.name + '_next') if folder.name else 'outputs/next'}",
    ]
    return "python -m one_step_off.main_ppo " + " ".join(shlex.quote(part) for part in parts)
