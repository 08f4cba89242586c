"""A cost model of the weight sync: seconds per phase, from bytes, links and copying speeds.

    python -m benchmarks.sync_model
        estimates for GPU clusters, which are not measured
    python -m benchmarks.sync_model --check A/result.json B/...
        the model against what benchmarks.weight_sync measured (model_check.py)
    python -m benchmarks.sync_model --all-send
        estimates where every trainer rank sends its own rows (weight_sync.max_senders=0)
    python -m benchmarks.sync_model --cells
        what a block that a worker keeps costs in Python on this machine

The estimates print their assumptions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from benchmarks.common.large_models import KIMI_K2, QWEN3_235B, QWEN25_32B, LargeModel
from benchmarks.common.report import markdown_table
from benchmarks.weight_sync import cell_costs
from benchmarks.weight_sync.shard_traffic import traffic_of

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
        collect: a leader takes its members' pieces from sockets.
        cell_s: writing a block that a worker keeps, however small.
        cut_s: a sender cuts such a block out of its part.
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
    collect: float = math.inf
    cell_s: float = 0.0
    cut_s: float = 0.0


@dataclass(frozen=True)
class Model:
    """The weights that are sent. `large`: its layers, for what workers keep."""

    name: str
    parameters: float
    tensors: int
    bytes_each: float = 2.0
    large: LargeModel | None = None

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
        at_once: senders whose parts travel at the same time; None: all of them.
        changed: share of the elements that changed, in delta mode; None: everything is sent.
        pipelined: a bucket travels while the one before it is loaded.
        max_senders: so many ranks lead the others and send; None: every rank sends.
        kept: each worker receives what it keeps, and writes it into its parameters.
        expert_parallel: a worker keeps whole experts.
        planned: what is kept travels as the program plans it; otherwise no receiver ever waits
            while it misses something, which is a lower bound.
    """

    senders: int
    replicas: int
    tp: int
    bucket: float = 64 * 2**20
    at_once: int | None = None
    changed: float | None = None
    pipelined: bool = True
    max_senders: int | None = None
    kept: bool = False
    expert_parallel: bool = False
    planned: bool = True

    @property
    def sending(self) -> int:
        """How many ranks send."""
        return min(self.senders, self.max_senders or self.senders)


def payload(model: Model, layout: Layout) -> float:
    """Bytes that travel to each receiver: everything, whatever its tensor-parallel share is."""
    if layout.changed is None:
        return model.size
    return min(model.size, layout.changed * model.parameters * DELTA_BYTES)


def _pack_s(machine: Machine, model: Model, layout: Layout, senders: int) -> float:
    """Seconds of the busiest sender."""
    seconds = model.size / senders / machine.pack
    share_of_members = 1 - senders / layout.senders
    seconds += model.size * share_of_members / senders / machine.collect
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


def _kept_phases(machine: Machine, model: Model, layout: Layout) -> dict[str, float]:
    """As `phases`, if workers receive what they keep.

    For a lower bound, what is kept is planned for 8 senders at most. With more of them a worker
    gets as many bytes, in more messages and smaller blocks.
    """
    senders = layout.sending
    planned_senders = senders if layout.planned else min(senders, PRODUCT_SENDERS)
    ratio = senders / planned_senders
    assert model.large is not None
    traffic = traffic_of(
        model.large,
        planned_senders,
        layout.tp,
        layout.expert_parallel,
        layout.bucket,
        machine.link * 2 / model.bytes_each,
        machine.message_s,
    )
    scale = model.bytes_each / 2
    worker_bytes = traffic.worker_bytes * scale
    worker_cells = traffic.worker_cells * ratio
    wire_s = traffic.wire_s
    if not layout.planned:
        wire_s = worker_bytes / machine.link + traffic.worker_messages * ratio * machine.message_s
    cut_s = traffic.sender_bytes * scale / ratio / machine.copy
    return {
        "pack": _pack_s(machine, model, layout, senders)
        + cut_s
        + traffic.sender_cells * machine.cut_s,
        "wire": wire_s,
        "load": worker_bytes / machine.check
        + worker_bytes / machine.copy
        + worker_cells * machine.cell_s,
    }


def phases(machine: Machine, model: Model, layout: Layout) -> dict[str, float]:
    """Seconds that each stage would take alone: "pack", "wire" and "load"."""
    if layout.kept:
        return _kept_phases(machine, model, layout)
    senders = layout.sending
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
    return fixed(machine, model) + together(stages, math.ceil(model.size / layout.bucket))


def fixed(machine: Machine, model: Model) -> float:
    """Seconds in which nothing travels."""
    return machine.fixed_s + model.size / machine.finish


