"""A Hugging Face model under FSDP2: built, loaded, sharded, and asked for log-probs, or for a number per token.

The policy and its reference are causal language models. Critic and reward model are the same backbones with a scalar
head, which transformers calls sequence classification with one label.

Two things are easy to get wrong and silent when wrong, so they are checked at start: the tie of embedding and head, and
the layout of the checkpoint against the model's.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
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
from transformers.modeling_outputs import BaseModelOutput

from one_step_off.algorithms.core_algos import TokenOutputs, log_probs_and_entropy
from one_step_off.config.schema import (
    Config,
    ConfigError,
    TrainedConfig,
    as_config_error,
    role_model_path,
    role_settings,
)
from one_step_off.training import lora
from one_step_off.weight_sync.weight_piece import WeightPiece

SCALAR_ROLES = ("critic", "reward_model")
SCALAR_HEAD = "score"


def attention_for(cfg: Config, device: torch.device) -> str:
    """The attention implementation that model.attn_implementation means on this device."""
    if cfg.model.attn_implementation != "auto":
        return cfg.model.attn_implementation
    # Only an installed flash_attn counts: fetching a kernel from the hub would make a start depend on the network.
    flash = transformers.utils.is_flash_attn_2_available()
    return (
        "flash_attention_2"
        if flash and device.type == "cuda" and cfg.model.dtype == "bfloat16"
        else "sdpa"
    )


def _mesh(device: torch.device, fsdp_size: int) -> DeviceMesh:
    """1-D ("shard"), or 2-D ("replicate", "shard") where fsdp_size ranks share one copy (HSDP)."""
    ranks = dist.get_world_size()
    shape = (ranks,) if fsdp_size in (-1, ranks) else (ranks // fsdp_size, fsdp_size)
    return init_device_mesh(
        device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )


def build(cfg: Config, device: torch.device, role: str) -> PreTrainedModel:
    """Build the role's model without weights, shard it, then load: rank 0 reads the checkpoint and broadcasts, so a
    host holds one full copy for a moment, not one per rank. Collective. A critic whose checkpoint has no scalar head
    begins with the random one of `trainer.seed`. Raises ConfigError: on rank 0; the others wait for it until they end."""
    own = role_settings(cfg, role)
    trainable, adapted = isinstance(own, TrainedConfig), role == "actor" and cfg.model.lora_rank > 0
    # Masters are fp32. A frozen model has none, so it is held in the compute dtype.
    dtype = torch.float32 if trainable and not adapted else getattr(torch, cfg.model.dtype)
    attention = attention_for(cfg, device)
    source = None
    if dist.get_rank() == 0:
        source = read_checkpoint(cfg, role, attention, dtype, "cpu")
        if adapted:
            lora.inject(source, cfg.model)
    dist.broadcast_object_list(
        [None], src=0
    )  # what is wrong with the model, rank 0 is to say first
    model = empty(cfg, role, attention, dtype)
    model.requires_grad_(trainable)
    if adapted:
        lora.inject(model, cfg.model)
    model.eval()  # no dropout: it would make theta differ from mu at the same weights
    model.forward = types.MethodType(_answer, model)
    home = torch.device("cpu") if own.param_offload else device  # of the shards
    _shard(model, own, cfg.model.dtype, device, home)
    _load(model, source, home, device)
    return model


def _family(role: str) -> tuple[Any, dict[str, int], str]:
    """The class that makes the role's model, its arguments beyond those of every role, and what it makes."""
    if role in SCALAR_ROLES:
        return (
            transformers.AutoModelForSequenceClassification,
            {"num_labels": 1},
            "model with a scalar head",
        )
    return transformers.AutoModelForCausalLM, {}, "causal language model"


def read_checkpoint(
    cfg: Config, role: str, attention: str | None, dtype: torch.dtype, on: str
) -> PreTrainedModel:
    """The whole model on the device "cpu", with everything checked that can be checked on it; or on "meta", where only
    the heads of its files are read, and what takes numbers is not checked. Raises ConfigError."""
    path, scalar = role_model_path(cfg, role), role in SCALAR_ROLES
    key = "model.path" if path == cfg.model.path else f"{role}.path"
    auto, labels, kind = _family(role)
    how = {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": cfg.model.trust_remote_code,
    }
    how |= {
        "device_map": None if on == "cpu" else on,
        "ignore_mismatched_sizes": True,
    }  # they are refused below
    what, mend = (
        f"{path!r} is not a {kind} that can be loaded",
        "give a whole model, as save_pretrained writes it",
    )
    torch.manual_seed(cfg.trainer.seed)  # of a new scalar head
    # An unknown architecture, a broken file, code that must be trusted: errors of many types.
    with as_config_error(f"{key}: {what}", mend):
        model, report = auto.from_pretrained(path, output_loading_info=True, **how, **labels)
    lacking = {str(k) for name in ("missing_keys", "mismatched_keys") for k in report[name]}
    lacking -= {f"{SCALAR_HEAD}.weight"} if role == "critic" else set()
    if lacking:
        raise ConfigError(
            f"{key}: {path!r} lacks {len(lacking)} weights in their shapes, as {min(lacking)}; {mend}"
        )
    if scalar and not isinstance(getattr(model, SCALAR_HEAD, None), nn.Linear):
        raise ConfigError(
            f"{key}: {path!r} ({type(model).__name__}) has no linear head {SCALAR_HEAD}; give another"
        )
    if not scalar:
        check_layout(model, path)
        if on == "cpu":
            check_head(model, path)
    return model


