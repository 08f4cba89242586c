"""A cost model of the weight sync: seconds per phase, from bytes, links and copying speeds.

    python -m benchmarks.sync_model                                estimates for GPU clusters that nobody measured
    python -m benchmarks.sync_model --check A/result.json B/...    the model against what benchmarks.weight_sync measured

The estimates print their assumptions. `--check` takes the speeds of this machine from the first files (two: costs per
byte and per tensor) and predicts the arm "sharded" of all of them.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Speeds in bytes/s of the bytes that travel, one direction; times in seconds."""

    link: float  # one sender's way to the receivers: its network card
    links: int  # of such cards in a receiver's node
    within: float  # between the devices of a node; a broadcast passes from one to the next
    host: float  # between a device and its host's memory
    pack: float  # a sender copies its rows into a bucket, cast and summed up
    copy: float  # a receiver copies on its own device
    check: float  # a receiver sums up a bucket
    tensor_s: float  # what loading a tensor takes, however small
    message_s: float  # what a sender's part of a bucket takes, however small
    fixed_s: float  # pause, preparing the layers, finishing them
    finish: float = math.inf  # what of finishing goes by bytes: packing a tied head again, on CPUs


@dataclass(frozen=True)
class Model:
    """What is to be sent."""

    name: str
    parameters: float
    tensors: int
    bytes_each: float = 2.0

    @property
    def size(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.bytes_each


@dataclass(frozen=True)
class Layout:
    """Who sends, who receives, and how."""

    senders: int
    replicas: int
    tp: int
    bucket: float = 64 * 2**20  # bytes
    gather: bool = False  # rank 0 gathers and sends
    at_once: int | None = (
        None  # senders whose parts are on their way at the same time; None: all of them
    )
    changed: float | None = None  # share of the elements, in delta mode
    pipelined: bool = True  # a bucket travels while the one before it is loaded


# An element that changed: about a byte for the gap to the one before and a byte for the difference.
DELTA_BYTES = 2.1


def payload(model: Model, layout: Layout) -> float:
    """Bytes that travel to each receiver: everything, whatever its tensor-parallel share is."""
    if layout.changed is None:
        return model.size
    return min(model.size, layout.changed * model.parameters * DELTA_BYTES)


def phases(machine: Machine, model: Model, layout: Layout) -> dict[str, float]:
    """Seconds that each stage is busy, were it alone: pack (the busiest sender), wire, load (each receiver).

    wire: `at_once` parts at a time; each passes its sender's card, the receivers' cards and, through a node's devices in
    a chain, the link between them. More replicas lengthen the chain, not the time: a broadcast is pipelined. load:
    checksum, joining the rows of several senders, then the receiver's own share.
    """
    size, travels = model.size, payload(model, layout)
    senders = 1 if layout.gather else layout.senders
    together = min(layout.at_once or senders, senders)
    pack = size / senders / machine.pack
    if layout.gather and layout.senders > 1:
        pack += size * (1 - 1 / layout.senders) / min(machine.link, machine.within)
    buckets = math.ceil(size / layout.bucket)
    wire = travels / min(machine.link * min(together, machine.links), machine.within)
    wire += buckets * senders / together * machine.message_s
    load = size / machine.check + size / layout.tp / machine.copy + model.tensors * machine.tensor_s
    if senders > 1:
        load += size / machine.copy
    if layout.changed is not None:
        pack += (
            2 * size / senders / machine.host
        )  # what was sent last is in host memory: read and written
        load += (
            size / machine.host
        )  # and so is the receivers' mirror, out of which everything is loaded
    return {"pack": pack, "wire": wire, "load": load}


def total(machine: Machine, model: Model, layout: Layout) -> float:
    """Seconds of a whole sync: the longest stage, and the first bucket's way through the others. Not pipelined (the
    receiver loads and then receives on): what is received and loaded adds up, and only packing goes on beside it."""
    each = phases(machine, model, layout)
    if not layout.pipelined:
        each = {"pack": each["pack"], "receive": each["wire"] + each["load"]}
    n = math.ceil(model.size / layout.bucket)
    longest = max(each.values())
    return (
        machine.fixed_s + model.size / machine.finish + longest + (sum(each.values()) - longest) / n
    )


def step(generate: float, train: float, sync: float, overlap: bool) -> float:
    """Seconds of a step, one step off. Overlapped, the trainer starts at once: only generation waits for its weights."""
    return max(generate + sync, train) if overlap else sync + max(generate, train)


# The link: 400 Gb/s with what a broadcast is taken to get of it. The others: data sheets of an H100 with a guess of
# what copies and casts get of its memory. tensor_s is the least known of all.
H100 = Machine(
    link=0.85 * 50 * GB,
    links=8,
    within=0.8 * 450 * GB,
    host=40 * GB,
    pack=300 * GB,
    copy=1000 * GB,
    check=1000 * GB,
    tensor_s=1e-4,
    message_s=3e-5,
    fixed_s=0.1,
)
CASES = {
    "32B, 16+16 GPUs": (Model("32B", 32.8e9, 771), Layout(16, 2, 8)),
    "235B of 128 experts, 64+64 GPUs": (Model("235B", 235e9, 36_900), Layout(64, 8, 8)),
    "1T of 384 experts, 256+256 GPUs": (Model("1T", 1.03e12, 71_000), Layout(256, 16, 16)),
}
LARGE = 4 * 2**30
VARIANTS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "rank 0 gathers": {"gather": True},
    "one sender after another, buckets of 4 GiB": {"bucket": LARGE, "at_once": 1},
    "delta with mirrors, 2 % changed": {"changed": 0.02},
}


