"""A Hugging Face model under FSDP2: built, sharded and loaded; it computes log-probs, or a number
per token.

If embedding and head lost their tie while loading, training would be silently wrong, so the tie is
checked at the start.
"""

import functools
import logging
import math
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from one_step_off.algorithms.shared_prefixes import SharingRule
from one_step_off.config.errors import ConfigError
from one_step_off.config.lengths import longest_trained
from one_step_off.config.placement import devices_per_node, memory_share
from one_step_off.config.roles import role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.models.activation_memory import RESERVED_BYTES, activation_memory
from one_step_off.models.checkpoint_layout import (
    CheckpointLayout,
    LivePart,
    OtherLayout,
    OwnedBlock,
    TensorPlace,
    saved_buffers,
    saved_tensors,
)
from one_step_off.models.divided_sequences import check_divided_model
from one_step_off.models.experts import check_keys_of_experts
from one_step_off.models.hf_model import (
    SCALAR_HEAD,
    SCALAR_ROLES,
    check_stored_head,
    empty_model,
    frozen_names,
    has_state_layers,
    logits_of,
    read_checkpoint,
)
from one_step_off.models.router_replay import RouterReplay
from one_step_off.models.stored_weights import StoredWeights
from one_step_off.models.vision import forbidden_tokens, is_vision_config
from one_step_off.training import (
    compilation,
    lora,
    packed_attention,
    prefix_sharing,
    recurrent_layers,
)
from one_step_off.training.fsdp import experts
from one_step_off.training.fsdp.sequence_parallel import SequenceGroup
from one_step_off.training.packed_attention import AttentionChoice
from one_step_off.training.token_outputs import TokenOutputs, in_chunks, log_probs_and_entropy
from one_step_off.weight_sync.weight_piece import WeightPiece


def _device_mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """1-D ("shard"), or 2-D ("replicate", "shard") where fsdp_size ranks share one copy (HSDP)."""
    world_size = dist.get_world_size()
    if fsdp_size in (-1, world_size):
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class BuiltModel:
    """A role's sharded model.

    Attributes:
        model: with its weights.
        attention: how it attends.
        layout: where the checkpoint's tensors lie in the model without adapters; None: not known,
            for a role whose weights are not streamed.
        router_replay: of the policy, with `rollout.replay_routing`.
        routing: counts the tokens of its experts.
        sharing: the rule by which prefixes are shared; None: none are.
    """

    model: PreTrainedModel
    attention: AttentionChoice
    layout: CheckpointLayout | None
    router_replay: RouterReplay | None
    routing: experts.Routing
    sharing: SharingRule | None


@dataclass
class _Source:
    """Where the weights come from.

    Attributes:
        layout: where the checkpoint's tensors lie in the model; None: not known.
        stored: the files from which each rank reads its own rows; None: rank 0 broadcasts.
        model: on rank 0, with the weights that it broadcasts.
    """

    layout: CheckpointLayout | None
    stored: StoredWeights | None = None
    model: PreTrainedModel | None = None


