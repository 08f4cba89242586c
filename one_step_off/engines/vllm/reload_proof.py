"""`ReloadProof`: whether vLLM's layerwise reload has brought what was received into a quantized
model.

A quantized parameter does not hold the checkpoint's bits, so no layout can be proved once and then
written in place: every sync brings whole tensors, and vLLM quantizes them again. What vLLM passes
over stays at the version before, with no more than a warning, and the canary does not see it: one
update changes log-probs by less than the quantization does. So every sync is proved by checksums:

    what was received    = what the layer holds when vLLM begins to quantize it
    what vLLM made of it = what the kernels read after the reload

Parameters that are used as loaded, such as norms and embeddings, are compared with what was
received. So is the copy of a head that is packed for a CPU kernel.
"""

from collections.abc import Callable
from typing import Any

import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.engines.vllm.load_recording import (
    Copy,
    Loadable,
    NotInPlace,
    Recording,
    TensorShapes,
    record_load,
)
from one_step_off.engines.vllm.packed_layers import is_packed, keeps_its_weight
from one_step_off.engines.vllm.shard_layout import (
    box_checksum,
    check_as_loaded,
    compared_columns,
    kernel_weight,
    parameter_view,
    read_columns,
)
from one_step_off.weight_sync.shard_blocks import Block

HOOK = "process_weights_after_loading"
"""vLLM calls this method of a layer's `quant_method` to quantize what the layer holds."""


