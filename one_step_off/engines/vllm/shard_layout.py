"""`ShardLayout`: which boxes of which checkpoint tensors a vLLM worker keeps, and where they lie in
its parameters.

It is learned once by watching the model's own `load_weights` (load_recording.py). It is proved by
vLLM's own load of an ordinary update (`LoadProof`). From then on boxes are copied straight
between message buffers and parameters, with no loader in between. Layers that are packed for CPU
kernels are written through packed_layers.py.

Refused (`NotInPlace`), so that whole tensors travel and vLLM loads them: parameters that do not
hold the checkpoint's bits as boxes, such as quantized or reordered ones.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer

from one_step_off.engines.vllm.load_recording import (
    Copy,
    Destination,
    Loadable,
    NotInPlace,
    Recording,
    TensorShapes,
    any_overlap,
    record_load,
)
from one_step_off.engines.vllm.packed_layers import (
    PackedCopy,
    PackedLayer,
    PlainMemory,
    is_packed,
    keeps_its_weight,
    packed_weights,
)
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.bucket_plan import ALIGNMENT, checksum
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks

Cell = tuple[str, Block, torch.Tensor]
"""Name of a checkpoint tensor, a block of it, and a view of that block in a message buffer."""

Parameter = tuple[torch.nn.Module, str]
"""A layer, and the name of a parameter in it."""


@dataclass(frozen=True)
class PackedCell:
    """A part of a cell, and the box of a packed weight that it belongs to."""

    layer: PackedLayer
    weight: str
    block: Block
    cell_view: torch.Tensor


@dataclass(frozen=True)
class BoundCells:
    """Cells of a message buffer, and the places that hold the same numbers.

    `cell_views[i]` and `parameter_views[i]` have the same shape. `copied_numbers`: how many of
    these numbers belong to a weight that has a packed copy.
    """

    cell_views: list[torch.Tensor] = field(default_factory=list)
    parameter_views: list[torch.Tensor] = field(default_factory=list)
    packed_cells: list[PackedCell] = field(default_factory=list)
    copied_numbers: Counter[PackedCopy] = field(default_factory=Counter)

    @cached_property
    def copies(self) -> BoundCopies:
        """From the cells into the parameters."""
        return BoundCopies(zip(self.parameter_views, self.cell_views, strict=True))

    @torch.no_grad()
    def write(self) -> None:
        """Copy the message buffer into the parameters. A packed layer, or a packed copy, is packed
        when all of it has been written.

        Raises:
            SyncError: it cannot be packed.
        """
        self.copies.write()
        for packed_copy, count in self.copied_numbers.items():
            packed_copy.note_written(count)
        for cell in self.packed_cells:
            cell.layer.write(cell.weight, cell.block, cell.cell_view)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters into the message buffer.

        Raises:
            NotInPlace: a layer is packed, and the layout was not told to keep plain copies.
        """
        self.copies.read()
        for cell in self.packed_cells:
            numbers = cell.layer.read(cell.weight, cell.block)
            cell.cell_view.copy_(numbers.view(cell.cell_view.shape))


