"""A cost model of the weight sync: seconds per phase, from bytes, links and copying speeds.

    python -m benchmarks.sync_model
        estimates for GPU clusters, which are not measured
    python -m benchmarks.sync_model --check A/result.json B/...
        the model against what benchmarks.weight_sync measured

The estimates print their assumptions. `--check` takes the speeds of this machine from the first
files (two: costs per byte and per tensor) and predicts the arm "sharded" of all of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.report import markdown_table

GB = 1e9
DELTA_BYTES = 2.1
"""Bytes per changed element: about one for the gap to the element before, one for the
difference.
"""


@dataclass(frozen=True)
class Machine:
    """Speeds in bytes/s of the bytes that travel, in one direction; times in seconds.

    Attributes:
        link: one sender's way to the receivers: its network card.
        links: network cards in a receiver's node.
        within: between the devices of a node; a broadcast passes from one to the next.
        host: between a device and its host's memory.
        pack: a sender copies its rows into a bucket, casts them and computes the checksum.
        copy: a receiver copies on its own device.
        check: a receiver computes the checksum of a bucket.
        tensor_s: loading a tensor, however small.
        message_s: a sender's part of a bucket, however small.
        fixed_s: pause, preparing the layers, finishing them.
        finish: the part of finishing that depends on bytes: packing a tied head again, on CPUs.
    """

    link: float
    links: int
    within: float
    host: float
    pack: float
    copy: float
    check: float
    tensor_s: float
    message_s: float
    fixed_s: float
    finish: float = math.inf


@dataclass(frozen=True)
class Model:
    """The weights that are sent."""

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
    """Who sends, who receives, and by what method.

    Attributes:
        senders: trainer ranks.
        replicas: vLLM engines.
        tp: tensor-parallel ranks of each engine.
        bucket: bytes of a bucket.
        gather: rank 0 gathers and sends.
        at_once: senders whose parts travel at the same time; None: all of them.
        changed: share of the elements that changed, in delta mode; None: everything is sent.
        pipelined: a bucket travels while the one before it is loaded.
    """

    senders: int
    replicas: int
    tp: int
    bucket: float = 64 * 2**20
    gather: bool = False
    at_once: int | None = None
    changed: float | None = None
    pipelined: bool = True


def payload(model: Model, layout: Layout) -> float:
    """Bytes that travel to each receiver: everything, whatever its tensor-parallel share is."""
    if layout.changed is None:
        return model.size
    return min(model.size, layout.changed * model.parameters * DELTA_BYTES)


def _pack_s(machine: Machine, model: Model, layout: Layout, senders: int) -> float:
    """Seconds of the busiest sender."""
    seconds = model.size / senders / machine.pack
    if layout.gather and layout.senders > 1:
        share_of_others = 1 - 1 / layout.senders
        seconds += model.size * share_of_others / min(machine.link, machine.within)
    if layout.changed is not None:
        # What was sent last is in host memory: it is read and written.
        seconds += 2 * model.size / senders / machine.host
    return seconds


def _wire_s(machine: Machine, model: Model, layout: Layout, senders: int) -> float:
    """Seconds of the transfer.

    `at_once` parts travel at a time. Each passes its sender's card, the receivers' cards, and the
    link between the devices of a node in a chain. More replicas lengthen the chain, not the time,
    because a broadcast is pipelined.
    """
    together = min(layout.at_once or senders, senders)
    speed = min(machine.link * min(together, machine.links), machine.within)
    buckets = math.ceil(model.size / layout.bucket)
    messages = buckets * senders / together
    return payload(model, layout) / speed + messages * machine.message_s


def _load_s(machine: Machine, model: Model, layout: Layout, senders: int) -> float:
    """Seconds of each receiver: checksum, joining the rows of several senders, its own share."""
    seconds = model.size / machine.check + model.size / layout.tp / machine.copy
    seconds += model.tensors * machine.tensor_s
    if senders > 1:
        seconds += model.size / machine.copy
    if layout.changed is not None:
        # The receivers' mirror, from which everything is loaded, is in host memory.
        seconds += model.size / machine.host
    return seconds


def phases(machine: Machine, model: Model, layout: Layout) -> dict[str, float]:
    """Seconds that each stage would take alone: "pack", "wire" and "load"."""
    senders = 1 if layout.gather else layout.senders
    return {
        "pack": _pack_s(machine, model, layout, senders),
        "wire": _wire_s(machine, model, layout, senders),
        "load": _load_s(machine, model, layout, senders),
    }


def total(machine: Machine, model: Model, layout: Layout) -> float:
    """Seconds of a whole sync: the longest stage, and the first bucket's way through the others.

    Not pipelined, the receiver loads a bucket before it receives the next one. Then receiving and
    loading add up, and only packing runs in parallel.
    """
    stages = phases(machine, model, layout)
    if not layout.pipelined:
        stages = {"pack": stages["pack"], "receive": stages["wire"] + stages["load"]}
    buckets = math.ceil(model.size / layout.bucket)
    longest = max(stages.values())
    first_bucket = (sum(stages.values()) - longest) / buckets
    return machine.fixed_s + model.size / machine.finish + longest + first_bucket


def step(generate: float, train: float, sync: float, overlap: bool) -> float:
    """Seconds of a step, one step off.

    Args:
        generate: seconds of generation.
        train: seconds of training.
        sync: seconds of a weight sync.
        overlap: the trainer starts at once, and only generation waits for its weights.
    """
    if overlap:
        return max(generate + sync, train)
    return sync + max(generate, train)


# The link: 400 Gb/s, where a broadcast is assumed to reach 85 %. The others: data sheets of an
# H100, with a guess of which share of its memory speed copies and casts reach. tensor_s is the
# least known.
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
MIDDLE_CASE = "235B of 128 experts, 64+64 GPUs"
LARGE_BUCKET = 4 * 2**30
VARIANTS: dict[str, dict[str, Any]] = {
    "as configured": {},
    "rank 0 gathers": {"gather": True},
    "one sender after another, buckets of 4 GiB": {"bucket": LARGE_BUCKET, "at_once": 1},
    "delta with mirrors, 2 % changed": {"changed": 0.02},
}


def estimates(machine: Machine = H100) -> str:
    """Tables of all cases in Markdown."""
    lines = ["Estimates, not measurements. Seconds. Each stage alone, then the sync.", ""]
    for name, (model, layout) in CASES.items():
        rows = []
        for variant, changes in VARIANTS.items():
            changed_layout = replace(layout, **changes)
            stages = phases(machine, model, changed_layout)
            seconds = [*stages.values(), total(machine, model, changed_layout)]
            rows.append([variant, *(f"{value:.2f}" for value in seconds)])
        case = f"{name}, {model.size / GB:.0f} GB in bf16"
        lines += [*markdown_table([case, "pack", "wire", "load", "sync"], rows), ""]
    return "\n".join(lines)


def cards(machine: Machine = H100) -> str:
    """The sync of the middle case by the number of senders that send at the same time."""
    model, layout = CASES[MIDDLE_CASE]
    counts = (1, 2, 4, 8)
    cells = []
    for count in counts:
        changed_layout = replace(layout, bucket=LARGE_BUCKET, at_once=count)
        cells.append(f"{total(machine, model, changed_layout):.2f}")
    headings = [f"senders at once, {MIDDLE_CASE}", *map(str, counts)]
    return "\n".join(markdown_table(headings, [["sync, s", *cells]])) + "\n"


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


def fit_machine(results: list[dict[str, Any]]) -> Machine:
    """This machine's speeds, from the arms "raw" and "sharded" of one or two runs."""
    wire, load, pack, check, fixed = [], [], [], [], []
    for result in results:
        size = result["bytes"]
        sharded = result["arms"]["sharded"]
        split = sharded["split"]
        sender = sharded["sender"]
        pack_s = sender["gather"] + sender["checksum"]
        fixed_s = split["pause"] + split["prepare"] + split["finish"]
        raw_s = result["arms"]["raw"]["seconds"]["median"]
        buckets = math.ceil(size / (result["arguments"]["bucket_mb"] << 20))
        wire.append(Point(buckets, size, raw_s))
        load.append(Point(result["tensors"], size, split["load"]))
        pack.append(Point(1, size / result["arguments"]["ranks"], pack_s))
        check.append(Point(1, size, split["verify"]))
        fixed.append(Point(1, size, fixed_s))
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


