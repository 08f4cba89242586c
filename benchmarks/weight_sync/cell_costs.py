"""What Python and torch cost per block that a worker keeps, on CPUs: blocks so small that their
bytes take no time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.common.large_models import QWEN3_235B
from benchmarks.common.report import markdown_table
from benchmarks.weight_sync.shard_traffic import routes_of
from one_step_off.engines.vllm.shard_layout import BoundCells
from one_step_off.weight_sync.in_place_writer import InPlaceWriter
from one_step_off.weight_sync.routes import Message
from one_step_off.weight_sync.shard_blocks import Block

SENDERS = 2
WORKERS = 8
REPEATS = 5
TINY_EXPERTS = replace(QWEN3_235B, layers=2, vocabulary=64, hidden=16, attention=(), expert_mlp=16)


class PlainLayout:
    """Parameters that each hold one block."""

    def __init__(self) -> None:
        self.kept: dict = {}

    def addresses(self) -> tuple[int, ...]:
        """Nothing moves."""
        return ()

    def bind(self, cells: list[tuple[str, Block, torch.Tensor]]) -> BoundCells:
        """A parameter for each block."""
        views = [view for _, _, view in cells]
        return BoundCells(views, [torch.zeros_like(view) for view in views])


def _best_s(function: Callable[[], None]) -> float:
    """CPU seconds of the fastest of some calls; other processes do not count."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.process_time()
        function()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def measure() -> dict[str, float]:
    """Microseconds per block: "cut" by a sender, "bind" once per buffer, and "write"."""
    routes = routes_of(TINY_EXPERTS, SENDERS, WORKERS, True, 1 << 20)
    messages: list[list[Message]] = routes.messages_of_receiver(0)
    buffers = [[torch.zeros(m.nbytes, dtype=torch.uint8) for m in ms] for ms in messages]
    cells = sum(len(message.shards) for ms in messages for message in ms)
    part = torch.zeros(1 << 20, dtype=torch.uint8)
    model = InPlaceWriter(messages, PlainLayout(), torch.device("cpu"))

    cuts = []

    def bind_cuts() -> None:
        cuts.clear()
        for ms, own in zip(messages, buffers, strict=True):
            for message, buffer in zip(ms, own, strict=True):
                cuts.append(message.bind_cut(part, buffer))

    def cut() -> None:
        for copies in cuts:
            copies.write()

    def bind() -> None:
        model.bound.clear()
        for index, own in enumerate(buffers):
            model._bind(index, own)

    def write() -> None:
        for index, own in enumerate(buffers):
            model.write(index, own)

    steps = {"bind a cut, once": bind_cuts, "cut": cut, "bind, once": bind, "write": write}
    return {name: _best_s(step) / cells * 1e6 for name, step in steps.items()}


def table() -> str:
    """The costs in Markdown."""
    costs = measure()
    cells = [f"{value:.1f}" for value in costs.values()]
    return "\n".join(markdown_table(["CPU microseconds per block", *costs], [["", *cells]])) + "\n"
