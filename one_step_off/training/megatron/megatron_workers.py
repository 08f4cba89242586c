"""The Megatron-core training back end: the roles of `fsdp_workers.py` with every layer, model and
sequence divided.

What a role computes (losses, metrics, columns, learning rates) is shared with the FSDP back end;
`MegatronBackend` computes it. A rank is one of `tensor * pipeline * context` that hold one model
together; each such set takes a share of the batch. Loss and log-probs exist on the last pipeline
stage, the same on each of its ranks: one of them reports.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.staging import AsyncStager

from one_step_off.algorithms import batching
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.models import megatron_support
from one_step_off.training import compilation, roles
from one_step_off.training.megatron import megatron_model, megatron_weights
from one_step_off.training.megatron.megatron_shims import count_padding_in_checkpoints, cuda_is_cpu
from one_step_off.training.model_worker import BatchShare, ModelWorker, WorkItem
from one_step_off.training.token_outputs import Figure, TokenOutputs
from one_step_off.training.update_stats import PhaseTimer
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from one_step_off.weight_sync.weight_piece import WeightPiece

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How the distributed optimizer is saved: so that other numbers of ranks can load it."""

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict]]
"""What Megatron's schedule calls on the last stage's output: (loss, its number of tokens,
figures)."""


class MegatronBackend(ModelWorker):
    """Put before a role's class: its model, passes, optimizer and checkpoints by Megatron.

    Attributes:
        models: this rank's chunks of the model, one per virtual stage.
        chunks: the same, wrapped for gradient reduction in a role that learns.
    """

    _running_chunk: torch.nn.Module
    """The chunk whose forward pass Megatron's schedule has asked for."""

    # Build.

    def _build_model(self) -> None:
        cfg = self.cfg
        role_config = self.role_config
        self.hf_config = megatron_support.read_config(cfg, self.role)
        with cuda_is_cpu(self.device):
            mpu.initialize_model_parallel(
                **megatron_model.parallel_sizes(role_config),
                distributed_timeout_minutes=cfg.trainer.step_timeout_s / 60,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(cfg.trainer.seed)
            self.models = megatron_model.build(cfg, self.role, self.hf_config, self.device)
        self.chunks = self.models
        self.router_replay = None
        if self.role == "actor" and cfg.rollout.replay_routing:
            self.router_replay = megatron_model.MegatronReplay(self.models)
        self.packed = megatron_model.packs(cfg, self.role, self.device)
        self.batch_share = self._own_share()
        megatron_weights.load(cfg, self.role, self.models, self.hf_config)
        if not isinstance(role_config, TrainedConfig):
            for model in self.models:
                model.requires_grad_(False)

    def _own_share(self) -> BatchShare:
        role_config = self.role_config
        width_multiple = 1
        if role_config.sequence_parallel:
            width_multiple = role_config.tensor_parallel_size
        if role_config.context_parallel_size > 1:  # each rank has two blocks of the columns
            width_multiple *= 2 * role_config.context_parallel_size
        is_first_of_its_stage = (
            mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        )
        has_virtual_stages = bool(role_config.virtual_pipeline_parallel_size)
        return BatchShare(
            index=mpu.get_data_parallel_rank(),
            count=mpu.get_data_parallel_world_size(),
            # The other ranks have the same results, or none.
            reports=is_first_of_its_stage and mpu.is_pipeline_last_stage(),
            width_multiple=width_multiple,
            micro_batch_multiple=role_config.pipeline_parallel_size if has_virtual_stages else 1,
        )

    def _build_optimizer(self) -> None:
        role_config = self.role_config
        model_config = self.models[0].config
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            average_in_collective=False,
            use_distributed_optimizer=True,
        )
        optimizer_config = OptimizerConfig(
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
            lr=role_config.lr,
            adam_beta1=role_config.betas[0],
            adam_beta2=role_config.betas[1],
            adam_eps=role_config.eps,
            weight_decay=role_config.weight_decay,
            clip_grad=role_config.grad_clip,
            use_distributed_optimizer=True,
        )
        with cuda_is_cpu(self.device):
            self.chunks = [
                DistributedDataParallel(model_config, ddp_config, model) for model in self.models
            ]
            self.optimizer = get_megatron_optimizer(
                optimizer_config, self.chunks, use_gloo_process_groups=False
            )
        count_padding_in_checkpoints(self.optimizer)

    # Passes.

    def _run_micro_batches(
        self, items: Iterable[WorkItem], compute: Callable[[WorkItem], Tensor], timer: PhaseTimer
    ) -> None:
        work = list(items)
        if self.router_replay:
            self.router_replay.begin()
        with_backward = torch.is_grad_enabled()
        # Without virtual stages the shape does not matter: it travels with the tensors.
        rows = 1
        width = 1
        data_iterator: Any = iter(work)
        if len(self.chunks) > 1:
            rows, width = batching.pad_to_same_shape([item.layout for item in work])
            data_iterator = [iter(work) for _ in self.chunks]
        with cuda_is_cpu(self.device), timer("forward_backward"):
            if with_backward:
                self._zero_grad_buffers()
            get_forward_backward_func()(
                forward_step_func=functools.partial(self._forward_step, compute),
                data_iterator=data_iterator,
                model=self.chunks,
                num_microbatches=len(work),
                seq_length=width,
                micro_batch_size=rows,
                forward_only=not with_backward,
            )

    def _forward_step(
        self,
        compute: Callable[[WorkItem], Tensor],
        items: Iterator[WorkItem],
        chunk: torch.nn.Module,
    ) -> tuple[Tensor, LossFunction | None]:
        """One chunk's forward pass, as Megatron's schedule calls it: its output, and on the last
        stage its loss."""
        item = next(items)
        self._running_chunk = chunk
        is_last_stage = self.models[self.chunks.index(chunk)].post_process
        if is_last_stage:
            return compute(item), _as_loss
        return self._forward(item.layout, 1.0, "none"), None

    def _forward(
        self, layout: batching.MicroBatch, temperature: float, figure: Figure
    ) -> TokenOutputs:
        part, part_of_wanted = batching.context_parallel_slice(
            layout, mpu.get_context_parallel_rank(), self.role_config.context_parallel_size
        )
        logit_index = self._tensor(part.logit_index)
        tokens = self._tensor(part.tokens)
        indices = self._tensor(part_of_wanted)
        wanted = len(layout.logit_index)

        def output(**hook: Any) -> list[Tensor | None]:
            answer = megatron_model.at_positions(
                logit_index,
                tokens,
                self.hf_config.vocab_size,
                temperature,
                figure,
                self.cfg.actor.log_prob_chunk,
                compilation.is_wanted(self.role_config.torch_compile, self.device),
                **hook,
            )
            return [
                None if values is None else megatron_model.joined(values, indices, wanted)
                for values in answer
            ]

        if self.router_replay:
            chunk = self.chunks.index(self._running_chunk)
            self.router_replay.use(chunk, part, self.device)
        # A stage that is not the last returns its hidden states, and asks for no output.
        input_ids = self._tensor(part.input_ids)
        packed = None
        if layout.cu_seqlens is not None:
            cu_seqlens = self._tensor(layout.cu_seqlens)
            packed = megatron_model.packed_parameters(cu_seqlens, layout.max_seqlen)
        return self._running_chunk(
            input_ids, None, None, output_processor=output, packed_seq_params=packed
        )

    # The optimizer.

    def _zero_grad_buffers(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def _grad_norm(self) -> float:
        with cuda_is_cpu(self.device):
            self.optimizer.prepare_grads()
            return float(self.optimizer.get_grad_norm())

    def _clip_and_step(self, grad_norm: Tensor | float, learning_rate: float) -> None:
        weight_decay = self.role_config.weight_decay
        with cuda_is_cpu(self.device):
            for group in self.optimizer.param_groups:
                # Megatron's own scheduler would do this; without it vectors would decay like
                # matrices.
                group["lr"] = learning_rate
                group["weight_decay"] = weight_decay * group["wd_mult"]
            self.optimizer.step()  # which clips too

    def _zero_grad(self) -> None:
        with cuda_is_cpu(self.device):
            self.optimizer.zero_grad()

    # Checkpoints.

    def _create_moments(self) -> None:
        """Give an optimizer that has made no step its moments, which Megatron's checkpoints want to
        be there: by a step of rate 0 without gradients, whose count is then taken back."""
        inner_optimizers = [chained.optimizer for chained in self.optimizer.chained_optimizers]
        if any(optimizer.state for optimizer in inner_optimizers):
            return
        self._zero_grad_buffers()
        grad_norm = self._grad_norm()
        self._clip_and_step(grad_norm, learning_rate=0.0)
        self._zero_grad()
        for optimizer in inner_optimizers:
            # torch's AdamW counts steps beside the moments, Transformer Engine's in its groups.
            for holder in (*optimizer.state.values(), *optimizer.param_groups):
                if "step" in holder:
                    holder["step"] = holder["step"] * 0

    def _sharded_state(self, loading: bool) -> dict[str, Any]:
        self._create_moments()
        data_parallel_group = mpu.get_data_parallel_group(with_context_parallel=True)
        metadata = SHARDING | {"dp_cp_group": data_parallel_group}
        state = {
            f"model{i}": model.sharded_state_dict(metadata=metadata)
            for i, model in enumerate(self.models)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            dict(state), is_loading=loading, metadata=metadata
        )
        return state

    def _write_state(self, folder: str) -> Future:
        os.makedirs(folder, exist_ok=True)
        writer = BackgroundWriter(self._checkpoint_group)
        with cuda_is_cpu(self.device):
            state = self._sharded_state(loading=False)
            for i, _ in enumerate(self.models):
                copy_to_host(state[f"model{i}"])
            dist_checkpointing.save(state, folder, writer, content_metadata=SHARDING)
        return writer.writing

    def _read_state(self, folder: str) -> None:
        with cuda_is_cpu(self.device):
            state = dist_checkpointing.load(self._sharded_state(loading=True), folder)
            for i, model in enumerate(self.models):
                model.load_state_dict(state[f"model{i}"])
            self.optimizer.load_state_dict(state["optimizer"])
        self._separate_step_counts()

    def _separate_step_counts(self) -> None:
        """Give each parameter a step count of its own: torch's AdamW adds to all of them, and would
        count one tensor that they share once for every parameter."""
        for chained in self.optimizer.chained_optimizers:
            for state in chained.optimizer.state.values():
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].clone()

    def _sent_weights(self) -> list[tuple[WeightPiece, Tensor]]:
        # Only now, after `_build_optimizer`, which moves the parameters into its buffers.
        parts = megatron_weights.parts(self.models, self.hf_config, self.cfg.model.dtype)
        return megatron_weights.share_of(parts)


