"""TensorBoard, W&B and sample dumps: what they write, and that their failures are failed and
harmless."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.monitoring import loggers
from one_step_off.monitoring.loggers import Loggers, open_loggers, start_remote_loggers
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime.validation import validate
from tests.unit.monitoring.test_console import on_a_terminal

PROMPTS = {(0, 0): Prompt((0, 0), np.arange(2), "Was ist 1+1?\n", "2")}


def sample(row: int = 0, index: int = 0, reward: float = 1.0, text: str = "zwei ü") -> Sample:
    z = np.zeros(3)
    return Sample(
        (0, row),
        index,
        np.arange(2),
        z,
        z,
        z > -1,
        np.full(3, 4),
        reward=reward,
        finish_reason="stop",
        response=text,
    )


def config(folder: Path, **changes: object) -> Config:
    cfg = Config()
    cfg.trainer.output_dir = str(folder)
    for name, value in changes.items():
        setattr(cfg.logging, name, value)
    return cfg


def wait_for_a_new_second() -> None:
    """TensorBoard reads event files by their names: seconds, then a counter that sorts as text (10
    before 9). Runs of one folder are never started within one second, but tests are."""
    time.sleep(1 - time.time() % 1)


def log_steps(cfg: Config, steps: range, lines: list[str]) -> None:
    wait_for_a_new_second()
    run_loggers = open_loggers(
        cfg, steps[0], PROMPTS.get, lines.append, start_remote_loggers(cfg, steps[0] > 0)
    )
    figures = {"val/version": float(steps[0]), "val/reward": 0.5}
    run_loggers.evaluation(figures, [sample(text="held out")])
    for step in steps:
        row = {
            "step": step,
            "reward/mean": step / 10,
            "mfu/trainer": None,
            "actor/grad_norm": math.nan,
        }
        row |= figures if step == steps[0] + 1 else {}
        batch = Batch(step, [sample(0, 0), sample(7, 1, reward=math.nan, text="\ud83d")], (0, 0))
        batch.samples[0].loss_mask[2] = batch.samples[1].loss_mask[:] = False
        batch.samples[0].extra = {
            "reward_parts": {"right": 1.0},
            "baseline": 0.5,
            "replaces": [[0, 3]],
        }
        batch.advantages = [np.array([0.5, -1.0, 9.0]), np.zeros(3)]
        run_loggers.step(row, batch)
    run_loggers.close()


def test_samples_as_people_read_them(tmp_path):
    lines: list[str] = []
    log_steps(config(tmp_path, tensorboard=False), range(2), lines)
    rows = [
        json.loads(line)
        for line in (tmp_path / "samples/step_000001.jsonl").read_text("utf-8").splitlines()
    ]
    assert rows[0] == {
        "prompt_id": [0, 0],
        "index": 0,
        "reward": 1.0,
        "length": 3,
        "finish_reason": "stop",
        "versions": [4],
        "ground_truth": "2",
        "prompt": "Was ist 1+1?\n",
        "response": "zwei ü",
        "advantage/mean": -0.25,
        "advantage/min": -1.0,
        "advantage/max": 0.5,
        "reward_parts": {"right": 1.0},
        "baseline": 0.5,
    }
    assert rows[1]["reward"] is None
    assert rows[1]["prompt"] is None
    assert rows[1]["advantage/mean"] is None
    assert "held out" in (tmp_path / "samples/val_v000000.jsonl").read_text()
    assert not lines
    assert not list((tmp_path / "samples").glob(".*"))


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        t: [(e.step, round(e.value, 3)) for e in events.Scalars(t)]
        for t in events.Tags()["scalars"]
    }


def test_tensorboard_is_read_back_and_a_resumed_run_replaces_what_comes_after(tmp_path):
    pytest.importorskip("tensorboard")
    cfg = config(tmp_path, sample_dump=False)
    lines: list[str] = []
    log_steps(cfg, range(4), lines)
    curves = scalars(tmp_path)
    assert curves["reward/mean"] == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert curves["val/reward"] == [(0, 0.5)]
    assert "mfu/trainer" not in curves
    assert "actor/grad_norm" not in curves
    log_steps(cfg, range(2, 5), lines)
    assert [s for s, _ in scalars(tmp_path)["reward/mean"]] == [0, 1, 2, 3, 4]
    log_steps(cfg, range(0, 1), lines)
    assert scalars(tmp_path)["reward/mean"] == [(0, 0.0)], "another run, another history"
    assert not lines


def test_the_evaluation_of_the_checkpoints_weights_stays(tmp_path):
    cfg = config(tmp_path)
    log_steps(cfg, range(2), [])
    for first in (0, 2):
        wait_for_a_new_second()
        tracker = Tracker(str(tmp_path), 4, out=io.StringIO())
        tracker.loggers = open_loggers(cfg, first, PROMPTS.get, print, {})
        tracker.start(
            first, tracker.evaluations if not first else [{"val/version": 2.0, "val/reward": 0.5}]
        )
        if not first:
            tracker.evaluation(2, [sample(text="of the first run", reward=0.5)], 0.1)
        tracker.close()
    assert scalars(tmp_path)["val/reward"] == [(2, 0.5)]
    assert "of the first run" in (tmp_path / "samples/val_v000002.jsonl").read_text()


def test_samples_of_an_earlier_run_go_from_where_this_one_starts(tmp_path):
    cfg = config(tmp_path, tensorboard=False)
    log_steps(cfg, range(4), [])
    (tmp_path / "samples" / "mine.jsonl").write_text("kept")
    open_loggers(cfg, 2, PROMPTS.get, print, {}).close()
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == [
        "mine.jsonl",
        "step_000000.jsonl",
        "step_000001.jsonl",
        "val_v000000.jsonl",
    ]


def test_a_broken_logger_is_named_once_and_left_out(tmp_path, monkeypatch):
    def broken(self, *_):
        raise OSError("No space left on device")

    monkeypatch.setattr(loggers.SampleDump, "write", broken)
    lines: list[str] = []
    log_steps(config(tmp_path), range(3), lines)
    assert lines == [
        "warning: the sample dump failed and is disabled: OSError: No space left on device"
    ]
    assert len(scalars(tmp_path)["reward/mean"]) == 3


def test_loggers_receive_how_the_run_ended():
    class Ending:
        failed = None

        def close(self, failed):
            Ending.failed = failed

    for failed in (True, False):
        run_loggers = Loggers(print)
        run_loggers.add("ending", Ending)
        run_loggers.close(failed)
        assert Ending.failed is failed


def test_a_logger_that_cannot_start_is_named():
    lines: list[str] = []
    run_loggers = Loggers(lines.append)

    def make():
        raise ImportError("no module")

    run_loggers.add("TensorBoard", make)
    run_loggers.close()
    assert lines == ["warning: TensorBoard failed and is disabled: ImportError: no module"]


def test_a_hanging_logger_holds_the_run_for_a_limited_time_only(monkeypatch):
    import threading

    monkeypatch.setattr(loggers, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(loggers, "MAX_PENDING_JOBS", 1)
    lines: list[str] = []
    run_loggers = Loggers(lines.append)
    gate = threading.Event()
    run_loggers.add("slow", gate.wait)
    for step in range(3):
        run_loggers.step({"step": step}, Batch(step, [], (0, 0)))
    run_loggers.close()
    gate.set()
    assert any("behind" in line for line in lines)
    assert "have not ended" in lines[-1]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_refused_with_the_fix(tmp_path, monkeypatch, name):
    from one_step_off.config import packages

    cfg = config(tmp_path, **{name: True})
    cfg.model.path = "tiny:qwen2"
    cfg.data.train_files = "generator:word_problems"
    cfg.placement.device = "cpu"
    cfg.trainer.total_steps = 1
    honest = packages.is_installed
    monkeypatch.setattr(
        packages, "is_installed", lambda package: package != name and honest(package)
    )
    with pytest.raises(
        ConfigError,
        match=rf"logging.{name}=true: the package {name} is missing; pip install {name}",
    ):
        validate(cfg)


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    from one_step_off.config.packages import is_installed

    (tmp_path / "some_logger").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_installed("some_logger")
    assert is_installed("json")


needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed (extra wandb)"
)


@needs_wandb
@pytest.mark.timeout(120)
def test_wandb_offline_and_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    cfg = config(tmp_path, wandb=True, wandb_mode="offline", tensorboard=False, sample_dump=False)
    lines: list[str] = []
    log_steps(cfg, range(3), lines)
    first = (tmp_path / "wandb_run_id").read_text().strip()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))) == 1
    log_steps(cfg, range(2, 4), lines)
    assert (tmp_path / "wandb_run_id").read_text().strip() == first, (
        "a resumed run continues the same W&B run"
    )
    log_steps(cfg, range(1), lines)
    assert (tmp_path / "wandb_run_id").read_text().strip() != first, "a new run is another one"
    assert not lines


@needs_wandb
def test_wandb_without_login_is_refused(tmp_path, monkeypatch):
    import wandb

    def refuse(**kwargs):
        assert kwargs["resume"] == "allow"
        assert kwargs["dir"] == str(tmp_path)
        raise RuntimeError("api_key not configured\n(no-tty)")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"does not start: \w+: api_key not configured.*; run `wandb login`"
    ):
        loggers.Wandb(config(tmp_path, wandb=True), False)


@needs_wandb
def test_wandb_without_login_asks_nothing_at_a_terminal(tmp_path):
    program = f"""
    from one_step_off.config.errors import ConfigError
    from one_step_off.config.schema import Config
    from one_step_off.monitoring.loggers import Wandb
    cfg = Config()
    cfg.logging.wandb, cfg.trainer.output_dir = True, {str(tmp_path)!r}
    try:
        Wandb(cfg, False)
    except ConfigError as e:
        print("refused:", e)
    """
    out = on_a_terminal(
        program, HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"), WANDB_API_KEY=""
    )
    assert "refused: logging.wandb=true: W&B does not start" in out
    assert "choice" not in out
