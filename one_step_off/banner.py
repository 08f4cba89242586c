"""What a run says of itself before it starts and after it has ended, as (name, text) pairs for the screen."""

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from one_step_off.config import Config
from one_step_off.config_io import placement_text
from one_step_off.loggers import VAL, numbered

Facts = list[tuple[str, str]]

# Of `summary.json`, but memory in GiB. A line whose figures are not all there is left out; of
# two with one name the first stands.
_PARTS = ", ".join(f"{part} {{median/time/{part}_s:.2f}} s" for part in ("generate", "train"))
_END = (
    ("reward", "{reward/first:.3f} -> {reward/last:.3f} ({averaged})"),
    ("reward", "{reward/last:.3f}"),
    ("held out", "{val/first:.3f} -> {val/last:.3f}"),
    ("held out", "{val/last:.3f}"),
    ("median step", f"{{median/time/step_s:.2f}} s: {_PARTS}, sync {{median/time/sync_s:.3f}} s"),
    ("idle", "rollout {idle_share/rollout:.0%}, trainer {idle_share/trainer:.0%}"),
    ("samples/s", "{samples_per_s:.0f}"),
    ("tokens/s", "rollout {tokens_per_s/rollout:,.0f}, trainer {tokens_per_s/trainer:,.0f} while they work"),
    ("MFU", "rollout {mfu/rollout:.1%}, trainer {mfu/trainer:.1%} of {device} in bf16"),
    ("peak memory", "rollout {memory/rollout_peak_bytes:.2f} GiB, trainer {memory/trainer_peak_bytes:.2f} GiB"),
)


def start_facts(cfg: Config, asked_model: str, params: int | None, used: list[int], steps: int, links: Facts) -> Facts:
    """The run that is about to start. `asked_model`: `model.path` as the user gave it (a tiny: name has become a folder
    since). `params`: the model's parameters, None if they cannot be counted yet. `used`: prompts in the training set
    and, if there is one, in the held-out set. `links`: more places to look at, as the W&B run's."""
    size = "" if params is None else f", {count(params)} parameters"
    how = "one step off, samples are 1 version old" if cfg.pipeline.staleness else "synchronous, samples are fresh"
    each = f"{steps}, each {cfg.data.train_batch_size} prompts x {cfg.rollout.n} samples"
    return [
        ("model", f"{asked_model}{size}, {cfg.model.dtype}"),
        ("data", f"{used[0]} prompts of {cfg.data.train_files}"),
        ("held out", f"{used[1]} prompts of {cfg.data.val_files}" if len(used) > 1 else "none"),
        *(("" if i else "placement", line) for i, line in enumerate(placement_text(cfg).splitlines())),
        ("staleness", f"{cfg.pipeline.staleness} ({how})"),
        ("steps", "none: the held-out set is evaluated" if cfg.trainer.val_only else each),
        ("output", cfg.trainer.output_dir),
        *links,
    ]


def count(number: int) -> str:
    """A large number for people: 345k, 494M, 1.54B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def end_facts(summary: dict[str, Any], cfg: Config) -> Facts:
    """What the run came to, where things lie, and how to go on. `summary` is that of `Tracker.summary`."""
    known = {k: v for k, v in summary.items() if v is not None}
    known |= {k: v / 2**30 for k, v in known.items() if k.startswith("memory/")}
    dropped = {"reward/first": known["steps"] == 1, "val/first": len(known.get("val/versions", ())) == 1}
    known = {k: v for k, v in known.items() if not dropped.get(k)}
    k = known.get("reward/averaged_steps", 0)
    known["averaged"] = "first and last step" if k == 1 else f"means of the first and last {k} steps"
    found: dict[str, str] = {}
    for name, pattern in _END:
        with contextlib.suppress(KeyError):
            found.setdefault(name, pattern.format_map(known))
    made = known["steps"] - known.get("steps_before", 0)
    found["this run" if "steps_before" in known else "whole run"] = f"{made} steps in {known['seconds']:.0f} s"
    return [*found.items(), *_places(cfg)]


def _places(cfg: Config) -> Facts:
    """Where things lie, as far as they are there."""
    folder = Path(cfg.trainer.output_dir)
    run, events, offline = (shlex.quote(str(folder / name)) for name in ("", "tensorboard", "wandb"))
    files = [str(folder / n) for n in ("metrics.jsonl", "evaluations.jsonl", "summary.json") if (folder / n).exists()]
    # An evaluation alone has no steps to look at.
    evaluated = f" --val {max(numbered(folder, VAL), default=0)}" if cfg.trainer.val_only else ""
    places = [
        (bool(files), "metrics", ", ".join(files)),
        ((folder / "report.html").exists(), "report", str(folder / "report.html")),
        (any(folder.glob("tensorboard/*")), "tensorboard", f"{interpreter()} -m tensorboard.main --logdir {events}"),
        (any(folder.glob("wandb/offline-run-*")), "wandb", f"{interpreter()} -m wandb sync {offline}/offline-run-*"),
        (any(folder.glob("samples/*.jsonl")), "samples", f"{interpreter()} -m one_step_off.view {run}{evaluated}"),
    ]
    if cfg.trainer.save_hf_model and not cfg.trainer.val_only and (folder / "hf_model").is_dir():
        places += [(True, "model", str(folder / "hf_model")), (True, "to go on", going_on(cfg))]
    return [(name, text) for there, name, text in places if there]


def interpreter() -> str:
    """This Python, in a shell's words that work where this run was started, without an activated environment."""
    near = os.path.relpath(sys.executable)
    return shlex.quote(sys.executable if near.startswith("..") else near)


def going_on(cfg: Config) -> str:
    """The command that trains the resulting model further, into a folder beside this one."""
    folder = Path(cfg.trainer.output_dir)
    beside = folder.with_name(folder.name + "_next") if folder.name else "outputs/next"
    parts = f"config={folder / 'config.yaml'}", f"model.path={folder / 'hf_model'}", f"trainer.output_dir={beside}"
    return f"{interpreter()} -m {shlex.join(['one_step_off.main_ppo', *parts])}"
