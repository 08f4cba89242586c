"""A Hugging Face model as Megatron-core chunks: this rank's stages and shards, built in one function.

Transformer Engine's layers on GPUs; Megatron's local ones, in plain torch, on CPUs. Only the positions that are asked
for reach the head, whose vocabulary stays split over the tensor-parallel ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from megatron.core import jit, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from transformers.utils.hub import has_file

from one_step_off.algorithms import batching
from one_step_off.algorithms.core_algos import TokenOutputs
from one_step_off.config.schema import (
    BackendConfig,
    Config,
    ConfigError,
    TrainedConfig,
    role_model_path,
    role_settings,
)
from one_step_off.training.fsdp_model import SCALAR_ROLES, in_chunks
from one_step_off.training.megatron_weights import head_dim

jit.disable_jit_fuser()  # what it would compile is off below; compiling costs more than it gains on short runs

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_config(cfg: Config, role: str) -> Any:
    """The model's config.json, once it is sure that Megatron makes the same model of it. Raises ConfigError: a family,
    or a variant of one, that this back end does not know, or sizes that do not divide."""
    path, own = role_model_path(cfg, role), role_settings(cfg, role)
    hf = transformers.AutoConfig.from_pretrained(
        path, trust_remote_code=cfg.model.trust_remote_code
    )
    where = f"{role}.backend=megatron with {path!r}"
    if hf.model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: model type {hf.model_type} is none of {', '.join(FAMILIES)}; use backend=fsdp"
        )
    if not any(has_file(path, f"model.safetensors{part}") for part in ("", ".index.json")):
        raise ConfigError(
            f"{where}: it has no model.safetensors, which alone this back end reads; use backend=fsdp"
        )
    rope = dict(hf.rope_parameters)
    llama3 = {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    known = {"default": {}, "llama3": llama3}.get(rope["rope_type"])
    odd = {
        name: getattr(hf, name, False)
        for name in ("use_sliding_window", "attention_bias", "mlp_bias")
    }
    odd["rope_parameters"] = known is None or any(rope[k] != v for k, v in known.items())
    odd["hidden_act"] = hf.hidden_act != "silu"
    for name in (name for name, is_odd in odd.items() if is_odd):
        raise ConfigError(
            f"{where}: its {name}={getattr(hf, name)} is not known to this back end; use backend=fsdp"
        )
    tp, ep = own.tensor_parallel_size, own.expert_parallel_size
    stages = own.pipeline_parallel_size * (own.virtual_pipeline_parallel_size or 1)
    experts = getattr(hf, "num_experts", 0) or 0 if hf.model_type == "qwen3_moe" else 0
    for key, value, size, what in (
        ("tensor_parallel_size", tp, hf.num_key_value_heads, "key-value heads"),
        ("tensor_parallel_size", tp, hf.intermediate_size, "columns of the MLP"),
        ("pipeline_parallel_size", stages, hf.num_hidden_layers, "layers"),
        ("expert_parallel_size", ep, experts, "experts"),
    ):
        given = f"{role}.{key}={getattr(own, key)}"
        if what == "experts" and value > 1 and not experts:
            raise ConfigError(f"{given}: {path!r} is a dense model, without experts; set it to 1")
        if size % value:
            of = f", in all {value} stages," if value != getattr(own, key) else ""
            raise ConfigError(
                f"{given}{of} does not divide the {size} {what} of {path!r}; use a size that does"
            )
    if experts and tp > 1 and not own.sequence_parallel:
        needs = f"tensor parallelism of {path!r}, with experts, needs it true"
        raise ConfigError(f"{role}.sequence_parallel=false: {needs}")
    return hf


def sizes(own: BackendConfig) -> dict[str, Any]:
    """Over how many ranks each dimension is divided, by Megatron's names."""
    split = {
        f"{of}_model_parallel_size": of
        for of in ("tensor", "pipeline", "virtual_pipeline", "expert")
    }
    found = {name: getattr(own, f"{of}_parallel_size") for name, of in split.items()}
    # Experts are spread out, not cut: their columns are few.
    return found | {
        "context_parallel_size": own.context_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def _transformer_config(cfg: Config, role: str, hf: Any, device: torch.device) -> TransformerConfig:
    own, cuda = role_settings(cfg, role), device.type == "cuda"
    dtype = getattr(torch, cfg.model.dtype)
    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        **sizes(own),
    }
    settings |= {
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
    }
    settings |= {"kv_channels": head_dim(hf), "add_qkv_bias": hf.model_type == "qwen2"}
    settings |= {
        "ffn_hidden_size": hf.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": F.silu,
    }
    settings |= {"normalization": "RMSNorm", "layernorm_epsilon": hf.rms_norm_eps}
    settings |= {
        "qk_layernorm": hf.model_type.startswith("qwen3"),
        "sequence_parallel": own.sequence_parallel,
    }
    settings |= {"add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    settings |= {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16}
    # Every weight is loaded.
    settings |= {"perform_initialization": False, "use_cpu_initialization": not cuda}
    # Micro-batches differ in shape, which the schedule of virtual stages cannot send; so there they are padded alike.
    settings |= {
        "variable_seq_lengths": not own.virtual_pipeline_parallel_size,
        "batch_p2p_comm": cuda,
    }
    settings["moe_token_dispatcher_type"] = "alltoall"  # the only one for shapes that differ
    # Their losses are parts of one sum, over micro-batches and ranks.
    settings["calculate_per_token_loss"] = True
    settings["finalize_model_grads_func"] = lambda chunks, *_, **__: finalize_model_grads(chunks)
    if isinstance(own, TrainedConfig) and own.activation_checkpointing:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if hf.model_type == "qwen3_moe":
        step, dense = hf.decoder_sparse_step, set(hf.mlp_only_layers or ())
        sparse = [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]
        settings |= {
            "num_moe_experts": hf.num_experts,
            "moe_layer_freq": sparse,
            "moe_grouped_gemm": cuda,
        }
        settings |= {
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            "moe_router_topk": hf.num_experts_per_tok,
        }
        settings |= {"moe_router_pre_softmax": not hf.norm_topk_prob, "moe_router_dtype": "fp32"}
        settings["moe_router_load_balancing_type"] = (
            "none"  # an auxiliary loss would move the policy off its objective
        )
    return TransformerConfig(**settings)


class _Norm(nn.RMSNorm):
    """The local layers' norm. Megatron's own refuses sequence parallelism, which only asks for a mark on the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # ty: ignore[missing-attribute]  (Megatron's mark)


class _Attention(nn.Module):
    """The local layers' causal attention, by torch's own kernel. Under context parallelism, which Megatron leaves to
    Transformer Engine, this rank's queries meet the keys and values of all ranks."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """All are [positions, rows, heads, width]; the result has the heads side by side."""
        group, mask = mpu.get_context_parallel_group(), None
        if group.size() > 1:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x, group=group)
                for x in (key, value)
            )
            at = [
                torch.from_numpy(batching.context_parallel_columns(len(key), r, group.size()))
                for r in range(group.size())
            ]
            mask = torch.cat(at) <= at[group.rank()][:, None]
        laid = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        found = F.scaled_dot_product_attention(
            *laid, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return found.permute(2, 0, 1, 3).flatten(2)


def build(cfg: Config, role: str, hf: Any, device: torch.device) -> list[GPTModel]:
    """This rank's chunks of the role's model, one per virtual stage, without weights; Megatron's groups exist."""
    config = _transformer_config(cfg, role, hf, device)
    cuda, scalar, chunks = device.type == "cuda", role in SCALAR_ROLES, []
    virtual = config.virtual_pipeline_model_parallel_size
    tp, rope = config.tensor_model_parallel_size, dict(hf.rope_parameters)
    for stage in range(virtual) if virtual else (None,):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=cuda, vp_stage=stage)
        if not cuda:
            spec.layer_norm = _Norm
            for layer in (layer.submodules for layer in spec.layer_specs):
                layer.input_layernorm = layer.pre_mlp_layernorm = _Norm
                attention = layer.self_attention.submodules
                attention.core_attention = _Attention
                if config.qk_layernorm:
                    attention.q_layernorm = attention.k_layernorm = _Norm
        of_stage = {"ignore_virtual": False, "vp_stage": stage}
        ends = mpu.is_pipeline_first_stage(**of_stage), mpu.is_pipeline_last_stage(**of_stage)
        how = {"pre_process": ends[0], "post_process": ends[1], "vp_stage": stage}
        how |= {"share_embeddings_and_output_weights": hf.tie_word_embeddings and not scalar}
        how |= {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
        how |= {
            "rope_scaling": rope["rope_type"] == "llama3",
            "rope_scaling_factor": rope.get("factor", 8.0),
        }
        chunk = GPTModel(
            config, spec, -(-hf.vocab_size // tp) * tp, hf.max_position_embeddings, **how
        )
        if scalar and chunk.post_process:  # the head is held by every tensor-parallel rank alike
            chunk.output_layer = nn.Linear(hf.hidden_size, 1, bias=False)
        chunks.append(chunk.to(device=device, dtype=config.params_dtype))
    return chunks


def at_positions(
    at: Tensor,
    tokens: Tensor,
    vocabulary: int,
    temperature: float,
    entropy: str,
    chunk: int,
    **hook: Any,
) -> TokenOutputs:
    """GPTModel's `output_processor` on the last stage: log-probs (and entropies) of wanted tokens, float32 [n]. See
    `batching.MicroBatch` for `at` and `tokens`, `core_algos.log_probs_and_entropy` for the rest; `hook` is what
    GPTModel gives. With a scalar head, its output at those positions."""
    hidden, head = hook["hidden_states"], hook["output_layer"]
    if hook["config"].sequence_parallel:
        # What follows is the same on every rank, and its gradient whole; so backward only takes this rank's part.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False
        )
    hidden = hidden.transpose(0, 1)  # Megatron has [width, rows, hidden]
    if isinstance(head, nn.Linear):
        return in_chunks(
            lambda hidden, _: (head(hidden).float().squeeze(-1), None), hidden, at, tokens, chunk
        )
    weight = head.weight if hook["output_weight"] is None else hook["output_weight"]
    first = mpu.get_tensor_model_parallel_rank() * weight.shape[0]
    rows = max(0, min(weight.shape[0], vocabulary - first))  # without the padding

    def project(hidden: Tensor, tokens: Tensor) -> TokenOutputs:
        logits = F.linear(tensor_parallel.copy_to_tensor_model_parallel_region(hidden), weight)[
            :, :rows
        ].float()
        return split_log_probs(logits, tokens, first, temperature, entropy)

    return in_chunks(project, hidden, at, tokens, chunk)


def joined(found: Tensor, mine: Tensor, count: int) -> Tensor:
    """What every context-parallel rank found of its tokens, `mine` of all `count`."""
    whole = found.new_zeros(count).index_copy(0, mine, found)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(
        whole, group=mpu.get_context_parallel_group()
    )


def split_log_probs(
    logits: Tensor, tokens: Tensor, first: int, temperature: float, entropy: str
) -> TokenOutputs:
    """As `core_algos.log_probs_and_entropy`, of logits whose vocabulary is split over the tensor-parallel ranks.
    `logits`: float32 [n, entries from `first` on]."""
    # Only sums are reduced, and all that depends on them is the same on every rank, so their gradient is identity.
    reduce = tensor_parallel.reduce_from_tensor_model_parallel_region
    logits = logits / temperature
    highest = logits.detach().amax(-1)
    torch.distributed.all_reduce(
        highest, torch.distributed.ReduceOp.MAX, mpu.get_tensor_model_parallel_group()
    )
    logits = logits - highest[:, None]
    weights = logits.exp()
    total = reduce(weights.sum(-1))
    own = (tokens >= first) & (tokens < first + logits.shape[1])
    chosen = logits.gather(-1, (tokens - first).clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    log_probs = reduce(torch.where(own, chosen, 0.0)) - total.log()
    if entropy == "none":
        return log_probs, None
    if entropy == "squares":
        return log_probs, reduce(weights.square().sum(-1)) / total.square()
    with torch.set_grad_enabled(entropy == "grad" and torch.is_grad_enabled()):
        return log_probs, total.log() - reduce((weights * logits).sum(-1)) / total
