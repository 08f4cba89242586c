"""A Hugging Face model under FSDP2: built, sharded and loaded; it computes log-probs, or a number
per token.

If embedding and head lost their tie while loading, training would be silently wrong, so the tie is
checked at the start.
"""

import functools
import os
import types
from collections.abc import Callable
from typing import Any

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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import TrainedConfig
from one_step_off.models.hf_model import (
    SCALAR_HEAD,
    SCALAR_ROLES,
    check_stored_head,
    empty_model,
    logits_of,
    read_checkpoint,
)
from one_step_off.models.stored_weights import StoredWeights
from one_step_off.training import compilation, lora, packed_attention
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


def build(cfg: Config, device: torch.device, role: str) -> tuple[PreTrainedModel, AttentionChoice]:
    """Build the role's model without weights, shard it, then load it (collective). Returns it, and
    its attention.

    Each rank reads its own rows where the checkpoint has every tensor under the model's own name,
    in safetensors files, so no process ever holds the whole model. Otherwise rank 0 reads the
    checkpoint and broadcasts, and its host holds one full copy for a moment: models with adapters,
    from the hub or in other files. A critic whose checkpoint has no scalar head, which is such a
    case, begins with the random one of `trainer.seed`.

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
    source = None
    stored = _checkpoint_of_all_ranks(cfg, role) if not has_adapters else None
    choice: list[Any] = [None]
    if dist.get_rank() == 0:
        source = _checked_source(cfg, role, dtype, stored)
        if has_adapters:
            lora.inject(source, cfg.model)
        choice[0] = packed_attention.choose(cfg, role, device)
    # The others wait here, so that rank 0 is the first to report what is wrong with the model.
    dist.broadcast_object_list(choice, src=0)
    attention: AttentionChoice = choice[0]
    packed_attention.register()
    model = empty_model(cfg, role, attention.implementation, dtype)
    model.requires_grad_(is_trained)
    if has_adapters:
        lora.inject(model, cfg.model)
    model.eval()  # no dropout: it would make theta differ from mu at the same weights
    model.forward = types.MethodType(_token_outputs, model)
    shard_device = torch.device("cpu") if role_config.param_offload else device
    _shard(model, role_config, cfg.model.dtype, device, shard_device)
    _load(model, source, stored, shard_device, device)
    return model, attention


def _checkpoint_of_all_ranks(cfg: Config, role: str) -> StoredWeights | None:
    """As `_complete_checkpoint`; None on every rank if one of them does not have the files, since
    the folder may be on rank 0's node only (collective)."""
    stored = _complete_checkpoint(cfg, role)
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, stored is not None)
    return stored if all(found) else None


def _checked_source(
    cfg: Config, role: str, dtype: torch.dtype, stored: StoredWeights | None
) -> PreTrainedModel | None:
    """On rank 0, after all checks: the model that it reads for all ranks; None where each rank
    reads its own rows of `stored`."""
    requested = cfg.model.attn_implementation
    attention = "sdpa" if requested == "auto" else requested
    if stored is None:
        return read_checkpoint(cfg, role, attention, dtype, "cpu")
    _check_stored(cfg, role, attention, stored)
    return None


def _complete_checkpoint(cfg: Config, role: str) -> StoredWeights | None:
    """The files from which each rank reads its own rows; None: they do not have all of the model,
    or not under its names."""
    path = role_model_path(cfg, role)
    if cfg.model.trust_remote_code or not os.path.isdir(path):
        return None
    try:
        stored = StoredWeights.find(path)
        if stored is None or not stored.covers(empty_model(cfg, role, None, None)):
            return None
    except Exception:  # broken files, of any kind: reading the whole model names what is wrong
        return None
    return stored


def _check_stored(cfg: Config, role: str, attention: str, stored: StoredWeights) -> None:
    """The checks of `read_checkpoint`, which then reads the files' headers and the head alone."""
    model = read_checkpoint(cfg, role, attention, getattr(torch, cfg.model.dtype), "meta")
    if role not in SCALAR_ROLES:
        check_stored_head(model, stored, role_model_path(cfg, role))


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


def _shard(
    model: PreTrainedModel,
    role_config: Any,
    dtype: str,
    device: torch.device,
    shard_device: torch.device,
) -> None:
    """One FSDP group and one activation checkpoint per decoder layer; embedding, norm and head
    (perhaps tied) together in the root's group."""
    compute_dtype = torch.bfloat16 if dtype == "bfloat16" else None
    # CPUOffloadPolicy fails without an accelerator; on CPUs the parameters are in host memory
    # anyway.
    offload_policy = OffloadPolicy() if shard_device == device else CPUOffloadPolicy()
    options = {
        "mesh": _device_mesh(device, role_config.fsdp_size),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": offload_policy,
    }
    recomputes = getattr(role_config, "activation_checkpointing", False)  # of trainable roles
    compiles = compilation.is_wanted(role_config.torch_compile, device)
    compiler = compilation.Compiler("decoder layers", dynamic=True)
    for layer in _decoder_layers(model):
        # Wrapping the method, not the module, keeps parameter names as the checkpoint has them, and
        # FSDP's hooks outside.
        if compiles:
            layer.forward = compiler.compiled(layer.forward)
        if recomputes:
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _load(
    model: PreTrainedModel,
    source: PreTrainedModel | None,
    stored: StoredWeights | None,
    shard_device: torch.device,
    device: torch.device,
) -> None:
    """Give the sharded parameters memory on `shard_device` and the values of `stored`, or those of
    rank 0's `source`; buffers end on `device`."""

    def materialized(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=shard_device)
        return tensor.to(shard_device)

    was_tied = _is_tied(model)
    model._apply(materialized)
    if stored is None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        weights = {} if source is None else source.state_dict()
        set_model_state_dict(model, weights, options=options)
    else:
        _read_own_rows(model, stored)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if was_tied != _is_tied(model):
        raise RuntimeError("embedding and head were tied and are not tied any more after loading")


