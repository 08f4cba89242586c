"""The weight sync's cost model against what benchmarks.weight_sync measured.

The speeds of the machine come from the first files (two: costs per byte and per tensor). From them
the arms "whole" (each worker gets whole tensors) and "sharded" of all files are predicted. On a
machine of few cores all trainer ranks share one half of them, and all vLLM workers the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.common.report import markdown_table
from benchmarks.weight_sync import cost_model
from benchmarks.weight_sync.cost_model import Machine, Model

WHOLE, SHARDED = "whole", "sharded"

Result = dict[str, Any]
"""result.json of one run."""


@dataclass(frozen=True)
class Point:
    """A measured time of some items with some bytes."""

    items: float
    size: float
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Seconds per item and per byte."""

    per_item: float
    per_byte: float


def fit_cost(points: list[Point]) -> Cost:
    """The costs of seconds = items * per_item + size * per_byte, none negative.

    It goes through the points of the smallest and the largest size.
    """
    ordered = sorted(points, key=lambda point: point.size)
    small = ordered[0]
    large = ordered[-1]
    determinant = small.items * large.size - large.items * small.size
    if not determinant:
        return Cost(0.0, large.seconds / large.size)
    per_item = (small.seconds * large.size - large.seconds * small.size) / determinant
    per_byte = (small.items * large.seconds - large.items * small.seconds) / determinant
    if per_item < 0:
        return Cost(0.0, large.seconds / large.size)
    if per_byte <= 0:
        # So little that its inverse, a speed, counts for nothing.
        return Cost(large.seconds / large.items, 1e-15)
    return Cost(per_item, per_byte)


@dataclass(frozen=True)
class Crowd:
    """How many processes share the cores of their side, 1 or more."""

    senders: float
    workers: float


def crowd_of(result: Result) -> Crowd:
    """Of one run. Each side has half of the cores."""
    flags = result["arguments"]
    cores = max(1, result.get("cores", 2) // 2)
    workers = flags["replicas"] * flags["tp"]
    return Crowd(max(1, flags["ranks"] / cores), max(1, workers / cores))


def _worker_bytes(result: Result, arm: str) -> float:
    """That the worker with most receives."""
    return result["arms"][arm].get("extra", {}).get("worker_bytes", result["bytes"])


def _buckets(result: Result) -> int:
    return math.ceil(result["bytes"] / (result["arguments"]["bucket_mb"] << 20))


def fit_machine(results: list[Result], name: str = SHARDED) -> Machine:
    """This machine's speeds, from the arm "raw" and another one of one or two runs, each of one
    rank and one worker."""
    wire, load, pack, check, fixed = [], [], [], [], []
    for result in results:
        arm = result["arms"][name]
        size = _worker_bytes(result, name)
        split, sender = arm["split"], arm["sender"]
        fixed_s = split["pause"] + split["prepare"] + split["finish"]
        raw_s = result["arms"]["raw"]["seconds"]["median"]
        wire.append(Point(_buckets(result), result["bytes"], raw_s))
        load.append(Point(result["tensors"], size, split["load"]))
        pack.append(Point(1, result["bytes"], sender["gather"] + sender["checksum"]))
        check.append(Point(1, size, split["verify"]))
        fixed.append(Point(1, result["bytes"], fixed_s))
    wire_cost = fit_cost(wire)
    load_cost = fit_cost(load)
    fixed_cost = fit_cost(fixed)
    # Between processes of one machine the memory is the link.
    memory_speed = 1 / wire_cost.per_byte
    return Machine(
        link=memory_speed,
        links=1,
        within=memory_speed,
        host=memory_speed,
        pack=1 / fit_cost(pack).per_byte,
        copy=1 / load_cost.per_byte,
        check=1 / fit_cost(check).per_byte,
        tensor_s=load_cost.per_item,
        message_s=wire_cost.per_item,
        fixed_s=fixed_cost.per_item,
        finish=1 / fixed_cost.per_byte,
    )


def predict(machine: Machine, result: Result, name: str) -> float:
    """Seconds of an arm of one run, from what it received and the machine's speeds."""
    flags = result["arguments"]
    crowd = crowd_of(result)
    worker_bytes = _worker_bytes(result, name)
    workers = flags["replicas"] * flags["tp"]
    delivered_bytes = worker_bytes * workers
    # Packed parameters: vLLM loads whole tensors, of which each worker copies its part.
    gets_whole = name == WHOLE or not flags.get("unpacked", False)
    joins = gets_whole and flags["ranks"] > 1
    share = flags["tp"] if gets_whole else 1
    stages = {
        "pack": result["bytes"] / flags["ranks"] / machine.pack * crowd.senders,
        "wire": delivered_bytes / machine.link
        + _buckets(result) * flags["ranks"] * machine.message_s,
        "load": crowd.workers
        * (
            worker_bytes / machine.check
            + worker_bytes * (1 / share + joins) / machine.copy
            + result["tensors"] * machine.tensor_s
        ),
    }
    model = Model(flags["model"], result["bytes"] / 2, result["tensors"])
    return cost_model.fixed(machine, model) + cost_model.together(stages, _buckets(result))


def check_model(results: list[Result], known: int = 2) -> str:
    """The model against measurements, as a table in Markdown.

    Args:
        results: of each run.
        known: how many of them give the speeds.
    """
    rows = []
    for name in (WHOLE, SHARDED):
        if any(name not in result["arms"] for result in results):
            continue
        machine = fit_machine(results[:known], name)
        for number, result in enumerate(results):
            flags = result["arguments"]
            measured = result["arms"][name]["seconds"]["median"]
            predicted = predict(machine, result, name)
            run = f"{flags['model']}, {flags['ranks']} + {flags['replicas']} x TP {flags['tp']}"
            run += f", {name}"
            if number < known:
                run += " (fitted)"
            ratio = predicted / measured
            rows.append([run, f"{measured:.4g}", f"{predicted:.4g}", f"{ratio:.2f}"])
    headings = ["run", "measured, s", "model, s", "model / measured"]
    return "\n".join(markdown_table(headings, rows)) + "\n"
