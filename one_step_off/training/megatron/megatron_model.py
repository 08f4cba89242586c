"""A Hugging Face model as Megatron-core chunks: this rank's stages and shards, built in one
function.

Transformer Engine's layers on GPUs; Megatron's local ones, in plain torch, on CPUs. Only the wanted
positions reach the head, whose vocabulary stays split over the tensor-parallel ranks.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from megatron.core import jit, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from one_step_off.algorithms import batching
from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import BackendConfig, TrainedConfig
from one_step_off.models.hf_model import SCALAR_ROLES
from one_step_off.training.megatron.megatron_weights import head_dim
from one_step_off.training.packed_attention import FIRST_HOPPER_GPU, attend_per_sequence
from one_step_off.training.token_outputs import TokenOutputs, in_chunks, row_statistics

# Megatron's own switch, before its other modules are imported: on short runs compiling costs more
# than it gains.
jit.disable_jit_fuser()


def parallel_sizes(role_config: BackendConfig) -> dict[str, Any]:
    """Over how many ranks each dimension is divided, by Megatron's names."""
    return {
        "tensor_model_parallel_size": role_config.tensor_parallel_size,
        "pipeline_model_parallel_size": role_config.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": role_config.virtual_pipeline_parallel_size,
        "expert_model_parallel_size": role_config.expert_parallel_size,
        "context_parallel_size": role_config.context_parallel_size,
        # Experts are spread out, not cut: their columns are few.
        "expert_tensor_parallel_size": 1,
    }


def packs(cfg: Config, role: str, device: torch.device) -> bool:
    """Whether the role's batches are packed.

    Transformer Engine has two kernels for packed sequences: flash_attn's, where it is installed,
    and cuDNN's, on Hopper and later GPUs.

    Raises:
        ConfigError: packing=on, and there is no such kernel here.
    """
    role_config = role_settings(cfg, role)
    if role_config.packing == "off":
        return False
    if role_config.packing == "on":
        if device.type == "cuda" and not _has_packed_kernel(cfg, device):
            raise ConfigError(
                f"{role}.packing=on: Transformer Engine packs bfloat16 only, on Hopper and later "
                "GPUs or where flash_attn is installed; use auto"
            )
        return True
    if role_config.context_parallel_size > 1 or role_config.virtual_pipeline_parallel_size:
        return False
    return device.type == "cuda" and _has_packed_kernel(cfg, device)


def _has_packed_kernel(cfg: Config, device: torch.device) -> bool:
    if cfg.model.dtype != "bfloat16":
        return False
    is_hopper = torch.cuda.get_device_capability(device) >= FIRST_HOPPER_GPU
    return is_hopper or transformers.utils.is_flash_attn_2_available()


