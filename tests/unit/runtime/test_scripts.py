"""The scripts under shell/ with stand-ins for nvidia-smi and Python: which venv, config and GPUs
they choose."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from one_step_off.config import packages
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate

ROOT = Path(__file__).parents[3]

# It answers what setup.sh asks of an interpreter, and "makes" a venv by copying itself.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *purelib*) dirname "$0" ;;
    *print*) echo 3.11 ;;
esac
"""
# It counts $GPUS, and says where and with which arguments it would train.
FAKE_VENV_PYTHON = """#!/bin/bash
if [[ "$2" == -c ]]; then echo "$GPUS"; else pwd; printf '%s\\n' "${@:4}"; fi
"""
FAKE_SETUP = """#!/bin/bash
[[ "$1" == --print-venv ]] || { echo "setup for $EXTRA"; exit; }
[[ "${EXTRA:-$DEFAULT}" == cpu ]] && echo "$ROOT/.venv" || echo "$ROOT/.venv-gpu"
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def shell(
    root: Path, name: str, *argv: str, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess:
    """Run a script of the copy in `root`, with only these of the variables that it reads."""
    read = ("EXTRA", "PYTHON", "CUDA_VISIBLE_DEVICES", "MODEL", "DATA", "N_ROLLOUT_GPUS", "ONE_GPU")
    full = {k: v for k, v in os.environ.items() if k not in read}
    full["PATH"] = f"{root}/bin:{full['PATH']}"
    return subprocess.run(
        ["bash", f"{root}/shell/{name}", *argv],
        cwd=cwd,
        env=full | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what setup.sh reads, so that no real venv is touched."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "shell", root / "shell")
    shutil.copytree(ROOT / "constraints", root / "constraints")
    for name in (
        "setup.cfg",
        "pyproject.toml",
        "one_step_off/__init__.py",
        "one_step_off/config/__init__.py",
        "one_step_off/config/hardware.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.mark.parametrize(
    ("gpus", "env", "venv"),
    [
        (0, {}, ".venv"),
        (1, {}, ".venv-gpu"),
        (2, {}, ".venv-gpu"),
        (3, {"MIN_GPUS": "4"}, ".venv"),
        (4, {"CUDA_VISIBLE_DEVICES": "0,2"}, ".venv-gpu"),
        (4, {"CUDA_VISIBLE_DEVICES": "3"}, ".venv-gpu"),
        (4, {"CUDA_VISIBLE_DEVICES": ""}, ".venv"),
        (4, {"CUDA_VISIBLE_DEVICES": "-1"}, ".venv"),
        (4, {"EXTRA": "cpu"}, ".venv"),
        (0, {"EXTRA": "gpu"}, ".venv-gpu"),
    ],
)
def test_setup_chooses_the_venv_by_visible_gpus(
    checkout: Path, gpus: int, env: dict[str, str], venv: str
) -> None:
    script(
        checkout / "bin" / "nvidia-smi",
        f'#!/bin/sh\nfor i in $(seq {gpus}); do echo "GPU $i: A"; done\n',
    )
    done = shell(checkout, "setup.sh", "--print-venv", PYTHON=sys.executable, **env)
    assert done.stdout == f"{checkout}/{venv}\n", done.stderr
    assert sorted(p.name for p in checkout.iterdir() if p.name.startswith(".venv")) == []


def test_setup_never_mixes_two_vllms(checkout: Path) -> None:
    python = str(script(checkout / "bin" / "some-python", FAKE_PYTHON))
    first = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python)
    assert first.returncode == 0
    assert "setup: ready" in first.stdout, first.stderr
    assert shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python).stdout == ""
    assert "new .venv-gpu with" in shell(checkout, "setup.sh", EXTRA="gpu", PYTHON=python).stdout
    assert shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python).stdout == "", (
        "the other venv was touched"
    )
    (checkout / ".venv" / ".setup-done").write_text("gpu\n123 4\n")
    (checkout / ".venv" / "left-over").touch()
    again = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python)
    assert "was created for another EXTRA; creating it again" in again.stdout
    assert "setup: ready" in again.stdout
    assert not (checkout / ".venv" / "left-over").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_setup_waits_for_another_one_only_so_long(checkout: Path) -> None:
    with open(checkout / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=sys.executable, LOCK_WAIT_S="1")
    assert done.returncode == 1
    assert "still holds" in done.stderr
    assert "after 1 s" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("argv", "env", "part"),
    [
        (["--printvenv"], {"EXTRA": "cpu"}, "unknown argument --printvenv"),
        ([], {"EXTRA": "tpu"}, "must be cpu or gpu"),
        ([], {"PYTHON": "/nowhere/python"}, "needs Python 3.11 to 3.14"),
    ],
)
def test_setup_refuses(checkout: Path, argv: list[str], env: dict[str, str], part: str) -> None:
    done = shell(checkout, "setup.sh", *argv, **{"PYTHON": sys.executable, **env})
    assert done.returncode == (2 if "must be" in part else 1)
    assert part in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


# A python whose pip says $PIP_SAYS and fails where $FAILS is among its arguments.
FAILING_PYTHON = FAKE_PYTHON.replace(
    'case "$*" in',
    """[[ "$*" != *"$FAILS"* ]] || { printf '%s\\n' "$PIP_SAYS"; exit 1; }
