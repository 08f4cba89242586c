"""How a trained model's weights are read: the pieces that each rank streams, and a Hugging Face
checkpoint."""

import contextlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from one_step_off.config.errors import first_line
from one_step_off.config.roles import load_section_tokenizer
from one_step_off.models import hf_model, vision
from one_step_off.models.checkpoint_layout import LivePart
from one_step_off.training import lora
from one_step_off.training.trained_worker import TrainedWorker
from one_step_off.weight_sync import base_weights
from one_step_off.weight_sync.bucket_plan import Pieces, pieces_by_tensor
from one_step_off.weight_sync.weight_piece import FrozenBlock, WeightPiece


class WeightExport(TrainedWorker):
    """One rank of a role whose weights are streamed and saved."""

    @abstractmethod
    def _sent_weights(self) -> Sequence[tuple[WeightPiece, Tensor | LivePart]]:
        """What this rank sends: each piece, and the live tensor, or the part of one, that has its
        data. No collective."""

    def _sent_adapters(self) -> list[tuple[WeightPiece, Tensor]]:
        """As `_sent_weights`, of the adapters' matrices, for weight_sync.lora=adapter."""
        raise NotImplementedError(f"{type(self).__name__} has no adapters")

    def setup(self, master_addr: str, master_port: int) -> None:
        """As `ModelWorker.setup`; afterwards the actor's weights can be streamed."""
        super().setup(master_addr, master_port)
        if self.role != "actor":
            return
        # Not later: while a pass runs the modules hold gathered parameters.
        self._weights = self._sent_weights()
        # Views of all that is sent; empty where something must be copied for it.
        self._live: list[Tensor] = []
        self._live_addresses: list[int] = []
        self._matrices: list[tuple[WeightPiece, Tensor]] | None = None
        if self.cfg.weight_sync.lora == "adapter":
            self._matrices = self._sent_adapters()

    def weight_plan(self) -> list[WeightPiece]:
        """The pieces that this rank sends, in a fixed order (no collective). Empty on ranks that
        hold copies."""
        sent = self._weights if self._matrices is None else self._matrices
        return [piece for piece, _ in sent]

    def weight_tensors(self) -> Iterable[Tensor]:
        """The data of `weight_plan()`, in its order (no collective): the live rows themselves, in
        the dtype that they are trained in, or merged with an adapter. Read them before the next
        optimizer step.

        Live rows come in a list, the same one until their storage moves.
        """
        if self._matrices is not None:
            return self._adapters_alone(self._matrices)
        if not self.adapters.layers:
            self._find_live_rows()
        return self._live or self._whole_model()

    @torch.no_grad()
    def _find_live_rows(self) -> None:
        """Fill `_live` with views of this rank's rows, if a storage has moved, as in FSDP2's first
        pass with `param_offload`. (The views hold the old storage: it cannot have been given to
        another tensor unnoticed.)"""
        sources = [source for _, source in self._weights]
        # The experts of a layer are many parts of few parameters.
        parameters = [s.parameter if isinstance(s, LivePart) else s for s in sources]
        distinct = {id(parameter): parameter for parameter in parameters}
        addresses = [_own_rows(parameter).data_ptr() for parameter in distinct.values()]
        if addresses == self._live_addresses:
            return
        self._live_addresses = addresses
        self._live = []
        for piece, source in self._weights:
            tensor = _own_rows(source)
            view = tensor.detach().reshape(piece.block_shape)
            if view.data_ptr() != tensor.data_ptr():
                self._live = []  # a copy, which would stay at this version
                return
            self._live.append(view)

    @torch.no_grad()
    def _whole_model(self) -> Iterator[Tensor]:
        for piece, tensor in self._weights:
            rows = _own_rows(tensor)
            yield self.adapters.merged(piece.name, rows).detach().reshape(piece.block_shape)

    @torch.no_grad()
    def _adapters_alone(self, matrices: list[tuple[WeightPiece, Tensor]]) -> Iterator[Tensor]:
        for piece, tensor in matrices:
            yield self.adapters.sent(piece.name, _own_rows(tensor)).detach()

    def base_digests(self) -> list[FrozenBlock]:
        """The digests of what this rank holds of the frozen model (no collective). The engine must
        have loaded the same."""
        return [
            base_weights.frozen_block(piece, _own_rows(tensor)) for piece, tensor in self._weights
        ]

    @torch.no_grad()
    def gathered(
        self,
        pieces: Pieces,
        device: torch.device | str,
        own_tensors: Iterator[Tensor] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, one after the other, on rank 0's `device`; nothing on the other
        ranks, which must take part (collective).

        Args:
            pieces: of every rank.
            device: see above.
            own_tensors: the data of this rank's pieces; None: `pieces` are the `weight_plan` of
                every rank.
        """
        if own_tensors is None:
            own_tensors = iter(self.weight_tensors())
        if self.rank == 0:
            yield from self._receive_whole(pieces, device, own_tensors)
        else:
            self._send_to_rank_0(pieces[self.rank], device, own_tensors)

    def _send_to_rank_0(
        self, plan: list[WeightPiece], device: torch.device | str, own_tensors: Iterator[Tensor]
    ) -> None:
        for piece, tensor in zip(plan, own_tensors, strict=True):
            block = tensor.to(device, getattr(torch, piece.dtype)).contiguous()
            dist.send(block, 0)

    def _receive_whole(
        self, pieces: Pieces, device: torch.device | str, own_tensors: Iterator[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for parts in pieces_by_tensor(pieces):  # in an order that keeps each rank's own
            first_piece = parts[0][1]
            dtype = getattr(torch, first_piece.dtype)
            whole = torch.empty(first_piece.shape, dtype=dtype, device=device)
            for rank, piece in parts:
                if rank == 0:
                    block = next(own_tensors)
                else:
                    block = torch.empty(piece.block_shape, dtype=dtype, device=device)
                    dist.recv(block, rank)
                piece.slice_of(whole).copy_(block)
            yield first_piece.name, whole

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint in model.dtype with tokenizer and generation config
        (collective).

        Rank 0 writes under another name and renames, so a checkpoint exists whole or not at all.

        Raises:
            RuntimeError: on rank 0, when it cannot be written.
        """
        plans: Pieces = [[] for _ in range(self.world_size)]
        dist.all_gather_object(plans, [piece for piece, _ in self._weights])
        weights = dict(self.gathered(plans, "cpu", self._whole_model()))
        adapter = self.adapters.state()
        if self.rank == 0:
            try:
                self._write_hf(weights, adapter, path)
            except Exception as e:  # the disk may be full
                reason = f"{type(e).__name__}: {first_line(e)}"
                raise RuntimeError(f"could not write {path}: {reason}") from e

    def _write_hf(self, weights: dict[str, Tensor], adapter: dict[str, Tensor], path: str) -> None:
        cfg = self.cfg
        unfinished = f"{path}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
        # A model of the checkpoint's own class writes its config.
        model = hf_model.empty_model(cfg, "actor", "sdpa", getattr(torch, cfg.model.dtype))
        with contextlib.suppress(OSError):  # the model may have no generation config
            model.generation_config = transformers.GenerationConfig.from_pretrained(cfg.model.path)
        # The weights have the checkpoint's layout already.
        model.save_pretrained(unfinished, state_dict=weights, save_original_format=False)
        if adapter:
            lora.write(adapter, cfg.model, os.path.join(unfinished, "adapter"))
        load_section_tokenizer(cfg, "model").save_pretrained(unfinished)
        if vision.is_vision_config(model.config):
            vision.copy_processor(cfg.model.path, unfinished)
        shutil.rmtree(path, ignore_errors=True)
        os.rename(unfinished, path)


def _own_rows(tensor: Tensor | LivePart) -> Tensor:
    """What this rank holds of a tensor, or of a part of one."""
    if isinstance(tensor, LivePart):
        return tensor.view()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