def packed_parameters(cu_seqlens: Tensor, max_seqlen: int) -> PackedSeqParams:
    """What Megatron's layers need to know of packed sequences, see `batching.MicroBatch`."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )


def _finalize_gradients(chunks: list[nn.Module], *_: Any, **__: Any) -> None:
    finalize_model_grads(chunks)


def _transformer_config(
    cfg: Config, role: str, hf_config: Any, device: torch.device
) -> TransformerConfig:
    role_config = role_settings(cfg, role)
    is_cuda = device.type == "cuda"
    dtype = getattr(torch, cfg.model.dtype)
    settings: dict[str, Any] = {
        **parallel_sizes(role_config),
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim(hf_config),
        "ffn_hidden_size": hf_config.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "qk_layernorm": hf_config.model_type.startswith("qwen3"),
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "sequence_parallel": role_config.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Every weight is loaded.
        "perform_initialization": False,
        "use_cpu_initialization": not is_cuda,
        # Micro-batches differ in shape, which the schedule of virtual stages cannot send; so there
        # they are padded alike.
        "variable_seq_lengths": not role_config.virtual_pipeline_parallel_size,
        "batch_p2p_comm": is_cuda,
        # Megatron's own code for packed sequences reads their boundaries back from the device, in
        # each layer.
        "apply_rope_fusion": is_cuda and packs(cfg, role, device),
        # The only dispatcher for shapes that differ.
        "moe_token_dispatcher_type": "alltoall",
        # The micro-batches' and ranks' losses are parts of one sum.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": _finalize_gradients,
    }
    if isinstance(role_config, TrainedConfig) and role_config.activation_checkpointing:
        settings["recompute_granularity"] = "full"
        settings["recompute_method"] = "uniform"
        settings["recompute_num_layers"] = 1
    if hf_config.model_type == "qwen3_moe":
        settings |= _expert_settings(hf_config, is_cuda)
    return TransformerConfig(**settings)


def _expert_settings(hf_config: Any, is_cuda: bool) -> dict[str, Any]:
    dense_layers = set(hf_config.mlp_only_layers or ())
    is_sparse = []
    for i in range(hf_config.num_hidden_layers):
        is_due = (i + 1) % hf_config.decoder_sparse_step == 0
        is_sparse.append(int(is_due and i not in dense_layers))
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_layer_freq": is_sparse,
        "moe_grouped_gemm": is_cuda,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        # An auxiliary loss would move the policy off its objective.
        "moe_router_load_balancing_type": "none",
    }


class _Norm(nn.RMSNorm):
    """The local layers' norm. Megatron's own refuses sequence parallelism, which only asks for a
    mark on the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        # Megatron's mark.
        self.weight.sequence_parallel = config.sequence_parallel  # ty: ignore[missing-attribute]


