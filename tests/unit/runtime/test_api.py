"""The Python API without engines: what it refuses, callbacks, and what it returns. A real run is in
e2e/test_notebook.py."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import one_step_off
from one_step_off import Config, ConfigError, StopTraining, load_config, train
from one_step_off.config.schema import ActorConfig, ModelConfig
from one_step_off.data.samples import Batch, Sample
from one_step_off.monitoring.callbacks import StepCallbacks
from one_step_off.monitoring.tracker import Tracker
from tests.conftest import tiny_config
from tests.unit.stand_ins import train_with

ROOT = Path(__file__).parents[3]
TIMES = {"time/step_s": 1.0, "time/generate_s": 0.5, "time/train_s": 0.5}


def run_python(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_else():
    """shell/setup.sh does so before anything is installed."""
    code = """
import importlib, sys, typing
before = set(sys.modules)
import one_step_off
print(sorted(set(sys.modules) - before))
"""
    assert run_python(code) == "['one_step_off']"


def test_a_config_is_loaded_and_refused_without_torch():
    code = """
import sys
from one_step_off import ConfigError, load_config, train
cfg = load_config("gsm8k_tiny_cpu")
cfg.actor.lr = "abc"
try:
    train(cfg)
except ConfigError as error:
    print(error, [name for name in ("torch", "ray", "vllm", "transformers") if name in sys.modules])
