"""Layers whose state runs along the tokens (linear attention, causal convolutions) in packed rows.

transformers passes the boundaries of packed sequences to the kernels of such layers. Without the
kernels' packages (flash-linear-attention, causal-conv1d) it computes the layers in plain torch and
drops the boundaries, so that a sequence silently continues from the state of the one before it.
Here these functions get versions that keep sequences apart.

Whether a model's packed sequences are apart is never taken for granted: `packed_attention` proves
it on a small copy of the model, see `small_copy`.
"""

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

_SMALL_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
_HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
"""Sizes of `small_copy`; of heads as few as their ratio allows. They keep their width: kernels
depend on it, and configs have other fields that must fit it."""

_replacements: list[Callable[..., Any]] = []


def keep_sequences_apart(model: PreTrainedModel) -> bool:
    """Replace the torch functions of transformers 5.19 that drop boundaries, in the modules that
    define the model's layers. Where a package's kernel is used, it stays. May be repeated.

    Returns:
        Whether a replacement works on one sequence after the other, which takes as many kernel
        launches as there are sequences.
    """
    is_sequential = False
    for name in {type(module).__module__ for module in model.modules()}:
        source = sys.modules[name]
        for function_name, replace in _REPLACE.items():
            function = vars(source).get(function_name)
            if function is None or _is_kernel(function):
                continue
            if function not in _replacements:
                function = replace(function)
                _replacements.append(function)
                setattr(source, function_name, function)
            is_sequential |= replace is _delta_rule_per_sequence
    return is_sequential


def _is_kernel(function: Callable[..., Any]) -> bool:
    """Whether transformers' function calls a package's kernel. A function that does not say so gets
    its sequences one by one, which is right with kernels too."""
    if not inspect.isfunction(function):
        return False
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))


def _convolution_within_sequences(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Causal convolution of each channel.

        Args:
            hidden_states: [1, channels, T].
            weight: [channels, taps].
            seq_idx: int32 [1, T], the sequence of each token; None: one sequence.
        """
        if seq_idx is None:
            return plain(hidden_states, weight, bias, activation=activation, **kwargs)
        taps = weight.shape[-1]
        windows = F.pad(hidden_states, (taps - 1, 0)).unfold(-1, taps, 1)
        sequences = F.pad(seq_idx, (taps - 1, 0), value=-1).unfold(-1, taps, 1)
        is_own = sequences == seq_idx[..., None]
        windows = windows.to(weight.dtype) * is_own[:, None]
        output = torch.einsum("bctk,ck->bct", windows, weight)
        if bias is not None:
            output = output + bias[:, None]
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.to(hidden_states.dtype)

    return convolve


def _delta_rule_per_sequence(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    @torch.compiler.disable  # it would be compiled again for other lengths
    def apply(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        sequence_lengths: np.ndarray | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The gated delta rule over [1, T, heads, width]; g and beta are [1, T, heads].

        `sequence_lengths`: of `packed_attention.boundary_arguments`, to read nothing back from the
        device.
        """
        if cu_seqlens is None:
            return plain(query, key, value, g=g, beta=beta, **kwargs)
        lengths = (cu_seqlens.diff() if sequence_lengths is None else sequence_lengths).tolist()
        parts = [tensor.split(lengths, 1) for tensor in (query, key, value, g, beta)]
        outputs = []
        for own_query, own_key, own_value, own_g, own_beta in zip(*parts, strict=True):
            output, _ = plain(own_query, own_key, own_value, g=own_g, beta=own_beta, **kwargs)
            outputs.append(output)
        return torch.cat(outputs, 1), None

    return apply


_REPLACE = {
    "causal_conv1d_fn": _convolution_within_sequences,
    "torch_chunk_gated_delta_rule": _delta_rule_per_sequence,
}


def small_copy(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the same class with random weights, one layer of each type, and a small width.

    Raises:
        Exception: of many types; the class cannot be built with these sizes.
    """
    hf_config = _small_config(model.config)
    with torch.random.fork_rng(devices=[]):  # a run's own random numbers stay as they are
        torch.manual_seed(0)
        small = type(model)(hf_config)
        for parameter in small.parameters():
            if parameter.ndim > 1:
                # Far from 0, so that what leaks over a boundary is far from 0 too.
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return small.to(device, dtype).eval()


def _small_config(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    small = copy.deepcopy(hf_config)
    text_config = small.get_text_config()
    if getattr(text_config, "head_dim", None) is None:
        text_config.head_dim = text_config.hidden_size // text_config.num_attention_heads
    for name, size in _SMALL_SIZES.items():
        if getattr(text_config, name, None):
            setattr(text_config, name, min(size, getattr(text_config, name)))
    for names in _HEADS:
        numbers = [getattr(text_config, name, None) or 0 for name in names]
        for name, number in zip(names, numbers, strict=True):
            if number:
                setattr(text_config, name, number // math.gcd(*numbers))
    text_config.pad_token_id = None  # it may be no row of the small embedding
    layer_types = text_config.layer_types
    chosen = sorted({layer_types.index(kind) for kind in layer_types})
    # Lists with a value for each layer.
    for name, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == len(layer_types):
            setattr(text_config, name, [value[index] for index in chosen])
    text_config.num_hidden_layers = len(chosen)
    return small
