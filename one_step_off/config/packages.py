"""Which Python packages are installed, found without importing them."""

import importlib.util
import sys


def is_installed(package: str) -> bool:
    """Whether a package can be imported.

    A mere folder of that name, such as the wandb/ that W&B creates, does not count.
    """
    module = sys.modules.get(package)
    if module is not None:
        has_origin = getattr(module, "origin", None) is not None
        return has_origin or getattr(module, "__file__", None) is not None
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the parent package is there
        return False
    return spec is not None and spec.origin is not None