case "$*" in""",
)


@pytest.mark.parametrize(
    ("says", "part"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "is full; they"),
        ("WARNING: Retrying after connection broken by 'ProxyError(...)'", "HTTPS_PROXY"),
        ("WARNING: Retrying after connection broken by 'SSLError(...)'", "PIP_CERT=FILE"),
        ("t.c:1:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("error: command 'gcc' failed: No such file or directory", "install a C compiler"),
        ("ERROR: No matching distribution found for ray==2.60.0", "(ERROR: No matching"),
        ("Killed", "failed after 0 s: Killed"),
    ],
)
def test_a_failed_setup_says_why_in_one_line(checkout: Path, says: str, part: str) -> None:
    python = str(script(checkout / "bin" / "some-python", FAILING_PYTHON))
    failing = {"PYTHON": python, "FAILS": ".[cpu,dev]", "PIP_SAYS": says}
    done = shell(checkout, "setup.sh", EXTRA="cpu", **failing)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert part in line
    assert line.endswith(f"all of it is in {checkout}/.venv/setup.log")
    again = shell(checkout, "setup.sh", EXTRA="cpu", **failing | {"FAILS": "nothing"})
    assert "is incomplete; creating it again" in again.stdout
    assert "setup: ready" in again.stdout


@pytest.mark.parametrize("fails", ["megatron-core", "triton", "import torch, ray"])
def test_a_setup_stops_at_each_failed_step(checkout: Path, fails: str) -> None:
    python = str(script(checkout / "bin" / "some-python", FAILING_PYTHON))
    failing = {"PYTHON": python, "FAILS": fails, "PIP_SAYS": "no", "MEGATRON": "1"}
    done = shell(checkout, "setup.sh", EXTRA="cpu", **failing)
    assert done.returncode == 1, done.stdout
    assert not (checkout / ".venv" / ".setup-done").exists()


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, with its pip."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    return venv


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, "does not reach its package index"),
        ({"HTTPS_PROXY": "http://127.0.0.1:9"}, "HTTPS_PROXY where there is a proxy"),
        ({"PIP_NO_INDEX": "1"}, "pip is configured here ("),
    ],
)
def test_real_pip_without_its_index(
    checkout: Path, empty_venv: Path, settings: dict[str, str], part: str
) -> None:
    (checkout / "mine.txt").write_text("ray==1.0\n")
    alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    alone |= {"PIP_RETRIES": "1", "PIP_CONSTRAINT": str(checkout / "mine.txt")}
    (checkout / ".venv-gpu").symlink_to(empty_venv)
    done = shell(checkout, "setup.sh", EXTRA="gpu", **alone | settings)
    (empty_venv / ".setup-unfinished").unlink()
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert part in line


def test_no_cpu_build_of_torch(checkout: Path, empty_venv: Path) -> None:
    """Neither at pip's own sources nor at PyTorch's index, which no test may reach."""
    setup = checkout / "shell/setup.sh"
    setup.write_text(setup.read_text().replace("https://download", "http://127.0.0.1:9/download"))
    (checkout / ".venv").symlink_to(empty_venv)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "1"}
    settings |= {"PIP_INDEX_URL": (checkout / "no_index").as_uri(), "PIP_EXTRA_INDEX_URL": ""}
    done = shell(checkout, "setup.sh", EXTRA="cpu", **settings)
    (empty_venv / ".setup-unfinished").unlink()
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "no CPU build of torch 2.13.0 at pip's own sources, nor at http" in line


def test_setup_needs_space(checkout: Path) -> None:
    free = f"$(case $2 in {checkout}) echo 4900000;; *) echo 90000000; esac)"
    script(checkout / "bin" / "df", f"#!/bin/sh\necho; echo disk 9 9 {free} 1% /\n")
    done = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=sys.executable)
    assert done.returncode == 1
    assert done.stderr == f"setup: error: {checkout} has 4 GB free, and setup needs 5 there\n"
    assert not (checkout / ".venv").exists()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_setup_in_a_folder_that_cannot_be_written(checkout: Path) -> None:
    checkout.chmod(0o555)
    without = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]
    command = [*without, "bash", f"{checkout}/shell/setup.sh"]
    if os.geteuid() != 0:
        command = command[3:]
    env = os.environ | {"EXTRA": "cpu", "PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    checkout.chmod(0o755)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{checkout} cannot be written" in line


def test_an_interrupted_setup_says_so_and_starts_again(checkout: Path) -> None:
    slow = FAKE_PYTHON.replace("esac", '    *"$SLOW"*) touch "$0.slow"; sleep 30 ;;\nesac')
    python = str(script(checkout / "bin" / "some-python", slow))
    env = os.environ | {"EXTRA": "cpu", "PYTHON": python, "SLOW": ".[cpu,dev]"}
    command = ["bash", f"{checkout}/shell/setup.sh"]
    setup = subprocess.Popen(
        command,
        env=env,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A background job ignores the signal, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while not (checkout / ".venv/bin/python.slow").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(setup.pid, signal.SIGINT)
    _, said = setup.communicate(timeout=30)
    assert setup.returncode == 1
    assert said == "setup: error: interrupted; the same command starts again\n"
    again = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python, SLOW="nothing")
    assert "is incomplete; creating it again" in again.stdout
    assert "setup: ready" in again.stdout


def test_packages_on_other_paths_do_not_count_as_installed(checkout: Path) -> None:
    said = FAKE_PYTHON.replace(
        "esac", '    *"pip install"*) echo "$PYTHONPATH$PIP_TARGET" ;;\nesac'
    )
    python = str(script(checkout / "bin" / "some-python", said))
    done = shell(checkout, "setup.sh", EXTRA="cpu", PYTHON=python, PYTHONPATH="/x", PIP_TARGET="/x")
    assert done.returncode == 0, done.stderr
    assert "/x" not in (checkout / ".venv/setup.log").read_text()


def would_train(
    tmp_path: Path, gpus: int, **env: str
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Run run_qwen_gsm8k.sh from tmp_path; the process and the arguments that the program would
    get."""
    root = tmp_path / "checkout"
    script(root / "shell" / "run_qwen_gsm8k.sh", (ROOT / "shell" / "run_qwen_gsm8k.sh").read_text())
    script(root / "shell" / "setup.sh", FAKE_SETUP)
    for venv in (".venv", ".venv-gpu"):
        script(root / venv / "bin" / "python", FAKE_VENV_PYTHON)
    env = {"ROOT": str(root), "DEFAULT": "gpu" if gpus else "cpu", "GPUS": str(gpus), **env}
    done = shell(root, "run_qwen_gsm8k.sh", "trainer.output_dir=here", cwd=tmp_path, **env)
    lines = done.stdout.splitlines()
    if done.returncode == 0:
        assert lines[-1] == "trainer.output_dir=here"
        assert str(tmp_path) in lines, "paths are meant from where the user stands"
    return done, [line for line in lines if "=" in line and not line.startswith("run_qwen")]


