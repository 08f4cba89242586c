"""Whole runs with real Ray, vLLM, FSDP2 and gloo on a tiny random model."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import tiny_config
from tests.dashboard import dashboard_metrics
from tests.e2e.commands import (
    TINY_CONFIG,
    assert_all_ended,
    descendants,
    run_to_the_end,
    start_run,
    wait_for_steps,
)
from tests.e2e.rewards import EVEN_AND_SHORT, LETTER_SHARE
from tests.e2e.run_folder import (
    file_contents,
    read_rows,
    read_summary,
    timeline_events,
    timeline_spans,
    used_prompts,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def lasting_port() -> int:
    """A free port, below those that the kernel gives to others until the run opens it."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no free port")


@pytest.mark.parametrize(
    ("kind", "tied", "temperature", "estimator"),
    [
        pytest.param("qwen2", True, 1.0, "optimal_token_baseline", marks=pytest.mark.slow),
        pytest.param("qwen3", True, 0.7, "gdpo", marks=pytest.mark.slow),
        pytest.param("llama", False, 0.7, "grpo", marks=pytest.mark.slow),
        pytest.param("llama", True, 1.0, "grpo", marks=pytest.mark.slow),
    ],
)
def test_synchronous_ratio_is_one(models, tmp_path, kind, tied, temperature, estimator):
    """With fresh samples and one mini-batch theta is mu, so the engine's log-probs must equal the
    trainer's. Two of the estimators need more than a reward per sample: squared probabilities, and
    rewards in parts."""
    from one_step_off.runtime import launch

    reward_function = LETTER_SHARE
    if estimator == "gdpo":
        reward_function = EVEN_AND_SHORT
    settings = {
        "reward.function": reward_function,
        "pipeline.staleness": 0,
        "rollout.temperature": temperature,
        "algorithm.adv_estimator": estimator,
        "trainer.total_steps": 2,
        "trainer.val_before_train": True,
    }
    assert launch.run(tiny_config(models(kind, tied), str(tmp_path), **settings)) == 0
    metrics = read_rows(tmp_path, "metrics.jsonl")
    assert [row["weight_version"] for row in metrics] == [0, 1]
    for row in metrics:
        assert row["staleness/min"] == 0
        assert row["staleness/max"] == 0
        assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-5)
        assert row["ratio/max"] == pytest.approx(1.0, abs=2e-4)
        assert row["actor/grad_norm"] > 0
        assert row["canary/logprob_diff_max"] < 1e-4
    samples = read_rows(tmp_path, "samples/step_000001.jsonl")
    assert len({sample["advantage/mean"] for sample in samples}) > 4


def listening_addresses(process: psutil.Process) -> set[Any]:
    """Where a process listens. Each address has an `ip` and a `port`."""
    addresses = set()
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            addresses.add(connection.laddr)
    return addresses


@contextlib.contextmanager
def watch_listening_addresses() -> Iterator[dict[str, set[str]]]:
    """Collect, in a thread, where this process and all below it listen.

    Yields:
        the command lines of the listening processes, by IP address.
    """
    commands_by_address: dict[str, set[str]] = {}
    is_over = threading.Event()
    this_process = psutil.Process()
    earlier_addresses = listening_addresses(this_process)  # an inherited socket, for example

    def look_at(process: psutil.Process) -> None:
        for address in listening_addresses(process) - earlier_addresses:
            command = " ".join(process.cmdline())[:80]
            commands_by_address.setdefault(address.ip, set()).add(command)

    def look_repeatedly() -> None:
        while not is_over.wait(0.5):
            for process in [this_process, *this_process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    look_at(process)

    thread = threading.Thread(target=look_repeatedly)
    thread.start()
    try:
        yield commands_by_address
    finally:
        is_over.set()
        thread.join()


def assert_report(folder: Path) -> None:
    """The data of the report are those of the run."""
    text = (folder / "report.html").read_text()
    data_tag = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    data = json.loads(data_tag[1])
    assert data["columns"]["step"] == [0, 1, 2, 3]
    assert data["ended"] == ""
    assert len(data["evaluations"]) == 3
    assert data["summary"] == [read_summary(folder)]
    assert data["samples"][0]["response"]
    assert len(data["events"]) == len(timeline_events(folder))
    assert not data["cut"]


def assert_timeline(folder: Path) -> None:
    """The timeline has the work of each part of the system."""
    expected = {
        ("rollout 0", "generate 3"),
        ("rollout 0 evaluation", "evaluate 2"),
        ("sync", "weights 3"),
        ("actor", "update 3"),
        ("sync rollout 0", "load 2"),
        ("sync trainer 0", "wire 2"),
        ("evaluation", "evaluate 4"),
    }
    assert expected <= set(timeline_spans(folder))


def assert_profile(folder: Path) -> None:
    """There is one profile, by torch, of the step that the config names."""
    (profile,) = (folder / "profile").iterdir()
    assert profile.name == "actor_rank_0.json.gz"
    assert json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]


