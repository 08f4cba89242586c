"""The constants of `work.Work` from the shape of a model and the name of a GPU: no run and no GPU
is needed.

The parts of a step are added, as if none of them overlapped with another:

    generation  step of a replica  = STEP_S + weights / bandwidth
                per sequence more  = SEQUENCE_S + 2 N / compute + its KV cache / bandwidth
    training    token on one GPU   = its FLOPs / (peak * MFU)
    sync                           = SYNC_S + weights / SYNC_BYTES_PER_S
    exchange of a token's heads    = its bytes / SYNC_BYTES_PER_S, with sequence_parallel_size

The efficiencies below were chosen by the measurements in docs/measured/planner.md, which compares
the results with these and with published figures.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.lengths import longest_trained
from one_step_off.config.lora_checks import sends_adapters
from one_step_off.config.quantization import has_quantized_weights
from one_step_off.config.roles import TRAINED_ROLES, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.text import format_value
from one_step_off.data.token_work import pass_work
from one_step_off.engines.vllm.kv_cache import token_bytes
from one_step_off.models.activation_memory import (
    RESERVED_BYTES,
    ActivationMemory,
    activation_memory,
)
from one_step_off.models.divided_sequences import why_not_divided
from one_step_off.monitoring.flops import ModelShape, peak_flops, shape_of
from one_step_off.tools.planner.work import Work


@dataclass(frozen=True)
class Gpu:
    """Attributes:
    name: as CUDA reports it, in part; `monitoring.flops` has its peak.
    memory_bytes, bytes_per_s: of its memory.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float

    @property
    def flops_per_s(self) -> float:
        """Dense bf16, by the data sheet."""
        peak = peak_flops(self.name)
        assert peak is not None, f"{self.name} has no row in the table of peaks"
        return peak


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H200 Tensor Core GPU, data sheet, column H200 SXM: 141 GB, 4.8 TB/s.
        Gpu("H200", 141e9, 4.8e12),
        # NVIDIA H100 Tensor Core GPU, data sheet, column H100 SXM: 80 GB, 3.35 TB/s.
        Gpu("H100", 80e9, 3.35e12),
        # NVIDIA publishes no data sheet of the H20. Its sellers list 96 GB and 4.0 TB/s; there is
        # a version with 141 GB too.
        Gpu("H20", 96e9, 4.0e12),
        # NVIDIA A100 Tensor Core GPU, data sheet, column A100 80GB SXM: 80 GB, 2,039 GB/s.
        Gpu("A100", 80e9, 2.039e12),
    )
}
"""Memory and its bandwidth; `monitoring.flops` has the peaks, with their sources."""

STEP_S = 2.0e-3
SEQUENCE_S = 8.5e-6
"""Seconds that vLLM's scheduler and this program need for a step, and for each sequence in it."""

BANDWIDTH_SHARE = 0.7
"""Of the memory's bandwidth, reached while weights and KV cache are read."""

COMPUTE_SHARE = 0.5
"""Of the peak, reached by the matrix products of generation."""

TRAIN_MFU = ((0.494e9, 0.278), (7.62e9, 0.432))
"""(Parameters, MFU) on an H200: of an update in a run, and of a forward and backward pass alone;
between and beyond them by the logarithm of the parameters, from 0.2 to 0.45."""

SYNC_S = 0.04
SYNC_BYTES_PER_S = 40e9
"""Seconds of a sync of few bytes, and the rate beyond them."""

OPTIMIZER_BYTES = 16
"""Of a parameter in training: fp32 weights, gradients and two moments."""

OFFLOADED_BYTES = 8
"""As `OPTIMIZER_BYTES`, with the moments in host memory."""

SPARE_BYTES = 25e9
"""For activations, logits, buffers and CUDA itself, on each GPU."""

