"""LoRA for the actor: small trained matrices beside the frozen weights of linear layers (peft's layers, under FSDP2).

Outside of the trainer there are only ordinary weights: the stream into vLLM, and `hf_model/`, hold W + scale * B A in
the place of each W, merged rows by rows while they are read.
"""

import os

import peft
import torch
from peft.tuners.lora import Linear
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.schema import ModelConfig

NAME = "default"  # peft's, of the one adapter
_PARTS = "lora_A", "lora_B"


def settings(own: ModelConfig) -> peft.LoraConfig:
    """What peft is to be told. It has no dropout, with which theta would differ from mu at the same weights."""
    names = [name.strip() for name in own.lora_target_modules.split(",")]
    targets = names[0] if names == ["all-linear"] else names
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=own.lora_rank, lora_alpha=own.lora_alpha, target_modules=targets
    )


def inject(model: PreTrainedModel, own: ModelConfig) -> None:
    """Put an adapter beside each linear layer that `model.lora_target_modules` names. Its matrices are fp32, like all
    masters, and alone have gradients. Raises ConfigError: a layer is missing, or cannot be merged."""
    where = f"model.lora_target_modules={own.lora_target_modules}"
    embedding = model.get_input_embeddings().weight
    with as_config_error(f"{where}: peft refuses it", "use all-linear, or others", ValueError):
        peft.inject_adapter_in_model(settings(own), model)
    for name, layer in model.named_modules():
        base = getattr(layer, "base_layer", None)
        mergeable = (
            isinstance(layer, Linear)
            and isinstance(base, nn.Linear)
            and base.weight is not embedding
        )
        if base is not None and not mergeable:
            raise ConfigError(
                f"{where}: {name} is no linear layer with weights of its own; use all-linear, or others"
            )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def plain_name(name: str) -> str | None:
    """A parameter's name in the checkpoint; None: it is an adapter's."""
    return (
        None if any(f".{part}." in name for part in _PARTS) else name.replace(".base_layer.", ".")
    )


class Adapters:
    """A rank's adapters; none where the model has none. The rows of B are those of its layer's weight, as FSDP2 cuts
    both alike; A is small and is kept whole, so that reading merged weights needs no other rank."""

    def __init__(self, model: nn.Module) -> None:
        """Collective, after the weights have been loaded."""
        self.layers: dict[str, tuple[float, DTensor, DTensor]] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, Linear):
                a, b = (getattr(layer, part)[NAME].weight for part in _PARTS)
                self.layers[f"{name}.weight"] = layer.scaling[NAME], a, b
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Fetch every A as it is now (collective)."""
        self.whole = {name: a.full_tensor() for name, (_, a, _) in self.layers.items()}

    def merged(self, name: str, rows: Tensor) -> Tensor:
        """This rank's `rows` of the weight `name` with its adapter: fp32 where there is one, else as they are (no
        collective)."""
        if name not in self.layers:
            return rows
        scale, _, b = self.layers[name]
        return rows.to(torch.float32, copy=True).addmm_(b.to_local(), self.whole[name], alpha=scale)

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """The adapter by peft's names, on the CPU (collective)."""
        found = {}
        for name, (_, _, b) in self.layers.items():
            for part, tensor in zip(_PARTS, (self.whole[name], b.full_tensor()), strict=True):
                found[f"base_model.model.{name.removesuffix('weight')}{part}.weight"] = (
                    tensor.cpu().contiguous()
                )
        return found


def write(state: dict[str, Tensor], own: ModelConfig, folder: str) -> None:
    """Write an adapter as peft does."""
    config = settings(own)
    if (
        config.target_modules == "all-linear"
    ):  # as peft writes it; not every reader knows the shorthand
        config.target_modules = {name.split(".")[-3] for name in state}
    config.inference_mode, config.base_model_name_or_path = True, own.path
    config.save_pretrained(folder)
    save_file(state, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
