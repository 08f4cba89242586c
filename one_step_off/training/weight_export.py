"""How a trained model's weights are read: the pieces that each rank streams, and a Hugging Face
checkpoint."""

import contextlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from one_step_off.config.errors import first_line
from one_step_off.config.roles import load_section_tokenizer
from one_step_off.models import hf_model
from one_step_off.training import lora
from one_step_off.training.trained_worker import TrainedWorker
from one_step_off.weight_sync.bucket_plan import Pieces, pieces_by_tensor
from one_step_off.weight_sync.weight_piece import WeightPiece


class WeightExport(TrainedWorker):
    """One rank of a role whose weights are streamed and saved."""

    @abstractmethod
    def _sent_weights(self) -> list[tuple[WeightPiece, Tensor]]:
        """What this rank sends: each piece, and the live tensor that has its data. No
        collective."""

    def setup(self, master_addr: str, master_port: int) -> None:
        """As `ModelWorker.setup`; afterwards the weights can be streamed."""
        super().setup(master_addr, master_port)
        # Not later: while a pass runs the modules hold gathered parameters.
        self._weights = self._sent_weights()

    def weight_plan(self) -> list[WeightPiece]:
        """The pieces that this rank sends, in a fixed order (no collective). Empty on ranks that
        hold copies."""
        return [piece for piece, _ in self._weights]

    @torch.no_grad()
    def weight_tensors(self) -> Iterator[Tensor]:
        """The data of `weight_plan()`, in its order (no collective): the live rows themselves, in
        the dtype that they are trained in, or merged with an adapter. Read them before the next
        optimizer step."""
        for piece, tensor in self._weights:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield self.adapters.merged(piece.name, local).detach().reshape(piece.block_shape)

    @torch.no_grad()
    def gathered(self, pieces: Pieces, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, one after the other, on rank 0's `device`; nothing on the other
        ranks, which must take part (collective).

        Args:
            pieces: the `weight_plan` of every rank.
        """
        if self.rank == 0:
            yield from self._receive_whole(pieces, device)
        else:
            self._send_to_rank_0(pieces[self.rank], device)

    def _send_to_rank_0(self, plan: list[WeightPiece], device: torch.device | str) -> None:
        for piece, tensor in zip(plan, self.weight_tensors(), strict=True):
            block = tensor.to(device, getattr(torch, piece.dtype)).contiguous()
            dist.send(block, 0)

    def _receive_whole(
        self, pieces: Pieces, device: torch.device | str
    ) -> Iterator[tuple[str, Tensor]]:
        own_tensors = self.weight_tensors()
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
        dist.all_gather_object(plans, self.weight_plan())
        weights = dict(self.gathered(plans, "cpu"))
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
        shutil.rmtree(path, ignore_errors=True)
        os.rename(unfinished, path)
