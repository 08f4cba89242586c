"""The size of an engine's KV cache on a GPU.

vLLM takes all memory that is left of its share. For a small model that is a hundred times what its
sequences can fill: blocks that hold nothing, and each pause of the engine walks through all of them
to forget their prefixes. So the cache gets what `max_num_seqs` of the longest sequences can use.
Then vLLM need not measure the GPU's memory either, for which it captures CUDA graphs once more than
it needs, and fails where another process frees memory meanwhile.

vLLM sizes the cache itself, by `gpu_memory_utilization`, where a bound is not safe: where what a
token needs is not plain (sliding windows, states of hybrid models, latent attention, ...), where
the bound does not leave enough of the share for activations, and where loops ask the engine several
times, since what is left of the cache keeps the prefixes of trajectories that wait for a tool.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

from one_step_off.cluster.device_turns import device_turn
from one_step_off.config.placement import shares_device
from one_step_off.config.quantization import has_quantized_weights
from one_step_off.config.schema import Config

BLOCK_TOKENS = 64
"""Tokens of a block at most, unless `block_size` says more: vLLM chooses it after this."""

ROUNDED_TO = 64 << 20

RESERVED_SHARE = 0.25
MIN_RESERVED_BYTES = 4 << 30
"""Of the engine's share of the memory, for activations, logits, CUDA graphs and CUDA itself."""

GIB = 2**30

SIZE_KEYS = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""With one of these in `rollout.engine_kwargs` the user chooses the size."""

OTHER_CACHES = """attention_chunk_size num_kv_shared_layers index_topk v_head_dim global_head_dim
    num_global_key_value_heads block_configs compress_ratios kv_lora_rank""".split()
"""Fields of a Hugging Face config with which layers cache something else than the keys and values
of all tokens, with equal heads in all layers."""


def token_bytes(layers: int, kv_heads: int, head_size: float, itemsize: int) -> float:
    """Bytes of the keys and values of one token, with plain attention in each layer."""
    return 2 * layers * kv_heads * head_size * itemsize


def sequences_bytes(
    per_token: float, sequences: int, longest: int, block_tokens: int = BLOCK_TOKENS
) -> int:
    """Bytes that a KV cache can use, rounded up to 64 MiB.

    Args:
        per_token: of `token_bytes`.
        sequences: that the engine works on at once.
        longest: tokens of a sequence.
        block_tokens: of a block of the cache.
    """
    # A block more for each: an engine that plans a step ahead may take one for a sequence that has
    # just ended. And vLLM keeps one block for itself.
    blocks = sequences * (math.ceil(longest / block_tokens) + 1) + 1
    needed = blocks * block_tokens * per_token
    return math.ceil(needed / ROUNDED_TO) * ROUNDED_TO


@dataclass(frozen=True)
class KvCachePlan:
    """How an engine gets the size of its KV cache, where the user leaves it to the program.

    Attributes:
        needed: bytes that its sequences can use; None: not known, so vLLM chooses the size.
        available: bytes of the engine's share beside weights and activations.
        weights: bytes of the model.
        reserved: bytes for activations and the like.
        sequences, longest: see `sequences_bytes`.
    """

    needed: int | None
    available: int
    weights: int
    reserved: int
    sequences: int
    longest: int

    @property
    def is_bounded(self) -> bool:
        """Whether the engine gets `needed` bytes, not what vLLM measures."""
        return self.needed is not None and self.needed <= self.available

    @property
    def engine_bytes(self) -> int:
        """Of the whole engine with a bounded cache."""
        return self.weights + self.reserved + (self.needed or 0)

    def __str__(self) -> str:
        """In one line, for people."""
        available = f"{max(0, self.available) / GIB:.1f} GiB available"
        if self.needed is None:
            return f"KV cache: what vLLM measures, about {available}"
        needed = f"{self.needed / GIB:.1f} GiB = {self.sequences} sequences x {self.longest} tokens"
        if self.is_bounded:
            return f"KV cache: {needed}, of {available}"
        return f"KV cache: what vLLM measures, about {available}, for {needed} at most"


def plan_kv_cache(cfg: Config, engine_config: Any, gpu_bytes: int) -> KvCachePlan | None:
    """The plan of an engine on a GPU; None: the user has chosen the size.

    Args:
        engine_config: vLLM's `VllmConfig`.
        gpu_bytes: memory of the GPU.
    """
    if cfg.rollout.engine_kwargs.keys() & SIZE_KEYS:
        return None
    parameters, in_tables = count_parameters(cfg)
    model = engine_config.model_config
    parallel = engine_config.parallel_config
    share = int(engine_config.cache_config.gpu_memory_utilization * gpu_bytes)
    weights = parameters * model.dtype.itemsize // parallel.tensor_parallel_size
    if has_quantized_weights(cfg):  # all but embedding and head have a byte
        quantized = parameters - in_tables
        weights -= quantized * (model.dtype.itemsize - 1) // parallel.tensor_parallel_size
    reserved = max(int(RESERVED_SHARE * share), MIN_RESERVED_BYTES)
    sequences = engine_config.scheduler_config.max_num_seqs
    needed = None
    if parameters and cfg.agent.loop == "single_turn" and has_plain_cache(engine_config):
        per_token = token_bytes(
            model.get_num_layers(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            model.dtype.itemsize,
        )
        block_tokens = max(BLOCK_TOKENS, engine_config.cache_config.block_size or 0)
        needed = sequences_bytes(per_token, sequences, model.max_model_len, block_tokens)
    available = share - weights - reserved
    return KvCachePlan(needed, available, weights, reserved, sequences, model.max_model_len)


def count_parameters(cfg: Config) -> tuple[int, int]:
    """The parameters of the policy's model, tied ones once, and those of them in embedding and
    head; (0, 0): they are not known, since the model's code is its own or fails."""
    if cfg.model.trust_remote_code:
        return 0, 0
    from one_step_off.models.hf_model import empty_model  # transformers: slow to import

    try:
        model = empty_model(cfg, "actor", None, None)
        tables = (model.get_input_embeddings(), model.get_output_embeddings())
        weights = {table.weight for table in tables if table is not None}  # a tied one is one
        return model.num_parameters(), sum(weight.numel() for weight in weights)
    except Exception:  # transformers may raise anything; the trainer reports what does not fit
        return 0, 0


