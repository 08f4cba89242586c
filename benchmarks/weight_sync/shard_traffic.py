"""What travels when each worker of a large model receives what it keeps, from the program's own
plan and routes.

The first layers are planned, with few and with some more of them; all the others are like those in
between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.common.large_models import LargeModel, fsdp_pieces, kept_by_worker
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.routes import Routes, ShardsOfReceivers

PLANNED_BYTES = 30e9
"""Of the layers in between: buckets begin at other places in each layer, and this evens it out."""


@dataclass(frozen=True)
class ShardTraffic:
    """Of one sync, to one replica; others receive the same from the same broadcasts.

    Attributes:
        worker_bytes: to the worker that keeps most.
        worker_cells: blocks that this worker writes.
        worker_messages: that it receives.
        sender_bytes: from the busiest sender.
        sender_cells: blocks that it cuts.
        wire_s: seconds until the last message has arrived.
    """

    worker_bytes: float
    worker_cells: float
    worker_messages: float
    sender_bytes: float
    sender_cells: float
    wire_s: float


@cache
def routes_of(
    model: LargeModel, senders: int, workers: int, expert_parallel: bool, bucket: int
) -> Routes:
    """The routes from FSDP senders to one replica."""
    plan = BucketPlan.build(fsdp_pieces(model.shapes(), senders), bucket)
    kept = [kept_by_worker(model, worker, workers, expert_parallel) for worker in range(workers)]
    return Routes.of_shard_blocks(plan, ShardsOfReceivers.by_kind(kept))


def schedule_s(routes: Routes, link: float, message_s: float) -> float:
    """Seconds until the last message has arrived, if each begins as soon as its sender and its
    receivers have finished all before it, by turns.

    Args:
        routes: of all messages.
        link: bytes/s from one sender to one set of receivers.
        message_s: of a message, however small.
    """
    sender_free = [0.0] * routes.senders
    receiver_free = [0.0] * len(routes.sets[0])
    for messages in routes.messages:
        for message in sorted(messages, key=lambda m: routes.turn(m.sender, m.receivers)):
            members = routes.sets[message.receivers]
            begin = max(sender_free[message.sender], *(receiver_free[r] for r in members))
            end = begin + message_s + message.nbytes / link
            sender_free[message.sender] = end
            for receiver in members:
                receiver_free[receiver] = end
    return max(receiver_free)


def _traffic(routes: Routes, link: float, message_s: float) -> ShardTraffic:
    worker_bytes = [0] * len(routes.sets[0])
    worker_cells = worker_bytes.copy()
    worker_messages = worker_bytes.copy()
    sender_bytes = [0] * routes.senders
    sender_cells = sender_bytes.copy()
    for messages in routes.messages:
        for message in messages:
            sender_bytes[message.sender] += message.nbytes
            sender_cells[message.sender] += len(message.shards)
            for receiver in routes.sets[message.receivers]:
                worker_bytes[receiver] += message.nbytes
                worker_cells[receiver] += len(message.shards)
                worker_messages[receiver] += 1
    return ShardTraffic(
        max(worker_bytes),
        max(worker_cells),
        max(worker_messages),
        max(sender_bytes),
        max(sender_cells),
        schedule_s(routes, link, message_s),
    )


@cache
def traffic_of(
    model: LargeModel,
    senders: int,
    workers: int,
    expert_parallel: bool,
    bucket: float,
    link: float,
    message_s: float,
) -> ShardTraffic:
    """The traffic of the whole model. The arguments are those of `routes_of` and `schedule_s`."""
    few_layers = model.dense_layers + 1 if model.experts else 1
    more_layers = few_layers + math.ceil(PLANNED_BYTES / _bytes_of_last_layer(model))
    more_layers = min(more_layers, model.layers)
    sizes = []
    for layers in (few_layers, more_layers):
        part = replace(model, layers=layers)
        routes = routes_of(part, senders, workers, expert_parallel, int(bucket))
        sizes.append(vars(_traffic(routes, link, message_s)))
    few, more = sizes
    steps = (model.layers - few_layers) / (more_layers - few_layers)
    return ShardTraffic(**{name: few[name] + steps * (more[name] - few[name]) for name in few})


def _bytes_of_last_layer(model: LargeModel) -> int:
    """In bf16."""
    prefix = f"model.layers.{model.layers - 1}."
    shapes = model.shapes()
    return 2 * sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))