QWEN = {"model_type": "qwen2", "vocab_size": 152_064, "num_key_value_heads": 8}
SMALL_QWEN = QWEN | {"vocab_size": 151_936, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_MODELS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "qwen2.5-0.5b": (SMALL_QWEN, (896, 4864, 24, 14)),
    "qwen2.5-1.5b": (SMALL_QWEN, (1536, 8960, 28, 12)),
    "qwen2.5-3b": (SMALL_QWEN, (2048, 11_008, 36, 16)),
    "qwen2.5-7b": (QWEN | {"num_key_value_heads": 4}, (3584, 18_944, 28, 28)),
    "qwen2.5-14b": (QWEN, (5120, 13_824, 48, 40)),
    "qwen2.5-32b": (QWEN, (5120, 27_648, 64, 40)),
    "qwen2.5-72b": (QWEN, (8192, 29_568, 80, 64)),
    "qwen3-0.6b": (QWEN3 | {"tie_word_embeddings": True}, (1024, 3072, 28, 16)),
    "qwen3-1.7b": (QWEN3 | {"tie_word_embeddings": True}, (2048, 6144, 28, 16)),
    "qwen3-4b": (QWEN3 | {"tie_word_embeddings": True}, (2560, 9728, 36, 32)),
    "qwen3-8b": (QWEN3, (4096, 12_288, 36, 32)),
    "qwen3-14b": (QWEN3, (5120, 17_408, 40, 40)),
    "qwen3-32b": (QWEN3, (5120, 25_600, 64, 64)),
    "llama-3.2-1b": (LLAMA | {"head_dim": 64, "tie_word_embeddings": True}, (2048, 8192, 16, 32)),
    "llama-3.2-3b": (LLAMA | {"tie_word_embeddings": True}, (3072, 8192, 28, 24)),
    "llama-3.1-8b": (LLAMA, (4096, 14_336, 32, 32)),
    "llama-3.1-70b": (LLAMA, (8192, 28_672, 80, 64)),
}
"""The shapes in the config.json of these models on the Hugging Face hub."""


@dataclass(frozen=True)
class PlannedModel:
    """A model by its shape.

    Attributes:
        source: where the shape is from, for people.
        shape: what a token costs.
        parameters: all of them, those of all experts too.
        kv_bytes: of the KV cache of one token, in bf16.
        heads: of attention, which tensor and sequence parallelism divide.
        kv_heads: those of keys and values.
        embedding_params: of the embedding and of a head that is not tied to it.
        activations: of training; None: not known.
        is_divisible: ranks may divide its sequences.
    """

    source: str
    shape: ModelShape
    parameters: int
    kv_bytes: float
    heads: int
    kv_heads: int
    embedding_params: int
    activations: ActivationMemory | None
    is_divisible: bool

    def engine_bytes(self, cfg: Config) -> float:
        """Of an engine's weights: two per parameter; one per quantized parameter, which are those
        of the layers."""
        if not has_quantized_weights(cfg):
            return 2.0 * self.parameters
        return float(self.parameters + self.embedding_params)

    def cache_bytes(self, cfg: Config) -> float:
        """Of an engine's KV cache of one token."""
        return self.kv_bytes if cfg.rollout.kv_cache_dtype == "auto" else self.kv_bytes / 2


def planned_model(path: str) -> PlannedModel:
    """The model of `model.path`.

    Args:
        path: a folder with a config.json, such a file, a model in the hub's cache, or a name with
            one of the known shapes in it.

    Raises:
        ConfigError: its shape is not known here, or nothing can be computed from it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    hf_config, source = _hf_config(path)
    problem = f"model.path={path}: no model can be made of its config.json"
    with as_config_error(problem, "correct it"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    shape = shape_of(model)
    if shape is None:
        raise ConfigError(
            f"model.path={path}: the planner cannot count what its layers compute; "
            "calibrate by a run (--from) or by times (--times)"
        )
    text_config = hf_config.get_text_config()
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_size = shape.attention_width / heads
    parameters = sum(parameter.numel() for parameter in model.parameters())
    kv_bytes = token_bytes(shape.layers, kv_heads, head_size, itemsize=2)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {table.weight for table in tables if table is not None}  # a tied one is one
    embedding_params = sum(weight.numel() for weight in weights)
    activations = activation_memory(hf_config)
    is_divisible = not why_not_divided(hf_config)
    return PlannedModel(
        source,
        shape,
        parameters,
        kv_bytes,
        heads,
        kv_heads,
        embedding_params,
        activations,
        is_divisible,
    )


def _read_config(path: str) -> Any:
    """A model's Hugging Face config, without the network and without its own code."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _hf_config(path: str) -> tuple[Any, str]:
    """A model's Hugging Face config without the network, and where it is from."""
    from transformers import AutoConfig

    if path.startswith("tiny:"):
        from one_step_off.models import tiny_qwen

        return _read_config(tiny_qwen.ensure(path)), "the folder of the tiny model"
    if Path(path).exists():
        with as_config_error(f"model.path={path}: no config.json can be read there", "correct it"):
            return _read_config(path), f"the config.json of {path}"
    known = [name for name in _MODELS if _normal(name) in _normal(path)]
    if known:
        name = max(known, key=len)
        family, sizes = _MODELS[name]
        settings = family | dict(zip(_SIZES, sizes, strict=True))
        return AutoConfig.for_model(**settings), f"the known shape of {name}"
    try:
        return _read_config(path), "the hub's cache"
    except (OSError, ValueError):
        names = ", ".join(_MODELS)
        raise ConfigError(
            f"model.path={path}: its shape is not known on this machine; give a folder with its "
            f"config.json (no weights are needed), or a model whose name has one of {names}"
        ) from None


