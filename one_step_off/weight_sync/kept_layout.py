"""`KeptLayout`: which boxes of which checkpoint tensors a vLLM worker keeps, and where they lie in
its parameters.

It is learned once by watching the model's own `load_weights` (load_recording.py). It is proved by
vLLM's own load of an ordinary update: a checksum of every box that was sent must equal that of what
the parameters hold when the load has ended. From then on boxes are copied straight between message
buffers and parameters, with no loader in between.

Refused (`NotInPlace`), so that whole tensors travel and vLLM loads them: parameters that do not
hold the checkpoint's bits as boxes, such as quantized, packed or reordered ones.
"""

from dataclasses import dataclass

import torch

from one_step_off.weight_sync.bucket_plan import ALIGNMENT, checksum
from one_step_off.weight_sync.in_place import NotInPlace
from one_step_off.weight_sync.kept_blocks import Block, KeptBlocks
from one_step_off.weight_sync.load_recording import (
    Copy,
    Destination,
    Loadable,
    Recording,
    TensorShapes,
    any_overlap,
    record_load,
)

Cell = tuple[str, Block, torch.Tensor]
"""Name of a checkpoint tensor, a block of it, and a view of that block in a message buffer."""

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class BoundCells:
    """Cells of a message buffer, and the views of parameters that hold the same numbers.

    `cell_views[i]` and `parameter_views[i]` have the same shape.
    """

    cell_views: list[torch.Tensor]
    parameter_views: list[torch.Tensor]

    @torch.no_grad()
    def write(self) -> None:
        """Copy the message buffer into the parameters."""
        if self.cell_views:
            torch._foreach_copy_(self.parameter_views, self.cell_views)

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parameters into the message buffer."""
        if self.cell_views:
            torch._foreach_copy_(self.cell_views, self.parameter_views)


class KeptLayout:
    """The layout of one worker's parameters. `kept` is what it keeps of every tensor."""

    kept: KeptBlocks

    def __init__(self, recording: Recording, shapes: TensorShapes) -> None:
        """Use `learn`."""
        self.shapes = shapes
        self.copies: dict[str, list[Copy]] = {name: [] for name in shapes}
        for copy in recording.copies:
            self.copies[copy.tensor].append(copy)
        self.kept = {}
        for name, copies in self.copies.items():
            self.kept[name] = _disjoint_blocks(name, copies)
        self.noted: dict[str, list[torch.Tensor]] = {}  # per tensor a checksum of each copy

    @staticmethod
    def learn(model: torch.nn.Module, shapes: TensorShapes) -> "KeptLayout":
        """Watch one load, which changes nothing and takes no memory.

        Args:
            model: a vLLM model, while no update of it is under way.
            shapes: of every tensor that the senders send.

        Raises:
            NotInPlace: the parameters are not made of boxes of the tensors.
        """
        recording = record_load(model, shapes)
        for loadable in recording.loadables:
            _check_as_loaded(loadable)
        _check_complete(recording)
        return KeptLayout(recording, shapes)

    def bind(self, cells: list[Cell]) -> BoundCells:
        """Where the cells lie in the parameters.

        Args:
            cells: each lies inside what is kept. The views have the cells' shapes and the dtypes of
                the wire.

        Raises:
            NotInPlace: a cell reaches beyond what is kept.
        """
        bound = BoundCells([], [])
        for name, block, view in cells:
            self._check_kept(name, block)
            for copy in self.copies[name]:
                part = copy.source.intersect(block)
                if part is not None:
                    bound.cell_views.append(part.slice_of(view, block.start).squeeze())
                    bound.parameter_views.append(_parameter_view(copy, part))
        return bound

    @torch.no_grad()
    def note_loaded(self, tensors: NamedTensors) -> None:
        """Remember a checksum of each kept box.

        Args:
            tensors: whole, as they are given to `load_weights`.
        """
        for name, tensor in tensors:
            self.noted[name] = [
                _checksum(copy.source.slice_of(tensor)) for copy in self.copies[name]
            ]

    @torch.no_grad()
    def prove(self) -> None:
        """After a load of all tensors, and all that follows it: compare what the parameters hold
        with what was noted.

        Raises:
            NotInPlace: a box differs, or was not loaded.
        """
        noted, self.noted = self.noted, {}
        expected = []
        found = []
        owners = []
        for name, copies in self.copies.items():
            if len(noted.get(name, ())) != len(copies):
                raise NotInPlace(f"{name} was not loaded in the update that should prove it")
            wire_dtype = getattr(torch, self.shapes[name][0])
            for copy, sent in zip(copies, noted[name], strict=True):
                expected.append(sent)
                found.append(_checksum(_parameter_view(copy, copy.source).to(wire_dtype)))
                owners.append(copy)
        if not owners:
            return
        different = (torch.stack(expected) != torch.stack(found)).any(dim=1).nonzero()
        if len(different):
            copy = owners[int(different[0])]
            raise NotInPlace(
                f"{copy.destination.full_name} does not hold the bytes of {copy.tensor}"
            )

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


def _parameter(owner: Destination | Loadable) -> torch.Tensor:
    """As the model computes with it."""
    return owner.layer._parameters[owner.name].data


def _parameter_view(copy: Copy, part: Block) -> torch.Tensor:
    """The numbers of `part` of the tensor, inside the parameter; without dimensions of size one."""
    return _part_of_destination(copy, part).slice_of(_parameter(copy.destination)).squeeze()


def _part_of_destination(copy: Copy, part: Block) -> Block:
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


def _check_as_loaded(loadable: Loadable) -> None:
    """Raises NotInPlace: after loading, the model computes with something else than this
    parameter."""
    parameter = _parameter(loadable)
    form = loadable.form
    same = (parameter.shape, parameter.stride(), parameter.dtype) == (
        form.shape,
        form.stride(),
        form.dtype,
    )
    if not same:
        raise NotInPlace(f"{loadable.full_name} is packed or quantized after loading")
    kernel = getattr(loadable.layer, "cpu_linear", None)
    if getattr(kernel, "__closure__", None):
        raise NotInPlace(f"{loadable.layer_name} is packed for its CPU kernel")


def _check_complete(recording: Recording) -> None:
    """Raises NotInPlace: numbers of a parameter come from nowhere, or from two places.

    A tied head is complete with the embedding whose memory it shares.
    """
    written: dict[tuple[torch.nn.Module, str], list[Block]] = {}
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
            complete_addresses.add(_parameter(loadable).data_ptr())
        else:
            incomplete.append(loadable)
    for loadable in incomplete:
        if _parameter(loadable).data_ptr() not in complete_addresses:
            raise NotInPlace(f"not all of {loadable.full_name} is loaded")


def _checksum(box: torch.Tensor) -> torch.Tensor:
    """Two int64 words over the bytes of a box, in the order of its numbers."""
    flat = box.contiguous().view(-1).view(torch.uint8)
    padding = -len(flat) % ALIGNMENT
    if padding:
        flat = torch.nn.functional.pad(flat, (0, padding))
    return checksum(flat)