@torch.no_grad()
def _read_own_rows(model: PreTrainedModel, stored: StoredWeights) -> None:
    """Fill this rank's part of every parameter, and the saved buffers, one tensor after the
    other (no collective)."""
    parameters: Any = model.named_parameters()  # DTensors, as FSDP2 makes them
    for name, parameter in parameters:
        shape, starts = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        local = parameter.to_local()
        if local.numel():
            local.copy_(stored.read(name, starts, shape).view(local.shape))
    saved_names = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved_names:
            buffer.copy_(stored.read_whole(name))


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
    **inputs: Any,
) -> TokenOutputs:
    """Log-probs (and entropies) of the wanted tokens, or the scalar head's output there, float32
    [n].

    See `batching.MicroBatch` for `logit_index` and `tokens`; `inputs` are the backbone's. This
    replaces the model's own forward, because FSDP2 gathers the root's parameters (embedding, norm,
    head) around that method alone.
    """
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state
    scalar_head = getattr(self, SCALAR_HEAD, None)

    def project(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
        if scalar_head:
            return scalar_head(hidden).float().squeeze(-1), None
        logits = logits_of(self, hidden)
        return log_probs_and_entropy(logits, tokens, temperature, entropy, compiled)

    return in_chunks(project, hidden, logit_index, tokens, chunk)


def sharded_weights(model: PreTrainedModel, wire_dtype: str) -> list[tuple[WeightPiece, Tensor]]:
    """This rank's part of the weight stream: the rows that it holds of every tensor, under
    checkpoint names.

    Between two optimizer steps the sharded parameters do not change, so they can be read while a
    forward or backward pass runs on gathered copies. Tied tensors appear once. Under HSDP each
    tensor is sent by one replica, chosen so that replicas send about as much. Adapters are no
    tensors of their own, see `lora.py`.
    """
    weights = _parameter_rows(model, wire_dtype, lora.plain_name)
    if dist.get_rank() == 0:
        weights += _saved_buffers(model, wire_dtype)
    return weights


def sharded_adapters(model: PreTrainedModel, wire_dtype: str) -> list[tuple[WeightPiece, Tensor]]:
    """As `sharded_weights`, of the adapters' matrices alone, by the names of `lora.sent_name`."""
    return _parameter_rows(model, wire_dtype, lora.sent_name)


def _parameter_rows(
    model: PreTrainedModel, wire_dtype: str, name_on_wire: Callable[[str], str | None]
) -> list[tuple[WeightPiece, Tensor]]:
    """This rank's rows of the parameters that have a name on the wire."""
    weights = []
    sent_numel: list[int] = []  # by replica
    parameters: Any = model.named_parameters()  # DTensors, as FSDP2 makes them
    for full_name, parameter in parameters:
        name = name_on_wire(full_name)
        if not name:
            continue
        mesh = parameter.device_mesh
        is_replicated = mesh.ndim == 2
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.placements
        )
        if not sent_numel:
            sent_numel = [0] * (mesh.size(0) if is_replicated else 1)
        replica = sent_numel.index(min(sent_numel))
        sent_numel[replica] += parameter.numel()  # of the whole tensor, so that all ranks agree
        is_sender = not is_replicated or mesh.get_coordinate()[0] == replica
        if shape[0] and is_sender:
            first_row = offset[0]
            piece = _piece(name, parameter, first_row, first_row + shape[0], wire_dtype)
            weights.append((piece, parameter))
    return weights


def _saved_buffers(model: PreTrainedModel, wire_dtype: str) -> list[tuple[WeightPiece, Tensor]]:
    """The buffers that a checkpoint holds; every rank has all of them."""
    saved_names = set(model.state_dict())
    weights = []
    for name, buffer in model.named_buffers():
        if name in saved_names:
            rows = buffer.shape[0] if buffer.ndim else 1
            weights.append((_piece(name, buffer, 0, rows, wire_dtype), buffer))
    return weights


def _piece(name: str, tensor: Tensor, start: int, stop: int, wire_dtype: str) -> WeightPiece:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_floating_point():
        dtype = wire_dtype
    return WeightPiece(name, dtype, tuple(tensor.shape), start, stop)
