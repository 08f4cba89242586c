"""Whole runs with real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import tiny_config
from tests.unit.monitoring.test_profile_and_prometheus import dashboard_names
from tests.unit.training.fsdp_helpers import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def half_letters(response: str, **_: object) -> float:
    """A reward that random models do not all get alike, so that advantages are not zero."""
    return float(sum(c.isalpha() for c in response) / max(1, len(response)))


def in_parts(response: str, **_: object) -> dict[str, float]:
    """A reward in two parts that random models vary in."""
    return {"even": float(len(response) % 2 == 0), "short": -0.01 * len(response)}


IN_PARTS = f"{__name__}:in_parts"
VARIED = {
    "reward.function": "tests.e2e.test_pipeline:half_letters",
    "trainer.val_before_train": True,
}


@pytest.mark.parametrize(
    ("kind", "tied", "temperature", "estimator"),
    [
        pytest.param("qwen2", True, 1.0, "optimal_token_baseline", marks=pytest.mark.slow),
        ("qwen3", True, 0.7, "gdpo"),
        pytest.param("llama", False, 0.7, "grpo", marks=pytest.mark.slow),
        pytest.param("llama", True, 1.0, "grpo", marks=pytest.mark.slow),
    ],
)
def test_synchronous_ratio_is_one(models, tmp_path, kind, tied, temperature, estimator):
    """With fresh samples and one mini-batch theta is mu, so the engine's log-probs must equal the
    trainer's. Two of the estimators need more than a reward per sample: squared probabilities, and
    rewards in parts."""
    from one_step_off.runtime import launch

    cfg = tiny_config(
        models(kind, tied),
        str(tmp_path),
        **VARIED | ({"reward.function": IN_PARTS} if estimator == "gdpo" else {}),
        **{"pipeline.staleness": 0, "rollout.temperature": temperature, "trainer.total_steps": 2},
        **{"algorithm.adv_estimator": estimator},
    )
    assert launch.run(cfg) == 0
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [row["weight_version"] for row in metrics] == [0, 1]
    for row in metrics:
        assert row["staleness/min"] == row["staleness/max"] == 0
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio/max"] == pytest.approx(1.0, abs=2e-4)
        assert row["actor/grad_norm"] > 0
        assert row["canary/logprob_diff_max"] < 1e-4
    assert len({s["advantage/mean"] for s in rows(tmp_path, "samples/step_000001.jsonl")}) > 4


def evaluate_only(model: str, folder: Path) -> None:
    """An evaluation alone, with another set and sampling of its own, in the folder of a run of 4
    steps."""
    from one_step_off.runtime import launch

    only = tiny_config(
        model,
        str(folder),
        **VARIED,
        **{
            "trainer.val_only": True,
            "data.val_sets": {"other": "generator:products"},
            "data.val_size": 4,
            "data.max_prompt_length": 512,
            "rollout.val_n": 4,
            "rollout.val_temperature": 1.0,
            "rollout.val_top_p": 0.9,
            "rollout.val_max_response_length": 24,
        },
    )
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert launch.run(only) == 0
    assert {path: path.read_bytes() for path in before} == before, (
        "an evaluation alone touches nothing of the run"
    )
    assert json.loads((folder / "val_only" / "summary.json").read_text())["steps"] == 0
    (last,) = rows(folder / "val_only", "evaluations.jsonl")
    assert last["val/version"] == 0
    assert last["val/samples"] == last["val/other/samples"] == 16
    assert last["val/pass@1"] <= last["val/pass@4"]
    assert last["val/other/response_length"] <= 24


@contextlib.contextmanager
def listeners() -> Iterator[dict[str, set[str]]]:
    """At which addresses this process and all below it listen meanwhile, and who."""
    found: dict[str, set[str]] = {}
    over = threading.Event()
    me = psutil.Process()
    before = {
        c.laddr for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN
    }  # inherited ones, say

    def look() -> None:
        while not over.wait(0.5):
            for process in [me, *me.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    for c in process.net_connections("inet"):
                        if c.status == psutil.CONN_LISTEN and c.laddr not in before:
                            found.setdefault(c.laddr.ip, set()).add(
                                " ".join(process.cmdline())[:80]
                            )

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def assert_watched(folder: Path) -> None:
    """The report, the timeline, torch's profile of step 2; the dashboard asks for nothing that a
    run does not have."""
    data = re.search(
        r'<script type="application/json" id="data">(.*?)</script>',
        (folder / "report.html").read_text(),
    )
    found = json.loads(data[1])
    assert found["columns"]["step"] == [0, 1, 2, 3]
    assert found["ended"] == ""
    assert len(found["evaluations"]) == 3
    assert found["summary"] == [json.loads((folder / "summary.json").read_text())]
    assert found["samples"][0]["response"]
    events = json.loads((folder / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    assert len(events) == len(found["events"])
    assert not found["cut"]
    works = {(e["cat"], e["name"]) for e in events if e["ph"] == "X"}
    names = "rollout 0/generate 3, rollout 0 evaluation/evaluate 2, sync/weights 3, actor/update 3, sync rollout 0/load 2"
    names += ", sync trainer 0/wire 2, evaluation/evaluate 4"
    assert {tuple(name.split("/")) for name in names.split(", ")} <= works
    (profile,) = (folder / "profile").iterdir()
    assert profile.name == "actor_rank_0.json.gz"
    assert json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    known = {
        name
        for row in rows(folder, "metrics.jsonl") + rows(folder, "evaluations.jsonl")
        for name in row
    }
    assert dashboard_names() <= {"one_step_off_" + re.sub(r"\W", "_", name) for name in known}


def assert_staleness_and_ledger(folder: Path) -> None:
    """Step N trains on samples of version N-1, and no prompt is used twice."""
    metrics = rows(folder, "metrics.jsonl")
    ledger = rows(folder, "ledger.jsonl")
    assert [row["step"] for row in metrics] == [row["step"] for row in ledger] == [0, 1, 2, 3]
    assert [row["weight_version"] for row in metrics] == [0, 1, 2, 3]
    staleness = [(row["staleness/min"], row["staleness/max"]) for row in metrics]
    assert staleness == [(0, 0), (1, 1), (1, 1), (1, 1)]
    prompts = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    assert len(prompts) == len(set(prompts)) == 16
    assert all(row["sync/bytes"] > 1e6 for row in metrics[1:])
    evaluations = rows(folder, "evaluations.jsonl")
    assert [row["val/version"] for row in evaluations] == [0, 2, 4]
    assert metrics[-1]["val/version"] == 4


def assert_summary(folder: Path) -> None:
    """Steps, evaluations, memory and FLOPs; there is no MFU on CPUs."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["overlap_ratio"] > 0
    assert summary["val/versions"] == [0, 2, 4]
    assert summary["memory/trainer_peak_bytes"] > 1e8
    assert summary["memory/rollout_peak_bytes"] > 1e8
    assert summary["flops_per_s/trainer"] > 0
    assert summary["mfu/trainer"] is None


