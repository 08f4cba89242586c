"""What this machine has: its GPUs, counted without torch, and its cores, divided among processes;
and whether its NCCL takes two ranks on one GPU.

It imports nothing but the standard library: shell/setup.sh uses it before anything is installed.
"""

import contextlib
import glob
import importlib.metadata
import os
import subprocess
from collections.abc import Sequence

NVIDIA_SMI_TIMEOUT_S = 2.0

RANKS_SHARE_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
"""The environment variable with which NCCL takes two ranks on one GPU."""

SHARING_NCCL = (2, 30)
"""The first NCCL that knows that variable."""

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")

CoresPerProcess = list[list[int]]
"""The core numbers of each process."""


def divide_cores(
    rollout_processes: int,
    trainer_processes: int,
    cores: Sequence[int],
    groups_share_cores: bool = False,
) -> tuple[CoresPerProcess, CoresPerProcess]:
    """The cores of each rollout process and of each trainer process.

    The two groups work at the same time, so they share no core, unless there is only one core or
    `groups_share_cores` is set. Each group gets a part in proportion to its number of processes,
    but at least one core, and divides it evenly. With more processes than cores, processes share
    cores.
    """
    cores = sorted(cores)
    if groups_share_cores or len(cores) == 1:
        return divide_evenly(rollout_processes, cores), divide_evenly(trainer_processes, cores)
    processes = rollout_processes + trainer_processes
    proportional = round(len(cores) * rollout_processes / processes)
    rollout_cores = min(max(proportional, 1), len(cores) - 1)
    return (
        divide_evenly(rollout_processes, cores[:rollout_cores]),
        divide_evenly(trainer_processes, cores[rollout_cores:]),
    )


def divide_evenly(processes: int, cores: list[int]) -> CoresPerProcess:
    """The cores of each process, as equal as possible; processes share cores where there are too
    few."""
    if processes > len(cores):
        return [[cores[i % len(cores)]] for i in range(processes)]
    parts = []
    for i in range(processes):
        begin = i * len(cores) // processes
        end = (i + 1) * len(cores) // processes
        parts.append(cores[begin:end])
    return parts


def count_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use, according to the driver and
    CUDA_VISIBLE_DEVICES.
    """
    present = _count_present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    for index, name in enumerate(names):
        if _ends_visible_list(name, present):
            return index
    return len(names)


def _ends_visible_list(name: str, present: int) -> bool:
    """Whether CUDA ignores this entry of CUDA_VISIBLE_DEVICES and all after it: the device does not
    exist.

    Names that are not numbers (UUIDs) count as existing.
    """
    if not name or name.startswith("-"):
        return True
    return name.isdecimal() and int(name) >= present


def _count_present_gpus() -> int:
    try:
        result = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        # nvidia-smi is slow or absent. The device files tell too; a container sees only its own
        # GPUs.
        return len(glob.glob("/dev/nvidia[0-9]*"))
    if result.returncode != 0:
        return 0
    return sum(line.startswith("GPU ") for line in result.stdout.splitlines())


def ranks_may_share_gpu() -> bool:
    """Whether two ranks may be on one GPU: NCCL is new enough, and the environment asks for it."""
    return os.environ.get(RANKS_SHARE_GPU) == "1" and nccl_version() >= SHARING_NCCL


def nccl_version() -> tuple[int, ...]:
    """Major and minor number of the installed NCCL; (): there is none."""
    for package in NCCL_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            major, minor, *_ = importlib.metadata.version(package).split(".")
            return int(major), int(minor)
    return ()
