"""Helpers of tests that start several ranks: how they meet, and the workers of both back ends."""

import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from tests.unit.training.fsdp_helpers import free_port


def join(worker, name, folder):
    """Set a worker up at a port that rank 0 chooses now, in the file `name`.port.

    A port chosen at the start may be another program's by the time it is used.
    """
    file = Path(folder) / f"{name}.port"
    if worker.rank == 0:
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(str(free_port()))
        unfinished.rename(file)
    while not file.exists():
        time.sleep(0.02)
    worker.setup("127.0.0.1", int(file.read_text()))


def weights_of(worker) -> list[np.ndarray]:
    """Copies of what this rank would send."""
    return [tensor.float().clone().numpy() for tensor in worker.weight_tensors()]


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics that are the same in every run: without seconds."""
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


# Functions, so that ranks import a back end only where they use it.


def of_fsdp():
    """The FSDP back end's workers."""
    from one_step_off.training.fsdp.fsdp_workers import WORKERS

    return WORKERS


def of_megatron():
    """The Megatron back end's workers."""
    from one_step_off.training.megatron.megatron_workers import WORKERS

    return WORKERS


def leave(workers) -> None:
    """Leave the process groups, so that the next worker can form them. `workers`: `of_fsdp` or
    `of_megatron`."""
    if workers is of_megatron:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