def empty(
    cfg: Config, role: str, attention: str | None, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model with parameters on the meta device and real buffers (rotary frequencies are not in checkpoints)."""
    (auto, labels, _), trust = _family(role), cfg.model.trust_remote_code
    hf_config = transformers.AutoConfig.from_pretrained(
        role_model_path(cfg, role), trust_remote_code=trust, **labels
    )
    with accelerate.init_empty_weights(include_buffers=False):
        model = auto.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust
        )
    model.tie_weights()  # init_empty_weights makes a new Parameter at each registration, which unties them
    model.get_input_embeddings().padding_idx = (
        None  # it would keep a gradient from the token where it is no padding
    )
    return model


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The repeated blocks, which are a decoder's first list: one FSDP group and one activation checkpoint each."""
    inside = (m for part in filter(None, (model.get_decoder(), model)) for m in part.modules())
    layers = next((m for m in inside if isinstance(m, nn.ModuleList) and len(m)), None)
    if layers is None:
        raise ConfigError(f"model.path: cannot tell the decoder layers of {type(model).__name__}")
    return layers


def _shard(
    model: PreTrainedModel, own: Any, dtype: str, device: torch.device, home: torch.device
) -> None:
    """One FSDP group per decoder layer; embedding, norm and head (perhaps tied) together in the root's. `own`: the
    settings of the role."""
    compute, mesh = torch.bfloat16 if dtype == "bfloat16" else None, _mesh(device, own.fsdp_size)
    how = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
    }
    # CPUOffloadPolicy fails without an accelerator; on CPUs the parameters are in host memory anyway.
    how["offload_policy"] = OffloadPolicy() if home == device else CPUOffloadPolicy()
    for layer in _decoder_layers(model):
        # Wrapping the method, not the module, keeps parameter names as the checkpoint has them, and FSDP's hooks outside.
        if own.torch_compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if getattr(own, "activation_checkpointing", False):  # of a role that learns
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        fully_shard(layer, **how)
    fully_shard(model, **how)


def _load(
    model: PreTrainedModel, source: PreTrainedModel | None, home: torch.device, device: torch.device
) -> None:
    """Give the sharded parameters memory on `home` and rank 0's values; buffers end on `device`."""
    tied = _is_tied(model)
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(home))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, source.state_dict() if source is not None else {}, options=options)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    if tied != _is_tied(model):
        raise RuntimeError("embedding and head were tied and came apart while loading")


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()  # None: a scalar head
    return head is not None and head.weight is model.get_input_embeddings().weight