def together(stages: dict[str, float], buckets: int) -> float:
    """Seconds of stages that are busy at the same time."""
    longest = max(stages.values())
    return longest + (sum(stages.values()) - longest) / buckets


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
# H100, with a guess of which share of its memory speed copies and casts reach. collect: measured
# on CPUs over the loopback (docs/measured/scaling.md). cell_s: the launch of a copy where a fused
# one is not possible. cut_s: Python around such a launch, as --cells measures it. tensor_s and
# message_s are the least known.
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
    collect=2.5 * GB,
    cell_s=1e-5,
    cut_s=2e-5,
)
PRODUCT_SENDERS = 8
"""The default of weight_sync.max_senders."""
MIDDLE_CASE = "235B of 128 experts, 64+64 GPUs"
CASES = {
    "32B, 16+16 GPUs": (Model("32B", 32.8e9, 771, large=QWEN25_32B), Layout(16, 2, 8)),
    MIDDLE_CASE: (
        Model("235B", 235e9, 36_900, large=QWEN3_235B),
        Layout(64, 8, 8, expert_parallel=True),
    ),
    "1T of 384 experts, 256+256 GPUs": (
        Model("1T", 1.03e12, 71_000, large=KIMI_K2),
        Layout(256, 16, 16, expert_parallel=True),
    ),
}
LARGE_BUCKET = 4 * 2**30
WHOLE: dict[str, Any] = {"max_senders": PRODUCT_SENDERS, "at_once": 1}
KEPT: dict[str, Any] = {"max_senders": PRODUCT_SENDERS, "kept": True}
EACH: dict[str, Any] = {"kept": True, "planned": False, "bucket": LARGE_BUCKET}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole tensors": WHOLE,
    "whole tensors, buckets of 4 GiB": WHOLE | {"bucket": LARGE_BUCKET},
    "whole tensors, delta with mirrors, 2 % changed": WHOLE | {"changed": 0.02},
    "shard-exact": KEPT,
    "shard-exact, buckets of 4 GiB": KEPT | {"bucket": LARGE_BUCKET},
}
OUTLOOK: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "leaders collect over NVLink": ({"collect": 0.8 * 450 * GB}, KEPT, 2),
    "the same, buckets of 4 GiB": (
        {"collect": 0.8 * 450 * GB},
        KEPT | {"bucket": LARGE_BUCKET},
        2,
    ),
    "each trainer GPU sends, no receiver ever waits, 4 GiB": ({}, EACH, 2),
    "the same, blocks written and cut by fused kernels": ({"cell_s": 0.0, "cut_s": 0.0}, EACH, 2),
    "the same in FP8": ({"cell_s": 0.0, "cut_s": 0.0}, EACH, 1),
}
"""What is not built: changes of the machine and of the layout, and bytes per parameter."""


def _row(name: str, machine: Machine, model: Model, layout: Layout) -> list[str]:
    stages = phases(machine, model, layout)
    seconds = [*stages.values(), total(machine, model, layout)]
    return [name, *(f"{value:.2f}" for value in seconds)]


def estimates(machine: Machine = H100) -> str:
    """Tables of all cases in Markdown."""
    lines = ["Estimates, not measurements. Seconds. Each stage alone, then the sync.", ""]
    for name, (model, layout) in CASES.items():
        rows = []
        for variant, changes in VARIANTS.items():
            rows.append(_row(variant, machine, model, replace(layout, **changes)))
        for variant, (speeds, changes, bytes_each) in OUTLOOK.items():
            other_machine = replace(machine, **speeds)
            other_model = replace(model, bytes_each=bytes_each)
            row = _row(variant, other_machine, other_model, replace(layout, **changes))
            rows.append([f"*{row[0]}*", *row[1:]])
        case = f"{name}, {model.size / GB:.0f} GB in bf16"
        lines += [*markdown_table([case, "pack", "wire", "load", "sync"], rows), ""]
    return "\n".join(lines)


def by_senders(machine: Machine = H100) -> str:
    """The sync of the middle case by the number of senders: leaders collect less, and workers have
    more communicators."""
    model, layout = CASES[MIDDLE_CASE]
    counts = (8, 16, 32, 64)
    cells = []
    for count in counts:
        changed_layout = replace(layout, **(EACH | {"max_senders": count}))
        cells.append(f"{total(machine, model, changed_layout):.2f}")
    headings = [f"senders, {MIDDLE_CASE}", *map(str, counts)]
    return "\n".join(markdown_table(headings, [["sync, s", *cells]])) + "\n"


def all_ranks_send(cases: Sequence[str] = tuple(CASES), machine: Machine = H100) -> str:
    """The sync where every rank sends its own rows (weight_sync.max_senders=0), from the program's
    own plan of all these senders. The largest case takes a minute for each size of buckets."""
    rows = []
    for case in cases:
        model, layout = CASES[case]
        for mib in (64, 512, 4096):
            all_send = replace(layout, kept=True, bucket=mib * 2**20)
            rows.append(_row(f"{case}, buckets of {mib} MiB", machine, model, all_send))
    return "\n".join(markdown_table(["every rank sends", "pack", "wire", "load", "sync"], rows))


def main() -> None:
    """Print the estimates, the check or the costs per block."""
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
    parser.add_argument(
        "--cells", action="store_true", help="measure what a block that a worker keeps costs here"
    )
    parser.add_argument(
        "--all-send", action="store_true", help="estimates where every rank sends; takes minutes"
    )
    args = parser.parse_args()
    if args.check:
        from benchmarks.weight_sync.model_check import check_model

        results = [json.loads(path.read_text()) for path in args.check]
        print(check_model(results, args.known))
    elif args.cells:
        print(cell_costs.table())
    elif args.all_send:
        print(all_ranks_send())
    else:
        print(f"{H100}\n\n{estimates()}\n{by_senders()}")


if __name__ == "__main__":
    main()