def assert_files(folder: Path) -> None:
    """The config, the samples of a step and of an evaluation, and the events of TensorBoard."""
    metrics = rows(folder, "metrics.jsonl")
    assert {"config.yaml", "versions.json"} <= {path.name for path in folder.iterdir()}
    samples = rows(folder, "samples/step_000003.jsonl")
    assert len(samples) == metrics[3]["samples"]
    assert samples[0]["prompt"]
    assert samples[0]["versions"] == [2]
    mean_reward = np.mean([sample["reward"] for sample in samples])
    assert mean_reward == pytest.approx(metrics[3]["reward/mean"])
    held_out = rows(folder, "samples/val_v000002.jsonl")
    assert [sample["prompt_id"][0] for sample in held_out] == [-1] * 8
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 1


def assert_model_was_trained(before: str, after: Path) -> None:
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(after).state_dict()
    start = AutoModelForCausalLM.from_pretrained(before).state_dict()
    assert all((trained[name] != start[name]).any() for name in start)


def train_further(model: Path, folder: Path) -> list[dict]:
    """Another run that starts from a model which the first one wrote; returns its metrics."""
    from one_step_off.runtime import launch

    changes = {
        "algorithm.old_log_probs": "recompute",
        "algorithm.rollout_correction": "tis",
        "algorithm.kl_coef": 0.01,
        "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        "model.dtype": "bfloat16",
    }
    cfg = tiny_config(str(model), str(folder), **VARIED, **changes)
    assert launch.run(cfg) == 0
    return rows(folder, "metrics.jsonl")


