"""Memory of other processes, from /proc, and processes that measure another checkout of this
repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common.paths import ROOT


def memory(pid: int, field: str) -> int:
    """Memory of a process in bytes.

    Args:
        pid: the process.
        field: "VmRSS" (resident now) or "VmHWM" (the peak since `reset_peak_memory`).

    Raises:
        RuntimeError: the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError as e:
        raise RuntimeError(
            f"process {pid} has ended; Ray ends the largest process when memory runs out"
        ) from e
    for line in lines:
        if line.startswith(f"{field}:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}: the process is ending")


def reset_peak_memory(pid: int) -> None:
    """Set the peak (VmHWM) of a process to what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def run_in_checkout(module: str, arguments: list[str], checkout: Path) -> str:
    """Run a module of this benchmark against the product of another checkout.

    A link puts this checkout's `benchmarks` before the other checkout's on the module search path,
    so that both products are measured by the same code.

    Args:
        module: as `benchmarks.overhead`.
        arguments: its command line.
        checkout: the repository whose one_step_off is imported.

    Returns:
        The last line that the module printed.

    Raises:
        RuntimeError: the exit code is not 0. The message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "benchmarks").symlink_to(ROOT / "benchmarks")
        search_path = os.pathsep.join([folder, str(checkout)])
        environment = os.environ | {"PYTHONPATH": search_path}
        command = [sys.executable, "-P", "-m", module, *arguments]
        done = subprocess.run(
            command, env=environment, cwd=checkout, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"{module} with {checkout}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]