def copy_to_host(model_state: dict[str, Any]) -> None:
    """Replace the tensors of a model's sharded state that this rank writes by copies in host
    memory.

    The optimizer's part needs none: Megatron gathers its fully reshardable form in new tensors in
    host memory. It finds its parameters by the model's tensors, so it must have been made before.
    """
    for entry in nested_values(model_state):
        data = getattr(entry, "data", None)
        if isinstance(data, Tensor) and is_main_replica(entry.replica_id):
            entry.data = data.detach().to("cpu", copy=True)


class _HostCopies(AsyncStager):
    """For a state that is already a copy in host memory."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state as it is."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Nothing is copied, so there is nothing to wait for."""


class BackgroundWriter(TorchDistSaveShardedStrategy):
    """What `dist_checkpointing.save` hands a state to: begins to write it and returns.

    Megatron-core's own asynchronous save is deprecated, copies from GPUs only and runs its
    collectives in the group that training uses. Here its state goes to torch's `async_save`, as
    FSDP2's does. The files are those of Megatron's own save, which loads them.

    Attributes:
        writing: the future of the writing; None before `save`.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """`group`: gloo, of all ranks, and used by nothing else meanwhile."""
        super().__init__()
        self.group = group
        self.writing: Future | None = None

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Begin to write a state whose tensors no one changes (collective)."""
        entries, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writing = dcp.async_save(
            mcore_to_pyt_state_dict(entries),
            checkpoint_id=checkpoint_dir,
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self.group,
            async_stager=_HostCopies(),
        )


def _as_loss(loss: Tensor) -> tuple[Tensor, Tensor, dict]:
    """A loss whose parts simply add up: Megatron divides by no number of tokens."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}


class MegatronPolicyWorker(MegatronBackend, roles.PolicyWorker):
    """The role "ref", and the policy of an actor that streams no weights."""


class MegatronActorWorker(WeightSenderMixin, MegatronPolicyWorker):
    """The role "actor", whose ranks also send the weights."""


class MegatronCriticWorker(MegatronBackend, roles.CriticWorker):
    """The role "critic"."""


class MegatronRewardModelWorker(MegatronBackend, roles.RewardModelWorker):
    """The role "reward_model"."""


class MegatronSupervisedWorker(MegatronBackend, roles.SupervisedWorker):
    """The role "actor" in supervised steps."""


class MegatronTeacherWorker(MegatronBackend, roles.TeacherWorker):
    """The role "teacher"."""


WORKERS = {
    "actor": MegatronActorWorker,
    "ref": MegatronPolicyWorker,
    "critic": MegatronCriticWorker,
    "reward_model": MegatronRewardModelWorker,
    "teacher": MegatronTeacherWorker,
    "supervised": MegatronSupervisedWorker,
}