def _normal(name: str) -> str:
    """Names alike but for their family's suffixes: Qwen2.5-Math-7B has the shape of Qwen2.5-7B."""
    text = name.lower().rpartition("/")[2].replace("-math-", "-").replace("-coder-", "-")
    return f"{text}-".replace("meta-", "")


def planned_gpu(name: str) -> Gpu:
    """The GPU of this name, as "H200" or "NVIDIA H100 80GB HBM3". Raises ConfigError: it is not in
    the table."""
    words = name.upper().replace("-", " ").split()
    for gpu in GPUS.values():
        if gpu.name in words:
            return gpu
    known = ", ".join(GPUS)
    raise ConfigError(
        f"--hardware {name}: its figures are not known; give one of {known}, "
        "or calibrate by a run (--from) or by times (--times)"
    )


def train_mfu(parameters: float) -> float:
    """The assumed MFU of training a model of this size."""
    (small, small_mfu), (large, large_mfu) = TRAIN_MFU
    slope = (large_mfu - small_mfu) / math.log(large / small)
    return float(np.clip(small_mfu + slope * math.log(parameters / small), 0.2, 0.45))


@dataclass(frozen=True)
class Plan:
    """What `by_hardware` found.

    Attributes:
        work: of a step.
        places: sequences for which a replica has memory.
        min_ranks: GPUs that the trainer's state needs at least.
        lines: what was assumed, for people.
        longest: says what to set so that the longest sequence fits; None: nothing is known.
    """

    work: Work
    places: int
    min_ranks: int
    lines: list[str]
    longest: "LongestSequence | None" = None


def response_lengths(cfg: Config, mean: int | None) -> np.ndarray:
    """The response lengths of a prompt, int [1, n]: spread evenly up to data.max_response_length;
    or the quantiles of an exponential distribution, which has a long tail, with this mean.

    Raises:
        ConfigError: the mean is not below the limit.
    """
    longest = cfg.data.max_response_length
    n = cfg.rollout.n
    if mean is None:
        return np.linspace(longest / n, longest, n).round().astype(int)[None]
    if not 1 <= mean < longest:
        raise ConfigError(
            f"--response-tokens {mean}: must be at least 1 and below "
            f"data.max_response_length={longest}"
        )
    quantiles = -np.log(1 - (np.arange(n) + 0.5) / n)
    lengths = mean * quantiles / quantiles.mean()
    return lengths.round().clip(1, longest).astype(int)[None]


def by_hardware(
    cfg: Config, model: PlannedModel, gpu: Gpu, mean_response: int | None = None
) -> Plan:
    """The work of a step on GPUs of one kind. `mean_response`: see `response_lengths`.

    Raises:
        ConfigError: a replica has no memory for the model.
    """
    lengths = response_lengths(cfg, mean_response)
    prompt_tokens = cfg.data.max_prompt_length / 2
    context = prompt_tokens + float(lengths.mean())
    width = cfg.rollout.tensor_parallel_size
    sent_bytes = 2.0 * model.parameters
    bandwidth = BANDWIDTH_SHARE * gpu.bytes_per_s * width
    compute = COMPUTE_SHARE * gpu.flops_per_s * width
    cache_bytes = model.cache_bytes(cfg) * (prompt_tokens + float((lengths.mean() + 1) / 2))
    token_flops = 2 * model.shape.matmul_params
    train_flops = _train_flops(cfg, model, context, lengths)
    train_rate = gpu.flops_per_s * train_mfu(model.parameters)
    work = Work(
        prompts=cfg.data.train_batch_size,
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        decode_s=STEP_S + model.engine_bytes(cfg) / bandwidth,
        sequence_s=SEQUENCE_S + token_flops / compute + cache_bytes / bandwidth,
        train_fixed_s=0.0,
        train_token_s=train_flops / context / train_rate
        + _exchanged_bytes(cfg, model) / SYNC_BYTES_PER_S,
        sync_s=SYNC_S + (0 if sends_adapters(cfg) else sent_bytes / SYNC_BYTES_PER_S),
    )
    places = _sequences_in_memory(cfg, model, gpu, context, width)
    if places < 1:
        raise _too_large(cfg, model, gpu, context)
    min_ranks = _min_ranks(cfg, model, gpu)
    lines = _lines(cfg, model, gpu, work, places, min_ranks)
    lines.append(_lengths_line(cfg, mean_response))
    longest = LongestSequence(cfg, model, gpu, min_ranks)
    return Plan(work, places, min_ranks, lines + longest.lines(), longest)


