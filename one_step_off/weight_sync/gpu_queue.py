"""What the weight sync asks of a GPU: a CUDA stream, marks in it, and the waits of the host.

A wait of the host takes about a millisecond where another process uses the GPU too. So the phases
of a sync are timed by marks that are read at its end, and the host waits for one mark per bucket:
before another process, or the network, may touch the bucket.
"""

from contextlib import AbstractContextManager

import torch

Mark = torch.cuda.Event


class GpuQueue:
    """A CUDA stream of the sync. What is queued on the compute stream must not hold up the sync,
    nor the other way round."""

    def __init__(self, device: torch.device) -> None:
        """`device`: a GPU."""
        self.device = device
        self.cuda_stream = torch.cuda.Stream(device)

    def use(self) -> AbstractContextManager:
        """Inside, this thread launches its work here."""
        return torch.cuda.stream(self.cuda_stream)

    def mark(self) -> Mark:
        """A mark behind all that this thread has launched in its current stream."""
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self.device))
        return mark

    def wait(self, mark: Mark) -> None:
        """Block the host until the GPU has reached a mark."""
        mark.synchronize()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks that the GPU has reached."""
        return begin.elapsed_time(end) / 1e3


def device_bytes(device: torch.device) -> int:
    """All memory of a GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def open_queue(device: torch.device) -> GpuQueue | None:
    """A queue on this device; None: it is a CPU, which has none."""
    return GpuQueue(device) if device.type == "cuda" else None
