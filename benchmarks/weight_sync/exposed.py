"""What a weight sync adds to the steps of a real run: step time less that of the same run with a sync that costs nothing.

Run by `python -m benchmarks.weight_sync --exposed`. Whole runs of the pipeline one step off, the arms in turns, in two
settings: generation takes longer than training, and the other way round. A random model of 47M parameters in fp32.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import ROOT, run_arm
from benchmarks.throughput.cases import UNEVALUATED
from benchmarks.weight_sync.report import spread
from one_step_off.config.schema import WeightSyncConfig
from one_step_off.models import tiny_qwen

SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "vocab_size": 32768,
}
STEPS, WARMUP = 9, 2
CONFIG = str(ROOT / "config/gsm8k_tiny_cpu.yaml")
COMMON = [
    *UNEVALUATED,
    "trainer.val_before_train=false",
    "trainer.val_after_train=false",
]
SETTINGS = {
    # A random model never says the end, so every response has the full length.
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
ZERO, PLAIN, OVERLAPPED = "no sync", "plain", "overlapped"
COLUMNS = {
    "step": "time/step_s",
    "T_gen": "time/generate_s",
    "T_train": "time/train_s",
    "sync": "time/sync_s",
}
RATIO = (
    1.4,
    3.5,
)  # of the longer phase to the shorter one; outside of it a setting is not what its name says


def arms() -> tuple[dict[str, tuple[str, list[str]]], dict[str, str]]:
    """Arm -> the module to run and its keys; and what cannot run -> why."""
    product = "one_step_off.main_ppo"
    if "overlap" not in {f.name for f in dataclasses.fields(WeightSyncConfig)}:
        plain = {ZERO: ("benchmarks.weight_sync.zero_sync", []), PLAIN: (product, [])}
        return plain, {OVERLAPPED: "this version has no weight_sync.overlap"}
    off, on = ["weight_sync.overlap=false"], ["weight_sync.overlap=true"]
    return {
        ZERO: ("benchmarks.weight_sync.zero_sync", off),
        PLAIN: (product, off),
        OVERLAPPED: (product, on),
    }, {}


def summarise(runs: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """Of one setting: per arm the medians of its runs' medians, and what it exposes over the run without a sync of the
    same repeat. `runs`: per arm and repeat the rows after the warm-up."""
    each = {
        arm: {
            name: [statistics.median(row[column] for row in rows) for rows in own]
            for name, column in COLUMNS.items()
        }
        for arm, own in runs.items()
    }
    found: dict[str, Any] = {
        arm: {name: spread(times) for name, times in own.items()} for arm, own in each.items()
    }
    for arm, own in each.items():
        found[arm]["exposed"] = spread(
            [a - b for a, b in zip(own["step"], each[ZERO]["step"], strict=True)]
        )
    return found


def longer(setting: str, found: dict[str, Any]) -> str:
    """How much longer the one phase is than the other, without a sync; and whether that is what was wanted."""
    order = ("T_gen", "T_train") if setting.startswith("generation") else ("T_train", "T_gen")
    ratio = found[ZERO][order[0]]["median"] / found[ZERO][order[1]]["median"]
    wanted = (
        ""
        if RATIO[0] <= ratio <= RATIO[1]
        else f", NOT the {RATIO[0]} to {RATIO[1]} that this setting is to have"
    )
    return f"{setting}: {order[0]} / {order[1]} = {ratio:.2f} without a sync{wanted}."


def table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    names = [*COLUMNS, "exposed"]
    lines = [result["what"]]
    for setting, found in result["settings"].items():
        lines += [
            "",
            f"| {setting} | " + " | ".join(f"{name}, s" for name in names) + " |",
            "| --- |" + " --- |" * 5,
        ]
        for arm, own in found.items():
            cells = (
                f"{own[n]['median']:.3g} ({own[n]['min']:.3g} to {own[n]['max']:.3g})"
                for n in names
            )
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
        lines += [
            f"| {arm} | not run: {why} |" + " |" * 4 for arm, why in result["skipped"].items()
        ]
        lines += ["", longer(setting, found)]
    lines += [
        "",
        f"Medians over {result['repeats']} runs of each arm in turns (range of the runs' medians, of {result['steps']}",
    ]
    lines += [
        f"steps without the first {WARMUP} and the last, in which nothing is generated). Exposed: the step less that"
    ]
    lines += ["of the run with no sync in the same repeat."]
    return "\n".join(lines) + "\n"


def measure(out: Path, repeats: int, steps: int, settings: list[str], against: list[str]) -> None:
    """Run `steps` steps without a sync and of the arms `against` it in these settings, summarise, write exposed.json and
    exposed.md into `out`."""
    runnable, skipped = arms()
    runnable = {arm: how for arm, how in runnable.items() if arm in (ZERO, *against)}
    kept: dict[str, dict[str, list[Any]]] = {s: {arm: [] for arm in runnable} for s in settings}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_qwen.build("qwen2", f"{folder}/model", **SHAPE)
        for repeat in range(repeats):
            names = list(runnable)
            for setting in settings:
                for arm in names[repeat % len(names) :] + names[: repeat % len(names)]:
                    module, own = runnable[arm]
                    where = Path(folder) / f"{setting} {arm} {repeat}".replace(" ", "_")
                    all_keys = [*COMMON, f"trainer.total_steps={steps}", f"model.path={model}"]
                    all_keys += [*SETTINGS[setting], *own]
                    rows = run_arm(CONFIG, all_keys, where, [], module)[WARMUP:-1]
                    kept[setting][arm].append(rows)
                    step = statistics.median(row["time/step_s"] for row in rows)
                    print(
                        f"run {repeat + 1} of {repeats}, {setting}, {arm}: {step:.3f} s/step",
                        flush=True,
                    )
    found = {setting: summarise(runs) for setting, runs in kept.items()}
    what = "A random model of 47M parameters, fp32, FSDP2, one trainer rank and one replica on a CPU core each."
    result = {
        "what": what,
        "repeats": repeats,
        "steps": steps,
        "settings": found,
        "skipped": skipped,
    }
    (out / "exposed.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "exposed.md").write_text(table(result))
    print(table(result))
