"""The files of a checkpoint beside those of the trainers. No pickles.

Samples and batches: numpy arrays for what every token has, JSON lines for the rest. The state of
the pipeline: `state.json`, and `stream.npz` where the data position has arrays with one number per
prompt.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config.errors import as_config_error
from one_step_off.config.plain_values import plain_value
from one_step_off.data.samples import TRAINER_FIELDS, Batch, Sample

ARRAY_TYPES = {
    "prompt_ids": "i4",
    "response_ids": "i4",
    "log_probs": "f4",
    "loss_mask": "?",
    "versions": "i4",
}
"""The fields of a `Sample` that are arrays, with their numpy type in the file."""

EXPERT_FIELDS = ("prompt_experts", "response_experts")
"""Arrays that only some samples have."""

JSON_FIELDS = tuple(
    field.name for field in fields(Sample) if field.name not in (*ARRAY_TYPES, *EXPERT_FIELDS)
)

FILE_NAMES = {"attempt": "incarnation"}
"""Field of a `Sample` -> its name in files, where that is another one: the field was renamed."""


def write_samples(samples: list[Sample], folder: Path) -> None:
    """Write `samples.npz` (all samples' arrays, one after the other, and their lengths) and
    `samples.jsonl`."""
    arrays = {}
    for name, dtype in ARRAY_TYPES.items():
        arrays[name] = np.concatenate([getattr(s, name) for s in samples]).astype(dtype)
    arrays["prompt_lengths"] = np.array([len(s.prompt_ids) for s in samples])
    arrays["response_lengths"] = np.array([len(s.response_ids) for s in samples])
    arrays |= _expert_arrays(samples)
    np.savez(folder / "samples.npz", **arrays)
    lines = [json.dumps(_row(sample)) + "\n" for sample in samples]
    (folder / "samples.jsonl").write_text("".join(lines))


def _expert_arrays(samples: list[Sample]) -> dict[str, np.ndarray]:
    """The experts of the samples that have them, one after the other. Each array of a prompt is
    there once: `experts_of` has its number for each sample, -1 for one without experts."""
    owners = [sample for sample in samples if sample.response_experts is not None]
    if not owners:
        return {}
    of_prompts = {id(sample.prompt_experts): sample.prompt_experts for sample in owners}
    numbers = {key: number for number, key in enumerate(of_prompts)}
    return {
        "experts_of": np.array([numbers.get(id(sample.prompt_experts), -1) for sample in samples]),
        "prompt_expert_lengths": np.array([len(array) for array in of_prompts.values()]),
        "prompt_experts": np.concatenate(list(of_prompts.values())),
        "response_experts": np.concatenate([sample.response_experts for sample in owners]),
    }


def _read_experts(arrays: Any, rows: list[dict[str, Any]]) -> None:
    """Put what `_expert_arrays` made into the rows of the samples that had experts."""
    if "experts_of" not in arrays:
        return
    prompt_ends = np.cumsum(arrays["prompt_expert_lengths"])
    of_prompts = np.split(arrays["prompt_experts"], prompt_ends[:-1])
    owners = arrays["experts_of"] >= 0
    response_ends = np.cumsum(arrays["response_lengths"][owners] - 1)
    of_responses = iter(np.split(arrays["response_experts"], response_ends[:-1]))
    for row, number in zip(rows, arrays["experts_of"].tolist(), strict=True):
        if number >= 0:
            row["prompt_experts"] = of_prompts[number]
            row["response_experts"] = next(of_responses)


def _row(sample: Sample) -> dict[str, Any]:
    return {FILE_NAMES.get(name, name): getattr(sample, name) for name in JSON_FIELDS}


def check_samples(samples: list[Sample]) -> None:
    """Check that files can hold these samples as they are. Raises UnstorableValue: names the first
    field that has no type of JSON."""
    for sample in samples:
        plain_value(_row(sample), f"sample {sample.index} of prompt {sample.prompt_id}")


def read_samples(folder: Path) -> list[Sample]:
    """The samples that `write_samples` wrote, equal bit for bit."""
    lines = (folder / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
        prompt_ends = np.cumsum(arrays["prompt_lengths"])
        response_ends = np.cumsum(arrays["response_lengths"])
        for name in ARRAY_TYPES:
            ends = prompt_ends if name == "prompt_ids" else response_ends
            parts = np.split(arrays[name], ends[:-1])
            for row, part in zip(rows, parts, strict=True):
                row[name] = part
        _read_experts(arrays, rows)
    for row in rows:
        row["prompt_id"] = tuple(row["prompt_id"])
        for field, name in FILE_NAMES.items():
            row[field] = row.pop(name)
    return [Sample(**row) for row in rows]


def write_batch(batch: Batch, folder: Path) -> None:
    """Write what an update takes: the samples, and in `batch.npz` the columns (one number per
    response token), the stamp (step, attempt, version, age limit), and the newest version of
    each earlier attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(batch.samples, folder)
    columns = {}
    for name in TRAINER_FIELDS:
        values = getattr(batch, name)
        if values is not None:
            columns[name] = np.concatenate(values)
    stamp = (batch.step, *batch.expected_stamp, batch.max_version_lag)
    past = np.array(list(batch.past.items()), np.int64).reshape(-1, 2)
    np.savez(folder / "batch.npz", stamp=stamp, past=past, **columns)


def read_batch(folder: Path) -> Batch:
    """What `write_batch` wrote, equal bit for bit.

    Raises:
        ConfigError: there is no batch, or its files are broken.
    """
    fix = "name a folder such as OUTPUT_DIR/skipped/step_000012"
    # Broken bytes raise errors of any kind.
    with as_config_error(f"--replay {folder}: no batch", fix):
        samples = read_samples(folder)
        arrays = dict(np.load(folder / "batch.npz", allow_pickle=False))
        step, *expected, older = arrays.pop("stamp").tolist()
        past = dict(arrays.pop("past", np.zeros((0, 2), np.int64)).tolist())
        ends = np.cumsum([len(s.response_ids) for s in samples])
        columns = {name: np.split(array, ends[:-1]) for name, array in arrays.items()}
        return Batch(step, samples, tuple(expected), older, past, **columns)


STATE_FILE = "state.json"
ARRAYS_FILE = "stream.npz"


def without_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """The part of the state that `state.json` holds."""
    position = {name: value for name, value in state["stream"].items() if name != "arrays"}
    return state | {"stream": position}


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write the state; the arrays of `state["stream"]["arrays"]` go into a file of their own."""
    arrays = state["stream"].get("arrays")
    if arrays is not None:
        np.savez(folder / ARRAYS_FILE, **arrays)
    text = json.dumps(without_arrays(state), indent=2)
    (folder / STATE_FILE).write_text(text + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote into a checkpoint that has been verified."""
    state = json.loads((folder / STATE_FILE).read_text())
    if (folder / ARRAYS_FILE).is_file():
        with np.load(folder / ARRAYS_FILE, allow_pickle=False) as arrays:
            state["stream"]["arrays"] = dict(arrays)
    return state
