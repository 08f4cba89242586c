"""What `load_weights` of a vLLM model would copy where, found without any weight.

Only the model's own loaders know which rows, columns and experts of a checkpoint tensor this worker
keeps, and where they lie in its fused parameters. So one call of `load_weights` is watched. The
model stands in the form in which checkpoints load, as vLLM's layerwise reload restores it: its
parameters are on the meta device, with their loaders. The tensors to load are on the meta device
too, so that neither side takes memory, and nothing is written.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_params_buffers,
)

from one_step_off.weight_sync.shard_blocks import Block

TensorShapes = dict[str, tuple[str, tuple[int, ...]]]
"""Name of a checkpoint tensor -> the name of its dtype on the wire, and its shape."""


class NotInPlace(RuntimeError):
    """What a worker keeps cannot be written into its model without vLLM's loader. The model is
    unchanged, unless the method says otherwise."""


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter, and the layer that owns it."""

    layer: torch.nn.Module
    layer_name: str
    name: str
    """Of the parameter in its layer."""

    @property
    def full_name(self) -> str:
        """Of the parameter in the model."""
        return f"{self.layer_name}.{self.name}" if self.layer_name else self.name


@dataclass(frozen=True)
class Destination(OwnedParameter):
    """A part of one parameter in its loadable form."""

    block: Block
    """The box of the parameter that is written."""

    @property
    def parameter(self) -> tuple[torch.nn.Module, str]:
        """What tells parameters apart."""
        return self.layer, self.name


@dataclass(frozen=True)
class Copy:
    """One box of a checkpoint tensor, and the box of a parameter into which it is copied.

    Both hold the same numbers in the same order, but the parameter's may have more dimensions of
    size one, or fewer.
    """

    tensor: str
    source: Block
    destination: Destination


@dataclass(frozen=True)
class Fill:
    """A box of a parameter that loading fills with one number, as padding of the vocabulary."""

    number: float
    destination: Destination


@dataclass(frozen=True)
class Loadable(OwnedParameter):
    """A parameter in its loadable form."""

    form: torch.Tensor
    """On the meta device, or the parameter itself where vLLM never moves it (biases)."""


@dataclass
class Recording:
    """What one load of all tensors does."""

    copies: list[Copy]
    fills: list[Fill]
    loadables: list[Loadable]
    """All parameters of the model."""


@torch.no_grad()
def record_load(model: torch.nn.Module, shapes: TensorShapes) -> Recording:
    """Watch one `load_weights` of tensors with these shapes. The model stays unchanged.

    Args:
        model: a vLLM model, while no update of it is under way.
        shapes: of all tensors of the checkpoint.

    Raises:
        NotInPlace: something else is written than boxes of the tensors, or the model does not load.
    """
    with _loadable_form(model) as loadables:
        recorder = _Recorder(loadables)
        try:
            with recorder:
                model.load_weights(recorder.sources(shapes))
        except NotInPlace:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise NotInPlace(f"the model does not load as it is: {cause}") from error
    return Recording(recorder.copies, recorder.fills, loadables)


def block_of_view(view: torch.Tensor, shape: tuple[int, ...]) -> Block | None:
    """The box that a view takes in a contiguous tensor of this shape, from the view's strides and
    its offset in their storage; None: the view is no box, or its dimensions are in another
    order."""
    strides = _contiguous_strides(shape)
    start = _coordinates(view.storage_offset(), shape, strides)
    sizes = [1] * len(shape)
    dim = -1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        dim = next(
            (i for i in range(dim + 1, len(shape)) if strides[i] == stride and shape[i] > 1), -1
        )
        if dim < 0:
            return None
        sizes[dim] = size
    stop = tuple(first + size for first, size in zip(start, sizes, strict=True))
    if any(end > limit for end, limit in zip(stop, shape, strict=True)):
        return None
    return Block(start, stop)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(shape)]


