"""The tensors of a Hugging Face checkpoint in safetensors files, read block by block.

A rank that reads only the rows it keeps needs memory for those alone. Reading the whole model into
one process, in float32, takes more memory than a host of a large model has.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import safetensors
import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class StoredWeights:
    """The tensors of one checkpoint, by name."""

    def __init__(self, folder: str, file_of: dict[str, str]) -> None:
        """`file_of`: name of each tensor -> its file in `folder`. Opens all files, which are mapped
        and not read."""
        self.folder = folder
        self.file_of = file_of
        self.files: dict[str, Any] = {}
        for file in sorted(set(file_of.values())):
            path = os.path.join(folder, file)
            self.files[file] = safetensors.safe_open(path, framework="pt", device="cpu")

    @staticmethod
    def find(folder: str) -> "StoredWeights | None":
        """The weights in a folder; None: it has no safetensors files."""
        index = os.path.join(folder, INDEX_FILE)
        if os.path.isfile(index):
            with open(index) as file:
                return StoredWeights(folder, json.load(file)["weight_map"])
        single = os.path.join(folder, SINGLE_FILE)
        if not os.path.isfile(single):
            return None
        with safetensors.safe_open(single, framework="pt", device="cpu") as file:
            names = list(file.keys())
        return StoredWeights(folder, dict.fromkeys(names, SINGLE_FILE))

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether there is a tensor of this name and shape."""
        return name in self.file_of and self._slice(name).get_shape() == list(shape)

    def covers(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether every tensor of these names is stored, in its shape."""
        return all(self.has(name, shape) for name, shape in shapes.items())

    def read(self, name: str, starts: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A block of a tensor, in the checkpoint's dtype.

        Args:
            name: of the tensor.
            starts: where the block begins, along each dimension.
            shape: of the block.
        """
        if not shape:
            return self.files[self.file_of[name]].get_tensor(name)
        block = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
        return self._slice(name)[block]

    def read_whole(self, name: str) -> torch.Tensor:
        """A whole tensor, in the checkpoint's dtype."""
        return self.files[self.file_of[name]].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self.files[self.file_of[name]].get_slice(name)
