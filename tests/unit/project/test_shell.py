"""The shell scripts: their syntax, and what they give the program, with stand-ins for Slurm, Ray
and the program.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from one_step_off.config import packages
from one_step_off.config.loading import load_config
from one_step_off.runtime.validation import validate

ROOT = Path(__file__).parents[3]
PROGRAM = "-m one_step_off.main_ppo"


@pytest.mark.parametrize("script", sorted((ROOT / "shell").glob("*.sh")), ids=lambda p: p.name)
def test_syntax(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script.read_text()


def tool(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python and Ray write down how they were called."""
    for name in ("shell", "config", "constraints", "one_step_off"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    log = f'echo "$(basename "$0") $* [RAY_ADDRESS=${{RAY_ADDRESS:-}}]" >>{tmp_path}/log'
    sleep = shutil.which("sleep")  # the scripts' own sleep is cut short below
    # "-" is the wait for the cluster: long enough here for all of Ray's stand-ins to have written
    # their line.
    tool(
        tmp_path / ".venv-gpu/bin/python",
        f"{log}; [[ $1 != - ]] || {{ cat >/dev/null; {sleep} 1; }}; exit $((${{FAIL:-0}}))",
    )
    secret = f'echo "${{RAY_AUTH_MODE:-}} ${{RAY_AUTH_TOKEN:-}}" >>{tmp_path}/tokens'
    tool(tmp_path / ".venv-gpu/bin/ray", f"{log}; {secret}; exec {sleep} 60")
    tool(tmp_path / "shell/setup.sh", "true")
    return tmp_path


def run(
    checkout: Path, script: str, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess, list[str]]:
    """The finished script, and the calls that it made."""
    names = ("PATH", "HOME")
    env = {name: os.environ[name] for name in names} | environment
    done = subprocess.run(
        ["bash", f"shell/{script}", *arguments],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    log = checkout / "log"
    return done, log.read_text().splitlines() if log.exists() else []


def slurm(checkout: Path, nodes: int = 2, gpus: str = "8") -> dict[str, str]:
    """The environment of a job."""
    tool(checkout / "bin/sleep", "true")
    tool(checkout / "bin/scontrol", f"for i in $(seq {nodes}); do echo node$i; done")
    tool(
        checkout / "bin/srun",
        f'echo "srun $* [RAY_ADDRESS=${{RAY_ADDRESS:-}}]" >>{checkout}/log\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'if [[ $1 == hostname ]]; then echo "10.0.0.1 fe80::1"; else exec "$@"; fi',
    )
    return {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_GPUS_ON_NODE": gpus,
    }


def test_slurm_starts_ray_everywhere_and_trains(checkout: Path) -> None:
    done, calls = run(checkout, "slurm_qwen_gsm8k.sh", "trainer.total_steps=3", **slurm(checkout))
    assert done.returncode == 0, done.stderr
    pools = "placement.pools={rollout: [8], actor: [8]}"
    program = f"python {PROGRAM} config=config/qwen_gsm8k_fsdp.yaml {pools} trainer.total_steps=3"
    assert calls[1] == f"{program} --dry-run [RAY_ADDRESS=10.0.0.1:6379]", (
        "checked before anything starts"
    )
    assert calls[-1] == f"{program} [RAY_ADDRESS=10.0.0.1:6379]"
    ray = sorted(call for call in calls if call.startswith("ray "))
    common = "--num-gpus=8 --disable-usage-stats --block [RAY_ADDRESS=]"
    assert ray == [
        f"ray start --address=10.0.0.1:6379 {common}",
        f"ray start --head --node-ip-address=10.0.0.1 --port=6379 {common}",
    ]
    first, second = (checkout / "tokens").read_text().splitlines()
    assert first == second and re.fullmatch("token [0-9a-f]{64}", first), (
        "the job's own, the same everywhere"
    )
    assert [call for call in calls if "--nodelist=node2 --gpus-per-node=8" in call]
    waited = [call for call in calls if call.startswith("python - 16 180")]
    assert len(waited) == 1


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_slurm_hands_its_signals_to_the_run_and_waits_for_its_checkpoint(
    checkout: Path, number: int
) -> None:
    script = (ROOT / "shell" / "slurm_qwen_gsm8k.sh").read_text()
    assert "\n#SBATCH --signal=B:USR1@180\n" in script, "to the script alone, and not to Ray"
    environment = slurm(checkout)
    tool(
        checkout / ".venv-gpu/bin/python",
        f"""[[ $* == *main_ppo* && $* != *--dry-run* ]] || exit 0
        trap 'echo USR1 >{checkout}/received; {shutil.which("sleep")} 1; exit 130' USR1
        trap 'echo TERM >{checkout}/received; {shutil.which("sleep")} 1; exit 130' TERM
        touch {checkout}/training
        for i in $(seq 600); do {shutil.which("sleep")} 0.1; done""",
    )
    env = {name: os.environ[name] for name in ("PATH", "HOME")} | environment
    job = subprocess.Popen(["bash", "shell/slurm_qwen_gsm8k.sh"], cwd=checkout, env=env)
    deadline = time.monotonic() + 60
    while not (checkout / "training").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait(60) == 130, "the run's exit code, after its end"
    assert (checkout / "received").read_text() == signal.Signals(number).name[3:] + "\n"


@pytest.mark.parametrize(
    ("nodes", "gpus", "pools"),
    [
        (1, "8(S:0-1)", "{rollout: [4], actor: [4]}"),
        (3, "h100:4", "{rollout: [4], actor: [4, 4]}"),
        (4, "2", "{rollout: [2, 2], actor: [2, 2]}"),
    ],
)
def test_slurm_pools(checkout: Path, nodes: int, gpus: str, pools: str) -> None:
    done, calls = run(checkout, "slurm_qwen_gsm8k.sh", "--dry-run", **slurm(checkout, nodes, gpus))
    assert done.returncode == 0 and f"placement.pools={pools} --dry-run" in calls[-1], done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "not inside a Slurm job"),
        ({"SLURM_GPUS_ON_NODE": ""}, "no GPUs"),
        ({"SLURM_SUBMIT_DIR": "/"}, "not a checkout"),
        ({"FAIL": "2"}, ""),
    ],
)
def test_slurm_faults_end_it_before_ray_starts(
    checkout: Path, change: dict[str, str], said: str
) -> None:
    done, calls = run(checkout, "slurm_qwen_gsm8k.sh", **slurm(checkout) | change)
    assert done.returncode == 2 and said in done.stderr
    assert not [call for call in calls if call.startswith("ray ")]


