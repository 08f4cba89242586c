"""The Megatron-core training back end: the roles of `fsdp_workers.py` over tensor, pipeline, expert and data parallelism.

What a role computes (losses, metrics, columns, schedule of learning rates) is inherited; here is how. A rank is one of
`tensor * pipeline` that hold one model together; each such set takes a share of the batch. Loss and log-probs exist on
the last pipeline stage, the same on each of its tensor-parallel ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors.torch import save_file
from torch import Tensor

from one_step_off import batching, megatron_model, megatron_weights
from one_step_off.config import TrainedConfig, path_of
from one_step_off.distributed_util import SendingEnd
from one_step_off.fsdp_workers import CriticWorker, ModelWorker, PolicyWorker, RewardModelWorker, Work, side_by_side
from one_step_off.megatron_shims import cuda_is_cpu
from one_step_off.samples import Batch
from one_step_off.update_stats import Clock, Stats
from one_step_off.workers import WeightPiece

FILE_BYTES = 4 << 30
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class MegatronWorker(ModelWorker):
    """Put before a role's class: its model, passes, optimiser and checkpoints by Megatron."""

    # ---- start --------------------------------------------------------------------------------------------------

    def _on(self) -> AbstractContextManager:
        return cuda_is_cpu(self.device)

    def _build(self) -> None:
        own, cfg = self.own, self.cfg
        self.hf_config = megatron_model.read_config(cfg, self.role)
        with self._on():
            mpu.initialize_model_parallel(
                own.tensor_parallel_size,
                own.pipeline_parallel_size,
                own.virtual_pipeline_parallel_size,
                expert_model_parallel_size=own.expert_parallel_size,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(cfg.trainer.seed)
            self.models = self.chunks = megatron_model.build(cfg, self.role, self.hf_config, self.device)
        self.share, self.shares = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.rounds = own.pipeline_parallel_size if own.virtual_pipeline_parallel_size else 1
        self.packed = False  # packed sequences need Transformer Engine, and have not been built
        self.multiple = own.tensor_parallel_size if own.sequence_parallel else 1
        path = path_of(cfg, self.role)
        reader = megatron_weights.CheckpointReader(
            "model.path" if path == cfg.model.path else f"{self.role}.path", path
        )
        found = megatron_weights.parts(self.models, self.hf_config)
        megatron_weights.load(found, reader, cfg.trainer.seed, self.hf_config.initializer_range)
        for model in self.models if not isinstance(own, TrainedConfig) else ():
            model.requires_grad_(False)

    def _build_optimizer(self) -> None:
        own, config = self.own, self.models[0].config
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=False
        )
        settings = OptimizerConfig(
            lr=own.lr,
            adam_beta1=own.betas[0],
            adam_beta2=own.betas[1],
            adam_eps=own.eps,
            weight_decay=own.weight_decay,
            clip_grad=own.grad_clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )
        with self._on():
            self.chunks = [DistributedDataParallel(config, ddp, model) for model in self.models]
            self.optimizer = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=False)

    # ---- passes -------------------------------------------------------------------------------------------------

    def _schedule(self, work: list[Any], last: Callable[[Any], Tensor], of: Callable, forward_only: bool) -> None:
        """Run micro-batches through Megatron's schedule; `last(item)` on the last stage gives a scalar to derive.

        `of(item)`: the item's `MicroBatch`.
        """

        def forward(items: Iterator[Any], chunk: torch.nn.Module) -> tuple[Tensor, Callable | None]:
            item = next(items)
            self._chunk = chunk
            if self.models[self.chunks.index(chunk)].post_process:
                return last(item), lambda loss: (loss, torch.zeros((), dtype=torch.int, device=loss.device), {})
            return chunk(self._tensor(of(item).input_ids), None, None), None

        rows, width = 1, 1  # of no account without virtual stages: shapes travel with the tensors
        if len(self.chunks) > 1:
            rows, width = batching.same_shape([of(item) for item in work])
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(work) for _ in self.chunks] if len(self.chunks) > 1 else iter(work),
            model=self.chunks,
            num_microbatches=len(work),
            seq_length=width,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    def _forward(self, laid: batching.MicroBatch, temperature: float, entropy: str) -> tuple[Tensor, Tensor | None]:
        at, tokens = self._tensor(laid.at), self._tensor(laid.tokens)

        def output(**hook: Any) -> tuple[Tensor, Tensor | None]:
            chunk = self.cfg.actor.log_prob_chunk
            return megatron_model.at_positions(
                at, tokens, self.hf_config.vocab_size, temperature, entropy, chunk, **hook
            )

        return self._chunk(self._tensor(laid.input_ids), None, None, output_processor=output)

    def _run_forward(
        self, work: list[batching.MicroBatch], temperature: float, more: str, shared: bool
    ) -> list[Tensor]:
        found: list[Tensor] = []

        def last(laid: batching.MicroBatch) -> Tensor:
            found.append(side_by_side(*self._forward(laid, temperature, more)))
            return found[-1].sum()

        with self._on():
            self._schedule(work, last, lambda laid: laid, forward_only=True)
        if not shared and self.own.pipeline_parallel_size > 1:
            answers = [[f.cpu() for f in found]]
            dist.broadcast_object_list(answers, mpu.get_pipeline_model_parallel_last_rank(), self._stages())
            return answers[0]
        return found

    def _of_responses(self, batch: Batch, more: str = "none") -> dict[int, np.ndarray]:
        found = super()._of_responses(batch, more)
        return found if mpu.get_tensor_model_parallel_rank() == 0 else {}  # the others have the same

    def _stages(self) -> dist.ProcessGroup:
        return mpu.get_pipeline_model_parallel_group()

    def _run_training(self, work: Iterator[Work], stats: Stats, clock: Clock, first: bool) -> None:
        def last(item: Work) -> Tensor:
            return self._micro_loss(*item, stats, first)

        with self._on(), clock("forward_backward"):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self._schedule(list(work), last, lambda item: item[0], forward_only=False)

    def _clip_and_step(self, rate: float) -> float:
        with self._on():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if norm - norm == 0:  # finite
                for group in self.optimizer.param_groups:
                    # Megatron's own scheduler would do this; without it vectors would decay like matrices.
                    group["lr"], group["weight_decay"] = rate, self.own.weight_decay * group["wd_mult"]
                self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def _reduced(self, stats: Stats) -> tuple[dict[str, float], dict[str, float]]:
        is_last = mpu.is_pipeline_last_stage()
        found = [tuple(stats.reduce(mpu.get_data_parallel_group()))] if is_last else [None]
        if self.own.pipeline_parallel_size > 1:
            dist.broadcast_object_list(found, mpu.get_pipeline_model_parallel_last_rank(), self._stages())
        return found[0]

    # ---- checkpoint ---------------------------------------------------------------------------------------------

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        if not any(inner.optimizer.state for inner in self.optimizer.chained_optimizers):
            # Moments come with the first step, and Megatron wants them to be there: one of rate 0 and no gradient.
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self._clip_and_step(0.0)
        metadata = SHARDING | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        state: dict[str, Any] = {}
        for i, model in enumerate(self.models):
            state[f"model{i}"] = model.sharded_state_dict(metadata=metadata)
        whole = {name: value for part in state.values() for name, value in part.items()}
        if len(self.models) == 1:
            whole = state["model0"]
        return state | {"optimizer": self.optimizer.sharded_state_dict(whole, is_loading=loading, metadata=metadata)}

    def _write_state(self, folder: str) -> None:
        if self.rank == 0:
            os.makedirs(folder, exist_ok=True)
        dist.barrier()
        with self._on():
            dist_checkpointing.save(self._sharded_state(False), folder, content_metadata=SHARDING)

    def _read_state(self, folder: str) -> None:
        with self._on():
            state = dist_checkpointing.load(self._sharded_state(True), folder)
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"])
            self.optimizer.load_state_dict(state["optimizer"])
        for inner in self.optimizer.chained_optimizers:
            for of in inner.optimizer.state.values():
                if isinstance(of.get("step"), Tensor):  # torch's AdamW: one tensor for all would count every parameter
                    of["step"] = of["step"].clone()

    # ---- weights ------------------------------------------------------------------------------------------------

    def _own_weights(self, dtype: torch.dtype) -> list[tuple[WeightPiece, Tensor]]:
        # Only now: the optimiser has moved the parameters into its buffers.
        return megatron_weights.share_of(megatron_weights.parts(self.models, self.hf_config), dtype)

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        plans: list[list[WeightPiece]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(plans, self.weight_plan())
        if self.rank == 0:
            return self._received(plans)
        for tensor in self.weight_tensors():
            dist.send(tensor.cpu(), 0)
        return iter(())

    def _received(self, plans: list[list[WeightPiece]]) -> Iterator[tuple[str, Tensor]]:
        """One whole tensor after the other; the other ranks send in the order of their plans, as the stream does."""
        own = zip(self.weight_plan(), self.weight_tensors(), strict=True)
        of: dict[str, list[tuple[int, WeightPiece]]] = {}
        for rank, plan in enumerate(plans):
            for piece in plan:
                of.setdefault(piece.name, []).append((rank, piece))
        for name, sent in of.items():
            whole = torch.empty(sent[0][1].shape, dtype=getattr(torch, sent[0][1].dtype))
            for rank, piece in sent:
                block = next(own)[1].cpu() if rank == 0 else torch.empty(piece.block, dtype=whole.dtype)
                if rank:
                    dist.recv(block, rank)
                whole.narrow(piece.dim, piece.start, piece.stop - piece.start).copy_(block)
            yield name, whole

    def _write_model(self, whole: Iterator[tuple[str, Tensor]], folder: str) -> None:
        os.makedirs(folder)
        held: dict[str, Tensor] = {}
        index: dict[str, str] = {}

        def flush() -> None:
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(held, os.path.join(folder, file), {"format": "pt"})
            index.update(dict.fromkeys(held, file))
            held.clear()

        for name, tensor in whole:
            if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > FILE_BYTES:
                flush()
            held[name] = tensor
        flush()
        if len(set(index.values())) == 1:
            os.rename(os.path.join(folder, "model-00001.safetensors"), os.path.join(folder, "model.safetensors"))
        else:
            with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
                json.dump({"metadata": {}, "weight_map": index}, f, indent=1)
        self.hf_config.dtype = getattr(torch, self.cfg.model.dtype)
        self.hf_config.save_pretrained(folder)
        try:
            generation = transformers.GenerationConfig.from_pretrained(self.cfg.model.path)
        except OSError:  # the model came without
            generation = transformers.GenerationConfig.from_model_config(self.hf_config)
        generation.save_pretrained(folder)


class MegatronPolicyWorker(MegatronWorker, PolicyWorker):
    """The role "ref"."""


class MegatronActorWorker(SendingEnd, MegatronPolicyWorker):
    """The role "actor", whose ranks also send the weights."""


class MegatronCriticWorker(MegatronWorker, CriticWorker):
    """The role "critic"."""


class MegatronRewardModelWorker(MegatronWorker, RewardModelWorker):
    """The role "reward_model"."""


WORKERS = {
    "actor": MegatronActorWorker,
    "ref": MegatronPolicyWorker,
    "critic": MegatronCriticWorker,
    "reward_model": MegatronRewardModelWorker,
}