def _answer(
    self: Any,
    logit_index: Tensor,
    tokens: Tensor,
    temperature: float,
    entropy: str,
    chunk: int,
    **ids: Any,
) -> TokenOutputs:
    """Log-probs (and entropies) of the wanted tokens, or the scalar head's output there, float32 [n]: see
    `batching.MicroBatch` for them and for `ids`. It stands in for the model's own forward, because FSDP2 gathers the
    root's parameters (embedding, norm, head) around that method alone."""
    given = {name: tensor for name, tensor in ids.items() if tensor is not None}
    hidden = self.base_model(**given, use_cache=False).last_hidden_state

    def project(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
        if head := getattr(self, SCALAR_HEAD, None):
            return head(hidden).float().squeeze(-1), None
        return log_probs_and_entropy(logits_of(self, hidden), tokens, temperature, entropy)

    return in_chunks(project, hidden, logit_index, tokens, chunk)


def in_chunks(
    project: Callable[..., TokenOutputs], hidden: Tensor, at: Tensor, tokens: Tensor, chunk: int
) -> TokenOutputs:
    """`project` of the hidden states [rows, width, H] at the flat positions `at`, and of the wanted tokens there, `chunk`
    at a time; in training each is recomputed in the backward pass: all logits in fp32 would take 10 GB for 16k tokens of
    a 152k vocabulary. Where nothing is wanted one position stands in: its gradient is zero but reaches every parameter,
    so this rank takes part in every reduction."""
    where, targets = (at, tokens) if len(tokens) else (at.new_zeros(1), tokens.new_zeros(1))
    hidden = hidden.reshape(-1, hidden.shape[-1]).index_select(0, where)
    if torch.is_grad_enabled() and len(targets) > chunk:
        project = functools.partial(
            checkpoint, project, use_reentrant=False, preserve_rng_state=False
        )
    parts = [project(h, t) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    joined = (
        None if part[0] is None else torch.cat(part)[: len(tokens)]
        for part in zip(*parts, strict=True)
    )
    # Clones: FSDP2's backward hook must not sit on a view.
    return tuple(x if x is None else x.clone() for x in joined)


class _Hidden(BaseModelOutput):
    """Stands for the output of the backbone: hidden states, and None for whatever else is asked."""

    def __getattr__(self, name: str) -> None:
        return None


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [n, vocabulary] of the backbone's output [n, H], by the model's own forward with its backbone replaced: after
    the head Cohere and Granite scale, Falcon-H1 multiplies and Gemma caps softly, and no architecture need be known."""
    model.base_model.forward = lambda *args, **kwargs: _Hidden(last_hidden_state=hidden[None])
    try:
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return type(model).forward(model, input_ids=tokens, use_cache=False).logits[0]
    finally:
        del model.base_model.forward


@torch.no_grad()
def check_head(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that `logits_of` does not work with, as one that asks a part of its backbone (OPT)."""
    where, size = (
        f"model.path: {path!r} ({type(model).__name__})",
        model.config.get_text_config().hidden_size,
    )
    with as_config_error(
        f"{where}: the logits of this architecture cannot be checked", "give another model"
    ):
        found = [
            logits_of(model, torch.full((4, size), x, dtype=model.dtype).cumsum(-1))
            for x in (0.01, -0.02)
        ]
    if torch.equal(*found):
        raise ConfigError(
            f"{where} makes its logits in a way this trainer does not know: not of its backbone's output"
        )


def check_layout(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that transformers stores in another layout than the checkpoint's (fused experts, say). Its
    parameters could be trained, but not streamed row by row under their checkpoint names."""
    from transformers.core_model_loading import revert_weight_conversion

    meta = {k: torch.empty_like(v, device="meta") for k, v in model.state_dict().items()}
    stored = revert_weight_conversion(model, dict(meta))
    moved = sorted(set(stored) ^ set(meta)) or sorted(
        k for k in meta if stored[k].shape != meta[k].shape
    )
    if moved:
        other = f"in another layout than it is trained in (as {moved[0]}); the fsdp back end cannot stream its weights"
        raise ConfigError(f"model.path: {path!r} ({type(model).__name__}) is stored {other}")


def sharded_weights(model: PreTrainedModel, wire_dtype: str) -> list[tuple[WeightPiece, Tensor]]:
    """This rank's share of the weight stream: the rows it holds of every tensor, under checkpoint names. Between an
    optimiser step and the next the sharded parameters do not change, so they can be read while a forward or backward
    pass runs on gathered copies. Tied tensors appear once. HSDP's replicas are dealt the tensors by size. Adapters
    are no tensors of their own (see lora.py)."""
    held, loads = [], None
    parameters: Any = model.named_parameters()  # DTensors, as FSDP2 makes them
    for full_name, parameter in parameters:
        mesh, name = parameter.device_mesh, lora.plain_name(full_name)
        if not name:
            continue
        rows, offset = compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.placements
        )
        loads = loads or [0] * (mesh.size(0) if mesh.ndim == 2 else 1)
        replica = loads.index(min(loads))
        loads[replica] += parameter.numel()  # of the whole, so that all ranks count alike
        if rows[0] and (mesh.ndim == 1 or mesh.get_coordinate()[0] == replica):
            held.append((name, parameter, offset[0], offset[0] + rows[0]))
    if dist.get_rank() == 0:
        kept = set(model.state_dict())
        held += [
            (n, b, 0, b.shape[0] if b.ndim else 1) for n, b in model.named_buffers() if n in kept
        ]

    def piece(name: str, tensor: Tensor, start: int, stop: int) -> WeightPiece:
        dtype = (
            wire_dtype if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
        )
        return WeightPiece(name, dtype, tuple(tensor.shape), start, stop)

    return [(piece(*rows), rows[1]) for rows in held]
