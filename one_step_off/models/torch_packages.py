"""CUDA builds of packages next to a CPU build of torch, which make the import of transformers and
vLLM fail."""

import importlib
import sys
from importlib import metadata

from one_step_off.config.errors import ConfigError

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_torch_companions() -> None:
    """Refuse packages that cannot be imported beside this torch.

    `pip install "one_step_off[cpu]"` may take torchvision, torchaudio and torchcodec from an index
    that only has their CUDA builds. transformers and vLLM find them, import them, and fail with an
    error that does not name the cause.

    Raises:
        ConfigError: some cannot be imported; the message names them and says how to remove them.
    """
    torch_version = metadata.version("torch")
    if not torch_version.endswith("+cpu"):
        return
    broken = [name for name in COMPANIONS if _is_other_build(name) and not _imports(name)]
    if not broken:
        return
    names = ", ".join(f"{name} {metadata.version(name)}" for name in broken)
    raise ConfigError(
        f"{names}: cannot be imported beside torch {torch_version}, "
        "and transformers and vLLM import them; "
        f"remove them: {sys.executable} -m pip uninstall {' '.join(broken)}"
    )


def _is_other_build(package: str) -> bool:
    """Whether an installed package is not a CPU build by its version. Importing is slow, and needed
    only then.
    """
    try:
        return not metadata.version(package).endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (
        Exception
    ):  # RuntimeError of a missing operator, OSError of a missing library, ImportError
        return False
    return True
