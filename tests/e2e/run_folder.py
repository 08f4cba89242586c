"""What the tests read from the folder of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CLOCK_PREFIXES = (
    "time/", "sync/", "val/seconds", "actor/forward_s", "actor/backward_s", "actor/optimizer_s",
    "tokens_per_s/", "flops_per_s/", "mfu/", "memory/", "checkpoint/", "actor/sync_wait_s",
    "restarts/",
)  # fmt: skip
"""Metrics that differ between two equal runs: clocks, memory gauges and counts of restarts."""


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line."""
    lines = (folder / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_summary(folder: Path) -> dict[str, Any]:
    """The object in summary.json."""
    return json.loads((folder / "summary.json").read_text())


def used_prompts(folder: Path) -> list[tuple[int, ...]]:
    """The ids of all prompts in the ledger. Fails if the run used a prompt twice."""
    prompts = []
    for row in read_rows(folder, "ledger.jsonl"):
        prompts += [tuple(prompt) for prompt in row["prompts"]]
    assert len(prompts) == len(set(prompts)), "the run used a prompt twice"
    return prompts


def timeline_events(folder: Path) -> list[dict[str, Any]]:
    """The events of the Chrome trace. The program appends to it and never closes its list."""
    text = (folder / "timeline.json").read_text()
    return json.loads(text.rstrip().rstrip(",") + "]")


def timeline_spans(folder: Path) -> list[tuple[str, str]]:
    """The category and the name of each event that has a duration."""
    return [
        (event["cat"], event["name"]) for event in timeline_events(folder) if event["ph"] == "X"
    ]


def file_contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the run's last model, by name."""
    from safetensors.torch import load_file

    return load_file(folder / "hf_model" / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    """Two runs ended with the same model, bit for bit."""
    weights_one = model_weights(one)
    weights_other = model_weights(other)
    assert set(weights_one) == set(weights_other)
    for name, tensor in weights_one.items():
        assert torch.equal(tensor, weights_other[name]), (other.name, name)


def without_prefixes(row: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """The metrics of a row, without these prefixes and without seconds."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(prefixes) and not name.endswith("_s")
    }


def learned_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, without clocks, and then those of its evaluations.

    Which row of metrics repeats an evaluation also depends on the clock: it is the step that ends
    next. So the rows of metrics come without evaluations.
    """
    metrics = [
        without_prefixes(row, (*CLOCK_PREFIXES, "val/"))
        for row in read_rows(folder, "metrics.jsonl")
    ]
    if not (folder / "evaluations.jsonl").exists():
        return metrics
    evaluations = [
        without_prefixes(row, CLOCK_PREFIXES) for row in read_rows(folder, "evaluations.jsonl")
    ]
    return metrics + evaluations
