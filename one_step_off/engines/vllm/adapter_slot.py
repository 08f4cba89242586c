"""The slot of vLLM's LoRA in which one worker holds the policy's adapter.

vLLM has two buffers per layer, A [rank, inputs] and B [outputs, rank], of the shapes of the largest
allowed rank; several layers of the checkpoint may be parts of one (q, k and v of qkv_proj), and
with tensor parallelism each worker has a slice. An adapter is written there by vLLM's own loader.
Names that it does not know it ignores, so every step is checked: each matrix has its place before
the first sync, and after each sync the buffers hold, bit for bit, what was received.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.base_weights import ADAPTER_ID, NAMES_SHOWN, digest

PEFT_PREFIX = "base_model.model."
"""Before every name in peft's files, as vLLM reads them."""


@dataclass(frozen=True)
class Place:
    """Where a matrix lies: in the buffers of a layer, as one of its parts.

    Attributes:
        layer: vLLM's `BaseLayerWithLoRA`.
        part: number of the part, such as 1 for k in qkv_proj.
        is_a: the matrix is an A.
    """

    layer: Any
    part: int
    is_a: bool

    @property
    def buffer(self) -> torch.Tensor:
        """The one slot of the part's buffer, A [largest rank, inputs] or B [outputs, largest rank];
        inputs or outputs of this worker."""
        stacked = self.layer.lora_a_stacked if self.is_a else self.layer.lora_b_stacked
        return stacked[self.part][0, 0]

    def as_in_buffer(self, matrix: torch.Tensor) -> torch.Tensor:
        """What the buffer must hold of a whole matrix: this worker's slice, and zeros up to the
        largest rank.

        Raises:
            SyncError: it does not fit.
        """
        own = self._own_slice(matrix)
        content = torch.zeros_like(self.buffer)
        rank_dim = 0 if self.is_a else 1
        rank = own.shape[rank_dim]
        if own.shape[1 - rank_dim] != content.shape[1 - rank_dim] or rank > content.shape[rank_dim]:
            raise SyncError(
                f"a matrix of the shape {list(own.shape)} does not fit into a buffer of the shape "
                f"{list(content.shape)}"
            )
        content.narrow(rank_dim, 0, rank).copy_(own)
        return content

    def _own_slice(self, matrix: torch.Tensor) -> torch.Tensor:
        """By vLLM's own functions, which take lists where a layer has several parts."""
        layer = self.layer
        if layer.tp_size == 1:
            return matrix
        cut: Callable[[Any], Any] = layer.slice_lora_a if self.is_a else layer.slice_lora_b
        if layer.n_slices == 1:
            return cut(matrix)
        parts: list[torch.Tensor | None] = [None] * layer.n_slices
        parts[self.part] = matrix
        return cut(parts)[self.part]


class AdapterSlot:
    """The one slot, and what was received for it."""

    def __init__(self, lora_manager: Any, who: str) -> None:
        """
        Args:
            lora_manager: of vLLM's model runner.
            who: names this worker in errors.
        """
        self.adapters = lora_manager._adapter_manager
        self.dtype = lora_manager.lora_config.lora_dtype
        self.who = who
        mapper = getattr(self.adapters.model, "hf_to_vllm_mapper", None)
        self.name_mapper = None
        if mapper is not None:
            self.name_mapper = mapper.get_rename_mapper()
        self.places = self._find_places()
        self.received: dict[str, torch.Tensor] = {}
        self.digests: dict[str, str] = {}

    def _find_places(self) -> dict[tuple[str, bool], Place]:
        """(vLLM's name of a layer or of its part, is A) -> where its matrix lies."""
        places = {}
        for module_name, layer in self.adapters.modules.items():
            names = self.adapters.packed_modules.get(module_name, [module_name])
            if len(names) != layer.n_slices:
                continue  # no place: its adapters are refused by name
            for part, name in enumerate(names):
                for is_a in (True, False):
                    places[name, is_a] = Place(layer, part, is_a)
        return places

    def place_of(self, name: str) -> Place | None:
        """Where the matrix with this name of peft's is held; None: nowhere."""
        return self.places.get(parse_fine_tuned_lora_name(f"{PEFT_PREFIX}{name}", self.name_mapper))

    def check_names(self, shapes: dict[str, Any]) -> None:
        """Check that each matrix has a place.

        Args:
            shapes: name -> [dtype, shape].

        Raises:
            SyncError: one has none, or has another dtype.
        """
        without_place = sorted(name for name in shapes if self.place_of(name) is None)
        if without_place:
            raise SyncError(
                f"{self.who}: vLLM's LoRA has no place for {len(without_place)} matrices, such as "
                f"{without_place[:NAMES_SHOWN]}; set weight_sync.lora=merged"
            )
        dtypes = {dtype for dtype, _ in shapes.values()}
        if dtypes != {str(self.dtype).removeprefix("torch.")}:
            raise SyncError(f"{self.who}: matrices of {sorted(dtypes)} for buffers of {self.dtype}")

    def clear(self) -> None:
        """Let go of the adapter: from here on the slot holds nothing verified."""
        self.adapters.remove_adapter(ADAPTER_ID)
        self.received = {}
        self.digests = {}

    def note_received(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Keep the matrices of a bucket, and the digests of what the buffers must hold of them: of
        the bucket itself, so that later copies cannot change both.

        Raises:
            SyncError: a matrix has no place, or does not fit.
        """
        for name, matrix in tensors:
            place = self._place_or_error(name)
            self.digests[name] = _digest(place.as_in_buffer(matrix))
            self.received[name] = matrix.clone()

    def _place_or_error(self, name: str) -> Place:
        place = self.place_of(name)
        if place is None:
            raise SyncError(f"{self.who}: vLLM's LoRA has no place for {name}")
        return place

    def activate(self) -> None:
        """Write what was received into the buffers."""
        rank = next(len(matrix) for name, matrix in self.received.items() if ".lora_A." in name)
        # B comes with the scaling in it, so alpha / rank is 1.
        settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules="all-linear")
        tensors = {f"{PEFT_PREFIX}{name}": matrix for name, matrix in self.received.items()}
        some_matrix = next(iter(self.received.values()))
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            settings,
            str(some_matrix.device),
            self.dtype,
            weights_mapper=self.name_mapper,
        )
        self.adapters.add_adapter(adapter)
        self.adapters.activate_adapter(ADAPTER_ID)
        self.received = {}

    def verify(self) -> None:
        """Compare every buffer with what was received for it; all others must be zero.

        Raises:
            SyncError: one differs.
        """
        expected = {self._place_or_error(name): value for name, value in self.digests.items()}
        different = []
        for (name, is_a), place in self.places.items():
            if place in expected:
                is_right = _digest(place.buffer) == expected[place]
            else:
                is_right = not place.buffer.any()
            if not is_right:
                different.append(f"{name} {'A' if is_a else 'B'}")
        if different:
            raise SyncError(
                f"{self.who}, phase verify: {len(different)} buffers of vLLM's LoRA do not hold "
                f"what was received, such as {different[:NAMES_SHOWN]}"
            )


def _digest(tensor: torch.Tensor) -> str:
    return digest(tensor, str(tensor.dtype).removeprefix("torch."))
