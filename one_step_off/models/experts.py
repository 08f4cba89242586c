"""The experts of a model: which modules hold them, what a router is corrected by, and the checks of
the keys that need either.

In transformers the experts of a layer are one module with tensors of three dimensions [experts, .,
.], and a registry says how all families compute with them. No family is named here.
"""

from typing import Any

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import role_model_path, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.teachers import configs_of_roles

ROUTER_BIAS = "e_score_correction_bias"
"""What transformers calls the numbers that are added to the scores of a layer's experts only to
choose among them."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config names of the number of experts in a layer, of which each token passes some."""

BALANCING_KEY = "actor.router_bias_update_rate"


def fused_experts(model: Any) -> dict[str, Any]:
    """The experts of each layer by the module's name, in the model's order; {}: a dense model, or
    one whose experts are not computed through transformers' registry."""
    # The registry's decorator of the class sets the attribute.
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel")
    }


def expert_share(text_config: Any) -> float | None:
    """The share of a layer's experts that one token passes; 1 for a dense model, None where the
    config does not say it."""
    counts = [getattr(text_config, name, None) for name in EXPERT_COUNTS]
    count = next((count for count in counts if count), None)
    if count is None:
        return 1.0
    chosen = getattr(text_config, "num_experts_per_tok", None)
    return chosen / count if chosen else None


def router_biases(model: Any) -> dict[str, Any]:
    """The bias of the router of each layer that has one, a buffer [experts], by the name of the
    layer's experts."""
    biases = {}
    buffers = dict(model.named_buffers())
    for name in fused_experts(model):
        layer = name.rpartition(".")[0]
        own = [b for b in buffers if b.startswith(f"{layer}.") and b.endswith(f".{ROUTER_BIAS}")]
        if own:
            biases[name] = buffers[own[0]]
    return biases


def check_experts(cfg: Config) -> None:
    """Check the keys about experts against the models of the roles that FSDP2 trains or runs.

    Raises:
        ConfigError: a model has no experts, or other ones than a key needs.
    """
    for own_cfg, role in configs_of_roles(cfg):
        _check_role(own_cfg, role)


def _check_role(cfg: Config, role: str) -> None:
    from one_step_off.models import hf_model  # transformers: slow to import

    settings = role_settings(cfg, role)
    if settings.backend != "fsdp":  # Megatron's own checks know its sizes
        return
    if settings.expert_parallel_size > 1 or _update_rate(settings):
        problem = f"model.path={role_model_path(cfg, role)}: its class cannot be built"
        with as_config_error(problem, "give another model"):
            model = hf_model.empty_model(cfg, role, None, None)
        check_keys_of_experts(model, cfg, role)


def check_keys_of_experts(model: Any, cfg: Config, role: str) -> None:
    """As `check_experts`, of one role's model, with or without its weights."""
    settings = role_settings(cfg, role)
    path = role_model_path(cfg, role)
    if settings.expert_parallel_size > 1:
        key = f"{role}.expert_parallel_size={settings.expert_parallel_size}"
        _check_division(model, key, path, settings.expert_parallel_size)
    if _update_rate(settings):
        _check_biases(model, cfg, f"{BALANCING_KEY}={_update_rate(settings):g}", path)


def _update_rate(settings: Any) -> float:
    """That of the biases; only the actor has one."""
    return getattr(settings, "router_bias_update_rate", 0.0)


def _check_division(model: Any, key: str, path: str, size: int) -> None:
    experts = fused_experts(model)
    if not experts:
        raise ConfigError(
            f"{key}: {path!r} is a dense model, or its experts are not stacked in one tensor; "
            "set it to 1"
        )
    for name, module in experts.items():
        if module.num_experts % size:
            raise ConfigError(
                f"{key}: does not divide the {module.num_experts} experts of {path!r}; "
                f"use {nearest_divisor(module.num_experts, size)}"
            )
        # A tensor that is not cut by experts could not be placed.
        if any(p.ndim < 2 or len(p) != module.num_experts for p in module.parameters()):
            raise ConfigError(f"{key}: {name} of {path!r} holds more than its experts; set it to 1")


def _check_biases(model: Any, cfg: Config, key: str, path: str) -> None:
    if not router_biases(model):
        raise ConfigError(f"{key}: the routers of {path!r} have no {ROUTER_BIAS}; set it to 0")
    if cfg.model.lora_rank:
        raise ConfigError(
            f"{key}: with model.lora_rank={cfg.model.lora_rank} only adapters change; set it to 0"
        )
