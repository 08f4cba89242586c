"""Which CUDA streams wait for one another although nothing orders them: hardware queues are few.

On one stream a kernel spins, and a second one waits behind it. Then a short kernel goes to each
other stream. Where it ends only after the spinning one, both streams share a queue. The weight
sync's broadcasts spin in the same way until all receivers have come.
"""

import os
import time

import torch

from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures

STREAMS = 16
SPIN_S = 0.05
"""About: the clock rises while the GPU warms up. Far longer than a launch takes."""

CALIBRATION_CYCLES = 10_000_000
ELEMENTS = 256


def streams(context: Context) -> Figures:
    """A matrix: row = the stream that spins, column = the stream of the short kernel, "X" = it
    waited."""
    torch.cuda.set_device(0)
    cycles = _cycles_of(SPIN_S)
    all_streams = [torch.cuda.default_stream()]
    all_streams += [torch.cuda.Stream() for _ in range(STREAMS - 1)]
    data = torch.zeros(ELEMENTS, device="cuda")
    for stream in all_streams:  # the first launch on a stream is slow
        _short_kernel(stream, data)
    torch.cuda.synchronize()
    for kernels_behind in (0, 1):
        own = _waits(all_streams[1], all_streams[1], cycles, data, kernels_behind)
        _require_seen(own)
    alone = [_waiters(all_streams, spinning, cycles, data, 0) for spinning in all_streams]
    behind = [_waiters(all_streams, spinning, cycles, data, 1) for spinning in all_streams]
    return _figures(alone, behind)


def _require_seen(waited: bool) -> None:
    """A kernel behind the spinning one on the same stream waits for certain. Raises CheckFailed:
    this was not seen, so a matrix would say nothing."""
    if not waited:
        raise CheckFailed("a wait on one and the same stream was not seen; this check is blind")


def _figures(alone: list[str], behind: list[str]) -> Figures:
    """Raises CheckFailed: everything waits."""
    figures: Figures = {
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
        "waiting pairs, one kernel spins": _count(alone),
        "waiting pairs, a second one behind it": _count(behind),
        "matrix, one kernel spins": alone,
        "matrix, a second one behind it": behind,
    }
    if _count(alone) == len(alone) * (len(alone) - 1):
        raise CheckFailed("every stream waits for every other: nothing can overlap", figures)
    return figures


def _cycles_of(seconds: float) -> int:
    """Cycles of `torch.cuda._sleep` that take so long here."""
    torch.cuda._sleep(CALIBRATION_CYCLES)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    torch.cuda.synchronize()
    return int(CALIBRATION_CYCLES * seconds / (time.perf_counter() - begin))


def _short_kernel(stream: torch.cuda.Stream, data: torch.Tensor) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        data.add_(0)
        event = torch.cuda.Event()
        event.record(stream)
    return event


def _waiters(
    all_streams: list[torch.cuda.Stream],
    spinning: torch.cuda.Stream,
    cycles: int,
    data: torch.Tensor,
    kernels_behind: int,
) -> str:
    """One row of the matrix."""
    row = ""
    for stream in all_streams:
        if stream is spinning:
            row += "-"
        else:
            row += "X" if _waits(spinning, stream, cycles, data, kernels_behind) else "."
    return row


def _waits(
    spinning: torch.cuda.Stream,
    stream: torch.cuda.Stream,
    cycles: int,
    data: torch.Tensor,
    kernels_behind: int,
) -> bool:
    """Whether a short kernel on `stream` ends only after one that spins. By an event behind the
    spinning one and not by a clock: the GPU's own changes while it warms up."""
    torch.cuda.synchronize()
    spun = torch.cuda.Event()
    with torch.cuda.stream(spinning):
        torch.cuda._sleep(cycles)
        spun.record(spinning)
    for _ in range(kernels_behind):
        _short_kernel(spinning, data)
    event = _short_kernel(stream, data)
    event.synchronize()
    waited = spun.query()
    torch.cuda.synchronize()
    return waited


def _count(rows: list[str]) -> int:
    return sum(row.count("X") for row in rows)
