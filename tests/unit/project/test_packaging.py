"""What a wheel holds, and whether the tested versions fit what setup.cfg asks for."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(extra: str) -> list[Requirement]:
    """What the package and its extras for one device ask for."""
    options = setup_cfg()
    sections = options["options.extras_require"]
    lines = options["options"]["install_requires"] + sections[extra] + sections["dev"]
    lines += sections["megatron"]
    if extra == "gpu":
        lines += sections["transformer_engine"]
    stripped = (line.strip() for line in lines.splitlines())
    return [Requirement(line) for line in stripped if line and not line.startswith("#")]


def constraints(extra: str) -> dict[str, Requirement]:
    """Package -> its line for this Python, of constraints/EXTRA.txt."""
    lines = (ROOT / f"constraints/{extra}.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(p.name): p for p in pins if not p.marker or p.marker.evaluate()}


def version_of(pin: Requirement) -> str:
    """The exact version that a line names."""
    (version,) = [part.version for part in pin.specifier if part.operator == "=="]
    return version


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_every_requirement_has_a_tested_version_in_its_range(extra: str) -> None:
    pins = constraints(extra)
    for requirement in requirements(extra):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin, f"constraints/{extra}.txt has no {requirement.name}"
        version = version_of(pin)
        assert requirement.specifier.contains(version, prereleases=True), (
            f"constraints/{extra}.txt: {requirement.name}=={version} is not in {requirement}"
        )


def test_the_versions_in_the_setup_script_are_those_of_the_constraints() -> None:
    script = (ROOT / "shell/setup.sh").read_text()
    for extra in ("cpu", "gpu"):
        versions = {name: version_of(pin) for name, pin in constraints(extra).items()}
        assert f"torch_version={versions['torch'].partition('+')[0]}\n" in script
        assert f"megatron_version={versions['megatron-core']}\n" in script
    versions = {name: version_of(pin) for name, pin in constraints("gpu").items()}
    halves = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
    assert len({versions[name] for name in halves}) == 1


def test_the_gpu_versions_are_those_of_one_cuda() -> None:
    """A compiler of a newer CUDA than the runtime of torch cannot compile with its headers, and a
    user's own sources may offer torch's CPU build as the same version.
    """
    pins = constraints("gpu")
    assert not pins["torch"].specifier.contains("2.13.0+cpu")
    assert pins["torch"].specifier.contains("2.13.0")
    cuda = version_of(pins["cuda-toolkit"]).rsplit(".", 2)[0]
    for name in ("nvcc", "crt", "cccl", "nvrtc", "runtime", "cupti"):
        assert version_of(pins[f"nvidia-cuda-{name}"]).startswith(f"{cuda}."), name
    assert version_of(pins["nvidia-nvvm"]).startswith(f"{cuda}.")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("extra", "version"),
    [
        # Continuous integration begins with a set-up, which resolves those of one Python.
        pytest.param("cpu", "3.11"),
        pytest.param("cpu", "3.12"),
        pytest.param("cpu", "3.13", marks=pytest.mark.ci),
        *(pytest.param("gpu", v, marks=pytest.mark.ci) for v in ("3.11", "3.12", "3.13")),
    ],
)
def test_pip_resolves_the_constraints(extra: str, version: str) -> None:
    """As the pip of a user without any configuration. Needs the network, as the set-up itself."""
    python = sys.executable
    if version != f"{sys.version_info.major}.{sys.version_info.minor}":
        python = f"python{version}"
        if not shutil.which(python) or subprocess.run([python, "--version"]).returncode:
            pytest.skip(f"there is no {python}")
    command = ["bash", str(ROOT / "shell/resolve_constraints.sh"), "--check", extra, python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    if done.returncode == 75:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tracked files, so that no build folder is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    names = ["setup.cfg", "pyproject.toml", "README.md", "LICENSE", "one_step_off", "agent_loop"]
    for name in [*names, "config"]:
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy)], check=True, timeout=60)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--quiet", "--wheel-dir", str(out), str(copy)]
    subprocess.run(command, check=True, timeout=120, stdin=subprocess.DEVNULL)
    (path,) = out.glob("one_step_off-*.whl")
    return path


def test_a_wheel_holds_the_packages_the_configs_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        commands = archive.read(entry_points).decode()
    for path in (ROOT / "config").glob("*.yaml"):
        assert f"one_step_off/shipped_configs/{path.name}" in names
    for package in ("one_step_off", "agent_loop"):
        for path in (ROOT / package).rglob("*.py"):
            assert str(path.relative_to(ROOT)) in names
    assert {"one_step_off/config/other_keys.yaml", "one_step_off/monitoring/report.html"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert "one-step-off = one_step_off.main_ppo:console_script" in commands


def test_the_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); from one_step_off import main_ppo; "
    script += "assert sys.path[0] in main_ppo.__file__; sys.exit(main_ppo.main(sys.argv[1:]))"
    # -P and -I: neither the working directory nor PYTHONPATH leads back to the checkout.
    command = [sys.executable, "-I", "-c", script, str(tmp_path / "installed")]
    done = subprocess.run(
        [*command, "config=gsm8k_tiny_cpu", "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "path: tiny:qwen2" in done.stdout