def _sequences_in_memory(
    cfg: Config, model: PlannedModel, gpu: Gpu, context: float, width: int
) -> int:
    """How many sequences of `context` tokens a replica of `width` GPUs has memory for."""
    usable_bytes = cfg.rollout.gpu_memory_utilization * gpu.memory_bytes * width
    free_bytes = usable_bytes - model.engine_bytes(cfg)
    return int(free_bytes / (model.cache_bytes(cfg) * context))


def _too_large(cfg: Config, model: PlannedModel, gpu: Gpu, context: float) -> ConfigError:
    """What to set where a replica has no memory for one sequence."""
    width = cfg.rollout.tensor_parallel_size
    usable = cfg.rollout.gpu_memory_utilization
    weights_gb = 1e-9 * model.engine_bytes(cfg)
    divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    fitting = [n for n in divisors if _sequences_in_memory(cfg, model, gpu, context, n) >= 1]
    fix = (
        f"rollout.tensor_parallel_size={fitting[0]} fits"
        if fitting
        else "give a GPU with more memory"
    )
    return ConfigError(
        f"rollout.tensor_parallel_size={width}: weights of {weights_gb:.0f} GB and one sequence do "
        f"not fit into {width} x {gpu.memory_bytes / 1e9:.0f} GB, of which "
        f"rollout.gpu_memory_utilization={usable:g} may be used; {fix}"
    )


def _lengths_line(cfg: Config, mean: int | None) -> str:
    """How `response_lengths` gets its lengths."""
    longest = cfg.data.max_response_length
    if mean is None:
        return f"response lengths are spread evenly up to data.max_response_length={longest}"
    return (
        f"response lengths have a long tail: the {cfg.rollout.n} of a prompt are spread over an "
        f"exponential distribution, below data.max_response_length={longest}"
    )


def _train_flops(cfg: Config, model: PlannedModel, context: float, lengths: np.ndarray) -> float:
    """Of a sample in a step: the updates, and the passes of the other roles in the trainer's
    pool."""
    work = pass_work([context], float(lengths.mean()))
    forward = model.shape.forward_flops(work)
    flops = cfg.actor.ppo_epochs * model.shape.train_flops(work, bool(cfg.model.lora_rank))
    if cfg.algorithm.old_log_probs == "recompute":
        flops += forward
    roles = cfg.placement.roles
    if "ref" in roles:
        flops += forward
    if "critic" in roles:  # taken as large as the policy
        flops += forward + 3 * (cfg.critic.ppo_epochs or cfg.actor.ppo_epochs) * forward
    return flops


def _exchanged_bytes(cfg: Config, model: PlannedModel) -> float:
    """That a rank sends for each of its tokens in a step, where ranks divide sequences: queries,
    keys, values and outputs in each layer, forward and backward."""
    size = cfg.actor.sequence_parallel_size
    head_size = model.shape.attention_width / model.heads
    heads = 2 * model.heads + 2 * math.lcm(model.kv_heads, size)
    passes = cfg.actor.ppo_epochs * (3 if cfg.actor.activation_checkpointing else 2)
    passes += cfg.algorithm.old_log_probs == "recompute"
    passes += "ref" in cfg.placement.roles
    return passes * model.shape.layers * heads * head_size * 2 * (size - 1) / size


def _state_bytes(cfg: Config, model: PlannedModel) -> float:
    """Weights, gradients and moments of the roles that train, of all ranks together, without what
    is offloaded."""
    state = 0.0
    for role in TRAINED_ROLES:
        settings = role_settings(cfg, role)
        if role not in cfg.placement.roles or settings.param_offload:
            continue
        bytes_per_parameter = OFFLOADED_BYTES if settings.optimizer_offload else OPTIMIZER_BYTES
        if role == "actor" and cfg.model.lora_rank:
            bytes_per_parameter = 2
        state += bytes_per_parameter * model.parameters
    return state


def _min_ranks(cfg: Config, model: PlannedModel, gpu: Gpu) -> int:
    """GPUs over which the state of training must be divided to fit."""
    return max(1, math.ceil(_state_bytes(cfg, model) / (gpu.memory_bytes - SPARE_BYTES)))


