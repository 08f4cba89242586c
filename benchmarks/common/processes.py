"""Memory of other processes, from /proc."""

from __future__ import annotations

from pathlib import Path


def memory(pid: int, field: str) -> int:
    """VmRSS or VmHWM (the peak since `forget_peak`), bytes. Raises RuntimeError: the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError as e:
        raise RuntimeError(
            f"process {pid} has ended; Ray ends the largest where memory runs out"
        ) from e
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak(pid: int) -> None:
    """VmHWM begins anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
