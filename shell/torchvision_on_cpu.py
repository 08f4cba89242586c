"""Lets torchvision be imported beside the CPU build of torch, where pip had only its CUDA build.

shell/setup.sh copies this module into the venv, with a .pth file that imports it in every process.
transformers and vLLM import torchvision wherever it is installed, and read images with it. Its
Python code runs anywhere, but its import fails where the operators of its CUDA library are unknown.
None of them is called here, so declaring two is enough.
"""

import importlib.metadata
import sys

OPERATORS = ("nms", "qnms")
"""The operators that torchvision 0.28 gives a shape function to while it is imported."""


class _DeclaresOperators:
    """Declares the operators just before torchvision is imported: torch itself is slow to
    import."""

    library = None

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(_DeclaresOperators)
            _declare()


def _declare():
    try:
        is_cpu_build = importlib.metadata.version("torchvision").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return  # it was uninstalled, and this hook stayed
    import torch

    if torch.version.cuda or torch.version.hip or is_cpu_build:
        return  # its own library declares them
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DeclaresOperators.library = library  # freeing it would undo the declarations


sys.meta_path.insert(0, _DeclaresOperators)