def test_dapo_script(checkout: Path) -> None:
    done, calls = run(checkout, "run_dapo_7b_4x12.sh")
    assert done.returncode == 2 and "RAY_ADDRESS is not set" in done.stderr and not calls
    given = {"RAY_ADDRESS": "h:1", "DATA": "setup.cfg", "VAL": "a/b", "MODEL": "c/d"}
    done, calls = run(checkout, "run_dapo_7b_4x12.sh", "--dry-run", **given)
    assert done.returncode == 0, done.stderr
    assert calls == [
        f"python -P {PROGRAM} config={checkout}/config/dapo_7b.yaml model.path=c/d "
        "data.train_files=setup.cfg "
        "data.val_files=a/b trainer.test_freq=10 --dry-run [RAY_ADDRESS=h:1]"
    ]


def make_venvs(checkout: Path, gpus: str) -> None:
    """Both, on a machine with so many GPUs. What they run is written into the log."""
    shutil.copy(ROOT / "shell/setup.sh", checkout / "shell/real_setup.sh")
    tool(
        checkout / "shell/setup.sh",
        f'[[ "${{1:-}}" != --print-venv ]] || exec bash {checkout}/shell/real_setup.sh "$@"',
    )
    for name in (".venv", ".venv-gpu"):
        script = (
            f'if [[ " $* " == *" -c "* ]]; then echo {gpus}; '
            f'else echo "{name} $*" >>{checkout}/log; fi'
        )
        tool(checkout / name / "bin/python", script)


@pytest.mark.parametrize(
    ("gpus", "environment", "venv", "pools"),
    [
        ("0", {}, ".venv", "{rollout: [1], actor: [1], critic: [1]}"),
        ("3", {}, ".venv", "{rollout: [1], actor: [1], critic: [1]}"),
        ("4", {}, ".venv-gpu", "{rollout: [1], actor: [2], critic: [1]}"),
        ("8", {}, ".venv-gpu", "{rollout: [2], actor: [4], critic: [2]}"),
        ("8", {"EXTRA": "cpu"}, ".venv", "{rollout: [1], actor: [1], critic: [1]}"),
        ("2", {"RAY_ADDRESS": "h:1"}, ".venv-gpu", None),
    ],
)
def test_split_placement_chooses_by_the_gpus(
    checkout: Path, gpus: str, environment: dict[str, str], venv: str, pools: str | None
) -> None:
    make_venvs(checkout, gpus)
    done, calls = run(checkout, "run_split_placement.sh", "trainer.seed=1", **environment)
    assert done.returncode == 0, done.stderr
    (call,) = calls
    config = "ppo_gae" if venv == ".venv" else "split_placement"
    assert call.startswith(
        f"{venv} -P {PROGRAM} config={checkout}/config/{config}.yaml"
    ) and call.endswith("trainer.seed=1")
    assert (f"placement.pools={pools}" in call) if pools else "placement.pools" not in call