class _Attention(nn.Module):
    """The local layers' causal attention, by torch's own kernel, also of what Megatron leaves to
    Transformer Engine: under context parallelism this rank's queries meet the keys and values of
    all ranks; packed sequences come one after the other."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """All are [positions, rows, heads, width], or [positions, heads, width] when packed; the
        result has the heads side by side."""
        if packed_seq_params is not None:
            return _attend_packed(query, key, value, packed_seq_params)
        group = mpu.get_context_parallel_group()
        mask = None
        if group.size() > 1:
            key = tensor_parallel.gather_from_sequence_parallel_region(key, group=group)
            value = tensor_parallel.gather_from_sequence_parallel_region(value, group=group)
            mask = _causal_mask(len(key), group.rank(), group.size())
        attended = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return attended.permute(2, 0, 1, 3).flatten(2)


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
    """All are [T, heads, width]; the result is [T, heads * width]."""
    lengths = packed.cu_seqlens_q.diff().tolist()
    rows = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    return attend_per_sequence(*rows, lengths)[0].transpose(0, 1).flatten(1)


def _causal_mask(width: int, rank: int, ranks: int) -> Tensor:
    """bool [own positions, width]: which keys, in the order in which the ranks hold them, a rank's
    queries see."""
    positions = [
        torch.from_numpy(batching.context_parallel_columns(width, r, ranks)) for r in range(ranks)
    ]
    return torch.cat(positions) <= positions[rank][:, None]


def build(cfg: Config, role: str, hf_config: Any, device: torch.device) -> list[GPTModel]:
    """This rank's chunks of the role's model, one per virtual stage, without weights; Megatron's
    groups exist."""
    config = _transformer_config(cfg, role, hf_config, device)
    virtual_stages = config.virtual_pipeline_model_parallel_size
    stages = range(virtual_stages) if virtual_stages else (None,)
    chunks = []
    for stage in stages:
        chunk = _build_chunk(config, hf_config, role, device, stage)
        chunks.append(chunk.to(device=device, dtype=config.params_dtype))
    return chunks


def _build_chunk(
    config: TransformerConfig, hf_config: Any, role: str, device: torch.device, stage: int | None
) -> GPTModel:
    is_cuda = device.type == "cuda"
    has_scalar_head = role in SCALAR_ROLES
    rope = dict(hf_config.rope_parameters)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=is_cuda, vp_stage=stage)
    if not is_cuda:
        _use_plain_torch(spec, config)
    tensor_parallel_size = config.tensor_model_parallel_size
    padded_vocabulary = -(-hf_config.vocab_size // tensor_parallel_size) * tensor_parallel_size
    chunk = GPTModel(
        config,
        spec,
        padded_vocabulary,
        hf_config.max_position_embeddings,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not has_scalar_head,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 8.0),
    )
    if has_scalar_head and chunk.post_process:  # every tensor-parallel rank holds the same head
        chunk.output_layer = nn.Linear(hf_config.hidden_size, 1, bias=False)
    return chunk


def _use_plain_torch(spec: Any, config: TransformerConfig) -> None:
    """Put norms and attention in plain torch into the specification of the local layers."""
    spec.layer_norm = _Norm
    for layer_spec in spec.layer_specs:
        layer = layer_spec.submodules
        layer.input_layernorm = _Norm
        layer.pre_mlp_layernorm = _Norm
        attention = layer.self_attention.submodules
        attention.core_attention = _Attention
        if config.qk_layernorm:
            attention.q_layernorm = _Norm
            attention.k_layernorm = _Norm


class GivenChoice:
    """What a Megatron router asks for its choice (its `router_replay`): the experts of the engine.

    Megatron's own class takes the experts of a micro-batch for all passes that follow. Here a pass
    that computes activations again takes those of its own micro-batch, which other micro-batches
    of the pipeline have followed.

    Args:
        layer: of the router, in the whole model.
        recomputes: the layers run without gradients first, and with them in the backward pass,
            micro-batches in the same order.
    """

    def __init__(self, layer: int, recomputes: bool) -> None:
        self.layer = layer
        self.recomputes = recomputes
        self.experts: Tensor | None = None
        self.waiting: deque[Tensor | None] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """As Megatron calls it: scores and numbers of the chosen experts, [tokens, topk] of
        `scores` [tokens, experts]."""
        experts = self.experts
        if self.recomputes and torch.is_grad_enabled():
            experts = self.waiting.popleft()
        elif self.recomputes:
            self.waiting.append(experts)
        values, own = compute(scores, topk, num_groups, group_topk)
        if experts is None:
            return values, own
        given = experts[:, self.layer].long()
        chosen = torch.where(given >= 0, given, own)
        return scores.gather(1, chosen), chosen


class MegatronReplay:
    """Gives the routers of a rank's chunks the experts of the engine, as `RouterReplay` does."""

    def __init__(self, chunks: list[GPTModel]) -> None:
        self.config = chunks[0].config
        recomputes = self.config.recompute_granularity == "full"
        self.choices: list[list[GivenChoice]] = []
        for chunk in chunks:
            choices = []
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    choices.append(GivenChoice(module.layer_number - 1, recomputes))
                    module.router_replay = choices[-1]
            self.choices.append(choices)

    def begin(self) -> None:
        """Forget what no backward pass has asked for; before each pass over micro-batches."""
        for choices in self.choices:
            for choice in choices:
                choice.waiting.clear()

    def use(self, chunk: int, part: batching.MicroBatch, device: torch.device) -> None:
        """The experts for the next forward pass of a chunk. `part`: this context-parallel rank's
        part of a micro-batch."""
        experts = None
        if part.experts is not None:
            # Megatron's tokens lie position by position, and sequence parallelism cuts these.
            by_position = part.grid_of_experts().swapaxes(0, 1)
            if self.config.sequence_parallel:
                count = len(by_position) // self.config.tensor_model_parallel_size
                first = mpu.get_tensor_model_parallel_rank() * count
                by_position = by_position[first : first + count]
            flat = np.ascontiguousarray(by_position).reshape(-1, *part.experts.shape[1:])
            experts = torch.from_numpy(flat).to(device)
        for choice in self.choices[chunk]:
            choice.experts = experts


