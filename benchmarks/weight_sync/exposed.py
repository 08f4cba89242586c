"""What a weight sync adds to the steps of a real run.

It is the step time less that of the same run with a sync that costs nothing. Run by
`python -m benchmarks.weight_sync --exposed`. Whole runs one step off, the arms alternating, in two
settings: generation takes longer than training, and the other way round. The model has 47M
parameters with random values in fp32.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.paths import config_path
from benchmarks.common.report import markdown_table, row_not_run, spread, with_range
from benchmarks.common.runs import NO_EVALUATION, rotated, run_arm
from one_step_off.config.schema import WeightSyncConfig

SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "vocab_size": 32768,
}
STEPS = 9
WARMUP = 2
FEWEST_STEPS = WARMUP + 2
CONFIG = config_path("gsm8k_tiny_cpu.yaml")
COMMON_KEYS = [
    *NO_EVALUATION,
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
]
# A random model never ends a response, so each has the full length.
SETTINGS = {
    "generation longer": [
        "data.train_batch_size=1",
        "actor.ppo_mini_batch_size=1",
        "rollout.n=2",
        "data.max_response_length=128",
    ],
    "training longer": [
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=2",
        "rollout.n=4",
        "data.max_response_length=44",
    ],
}
ZERO = "no sync"
PLAIN = "plain"
OVERLAPPED = "overlapped"
COLUMNS = {
    "step": "time/step_s",
    "T_gen": "time/generate_s",
    "T_train": "time/train_s",
    "sync": "time/sync_s",
}
SMALLEST_RATIO = 1.4
MAX_RATIO = 3.5
"""Between these the longer phase over the shorter one is what the name of a setting says."""


@dataclass(frozen=True)
class ArmRun:
    """How an arm is run. `module`: what is run; `keys`: the arm's config keys."""

    module: str = "one_step_off.main_ppo"
    keys: list[str] = field(default_factory=list)


def arms() -> tuple[dict[str, ArmRun], dict[str, str]]:
    """Arm -> how it is run; and arm that cannot run -> why."""
    zero_sync = "benchmarks.weight_sync.zero_sync"
    has_overlap = "overlap" in {key.name for key in dataclasses.fields(WeightSyncConfig)}
    if not has_overlap:
        runnable = {ZERO: ArmRun(zero_sync), PLAIN: ArmRun()}
        return runnable, {OVERLAPPED: "this version has no weight_sync.overlap"}
    plain_keys = ["weight_sync.overlap=false"]
    runnable = {
        ZERO: ArmRun(zero_sync, plain_keys),
        PLAIN: ArmRun(keys=plain_keys),
        OVERLAPPED: ArmRun(keys=["weight_sync.overlap=true"]),
    }
    return runnable, {}


def summarize(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Summarize one setting.

    Args:
        runs: per arm and repeat the rows after the warm-up.

    Returns:
        Per arm the medians of its runs' medians, and "exposed": the step less that of the run
        without a sync in the same repeat.
    """
    medians = {}
    for arm, arm_runs in runs.items():
        medians[arm] = {
            name: [statistics.median(row[column] for row in rows) for rows in arm_runs]
            for name, column in COLUMNS.items()
        }
    zero_steps = medians[ZERO]["step"]
    found: dict[str, Any] = {}
    for arm, figures in medians.items():
        exposed = [
            step - zero_step for step, zero_step in zip(figures["step"], zero_steps, strict=True)
        ]
        found[arm] = {name: spread(values, "all") for name, values in figures.items()}
        found[arm]["exposed"] = spread(exposed, "all")
    return found


def phase_ratio(setting: str, found: dict[str, Any]) -> str:
    """How much longer one phase is than the other without a sync, and whether the setting asks for
    it.
    """
    if setting.startswith("generation"):
        longer, shorter = "T_gen", "T_train"
    else:
        longer, shorter = "T_train", "T_gen"
    ratio = found[ZERO][longer]["median"] / found[ZERO][shorter]["median"]
    text = f"{setting}: {longer} / {shorter} = {ratio:.2f} without a sync"
    if SMALLEST_RATIO <= ratio <= MAX_RATIO:
        return f"{text}."
    return f"{text}, NOT the {SMALLEST_RATIO} to {MAX_RATIO} that this setting needs."


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    names = [*COLUMNS, "exposed"]
    lines = [result["what"]]
    for setting, found in result["settings"].items():
        headings = [setting, *(f"{name}, s" for name in names)]
        rows = [
            [arm, *(with_range(figures[name], "{:.3g}") for name in names)]
            for arm, figures in found.items()
        ]
        lines += ["", *markdown_table(headings, rows)]
        for arm, reason in result["skipped"].items():
            lines.append(row_not_run(arm, f"not run: {reason}", len(headings)))
        lines += ["", phase_ratio(setting, found)]
    lines += [
        "",
        f"Medians over {result['repeats']} runs of each arm, the arms alternating (range of the",
        f"runs' medians, of {result['steps']} steps without the first {WARMUP} and the last, in",
        "which nothing is generated). Exposed: the step less that of the run with no sync in the",
        "same repeat.",
    ]
    return "\n".join(lines) + "\n"


def run_settings(
    repeats: int, steps: int, settings: list[str], runnable: dict[str, ArmRun]
) -> dict[str, dict[str, list[list[dict[str, Any]]]]]:
    """Run all arms in all settings. Returns setting -> arm -> the rows of each run.

    Raises:
        RunFailed: a run ended with an error.
    """
    collected: dict[str, dict[str, list[list[dict[str, Any]]]]] = {
        setting: {arm: [] for arm in runnable} for setting in settings
    }
    with tempfile.TemporaryDirectory() as folder:
        from one_step_off.models import tiny_qwen  # slow to import

        model = tiny_qwen.build("qwen2", f"{folder}/model", **SHAPE)
        common_keys = [*COMMON_KEYS, f"trainer.total_steps={steps}", f"model.path={model}"]
        for repeat in range(repeats):
            for setting in settings:
                for arm in rotated(list(runnable), repeat):
                    run = runnable[arm]
                    run_folder = Path(folder) / f"{setting} {arm} {repeat}".replace(" ", "_")
                    keys = [*common_keys, *SETTINGS[setting], *run.keys]
                    all_rows = run_arm(CONFIG, keys, run_folder, [], run.module)
                    rows = all_rows[WARMUP:-1]
                    collected[setting][arm].append(rows)
                    step = statistics.median(row["time/step_s"] for row in rows)
                    label = f"run {repeat + 1} of {repeats}, {setting}, {arm}"
                    print(f"{label}: {step:.3f} s/step", flush=True)
    return collected


def measure(out: Path, repeats: int, steps: int, settings: list[str], against: list[str]) -> None:
    """Run, summarize, and write exposed.json and exposed.md.

    Args:
        out: folder for the results.
        repeats: runs of each arm in each setting.
        steps: of each run.
        settings: names in SETTINGS.
        against: the arms, in addition to the one without a sync.
    """
    all_arms, skipped = arms()
    runnable = {arm: run for arm, run in all_arms.items() if arm in (ZERO, *against)}
    collected = run_settings(repeats, steps, settings, runnable)
    result = {
        "what": "A random model of 47M parameters, fp32, FSDP2, one trainer rank and one replica "
        "on a CPU core each.",
        "repeats": repeats,
        "steps": steps,
        "settings": {setting: summarize(runs) for setting, runs in collected.items()},
        "skipped": skipped,
    }
    markdown = table(result)
    (out / "exposed.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "exposed.md").write_text(markdown)
    print(markdown)