def build(
    cfg: Config, device: torch.device, role: str, sequence_group: SequenceGroup
) -> BuiltModel:
    """Build the role's model without weights, shard it, then load it (collective).

    Each rank reads its own rows where the checkpoint has every tensor in safetensors files, so no
    process ever holds the whole model. Otherwise rank 0 reads the checkpoint and broadcasts, and
    its host holds one full copy for a moment: models with adapters, from the hub or in other files.
    A critic whose checkpoint has no scalar head, which is such a case, begins with the random one
    of `trainer.seed`.

    Raises:
        ConfigError: on rank 0, when the model cannot be trained here. The other ranks wait for it
            until they are ended.
    """
    role_config = role_settings(cfg, role)
    is_trained = isinstance(role_config, TrainedConfig)
    has_adapters = role == "actor" and cfg.model.lora_rank > 0
    dtype = getattr(torch, cfg.model.dtype)
    if is_trained and not has_adapters:
        dtype = torch.float32  # master weights; a frozen model has none
    source = _find_source(cfg, role, dtype, has_adapters)
    choice: list[Any] = [None, False]
    if dist.get_rank() == 0:
        if has_adapters:
            lora.inject(source.model, cfg.model)
            _check_adapters(source, cfg)
        choice[0] = packed_attention.choose(cfg, role, device)
        own_config = empty_model(cfg, role, None, None).config
        choice[1] = prefix_sharing.works(role, device, choice[0], own_config)
    # The others wait here, so that rank 0 is the first to report what is wrong with the model.
    dist.broadcast_object_list(choice, src=0)
    attention: AttentionChoice = choice[0]
    can_share: bool = choice[1]
    packed_attention.register()
    model = empty_model(cfg, role, sequence_group.implementation(attention), dtype)
    if has_state_layers(model.config):
        recurrent_layers.keep_sequences_apart(model)
    model.requires_grad_(is_trained)
    model.forbidden_tokens = []
    if is_vision_config(model.config):
        model.forbidden_tokens = forbidden_tokens(model.config)
    if role == "actor" and cfg.model.freeze:
        _freeze(model, cfg)
    if has_adapters:
        lora.inject(model, cfg.model)
    router_replay = None
    if role == "actor" and cfg.rollout.replay_routing:
        router_replay = RouterReplay(model)
    model.eval()  # no dropout: it would make theta differ from mu at the same weights
    model.forward = types.MethodType(_token_outputs, model)
    check_divided_model(model.config, cfg, role)
    check_keys_of_experts(model, cfg, role)
    sharing = None
    if can_share:
        sharing = prefix_sharing.rule_of(model, cfg, role, device, attention)
    experts.register(model)
    sequence_group.attach(_decoder_layers(model))
    shard_device = torch.device("cpu") if role_config.param_offload else device
    offloads = layer_inputs_go_to_host(model, cfg, role, _memory_of(device, cfg, role))
    _shard(model, role_config, cfg.model.dtype, device, shard_device, offloads)
    _load(model, source, shard_device, device)
    routing = experts.Routing(model, device)
    return BuiltModel(model, attention, source.layout, router_replay, routing, sharing)


def _freeze(model: PreTrainedModel, cfg: Config) -> None:
    """Leave the parameters of model.freeze out of training. Raises ConfigError."""
    parameters = dict(model.named_parameters())
    for name in frozen_names(list(parameters), cfg):
        parameters[name].requires_grad_(False)


def _find_source(cfg: Config, role: str, dtype: torch.dtype, has_adapters: bool) -> _Source:
    """Where the weights come from; on rank 0 after all checks (collective).

    Each rank reads only if all of them can: the folder may be on rank 0's node alone.
    """
    attention = cfg.model.attn_implementation
    attention = "sdpa" if attention == "auto" else attention
    path = role_model_path(cfg, role)
    stored = None if has_adapters else _safetensors_of(cfg, path)
    model = None
    layout: list[Any] = [None]
    if dist.get_rank() == 0:
        # Of files that all ranks may read, the headers alone.
        place = "cpu" if stored is None else "meta"
        model, layout[0] = read_checkpoint(cfg, role, attention, dtype, place)
    dist.broadcast_object_list(layout, src=0)
    can_read = [False] * dist.get_world_size()
    has_all = False
    if stored is not None and layout[0] is not None:
        has_all = stored.covers(layout[0].shapes())
    dist.all_gather_object(can_read, has_all)
    source = _Source(layout[0], stored if all(can_read) else None)
    if model is None:
        return source
    if source.stored is None:
        is_read = model.device.type == "cpu"
        source.model = model
        if not is_read:
            source.model, _ = read_checkpoint(cfg, role, attention, dtype, "cpu")
    elif role not in SCALAR_ROLES:
        check_stored_head(model, source.layout, source.stored, path)
    return source


def _safetensors_of(cfg: Config, path: str) -> StoredWeights | None:
    """The files of a model in a folder; None: reading the whole model is the only way."""
    if cfg.model.trust_remote_code or not os.path.isdir(path):
        return None
    try:
        return StoredWeights.find(path)
    except Exception:  # broken files, of any kind: reading the whole model names what is wrong
        return None


