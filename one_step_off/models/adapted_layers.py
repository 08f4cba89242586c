"""Which layers of a model get LoRA adapters: known from its config, before any process has it."""

from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""What transformers calls the module of a mixture of experts, in every architecture."""


def adapted_layers(model: Any, target_modules: str) -> list[str]:
    """The names of the layers that peft gives adapters.

    Args:
        model: a `PreTrainedModel`.
        target_modules: model.lora_target_modules.
    """
    from torch import nn

    targets = [name.strip() for name in target_modules.split(",")]
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


def engine_targets(cfg: Config) -> list[str]:
    """The last parts of these names, as vLLM takes them: all other layers stay as they are, and
    cost nothing.

    Raises:
        ConfigError: the model has experts, whose adapters vLLM cannot take.
    """
    from one_step_off.models import hf_model  # transformers: slow to import

    model = hf_model.empty_model(cfg, "actor", None, None)
    if any(name.split(".")[-1] == EXPERTS for name, _ in model.named_modules()):
        raise ConfigError(
            f"weight_sync.lora=adapter: {cfg.model.path} is a mixture of experts; "
            "use weight_sync.lora=merged"
        )
    names = adapted_layers(model, cfg.model.lora_target_modules)
    return sorted({name.split(".")[-1] for name in names})


def check_engine_can_hold(cfg: Config) -> None:
    """Raises ConfigError: as `engine_targets`."""
    engine_targets(cfg)