def test_one_step_off_run_and_what_it_leaves(models, tmp_path):
    """Staleness 1 by version stamps; the run folder; and its hf_model starts the next run
    (transformers and vLLM)."""
    from one_step_off.runtime import launch

    first = tmp_path / "first"
    changes = {
        "trainer.test_freq": 2,
        "trainer.total_steps": 4,
        "trainer.profile_step": 2,
        "logging.prometheus_port": free_port(),
    }
    cfg = tiny_config(models(), str(first), **VARIED, **changes)
    with listeners() as addresses:
        assert launch.run(cfg) == 0
    assert "127.0.0.1" in addresses
    assert addresses.keys() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses
    assert_watched(first)
    assert_staleness_and_ledger(first)
    assert_summary(first)
    assert_files(first)
    evaluate_only(models(), first)
    assert_model_was_trained(models(), first / "hf_model")

    metrics = train_further(first / "hf_model", tmp_path / "again")
    assert len(metrics) == 3
    for row in metrics:
        assert np.isfinite(row["actor/loss"])
        assert row["actor/kl"] >= 0
        assert 0 < row["canary/logprob_diff_max"] < 1.0
    assert metrics[-1]["actor/kl"] > 0


def start_run(models, folder: Path, **changes: object) -> subprocess.Popen:
    keys = {
        "model.path": models(),
        "trainer.output_dir": folder,
        "trainer.total_steps": 500,
        "data.val_files": "",
        **changes,
    }
    command = [sys.executable, "-m", "one_step_off.main_ppo", "config=config/gsm8k_tiny_cpu.yaml"]
    return subprocess.Popen(
        command + [f"{k}={v}" for k, v in keys.items()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for_steps(folder: Path, count: int, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.2)
    pytest.fail(f"no {count} steps in 120 s: {run.stdout.read() if run.poll() is not None else ''}")


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    left = [
        f"{p.pid} {' '.join(p.cmdline())[:80]}"
        for p in alive
        if p.is_running() and p.status() != "zombie"
    ]
    assert not left, f"left behind: {left}"


@pytest.mark.slow  # test_e2e_resume.py has another one
def test_ctrl_c_ends_the_run_and_every_process(models, tmp_path):
    run = start_run(models, tmp_path)
    wait_for_steps(tmp_path, 2, run)
    family = family_of(run.pid)
    assert len(family) > 4, "Ray, a replica with its engine and a trainer were expected"
    os.kill(run.pid, signal.SIGINT)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert "interrupted" in said
    assert "Traceback" not in said
    assert_all_gone(family)


def test_a_run_goes_on_after_the_death_of_its_trainer(models, tmp_path):
    """kill -9 of a rank: another incarnation from the last checkpoint; the rows and the prompts are
    those of one run."""
    run = start_run(
        models,
        tmp_path,
        **{"trainer.total_steps": 9, "trainer.save_freq": 2, "trainer.save_hf_model": False},
    )
    wait_for_steps(tmp_path, 4, run)
    family = family_of(run.pid)
    victims = [p for p in family if "ActorWorker" in " ".join(p.cmdline())]
    assert len(victims) == 1, [p.cmdline() for p in family]
    victims[0].kill()
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    assert re.search(
        r"its process died \(pid \d+\).*; resuming from .*step_0000\d\d as incarnation 1", said
    ), said
    metrics = rows(tmp_path, "metrics.jsonl")
    ledger = rows(tmp_path, "ledger.jsonl")
    assert [r["step"] for r in metrics] == [r["step"] for r in ledger] == list(range(9))
    assert metrics[0]["restarts/trainer"] == 0
    assert metrics[-1]["restarts/trainer"] == 1
    assert all(r["staleness/max"] == min(1, r["step"]) for r in metrics)
    prompts = [tuple(p) for row in ledger for p in row["prompts"]]
    assert len(prompts) == len(set(prompts)) == 9 * 16
    events = json.loads((tmp_path / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    works = [(e["cat"], e["name"]) for e in events if e["ph"] == "X"]
    assert {("checkpoint", "stall 2"), ("checkpoint write", "write 2")} <= set(works), (
        "both attempts are in it"
    )
    assert works.count(("actor", "update 0")) == 1
    assert ("actor", "update 8") in works
    assert '"restarts/trainer": [0, ' in (tmp_path / "report.html").read_text()
    assert "Traceback" not in said
    assert_all_gone(family)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_learns(tmp_path, seed):
    """The promise of the default CPU run: the reward of the last 5 steps is 0.2 above that of the
    first 5."""
    command = [sys.executable, "-m", "one_step_off.main_ppo", "config=config/gsm8k_tiny_cpu.yaml"]
    done = subprocess.run(
        [*command, f"trainer.seed={seed}", f"trainer.output_dir={tmp_path}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 0.1 < summary["reward/first"] < 0.6
    assert summary["reward/last"] >= summary["reward/first"] + 0.2
    assert summary["val/last"] > summary["val/first"]
