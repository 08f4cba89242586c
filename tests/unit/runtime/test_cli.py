"""The command line as a user meets it: exit codes, one line on stderr, no heavy import before an
answer; the scripts' choices."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import FLAGS, KEYS, load_config
from one_step_off.config.schema import Config
from one_step_off.main_ppo import main
from one_step_off.runtime import failure_report, launch

ROOT = Path(__file__).parents[3]
TINY = f"config={ROOT}/config/gsm8k_tiny_cpu.yaml"
HEAVY = ("torch", "ray", "vllm", "transformers", "datasets")


def call(*argv: str) -> tuple[subprocess.CompletedProcess, float]:
    """Run the program as users do; the finished process, and its seconds of a core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "one_step_off.main_ppo", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime - before.ru_utime


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([TINY, "actor.lrr=1"], "did you mean actor.lr?"),
        ([TINY, "rollout.engine=vlm"], "rollout.engine='vlm': unknown; did you mean vllm?"),
        (["config=nowhere.yaml"], "nowhere.yaml"),
        ([TINY, "model.path=/nowhere/model"], "/nowhere/model"),
        ([TINY, "data.train_files=/nowhere/a.jsonl"], "/nowhere/a.jsonl"),
        ([TINY, "--dryrun"], "--dry-run"),
        ([TINY, "extra"], "section.key=value"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv: list[str], part: str) -> None:
    done, seconds = call(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ")
    assert part in done.stderr
    assert seconds < 3


@pytest.mark.parametrize("argv", [[TINY, "actor.lrr=1"], [TINY, "--dry-run"], ["--help"]])
def test_nothing_heavy_is_imported_before_an_answer(argv: list[str]) -> None:
    program = (
        f"import sys; from one_step_off.main_ppo import main; main({argv!r});"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stdout + done.stderr


def test_no_arguments_say_where_to_begin(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 3
    for part in ("config=config/gsm8k_tiny_cpu.yaml", "--dry-run", "--help"):
        assert part in err
    assert (ROOT / "config/gsm8k_tiny_cpu.yaml").exists()


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["config=nowhere.yaml", "--help"]])
def test_help_lists_every_key(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    for key in KEYS:
        assert f"  {key}  (" in out
    for flag in FLAGS:
        assert flag == "-h" or f"\n  {flag} " in out, flag


def test_a_gpu_config_is_looked_at_on_a_machine_without_gpus(tmp_path: Path) -> None:
    """As users write it on their laptops; a run is refused there."""
    config = f"config={ROOT}/config/qwen_gsm8k_fsdp.yaml"
    argv = [
        sys.executable,
        "-m",
        "one_step_off.main_ppo",
        config,
        f"trainer.output_dir={tmp_path}/run",
    ]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    for more, part in (
        ([], "GPUs, but this machine has 0"),
        (["placement.pools={rollout: [8], actor: [8, 8]}"], "2 nodes, but this machine is one"),
    ):
        dry, real = (
            subprocess.run(
                [*argv, *more, *last],
                env=env,
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
            for last in (["--dry-run"], [])
        )
        assert dry.returncode == 0
        assert "# rollout [" in dry.stdout
        assert "on cuda" in dry.stdout, dry.stderr
        assert dry.stderr.startswith("warning: here a run would be refused: placement.pools")
        assert part in dry.stderr
        assert real.returncode == 2
        assert real.stderr.startswith("error: placement.pools")
        assert part in real.stderr


def test_dry_run_prints_what_it_would_run(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    argv = [
        TINY,
        "actor.lr=3e-5",
        "rollout.engine_kwargs.foo=bar",
        "data.instruction=a ${oc.env:HOME} #### n",
    ]
    assert main([argv[0], "--dry-run", *argv[1:]]) == 0
    out = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(out)
    assert load_config([f"config={tmp_path}/again.yaml"]) == load_config(argv)
    assert "# rollout [1] on cpu: rollout x 1" in out
    assert "# actor [1] on cpu: actor x 1" in out


def test_a_config_is_understood_without_its_name(tmp_path: Path) -> None:
    assert load_config([TINY.removeprefix("config="), "actor.lr=1"]) == load_config(
        [TINY, "actor.lr=1"]
    )
    (tmp_path / "mine.yml").write_text("actor: {lr: 1}\n")
    assert load_config([f"{tmp_path}/mine.yml"]).actor.lr == 1
    for argv, part in (
        ([TINY, f"{tmp_path}/mine.yml"], "mine.yml: config is given 2 times"),
        (["nowhere.yaml"], "config=nowhere.yaml: No such file"),
        (["nowhere.txt"], "argument nowhere.txt: must be config=FILE"),
    ):
        with pytest.raises(ConfigError, match=part):
            load_config(argv)


def test_later_faults_and_interrupts(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(run) -> None:
        monkeypatch.setattr(launch, "run", run)

    monkeypatch.setattr(failure_report, "report_failure", lambda cfg, error: f"error: {error}")

    def refuse(cfg: Config) -> int:
        raise ConfigError("data row a.jsonl:3: bad\nfix it")

    def interrupt(cfg: Config) -> int:
        raise KeyboardInterrupt

    def fail(cfg: Config) -> int:
        raise RuntimeError("engine 0 died")

    for run, code, line in (
        (fail, 1, "error: engine 0 died\n"),
        (refuse, 2, "error: data row a.jsonl:3: bad fix it\n"),
        (interrupt, 130, "interrupted\n"),
        (lambda cfg: 7 if cfg.model.path == "tiny:qwen2" else 0, 7, ""),
    ):
        install(run)
        assert main([TINY]) == code
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("folder", [[], ["no/such/folder"], ["{empty}"]])
def test_a_replay_of_nothing_is_refused_in_one_line(folder, tmp_path, capsys):
    argv = [
        TINY,
        f"trainer.output_dir={tmp_path}",
        "--replay",
        *(f.format(empty=tmp_path) for f in folder),
    ]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --replay ")
    assert "OUTPUT_DIR/skipped/step_000012" in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())
