"""Checks of weight_sync.lora=adapter: what vLLM's LoRA can hold, and what goes with it."""

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.model import split_target_modules
from one_step_off.config.text import format_value

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can allocate its matrices; smaller adapters are filled up with zeros."""

LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Of vLLM, for which its worker can show what it has loaded."""

MERGED = "or weight_sync.lora=merged"


def sends_adapters(cfg: Config) -> bool:
    """Whether the adapters are sent alone."""
    return cfg.weight_sync.lora == "adapter"


def engine_rank(rank: int) -> int:
    """The smallest rank for which vLLM can allocate, that holds adapters of this rank."""
    return min(allowed for allowed in ENGINE_RANKS if allowed >= rank)


def check_adapter_sync(cfg: Config, device: str) -> None:
    """Check weight_sync.lora=adapter. Raises ConfigError."""
    if not sends_adapters(cfg):
        return
    _check_adapter(cfg)
    _check_transfer(cfg)
    _check_engine(cfg, device)


def _check_adapter(cfg: Config) -> None:
    rank = cfg.model.lora_rank
    if rank == 0:
        raise key_error(
            cfg, "weight_sync.lora", f"there are no adapters; set model.lora_rank, {MERGED}"
        )
    largest = ENGINE_RANKS[-1]
    if rank > largest:
        raise key_error(
            cfg,
            "model.lora_rank",
            f"vLLM's LoRA has a rank of at most {largest}; use that or less, {MERGED}",
        )
    names = split_target_modules(cfg.model.lora_target_modules)
    if any(name.split(".")[-1] == "lm_head" for name in names):
        raise key_error(
            cfg,
            "model.lora_target_modules",
            f"an adapter of the language model head cannot be sent alone; leave it out, {MERGED}",
        )


def _check_transfer(cfg: Config) -> None:
    settings = cfg.weight_sync
    if settings.mode == "delta":
        raise key_error(
            cfg,
            "weight_sync.mode",
            f"adapters are small, and are sent whole; use weight_sync.mode=full, {MERGED}",
        )


def _check_engine(cfg: Config, device: str) -> None:
    if device != "cpu" and cfg.model.dtype == "float32":
        raise key_error(
            cfg,
            "model.dtype",
            f"vLLM's LoRA kernels on GPUs compute in bfloat16; use model.dtype=bfloat16, {MERGED}",
        )
    pools = list(cfg.placement.roles.values())
    shares_pool = pools.count(cfg.placement.roles["rollout"]) > 1
    if device != "cpu" and shares_pool:
        raise key_error(
            cfg,
            "weight_sync.lora",
            "an engine that shares its GPUs gives its memory to the other role, and no sync would "
            "bring the base model back; give the role rollout a pool of its own, "
            f"{MERGED}",
        )
    for name, value in cfg.rollout.engine_kwargs.items():
        location = f"rollout.engine_kwargs.{format_value(name)}={format_value(value)}"
        if "lora" in name:
            raise ConfigError(
                f"{location}: the program sets it for weight_sync.lora=adapter; remove it"
            )
        if name == "load_format" and value not in LOAD_FORMATS:
            raise ConfigError(
                f"{location}: with weight_sync.lora=adapter the engine keeps the base model that "
                f"it loads; use {' or '.join(LOAD_FORMATS)}, {MERGED}"
            )