@pytest.mark.parametrize(
    ("gpus", "env", "config", "notice"),
    [
        (0, {}, "gsm8k_tiny_cpu", "no GPU here"),
        (1, {}, "qwen_gsm8k_fsdp", "found 1 GPU: generation and training share it"),
        (
            1,
            {"ONE_GPU": "colocated"},
            "qwen_gsm8k_fsdp",
            "generates and trains one after the other",
        ),
        (1, {"BACKEND": "megatron"}, "qwen_gsm8k_megatron", "share it"),
        (4, {"EXTRA": "cpu"}, "gsm8k_tiny_cpu", "EXTRA=cpu: training a tiny model"),
        (2, {}, "qwen_gsm8k_fsdp", "setup for gpu"),
    ],
)
def test_run_script_chooses_the_config(
    tmp_path: Path, gpus: int, env: dict, config: str, notice: str
) -> None:
    done, args = would_train(tmp_path, gpus, **env)
    assert done.returncode == 0
    assert notice in done.stdout, done.stderr
    assert args[0] == f"config={tmp_path}/checkout/config/{config}.yaml"
    assert Path(ROOT, "config", f"{config}.yaml").exists()


def test_run_script_divides_the_gpus(tmp_path: Path) -> None:
    assert "placement.pools={rollout: [2], actor: [3]}" in would_train(tmp_path, 5)[1]
    assert (
        "placement.pools={rollout: [1], actor: [4]}"
        in would_train(tmp_path, 5, N_ROLLOUT_GPUS="1")[1]
    )
    for gpus, pools in (
        (3, "rollout: [1], actor: [2]"),
        (5, "rollout: [3], actor: [2]"),
        (8, "rollout: [4], actor: [4]"),
    ):
        args = would_train(tmp_path, gpus, BACKEND="megatron")[1]
        assert f"placement.pools={{{pools}}}" in args
        assert args[0].endswith("qwen_gsm8k_megatron.yaml")
    tiny = would_train(tmp_path, 0, BACKEND="megatron")[1]
    assert "actor.tensor_parallel_size=2" in tiny
    assert "model.path=tiny:qwen3" in tiny
    for env, part in (
        ({"N_ROLLOUT_GPUS": "2", "BACKEND": "megatron"}, "trains on pairs of GPUs, and 3 are left"),
        ({"BACKEND": "deepspeed"}, "BACKEND=deepspeed: must be fsdp or megatron"),
    ):
        done, _ = would_train(tmp_path, 5, **env)
        assert done.returncode == 2
        assert part in done.stderr
    for env, part in (
        ({"N_ROLLOUT_GPUS": "5"}, "must be 1 to 4"),
        ({"EXTRA": "gpu", "GPUS": "0"}, "found no GPU"),
        ({"GPUS": "1", "N_ROLLOUT_GPUS": "1"}, "there is one GPU, which both share"),
        ({"ONE_GPU": "mine"}, "ONE_GPU=mine: must be shared or colocated"),
    ):
        done, _ = would_train(tmp_path, 5, **env)
        assert done.returncode == 2
        assert part in done.stderr