def _check_adapters(source: _Source, cfg: Config) -> None:
    """Raises ConfigError: a layer with an adapter is not one tensor of the checkpoint."""
    for name, layer in source.model.named_modules():
        if hasattr(layer, "base_layer"):
            try:
                source.layout.stored_name(f"{name}.weight")
            except OtherLayout as error:
                raise ConfigError(
                    f"model.lora_target_modules={cfg.model.lora_target_modules}: {error}, so its "
                    "adapter cannot be merged; name other layers"
                ) from error


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks: the decoder's first list of modules."""
    for part in (model.get_decoder(), model):
        if part is None:
            continue
        for module in part.modules():
            if isinstance(module, nn.ModuleList) and len(module):
                return module
    raise ConfigError(
        f"model.path: cannot find the decoder layers of {type(model).__name__}; give another model"
    )


def _memory_of(device: torch.device, cfg: Config, role: str) -> float:
    """Bytes of the GPU's memory that a rank of the role may use; endless on CPUs, whose activations
    are in host memory anyway."""
    if device.type != "cuda":
        return math.inf
    return memory_share(cfg, role) * torch.cuda.get_device_properties(device).total_memory


def layer_inputs_go_to_host(
    model: PreTrainedModel, cfg: Config, role: str, memory_bytes: float
) -> bool:
    """Whether the layer inputs that activation checkpointing keeps wait in pinned host memory for
    the backward pass: where by estimate they do not fit beside the rest of an update. Rank 0 logs
    it.

    Args:
        model: without weights.
        memory_bytes: of the GPU, for this role.
    """
    settings = role_settings(cfg, role)
    memory = activation_memory(model.config)
    if memory is None or not getattr(settings, "activation_checkpointing", False):
        return False
    longest = math.ceil(longest_trained(cfg) / settings.sequence_parallel_size)
    tokens = max(settings.micro_batch_tokens, longest)
    ranks_of_copy = dist.get_world_size() if settings.fsdp_size == -1 else settings.fsdp_size
    rest = _state_bytes(model, settings) / ranks_of_copy
    rest += memory.besides(tokens, cfg.actor.log_prob_chunk) + RESERVED_BYTES
    inputs = memory.layer_inputs(tokens)
    if rest + inputs <= memory_bytes:
        return False
    if dist.get_rank() == 0:
        logging.getLogger(__name__).warning(
            "%s: the inputs of %d layers, %.1f GB for %d tokens on a rank, go to host memory until "
            "the backward pass: by estimate they do not fit beside %.1f GB; %s",
            role,
            memory.layers,
            inputs / 1e9,
            tokens,
            rest / 1e9,
            _host_text(cfg, role, inputs),
        )
    return True


def _host_text(cfg: Config, role: str, inputs: float) -> str:
    """Whether the `inputs` of each rank, in bytes, fit into the memory of this host."""
    ranks = max(devices_per_node(cfg, cfg.placement.roles[role]))
    available = psutil.virtual_memory().available
    text = f"its {ranks} ranks need {ranks * inputs / 1e9:.1f} GB of the "
    text += f"{available / 1e9:.1f} GB that the host has free"
    if ranks * inputs <= available:
        return text
    return (
        f"{text}, which is too little: the host may end the run; lower {role}.micro_batch_tokens "
        f"and the longest sequence, or raise {role}.sequence_parallel_size"
    )


def _state_bytes(model: PreTrainedModel, settings: TrainedConfig) -> float:
    """Weights, gradients and moments on the GPUs of all ranks together, before anything is sharded;
    a trained number has 16 bytes in float32, its two moments included."""
    if settings.param_offload:
        return 0.0
    of_trained = 8 if settings.optimizer_offload else 16
    total = 0.0
    for parameter in model.parameters():
        of_one = of_trained if parameter.requires_grad else parameter.element_size()
        total += of_one * parameter.numel()
    return total


def _keeping_input_on_host(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A checkpointed forward pass that keeps what the checkpoint keeps in host memory."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda"):
            return forward(*args, **kwargs)

    return run


