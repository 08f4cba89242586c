"""Where the repository is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def config_path(name: str) -> str:
    """The path of a file in config/, valid in any working directory."""
    return str(ROOT / "config" / name)
