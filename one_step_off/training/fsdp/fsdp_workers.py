"""The FSDP2 training back end, on GPUs or CPUs: one worker class per role.

`FsdpBackend` builds, runs, steps and saves a model; what a role computes is in `roles.py`, and
shared with the Megatron back end.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import DTensor

from one_step_off.algorithms import batching
from one_step_off.config.lengths import longest_trained
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.models.checkpoint_layout import LivePart
from one_step_off.models.vision import ImageProcessor, is_vision_config
from one_step_off.training import (
    compilation,
    lora,
    optimizer_trial,
    optimizers,
    packed_attention,
    roles,
)
from one_step_off.training.fsdp import experts, fsdp_model
from one_step_off.training.fsdp.sequence_parallel import SequenceGroup
from one_step_off.training.model_worker import ModelWorker, WorkItem
from one_step_off.training.token_outputs import Figure, TokenOutputs
from one_step_off.training.update_stats import PhaseTimer, UpdateStats
from one_step_off.weight_sync.trainer_sender import WeightSenderMixin
from one_step_off.weight_sync.weight_piece import WeightPiece

WARM_UP_SHAPE = (64, 2)
"""Tokens and sequences, on CPUs."""

WARM_UP_ENTRIES = 16
"""Of the vocabulary: the smallest tokens, which every model has."""


class FsdpBackend(ModelWorker):
    """Put before a role's class: its model, passes, optimizer and checkpoints by FSDP2."""

    def _build_model(self) -> None:
        self.sequence_group = SequenceGroup(self.device, self.role_config.sequence_parallel_size)
        self.batch_share = self.sequence_group.share_of_batch()
        built = fsdp_model.build(self.cfg, self.device, self.role, self.sequence_group)
        self.model = built.model
        self.attention = built.attention
        self.layout = built.layout
        self.router_replay = built.router_replay
        self.routing = built.routing
        self.adapters = lora.Adapters(self.model, self._stored_name)
        self.packed = bool(self.attention.kernel)
        self.batch_share.sharing = built.sharing
        self.image_processor: ImageProcessor | None = None
        if is_vision_config(self.model.config):
            self.image_processor = ImageProcessor(self.cfg.model.path)  # counted its tokens

    def _warm_up(self) -> None:
        """Compile what is compiled, and load the kernels: the passes with and without gradients, of
        one micro-batch, on a GPU as large as training has them."""
        if not self._is_compiled:
            return
        length, count = WARM_UP_SHAPE
        if self.device.type == "cuda":
            length = longest_trained(self.cfg)
            tokens = self.role_config.micro_batch_tokens * self.sequence_group.size
            count = max(1, tokens // length)
        forbidden = self.model.forbidden_tokens  # stand for images that are not there
        entries = np.setdiff1d(np.arange(WARM_UP_ENTRIES), forbidden)
        sequences = [entries[np.arange(length) % len(entries)]] * count
        wanted = [np.arange(1, length)] * count
        layouts = [self._lay_out(sequences, wanted)]
        if self.batch_share.sharing is not None and count > 1:
            common = np.full(count, length // 2)
            common[0] = 0  # a row begins with it
            halves = np.column_stack([np.arange(count), common])
            layouts.append(self._lay_out(sequences, wanted, rows=halves))
        items = [WorkItem(layout, lengths=[length] * count) for layout in layouts]

        def run(item: WorkItem, figure: Figure) -> Tensor:
            outputs, figures = self._forward(item.layout, self.temperature, figure)
            return outputs.sum() if figures is None else outputs.sum() + figures.sum()

        timer = PhaseTimer(self.device)
        with torch.no_grad():
            self._run_micro_batches(items, lambda item: run(item, "none"), timer)
        if isinstance(self.role_config, TrainedConfig):
            self._run_micro_batches(items, lambda item: run(item, self.trained_figure), timer)
            self._zero_grad()
            self.routing.counts.zero_()

    def _stored_name(self, parameter: str) -> str:
        return self.layout.stored_name(parameter)

    # Passes.

    def _run_micro_batches(
        self, items: Iterable[WorkItem], compute: Callable[[WorkItem], Tensor], timer: PhaseTimer
    ) -> None:
        with_backward = torch.is_grad_enabled()
        for item in items:
            self.routing.is_token = None
            if with_backward and item.lengths and self.routing.has_experts:
                self.routing.is_token = self._token_mask(item)
            with timer("forward"):
                value = compute(item)
            if with_backward:
                with timer("backward"):
                    # FSDP2 averages gradients over ranks; the sum is wanted. (gloo cannot scale
                    # while it reduces.)
                    (value * self.world_size).backward()
        if not with_backward:
            # Without a backward pass the root's parameters would stay gathered, and grow stale.
            self.model.reshard()

    def _forward(
        self, layout: batching.MicroBatch, temperature: float, figure: Figure
    ) -> TokenOutputs:
        if self.sequence_group.size == 1:
            return self._outputs(layout, temperature, figure)
        part, indices = self.sequence_group.part_of(layout)
        outputs = self._outputs(part, temperature, figure)
        return self.sequence_group.joined(outputs, self._tensor(indices), len(layout.tokens))

    def _outputs(
        self, layout: batching.MicroBatch, temperature: float, figure: Figure
    ) -> TokenOutputs:
        """As `_forward`, of this rank's part of the rows alone."""
        inputs = {"input_ids": self._tensor(layout.input_ids)}
        if layout.position_ids is not None:
            inputs["position_ids"] = self._tensor(layout.position_ids)
        if self.router_replay:
            chosen = None if layout.experts is None else self._tensor(layout.experts)
            self.router_replay.use(chosen)
        if layout.images:
            inputs |= self._image_inputs(layout)
        return self.model(
            **inputs,
            **self._boundaries(layout),
            logit_index=self._tensor(layout.logit_index),
            tokens=self._tensor(layout.tokens),
            temperature=temperature,
            entropy=figure,
            chunk=self.cfg.actor.log_prob_chunk,
            compiled=self._is_compiled,
            is_sampled=layout.is_sampled,
        )

    @property
    def _is_compiled(self) -> bool:
        return compilation.is_wanted(self.role_config.torch_compile, self.device)

    def _image_inputs(self, layout: batching.MicroBatch) -> dict[str, Tensor]:
        """The pixels of a micro-batch, and the positions [3, rows, width] of its tokens in time,
        height and width: without them the model would count the tokens of an image as text."""
        inputs = self.image_processor.inputs(layout.images)
        is_image = layout.input_ids == self.image_processor.token_id
        positions, _ = self.model.base_model.get_rope_index(
            torch.from_numpy(layout.input_ids),
            mm_token_type_ids=torch.from_numpy(is_image.astype(np.int64)),
            image_grid_thw=inputs["image_grid_thw"],
        )
        inputs["position_ids"] = positions
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def _boundaries(self, layout: batching.MicroBatch) -> dict[str, Any]:
        if layout.cu_seqlens is None:
            return {}
        cu_seqlens = self._tensor(layout.cu_seqlens)
        # A padded role has rows without padding only where prefixes are shared.
        kernel = self.attention.kernel or packed_attention.PER_SEQUENCE
        return packed_attention.boundary_arguments(
            layout, cu_seqlens, kernel, self.attention.has_states, self._tensor
        )

    def _token_mask(self, item: WorkItem) -> Tensor:
        """1 where this rank's part of the rows has a token, 0 at padding; int64 [rows * width]."""
        return self._tensor(self.sequence_group.own_columns(_token_mask(item)))

    def _auxiliary_loss(
        self, item: WorkItem, mini_batch_tokens: int, stats: UpdateStats
    ) -> Tensor | None:
        """`router_aux_loss_coef` times the load-balancing loss of the experts, where config.json
        has `output_router_logits`. A micro-batch counts by its tokens."""
        logits, self.model.router_logits = self.model.router_logits, ()
        coefficient = getattr(self.model, "router_aux_loss_coef", None)
        if not (logits and coefficient and item.lengths):
            return None
        loss = experts.load_balancing_loss(
            logits,
            self.model.num_experts_per_tok,
            self._token_mask(item),
            self.sequence_group.group,
        )
        share = sum(item.lengths) / mini_batch_tokens
        stats.add(load_balancing=loss.detach() * share)
        return coefficient * share * loss

    # The optimizer.

    def _build_optimizer(self) -> None:
        self.optimizer = optimizers.build(self.model, self.role, self.role_config)
        optimizer_trial.check_sharded(self.optimizer, self.role, self.role_config)

    def _by_mesh(self) -> list[list[Tensor]]:
        """The parameters with gradients: those of the experts, where they are on a mesh of their
        own, and all others. torch clips no two meshes at once."""
        groups: dict[Any, list[Tensor]] = {}
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        return list(groups.values())

    def _grad_norm(self) -> Tensor:
        norms = [_total_norm([p.grad for p in parameters]) for parameters in self._by_mesh()]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _clip_and_step(self, grad_norm: Tensor | float, learning_rate: float) -> None:
        for parameters in self._by_mesh():
            torch.nn.utils.clip_grads_with_norm_(parameters, self.role_config.grad_clip, grad_norm)
        optimizers.set_learning_rate(self.optimizer, learning_rate)
        self._move_moments(self.device)
        self.optimizer.step()
        self._move_moments("cpu")
        rate = getattr(self.role_config, "router_bias_update_rate", 0.0)  # of the actor alone
        if rate:
            self.routing.update_biases(rate)

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.routing.end_step()

    def _model_metrics(self) -> dict[str, float]:
        return self.routing.metrics()

    def _move_moments(self, target: torch.device | str) -> None:
        """Move the optimizer's state to `target`, with optimizer_offload on a GPU. (With
        param_offload FSDP2 keeps it on the host itself.) Torch copies to pinned host memory without
        blocking, and its allocator reuses the blocks."""
        role_config = self.role_config
        if not role_config.optimizer_offload or role_config.param_offload:
            return
        if self.device.type != "cuda":
            return
        optimizers.move_state(self.optimizer, target)
        # The copies must have ended before what they were made of is used again.
        torch.cuda.synchronize()

    # Checkpoints.

    def _create_moments(self) -> None:
        optimizers.create_state(self.optimizer)

    def _state(self) -> dict[str, Any]:
        """The sharded weights that are trained, and the optimizer's state if it has one, as torch's
        checkpoints take them."""
        self._create_moments()
        weights = state_dict.get_model_state_dict(self.model)
        # What is frozen comes from model.path again. (torch's own ignore_frozen_params would keep a
        # tied head.)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                weights.pop(name, None)
        if not self.optimizer.state:
            return {"model": weights}
        return {"model": weights, "optimizer": optimizers.as_plain(self.model, self.optimizer)}

    def _write_state(self, folder: str) -> Future:
        self._create_moments()
        # New moments wait in host memory too, until the first step.
        self._move_moments("cpu")
        return dcp.async_save(
            self._state(), checkpoint_id=folder, process_group=self._checkpoint_group
        )

    def _read_state(self, folder: str) -> None:
        is_saved = optimizers.has_saved_state(folder)
        optimizers.prepare_loading(self.model, self.optimizer, is_saved)
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        options = state_dict.StateDictOptions(strict=False)  # tied tensors are named once
        state_dict.set_model_state_dict(self.model, state["model"], options=options)
        if "optimizer" in state:
            optimizers.load(self.model, self.optimizer, state["optimizer"])

    def _sent_weights(self) -> list[tuple[WeightPiece, Tensor | LivePart]]:
        return fsdp_model.sharded_weights(self.model, self.layout, self.cfg.model.dtype)

    def _sent_adapters(self) -> list[tuple[WeightPiece, Tensor]]:
        return fsdp_model.sharded_adapters(self.model, self.cfg.model.dtype)


def _total_norm(gradients: list[Any]) -> Tensor:
    """The norm of all gradients together, which are on one mesh (collective)."""
    if not experts.is_divided(gradients[0]):
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    # Over two dimensions of a mesh torch reduces twice, and ranks may round differently.
    square = torch.nn.utils.get_total_norm([g.to_local() for g in gradients]).square()
    dist.all_reduce(square)
    return square.sqrt()


def _token_mask(item: WorkItem) -> np.ndarray:
    """1 where a row has a token, 0 at its padding, and where a prefix is shared by how many
    sequences; int64 [rows * width]."""
    if item.layout.uses is not None:
        return item.layout.uses
    rows, width = item.layout.input_ids.shape
    # A packed row holds all sequences, one after the other.
    lengths = item.lengths if rows > 1 or len(item.lengths) == 1 else [sum(item.lengths)]
    mask = np.arange(width) < np.array(lengths)[:, None]
    return mask.astype(np.int64).reshape(-1)


class PolicyWorker(FsdpBackend, roles.PolicyWorker):
    """The role "ref", and the policy of an actor that streams no weights."""


class ActorWorker(WeightSenderMixin, PolicyWorker):
    """The role "actor", whose ranks also send the weights."""


class CriticWorker(FsdpBackend, roles.CriticWorker):
    """The role "critic"."""


class RewardModelWorker(FsdpBackend, roles.RewardModelWorker):
    """The role "reward_model"."""


class SupervisedWorker(FsdpBackend, roles.SupervisedWorker):
    """The role "actor" in supervised steps."""


class TeacherWorker(FsdpBackend, roles.TeacherWorker):
    """The role "teacher"."""


WORKERS = {
    "actor": ActorWorker,
    "ref": PolicyWorker,
    "critic": CriticWorker,
    "reward_model": RewardModelWorker,
    "teacher": TeacherWorker,
    "supervised": SupervisedWorker,
}