def _coordinates(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Of the number at `offset` in a contiguous tensor."""
    coordinates = []
    for size, stride in zip(shape, strides, strict=True):
        coordinates.append(offset // stride if size > 1 else 0)
        offset -= coordinates[-1] * stride
    return tuple(coordinates)


@contextmanager
def _loadable_form(model: torch.nn.Module) -> Iterator[list[Loadable]]:
    """Put all layers into the form in which checkpoints load, and back.

    As `initialize_layerwise_reload` does it, but without its wrappers around the loaders: nothing
    is loaded here.
    """
    if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
        raise NotInPlace("an update is under way, or has failed")
    changed = []
    try:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            changed.append(layer)
            restore_layer_on_meta(layer, info)
            _unwrap_loaders(layer)
        yield _loadables(model)
    finally:
        for layer in changed:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()


def _unwrap_loaders(layer: torch.nn.Module) -> None:
    """Take off what earlier reloads have left around the loaders: it would load nothing now."""
    parameters: Iterator[Any] = layer.parameters(recurse=False)
    for parameter in parameters:
        loader = getattr(parameter, "weight_loader", None)
        original = _get_original_loader(parameter)
        if loader is not None and loader is not original:
            parameter.weight_loader = original


def _loadables(model: torch.nn.Module) -> list[Loadable]:
    loadables = []
    for layer_name, layer in model.named_modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None and parameter.numel():
                loadables.append(Loadable(layer, layer_name, name, parameter.data))
    return loadables


def _storage(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage; on the meta device there is no address."""
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    """Holds back all writes to loadable parameters, and records them."""

    def __init__(self, loadables: list[Loadable]) -> None:
        super().__init__()
        self.loadables = {_storage(loadable.form): loadable for loadable in loadables}
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}  # by storage; keeps them alive
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []

    def sources(self, shapes: TensorShapes) -> list[tuple[str, torch.Tensor]]:
        """Tensors without memory, in place of those of a checkpoint."""
        named = []
        for name, (dtype, shape) in shapes.items():
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.tensors[_storage(tensor)] = (name, tensor)
            named.append((name, tensor))
        return named

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and self._only_moves(args[0], kwargs):
            return args[0]
        written = _written_tensors(func, args, kwargs)
        targets = [tensor for tensor in written if _storage(tensor) in self.loadables]
        if not targets:
            return func(*args, **kwargs)
        target = targets[0]
        loadable = self.loadables[_storage(target)]
        if func is torch.ops.aten.copy_.default and _storage(args[1]) in self.tensors:
            self._record_copy(loadable, target, args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            number = args[1] if len(args) > 1 else 0
            self.fills.append(Fill(number, self._destination(loadable, target)))
        else:
            raise NotInPlace(
                f"loading {loadable.full_name} writes something else than a part of what was sent "
                f"({func})"
            )
        return target

    def _only_moves(self, tensor: torch.Tensor, kwargs: dict) -> bool:
        """Whether a tensor that was sent is brought to another device, which a tensor without
        memory cannot be."""
        is_source = tensor.is_meta and _storage(tensor) in self.tensors
        return is_source and kwargs.get("dtype") in (None, tensor.dtype)

    def _record_copy(self, loadable: Loadable, target: torch.Tensor, source: torch.Tensor) -> None:
        """Raises NotInPlace: the parameter cannot hold what was sent, or it is no box."""
        name, tensor = self.tensors[_storage(source)]
        block = block_of_view(source, tuple(tensor.shape))
        if block is None or source.dtype != tensor.dtype:
            raise NotInPlace(f"{loadable.full_name} holds something else than a box of {name}")
        if target.shape != source.shape:
            raise NotInPlace(f"{loadable.full_name} holds {name} in another shape")
        if torch.promote_types(target.dtype, source.dtype) != target.dtype:
            raise NotInPlace(
                f"{loadable.full_name} holds {target.dtype}, and {source.dtype} is sent"
            )
        self.copies.append(Copy(name, block, self._destination(loadable, target)))

    def _destination(self, loadable: Loadable, target: torch.Tensor) -> Destination:
        """Raises NotInPlace: the view is no box of its parameter."""
        form = loadable.form
        block = block_of_view(target, tuple(form.shape)) if form.is_contiguous() else None
        if block is None or target.dtype != form.dtype:
            raise NotInPlace(f"a part of {loadable.full_name} that is no box of it is loaded")
        return Destination(loadable.layer, loadable.layer_name, loadable.name, block)


def any_overlap(blocks: list[Block]) -> bool:
    """Whether any two of these boxes of one tensor share a number."""
    ordered = sorted(blocks, key=lambda block: block.start)
    for i, one in enumerate(ordered):
        for other in itertools.islice(ordered, i + 1, None):
            if one.stop and other.start[0] >= one.stop[0]:
                break
            if one.intersect(other):
                return True
    return False


def _written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation of torch writes, by its schema."""
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    values |= kwargs
    written_values = []
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written_values.append(values.get(argument.name))
    leaves = tree_leaves(written_values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]