def test_split_placement_says_how_many_gpus_it_needs(checkout: Path) -> None:
    tool(checkout / "shell/setup.sh", f"[[ $# == 0 ]] || echo {checkout}/.venv-gpu")
    tool(checkout / ".venv-gpu/bin/python", "echo 2")
    done, _ = run(checkout, "run_split_placement.sh", EXTRA="gpu")
    assert done.returncode == 2 and "found 2 GPUs, needs 4" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        ("0", {}, ".venv -P -m one_step_off.main_sft config=X/config/sft_tiny_cpu.yaml"),
        (
            "4",
            {"MODEL": "a/b"},
            ".venv-gpu -P -m one_step_off.main_sft config=X/config/sft_qwen_gsm8k.yaml "
            "placement.pools={actor: [4]} model.path=a/b",
        ),
        (
            "1",
            {"EXTRA": "cpu", "DATA": "shell"},
            ".venv -P -m one_step_off.main_sft config=X/config/sft_tiny_cpu.yaml "
            "data.train_files=shell/gsm8k_train.jsonl data.val_files=shell/gsm8k_test.jsonl",
        ),
    ],
)
def test_supervised_runs_use_all_gpus(
    checkout: Path, gpus: str, environment: dict[str, str], expected: str
) -> None:
    make_venvs(checkout, gpus)
    done, calls = run(checkout, "run_sft_gsm8k.sh", "trainer.seed=1", **environment)
    assert done.returncode == 0, done.stderr
    assert calls == [f"{expected} trainer.seed=1".replace("X/", f"{checkout}/")]
    done, _ = run(checkout, "run_sft_gsm8k.sh", DATA="no/such")
    assert done.returncode == 2 and "DATA=no/such: no such folder" in done.stderr


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_a_venv_lasts_with_and_without_megatron(checkout: Path, extra: str) -> None:
    """Megatron is installed once it is asked for and missing, and nothing is for a start that does
    not want it.
    """
    shutil.copy(ROOT / "shell/setup.sh", checkout / "shell/setup.sh")
    shutil.copy(ROOT / "shell/torchvision_on_cpu.py", checkout / "shell")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    venv = checkout / (".venv" if extra == "cpu" else ".venv-gpu")
    tool(
        venv / "bin/python",
        f'[[ "$*" != *"pip install"* ]] || echo "$*" >>{checkout}/log\n'
        f'[[ "$*" != *"install"*megatron-core* ]] || touch {checkout}/installed\n'
        f'[[ "$*" != *purelib* ]] || echo {venv}\n'
        f'[[ "$*" != *"megatron.core"* || -e {checkout}/installed ]]',
    )
    for megatron, installs in (("", True), ("", False), ("1", True), ("1", False), ("", False)):
        (checkout / "log").unlink(missing_ok=True)
        done, calls = run(checkout, "setup.sh", EXTRA=extra, MEGATRON=megatron)
        assert done.returncode == 0, done.stderr
        assert bool(calls) == installs, (megatron, calls)
        assert any("megatron-core" in call for call in calls) == (megatron == "1" and installs)
        hook = (venv / "torchvision_on_cpu.pth").exists()
        assert hook == (extra == "cpu")
        engine = any("transformer-engine" in call for call in calls)
        assert engine == (megatron == "1" and installs and extra == "gpu")


@pytest.mark.parametrize(
    ("model", "more"), [("", ""), ("m", " model.path=m agent.loop_kwargs={tool: {taught: false}}")]
)
def test_tool_agent(checkout: Path, model: str, more: str) -> None:
    """On the CPU whatever there is; only the built-in model may know its tools without being
    told.
    """
    tool(
        checkout / "shell/setup.sh",
        f'[[ $EXTRA == cpu && $# == 0 ]] || echo "{checkout}/.venv-$EXTRA"',
    )
    shutil.copytree(checkout / ".venv-gpu", checkout / ".venv-cpu")
    done, (call,) = run(checkout, "run_tool_agent.sh", "trainer.total_steps=2", MODEL=model)
    assert done.returncode == 0, done.stderr
    assert f"{PROGRAM} config={checkout}/config/tool_agent.yaml{more} trainer.total_steps=2" in call


def test_shapes(checkout: Path) -> None:
    """On the CPU whatever there is."""
    tool(
        checkout / "shell/setup.sh",
        f'[[ $EXTRA == cpu && $# == 0 ]] || echo "{checkout}/.venv-$EXTRA"',
    )
    shutil.copytree(checkout / ".venv-gpu", checkout / ".venv-cpu")
    done, (call,) = run(checkout, "run_shapes.sh", "trainer.total_steps=2")
    assert done.returncode == 0, done.stderr
    assert f"{PROGRAM} config={checkout}/config/shapes_tiny_cpu.yaml trainer.total_steps=2" in call


