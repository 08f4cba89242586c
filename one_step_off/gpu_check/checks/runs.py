"""Real runs of a few steps, one per way to place the roles: `python -m one_step_off.main_ppo`."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from one_step_off.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.gpu_check.checkpoints import dtype_of, random_checkpoint

STEPS = {"cpu": 3, "cuda": 5}
CONFIG = "gsm8k_tiny_cpu"
"""Word problems that a generator makes: no file and no hub."""

MEASURED_FROM = 2
"""The first steps compile and warm up."""

MARGIN_S = 10.0
"""Left of the check's time limit to report a run that was too slow."""

MESSAGE_CHARS = 300

SHARED = {"rollout": [0.5], "actor": [0.5]}
ENGINE_SHARE = 0.3
"""Of the GPU's memory, where engine and trainer take turns."""


def colocated(context: Context) -> Figures:
    """Engine and trainer take turns on one device; on GPUs the engine sleeps meanwhile."""
    return _run(context, _all_in_one(context, 1), 0)


def shared(context: Context) -> Figures:
    """One step off on one device, of which each has half."""
    return _run(context, {"placement.pools": SHARED}, 1)


def disaggregated(context: Context) -> Figures:
    """One step off, a device for each."""
    return _run(context, {"placement.pools": {"rollout": [1], "actor": [1]}}, 1)


def tensor_parallel(context: Context) -> Figures:
    """The engine on two devices, two ranks of the trainer on two others."""
    settings = {
        "placement.pools": {"rollout": [2], "actor": [2]},
        "rollout.tensor_parallel_size": 2,
    }
    return _run(context, settings | _quick_start(context), 1)


def hsdp(context: Context) -> Figures:
    """Four ranks: two copies of the model, of two shards each; engines take turns with them."""
    settings = _all_in_one(context, 4) | {"actor.fsdp_size": 2}
    return _run(context, settings | _quick_start(context), 0)


def megatron(context: Context) -> Figures:
    """Two engines; two ranks of Megatron-core share each layer."""
    settings = {
        "placement.pools": {"rollout": [2], "actor": [2]},
        "actor.backend": "megatron",
        "actor.tensor_parallel_size": 2,
    }
    return _run(context, settings | _quick_start(context), 1)


def _all_in_one(context: Context, devices: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "placement.pools": {"all": [devices]},
        "placement.roles": {"rollout": "all", "actor": "all"},
    }
    if context.is_cuda:
        settings["rollout.gpu_memory_utilization"] = ENGINE_SHARE
    return settings


def _quick_start(context: Context) -> dict[str, Any]:
    """Without compilation and CUDA graphs, which the other runs have."""
    return {"rollout.engine_kwargs": {"enforce_eager": True}} if context.is_cuda else {}


def _run(context: Context, settings: dict[str, Any], staleness: int) -> Figures:
    """Run the program; the figures of its steps. Raises CheckFailed: it failed, or its steps are
    not all there."""
    steps = STEPS[context.device]
    folder = context.folder / "run"
    all_settings = _common(context, folder, steps) | settings
    all_settings["pipeline.staleness"] = staleness
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
    return _figures(folder, steps, staleness)


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
        "actor.lr": 1e-5,
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


def _figures(folder: Path, steps: int, staleness: int) -> Figures:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    if len(rows) != steps:
        raise CheckFailed(f"metrics.jsonl has {len(rows)} steps of {steps}")
    measured = rows[MEASURED_FROM:]
    figures: Figures = {
        "step, s": _median(measured, "time/step_s"),
        "generate, s": _median(measured, "time/generate_s"),
        "train, s": _median(measured, "time/train_s"),
        "sync, s": _median(measured, "time/sync_s"),
        "canary, largest": max(row["canary/logprob_diff_max"] for row in rows),
        "staleness, newest step": rows[-1]["staleness/max"],
        "ratio, mean": rows[-1]["ratio/mean"],
    }
    for name, value in rows[-1].items():
        if "memory" in name and isinstance(value, (int, float)):
            figures[name] = value
    if rows[-1]["staleness/max"] != staleness:
        raise CheckFailed(f"the last step's tokens are not {staleness} steps old", figures)
    return figures


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)
