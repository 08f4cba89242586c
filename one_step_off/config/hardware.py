"""What this machine has: its GPUs, counted without torch, and its cores, divided among processes."""

import glob
import os
import subprocess
from collections.abc import Sequence

Parts = list[list[int]]


def plan_cores(
    rollout: int, trainers: int, cores: Sequence[int], in_turns: bool = False
) -> tuple[Parts, Parts]:
    """Cores of each of the `rollout` processes and of each of the `trainers`. The two groups work at the same time, so they share no
    core (unless there is only one). Each gets its part by its number of processes, at least one core, and divides it
    evenly; with more processes than cores they wrap. With `in_turns` each group divides all cores."""
    mine = sorted(cores)
    if in_turns or len(mine) == 1:
        return _divide(rollout, mine), _divide(trainers, mine)
    share = min(max(round(len(mine) * rollout / (rollout + trainers)), 1), len(mine) - 1)
    return _divide(rollout, mine[:share]), _divide(trainers, mine[share:])


def _divide(processes: int, cores: list[int]) -> Parts:
    if processes > len(cores):
        return [[cores[i % len(cores)]] for i in range(processes)]
    return [
        cores[i * len(cores) // processes : (i + 1) * len(cores) // processes]
        for i in range(processes)
    ]


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use, by the driver's own word and CUDA_VISIBLE_DEVICES. Imports no torch."""
    present = _gpus_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops at the first device that does not exist; names that are no numbers (UUIDs) it knows better.
    gone = (not n or n.startswith("-") or (n.isdecimal() and int(n) >= present) for n in names)
    return next((i for i, stops in enumerate(gone) if stops), len(names))


def _gpus_present() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=2.0)
    except (OSError, subprocess.TimeoutExpired):
        # Slow or absent: the device files tell too, and in a container show only the GPUs that were given to it.
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return (
        sum(line.startswith("GPU ") for line in done.stdout.splitlines())
        if done.returncode == 0
        else 0
    )