"""
    assert run_python(code) == "actor.lr=abc: must be a number []"


def test_public_names():
    assert set(one_step_off.__all__) <= set(dir(one_step_off))
    for name in one_step_off.__all__:
        assert getattr(one_step_off, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        one_step_off.trian  # noqa: B018


# --- load_config ---


def test_the_ways_to_set_a_key(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("actor: {lr: 0.5}\ntrainer: {total_steps: 7}\n")
    for config in (path, str(path)):
        assert load_config(config).actor.lr == 0.5
    assert load_config("gsm8k_tiny_cpu").model.path == "tiny:qwen2"
    cfg = load_config(
        path,
        ["actor.lr=0.25", "rollout.n=3"],
        actor={"lr": 0.125},
        **{"trainer.output_dir": tmp_path, "reward.kwargs": {"limit": 2}},
    )
    assert (cfg.actor.lr, cfg.rollout.n, cfg.trainer.total_steps) == (0.125, 3, 7)
    assert cfg.trainer.output_dir == str(tmp_path)
    assert cfg.reward.kwargs == {"limit": 2}


@pytest.mark.parametrize("text", ["1e-5", "null", 'a "quoted" # text', "on", "zwei ü \U0001f600"])
def test_texts_stay_as_they_are(text):
    assert load_config(data={"instruction": text}).data.instruction == text


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["no_such"], {}, "config=no_such: No such file.*gsm8k_tiny_cpu"),
        (["nowhere.yaml"], {}, "config=nowhere.yaml: No such file"),
        (["gsm8k_tiny_cpu", "actor.lr=1"], {}, "overrides='actor.lr=1': must be a list"),
        (["gsm8k_tiny_cpu", ["actor.lr"]], {}, "argument actor.lr: must be"),
        ([], {"actor": 3}, "actor=3: must be a mapping"),
        ([], {"actor": {"lrr": 1}}, "actor.lrr: unknown key; did you mean actor.lr"),
        ([], {"actr": {"lr": 1}}, "actr.lr: unknown key"),
        ([], {"actor": {"lr": "abc"}}, "actor.lr=abc: must be a number"),
        ([], {"actor": {"lr": print}}, "actor.lr=<built-in.*: must be a number, a string"),
        ([], {"actor": {"lr": -1.0}}, r"actor.lr=-1.0: must be above 0"),
    ],
)
def test_bad_settings_are_refused(arguments, settings, words):
    with pytest.raises(ConfigError, match=words):
        load_config(*arguments, **settings)


# --- the check of a config that was built in Python ---


def set_attribute(section: str, name: str, value: object) -> Config:
    cfg = Config()
    setattr(getattr(cfg, section), name, value)
    return cfg


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (Config(actor=ActorConfig(lr="abc")), "actor.lr=abc: must be a number"),
        (Config(model=ModelConfig(path=["a"])), r"model.path=\[a\]: must be text"),
        (Config(actor={"lr": 1.0}), "actor={lr: 1.0}: must be an instance of ActorConfig"),
        (set_attribute("actor", "lr", None), "actor.lr=null: must be a number"),
        (set_attribute("actor", "lr", -1), "actor.lr=-1.0: must be above 0"),
        (set_attribute("rollout", "n", 1.5), "rollout.n=1.5: must be a whole number"),
        (set_attribute("placement", "pools", {"a": 1}), "placement.pools.a=1: must be"),
        (set_attribute("algorithm", "adv_estimater", "gae"), "did you mean algorithm.adv_est"),
        ("gsm8k_tiny_cpu", "config of type str: must be a Config"),
    ],
)
def test_what_dataclasses_accept_is_refused_by_train(cfg, words):
    with pytest.raises(ConfigError, match=words):
        train(cfg)


def test_what_does_not_fit_together_is_refused_by_train(models, tmp_path):
    cfg = tiny_config(models(), str(tmp_path), **{"data.train_batch_size": 3})
    with pytest.raises(ConfigError, match="data.train_batch_size"):
        train(cfg)


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [(print, "callbacks: must be a list"), ([print, 3], r"callbacks\[1\]=3: must be a function")],
)
def test_callbacks_that_are_no_functions_are_refused(callbacks, words):
    with pytest.raises(ConfigError, match=words):
        train(Config(), callbacks)


# --- train, with a stand-in for Ray and what runs on it ---


def sample(row: int) -> Sample:
    zeros = np.zeros(2)
    return Sample((0, row), 0, np.arange(2), zeros, zeros, zeros > -1, np.zeros(2, int), reward=0.5)


def train_steps(prepared, tracker: Tracker) -> None:
    """In place of `run_with_restarts`: two steps."""
    for step in range(2):
        tracker.step(Batch(step, [sample(step)], (0, 0)), step, dict(TIMES))


@pytest.fixture
def cfg(models, tmp_path, monkeypatch) -> Config:
    train_with(monkeypatch, train_steps)
    return tiny_config(models(), str(tmp_path / "run"), **{"logging.tensorboard": False})


def test_a_run_returns_its_results_and_leaves_the_config_as_it_was(cfg, tmp_path):
    cfg.actor.lr = "0.001"  # as of an environment variable: it is converted, in a copy
    rows = []
    result = train(cfg, callbacks=[rows.append])
    assert cfg.actor.lr == "0.001"
    assert [row["step"] for row in rows] == [0, 1] == [row["step"] for row in result.metrics]
    assert result.summary["steps"] == 2
    assert result.evaluations == []
    assert result.output_dir == tmp_path / "run"
    assert result.report == tmp_path / "run" / "report.html"
    assert result.hf_model is None
    assert result.checkpoints == []
    assert repr(result) == f"RunResult(2 steps in {tmp_path}/run)"
    assert "lr: 0.001" in (tmp_path / "run" / "config.yaml").read_text()


def test_it_works_inside_an_event_loop_and_outside_the_main_thread(cfg):
    async def in_a_loop() -> int:
        return len(train(cfg).metrics)

    assert asyncio.run(in_a_loop()) == 2
    steps = []
    cfg.trainer.overwrite = True
    thread = threading.Thread(target=lambda: steps.append(len(train(cfg).metrics)))
    thread.start()
    thread.join(60)
    assert steps == [2]


def test_an_exception_of_a_callback_ends_the_run_and_is_raised(cfg, tmp_path):
    def fail(step):
        raise ZeroDivisionError(f"in step {step['step']}")

    with pytest.raises(ZeroDivisionError, match="in step 0"):
        train(cfg, callbacks=[fail])
    assert "in step 0" in (tmp_path / "run" / "error.log").read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert "ZeroDivisionError: in step 0" in (tmp_path / "run" / "report.html").read_text()


def test_a_full_disk_is_bad_input(cfg, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    train_with(monkeypatch, full)
    with pytest.raises(ConfigError, match="No space left on device; name another folder"):
        train(cfg)


def test_an_interrupt_is_raised(cfg, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    train_with(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(cfg)


# --- callbacks ---


def test_callbacks_get_copies_and_what_they_return_is_ignored(tmp_path):
    def change(step):
        step.clear()
        return False

    seen = []
    tracker = Tracker(str(tmp_path), 1, out=io.StringIO())
    tracker.callbacks = StepCallbacks([change, seen.append])
    tracker.step(Batch(0, [sample(0)], (0, 0)), 0, dict(TIMES))
    assert seen[0]["step"] == 0
    assert tracker.steps[0]["reward/mean"] == 0.5
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 0.5
    assert not tracker.callbacks.stop_requested


@pytest.mark.parametrize(
    ("stop", "reason"),
    [(StopTraining("enough"), "enough"), (StopTraining(), "a callback raised StopTraining")],
)
def test_a_callback_requests_a_stop_and_the_others_are_still_called(stop, reason):
    def request_stop(step):
        raise stop

    seen = []
    callbacks = StepCallbacks([request_stop, seen.append])
    callbacks.step({"step": 3})
    assert seen == [{"step": 3}]
    assert callbacks.stop_requested
    assert callbacks.stop_reason == reason
