"""`CheckpointLayout`: where every tensor of a Hugging Face checkpoint lies in the model in memory.

transformers joins, renames or turns some tensors when it loads them: the experts of a layer are
`experts.N.up_proj.weight` in the files, and one tensor in the model. Trainers and engines stream
the tensors as the files have them. So transformers' own inverse of its loading is run, on tensors
without memory, and what comes out says where each tensor of the files lies. No model family is
named here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class OtherLayout(RuntimeError):
    """A tensor of the checkpoint is not a regular part of one of the model's parameters."""


@dataclass(frozen=True)
class OwnedBlock:
    """What a rank that holds some rows of a parameter has of one tensor of the checkpoint.

    Attributes:
        dim, start, stop: the block of the checkpoint's tensor, cut along `dim`.
        offset: of its first number in the rank's rows, in numbers.
        shape, stride: of the block, as a view of the rank's rows.
    """

    dim: int
    start: int
    stop: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view_of(self, rows: Tensor) -> Tensor:
        """The block, as a view of the rank's rows of the parameter, which are contiguous."""
        return rows.as_strided(self.shape, self.stride, rows.storage_offset() + self.offset)


@dataclass(frozen=True)
class LivePart:
    """A block of one tensor of the checkpoint in a rank's rows of a parameter, which changes with
    them.

    A view would not do: FSDP2 gives a parameter other memory, as in the first pass with
    `param_offload`, and a view would still show the old one.
    """

    parameter: Tensor
    block: OwnedBlock

    def view(self) -> Tensor:
        """The block, as a view of the rows as they are now."""
        rows: Any = self.parameter.detach()
        return self.block.view_of(rows.to_local() if isinstance(rows, DTensor) else rows)


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor of the checkpoint lies.

    Attributes:
        name: in the checkpoint.
        parameter: name of the parameter, or of the saved buffer, that has it in memory.
        parameter_shape: of the whole parameter.
        shape: in the checkpoint.
        offset: of the first number in the contiguous parameter.
        stride: of each dimension of the checkpoint's tensor, in numbers of the parameter.
    """

    name: str
    parameter: str
    parameter_shape: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> "TensorPlace":
        """Of a tensor that is the parameter itself."""
        return TensorPlace(name, name, shape, shape, 0, _strides(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter itself, perhaps by another name."""
        return self.shape == self.parameter_shape and self.stride == _strides(self.shape)

    @property
    def numel(self) -> int:
        """Numbers in all."""
        return math.prod(self.shape)

    def view_of(self, parameter: Tensor) -> Tensor:
        """The tensor, as a view of the whole contiguous parameter."""
        first = parameter.storage_offset() + self.offset
        return parameter.as_strided(self.shape, self.stride, first)

    def block_in(self, first: int, stop: int) -> OwnedBlock | None:
        """What the rows [first, stop) of the parameter hold of this tensor; None: nothing.

        Raises:
            OtherLayout: the rows cut the tensor along no single dimension.
        """
        row_numel = math.prod(self.parameter_shape[1:])
        origin = self.offset // row_numel
        dim = self._cut_dimension(row_numel)
        if dim is None:
            if not first <= origin < stop:
                return None
            begin, end = 0, self.shape[0] if self.shape else 1
            dim = 0
        else:
            rows_apart = self.stride[dim] // row_numel
            begin = max(0, -(-(first - origin) // rows_apart))
            end = min(self.shape[dim], -(-(stop - origin) // rows_apart))
            if begin >= end:
                return None
        shape = list(self.shape)
        offset = self.offset - first * row_numel
        if shape:
            shape[dim] = end - begin
            offset += begin * self.stride[dim]
        return OwnedBlock(dim, begin, end, offset, tuple(shape), self.stride)

    def _cut_dimension(self, row_numel: int) -> int | None:
        """The dimension that walks over the parameter's rows; None: the tensor lies in one row."""
        extents = [(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)]
        walking = [
            dim for dim, extent in enumerate(extents) if extent and self.stride[dim] >= row_numel
        ]
        extent_in_row = sum(extent for dim, extent in enumerate(extents) if dim not in walking)
        is_regular = len(walking) <= 1 and all(self.stride[d] % row_numel == 0 for d in walking)
        if not is_regular or self.offset % row_numel + extent_in_row >= row_numel:
            raise OtherLayout(f"{self.name} cannot be cut where the rows of {self.parameter} are")
        return walking[0] if walking else None


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor of this shape."""
    return torch.empty(shape, device="meta").stride()


class _ClonesAreViews(TorchDispatchMode):
    """A copy is answered by a view of the same numbers, so that the result of a conversion still
    says where it came from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


class CheckpointLayout:
    """Where every tensor of a model's checkpoint lies; each tied tensor once.

    Attributes:
        places: the tensors, in the order of the model's parameters and buffers.
    """

    def __init__(self, places: list[TensorPlace]) -> None:
        self.places = places
        self._by_parameter: dict[str, list[TensorPlace]] = {}
        for place in places:
            self._by_parameter.setdefault(place.parameter, []).append(place)

    @staticmethod
    def of_model(model: PreTrainedModel) -> "CheckpointLayout":
        """The layout of a model as transformers read it, with weights or on the device meta.

        Only `from_pretrained` knows all conversions, such as a prefix that the files have: a model
        of `from_config` has the usual ones of its family.

        Raises:
            OtherLayout: a tensor of the checkpoint is no regular part of one parameter.
        """
        metas = _saved_tensors_on_meta(model)
        # Each has a storage of its own, which the views share.
        owner_of = {meta.untyped_storage()._cdata: name for name, meta in metas.items()}
        with torch.no_grad(), _ClonesAreViews():
            stored = _reverted(model, metas)
        places: dict[str, list[TensorPlace]] = {name: [] for name in metas}
        for name, tensor in stored.items():
            owner = owner_of.get(tensor.untyped_storage()._cdata)
            if owner is None:
                raise OtherLayout(f"{name} is not a regular part of one parameter")
            place = TensorPlace(
                name=name,
                parameter=owner,
                parameter_shape=tuple(metas[owner].shape),
                shape=tuple(tensor.shape),
                offset=tensor.storage_offset(),
                stride=tensor.stride(),
            )
            places[owner].append(place)
        for name, parts in places.items():
            if sum(part.numel for part in parts) != metas[name].numel():
                raise OtherLayout(f"the checkpoint's tensors are not all of {name}")
        return CheckpointLayout([part for parts in places.values() for part in parts])

    def of_parameter(self, name: str) -> list[TensorPlace]:
        """The tensors of the checkpoint that lie in one parameter or saved buffer."""
        return self._by_parameter[name]

    def stored_name(self, parameter: str) -> str:
        """The checkpoint's name of a parameter that it has as it is in memory.

        Raises:
            OtherLayout: the checkpoint has it in parts, or turned.
        """
        places = self.of_parameter(parameter)
        if not places[0].is_whole:
            raise OtherLayout(f"{parameter} is stored in another shape than in training")
        return places[0].name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each tensor of the checkpoint -> its shape."""
        return {place.name: place.shape for place in self.places}

    def check_cuttable(self) -> None:
        """Raises OtherLayout: a rank's rows of a parameter would be no block of a tensor."""
        for place in self.places:
            place.block_in(0, 1)

    def views(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Name and view of each tensor of the checkpoint.

        Args:
            tensors: the whole contiguous parameters and saved buffers, by the model's names.
        """
        for place in self.places:
            yield place.name, place.view_of(tensors[place.parameter])


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters, tied ones once, and the buffers that a checkpoint holds, by name."""
    return {**dict(model.named_parameters()), **saved_buffers(model)}


def saved_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name."""
    saved = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _saved_tensors_on_meta(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in saved_tensors(model).items()
    }


def _reverted(model: PreTrainedModel, metas: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' inverse of its loading. Raises OtherLayout: it computes with the numbers."""
    try:
        return revert_weight_conversion(model, dict(metas))
    except RuntimeError as error:
        raise OtherLayout(f"a conversion of {type(model).__name__} is more than a view") from error
