"""A torchvision that does not import beside torch is named, with the command that removes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from one_step_off.config.errors import ConfigError
from one_step_off.models.model_checks import check_torch_companions


def install(folder: Path, package: str, version: str, code: str) -> None:
    """A package as pip would leave it."""
    (folder / f"{package}.py").write_text(code)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes before the installed packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("torchvision", "torchaudio", "torchcodec"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_package_that_cannot_be_imported_is_named(packages: Path) -> None:
    install(packages, "torch", "2.13.0+cpu", "")
    install(packages, "torchvision", "0.28.0", "raise RuntimeError('no operator nms')")
    install(packages, "torchaudio", "2.11.0", "")
    with pytest.raises(ConfigError, match=r"^torchvision 0\.28\.0: cannot be imported") as error:
        check_torch_companions()
    assert re.search(r"-m pip uninstall torchvision$", str(error.value))


@pytest.mark.parametrize(
    ("torch_version", "version"), [("2.13.0+cpu", "0.28.0+cpu"), ("2.13.0", "0.28.0")]
)
def test_packages_of_the_same_build_are_not_even_imported(
    packages: Path, torch_version: str, version: str
) -> None:
    install(packages, "torch", torch_version, "")
    install(packages, "torchvision", version, "raise RuntimeError('imported')")
    check_torch_companions()
    assert "torchvision" not in sys.modules


TORCHVISION = """
import torch.library

for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda *args: None)
"""


@pytest.mark.parametrize(("has_hook", "code"), [(True, 0), (False, 1)])
def test_the_venvs_hook_lets_the_cuda_build_of_torchvision_be_imported(
    tmp_path: Path, has_hook: bool, code: int
) -> None:
    """In a process that imports nothing of this program, as some of vLLM's."""
    if torch.version.cuda:
        pytest.skip("its own library is there")
    install(tmp_path, "torchvision", "0.28.0", TORCHVISION)
    hook = Path(__file__).parents[3] / "shell/torchvision_on_cpu.py"
    shutil.copy(hook, tmp_path)
    # The venv has the hook too.
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Declares' not in repr(f)]; "
    )
    program += "sys.modules.pop('torchvision_on_cpu', None); "
    program += "import torchvision_on_cpu; " if has_hook else ""
    program += " assert 'torch' not in sys.modules; import torchvision, torchvision"
    path = {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert has_hook or "torchvision::nms does not exist" in result.stderr
