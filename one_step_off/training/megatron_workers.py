"""The Megatron-core training back end: the roles of `fsdp_workers.py` with every layer, model and sequence divided.

What a role computes (losses, metrics, columns, schedule of learning rates) is inherited; here is how. A rank is one of
`tensor * pipeline * context` that hold one model together; each such set takes a share of the batch. Loss and log-probs
exist on the last pipeline stage, the same on each of its ranks: one of them tells.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from one_step_off.algorithms import batching
from one_step_off.algorithms.core_algos import TokenOutputs
from one_step_off.config.schema import TrainedConfig
from one_step_off.training import megatron_model, megatron_weights
from one_step_off.training.fsdp_workers import WORKERS as OF_FSDP
from one_step_off.training.fsdp_workers import ModelWorker
from one_step_off.training.megatron_shims import cuda_is_cpu
from one_step_off.training.update_stats import Clock
from one_step_off.weight_sync.weight_piece import WeightPiece

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class MegatronWorker(ModelWorker):
    """Put before a role's class: its model, passes, optimiser and checkpoints by Megatron."""

    _chunk: torch.nn.Module  # at whose forward pass it is
    _may_step: Callable[[float, bool], bool]  # of the role's class

    def _build(self) -> None:
        own, cfg = self.own, self.cfg
        self.hf_config = megatron_model.read_config(cfg, self.role)
        with cuda_is_cpu(self.device):
            how = {
                "distributed_timeout_minutes": cfg.trainer.step_timeout_s / 60,
                "create_gloo_process_groups": False,
            }
            mpu.initialize_model_parallel(**megatron_model.sizes(own), **how)
            model_parallel_cuda_manual_seed(cfg.trainer.seed)
            self.models = self.chunks = megatron_model.build(
                cfg, self.role, self.hf_config, self.device
            )
        self.share, self.shares = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.rounds = own.pipeline_parallel_size if own.virtual_pipeline_parallel_size else 1
        self.packed = False  # packed sequences need Transformer Engine, and have not been built
        self.multiple = own.tensor_parallel_size if own.sequence_parallel else 1
        self.multiple *= 2 * own.context_parallel_size if own.context_parallel_size > 1 else 1
        first = mpu.get_tensor_model_parallel_rank() == mpu.get_context_parallel_rank() == 0
        self.tells = first and mpu.is_pipeline_last_stage()  # the others have the same, or nothing
        megatron_weights.load(cfg, self.role, self.models, self.hf_config)
        for model in self.models if not isinstance(own, TrainedConfig) else ():
            model.requires_grad_(False)

    def _build_optimizer(self) -> None:
        own, config = self.own, self.models[0].config
        spread = {"use_distributed_optimizer": True}
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, average_in_collective=False, **spread
        )
        adam = {"adam_beta1": own.betas[0], "adam_beta2": own.betas[1], "adam_eps": own.eps}
        adam |= {"lr": own.lr, "weight_decay": own.weight_decay, "clip_grad": own.grad_clip}
        settings = OptimizerConfig(
            bf16=config.bf16, params_dtype=config.params_dtype, **adam, **spread
        )
        with cuda_is_cpu(self.device):
            self.chunks = [DistributedDataParallel(config, ddp, model) for model in self.models]
            self.optimizer = get_megatron_optimizer(
                settings, self.chunks, use_gloo_process_groups=False
            )
        for buffer in (
            buffer for chained in self.optimizer.chained_optimizers for buffer in chained.buffers
        ):
            # Megatron's checkpoints leave padding between buckets out and find parameters as if it were there. A tied
            # head on the last stage has a bucket of its own, so what followed it was saved from the wrong places.
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()

    def _run(self, work: Iterable[tuple], result: Callable[..., Tensor], clock: Clock) -> None:
        items, train, virtual = list(work), torch.is_grad_enabled(), len(self.chunks) > 1

        def forward(
            items: Iterator[tuple], chunk: torch.nn.Module
        ) -> tuple[Tensor, Callable | None]:
            item = next(items)
            self._chunk = chunk
            if self.models[self.chunks.index(chunk)].post_process:
                return result(*item), lambda loss: (
                    loss,
                    torch.zeros((), dtype=torch.int, device=loss.device),
                    {},
                )
            return self._forward(item[0], 1.0, "none"), None

        # Without virtual stages the shape is of no account: it travels with the tensors.
        rows, width = batching.pad_to_same_shape([item[0] for item in items]) if virtual else (1, 1)
        with cuda_is_cpu(self.device), clock("forward_backward"):
            for chunk in self.chunks if train else ():
                chunk.zero_grad_buffer()
            data = [iter(items) for _ in self.chunks] if virtual else iter(items)
            given = {"forward_step_func": forward, "data_iterator": data, "model": self.chunks}
            shape = {"num_microbatches": len(items), "seq_length": width, "micro_batch_size": rows}
            get_forward_backward_func()(**given, **shape, forward_only=not train)

    def _forward(self, laid: batching.MicroBatch, temperature: float, entropy: str) -> TokenOutputs:
        part, mine = batching.context_parallel_slice(
            laid, mpu.get_context_parallel_rank(), self.own.context_parallel_size
        )
        at, tokens, mine = (self._tensor(array) for array in (part.logit_index, part.tokens, mine))
        how = self.hf_config.vocab_size, temperature, entropy, self.cfg.actor.log_prob_chunk

        def output(**hook: Any) -> list[Tensor | None]:
            found = megatron_model.at_positions(at, tokens, *how, **hook)
            return [
                x if x is None else megatron_model.joined(x, mine, len(laid.logit_index))
                for x in found
            ]

        # A stage that is not the last gives its hidden states, and asks for no output.
        return self._chunk(self._tensor(part.input_ids), None, None, output_processor=output)

    def _clip_and_step(self, rate: float, broken: bool = False) -> float:
        with cuda_is_cpu(self.device):
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if self._may_step(norm, broken):
                for group in self.optimizer.param_groups:
                    # Megatron's own scheduler would do this; without it vectors would decay like matrices.
                    group["lr"], group["weight_decay"] = (
                        rate,
                        self.own.weight_decay * group["wd_mult"],
                    )
                self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        if not any(inner.optimizer.state for inner in self.optimizer.chained_optimizers):
            # Moments come with the first step, and Megatron wants them to be there: one of rate 0 and no gradient.
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            skipped_in_a_row = self.skipped_in_a_row
            self._clip_and_step(0.0)
            self.skipped_in_a_row = skipped_in_a_row  # that step was no training
            for inner in (chained.optimizer for chained in self.optimizer.chained_optimizers):
                # It was none: torch's AdamW counts steps beside the moments, Transformer Engine's in its groups.
                for counter in (
                    x for x in (*inner.state.values(), *inner.param_groups) if "step" in x
                ):
                    counter["step"] = counter["step"] * 0
        metadata = SHARDING | {
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)
        }
        state = {
            f"model{i}": model.sharded_state_dict(metadata=metadata)
            for i, model in enumerate(self.models)
        }
        return state | {
            "optimizer": self.optimizer.sharded_state_dict(
                state, is_loading=loading, metadata=metadata
            )
        }

    def _write_state(self, folder: str) -> None:
        # Whole, before training goes on: Megatron's own way to write beside it is on its way out, and copies on GPUs only.
        os.makedirs(folder, exist_ok=True)
        with cuda_is_cpu(self.device):
            dist_checkpointing.save(self._sharded_state(False), folder, content_metadata=SHARDING)

    def _read_state(self, folder: str) -> None:
        with cuda_is_cpu(self.device):
            state = dist_checkpointing.load(self._sharded_state(True), folder)
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"])
            self.optimizer.load_state_dict(state["optimizer"])
        for inner in self.optimizer.chained_optimizers:
            for of in inner.optimizer.state.values():
                if isinstance(
                    of.get("step"), Tensor
                ):  # torch's AdamW: one tensor for all would count every parameter
                    of["step"] = of["step"].clone()

    def _own_weights(self) -> list[tuple[WeightPiece, Tensor]]:
        # Only now: the optimiser has moved the parameters into its buffers.
        return megatron_weights.share_of(
            megatron_weights.parts(self.models, self.hf_config, self.cfg.model.dtype)
        )


# As FSDP's, with what a `MegatronWorker` has of its own before it.
WORKERS = {
    role: type(f"Megatron{cls.__name__}", (MegatronWorker, cls), {})
    for role, cls in OF_FSDP.items()
}