@dataclass(frozen=True)
class LongestSequence:
    """Whether the update of the longest sequence fits on a rank of the trainer. Attributes: as the
    arguments of `by_hardware`; `min_ranks` as in `Plan`."""

    cfg: Config
    model: PlannedModel
    gpu: Gpu
    min_ranks: int

    def _tokens(self, size: int) -> int:
        """Of it on each of `size` ranks that divide it."""
        return math.ceil(longest_trained(self.cfg) / size)

    def _needed(self, size: int, budget: int, recomputes: bool) -> float:
        """Bytes of the activations on each of `size` ranks. `budget`: micro_batch_tokens, which
        shorter sequences fill too."""
        assert self.model.activations is not None
        tokens = max(budget, self._tokens(size))
        return self.model.activations.of_update(tokens, self.cfg.actor.log_prob_chunk, recomputes)

    def _room(self, ranks: int) -> float:
        """Bytes beside the state on each GPU of a trainer."""
        return self.gpu.memory_bytes - RESERVED_BYTES - _state_bytes(self.cfg, self.model) / ranks

    def lines(self) -> list[str]:
        """What was estimated, for people."""
        if self.model.activations is None or self.cfg.actor.backend != "fsdp":
            return []
        actor = self.cfg.actor
        size = actor.sequence_parallel_size
        budget = actor.micro_batch_tokens
        needed = self._needed(size, budget, actor.activation_checkpointing) / 1e9
        tokens = max(budget, self._tokens(size))
        ranks = size * math.ceil(self.min_ranks / size)
        on_ranks = "on a rank" if size == 1 else f"on each of its {size} ranks"
        return [
            f"longest sequence: {longest_trained(self.cfg):,} tokens",
            f"activations of a micro-batch with it, {tokens:,} tokens {on_ranks}: {needed:.3g} GB, "
            f"with {self._room(ranks) / 1e9:.3g} GB for them on {ranks} GPUs",
        ]

    def advice(self, ranks: list[int]) -> list[str]:
        """What to set where it does not fit; nothing where it does.

        Args:
            ranks: of the trainer, of the arrangements that are possible; the fastest one first.
        """
        actor = self.cfg.actor
        size = actor.sequence_parallel_size
        needed = functools.partial(self._needed, size, actor.micro_batch_tokens)
        if not self.lines() or needed(actor.activation_checkpointing) <= self._room(ranks[0]):
            return []
        for count in ranks:
            keys = self._fitting_keys(count)
            if keys:
                text = f"set {' '.join(keys)}: so the longest sequence fits"
                return [f"{text} on {count} GPUs of the trainer"]
        return ["the longest sequence fits on no number of ranks: lower data.max_response_length"]

    def _fitting_keys(self, ranks: int) -> list[str]:
        """What to set so that it fits on a trainer with `ranks` GPUs, the fewest that divide a
        sequence first; [] where nothing helps."""
        actor = self.cfg.actor
        heads = self.model.heads if self.model.is_divisible else 1
        common = math.gcd(heads, ranks)
        room = self._room(ranks)
        sizes = [n for n in range(actor.sequence_parallel_size, common + 1) if common % n == 0]
        for size in sizes:
            for budget in self._budgets(size):
                if self._needed(size, budget, recomputes=True) <= room:
                    values = {
                        "activation_checkpointing": True,
                        "sequence_parallel_size": size,
                        "micro_batch_tokens": budget,
                    }
                    return [
                        f"actor.{name}={format_value(value)}"
                        for name, value in values.items()
                        if value != getattr(actor, name)
                    ]
        return []

    def _budgets(self, size: int) -> list[int]:
        """micro_batch_tokens, and its halves down to a rank's part of the longest sequence."""
        budgets = [self.cfg.actor.micro_batch_tokens]
        while budgets[-1] > self._tokens(size):
            budgets.append(max(budgets[-1] // 2, self._tokens(size)))
        return budgets


def _lines(
    cfg: Config, model: PlannedModel, gpu: Gpu, work: Work, places: int, min_ranks: int
) -> list[str]:
    billions = model.parameters / 1e9
    return [
        f"model: {cfg.model.path}, {billions:.2f} billion parameters, by {model.source}",
        f"GPU: {gpu.name}, {gpu.flops_per_s / 1e12:.0f} TFLOP/s in bf16, "
        f"{gpu.memory_bytes / 1e9:.0f} GB of memory at {gpu.bytes_per_s / 1e12:.2f} TB/s",
        "nothing was run: measured runs differ by up to a factor of two, "
        "see docs/measured/planner.md",
        f"prompts of {work.prompt_tokens:.0f} tokens, half of data.max_prompt_length",
        f"MFU of the trainer {train_mfu(model.parameters):.0%}; a replica has memory for {places} "
        f"sequences; the trainer's state fits on {min_ranks} or more GPUs",
    ]