def estimates(machine: Machine = H100) -> str:
    """Tables in Markdown."""
    lines = ["Estimates, not measurements. Seconds. Each stage alone, then the sync.", ""]
    for name, (model, layout) in CASES.items():
        lines += [
            f"| {name}, {model.size / GB:.0f} GB in bf16 | pack | wire | load | sync |",
            "| --- |" + " --- |" * 4,
        ]
        for variant, keys in VARIANTS.items():
            how = replace(layout, **keys)
            cells = [*phases(machine, model, how).values(), total(machine, model, how)]
            lines.append(
                f"| {variant} | " + " | ".join(f"{seconds:.2f}" for seconds in cells) + " |"
            )
        lines.append("")
    return "\n".join(lines)


def cards(machine: Machine = H100) -> str:
    """The sync of the middle case by the number of senders that may be under way at once."""
    name, (model, layout) = list(CASES.items())[1]
    counts = (1, 2, 4, 8)
    lines = [
        f"| senders at once, {name} | " + " | ".join(map(str, counts)) + " |",
        "| --- |" + " --- |" * 4,
    ]
    seconds = (total(machine, model, replace(layout, bucket=LARGE, at_once=n)) for n in counts)
    return (
        "\n".join([*lines, "| sync, s | " + " | ".join(f"{s:.2f}" for s in seconds) + " |"]) + "\n"
    )


def _two(points: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Costs (per item, per byte), none negative, of seconds = items * a + bytes * b, through the two extreme points."""
    points = sorted(points, key=lambda point: point[1])
    (i, x, s), (j, y, t) = points[0], points[-1]
    determinant = i * y - j * x
    a, b = (
        ((s * y - t * x) / determinant, (i * t - j * s) / determinant)
        if determinant
        else (0.0, t / y)
    )
    if a < 0:
        return 0.0, t / y
    return (a, b) if b > 0 else (t / j, 1e-15)  # so little that its inverse counts for nothing


def fitted(results: list[dict[str, Any]]) -> Machine:
    """This machine's speeds, from the arms "raw" and "sharded" of one or two runs."""
    splits = [(r, r["arms"]["sharded"]["split"]) for r in results]
    messages, per_byte = _two(
        [(_messages(r), r["bytes"], r["arms"]["raw"]["seconds"]["median"]) for r in results]
    )
    tensor_s, load = _two([(r["tensors"], r["bytes"], split["load"]) for r, split in splits])
    _, pack = _two([(1, r["bytes"] / r["arguments"]["ranks"], _packing(r)) for r in results])
    _, check = _two([(1, r["bytes"], split["verify"]) for r, split in splits])
    fixed, finish = _two(
        [
            (1, r["bytes"], sum(split[k] for k in ("pause", "prepare", "finish")))
            for r, split in splits
        ]
    )
    speed = 1 / per_byte
    return Machine(
        speed, 1, speed, speed, 1 / pack, 1 / load, 1 / check, tensor_s, messages, fixed, 1 / finish
    )


def _packing(result: dict[str, Any]) -> float:
    sender = result["arms"]["sharded"]["sender"]
    return sender["gather"] + sender["checksum"]


def _messages(result: dict[str, Any]) -> float:
    return math.ceil(result["bytes"] / (result["arguments"]["bucket_mb"] << 20))


def checked(results: list[dict[str, Any]], known: int = 2) -> str:
    """The model against measurements, as a table in Markdown; the first `known` give the speeds."""
    machine = fitted(results[:known])
    lines = ["| run | measured, s | model, s | model / measured |", "| --- |" + " --- |" * 3]
    for i, r in enumerate(results):
        how = r["arguments"]
        model = Model(how["model"], r["bytes"] / 2, r["tensors"])
        # Between processes of one machine the memory is the link, however many use it.
        layout = Layout(how["ranks"], how["replicas"], how["tp"], how["bucket_mb"] * 2**20)
        took, said = r["arms"]["sharded"]["seconds"]["median"], total(machine, model, layout)
        name = f"{how['model']}, {how['ranks']} + {how['replicas']} x TP {how['tp']}" + (
            " (fitted)" if i < known else ""
        )
        lines.append(f"| {name} | {took:.4g} | {said:.4g} | {said / took:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check",
        nargs="+",
        type=Path,
        metavar="RESULT",
        help="result.json of benchmarks.weight_sync",
    )
    parser.add_argument(
        "--known", type=int, choices=(1, 2), default=2, help="how many of them give the speeds"
    )
    args = parser.parse_args()
    if args.check:
        print(checked([json.loads(path.read_text()) for path in args.check], args.known))
    else:
        print(f"{H100}\n\n{estimates()}\n{cards()}")


if __name__ == "__main__":
    main()
