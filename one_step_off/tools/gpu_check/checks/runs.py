"""Real runs of a few steps, one per way to place the roles: `python -m one_step_off.main_ppo`."""

import json
import math
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.tools.gpu_check.checkpoints import dtype_of, random_checkpoint

STEPS = {"cpu": 3, "cuda": 5}
CONFIG = "gsm8k_tiny_cpu"
"""Word problems that a generator makes: no file and no hub."""

MEASURED_FROM = 2
"""The first steps compile and warm up."""

LR = {"cpu": 1e-3, "cuda": 1e-5}
"""In float32 each step changes almost all weights, also plainly enough for the canary to see. In
bfloat16 this rate changes a small share, as in a real run, so that deltas are sparse."""

ENTROPY_COEF = 0.01
"""A random model earns no reward, so the policy gradient is 0. The entropy's is not."""

FINITE = (
    "actor/grad_norm",
    "actor/lr",
    "actor/skipped_updates",
    "actor/loss",
    "actor/entropy",
    "canary/logprob_diff_max",
    "canary/logprob_diff_mean",
    "logprob_diff/mean",
    "ratio/mean",
    "ratio/max",
    "reward/mean",
    "sync/bytes",
    "time/step_s",
)
"""Metrics that every step has. The file has null for a NaN."""

MARGIN_S = 10.0
"""Left of the check's time limit to report a run that was too slow."""

MESSAGE_CHARS = 300

DELTAS = {"weight_sync.mode": "delta"}
SHARED = {"rollout": [0.5], "actor": [0.5]}
PAIR = 2
ENGINE_SHARE = 0.3
"""Of the GPU's memory, where engine and trainer work one after the other."""


@dataclass(frozen=True)
class _Run:
    """What one run sets, and what its metrics must show.

    Attributes:
        settings: config key -> value.
        staleness: steps that the tokens of the last step are old.
        is_one_device: engine and trainer share it, so a sync needs no network.
        sends_deltas: from step to step. The full transfer comes before the first step.
    """

    settings: dict[str, Any]
    staleness: int
    is_one_device: bool = False
    sends_deltas: bool = False


def colocated(context: Context) -> Figures:
    """First the engine, then the trainer on one device; on GPUs the engine then sleeps."""
    return _run(context, _Run(_all_in_one(context, 1), 0, is_one_device=True))


def shared(context: Context) -> Figures:
    """One step off on one device, of which each has half; syncs with deltas."""
    settings = {"placement.pools": SHARED} | DELTAS | _quick_start(context)
    return _run(context, _Run(settings, 1, is_one_device=True, sends_deltas=True))


def disaggregated(context: Context) -> Figures:
    """One step off, a device for each; syncs with deltas. A single GPU is shared, with NCCL
    nevertheless."""
    pools = {"placement.pools": {"rollout": [1], "actor": [1]}}
    if context.is_cuda and context.gpus < PAIR:
        pools = {"placement.pools": SHARED, "weight_sync.transport": "collective"}
    settings = pools | DELTAS | _quick_start(context)
    return _run(context, _Run(settings, 1, sends_deltas=True))


def tensor_parallel(context: Context) -> Figures:
    """The engine on two devices, two ranks of the trainer on two others."""
    settings = {
        "placement.pools": {"rollout": [2], "actor": [2]},
        "rollout.tensor_parallel_size": 2,
    }
    return _run(context, _Run(settings | _quick_start(context), 1))


def hsdp(context: Context) -> Figures:
    """Two copies of the model, in two shards each. The engines generate before the ranks train."""
    settings = _all_in_one(context, 4) | {"actor.fsdp_size": 2}
    return _run(context, _Run(settings | _quick_start(context), 0))


def megatron(context: Context) -> Figures:
    """Two engines; two ranks of Megatron-core share each layer."""
    settings = {
        "placement.pools": {"rollout": [2], "actor": [2]},
        "actor.backend": "megatron",
        "actor.tensor_parallel_size": 2,
    }
    return _run(context, _Run(settings | _quick_start(context), 1))


def _all_in_one(context: Context, devices: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "placement.pools": {"all": [devices]},
        "placement.roles": {"rollout": "all", "actor": "all"},
    }
    if context.is_cuda:
        settings["rollout.gpu_memory_utilization"] = ENGINE_SHARE
    return settings


def _quick_start(context: Context) -> dict[str, Any]:
    """Without compilation and CUDA graphs, which take minutes; run_colocated has them."""
    return {"rollout.engine_kwargs": {"enforce_eager": True}} if context.is_cuda else {}