def at_positions(
    logit_index: Tensor,
    tokens: Tensor,
    vocabulary: int,
    temperature: float,
    entropy: str,
    chunk: int,
    compiled: bool,
    **hook: Any,
) -> TokenOutputs:
    """GPTModel's `output_processor` on the last stage: log-probs (and entropies) of wanted tokens,
    float32 [n]; with a scalar head, its output at those positions.

    Args:
        logit_index, tokens: as in `batching.MicroBatch`.
        vocabulary: entries without padding.
        temperature, entropy: as in `token_outputs.log_probs_and_entropy`.
        chunk: how many tokens' logits exist at once.
        compiled: as in `token_outputs.log_probs_and_entropy`.
        hook: what GPTModel gives: hidden states, head, weight of the head, config.
    """
    hidden = hook["hidden_states"]
    head = hook["output_layer"]
    if hook["config"].sequence_parallel:
        # What follows is the same on every rank, and its gradient whole; so backward only takes
        # this rank's part.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    hidden = hidden.transpose(0, 1)  # Megatron has [width, rows, hidden]
    if isinstance(head, nn.Linear):

        def scalar(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
            return head(hidden).float().squeeze(-1), None

        return in_chunks(scalar, hidden, logit_index, tokens, chunk)

    weight = head.weight if hook["output_weight"] is None else hook["output_weight"]
    first_entry = mpu.get_tensor_model_parallel_rank() * weight.shape[0]
    entries = max(0, min(weight.shape[0], vocabulary - first_entry))  # without the padding

    def log_probs(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
        copied = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        logits = F.linear(copied, weight)[:, :entries]
        return split_log_probs(logits, tokens, first_entry, temperature, entropy, compiled)

    return in_chunks(log_probs, hidden, logit_index, tokens, chunk)


def joined(values: Tensor, indices: Tensor, count: int) -> Tensor:
    """The values [count] of all wanted tokens, of which this context-parallel rank has those at
    `indices` [n]."""
    whole = values.new_zeros(count).index_copy(0, indices, values)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(
        whole, group=mpu.get_context_parallel_group()
    )


def split_log_probs(
    logits: Tensor,
    tokens: Tensor,
    first_entry: int,
    temperature: float,
    entropy: str,
    compiled: bool,
) -> TokenOutputs:
    """As `token_outputs.log_probs_and_entropy`, of logits whose vocabulary is split over the
    tensor-parallel ranks. Each rank computes the distribution over its own entries, of which the
    whole one is the mixture: with t the weight of a rank's share and T the sum of all,

        log p = log p(own entries) + log t - log T      H = log T + sum of t (H(own) - log t) / T

    Args:
        logits: [n, entries from `first_entry` on].
        tokens: int64 [n]; any entry of the whole vocabulary.
    """
    # Only sums are reduced, and all that depends on them is the same on every rank, so their
    # gradient is identity.
    reduce = tensor_parallel.reduce_from_tensor_model_parallel_region
    entries = logits.shape[1]
    is_here = (tokens >= first_entry) & (tokens < first_entry + entries)
    index = (tokens - first_entry).clamp(0, entries - 1)
    own = row_statistics(logits, index, temperature, entropy, compiled)
    highest = own.highest.clone()
    torch.distributed.all_reduce(
        highest, torch.distributed.ReduceOp.MAX, mpu.get_tensor_model_parallel_group()
    )
    log_weight = own.log_total + (own.highest - highest)
    weight = log_weight.exp()
    chosen = torch.where(is_here, own.chosen[:, 0] + log_weight, 0.0)
    parts = [weight, chosen]
    if entropy == "squares":
        parts.append(weight.square() * own.figure)
    elif entropy != "none":
        parts.append(weight * (own.figure - log_weight))
    total, chosen, *figures = reduce(torch.stack(parts))
    log_probs = chosen - total.log()
    if entropy == "none":
        return log_probs, None
    if entropy == "squares":
        return log_probs, figures[0] / total.square()
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return log_probs, total.log() + figures[0] / total