def check_model(results: list[dict[str, Any]], known: int = 2) -> str:
    """The model against measurements, as a table in Markdown.

    Args:
        results: result.json of each run.
        known: how many of them give the speeds.
    """
    machine = fit_machine(results[:known])
    rows = []
    for number, result in enumerate(results):
        flags = result["arguments"]
        model = Model(flags["model"], result["bytes"] / 2, result["tensors"])
        bucket = flags["bucket_mb"] * 2**20
        layout = Layout(flags["ranks"], flags["replicas"], flags["tp"], bucket)
        measured = result["arms"]["sharded"]["seconds"]["median"]
        predicted = total(machine, model, layout)
        name = f"{flags['model']}, {flags['ranks']} + {flags['replicas']} x TP {flags['tp']}"
        if number < known:
            name += " (fitted)"
        ratio = predicted / measured
        rows.append([name, f"{measured:.4g}", f"{predicted:.4g}", f"{ratio:.2f}"])
    headings = ["run", "measured, s", "model, s", "model / measured"]
    return "\n".join(markdown_table(headings, rows)) + "\n"


def main() -> None:
    """Print the estimates or the check."""
    parser = Parser(__doc__)
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
        results = [json.loads(path.read_text()) for path in args.check]
        print(check_model(results, args.known))
    else:
        print(f"{H100}\n\n{estimates()}\n{cards()}")


if __name__ == "__main__":
    main()