def _run(context: Context, run: _Run) -> Figures:
    """Run the program; the figures of its steps. Raises CheckFailed: it failed, or `_figures`."""
    steps = STEPS[context.device]
    folder = context.folder / "run"
    all_settings = _common(context, folder, steps) | run.settings
    all_settings["pipeline.staleness"] = run.staleness
    command = [sys.executable, "-P", "-m", "one_step_off.main_ppo", f"config={CONFIG}"]
    for key, value in all_settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        command.append(f"{key}={text}")
    print(" ".join(command), flush=True)
    environment = os.environ | {"ONE_STEP_OFF_CACHE": str(context.shared_folder / "cache")}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=context.limit_s - MARGIN_S,
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"))
        raise CheckFailed(f"the run did not end in {error.timeout:.0f} s") from None
    print(done.stdout)
    if done.returncode:
        raise CheckFailed(f"the run ended with code {done.returncode}: {_cause(done.stdout)}")
    return _figures(folder, steps, run)


def _common(context: Context, folder: Path, steps: int) -> dict[str, Any]:
    dtype = dtype_of(context)
    settings: dict[str, Any] = {
        "model.path": random_checkpoint(context),
        "model.dtype": dtype,
        "data.train_batch_size": 8,
        "data.generator_size": 64,
        "data.val_files": "",
        "rollout.n": 4,
        "actor.ppo_mini_batch_size": 8,
        "actor.lr": LR[context.device],
        "actor.warmup_steps": 0,
        "algorithm.entropy_coef": ENTROPY_COEF,
        "placement.device": context.device,
        "weight_sync.timeout_s": 60,
        "trainer.total_steps": steps,
        "trainer.max_restarts": 0,
        "trainer.start_timeout_s": context.limit_s,
        "trainer.save_hf_model": False,
        "trainer.overwrite": True,
        "trainer.resume": "never",
        "trainer.output_dir": str(folder),
        "logging.tensorboard": False,
    }
    return settings


def _cause(output: str) -> str:
    """The last line that says what failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["no output"])[-1][:MESSAGE_CHARS]


def _figures(folder: Path, steps: int, run: _Run) -> Figures:
    """The figures of a finished run. Raises CheckFailed: a step is missing or stale, nothing was
    trained, or the weights did not travel as they must."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    if len(rows) != steps:
        raise CheckFailed(f"metrics.jsonl has {len(rows)} steps of {steps}")
    measured = rows[MEASURED_FROM:]
    figures: Figures = {
        "steps": steps,
        "step, s": _median(measured, "time/step_s"),
        "generate, s": _median(measured, "time/generate_s"),
        "train, s": _median(measured, "time/train_s"),
        "sync, s": _median(measured, "time/sync_s"),
        "staleness, newest step": rows[-1]["staleness/max"],
        "gradient norms": _listed(rows, "actor/grad_norm"),
        "entropy": _listed(rows, "actor/entropy"),
        "canary, largest": _listed(rows, "canary/logprob_diff_max"),
        "MB sent": _listed(rows, "sync/bytes", 1e6),
        "changed share": _listed(rows, "sync/changed_share"),
        "ratio, mean": rows[-1]["ratio/mean"],
    }
    for name, value in rows[-1].items():
        if "memory" in name and isinstance(value, (int, float)):
            figures[name] = value
    wrong = _wrong_step(rows, run)
    if wrong:
        raise CheckFailed(wrong, figures)
    return figures


def _wrong_step(rows: list[dict[str, Any]], run: _Run) -> str:
    """What the first wrong step shows; empty: each trained, and its weights were sent."""
    for index, row in enumerate(rows):
        wrong = _untrained(row) or (_unsent(row, run) if index else "")
        if wrong:
            return f"step {index + 1} of {len(rows)}: {wrong}"
    # Where all weights travel faster than changes are found, some syncs are full.
    if run.sends_deltas and not any(row.get("sync/changed_share") for row in rows):
        return "no delta was sent"
    if rows[-1]["staleness/max"] != run.staleness:
        return f"the last step's tokens are not {run.staleness} steps old"
    return ""


def _untrained(row: dict[str, Any]) -> str:
    """Why this step changed no weights, or broke them; empty: it trained."""
    for name in FINITE:
        value = row.get(name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{name} is {value}"
    for name in ("actor/grad_norm", "actor/lr"):
        if row[name] <= 0:
            return f"{name} is {row[name]:g}, so nothing is trained"
    if row["actor/skipped_updates"]:
        return "an update was skipped"
    return ""


def _unsent(row: dict[str, Any], run: _Run) -> str:
    """Why the weights of the step before did not come as they must; empty: they did. The first
    step has no sync: all have loaded the same weights."""
    if row["sync/bytes"] <= 0:
        return "no weights were sent"
    wire_s = row.get("sync/wire_s")
    if run.is_one_device and wire_s != 0:
        return f"sync/wire_s is {wire_s}, but one device needs no network"
    if run.sends_deltas and row.get("sync/changed_share") == 0:
        return "sync/changed_share is 0: the update changed nothing"
    return ""


def _listed(rows: list[dict[str, Any]], name: str, unit: float = 1.0) -> str:
    """The values of all steps; "-" for none."""
    values = [row.get(name) for row in rows]
    return " ".join("-" if value is None else f"{value / unit:.3g}" for value in values)


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)
