"""A command over the folder of an earlier run: it resumes it, or is refused, or has been told to
replace it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from one_step_off.config.free_folder import free_folder_setting
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.main_ppo import main
from one_step_off.runtime import failure_report, launch, run_folder
from tests.bad_input import base, refused

ROOT = Path(__file__).parents[3]
KEYS = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=2",
    "placement.device=cpu",
)
WAYS = ["/run_2 for a new folder", "or trainer.overwrite=true to replace the run"]


class Reached(Exception):
    """The run has its folder and would begin to read its model."""


@pytest.fixture
def try_run(tmp_path, monkeypatch):
    """Whether a run with these arguments gets as far as its model, and the error, if
    it does not."""

    def prepare(*_: object) -> None:
        raise Reached

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(failure_report, "report_failure", lambda cfg, error: type(error).__name__)

    def call(capsys, *argv: str) -> tuple[bool, str]:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        code = main([*KEYS, f"trainer.output_dir={tmp_path}/run", *argv])
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        message = capsys.readouterr().err
        assert code == (1 if message == "Reached\n" else 2), message
        return code == 1, message

    return call


def write_earlier_run(folder: Path, steps: int = 0, checkpoints: tuple[int, ...] = ()) -> None:
    """What a run of so many steps has left; for the question alone the files' contents do not
    matter."""
    folder.mkdir(parents=True, exist_ok=True)
    if steps:
        (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(steps)))
    for step in checkpoints:
        path = folder / "checkpoints" / f"step_{step:06d}"
        path.mkdir(parents=True)
        (path / "state.json").write_text("{}")


@pytest.mark.parametrize("more", [[], ["trainer.resume=never"]])
def test_a_run_without_a_checkpoint_is_not_replaced(more, try_run, tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 40)
    is_allowed, message = try_run(capsys, *more)
    assert not is_allowed
    assert message.startswith(f"error: trainer.output_dir={tmp_path}/run: holds a run of 40 steps")
    assert message.count("\n") == 1
    assert all(way in message for way in WAYS)
    assert "it cannot be resumed, because it has no checkpoint (trainer.save_freq=" in message
    assert try_run(capsys, *more, "trainer.overwrite=true")[0]
    assert try_run(capsys, *more, f"trainer.output_dir={tmp_path}/other")[0]


def test_the_folder_that_the_error_names_is_free_and_can_be_added_to_the_command(
    try_run, tmp_path, capsys
):
    for name in ("run", "run_2"):
        write_earlier_run(tmp_path / name, 40)
    _, message = try_run(capsys)
    setting = f"trainer.output_dir={tmp_path}/run_3"
    assert f"; add {setting} for a new folder, or" in message
    assert try_run(capsys, setting)[0]
    cfg = Config()
    cfg.trainer.output_dir = f"{tmp_path}/my run/"
    assert free_folder_setting(cfg) == f"'trainer.output_dir={tmp_path}/my run_2'"


def test_a_run_with_checkpoints_is_resumed_and_not_replaced(try_run, tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 40, (20, 30))
    assert try_run(capsys)[0], "it resumes from step 30"
    is_allowed, message = try_run(capsys, "trainer.resume=never")
    assert not is_allowed
    assert "holds a run of 40 steps" in message
    assert "add trainer.resume=auto to resume it, " in message
    assert all(way in message for way in WAYS)
    assert try_run(capsys, "trainer.resume=never", "trainer.overwrite=true")[0]
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "elsewhere")
    is_allowed, message = try_run(capsys, f"trainer.resume={tmp_path}/elsewhere/step_000020")
    assert not is_allowed
    assert "holds a run of 40 steps" in message, "another run's checkpoint continues another run"


@pytest.mark.parametrize(
    ("steps", "checkpoints", "holds"),
    [
        (100, (50, 100), "100 steps"),
        (75, (50,), "75 steps"),
        (0, (50, 100), "the checkpoint step_000100"),
    ],
)
def test_going_back_deletes_nothing_unasked(steps, checkpoints, holds, try_run, tmp_path, capsys):
    """The same command given twice: the first time it went on from step 50, the second time that
    would drop what it did."""
    write_earlier_run(tmp_path / "run", steps, checkpoints)
    back = f"trainer.resume={tmp_path}/run/checkpoints/step_000050"
    is_allowed, message = try_run(capsys, back)
    assert not is_allowed
    assert message.startswith(f"error: {back}: {tmp_path}/run holds {holds}")
    assert message.count("\n") == 1
    assert all(way in message for way in ["trainer.resume=auto", *WAYS])
    assert try_run(capsys, back, "trainer.overwrite=true")[0]
    assert try_run(capsys, back, f"trainer.output_dir={tmp_path}/other")[0]
    assert try_run(capsys)[0]


def test_the_last_step_is_what_the_rows_say(try_run, tmp_path, capsys):
    """A run that began from another folder's checkpoint has no rows before it; the last row may be
    cut off."""
    write_earlier_run(tmp_path / "run", 0, (50,))
    rows = tmp_path / "run" / "metrics.jsonl"
    resume = f"trainer.resume={tmp_path}/run/checkpoints/step_000050"
    rows.write_text("".join(f'{{"step": {step}}}\n' for step in range(40, 50)))
    assert try_run(capsys, resume)[0], "nothing lies beyond it"
    rows.write_text(rows.read_text() + '{"step": 50}\n{"st')
    is_allowed, message = try_run(capsys, resume)
    assert not is_allowed
    assert "holds 51 steps" in message


def test_a_job_that_may_be_requeued_is_given_as_the_docs_say(tmp_path):
    """Requeued before its first checkpoint it begins again; after one it resumes from it."""
    text = (ROOT / "docs/tutorials/many_gpus.md").read_text() + (
        ROOT / "shell" / "slurm_qwen_gsm8k.sh"
    ).read_text()
    commands = [line.strip("# ") for line in text.splitlines() if "sbatch --requeue shell/" in line]
    assert len(commands) == 2
    assert len({*commands}) == 1, "in both places the same"
    keys = [
        word
        for word in commands[0].split()
        if "=" in word and not word.startswith("trainer.output_dir=")
    ]
    write_earlier_run(tmp_path, 5)
    cfg = load_config([*KEYS, *keys, f"trainer.output_dir={tmp_path}"])
    assert cfg.trainer.resume == "auto"
    assert cfg.trainer.save_freq > 0
    assert run_folder.replaced_by(cfg) is None
    write_earlier_run(tmp_path, 25, (20,))
    assert run_folder.resumes(cfg)


def test_checkpoints_alone_are_a_run_too(try_run, tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 0, (20,))
    is_allowed, message = try_run(capsys, "trainer.resume=never")
    assert not is_allowed
    assert "holds the checkpoint step_000020 of a run" in message


def test_nothing_to_lose_is_no_run(try_run, tmp_path, capsys):
    """As after a run that failed before its first step."""
    write_earlier_run(tmp_path / "run")
    for name in ("config.yaml", "error.log", "metrics.jsonl"):
        (tmp_path / "run" / name).touch()
    assert try_run(capsys)[0]
    assert try_run(capsys, "trainer.resume=never")[0]


def test_an_evaluation_alone_replaces_no_run(try_run, tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 40)
    assert try_run(capsys, "trainer.val_only=true", "data.val_files=generator:word_problems")[0]


def test_it_is_refused_before_anything_slow_is_read(models, tmp_path, capsys):
    """The whole program; the folder stays as it was, which `refused` checks."""
    argv = [*base(tmp_path, models()), "trainer.overwrite=false"]
    refused(argv, ["trainer.output_dir=TMP/run: holds a run of 1 steps", *WAYS], tmp_path, capsys)


def test_a_dry_run_only_warns(tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 40)
    argv = [*KEYS, f"trainer.output_dir={tmp_path}/run"]
    assert main([*argv, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "output_dir: " in out
    assert err.startswith("warning: here a run would be refused: trainer.output_dir=")
    assert main([*argv, "trainer.overwrite=true", "--dry-run"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/proc/run", "/proc/deeper/run"])
def test_a_folder_that_only_seems_to_be_writable(folder, models, tmp_path, capsys):
    """Even root cannot make a folder there, though its mode says so: known before the model is
    read."""
    if not os.access("/proc", os.W_OK):
        pytest.skip("only root may think so")
    line = refused(
        [*base(tmp_path, models()), f"trainer.output_dir={folder}"],
        ["/proc cannot be written to", "name another folder"],
        tmp_path,
        capsys,
    )
    assert "error.log" not in line


def test_the_question_leaves_nothing_behind(tmp_path):
    cfg = load_config([*KEYS, f"trainer.output_dir={tmp_path}/a/b"])
    run_folder.require(cfg)
    assert list(tmp_path.iterdir()) == []


def test_the_same_benchmark_may_be_run_twice(tmp_path, monkeypatch):
    """Its folders are its own; the next run of an arm replaces the last one's."""
    from benchmarks.common import runs

    write_earlier_run(tmp_path, 3)
    asked: list[list[str]] = []
    monkeypatch.setattr(runs, "run_process", lambda command, cores: asked.append(command))
    runs.run_arm(f"{ROOT}/config/gsm8k_tiny_cpu.yaml", [], tmp_path, [])
    assert run_folder.replaced_by(load_config([word for word in asked[0] if "=" in word])) is None


def test_the_answer_comes_without_torch(tmp_path):
    write_earlier_run(tmp_path / "run", 2)
    code = (
        "import sys; from one_step_off.runtime import run_folder; "
        "print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_new_run_removes_what_processes_and_agents_of_an_earlier_one_printed(tmp_path: Path):
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    for name in ("logs", "agents", "samples"):
        (tmp_path / name).mkdir()
    run_folder.remove_process_logs(cfg)
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]