def arguments_are_valid(args: list[str], num_gpus: int) -> Config:
    """The config of these arguments with a tiny model and tiny data, after validation."""
    config = Path(args[0].removeprefix("config=")).name
    tiny = ["model.path=tiny:qwen3", "data.train_files=generator:word_problems", "data.val_files="]
    cfg = load_config([f"config={ROOT}/config/{config}", *args[1:], *tiny, "trainer.test_freq=-1"])
    validate(cfg, num_gpus)
    return cfg


@pytest.mark.parametrize(
    ("memory", "env", "saving"),
    [
        ("81559", {}, []),
        ("24564", {}, ["activation_checkpointing", "log_prob_chunk", "optimizer_offload"]),
        ("49140", {}, ["activation_checkpointing", "log_prob_chunk"]),
        ("49140", {"ONE_GPU": "colocated"}, []),
        ("24564", {"GPUS": "2"}, ["activation_checkpointing", "log_prob_chunk"]),
        ("[N/A]", {}, []),
    ],
)
def test_run_script_saves_memory_on_small_gpus(
    tmp_path: Path, memory: str, env: dict[str, str], saving: list[str]
) -> None:
    nvidia_smi = tmp_path / "checkout" / "bin" / "nvidia-smi"
    script(nvidia_smi, f"#!/bin/sh\necho 98304\necho '{memory}'\n")
    args = would_train(tmp_path, 1, **env)[1]
    names = [arg.partition("=")[0].removeprefix("actor.") for arg in args if "actor." in arg]
    assert [name for name in names if not name.startswith("placement")] == saving
    arguments_are_valid(args, int(env.get("GPUS", "1")))


