"""What the weight sync costs at many trainer ranks, simulated in one process: planning, bytes
through the driver, messages and communicators.

    python -m benchmarks.scale --out DIR [--ranks 8 64 512 4096] [--max-senders 8] [--bucket-mb 64]
        [--layers 28] [--large-layers 94]

The driver's part, the grouping and the plans are the program's own, over the pieces of a model of
Qwen2.5-7B's shape under FSDP. Ranks, replicas and the transports between them are stand-ins that
count: the size of each pickled argument and answer, and from the plans what would travel in a full
sync. Two arms: "before" each rank is a sender and every call carries the pieces of all ranks by
value; "after" --max-senders ranks send, and the calls carry references. There are as many vLLM
workers as ranks, in replicas of 8 (at least one).

A second table compares whole tensors with the blocks that each worker keeps (TP 8): for that model,
and for one of Qwen3-235B-A22B's shape with expert parallelism or without it, from 8 senders to 8
replicas. Writes result.json and result.md into DIR.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.common.command_line import Parser
from benchmarks.common.large_models import (
    QWEN3_235B,
    QWEN25_7B,
    LargeModel,
    fsdp_pieces,
    kept_by_worker,
)
from benchmarks.common.machine import machine, machine_line
from benchmarks.common.report import markdown_table, write_results
from one_step_off.config.schema import Config
from one_step_off.weight_sync import coordinator
from one_step_off.weight_sync.bucket_plan import BucketPlan, Pieces
from one_step_off.weight_sync.routes import Routes, ShardsOfReceivers
from one_step_off.weight_sync.sender_groups import (
    SenderGroup,
    form_groups,
    message_bytes,
    shards_of_rank,
)
from one_step_off.weight_sync.trainer_sender import SenderAddress

WORKERS_PER_REPLICA = 8
REFERENCE_BYTES = 200
"""Assumed, for a reference into Ray's object store inside a call."""

Figures = dict[str, Any]


class Actor(SimpleNamespace):
    """Stands in for an actor handle, which can be the key of a dict."""

    __hash__ = object.__hash__


class DriverTraffic:
    """Counts what passes through the driver: pickled arguments, answers, and stored objects."""

    def __init__(self, stores: bool) -> None:
        """`stores`: large objects go into the object store once, else by value into each call."""
        self.stores = stores
        self.calls = 0
        self.sent_bytes = 0
        self.stored_bytes = 0
        self.received_bytes = 0
        self.sizes: dict[int, tuple[Any, int]] = {}  # by id; the object stays, and so its id

    def store(self, value: Any) -> Any:
        """Stands in for `store_once`."""
        if not self.stores:
            return value
        self.stored_bytes += self.size(value)
        return SimpleNamespace(reference_to=value)

    def size(self, value: Any) -> int:
        """Bytes of a pickled object; each object is pickled once."""
        if isinstance(value, SimpleNamespace):
            return REFERENCE_BYTES
        if id(value) not in self.sizes:
            self.sizes[id(value)] = (value, len(pickle.dumps(value)))
        return self.sizes[id(value)][1]

    def actor(self, answers: dict[str, Any]) -> Any:
        """An actor whose methods give these answers."""
        methods = {}
        for name, answer in answers.items():
            methods[name] = SimpleNamespace(remote=self._method(answer))
        return Actor(**methods)

    def _method(self, answer: Any) -> Callable:
        async def remote(*args: Any) -> Any:
            self.calls += 1
            self.sent_bytes += sum(map(self.size, args))
            self.received_bytes += self.size(answer)
            return answer

        return remote


NOT_LEARNED = [{"kept": None, "reason": "stand-ins have no model"}]


