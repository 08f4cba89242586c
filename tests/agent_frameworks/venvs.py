"""A venv for each framework, built once and then found in the cache.

    python -m tests.agent_frameworks.venvs NAME ...     builds some, and says where they are

None of these packages is a dependency of this project. Their requirements are in `requirements/`;
a change of one makes another venv.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
FRAMEWORKS = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
INSTALL_S = 600.0  # for one of the tries
TRIES = 3
NO_INDEX = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ProxyError",
    "ReadTimeoutError",
    "ConnectionResetError",
    "RemoteDisconnected",
    "IncompleteRead",
    "HTTP error 5",
    "--no-index",
    "PIP_NO_INDEX",
)
"""What pip prints where it reaches no package index, or one that fails. Any other failure is a
fault of ours."""


class NoIndex(Exception):
    """No package index can be reached, so that a venv cannot be built."""


def cache_dir() -> Path:
    """Where venvs are kept: $ONE_STEP_OFF_CACHE, else $XDG_CACHE_HOME/one_step_off, as models."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "one_step_off"
    return Path(os.environ.get("ONE_STEP_OFF_CACHE") or default).expanduser() / "agent_venvs"


def venv_of(framework: str) -> Path:
    """The venv of a framework, whether it has been built or not."""
    requirements = (REQUIREMENTS / f"{framework}.txt").read_text()
    text = f"{sys.version_info[:2]} {sys.base_prefix} {requirements}"
    return cache_dir() / f"{framework}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ensure(framework: str) -> str:
    """The interpreter of a framework's venv, which is built where it is missing. Processes that ask
    at once build it once.

    Raises:
        NoIndex: it is missing, and no package index can be reached.
        RuntimeError: pip cannot install the requirements.
    """
    folder = venv_of(framework)
    python = folder / "bin" / "python"
    built = folder / "built"
    if built.exists():
        return str(python)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if the holder dies
        if not built.exists():  # another process may have built it while this one waited
            shutil.rmtree(folder, ignore_errors=True)  # of a builder that was killed or failed
            _build(folder, python, REQUIREMENTS / f"{framework}.txt")
            built.touch()
    return str(python)


def _build(folder: Path, python: Path, requirements: Path) -> None:
    venv.create(folder, symlinks=True)  # without a pip of its own, which takes seconds
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command += ["--retries", "1", "--disable-pip-version-check", "-r", str(requirements)]
    last = ""
    for _ in range(TRIES):
        result = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if result.returncode == 0:
            return
        output = result.stderr + result.stdout
        if not any(sign in output for sign in NO_INDEX):
            raise RuntimeError(f"pip cannot install {requirements.name}: {output[-2000:]}")
        last = output.strip().splitlines()[-1]
    raise NoIndex(f"no package index can be reached for {requirements.name}: {last}")


def megabytes(folder: Path) -> float:
    """What a folder takes on disk."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(path.stat().st_size for path in files) / 2**20


def main() -> None:
    """Build venvs."""
    for framework in sys.argv[1:] or FRAMEWORKS:
        begin = time.monotonic()
        python = ensure(framework)
        seconds = time.monotonic() - begin
        size = megabytes(venv_of(framework))
        print(f"{framework}: {python} ({seconds:.1f} s, {size:.0f} MB)", flush=True)


if __name__ == "__main__":
    main()