@pytest.mark.parametrize("given", ["", "/my/python"])
def test_external_agent(checkout: Path, given: str) -> None:
    """The SDK goes into a venv of its own, once, unless an interpreter is given."""
    tool(checkout / "shell/setup.sh", f'[[ $# == 0 ]] || echo "{checkout}/.venv-$EXTRA"')
    log = f'echo "$* [$PYTHONPATH]" >>{checkout}/log'
    copy = 'mkdir -p "$4/bin"; cp "$0" "$4/bin/python"'
    tool(checkout / ".venv-cpu/bin/python", f"{log}; [[ $2 != venv ]] || {{ {copy}; }}")
    keys = f"config={checkout}/config/external_agent.yaml agent.python="
    agents = f"{checkout}/.venv-agents"
    installs = [f"-m venv --clear {agents} [mine]", "-m pip install --quiet"]
    for number in (1, 2):
        arguments = ("run_external_agent.sh", "trainer.total_steps=2")
        done, calls = run(checkout, *arguments, AGENT_PYTHON=given, PYTHONPATH="mine")
        assert done.returncode == 0, done.stderr
        program = f"-P {PROGRAM} {keys}{given or f'{agents}/bin/python'} trainer.total_steps=2"
        assert calls[-1] == f"{program} [{checkout}/examples/agents:mine]"
        first_calls = [] if given else installs
        assert len(calls) == number + len(first_calls)
        for call, start in zip(calls, first_calls, strict=False):
            assert call.startswith(start)
        assert given or calls[1].endswith(" openai-agents>=0.24,<0.25 [mine]")


def test_bench(checkout: Path) -> None:
    """On the CPU unless asked otherwise, with a folder for the results, and the checkout on the
    path.
    """
    tool(checkout / "shell/setup.sh", f'[[ $# == 0 ]] || echo "{checkout}/.venv-$EXTRA"')
    (checkout / "benchmarks").mkdir()
    (checkout / "benchmarks/throughput").mkdir()
    for name in ("throughput/__main__", "weight_sync"):
        (checkout / f"benchmarks/{name}.py").touch()
    for name in ("cpu", "gpu"):
        tool(
            checkout / f".venv-{name}/bin/python",
            f'echo "{name} $* [$PYTHONPATH]" >>{checkout}/log',
        )
    known = {"PYTHONPATH": "mine"}
    for given, environment, wanted in (
        ((), {}, "cpu -P -m benchmarks.throughput --out outputs/bench_throughput"),
        (
            ("--out", "a b", "--steps", "9"),
            {},
            "cpu -P -m benchmarks.throughput --out a b --steps 9",
        ),
        (("--out=x",), {"EXTRA": "gpu"}, "gpu -P -m benchmarks.throughput --out=x"),
        (
            (),
            {"BENCHMARK": "weight_sync"},
            "cpu -P -m benchmarks.weight_sync --out outputs/bench_weight_sync",
        ),
    ):
        (checkout / "log").unlink(missing_ok=True)
        done, (call,) = run(checkout, "bench.sh", *given, **known, **environment)
        assert done.returncode == 0, done.stderr
        assert call == f"{wanted} [{checkout}:mine]"
    (checkout / "log").unlink()
    for name in ("nothing", "../setup"):
        done, calls = run(checkout, "bench.sh", BENCHMARK=name)
        assert (
            done.returncode == 2 and f"BENCHMARK={name}: there is no" in done.stderr and not calls
        )


def test_megatron_on_several_nodes(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, calls = run(checkout, "run_megatron_nodes.sh", SIZE="30b")
    assert (
        done.returncode == 2
        and "RAY_ADDRESS is not set" in done.stderr
        and "four nodes" in done.stderr
    )
    done, calls = run(checkout, "run_megatron_nodes.sh", SIZE="8b", RAY_ADDRESS="h:1")
    assert done.returncode == 2 and "SIZE=8b: must be 7b or 30b" in done.stderr and not calls
    for size, keys in (
        ("7b", "actor.tensor_parallel_size=4"),
        ("30b", "actor.expert_parallel_size=8"),
    ):
        (checkout / "log").unlink(missing_ok=True)
        done, (call,) = run(
            checkout, "run_megatron_nodes.sh", "--dry-run", SIZE=size, RAY_ADDRESS="h:1"
        )
        assert done.returncode == 0, done.stderr
        given = re.findall(
            r"[a-z_.]+=(?:\{.*?\}|\S+)", call.split("main_ppo ")[1].split(" --dry-run")[0]
        )
        monkeypatch.setattr(packages, "is_installed", lambda package: True)
        monkeypatch.setenv("RAY_ADDRESS", "h:1")
        validate(load_config(given), 0)
        assert (
            keys in call
            and f"megatron_{size} --dry-run" in call
            and "qwen_gsm8k_megatron.yaml" in call
        )