def assert_dashboard_has_its_metrics(folder: Path) -> None:
    """The dashboard queries nothing that a run does not have."""
    names = set()
    for row in read_rows(folder, "metrics.jsonl") + read_rows(folder, "evaluations.jsonl"):
        names.update(row)
    exported = {"one_step_off_" + re.sub(r"\W", "_", name) for name in names}
    assert dashboard_metrics() <= exported


def assert_staleness_of_one(folder: Path) -> None:
    """Four steps. By the versions of their tokens, each after the first is one step off."""
    metrics = read_rows(folder, "metrics.jsonl")
    ledger = read_rows(folder, "ledger.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert [row["step"] for row in ledger] == [0, 1, 2, 3]
    assert [row["weight_version"] for row in metrics] == [0, 1, 2, 3]
    assert [row["staleness/min"] for row in metrics] == [0, 1, 1, 1]
    assert [row["staleness/max"] for row in metrics] == [0, 1, 1, 1]
    for row in metrics[1:]:
        assert row["sync/bytes"] > 1e6
    assert len(used_prompts(folder)) == 16


def assert_evaluations_and_samples(folder: Path) -> None:
    """The evaluations of versions 0, 2 and 4, and the samples of the last step."""
    last_row = read_rows(folder, "metrics.jsonl")[3]
    evaluations = read_rows(folder, "evaluations.jsonl")
    assert [row["val/version"] for row in evaluations] == [0, 2, 4]
    assert last_row["val/version"] == 4
    samples = read_rows(folder, "samples/step_000003.jsonl")
    assert len(samples) == last_row["samples"]
    assert samples[0]["prompt"]
    assert samples[0]["versions"] == [2]
    rewards = [sample["reward"] for sample in samples]
    assert np.mean(rewards) == pytest.approx(last_row["reward/mean"])
    evaluated = read_rows(folder, "samples/val_v000002.jsonl")
    assert [sample["prompt_id"][0] for sample in evaluated] == [-1] * 8


def assert_summary(folder: Path) -> None:
    summary = read_summary(folder)
    assert summary["steps"] == 4
    assert summary["overlap_ratio"] > 0
    assert summary["val/versions"] == [0, 2, 4]
    assert summary["memory/trainer_peak_bytes"] > 1e8
    assert summary["memory/rollout_peak_bytes"] > 1e8
    assert summary["flops_per_s/trainer"] > 0
    assert summary["mfu/trainer"] is None


def check_one_step_off_run(model: str, folder: Path) -> None:
    """A run of four steps, and every file of its folder."""
    from one_step_off.runtime import launch

    settings = {
        "reward.function": LETTER_SHARE,
        "trainer.val_before_train": True,
        "trainer.test_freq": 2,
        "trainer.total_steps": 4,
        "trainer.profile_step": 2,
        "logging.prometheus_port": lasting_port(),
    }
    cfg = tiny_config(model, str(folder), **settings)
    with watch_listening_addresses() as commands_by_address:
        assert launch.run(cfg) == 0
    assert "127.0.0.1" in commands_by_address, commands_by_address
    assert commands_by_address.keys() <= LOOPBACK, commands_by_address
    assert_report(folder)
    assert_timeline(folder)
    assert_profile(folder)
    assert_dashboard_has_its_metrics(folder)
    assert_staleness_of_one(folder)
    assert_evaluations_and_samples(folder)
    assert_summary(folder)
    assert {"config.yaml", "versions.json"} <= {path.name for path in folder.iterdir()}
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 1


def check_evaluation_alone(model: str, folder: Path) -> None:
    """An evaluation alone, of another set and with its own sampling, in the folder of a run."""
    from one_step_off.runtime import launch

    settings = {
        "reward.function": LETTER_SHARE,
        "trainer.val_before_train": True,
        "trainer.val_only": True,
        "rollout.engine": "transformers",
        "data.val_sets": {"other": "generator:products"},
        "data.val_size": 4,
        "data.max_prompt_length": 512,
        "rollout.val_n": 4,
        "rollout.val_temperature": 1.0,
        "rollout.val_top_p": 0.9,
        "rollout.val_max_response_length": 24,
    }
    before = file_contents(folder)
    assert launch.run(tiny_config(model, str(folder), **settings)) == 0
    after = {path: path.read_bytes() for path in before}
    assert after == before, "an evaluation alone changes nothing of the run"
    assert read_summary(folder / "val_only")["steps"] == 0
    (evaluation,) = read_rows(folder / "val_only", "evaluations.jsonl")
    assert evaluation["val/version"] == 0
    assert evaluation["val/samples"] == 16
    assert evaluation["val/other/samples"] == 16
    assert evaluation["val/pass@1"] <= evaluation["val/pass@4"]
    assert evaluation["val/other/response_length"] <= 24


def assert_every_weight_moved(before: str, after: str) -> None:
    """transformers loads both models, and they differ in each tensor."""
    from transformers import AutoModelForCausalLM

    weights_before = AutoModelForCausalLM.from_pretrained(before).state_dict()
    weights_after = AutoModelForCausalLM.from_pretrained(after).state_dict()
    for name, tensor in weights_before.items():
        assert (weights_after[name] != tensor).any(), name


def check_run_of_trained_model(model: str, folder: Path) -> None:
    """A run that starts from the model of another run, in bfloat16 and with a reference model."""
    from one_step_off.runtime import launch

    settings = {
        "reward.function": LETTER_SHARE,
        "trainer.val_before_train": True,
        "algorithm.old_log_probs": "recompute",
        "algorithm.rollout_correction": "tis",
        "algorithm.kl_coef": 0.01,
        "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        "model.dtype": "bfloat16",
    }
    assert launch.run(tiny_config(model, str(folder), **settings)) == 0
    metrics = read_rows(folder, "metrics.jsonl")
    assert len(metrics) == 3
    for row in metrics:
        assert np.isfinite(row["actor/loss"])
        assert row["actor/kl"] >= 0
        assert 0 < row["canary/logprob_diff_max"] < 1.0
    assert metrics[-1]["actor/kl"] > 0


def test_one_step_off_run_and_its_folder(models, tmp_path):
    """Staleness 1 by version stamps, and the run folder. Its hf_model starts the next run, in
    transformers and in vLLM."""
    first = tmp_path / "first"
    trained_model = str(first / "hf_model")
    check_one_step_off_run(models(), first)
    check_evaluation_alone(models(), first)
    assert_every_weight_moved(models(), trained_model)
    check_run_of_trained_model(trained_model, tmp_path / "second")


@pytest.mark.slow  # test_resume.py has another one
def test_ctrl_c_ends_the_run_and_every_process(models, tmp_path):
    run = start_run(models, tmp_path)
    wait_for_steps(tmp_path, 2, run)
    processes = descendants(run.pid)
    assert len(processes) > 4, "Ray, a replica with its engine and a trainer were expected"
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130, output
    assert "interrupted" in output
    assert "Traceback" not in output
    assert_all_ended(processes)


def kill_trainer_rank(processes: list[psutil.Process]) -> None:
    """kill -9 of the only trainer rank among these processes."""
    trainers = [process for process in processes if "ActorWorker" in " ".join(process.cmdline())]
    assert len(trainers) == 1, [process.cmdline() for process in processes]
    trainers[0].kill()


def assert_rows_of_one_run(metrics: list[dict[str, Any]]) -> None:
    """Nine steps in order, each at most one step off, with one restart of the trainer."""
    assert [row["step"] for row in metrics] == list(range(9))
    assert metrics[0]["restarts/trainer"] == 0
    assert metrics[-1]["restarts/trainer"] == 1
    for row in metrics:
        assert row["staleness/max"] == min(1, row["step"])


def assert_timeline_of_both_attempts(folder: Path) -> None:
    """The timeline and the report have the work before the restart and the work after it."""
    spans = timeline_spans(folder)
    assert ("checkpoint", "stall 2") in spans
    assert ("checkpoint write", "write 2") in spans
    assert spans.count(("actor", "update 0")) == 1
    assert ("actor", "update 8") in spans
    assert '"restarts/trainer": [0, ' in (folder / "report.html").read_text()


@pytest.mark.slow  # test_chaos.py kills one of each kind
def test_a_run_continues_after_the_death_of_its_trainer(models, tmp_path):
    """kill -9 of a rank: the next attempt resumes from the last checkpoint. The rows and the
    prompts are those of one run."""
    changes = {"trainer.total_steps": 9, "trainer.save_freq": 2, "trainer.save_hf_model": False}
    run = start_run(models, tmp_path, **changes)
    wait_for_steps(tmp_path, 4, run)
    processes = descendants(run.pid)
    kill_trainer_rank(processes)
    output, _ = run.communicate(timeout=240)
    assert run.returncode == 0, output
    assert re.search(
        r"its process died \(pid \d+\).*; resuming from .*step_0000\d\d as attempt 1", output
    ), output
    assert_rows_of_one_run(read_rows(tmp_path, "metrics.jsonl"))
    assert [row["step"] for row in read_rows(tmp_path, "ledger.jsonl")] == list(range(9))
    assert len(used_prompts(tmp_path)) == 9 * 16
    assert_timeline_of_both_attempts(tmp_path)
    assert "Traceback" not in output
    assert_all_ended(processes)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_run_learns(tmp_path, seed):
    """The promise of the default CPU run: the reward of the last 5 steps is 0.2 above that of the
    first 5."""
    run_to_the_end(TINY_CONFIG, f"trainer.seed={seed}", f"trainer.output_dir={tmp_path}")
    summary = read_summary(tmp_path)
    assert 0.1 < summary["reward/first"] < 0.6
    assert summary["reward/last"] >= summary["reward/first"] + 0.2
    assert summary["val/last"] > summary["val/first"]
