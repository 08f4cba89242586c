"""Devices: what torch sees, whether they compute and reach one another, and which CUDA streams wait
for one another although nothing orders them, because hardware queues are few.
"""

import os
import time

import torch

from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures

SIZE = 512
"""Rows of the matrices that are multiplied."""

TOLERANCE = 1e-2
"""Of the product's entries, which have a standard deviation of 1; GPUs may multiply in TF32."""


STREAMS = 16
SPIN_S = 0.05
"""About: the clock rises while the GPU warms up. Far longer than a launch takes."""

CALIBRATION_CYCLES = 10_000_000
ELEMENTS = 256


def devices(context: Context) -> Figures:
    """Multiply matrices on each device, and compare with the CPU."""
    figures: Figures = {"torch": torch.__version__}
    if not context.is_cuda:
        _check_product(torch.device("cpu"))
        return figures | {"threads": torch.get_num_threads()}
    if not torch.cuda.is_available():
        raise CheckFailed(f"torch {torch.__version__} sees no GPU; nvidia-smi sees {context.gpus}")
    count = torch.cuda.device_count()
    figures |= {
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": count,
    }
    for index in range(count):
        _check_product(torch.device("cuda", index))
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        figures[f"gpu {index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
    for index in range(count):
        reached = [
            str(peer)
            for peer in range(count)
            if peer != index and torch.cuda.can_device_access_peer(index, peer)
        ]
        figures[f"peers of gpu {index}"] = " ".join(reached) or "none"
    return figures


def _check_product(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(SIZE, SIZE, generator=generator)
    right = torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5
    product = (left.to(device) @ right.to(device)).cpu()
    error = (product - (left.double() @ right.double()).float()).abs().max().item()
    if not error <= TOLERANCE:
        raise CheckFailed(f"{device}: a matrix product is wrong by {error:.3g}")


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
