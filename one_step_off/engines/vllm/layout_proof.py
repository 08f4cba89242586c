"""`LoadProof`: whether a model holds what was loaded where its learned layout says.

vLLM's own load of an ordinary update is compared with the layout, bit by bit:

- a parameter that is used as loaded: a checksum of every box;
- a linear layer that is packed for its CPU kernel: some columns of every box. They are read out
  through the kernel: its product with a column of the identity is a column of its weight;
- packed experts: packing a plain copy of what was loaded must give the same bytes.
"""

import torch

from one_step_off.engines.vllm.load_recording import Copy, NotInPlace, TensorShapes
from one_step_off.engines.vllm.packed_layers import PackedLayer
from one_step_off.engines.vllm.parameter_views import parameter_view
from one_step_off.weight_sync.bucket_plan import ALIGNMENT, checksum
from one_step_off.weight_sync.shard_blocks import Block


class LoadProof:
    """Notes what is loaded, then looks for it in the model."""

    def __init__(
        self,
        shapes: TensorShapes,
        copies: dict[str, list[Copy]],
        packed: dict[tuple[torch.nn.Module, str], PackedLayer],
    ) -> None:
        """`copies`: of each tensor. `packed`: the layer of each packed weight."""
        self.shapes = shapes
        self.copies = copies
        self.packed = packed
        self.noted: dict[str, list[torch.Tensor]] = {}  # one of each copy

    @torch.no_grad()
    def note(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Remember what is kept of these whole tensors."""
        for name, tensor in tensors:
            self.noted[name] = [
                self._note_box(copy, copy.source.slice_of(tensor)) for copy in self.copies[name]
            ]

    @torch.no_grad()
    def check(self) -> None:
        """Look for what was noted, and forget it.

        Raises:
            NotInPlace: the model holds something else; names the first parameter and tensor.
        """
        noted, self.noted = self.noted, {}
        try:
            for name, copies in self.copies.items():
                if name not in noted:
                    raise NotInPlace(f"{name} was not loaded in the update that should prove it")
                for copy, expected in zip(copies, noted[name], strict=True):
                    if not torch.equal(self._find_box(copy), expected):
                        raise NotInPlace(
                            f"{copy.destination.full_name} does not hold the bytes of {name}"
                        )
            for layer in dict.fromkeys(self.packed.values()):
                if layer.holds_experts:
                    _check_experts(layer)
        finally:
            for layer in self.packed.values():
                layer.restart()

    def _note_box(self, copy: Copy, box: torch.Tensor) -> torch.Tensor:
        destination = copy.destination
        packed_layer = self.packed.get(destination.parameter)
        if packed_layer is None:
            return _checksum(box)
        if packed_layer.keep or packed_layer.holds_experts:
            packed_layer.fill(destination.name, destination.block, box)
        if packed_layer.holds_experts:
            return torch.zeros(0)
        return box.reshape(destination.block.shape)[:, _columns(destination.block.shape[1])].clone()

    def _find_box(self, copy: Copy) -> torch.Tensor:
        destination = copy.destination
        packed_layer = self.packed.get(destination.parameter)
        if packed_layer is None:
            wire_dtype = getattr(torch, self.shapes[copy.tensor][0])
            return _checksum(parameter_view(copy, copy.source).to(wire_dtype))
        if packed_layer.holds_experts:
            return torch.zeros(0)
        width = packed_layer.forms[destination.name].shape[1]
        return _read_columns(packed_layer.layer, width, destination.block)


def _columns(width: int) -> list[int]:
    """The columns of a box that are compared: the first, the last and the middle one."""
    return sorted({0, width // 2, width - 1})


def _read_columns(layer: torch.nn.Module, width: int, block: Block) -> torch.Tensor:
    """Columns of a box of a packed weight with `width` columns, read through its kernel."""
    first = block.start[1]
    columns = torch.tensor([first + column for column in _columns(block.shape[1])])
    weight = kernel_weight(layer)
    one_hot = torch.nn.functional.one_hot(columns, width).to(weight.dtype)
    return layer.cpu_linear(one_hot, weight, None)[:, block.start[0] : block.stop[0]].t()


def kernel_weight(layer: torch.nn.Module) -> torch.Tensor:
    """What a packed linear layer has left of its weight: the dtype."""
    return layer._parameters["weight"].data


def _check_experts(layer: PackedLayer) -> None:
    """Raises NotInPlace: packing what was noted gives other bytes than vLLM's load."""
    for name, packed in layer.packed_from_plain().items():
        if not torch.equal(packed, layer.layer._parameters[name].data):
            raise NotInPlace(f"{layer.layer_name}.{name} does not hold the bytes of its experts")


def _checksum(box: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a box, in the order of its numbers."""
    flat = box.contiguous().view(-1).view(torch.uint8)
    padding = -len(flat) % ALIGNMENT
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return checksum(flat)