def connect(pieces: Pieces, cfg: Config, traffic: DriverTraffic) -> float:
    """The driver's `connect` and the first groups, with stand-ins. Returns its seconds."""
    address = SenderAddress(("10.0.0.1", 40000), ("10.0.0.1", 40001, "0" * 32))
    ranks = []
    for owned in pieces:
        answers = {"weight_plan": owned, "open_sender": address}
        ranks.append(traffic.actor(answers | {"connect_sync": None, "join_leader": None}))
    replica_count = max(1, len(pieces) // WORKERS_PER_REPLICA)
    replicas = [
        traffic.actor({"connect_sync": None, "learn_shards": NOT_LEARNED})
        for _ in range(replica_count)
    ]
    actor: Any = SimpleNamespace(ranks=ranks, cfg=cfg)
    rollout: Any = SimpleNamespace(replicas=replicas, cfg=cfg)
    no_shared_devices: list[list[int]] = [[] for _ in ranks]
    canary = [np.arange(8, dtype=np.int32)]
    sync = coordinator.WeightSync(actor, rollout, canary, "10.0.0.1", no_shared_devices)

    async def run() -> None:
        await sync.connect()
        await sync._regroup(list(range(replica_count)))

    begin = time.perf_counter()
    with mock.patch.object(coordinator, "store_once", traffic.store):
        asyncio.run(run())
    return time.perf_counter() - begin


def timed(function: Callable, *args: Any) -> tuple[Any, float]:
    """The result of a call, and its seconds."""
    begin = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - begin


def sync_figures(plan: BucketPlan, groups: list[SenderGroup], pieces: Pieces) -> Figures:
    """What a full sync moves, and how long the first group plans."""
    parts_of_sender = np.array([bucket.part_bytes for bucket in plan.buckets]).T
    messages = (parts_of_sender > 0).sum(axis=1)
    first = groups[0]
    leader_sections, leader_s = timed(
        lambda: [shards_of_rank(plan, 0, pieces[rank]) for rank in first.ranks]
    )
    _, member_s = timed(shards_of_rank, plan, 0, pieces[first.ranks[-1]])
    own_bytes = [sum(map(message_bytes, sections)) for sections in leader_sections]
    from_members = [sum(map(bool, sections)) for sections in leader_sections[1:]]
    has_members = bool(first.members)
    return {
        "buckets": len(plan.buckets),
        "communicators of a receiver": len(groups),
        "links of a sender to members": max(len(group.members) for group in groups),
        "messages to a receiver": int(messages.sum()) + 2 * len(groups),
        "bytes to a receiver": plan.total_bytes,
        "messages from a sender": int(messages.max()) + 2,
        "bytes from a sender": int(parts_of_sender.sum(axis=1).max()),
        "messages to a sender": sum(from_members),
        "bytes to a sender": sum(own_bytes[1:]),
        "messages from a member": max(from_members, default=0),
        "bytes from a member": max(own_bytes[1:], default=0),
        "send buffers, bytes": 2 * int(parts_of_sender.max()),
        "leader plans, s": leader_s if has_members else 0.0,
        "member plans, s": member_s if has_members else 0.0,
    }


def measure(ranks: int, layers: int, max_senders: int, bucket_mb: int, stores: bool) -> Figures:
    """One arm at one number of ranks."""
    pieces = fsdp_pieces(replace(QWEN25_7B, layers=layers).shapes(), ranks)
    cfg = Config()
    cfg.weight_sync.max_senders = max_senders
    cfg.weight_sync.bucket_mb = bucket_mb
    cfg.rollout.tensor_parallel_size = WORKERS_PER_REPLICA
    traffic = DriverTraffic(stores)
    connect_s = connect(pieces, cfg, traffic)
    groups = form_groups(pieces, max_senders)
    pieces_of_sender = [group.pieces for group in groups]
    plan, plan_s = timed(BucketPlan.build, pieces_of_sender, bucket_mb << 20)
    return {
        "driver connects, s": connect_s,
        "each process plans, s": plan_s,
        "calls of the driver": traffic.calls,
        "bytes in calls": traffic.sent_bytes,
        "bytes into the object store": traffic.stored_bytes,
        "bytes of answers": traffic.received_bytes,
        **sync_figures(plan, groups, pieces),
    }


def _largest(counts: dict[int, int]) -> int:
    return max(counts.values(), default=0)


def routes_figures(plan: BucketPlan, routes: Routes) -> Figures:
    """What these routes move in a full sync: at the receiver and the sender with most."""
    to_receiver: dict[int, int] = dict.fromkeys(routes.sets[0], 0)
    from_sender: dict[int, int] = dict.fromkeys(range(plan.senders), 0)
    messages_to, messages_from = to_receiver.copy(), from_sender.copy()
    cut_bytes = 0
    for messages in routes.messages:
        cut: dict[int, int] = dict.fromkeys(from_sender, 0)
        for message in messages:
            from_sender[message.sender] += message.nbytes
            messages_from[message.sender] += 1
            cut[message.sender] += 0 if message.is_whole_part else message.nbytes
            for receiver in routes.sets[message.receivers]:
                to_receiver[receiver] += message.nbytes
                messages_to[receiver] += 1
        cut_bytes = max(cut_bytes, _largest(cut))
    streams = routes.streams_of_receiver(0)
    return {
        "communicators of a receiver": len(streams),
        "communicators of a sender": len(routes.sets_of_sender(0)),
        "sets of receivers": len(routes.sets),
        "messages to a receiver": _largest(messages_to),
        "bytes to a receiver": _largest(to_receiver),
        "messages from a sender": _largest(messages_from),
        "bytes from a sender": _largest(from_sender),
        "cut buffers of a sender, bytes": 2 * cut_bytes,
    }


def measure_kept(
    model: LargeModel, replicas: int, expert_parallel: bool, senders: int, bucket_mb: int
) -> dict[str, Figures]:
    """Whole tensors, and the blocks that each worker keeps."""
    plan = BucketPlan.build(fsdp_pieces(model.shapes(), senders), bucket_mb << 20)
    of_replica = [
        kept_by_worker(model, worker, WORKERS_PER_REPLICA, expert_parallel)
        for worker in range(WORKERS_PER_REPLICA)
    ]
    # Copies: the driver gets an answer of its own from each worker.
    kept_of_receiver = [dict(kept) for _ in range(replicas) for kept in of_replica]
    begin = time.process_time()
    kept = ShardsOfReceivers.by_kind(kept_of_receiver)
    compared = time.process_time()
    routes = Routes.of_shard_blocks(plan, kept)
    routed = time.process_time()
    routes.messages_of_receiver(0)
    routes.messages_of_sender(0)
    sorted_s = time.process_time() - routed
    whole = Routes(plan, len(kept_of_receiver))
    # With whole tensors a receiver and a sender need one message for each part of a bucket.
    figures = {"whole": routes_figures(plan, whole), "kept": routes_figures(plan, routes)}
    figures["whole"] |= {"driver compares, CPU s": 0.0, "each process routes, CPU s": 0.0}
    figures["kept"] |= {
        "driver compares, CPU s": compared - begin,
        "each process routes, CPU s": routed - compared + sorted_s,
    }
    return figures


def kept_cases(args: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Both ways, per model and number of workers."""
    cases = {}
    settings = (args.max_senders, args.bucket_mb)
    small = replace(QWEN25_7B, layers=args.layers)
    for ranks in args.ranks:
        replicas = max(1, ranks // WORKERS_PER_REPLICA)
        name = f"7B, {replicas * WORKERS_PER_REPLICA:,} workers"
        cases[name] = measure_kept(small, replicas, False, *settings)
    large = replace(QWEN3_235B, layers=args.large_layers)
    for name, expert_parallel in (("TP 8", False), ("TP 8, EP 8", True)):
        cases[f"235B, 64 workers, {name}"] = measure_kept(large, 8, expert_parallel, *settings)
    return cases


def _format(name: str, value: float) -> str:
    if name.endswith(" s"):
        return f"{value:.3g}"
    if "bytes" not in name:
        return f"{value:,}"
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value} B"


def table(result: Figures) -> str:
    """The table in Markdown: per figure and number of ranks "before → after"."""
    counts = list(result["ranks"])
    rows = []
    for name in result["ranks"][counts[0]]["after"]:
        cells = []
        for arms in result["ranks"].values():
            before = _format(name, arms["before"][name])
            after = _format(name, arms["after"][name])
            cells.append(before if before == after else f"{before} → {after}")
        rows.append([name, *cells])
    headings = ["", *(f"{int(count):,} ranks" for count in counts)]
    lines = [*markdown_table(headings, rows), "", *_kept_table(result["kept"])]
    return "\n".join([*lines, "", machine_line(result["machine"]), ""])


def _kept_table(cases: dict[str, dict[str, Figures]]) -> list[str]:
    """Per figure and case "whole → kept"."""
    rows = []
    for name in next(iter(cases.values()))["kept"]:
        cells = []
        for figures in cases.values():
            whole, kept = (_format(name, figures[way][name]) for way in ("whole", "kept"))
            cells.append(whole if whole == kept else f"{whole} → {kept}")
        rows.append([name, *cells])
    return markdown_table(["", *cases], rows)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--max-senders", type=int, default=8)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--layers", type=int, default=28, help="of the smaller model")
    parser.add_argument("--large-layers", type=int, default=94, help="of the larger one")
    args = parser.parse_args(argv)
    numbers = (args.max_senders, args.bucket_mb, args.layers, args.large_layers)
    if min(*args.ranks, *numbers) < 1:
        parser.error("all numbers must be at least 1")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure both arms at each number of ranks and write the results."""
    args = arguments(argv)
    result: Figures = {"machine": machine(), "ranks": {}}
    for ranks in args.ranks:
        size = (ranks, args.layers)
        before = measure(*size, max_senders=ranks, bucket_mb=args.bucket_mb, stores=False)
        after = measure(*size, args.max_senders, args.bucket_mb, stores=True)
        result["ranks"][str(ranks)] = {"before": before, "after": after}
    result["kept"] = kept_cases(args)
    args.out.mkdir(parents=True, exist_ok=True)
    markdown = table(result)
    write_results(args.out, result, markdown)
    print(markdown)


if __name__ == "__main__":
    main()
