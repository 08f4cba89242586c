"""Which layers of a model get LoRA adapters: known from its config, before any process has it."""

from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.sections.model import ALL_LINEAR, split_target_modules
from one_step_off.config.text import did_you_mean

EXPERTS = "experts"
"""What transformers calls the module of a mixture of experts, in every architecture."""


def adapted_layers(model: Any, target_modules: str) -> list[str]:
    """The names of the layers that peft gives adapters.

    Args:
        model: a `PreTrainedModel`.
        target_modules: model.lora_target_modules.
    """
    from torch import nn

    targets = split_target_modules(target_modules)
    head = model.get_output_embeddings()
    names = []
    for name, layer in model.named_modules():
        if targets == [ALL_LINEAR]:
            is_adapted = isinstance(layer, nn.Linear) and layer is not head
        else:
            is_adapted = any(name == target or name.endswith(f".{target}") for target in targets)
        if is_adapted:
            names.append(name)
    return names


def check_adapted_layers(cfg: Config) -> None:
    """Check model.lora_target_modules against the policy's layers. peft refuses names only where
    none of them fits, and passes over the others.

    Raises:
        ConfigError: a name fits no layer, or one that cannot have an adapter.
    """
    from torch import nn

    from one_step_off.models import hf_model  # transformers: slow to import

    key = f"model.lora_target_modules={cfg.model.lora_target_modules}"
    model = hf_model.empty_model(cfg, "actor", None, None)
    targets = split_target_modules(cfg.model.lora_target_modules)
    names = adapted_layers(model, ALL_LINEAR)
    if targets == [ALL_LINEAR]:
        if has_experts(model):  # peft would adapt the stacked experts too, which cannot be merged
            outside = sorted({name.split(".")[-1] for name in names if ".mlp." not in name})
            raise ConfigError(
                f"{key}: {cfg.model.path} is a mixture of experts; name layers outside of them: "
                f"{','.join(outside)}"
            )
        return
    last_parts = sorted({name.split(".")[-1] for name in names})
    embedding = model.get_input_embeddings().weight
    for target in targets:
        layers = [(n, m) for n, m in model.named_modules() if f".{n}".endswith(f".{target}")]
        if not layers:
            otherwise = f"use {ALL_LINEAR} alone, or names such as {', '.join(last_parts)}"
            fix = did_you_mean(target, last_parts, otherwise)
            raise ConfigError(f"{key}: the model has no layer {target}; {fix}")
        for name, layer in layers:
            if not isinstance(layer, nn.Linear) or layer.weight is embedding:
                raise ConfigError(
                    f"{key}: {name} is not a linear layer with weights of its own; "
                    f"use {ALL_LINEAR}, or others"
                )


def targets_without_experts(cfg: Config) -> list[str]:
    """Names of model.lora_target_modules that fit some layers, and also routed experts, which have
    no adapters: their weights are stacked in one tensor, which peft passes over."""
    from torch import nn

    from one_step_off.models import hf_model  # transformers: slow to import
    from one_step_off.models.checkpoint_layout import CheckpointLayout, OtherLayout

    if cfg.model.lora_target_modules.strip() == ALL_LINEAR:
        return []
    model = hf_model.empty_model(cfg, "actor", None, None)
    linear_weights = {
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    try:
        places = CheckpointLayout.of_model(model).places
    except OtherLayout:  # the trainer refuses such a model
        return []
    others = [
        f".{place.name.removesuffix('.weight')}"
        for place in places
        if place.parameter not in linear_weights
    ]
    targets = split_target_modules(cfg.model.lora_target_modules)
    return [target for target in targets if any(o.endswith(f".{target}") for o in others)]


def has_experts(model: Any) -> bool:
    """Whether a `PreTrainedModel` is a mixture of experts."""
    return any(name.split(".")[-1] == EXPERTS for name, _ in model.named_modules())


def engine_targets(cfg: Config) -> list[str]:
    """The last parts of these names, as vLLM takes them: all other layers stay as they are, and
    cost nothing.

    Raises:
        ConfigError: the model has experts, whose adapters vLLM cannot take.
    """
    from one_step_off.models import hf_model  # transformers: slow to import

    model = hf_model.empty_model(cfg, "actor", None, None)
    if has_experts(model):
        raise ConfigError(
            f"weight_sync.lora=adapter: {cfg.model.path} is a mixture of experts; "
            "use weight_sync.lora=merged"
        )
    names = adapted_layers(model, cfg.model.lora_target_modules)
    return sorted({name.split(".")[-1] for name in names})