def _shard(
    model: PreTrainedModel,
    role_config: Any,
    dtype: str,
    device: torch.device,
    shard_device: torch.device,
    offloads: bool,
) -> None:
    """One FSDP group and one activation checkpoint per decoder layer; embedding, norm and head
    (perhaps tied) together in the root's group. `offloads`: of `layer_inputs_go_to_host`."""
    compute_dtype = torch.bfloat16 if dtype == "bfloat16" else None
    # CPUOffloadPolicy fails without an accelerator; on CPUs the parameters are in host memory
    # anyway.
    offload_policy = OffloadPolicy() if shard_device == device else CPUOffloadPolicy()
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": offload_policy,
    }
    mesh = _device_mesh(device, role_config.fsdp_size)
    expert_mesh = None
    if role_config.expert_parallel_size > 1:
        expert_mesh = experts.expert_mesh(device, role_config.expert_parallel_size)
    recomputes = getattr(role_config, "activation_checkpointing", False)  # of trainable roles
    # The hooks that collect router logits cannot be compiled, nor can the exchange of tokens.
    is_eager = getattr(model.config, "output_router_logits", False) or expert_mesh is not None
    has_images = is_vision_config(model.config)
    compiles = compilation.is_wanted(role_config.torch_compile, device)
    compiles = compiles and not is_eager and not has_images
    compiler = compilation.Compiler("decoder layers", are_recomputed=recomputes, dynamic=True)
    for layer in _decoder_layers(model):
        # Wrapping the method, not the module, keeps parameter names as the checkpoint has them, and
        # FSDP's hooks outside.
        if compiles:
            layer.forward = compiler.compiled(layer.forward)
        if recomputes:
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
            if offloads:
                layer.forward = _keeping_input_on_host(layer.forward, device)
        if expert_mesh is not None:
            experts.shard_experts(layer, expert_mesh, options)
        fully_shard(layer, mesh=mesh, **options)
    root: Any = fully_shard(model, mesh=mesh, **options)
    if has_images:
        # A rank whose micro-batch has no image gives the layers that read images no gradient; the
        # others would wait for it.
        root.set_reduce_scatter_unused_params(True)


def _load(
    model: PreTrainedModel,
    source: _Source,
    shard_device: torch.device,
    device: torch.device,
) -> None:
    """Give the sharded parameters memory on `shard_device` and the values of the source; buffers
    end on `device`."""

    def materialized(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=shard_device)
        return tensor.to(shard_device)

    was_tied = _is_tied(model)
    model._apply(materialized)
    if source.stored is None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        weights = {} if source.model is None else source.model.state_dict()
        set_model_state_dict(model, weights, options=options)
    else:
        _read_own_rows(model, source.layout, source.stored)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if was_tied != _is_tied(model):
        raise RuntimeError("embedding and head were tied and are not tied any more after loading")


@torch.no_grad()
def _read_own_rows(model: PreTrainedModel, layout: CheckpointLayout, stored: StoredWeights) -> None:
    """Fill this rank's part of every parameter, and the saved buffers, one tensor after the
    other (no collective)."""
    for name, tensor in saved_tensors(model).items():
        for place, block in _own_blocks(layout.of_parameter(name), tensor):
            starts = [0] * len(place.shape)
            if starts:
                starts[block.dim] = block.start
            LivePart(tensor, block).view().copy_(
                stored.read(place.name, tuple(starts), block.shape)
            )


def _own_blocks(
    places: list[TensorPlace], tensor: Tensor
) -> Iterator[tuple[TensorPlace, OwnedBlock]]:
    """What this rank holds of tensors of the checkpoint.

    Args:
        places: of all of them that lie in `tensor`.
        tensor: a parameter, sharded by FSDP2 along its rows; or a buffer, of which every rank has
            all.
    """
    first = 0
    count = tensor.shape[0] if tensor.ndim else 1
    if isinstance(tensor, DTensor):
        shape, starts = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        first = starts[0]
        count = shape[0]
    for place in places:
        block = place.block_in(first, first + count) if count else None
        if block is not None:
            yield place, block


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()  # None: a scalar head
    return head is not None and head.weight is model.get_input_embeddings().weight


