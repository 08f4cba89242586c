"""LoRA for the actor: small trained matrices beside the frozen weights of linear layers (peft's
layers, under FSDP2).

`hf_model/` holds ordinary weights: W + scale * B A instead of each W, merged rows by rows while
they are read. So does the stream into vLLM, unless `weight_sync.lora=adapter`: then A and scale * B
travel alone. LoRA: arXiv:2106.09685.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
from peft.tuners.lora import Linear
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.schema import ModelConfig
from one_step_off.config.sections.model import ALL_LINEAR, split_target_modules

ADAPTER_NAME = "default"
"""peft's name of the one adapter."""

MATRICES = ("lora_A", "lora_B")
"""peft's names of an adapter's two matrices."""


def peft_config(model_config: ModelConfig) -> peft.LoraConfig:
    """The adapter's settings for peft. It has no dropout, with which theta would differ from mu at
    the same weights."""
    names = split_target_modules(model_config.lora_target_modules)
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=model_config.lora_rank,
        lora_alpha=model_config.lora_alpha,
        target_modules=ALL_LINEAR if names == [ALL_LINEAR] else names,
    )


def inject(model: PreTrainedModel, model_config: ModelConfig) -> None:
    """Put an adapter beside each linear layer that `model.lora_target_modules` names. Its matrices
    are fp32, like all master weights; nothing else has gradients.

    Raises:
        ConfigError: a layer is missing, or cannot be merged.
    """
    key = f"model.lora_target_modules={model_config.lora_target_modules}"
    embedding = model.get_input_embeddings().weight
    with as_config_error(f"{key}: peft refuses it", "use all-linear, or others", ValueError):
        peft.inject_adapter_in_model(peft_config(model_config), model)
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer") and not _is_mergeable(layer, embedding):
            raise ConfigError(
                f"{key}: {name} is not a linear layer with weights of its own; "
                "use all-linear, or others"
            )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _is_mergeable(layer: nn.Module, embedding: Tensor) -> bool:
    """A head that is tied to the embedding cannot be merged: the embedding would change with it."""
    if not isinstance(layer, Linear) or not isinstance(layer.base_layer, nn.Linear):
        return False
    return layer.base_layer.weight is not embedding


def plain_name(name: str) -> str | None:
    """A parameter's name in the model without adapters; None for an adapter's matrix."""
    if any(f".{matrix}." in name for matrix in MATRICES):
        return None
    return name.replace(".base_layer.", ".")


def sent_name(name: str) -> str | None:
    """The name under which an adapter's matrix is sent, as "layers.0.mlp.up_proj.lora_A.weight";
    None for any other parameter."""
    for matrix in MATRICES:
        if f".{matrix}.{ADAPTER_NAME}." in name:
            return name.replace(f".{matrix}.{ADAPTER_NAME}.", f".{matrix}.")
    return None


@dataclass(frozen=True)
class AdaptedLayer:
    """The adapter of one linear layer.

    Attributes:
        scaling: alpha / rank.
        a: [rank, inputs], sharded by FSDP2.
        b: [outputs, rank], sharded by FSDP2 like the rows of the layer's weight.
    """

    scaling: float
    a: DTensor
    b: DTensor


class Adapters:
    """A rank's adapters; none where the model has none.

    FSDP2 cuts B as it cuts its layer's weight, so a rank has the rows of both; A is small and is
    kept whole. So reading merged weights needs no other rank.
    """

    def __init__(
        self, model: nn.Module, stored_name: Callable[[str], str] = lambda name: name
    ) -> None:
        """Collective, after the weights have been loaded.

        Args:
            model: with its adapters.
            stored_name: the name in the checkpoint of a layer's weight, by the model's.
        """
        self.layers: dict[str, AdaptedLayer] = {}
        """By the model's name of the layer's weight."""
        self._name_of_stored: dict[str, str] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, Linear):
                a = layer.lora_A[ADAPTER_NAME].weight
                b = layer.lora_B[ADAPTER_NAME].weight
                scaling = layer.scaling[ADAPTER_NAME]
                self.layers[f"{name}.weight"] = AdaptedLayer(scaling, a, b)
                self._name_of_stored[stored_name(f"{name}.weight")] = f"{name}.weight"
        self.gather()

    @torch.no_grad()
    def gather(self) -> None:
        """Fetch every A as it is now (collective)."""
        self._whole_a = {name: layer.a.full_tensor() for name, layer in self.layers.items()}

    def merged(self, name: str, rows: Tensor) -> Tensor:
        """This rank's `rows` of the checkpoint's tensor `name` with its adapter: fp32 where there
        is one, else as they are (no collective)."""
        own_name = self._name_of_stored.get(name)
        if own_name is None:
            return rows
        layer = self.layers[own_name]
        merged = rows.to(torch.float32, copy=True)
        return merged.addmm_(layer.b.to_local(), self._whole_a[own_name], alpha=layer.scaling)

    def sent(self, name: str, rows: Tensor) -> Tensor:
        """This rank's `rows` of the matrix `name` (of `sent_name`) as they are sent: B has the
        scaling in it, so that the engine scales nothing, and holds exactly what it received."""
        layer_name, matrix, _ = name.rsplit(".", 2)
        if matrix == MATRICES[0]:
            return rows
        return rows * self.layers[f"{layer_name}.weight"].scaling

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """The adapter by peft's names, on the CPU (collective)."""
        state = {}
        for name, layer in self.layers.items():
            prefix = f"base_model.model.{name.removesuffix('weight')}"
            state[f"{prefix}lora_A.weight"] = self._whole_a[name].cpu().contiguous()
            state[f"{prefix}lora_B.weight"] = layer.b.full_tensor().cpu().contiguous()
        return state


def write(state: dict[str, Tensor], model_config: ModelConfig, folder: str) -> None:
    """Write an adapter as peft does. `state`: of `Adapters.state`."""
    config = peft_config(model_config)
    if config.target_modules == "all-linear":
        # As peft writes it; not every reader knows the shorthand.
        config.target_modules = {name.split(".")[-3] for name in state}
    config.inference_mode = True
    config.base_model_name_or_path = model_config.path
    config.save_pretrained(folder)
    save_file(state, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