def test_run_script_shares_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = arguments_are_valid(would_train(tmp_path, 1)[1], 1)
    assert cfg.placement.pools == {"rollout": [0.5], "actor": [0.5]}
    assert cfg.pipeline.staleness == 1
    cfg = arguments_are_valid(would_train(tmp_path, 1, ONE_GPU="colocated")[1], 1)
    assert cfg.placement.pools == {"all": [1]}
    assert cfg.pipeline.staleness == 0
    for gpus in (1, 2):
        args = would_train(tmp_path, gpus, BACKEND="megatron")[1]
        assert args[-2:] == ["actor.sequence_parallel=false", "trainer.output_dir=here"]
        monkeypatch.setattr(packages, "is_installed", lambda name: True)
        assert arguments_are_valid(args, gpus).actor.tensor_parallel_size == 1


@pytest.mark.parametrize(
    "data", ["a.jsonl", "a.jsonl,b.jsonl", "a.jsonl, b.parquet", "nowhere.jsonl", "table"]
)
def test_run_script_evaluates_on_no_training_file(tmp_path: Path, data: str) -> None:
    for name in ("a.jsonl", "b.jsonl", "table"):
        (tmp_path / name).touch()
    args = would_train(tmp_path, 0, DATA=data, MODEL="some/model")[1]
    assert args[1:] == [
        "model.path=some/model",
        f"data.train_files={data}",
        "data.val_files=",
        "trainer.test_freq=-1",
        "trainer.output_dir=here",
    ]


@pytest.mark.parametrize(
    "data", ["/nowhere", "./nowhere", "../nowhere", "data/no/where", "nowhere/"]
)
def test_run_script_says_that_a_folder_is_missing(tmp_path: Path, data: str) -> None:
    done, _ = would_train(tmp_path, 0, DATA=data)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert f"DATA={data}: no such folder or file" in done.stderr


def test_run_script_takes_folders_and_hub_ids(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    args = would_train(tmp_path, 0, DATA="folder")[1]
    assert "data.train_files=folder/gsm8k_train.jsonl" in args
    assert "data.val_files=folder/gsm8k_test.jsonl" in args
    for data in ("openai/gsm8k", "openai/gsm8k:main", "generator:word_problems"):
        args = would_train(tmp_path, 0, DATA=data)[1]
        assert f"data.train_files={data}" in args
        assert f"data.val_files={data}" in args
