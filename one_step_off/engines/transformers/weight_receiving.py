"""The receiver's part of the weight sync, for a model of transformers that is whole in this
process."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from one_step_off.cluster.errors import SyncError
from one_step_off.engines.receiving_worker import ReceivingWorker
from one_step_off.models.checkpoint_layout import CheckpointLayout, saved_tensors
from one_step_off.weight_sync.bound_copies import BoundCopies
from one_step_off.weight_sync.shard_blocks import Block, plain_shards

NAMES_SHOWN = 3

Cell = tuple[str, Block, Tensor]
"""Name of a checkpoint tensor, a block of it, and a view of that block in a message buffer."""


class WholeModelLayout:
    """Where every tensor of the checkpoint lies: all of each, in one worker."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises OtherLayout: as `CheckpointLayout.of_model`."""
        layout = CheckpointLayout.of_model(model)
        tensors = {name: tensor.detach() for name, tensor in saved_tensors(model).items()}
        self.views = dict(layout.views(tensors))
        self.kept = {name: (Block.whole(tuple(v.shape)),) for name, v in self.views.items()}
        parameters = dict(model.named_parameters())
        self.parameter_names = [
            place.name for place in layout.places if place.parameter in parameters
        ]

    def addresses(self) -> tuple[int, ...]:
        """Of the tensors."""
        return tuple(view.data_ptr() for view in self.views.values())

    def bind(self, cells: list[Cell]) -> BoundCopies:
        """Find the places of these cells."""
        return BoundCopies(
            (block.slice_of(self.views[name]), message) for name, block, message in cells
        )

    def missing_names(self, loaded: set[str]) -> list[str]:
        """The parameters that were not loaded."""
        return [name for name in self.parameter_names if name not in loaded]


class WholeModelWorker(ReceivingWorker):
    """The engine's one worker. Its methods are called between two forward passes."""

    def __init__(self, model: PreTrainedModel, kv_cache_bytes: int) -> None:
        """Raises OtherLayout: as `CheckpointLayout.of_model`."""
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
