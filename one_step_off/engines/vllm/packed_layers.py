"""Layers whose weights vLLM packs for its CPU kernels: how boxes get into them.

A packed weight cannot be written in parts. So the boxes of a layer are written into a plain copy
of its weights, and the layer's own `process_weights_after_loading` packs it once all have come, as
vLLM's reload does. The memory of the plain copies is used again by the next layer and the next
sync.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from one_step_off.cluster.errors import SyncError
from one_step_off.config.errors import first_line
from one_step_off.engines.vllm.load_recording import Destination, Loadable, NotInPlace, Recording
from one_step_off.weight_sync.shard_blocks import Block

PACKING_KERNELS = ({"handler"}, {"packed_weight", "N"})
"""What the kernels of oneDNN and SGL close over: packed copies. Others might use the weight that
they were given, whose memory is used again here."""

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


class PlainMemory:
    """Tensors for plain copies of weights, used again and again: fresh memory costs more time than
    the copying."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def take(self, form: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape and dtype, with any values."""
        tensors = self.free.get((form.shape, form.dtype))
        return tensors.pop() if tensors else torch.empty(form.shape, dtype=form.dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """`tensor` is not used any more."""
        self.free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


class PackedLayer:
    """A layer with one or more packed weights. `plain` holds them unpacked, while it is written."""

    def __init__(
        self, loadables: list[Loadable], recording: Recording, memory: PlainMemory, keep: bool
    ) -> None:
        """`loadables`: the packed weights. `keep`: the plain copies stay, so that they can be
        read."""
        self.layer = loadables[0].layer
        self.layer_name = loadables[0].layer_name
        self.forms = {loadable.name: loadable.form for loadable in loadables}
        self.holds_experts = isinstance(self.layer, RoutedExperts)
        self.memory = memory
        self.keep = keep
        self.fills = [fill for fill in recording.fills if self._owns(fill.destination)]
        self.numbers_of_load = sum(
            copy.destination.block.numel
            for copy in recording.copies
            if self._owns(copy.destination)
        )
        self.plain: dict[str, torch.Tensor] = {}
        self.numbers_written = 0
        self.is_in_sync = False

    def _owns(self, destination: Destination) -> bool:
        return destination.layer is self.layer and destination.name in self.forms

    def write(self, name: str, block: Block, numbers: torch.Tensor) -> None:
        """Write a box of the weight `name`; pack the layer if it was the last one.

        Raises:
            SyncError: it cannot be packed. The layer must not be used before another sync.
        """
        if not self.is_in_sync:
            raise RuntimeError("a packed layer is written outside of a sync")
        if self._is_complete(block, numbers):
            self.plain = {name: numbers.view(block.shape)}
            try:
                self.packed_from_plain()
            finally:
                self.plain = {}  # memory of a message, which must not be given back as our own
            return
        self.fill(name, block, numbers)
        if self.numbers_written == self.numbers_of_load:
            self.pack()

    def _is_complete(self, block: Block, numbers: torch.Tensor) -> bool:
        """Whether these numbers are a whole linear layer, which can be packed without a plain
        copy of it."""
        if self.keep or self.holds_experts or self.plain:
            return False
        (form,) = self.forms.values()
        is_whole = block.shape == tuple(form.shape) and numbers.dtype == form.dtype
        return is_whole and numbers.is_contiguous()

    def fill(self, name: str, block: Block, numbers: torch.Tensor) -> None:
        """Write a box into the plain copy."""
        if not self.plain:
            self._take_memory()
        block.slice_of(self.plain[name]).squeeze().copy_(numbers.squeeze())
        self.numbers_written += block.numel

    def read(self, name: str, block: Block) -> torch.Tensor:
        """A box of the plain copy. Raises NotInPlace: there is none, or not of all numbers."""
        if not self.keep or not self.plain:
            raise NotInPlace(f"{self.layer_name} is packed and cannot be read")
        return block.slice_of(self.plain[name])

    def start(self) -> None:
        """A sync begins: forget boxes that a failed one has left."""
        self.restart()
        self.is_in_sync = True

    def restart(self) -> None:
        """Forget boxes that were written and not packed."""
        self.numbers_written = 0
        if not self.keep:
            self._release()

    def finish(self) -> None:
        """The sync ends: pack a layer of which only some boxes were written.

        Raises:
            NotInPlace: the others are not known any more.
        """
        self.is_in_sync = False
        if not self.numbers_written:
            return
        if not self.keep:
            raise NotInPlace(f"{self.layer_name} is packed, and only a part of it has come")
        self.pack()

    def pack(self) -> None:
        """Let the layer pack the plain copy, and put what comes of it where its kernel reads."""
        for name, packed in self.packed_from_plain().items():
            self.layer._parameters[name].data.copy_(packed)
        self.restart()

    def packed_from_plain(self) -> dict[str, torch.Tensor]:
        """What `process_weights_after_loading` makes of the plain copy. Linear layers compute with
        it from now on; experts compute with the parameters, which stay as they are."""
        kernel_parameters = {name: self.layer._parameters[name] for name in self.forms}
        method: Any = self.layer.quant_method
        if self.holds_experts:
            method.moe_kernel = None  # experts are packed only while their kernel is created
        else:
            self.layer.cpu_linear = None  # frees the memory of the old version first
        try:
            for name, plain in self.plain.items():
                setattr(self.layer, name, torch.nn.Parameter(plain, requires_grad=False))
            _let_vllm_pack(self.layer, self.layer_name)
            return {name: self.layer._parameters[name].data for name in self.forms}
        finally:
            for name, parameter in kernel_parameters.items():
                self.layer.register_parameter(name, parameter)

    def _take_memory(self) -> None:
        for name, form in self.forms.items():
            self.plain[name] = self.memory.take(form)
        for fill in self.fills:
            block = fill.destination.block
            block.slice_of(self.plain[fill.destination.name]).fill_(fill.number)

    def _release(self) -> None:
        for plain in self.plain.values():
            self.memory.give_back(plain)
        self.plain = {}


class PackOnUse:
    """The kernel of an embedding, which vLLM packs like a head but looks up by rows.

    It is packed when it is first called, which for an embedding is never.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        """As the packed kernel."""
        self.layer.quant_method.process_weights_after_loading(self.layer)
        return self.layer.cpu_linear(*args)


class PackedCopy:
    """The packed copy of an embedding or a head, which holds its weight as loaded, too.

    It is renewed as soon as all of the weight has been written. The embedding is the first weight
    of a checkpoint, so its tied head is packed while the other weights still travel.
    """

    def __init__(self, layer: torch.nn.Module, layer_name: str) -> None:
        self.layer = layer
        self.layer_name = layer_name
        self.numbers_of_load = 0  # how many numbers a load writes into the weight
        self.numbers_written = 0
        self.is_renewed = False

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether it is a copy of this weight."""
        return self.layer._parameters["weight"].data_ptr() == weight.data_ptr()

    def start(self) -> None:
        """A sync begins: forget what a failed one has written."""
        self.numbers_written = 0
        self.is_renewed = False

    def note_written(self, count: int) -> None:
        """So many numbers of the weight were written; renew the copy if they were the last ones.

        Raises:
            SyncError: it cannot be packed. The layer packs it when it is used.
        """
        self.numbers_written += count
        if self.numbers_written == self.numbers_of_load:
            self._renew()

    def finish(self) -> None:
        """The sync ends: renew the copy of a weight of which only a part was written."""
        if not self.is_renewed:
            self._renew()

    def _renew(self) -> None:
        # In place of the old version, whose memory is free then. It stays if packing fails.
        self.layer.cpu_linear = PackOnUse(self.layer)
        if isinstance(self.layer, ParallelLMHead):
            _let_vllm_pack(self.layer, self.layer_name)
        self.is_renewed = True


def _let_vllm_pack(layer: torch.nn.Module, layer_name: str) -> None:
    """Pack what the layer's parameters hold, as after a load. Raises SyncError: that failed."""
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except Exception as error:
        raise SyncError(
            f"{layer_name} could not be packed for its CPU kernel: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def is_packed(layer: torch.nn.Module) -> bool:
    """Whether the layer computes with a packed copy of its weight.

    Such a kernel is a closure over the copy; one that works on the parameter itself closes over
    nothing.
    """
    kernel = getattr(layer, "cpu_linear", None)
    return isinstance(kernel, PackOnUse) or bool(getattr(kernel, "__closure__", None))


def keeps_its_weight(layer: torch.nn.Module) -> bool:
    """Whether a packed layer holds its weight as loaded, too."""
    method = getattr(layer, "quant_method", None)
    return isinstance(layer, VocabParallelEmbedding) and (
        type(method) is UnquantizedEmbeddingMethod
    )


def packed_weights(loadables: list[Loadable]) -> Iterator[list[Loadable]]:
    """The packed weights of each layer that a `PackedLayer` can write."""
    by_layer: dict[torch.nn.Module, list[Loadable]] = {}
    for loadable in loadables:
        by_layer.setdefault(loadable.layer, []).append(loadable)
    for layer, of_layer in by_layer.items():
        if is_packed_linear(layer):
            yield [loadable for loadable in of_layer if loadable.name == "weight"]
        elif is_packed_experts(layer):
            yield [
                loadable for loadable in of_layer if loadable.name in ("w13_weight", "w2_weight")
            ]


def is_packed_linear(layer: torch.nn.Module) -> bool:
    """Whether it is a linear layer that is packed, not quantized, and has dropped its weight."""
    if type(getattr(layer, "quant_method", None)) is not UnquantizedLinearMethod:
        return False
    if not is_packed(layer) or layer._parameters["weight"].numel():
        return False
    return set(layer.cpu_linear.__code__.co_freevars) in PACKING_KERNELS


def is_packed_experts(layer: torch.nn.Module) -> bool:
    """Whether it holds unquantized experts, packed for CPU kernels."""
    if not isinstance(layer, RoutedExperts) or layer.w13_weight.device.type != "cpu":
        return False
    method: Any = layer.quant_method
    return type(method) is UnquantizedFusedMoEMethod and method.moe_kernel is not None
