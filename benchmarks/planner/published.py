"""What the simulation makes of the phase times that others have published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.report import markdown_table
from one_step_off.tools.planner.simulation import simulate
from one_step_off.tools.planner.work import Work

STEP = "median/time/step_s"
GENERATE = "median/time/generate_s"
TRAIN = "median/time/train_s"
WAIT_ROLLOUT = "median/time/wait_rollout_s"

PROMPTS = 64
TOKENS = 1000  # of each response; nothing is known of the real lengths
UNLIMITED_SLOTS = 1 << 20
GPUS = 16
VERL_ROLLOUT_GPUS = 4


@dataclass(frozen=True)
class VerlSynchronous:
    """Seconds of a synchronous step on 16 H20. `generate_sequences`: its part of `generate`."""

    generate: float
    generate_sequences: float
    train: float
    step: float


@dataclass(frozen=True)
class VerlOneStepOff:
    """Seconds of a step one step off, on 4 H20 that generate and 12 that train."""

    generate_sequences: float
    train: float
    wait: float
    step: float


# Training: old_log_prob + update_actor. Qwen2.5-Math-7B, DAPO; verl's documentation,
# "One Step Off Policy Async Trainer", July 2025.
VERL = {
    "FSDP2": (VerlSynchronous(321, 247, 88 + 286, 749), VerlOneStepOff(458, 108 + 337, 45, 520)),
    "Megatron": (
        VerlSynchronous(207, 162, 119 + 344, 699),
        VerlOneStepOff(501, 120 + 347, 59, 566),
    ),
}
# Seconds of a step, synchronous and one step off. NeMo-RL's documentation, "Performance".
NEMO_RL = {
    "30B-A3B, 32 H100": (192, 152),
    "235B, 256 H100": (312, 231),
    "DeepSeek-V3, 512 H100": (111, 64.1),
    "30B-A3B, 16 GB200": (221, 301),
}


def work_of_phases(
    generate: float,
    train: float,
    generate_fixed: float = 0.0,
    train_fixed: float = 0.0,
    gpus: int = 1,
) -> Work:
    """The work of phases that were measured on `gpus` devices.

    Args:
        generate: seconds of generation.
        train: seconds of training.
        generate_fixed: the part of `generate` that more devices do not make faster.
        train_fixed: the part of `train` that more devices do not make faster.
        gpus: devices of the measurement.
    """
    all_tokens = PROMPTS * TOKENS
    return Work(
        prompts=PROMPTS,
        lengths=np.full((PROMPTS, 1), TOKENS),
        prompt_tokens=0.0,
        decode_s=generate_fixed / TOKENS,
        sequence_s=(generate - generate_fixed) * gpus / all_tokens,
        train_fixed_s=train_fixed,
        train_token_s=(train - train_fixed) * gpus / all_tokens,
        sync_s=0.0,
        places=UNLIMITED_SLOTS,
    )


def _step_with_error(simulated: dict[str, Any], published_s: float) -> str:
    """A simulated step, and how far it is from the published one."""
    step = simulated[STEP]
    return f"{step:.0f} ({step / published_s - 1:+.0%})"


def _verl_from_own_phases() -> list[str]:
    """Each of verl's runs simulated from its own phases."""
    rows = []
    for name, (synchronous, one_step_off) in VERL.items():
        work = work_of_phases(synchronous.generate, synchronous.train)
        step = _step_with_error(simulate(work, 0, 1), synchronous.step)
        rows.append([f"{name}, synchronous on 16", str(synchronous.step), step, "", ""])
        work = work_of_phases(one_step_off.generate_sequences, one_step_off.train)
        simulated = simulate(work, 1, 1)
        row = [
            f"{name}, one step off on 4 + 12",
            str(one_step_off.step),
            _step_with_error(simulated, one_step_off.step),
            str(one_step_off.wait),
            f"{simulated[WAIT_ROLLOUT]:.0f}",
        ]
        rows.append(row)
    headings = [
        "verl",
        "step published, s",
        "simulated from its own phases, s",
        "wait published, s",
        "simulated, s",
    ]
    return markdown_table(headings, rows)


def _phases_row(name: str, work: Work, rollout_gpus: int) -> list[str]:
    simulated = simulate(work, rollout_gpus, GPUS - rollout_gpus)
    return [name, *(f"{simulated[figure]:.0f}" for figure in (GENERATE, TRAIN, STEP))]


def _verl_predictions(
    name: str, synchronous: VerlSynchronous, one_step_off: VerlOneStepOff
) -> list[list[str]]:
    """What the synchronous run on 16 GPUs predicts for 4 + 12, and the best split."""
    generate = synchronous.generate_sequences
    train = synchronous.train
    # Each phase as fixed + rest / n, through what both runs took on n devices.
    generate_fixed = (4 * generate - one_step_off.generate_sequences) / 3
    train_fixed = 4 * train - 3 * one_step_off.train
    scaling = work_of_phases(generate, train, gpus=GPUS)
    fitted = work_of_phases(generate, train, generate_fixed, train_fixed, gpus=GPUS)
    best = min(range(1, GPUS), key=lambda count: simulate(fitted, count, GPUS - count)[STEP])
    published = [one_step_off.generate_sequences, one_step_off.train, one_step_off.step]
    return [
        [f"{name}, published", *map(str, published)],
        _phases_row(f"{name}, if all gets faster with GPUs", scaling, VERL_ROLLOUT_GPUS),
        _phases_row(f"{name}, if the fixed parts do not", fitted, VERL_ROLLOUT_GPUS),
        _phases_row(f"{name}, the same on {best} + {GPUS - best}, the best", fitted, best),
        [
            f"{name}, fixed parts fitted to both runs",
            f"{generate_fixed:.0f}",
            f"{train_fixed:.0f}",
            "",
        ],
    ]


def _fixed_share(phase: float, one_step_off: float) -> str:
    """The smallest fixed share of two equal phases that explains a step one step off.

    Args:
        phase: seconds of each phase on all devices.
        one_step_off: published seconds of a step, with half of the devices for each phase.
    """
    for percent in range(101):
        fixed = percent / 100 * phase
        work = work_of_phases(phase, phase, fixed, fixed, gpus=32)
        if simulate(work, 16, 16, steps=4)[STEP] <= one_step_off:
            if one_step_off > 2 * phase:
                return "does not fit: slower than synchronous"
            return f"{percent} %"
    return "does not fit: faster than either phase"


def _nemo_rl() -> list[str]:
    rows = []
    for name, (synchronous, one_step_off) in NEMO_RL.items():
        row = [
            name,
            str(synchronous),
            str(one_step_off),
            f"{synchronous / one_step_off:.2f}",
            _fixed_share(synchronous / 2, one_step_off),
        ]
        rows.append(row)
    headings = [
        "NeMo-RL",
        "synchronous, s",
        "one step off, s",
        "gain",
        "share of both phases that does not get faster with GPUs",
    ]
    return markdown_table(headings, rows)


def published() -> str:
    """The tables in Markdown."""
    predictions = []
    for name, (synchronous, one_step_off) in VERL.items():
        predictions += _verl_predictions(name, synchronous, one_step_off)
    headings = [
        "verl, 4 + 12 predicted from the synchronous run on 16",
        "generation, s",
        "training, s",
        "step, s",
    ]
    lines = [
        *_verl_from_own_phases(),
        "",
        *markdown_table(headings, predictions),
        "",
        *_nemo_rl(),
    ]
    return "\n".join(lines) + "\n"
