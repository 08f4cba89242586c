"""The receiver's part of the weight sync, for a model of transformers that is whole in this
process."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from one_step_off.cluster.errors import SyncError
from one_step_off.engines.receiving_worker import ReceivingWorker
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.shard_blocks import Block, plain_shards

NAMES_SHOWN = 3

Cell = tuple[str, Block, Tensor]
"""Name of a checkpoint tensor, a block of it, and a view of that block in a message buffer."""


class OtherLayout(RuntimeError):
    """A tensor of the checkpoint is not a regular part of one of the model's parameters."""


def checkpoint_views(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's parameters and saved buffers as tensors of the checkpoint: name -> a view, in
    the checkpoint's shape, of the memory that the model computes with.

    transformers joins or renames some tensors when it loads them, such as the experts of a layer.
    Its own inverse of that is applied, to the positions of the numbers where it copies them.

    Raises:
        OtherLayout: a tensor is no regular part of one parameter.
    """
    with torch.no_grad():
        state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        views: dict[str, Tensor] = {}
        for names in _by_layer(state).values():
            part = {name: state[name] for name in names}
            views |= _views_of_part(model, part)
    return views


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """The names up to the number of a layer -> all of that layer; "" -> those of no layer. A
    conversion joins tensors of one layer at most, and its positions need memory."""
    layers: dict[str, list[str]] = {}
    for name in names:
        match = re.match(r".*?\.\d+\.", name)
        layers.setdefault(match.group() if match else "", []).append(name)
    return layers


def _views_of_part(model: PreTrainedModel, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `checkpoint_views`, of these tensors of the model."""
    own = {id(tensor) for tensor in part.values()}
    stored = revert_weight_conversion(model, dict(part))
    views = {name: tensor for name, tensor in stored.items() if id(tensor) in own}
    unchanged = {id(tensor) for tensor in views.values()}
    joined = {name: tensor for name, tensor in part.items() if id(tensor) not in unchanged}
    return views | _views_by_position(model, joined)


def _views_by_position(model: PreTrainedModel, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """As `checkpoint_views`, of tensors that the conversion copies."""
    positions: dict[str, Tensor] = {}
    first = 0
    tensor_at: list[tuple[int, Tensor]] = []
    for name, tensor in part.items():
        count = tensor.numel()
        positions[name] = torch.arange(first, first + count).view(tensor.shape)
        tensor_at.append((first, tensor))
        first += count
    stored = revert_weight_conversion(model, positions)
    if sum(places.numel() for places in stored.values()) != first:
        raise OtherLayout(f"the checkpoint's tensors of {min(part)} are not all of its parameters")
    return {name: _view_at(name, places, tensor_at) for name, places in stored.items()}


def _view_at(name: str, places: Tensor, tensor_at: list[tuple[int, Tensor]]) -> Tensor:
    """The numbers at these positions, int64 of any shape, as a view of the one tensor that has
    them."""
    origin = int(places.flatten()[0])
    first, tensor = max((at for at in tensor_at if at[0] <= origin), key=lambda at: at[0])
    strides = []
    expected = torch.tensor(origin)
    for dim, size in enumerate(places.shape):
        stride = int(places.select(dim, 1).flatten()[0]) - origin if size > 1 else 0
        strides.append(stride)
        steps = torch.arange(size) * stride
        expected = expected + steps.view(-1, *[1] * (places.ndim - dim - 1))
    is_inside = int(places.max()) < first + tensor.numel() and min(strides, default=0) >= 0
    if not is_inside or not tensor.is_contiguous() or not torch.equal(places, expected):
        raise OtherLayout(f"{name} is not a regular part of one parameter")
    return tensor.as_strided(places.shape, strides, tensor.storage_offset() + origin - first)


class WholeModelLayout:
    """Where every tensor of the checkpoint lies: all of each, in one worker."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises OtherLayout: as `checkpoint_views`."""
        self.views = checkpoint_views(model)
        self.kept = {name: (Block.whole(tuple(v.shape)),) for name, v in self.views.items()}
        storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.parameter_names = []
        for name, view in self.views.items():
            if view.untyped_storage().data_ptr() in storages:
                self.parameter_names.append(name)

    def addresses(self) -> tuple[int, ...]:
        """Of the tensors."""
        return tuple(view.data_ptr() for view in self.views.values())

    def bind(self, cells: list[Cell]) -> BoundCopies:
        """Find the places of these cells."""
        return BoundCopies(
            (block.slice_of(self.views[name]), message) for name, block, message in cells
        )

    def missing_names(self, loaded: set[str]) -> list[str]:
        """The parameters that were not loaded. A tied one is loaded with the other of its name."""
        addresses = {self.views[name].data_ptr() for name in loaded}
        return [
            name for name in self.parameter_names if self.views[name].data_ptr() not in addresses
        ]


class WholeModelWorker(ReceivingWorker):
    """The engine's one worker. Its methods are called between two forward passes."""

    def __init__(self, model: PreTrainedModel, kv_cache_bytes: int) -> None:
        """Raises OtherLayout: as `checkpoint_views`."""
        self.layout = WholeModelLayout(model)
        self.device = model.device
        self._kv_cache_bytes = kv_cache_bytes

    def kv_cache_bytes(self) -> int:
        """The most that the cache of one call takes."""
        return self._kv_cache_bytes

    def learn_shards(self, shapes: dict[str, Any], expects_deltas: bool) -> dict[str, Any]:
        """What this worker keeps of every tensor: all of it.

        Args:
            shapes: name -> [name of its dtype, its shape], of all that are sent.
            expects_deltas: makes no difference here.

        Returns:
            "kept": as `shards_from_plain` reads it; "reason": "".

        Raises:
            SyncError: the model has no such tensor.
        """
        for name, (_, shape) in shapes.items():
            self._check_known(name, tuple(shape))
        return {
            "kept": plain_shards({name: self.layout.kept[name] for name in shapes}),
            "reason": "",
        }

    def connect_sync(self, info: dict[str, Any]) -> None:
        """Join the senders' groups of a new epoch; see `ReceivingWorker.join_groups`."""
        self.join_groups(info, self.device)

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """Receive one whole update into the model. Returns seconds per phase, and bytes.

        Args:
            version: of the weights.
            sharded_only: as `WeightReceiver.receive`.

        Raises:
            SyncError: as `WeightReceiver.receive`, or parameters were not sent.
        """
        receiver = self.receiver
        if receiver is None:
            raise SyncError("the transformers engine is in no group; it must connect first")
        receiver.layout = self.layout
        loaded: set[str] = set()

        def load(tensors: list[tuple[str, Tensor]]) -> None:
            for name, tensor in tensors:
                self._check_known(name, tuple(tensor.shape))
                self.layout.views[name].copy_(tensor)
                loaded.add(name)

        report = receiver.receive(load, version, sharded_only)
        if not sharded_only:
            self._check_all_loaded(receiver.name, loaded)
        return report | {"in_place": float(sharded_only), "layout_proved": 1.0}

    def _check_known(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises SyncError: the model has no tensor of this name and shape."""
        view = self.layout.views.get(name)
        if view is None:
            raise SyncError(f"the transformers engine's model has no tensor {name}")
        if tuple(view.shape) != shape:
            raise SyncError(
                f"the transformers engine's {name} has the shape {tuple(view.shape)}, "
                f"and that of the trainer {shape}"
            )

    def _check_all_loaded(self, name: str, loaded: set[str]) -> None:
        missing = self.layout.missing_names(loaded)
        if missing:
            raise SyncError(
                f"{name}: {len(missing)} parameters were not loaded, "
                f"such as {missing[:NAMES_SHOWN]}"
            )
