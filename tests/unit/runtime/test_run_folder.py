"""A command over the folder of an earlier run: it resumes it, or is refused, or has been told to
replace it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from one_step_off import train
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.config.sections.trainer import free_folder_setting
from one_step_off.main_ppo import main
from one_step_off.main_sft import main as sft_main
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
    assert free_folder_setting(cfg.trainer) == f"'trainer.output_dir={tmp_path}/my run_2'"


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
    text = (ROOT / "docs/tutorials/slurm.md").read_text() + (
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


def test_what_the_console_of_this_run_did_not_take_is_kept(tmp_path: Path):
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    kept = tmp_path / "logs" / "console.log"
    run_folder.remove_process_logs(cfg, kept)
    kept.parent.mkdir()
    for name in ("console.log", "rollout_0.log"):
        (tmp_path / "logs" / name).write_text("a line\n")
    run_folder.remove_process_logs(cfg, kept)
    assert [path.name for path in kept.parent.iterdir()] == ["console.log"]
    assert kept.read_text() == "a line\n"


# --- the owner of a run folder --------------------------------------------------------------------

OWNER = """
import os, sys, time
from one_step_off.config.loading import load_config
from one_step_off.runtime.run_folder import locked

folder, child = sys.argv[1:]
with locked(load_config([f"trainer.output_dir={folder}"])):
    if child == "fork" and os.fork() == 0:  # as a user's function with multiprocessing
        print(os.getpid(), flush=True)
        time.sleep(600)
    if child == "exec":  # as Ray's processes and engines
        import subprocess
        print(subprocess.Popen(["sleep", "600"], close_fds=False).pid, flush=True)
    if child == "none":
        print(0, flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def owner(folder: Path, child: str = "none") -> Iterator[tuple[subprocess.Popen, int]]:
    """A process that owns a run folder, and a child of it that lives on."""
    command = [sys.executable, "-c", OWNER, str(folder), child]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child_pid = int(process.stdout.readline())
    try:
        yield process, child_pid
    finally:
        for pid in (process.pid, child_pid):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        process.communicate()


def config_of(folder: Path | str) -> Config:
    return load_config([*KEYS, f"trainer.output_dir={folder}"])


@pytest.mark.parametrize("more", [[], ["trainer.overwrite=true"], ["trainer.resume=never"]])
def test_a_folder_in_use_is_refused_in_one_line(more, try_run, tmp_path, capsys):
    write_earlier_run(tmp_path / "run", 5, (5,))
    with owner(tmp_path / "run") as (process, _):
        is_allowed, message = try_run(capsys, *more)
    assert not is_allowed
    assert message == (
        f"error: trainer.output_dir={tmp_path}/run: in use by another run (pid {process.pid} on "
        f"{socket.gethostname()}); wait for its end or stop it, or add "
        f"trainer.output_dir={tmp_path}/run_2 for a new folder\n"
    )


def test_every_command_that_writes_there_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "skipped" / "step_000001").mkdir(parents=True)
    out = f"trainer.output_dir={folder}"
    commands = [
        (main, [*KEYS, out, "trainer.val_only=true", "data.val_files=generator:word_problems"]),
        (main, [*KEYS, out, "--replay", f"{folder}/skipped/step_000001"]),
        (sft_main, [*KEYS, out, "sft.train_files=generator:word_problems"]),
    ]
    with owner(folder):
        for command, argv in commands:
            assert command(argv) == 2
            assert "in use by another run" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="in use by another run"):
            train(config_of(folder))


@pytest.mark.parametrize("how", ["link", "relative", "dots"])
def test_two_paths_to_one_folder_are_one_folder(how, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "a"
    (tmp_path / "runs" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    paths = {"link": "link/a", "relative": "runs/a", "dots": f"{tmp_path}/runs/b/../a"}
    with owner(folder), pytest.raises(ConfigError, match="in use"):
        with run_folder.locked(config_of(paths[how])):
            pass


@pytest.mark.parametrize("child", ["fork", "exec"])
def test_a_killed_owner_frees_its_folder_although_its_children_live(child, tmp_path):
    with owner(tmp_path / "run", child) as (process, child_pid):
        with pytest.raises(ConfigError, match="in use"):
            with run_folder.locked(config_of(tmp_path / "run")):
                pass
        process.kill()
        process.wait()
        os.kill(child_pid, 0)  # it lives
        with run_folder.locked(config_of(tmp_path / "run")):
            assert (tmp_path / "run" / ".lock").read_text().split()[1] == str(os.getpid())


def test_one_process_owns_a_folder_once(tmp_path):
    cfg = config_of(tmp_path / "run")
    with run_folder.locked(cfg), pytest.raises(ConfigError, match=f"pid {os.getpid()} on"):
        with run_folder.locked(cfg):
            pass
    with run_folder.locked(cfg):
        pass


def test_a_folder_that_stays_unused_is_not_left(tmp_path):
    with pytest.raises(ConfigError), run_folder.locked(config_of(tmp_path / "a" / "b")):
        raise ConfigError("bad input")
    assert list(tmp_path.iterdir()) == []
    with run_folder.locked(config_of(tmp_path / "a" / "b")):
        (tmp_path / "a" / "b" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["metrics.jsonl"]


def test_a_lock_file_that_was_removed_meanwhile_is_not_taken_for_the_lock(tmp_path):
    """The owner removes its file at its end, and whoever had opened it by then locks a file that
    nobody finds. Also where a user has removed the folder and begun anew."""
    cfg = config_of(tmp_path / "run")
    with run_folder.locked(cfg):
        shutil.rmtree(tmp_path / "run")
        with run_folder.locked(cfg):
            pass
        with owner(tmp_path / "run"):
            with pytest.raises(ConfigError, match="in use"), run_folder.locked(cfg):
                pass
            lock_file = (tmp_path / "run" / ".lock").stat().st_ino
    assert (tmp_path / "run" / ".lock").stat().st_ino == lock_file, "it was the second owner's"


def test_many_starts_at_once_have_one_owner_at_a_time(tmp_path):
    """Each holds the folder for a moment, and removes it."""
    code = """
import os, sys, time
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime.run_folder import locked

folder = sys.argv[1]
cfg = load_config([f"trainer.output_dir={folder}/run"])
owned = 0
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        with locked(cfg):
            marker = os.open(f"{folder}/owner", os.O_CREAT | os.O_EXCL)  # raises: there are two
            os.close(marker)
            os.unlink(f"{folder}/owner")
            owned += 1
    except ConfigError as error:
        assert "in use" in str(error), error
print(owned)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    starts = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    owned = [int(start.communicate(timeout=60)[0]) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0]
    assert sum(owned) > 10
    assert not list(tmp_path.rglob(".lock"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_and_used(number, tmp_path, monkeypatch, capsys):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "flock", unsupported)
    with run_folder.locked(config_of(tmp_path)):
        pass
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: trainer.output_dir={tmp_path}: its file system has no")
    assert os.strerror(number) in warning


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_folder.os, "pwrite", full)
    with pytest.raises(ConfigError, match="cannot be written to: No space left on device; name"):
        with run_folder.locked(config_of(tmp_path)):
            pass
    monkeypatch.undo()
    with run_folder.locked(config_of(tmp_path)):  # and the lock is not kept
        pass
