"""Checks that hang, crash or fail are reported as such, and the others run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from one_step_off.tools.gpu_check.runner import Runner
from one_step_off.tools.gpu_check.table import CHECKS

ROOT = Path(__file__).parents[4]
COMMAND = (sys.executable, "-m", "tests.unit.tools.gpu_check.command")
TIMEOUT_S = 60


@dataclass
class Finished:
    """A finished command: its result, its folder, and the results by name."""

    done: subprocess.CompletedProcess
    folder: Path

    @property
    def results(self) -> dict[str, dict]:
        data = json.loads((self.folder / "gpu_report.json").read_text())
        return {result["name"]: result for result in data["results"]}


def run(folder: Path, *arguments: str) -> Finished:
    done = subprocess.run(
        [*COMMAND, "--device", "cpu", "--out", str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Finished(done, folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("works", "PASS", ""),
        ("hangs", "FAIL", "hung or too slow: no end within 2 s; killed"),
        ("crashes", "FAIL", "crashed: its process ended by SIGABRT"),
        ("ends", "FAIL", "crashed: its process ended with code 3 and without an answer"),
        ("raises", "FAIL", "ValueError: first line second line"),
        ("fails", "FAIL", "the subject is wrong"),
        ("skips", "SKIP", "not here"),
        ("missing", "FAIL", "has no attribute 'nothing'"),
        ("needs_gpu", "SKIP", "needs CUDA: a reason"),
        ("needs_package", "SKIP", "no_such_package_anywhere is not installed"),
        ("needs_cores", "SKIP", "needs 10000 CPU cores"),
        ("works_again", "PASS", ""),
    ],
)
def test_each_end_of_a_check(finished: Finished, name: str, status: str, reason: str) -> None:
    result = finished.results[name]
    assert result["status"] == status and reason in result["reason"], result
    (line,) = [
        line for line in finished.done.stdout.splitlines() if line.startswith(f"{status} {name} ")
    ]
    assert reason in line


def test_a_failure_gives_exit_code_1(finished: Finished) -> None:
    assert finished.done.returncode == 1, finished.done.stderr
    assert "2 PASS, 6 FAIL, 4 SKIP" in finished.done.stdout


def test_what_a_hanging_check_has_left_is_killed(finished: Finished) -> None:
    orphan = int((finished.folder / "work/hangs/orphan").read_text())
    assert not psutil.pid_exists(orphan)


def test_the_log_says_where_a_check_hangs(finished: Finished) -> None:
    assert "in hangs" in finished.results["hangs"]["log"]


def test_the_report_has_figures_reasons_and_the_output_of_failures(finished: Finished) -> None:
    page = (finished.folder / "gpu_report.md").read_text()
    for text in (
        "| works | what works shows | PASS |",
        "- answer: 42",
        "a|b",
        "- measured: 7",
        "### crashes: crashed: its process ended by SIGABRT",
        "Fatal Python error: Aborted",
        "ValueError: first line",
        "torch 2.",
        "python: 3.",
    ):
        assert text in page, text


def test_all_passing_gives_exit_code_0(tmp_path: Path) -> None:
    finished = run(tmp_path, "--only", "works", "skips")
    assert finished.done.returncode == 0, finished.done.stderr
    assert list(finished.results) == ["works", "skips"]


def test_the_time_of_all_checks_is_bounded(tmp_path: Path) -> None:
    begin = time.monotonic()
    finished = run(tmp_path, "--only", "hangs", "works_again", "--budget-s", "1.2")
    assert time.monotonic() - begin < TIMEOUT_S / 2
    for name, reason in (
        ("hangs", "no time left: cut off after 1 s; run it alone: --only hangs"),
        ("works_again", "no time left; run it alone: --only works_again"),
    ):
        result = finished.results[name]
        assert (result["status"], result["reason"]) == ("SKIP", reason)
    told = "0 PASS, 0 FAIL, 2 SKIP (2 not run: no time left)"
    assert told in finished.done.stdout
    assert told in (finished.folder / "gpu_report.md").read_text()


def test_the_title_is_true_on_the_device() -> None:
    for check in CHECKS:
        assert check.on("cuda") is check
        on_cpu = check.on("cpu").title
        assert check.cuda_only or not any(word in on_cpu for word in ("five", "7B", "in-place"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "wroks"], "--only=wroks: no such check; did you mean works"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--model", "/nowhere"], "--model=/nowhere: has no config.json"),
        (["--out", "/dev/null/x"], "--out=/dev/null/x: Not a directory"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = run(tmp_path, *arguments).done
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_cuda_without_gpus_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cuda").done
    if done.returncode == 2:
        assert "--device=cuda: this machine has no visible GPU" in done.stderr


def test_on_four_cores_every_check_with_a_cpu_form_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("one_step_off.config.packages.is_installed", lambda package: True)
    on_cpus = replace(runner(tmp_path, "cpu", 0), cores=4)
    skipped = {check.name for check in CHECKS if on_cpus.why_not(check)}
    assert skipped == {check.name for check in CHECKS if check.cuda_only}


def runner(folder: Path, device: str, gpus: int) -> Runner:
    return Runner(device, gpus, 2, folder, "", time.monotonic() + 60)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_what_runs_depends_on_the_number_of_gpus(
    tmp_path: Path, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("one_step_off.config.packages.is_installed", lambda package: True)
    monkeypatch.setattr("one_step_off.tools.gpu_check.runner.nccl_version", lambda: (2, 29))
    on_gpus = runner(tmp_path, "cuda", gpus)
    running = {check.name for check in CHECKS if not on_gpus.why_not(check)}
    assert {"devices", "weights_same_device", "streams", "engine_sleep", "run_colocated"} <= running
    assert ("groups" in running) == (gpus >= 2)
    assert ("run_disaggregated" in running) == (gpus >= 2)
    assert ("run_hsdp" in running) == (gpus >= 4)


SHARING = {check.name: check for check in CHECKS if check.ranks_may_share}


@pytest.mark.parametrize("name", ["groups", "dead_peer", "weights_network", "run_disaggregated"])
@pytest.mark.parametrize(
    ("nccl", "found"), [((), "none"), ((2, 29), "2.29"), ((2, 30), ""), ((3, 0), "")]
)
def test_two_ranks_share_one_gpu_where_nccl_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nccl: tuple[int, ...], found: str
) -> None:
    monkeypatch.setattr("one_step_off.tools.gpu_check.runner.nccl_version", lambda: nccl)
    monkeypatch.setattr("one_step_off.config.packages.is_installed", lambda package: True)
    reason = runner(tmp_path, "cuda", 1).why_not(SHARING[name])
    if found:
        assert reason == (
            "needs 2 GPUs, 1 found; or NCCL 2.30, whose ranks may share one: " + f"{found} found"
        )
    else:
        assert reason == ""
    assert runner(tmp_path, "cuda", 2).why_not(SHARING[name]) == ""


def test_the_page_has_every_check() -> None:
    page = (ROOT / "docs/tutorials/first_hour_on_gpus.md").read_text()
    assert [check.name for check in CHECKS if f"`{check.name}`" not in page] == []


def test_every_check_has_a_function() -> None:
    """By its file alone, since an import would take vLLM."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    for check in CHECKS:
        module, _, function = check.function.partition(":")
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"\ndef {function}(context: Context) -> Figures:" in source, check.name


def test_each_check_begins_without_the_packages_that_it_does_not_name() -> None:
    """A machine without Ray and vLLM still runs the checks that need neither."""
    modules = sorted({check.function.partition(":")[0] for check in CHECKS})
    missing = ("ray", "vllm", "datasets", "omegaconf", "peft", "transformers")
    script = f"import sys\nfor name in {missing}: sys.modules[name] = None\n"
    script += "import one_step_off.tools.gpu_check.command\n"
    script += "".join(f"import {module}\n" for module in modules)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