class ReloadProof:
    """Watches the reloads of one worker's model.

    Attributes:
        loaded_names: of the parameters into which a load writes.
    """

    def __init__(self, model: torch.nn.Module, shapes: TensorShapes, recording: Recording) -> None:
        """Use `learn`."""
        self.model = model
        self.shapes = shapes
        self.copies: dict[str, list[Copy]] = {name: [] for name in shapes}
        for copy in recording.copies:
            self.copies[copy.tensor].append(copy)
        self.loaded_names = {copy.destination.full_name for copy in recording.copies}
        self.numbers_of_layer: dict[torch.nn.Module, list[tuple[str, int]]] = {}
        for name, copies in self.copies.items():
            for number, copy in enumerate(copies):
                numbers = self.numbers_of_layer.setdefault(copy.destination.layer, [])
                numbers.append((name, number))
        self.converted: dict[torch.nn.Module, str] = {}
        for loadable in recording.loadables:
            if _is_used_as_loaded(loadable):
                continue
            if not hasattr(getattr(loadable.layer, "quant_method", None), HOOK):
                raise NotInPlace(f"{loadable.layer_name} has no method that converts it")
            self.converted[loadable.layer] = loadable.layer_name
        self._forget()

    @staticmethod
    @torch.no_grad()
    def learn(model: torch.nn.Module, shapes: TensorShapes) -> "ReloadProof":
        """Watch one load, which changes nothing and takes no memory.

        Args:
            model: a vLLM model, while no update of it is under way.
            shapes: of every tensor that the senders send.

        Raises:
            NotInPlace: something else is loaded than boxes of the tensors, or a parameter gets
                nothing.
        """
        recording = record_load(model, shapes)
        _check_all_loaded(recording)
        return ReloadProof(model, shapes, recording)

    def start(self) -> None:
        """Before a reload: watch the layers that it converts. Forgets what a failed one has
        left."""
        self._forget()
        for layer in self.converted:
            method: Any = layer.quant_method
            convert = getattr(type(method), HOOK).__get__(method)
            setattr(method, HOOK, self._watched(convert))

    @torch.no_grad()
    def note_loaded(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Remember what is kept of these tensors: whole, as they are given to `load_weights`."""
        for name, tensor in tensors:
            self.received[name] = [
                box_checksum(copy.source.slice_of(tensor)) for copy in self.copies[name]
            ]

    @torch.no_grad()
    def check(self) -> None:
        """After a reload: compare, and watch no longer.

        Raises:
            SyncError: the model holds something else; names the first parameter. It must not be
                used.
        """
        try:
            for name, copies in self.copies.items():
                for copy, received in zip(copies, self._received(name), strict=True):
                    if copy.destination.layer not in self.converted:
                        self._compare(copy, received)
            for layer, layer_name in self.converted.items():
                self._check_converted(layer, layer_name)
            self._compare_all()
            self._check_packed_copies()
        finally:
            self._forget()

    def _forget(self) -> None:
        self.received: dict[str, list[torch.Tensor]] = {}  # one checksum of each copy
        self.made: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        self.compared: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for layer in self.converted:
            vars(layer.quant_method).pop(HOOK, None)

    def _watched(self, convert: Callable[[torch.nn.Module], None]) -> Any:
        """The method `convert` of a layer's `quant_method`, between two looks at the layer."""

        @torch.no_grad()
        def watched(layer: torch.nn.Module) -> None:
            self._find_received(layer)
            convert(layer)
            self.made[layer] = _parameter_checksums(layer)

        return watched

    def _find_received(self, layer: torch.nn.Module) -> None:
        """Compare what a layer is about to convert with what was received for it."""
        for name, number in self.numbers_of_layer.get(layer, ()):
            self._compare(self.copies[name][number], self._received(name)[number])

    def _received(self, name: str) -> list[torch.Tensor]:
        """Raises SyncError: a tensor has not come."""
        if name not in self.received and self.copies[name]:
            full_name = self.copies[name][0].destination.full_name
            raise SyncError(f"{full_name} was loaded without {name}, which had not come")
        return self.received.get(name, [])

    def _compare(self, copy: Copy, received: torch.Tensor) -> None:
        wire_dtype = getattr(torch, self.shapes[copy.tensor][0])
        found = box_checksum(parameter_view(copy, copy.source).to(wire_dtype))
        what = f"{copy.destination.full_name} does not hold the bytes of {copy.tensor}"
        self.compared.append((what, received, found))

    def _check_converted(self, layer: torch.nn.Module, layer_name: str) -> None:
        """Raises SyncError: the layer was passed over."""
        if layer not in self.made:
            raise SyncError(
                f"vLLM has not loaded {layer_name} again, so it holds the version before"
            )
        found = _parameter_checksums(layer)
        for name, made in self.made[layer].items():
            what = f"{layer_name}.{name} does not hold what vLLM has made of the new weights"
            self.compared.append((what, made, found.get(name, torch.zeros_like(made))))

    def _compare_all(self) -> None:
        """Compare at once: one wait for the device. Raises SyncError: two differ."""
        if not self.compared:
            return
        expected = torch.stack([pair[1] for pair in self.compared])
        found = torch.stack([pair[2] for pair in self.compared])
        differs = (expected != found).any(1).tolist()
        for (what, _, _), is_different in zip(self.compared, differs, strict=True):
            if is_different:
                raise SyncError(f"{what} after vLLM's reload")

    def _check_packed_copies(self) -> None:
        """Raises SyncError: a head or an embedding computes with another weight than it holds."""
        for layer_name, layer in self.model.named_modules():
            if not is_packed(layer) or not keeps_its_weight(layer):
                continue
            weight = kernel_weight(layer)
            width = weight.shape[1]
            packed = read_columns(layer, width, Block.whole(tuple(weight.shape)))
            if not torch.equal(packed, weight[:, compared_columns(width)]):
                raise SyncError(f"the packed copy of {layer_name}.weight is of the version before")


def _is_used_as_loaded(loadable: Loadable) -> bool:
    if loadable.layer._parameters.get(loadable.name) is None:
        return False
    try:
        check_as_loaded(loadable)
    except NotInPlace:
        return False
    return True


def _check_all_loaded(recording: Recording) -> None:
    """Raises NotInPlace: a parameter would keep its old numbers. A tied head shares the memory of
    the embedding."""
    written = {copy.destination.parameter for copy in recording.copies}
    addresses = set()
    unwritten = []
    for loadable in recording.loadables:
        if (loadable.layer, loadable.name) in written:
            addresses.add(_address(loadable))
        else:
            unwritten.append(loadable)
    for loadable in unwritten:
        if _address(loadable) not in addresses - {0}:
            raise NotInPlace(f"nothing is loaded into {loadable.full_name}")


def _address(loadable: Loadable) -> int:
    """Of the memory that the kernels read; 0: the parameter was dropped after loading."""
    parameter = loadable.layer._parameters.get(loadable.name)
    return 0 if parameter is None else parameter.data_ptr()


def _parameter_checksums(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: box_checksum(parameter.data)
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.numel()
    }