def _token_outputs(
    self: Any,
    logit_index: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy: str,
    chunk: int,
    compiled: bool,
    is_sampled: bool = True,
    **inputs: Any,
) -> TokenOutputs:
    """Log-probs (and entropies) of the wanted tokens, or the scalar head's output there, float32
    [n].

    See `batching.MicroBatch` for `logit_index`, `tokens` and `is_sampled`; `inputs` are the
    backbone's.

    This replaces the model's own forward, because FSDP2 gathers the root's parameters (embedding,
    norm, head) around that method alone.
    """
    output = self.base_model(**inputs, use_cache=False)
    hidden = output.last_hidden_state
    self.router_logits = ()
    if torch.is_grad_enabled():  # there if config.json has output_router_logits
        self.router_logits = getattr(output, "router_logits", None) or ()
    scalar_head = getattr(self, SCALAR_HEAD, None)

    def project(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
        if scalar_head:
            return scalar_head(hidden).float().squeeze(-1), None
        logits = logits_of(self, hidden)
        if is_sampled and self.forbidden_tokens:
            logits[:, self.forbidden_tokens] = -torch.inf  # as in the engine
        return log_probs_and_entropy(logits, tokens, temperature, entropy, compiled)

    return in_chunks(project, hidden, logit_index, tokens, chunk)


def sharded_weights(
    model: PreTrainedModel, layout: CheckpointLayout, wire_dtype: str
) -> list[tuple[WeightPiece, Tensor | LivePart]]:
    """This rank's part of the weight stream: what it holds of every tensor of the checkpoint, by
    the checkpoint's names, and the live tensor, or the part of one, that has it.

    Between two optimizer steps the sharded parameters do not change, so they can be read while a
    forward or backward pass runs on gathered copies. Tied tensors appear once. Adapters are no
    tensors of their own, see `lora.py`.
    """
    weights: list[tuple[WeightPiece, Tensor | LivePart]] = []
    for full_name, parameter in _own_share(model):
        name = lora.plain_name(full_name)
        if name:
            weights += _pieces(layout.of_parameter(name), parameter, wire_dtype)
    if dist.get_rank() == 0:
        for name, buffer in saved_buffers(model).items():
            # In its own dtype, with which the trainer computes: a router's bias is float32.
            own_dtype = str(buffer.dtype).removeprefix("torch.")
            weights += _pieces(layout.of_parameter(name), buffer, own_dtype)
    return weights


def sharded_adapters(model: PreTrainedModel, wire_dtype: str) -> list[tuple[WeightPiece, Tensor]]:
    """As `sharded_weights`, of the adapters' matrices alone, by the names of `lora.sent_name`."""
    weights = []
    for full_name, parameter in _own_share(model):
        name = lora.sent_name(full_name)
        if name:
            places = [TensorPlace.whole(name, tuple(parameter.shape))]
            # A whole tensor is no part of one.
            weights += [(piece, parameter) for piece, _ in _pieces(places, parameter, wire_dtype)]
    return weights


def _own_share(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters of which this rank sends its rows. Under HSDP each is sent by one replica,
    chosen so that replicas send about as much."""
    sent_numel: list[int] = []  # by replica
    parameters: Any = model.named_parameters()  # DTensors, as FSDP2 makes them
    for name, parameter in parameters:
        mesh = parameter.device_mesh
        is_replicated = parameter.placements[0].is_replicate()
        if not sent_numel:
            sent_numel = [0] * (mesh.size(0) if is_replicated else 1)
        replica = sent_numel.index(min(sent_numel))
        sent_numel[replica] += parameter.numel()  # of the whole tensor, so that all ranks agree
        if not is_replicated or mesh.get_coordinate()[0] == replica:
            yield name, parameter


def _pieces(
    places: list[TensorPlace], tensor: Tensor, wire_dtype: str
) -> list[tuple[WeightPiece, Tensor | LivePart]]:
    """This rank's pieces of tensors of the checkpoint that lie in `tensor`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_floating_point():
        dtype = wire_dtype
    pieces = []
    for place, block in _own_blocks(places, tensor):
        piece = WeightPiece(place.name, dtype, place.shape, block.start, block.stop, block.dim)
        pieces.append((piece, tensor if place.is_whole else LivePart(tensor, block)))
    return pieces