def has_plain_cache(engine_config: Any) -> bool:
    """Whether each layer caches the keys and values of all tokens, and nothing else is cached.

    `engine_config`: vLLM's `VllmConfig`.
    """
    model = engine_config.model_config
    text_config = model.hf_text_config
    other_kinds = (
        model.is_hybrid,
        model.is_attention_free,
        model.is_encoder_decoder,
        model.is_multimodal_model,
        model.has_noops,
        model.use_mla,
        model.get_sliding_window(),
        engine_config.cache_config.cache_dtype != "auto",
        engine_config.speculative_config,
    )
    if any(other_kinds) or any(getattr(text_config, name, None) for name in OTHER_CACHES):
        return False
    return set(getattr(text_config, "layer_types", None) or ()) <= {"full_attention"}


def apply_plan(plan: KvCachePlan, engine_config: Any, gpu_bytes: int) -> None:
    """Give a bounded size to vLLM's `VllmConfig`. `gpu_bytes`: memory of the GPU."""
    if not plan.is_bounded:
        return
    cache = engine_config.cache_config
    cache.kv_cache_memory_bytes = plan.needed
    # With a given size this says only how much memory must be free at the start: less than the
    # share where the engine needs less, so that other processes may have taken theirs.
    needed_share = plan.engine_bytes / gpu_bytes
    cache.gpu_memory_utilization = min(cache.gpu_memory_utilization, needed_share)


def measuring_turn(
    cfg: Config, role: str, device: str, engine_config: Any
) -> contextlib.AbstractContextManager[None]:
    """Around the start of an engine on a GPU that it shares: alone if it measures the memory.

    Args:
        role: of the engine.
        device: "cpu" or "cuda".
        engine_config: vLLM's `VllmConfig`.
    """
    if device != "cuda" or not shares_device(cfg, cfg.placement.roles[role]):
        return contextlib.nullcontext()
    measures = engine_config.cache_config.kv_cache_memory_bytes is None
    return device_turn(alone=measures, limit_s=cfg.trainer.start_timeout_s)