class ShardLayout:
    """The layout of one worker's parameters. `kept` is what it keeps of every tensor.

    A sync writes all cells once, between `start` and `finish`.
    """

    kept: ShardBlocks

    def __init__(
        self, model: torch.nn.Module, shapes: TensorShapes, recording: Recording, keep_plain: bool
    ) -> None:
        """Use `learn`."""
        self.model = model
        self.copies: dict[str, list[Copy]] = {name: [] for name in shapes}
        for copy in recording.copies:
            self.copies[copy.tensor].append(copy)
        self.kept = {name: _disjoint_blocks(name, copies) for name, copies in self.copies.items()}
        destinations = (copy.destination.parameter for copy in recording.copies)
        self.parameters = list(dict.fromkeys(destinations))
        memory = PlainMemory()
        self.packed: dict[Parameter, PackedLayer] = {}
        for weights in packed_weights(recording.loadables):
            packed_layer = PackedLayer(weights, recording, memory, keep_plain)
            for weight in weights:
                self.packed[weight.layer, weight.name] = packed_layer
        self.packed_layers = list(dict.fromkeys(self.packed.values()))
        self.packed_copies = self._packed_copies_of_model(recording.copies)
        self.proof = LoadProof(shapes, self.copies, self.packed)

    @staticmethod
    @torch.no_grad()
    def learn(
        model: torch.nn.Module, shapes: TensorShapes, keep_plain: bool = False
    ) -> "ShardLayout":
        """Watch one load, which changes nothing and takes no memory.

        Args:
            model: a vLLM model, while no update of it is under way.
            shapes: of every tensor that the senders send.
            keep_plain: keep a plain copy of every packed weight from the first load on, so that
                `BoundCells.read` works; it takes as much memory as these weights.

        Raises:
            NotInPlace: the parameters are not made of boxes of the tensors.
        """
        recording = record_load(model, shapes)
        layout = ShardLayout(model, shapes, recording, keep_plain)
        for loadable in recording.loadables:
            if (loadable.layer, loadable.name) not in layout.packed:
                check_as_loaded(loadable)
        _check_complete(recording)
        return layout

    def bind(self, cells: list[Cell]) -> BoundCells:
        """Where the cells lie in the parameters.

        Args:
            cells: each lies inside what is kept. The views have the cells' shapes and the dtypes of
                the wire.

        Raises:
            NotInPlace: a cell reaches beyond what is kept.
        """
        bound = BoundCells()
        for name, block, view in cells:
            self._check_kept(name, block)
            for copy in self.copies[name]:
                part = copy.source.intersect(block)
                if part is not None:
                    self._bind_part(bound, copy, part, part.slice_of(view, block.start))
        return bound

    def addresses(self) -> tuple[int, ...]:
        """Of all parameters. What was bound at others must be bound again."""
        return tuple(layer._parameters[name].data_ptr() for layer, name in self.parameters)

    def start(self) -> None:
        """Before the first cell of a sync is written. Forgets what a failed one has left."""
        for packed_layer in self.packed_layers:
            packed_layer.start()
        for packed_copy in self.packed_copies:
            packed_copy.start()

    @torch.no_grad()
    def finish(self, dtype: torch.dtype) -> None:
        """After the last cell of a sync: renew all that the model derives from its weights.

        Args:
            dtype: the model's, as vLLM gives it to attention layers.

        Raises:
            NotInPlace: only a part of a packed layer was written. The model must not be used.
            SyncError: a layer cannot be packed.
        """
        for packed_layer in self.packed_layers:
            packed_layer.finish()
        for packed_copy in self.packed_copies:
            packed_copy.finish()
        for layer in filter(is_deferred_attention_layer, self.model.modules()):
            layer.process_weights_after_loading(dtype)

    def note_loaded(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Remember what is kept of these tensors, to prove the layout.

        Args:
            tensors: whole, as they are given to `load_weights`.
        """
        self.proof.note(tensors)

    def prove(self) -> None:
        """After a load of all tensors, and all that follows it: compare what the model holds with
        what was noted.

        Raises:
            NotInPlace: a box differs, or was not loaded.
        """
        self.proof.check()

    def _packed_copies_of_model(self, copies: list[Copy]) -> list[PackedCopy]:
        """Of embeddings and heads. A tied head shares the weight of the embedding, into which alone
        a load writes."""
        packed_copies = []
        for layer_name, layer in self.model.named_modules():
            if is_packed(layer) and keeps_its_weight(layer):
                packed_copy = PackedCopy(layer, layer_name)
                for copy in copies:
                    if packed_copy.is_of(kernel_tensor(copy.destination)):
                        packed_copy.numbers_of_load += copy.destination.block.numel
                packed_copies.append(packed_copy)
        return packed_copies

    def _bind_part(
        self, bound: BoundCells, copy: Copy, part: Block, cell_view: torch.Tensor
    ) -> None:
        destination = copy.destination
        packed_layer = self.packed.get(destination.parameter)
        if packed_layer is None:
            bound.cell_views.append(cell_view.squeeze())
            bound.parameter_views.append(parameter_view(copy, part))
            for packed_copy in self.packed_copies:
                if packed_copy.is_of(kernel_tensor(destination)):
                    bound.copied_numbers[packed_copy] += part.numel
        else:
            block = part_of(copy, part)
            bound.packed_cells.append(PackedCell(packed_layer, destination.name, block, cell_view))

    def _check_kept(self, name: str, block: Block) -> None:
        """Raises NotInPlace: not all of this block is kept."""
        kept_numbers = 0
        for kept_block in self.kept.get(name, ()):
            part = kept_block.intersect(block)
            kept_numbers += part.numel if part else 0
        if kept_numbers != block.numel:
            raise NotInPlace(f"{name}: {block} is not kept here")


def _disjoint_blocks(name: str, copies: list[Copy]) -> tuple[Block, ...]:
    """The boxes of one tensor, once each where several parameters hold the same one. Raises
    NotInPlace: two of them overlap."""
    blocks = tuple(dict.fromkeys(copy.source for copy in copies))
    if any_overlap(list(blocks)):
        raise NotInPlace(f"overlapping boxes of {name} are kept")
    return blocks


def check_as_loaded(loadable: Loadable) -> None:
    """Raises NotInPlace: after loading, the model computes with something else than this
    parameter."""
    parameter = kernel_tensor(loadable)
    form = loadable.form
    if (parameter.shape, parameter.stride()) != (form.shape, form.stride()):
        raise NotInPlace(f"{loadable.full_name} is packed or quantized after loading")
    if parameter.dtype != form.dtype:
        raise NotInPlace(f"{loadable.full_name} is {parameter.dtype} after loading")
    if is_packed(loadable.layer) and loadable.name == "weight":
        if not keeps_its_weight(loadable.layer):
            raise NotInPlace(f"{loadable.layer_name} is packed for its CPU kernel")


def _check_complete(recording: Recording) -> None:
    """Raises NotInPlace: numbers of a parameter come from nowhere, or from two places.

    A tied head is complete with the embedding whose memory it shares.
    """
    written: dict[Parameter, list[Block]] = {}
    for destination in (
        *(copy.destination for copy in recording.copies),
        *(fill.destination for fill in recording.fills),
    ):
        written.setdefault(destination.parameter, []).append(destination.block)
    complete_addresses = set()
    incomplete = []
    for loadable in recording.loadables:
        blocks = written.get((loadable.layer, loadable.name), [])
        if any_overlap(blocks):
            raise NotInPlace(f"two parts of {loadable.full_name} overlap")
        if sum(block.numel for block in blocks) == loadable.form.numel():
            complete_addresses.add(kernel_tensor(loadable).data_ptr())
        else:
            incomplete.append(loadable)
    for loadable in incomplete:
        address = kernel_tensor(loadable).data_ptr()
        if not address or address not in complete_addresses:
            raise NotInPlace(f"not all of {loadable.full_name} is loaded")


def kernel_tensor(owner: Destination | Loadable) -> torch.Tensor:
    """The parameter as the model computes with it."""
    return owner.layer._parameters[owner.name].data


def parameter_view(copy: Copy, part: Block) -> torch.Tensor:
    """The numbers of `part` of the tensor, inside the parameter; without dimensions of size one."""
    return part_of(copy, part).slice_of(kernel_tensor(copy.destination)).squeeze()


def part_of(copy: Copy, part: Block) -> Block:
    """The box of the parameter that holds `part` of the box `copy.source`.

    Dimensions of more than one number follow one another in the same order on both sides; the
    parameter may have others of size one.
    """
    block = copy.destination.block
    start = list(block.start)
    stop = list(block.stop)
    wide_dims = iter([dim for dim, size in enumerate(block.shape) if size > 1])
    for dim, size in enumerate(copy.source.shape):
        if size > 1:
            offset = part.start[dim] - copy.source.start[dim]
            target_dim = next(wide_dims)
            start[target_dim] = block.start[target_dim] + offset
            stop[target_dim] = start[target_dim] + part.shape[dim]
    return Block(tuple(start), tuple(stop))


class LoadProof:
    """Whether a model holds what was loaded where its learned layout says: notes what is loaded,
    then looks for it in the model.

    vLLM's own load of an ordinary update is compared with the layout, bit by bit:

    - a parameter that is used as loaded: a checksum of every box;
    - a linear layer that is packed for its CPU kernel: some columns of every box. They are read out
      through the kernel: its product with a column of the identity is a column of its weight;
    - packed experts: packing a plain copy of what was loaded must give the same bytes.
    """

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
            return box_checksum(box)
        if packed_layer.keep or packed_layer.holds_experts:
            packed_layer.fill(destination.name, destination.block, box)
        if packed_layer.holds_experts:
            return torch.zeros(0)
        columns = compared_columns(destination.block.shape[1])
        return box.reshape(destination.block.shape)[:, columns].clone()

    def _find_box(self, copy: Copy) -> torch.Tensor:
        destination = copy.destination
        packed_layer = self.packed.get(destination.parameter)
        if packed_layer is None:
            wire_dtype = getattr(torch, self.shapes[copy.tensor][0])
            return box_checksum(parameter_view(copy, copy.source).to(wire_dtype))
        if packed_layer.holds_experts:
            return torch.zeros(0)
        width = packed_layer.forms[destination.name].shape[1]
        return read_columns(packed_layer.layer, width, destination.block)


def compared_columns(width: int) -> list[int]:
    """The columns of a box that are compared: the first, the last and the middle one."""
    return sorted({0, width // 2, width - 1})


def read_columns(layer: torch.nn.Module, width: int, block: Block) -> torch.Tensor:
    """Columns of a box of a packed weight with `width` columns, read through its kernel."""
    first = block.start[1]
    columns = torch.tensor([first + column for column in compared_columns(block.shape[1])])
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


def box_checksum(box: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a box, in the order of its numbers."""
    flat = box.contiguous().view(-1).view(torch.uint8)
    padding = -len(flat) % ALIGNMENT
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return checksum(flat)
