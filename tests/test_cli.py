"""The command line as a user meets it: exit codes, one line on stderr, and no heavy import before an answer."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from one_step_off.config import Config, ConfigError
from one_step_off.config_io import KEYS, load
from one_step_off.main_ppo import main

ROOT = Path(__file__).parent.parent
TINY = f"config={ROOT}/config/gsm8k_tiny_cpu.yaml"
HEAVY = ("torch", "ray", "vllm", "transformers", "datasets")


def call(*argv: str) -> tuple[subprocess.CompletedProcess, float]:
    """Run the program as users do; the finished process and its seconds."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "one_step_off.main_ppo", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done, time.monotonic() - begin


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([TINY, "actor.lrr=1"], "did you mean actor.lr?"),
        (["config=nowhere.yaml"], "nowhere.yaml"),
        ([TINY, "model.path=/nowhere/model"], "/nowhere/model"),
        ([TINY, "data.train_files=/nowhere/a.jsonl"], "/nowhere/a.jsonl"),
        ([TINY, "--dryrun"], "--dry-run"),
        ([TINY, "extra"], "'='"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], part: str) -> None:
    done, seconds = call(*argv)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ") and part in done.stderr
    assert seconds < 3


@pytest.mark.parametrize("argv", [[TINY, "actor.lrr=1"], [TINY, "--dry-run"], ["--help"]])
def test_nothing_heavy_is_imported_before_an_answer(argv: list[str]) -> None:
    program = (
        f"import sys; from one_step_off.main_ppo import main; main({argv!r});"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["config=nowhere.yaml", "--help"]])
def test_help_lists_every_key(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"  {key}  (" in out


def test_dry_run_prints_what_it_would_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    argv = [TINY, "actor.lr=3e-5", "rollout.engine_kwargs.foo=bar", "data.instruction=a ${oc.env:HOME} #### n"]
    assert main([argv[0], "--dry-run", *argv[1:]]) == 0
    out = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(out)
    assert load([f"config={tmp_path}/again.yaml"]) == load(argv)
    assert (
        "# rollout: 1 CPU process; rollout: 1 replica x TP 1" in out and "# actor: 1 CPU process; actor: 1 rank" in out
    )


def test_later_faults_and_interrupts(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(run) -> None:
        fake = types.SimpleNamespace(run=run, report_failure=lambda cfg, error: f"error: {error}")
        monkeypatch.setitem(sys.modules, "one_step_off.launch", fake)

    def refuse(cfg: Config) -> int:
        raise ConfigError("data row a.jsonl:3: bad\nmend it")

    def interrupt(cfg: Config) -> int:
        raise KeyboardInterrupt

    def fail(cfg: Config) -> int:
        raise RuntimeError("engine 0 died")

    for run, code, line in (
        (fail, 1, "error: engine 0 died\n"),
        (refuse, 2, "error: data row a.jsonl:3: bad mend it\n"),
        (interrupt, 130, "error: interrupted\n"),
        (lambda cfg: 7 if cfg.model.path == "tiny:qwen2" else 0, 7, ""),
    ):
        install(run)
        assert main([TINY]) == code
        assert capsys.readouterr().err == line
