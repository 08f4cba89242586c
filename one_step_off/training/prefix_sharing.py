"""Whether a role computes common prefixes once, and by which rule, see
`algorithms/shared_prefixes`.

The rule's constants were measured per kind of device, see docs/measured/shared_prefix.md.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from one_step_off.algorithms import batching
from one_step_off.algorithms.shared_prefixes import SharingRule
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.models.experts import expert_share, fused_experts
from one_step_off.models.hf_model import has_state_layers
from one_step_off.training.packed_attention import (
    CAUSAL,
    PACKED,
    PER_SEQUENCE,
    AttentionChoice,
    boundary_arguments,
    packed_attention,
)


@dataclass(frozen=True)
class Rates:
    """What work costs on a kind of device, in FLOPs of its matrix products.

    Attributes:
        attention: of a FLOP of the attention.
        masked: see `SharingRule`.
        least_saving, least_gain: see `SharingRule`; the former in all layers.
    """

    attention: float
    masked: float
    least_saving: float
    least_gain: float


RATES = {
    "cpu": Rates(attention=3.0, masked=1.0, least_saving=5e9, least_gain=0.1),
    "cuda": Rates(attention=2.0, masked=0.0, least_saving=1e10, least_gain=0.1),
}
"""Those of CPUs are of one core in float32; its attention with a mask computes all pairs. Those of
GPUs are estimates: matrix products of an H200 do 5e14 FLOPs in a second, and kernels leave out
blocks that are masked."""

_TRIED_ROW = np.array([[0, 0, 73], [1, 70, 111], [2, 100, 120]])
"""Of the sequences with which a kernel is tried their places, the tokens that they have in common
with the one before, and all their tokens: the third one continues the second one's own tokens."""
_TOLERANCE = 0.02
"""Of the relative difference from float32, of bfloat16."""


def rule_of(
    model: PreTrainedModel, cfg: Config, role: str, device: torch.device, choice: AttentionChoice
) -> SharingRule | None:
    """The rule by which a role shares prefixes; None: it computes every sequence alone.

    So do models with a state or with a mask of their own; replayed routers, for which each sample
    has its own experts of the prompt; the load-balancing loss of experts, which depends on what
    else is in a micro-batch; `packing=off`; rows that sequence-parallel ranks divide; and GPUs
    where no kernel packs sequences.

    Args:
        model: may be empty.
        choice: the role's attention.
    """
    role_config = role_settings(cfg, role)
    takes_rows = choice.implementation in (PACKED, CAUSAL) and not has_state_layers(model.config)
    is_fast = choice.kernel not in ("", PER_SEQUENCE) or device.type == "cpu"
    has_routing = role == "actor" and cfg.rollout.replay_routing
    has_routing = has_routing or getattr(model.config, "output_router_logits", False)
    takes_rows = takes_rows and role_config.packing != "off"
    takes_rows = takes_rows and role_config.sequence_parallel_size == 1
    if has_routing or not (takes_rows and is_fast):
        return None
    text_config = model.config.get_text_config()
    layers = getattr(text_config, "num_hidden_layers", None)
    heads = getattr(text_config, "num_attention_heads", None)
    if not layers or not heads:
        return None  # the costs are not known
    rates = RATES[device.type]
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return SharingRule(
        token=2 * _params_of_layers(model),
        pair=4 * layers * heads * width * rates.attention,
        masked=rates.masked,
        least_saving=rates.least_saving,
        least_gain=rates.least_gain,
        row_tokens=role_config.micro_batch_tokens,
    )


def _params_of_layers(model: PreTrainedModel) -> float:
    """The parameters with which each token is multiplied; of experts those that it passes."""
    embedding = model.get_input_embeddings().weight
    of_experts = {id(p) for module in fused_experts(model).values() for p in module.parameters()}
    share = expert_share(model.config.get_text_config()) or 1.0
    total = 0.0
    for parameter in model.base_model.parameters():
        if parameter.ndim >= 2 and parameter is not embedding:
            total += parameter.numel() * (share if id(parameter) in of_experts else 1)
    return total


def works(
    role: str, device: torch.device, choice: AttentionChoice, hf_config: PretrainedConfig
) -> bool:
    """Whether the role's kernel computes shared prefixes rightly on this device, which is tried for
    kernels of GPUs: a version that aligned causal attention, or a window, at the first query and
    key would be silently wrong. If not, one line of the log says so. `hf_config`: of the role's
    model, whose heads are tried."""
    if choice.kernel in ("", PER_SEQUENCE):
        return True
    windows = [None, 35]
    if not getattr(hf_config.get_text_config(), "sliding_window", None):
        windows = [None]
    try:
        difference = max(
            _difference_from_exact(device, choice.kernel, hf_config, window) for window in windows
        )
    except Exception as e:  # kernels of other packages
        reason = f"{type(e).__name__}: {e}"
    else:
        if difference < _TOLERANCE:
            return True
        reason = f"its results differ by {difference:.2g}"
    logging.getLogger(__name__).warning(
        "%s: prompts are computed once per sample: the kernel %r cannot share them (%s)",
        role,
        choice.kernel,
        reason,
    )
    return False


def _difference_from_exact(
    device: torch.device, kernel: str, hf_config: PretrainedConfig, window: int | None
) -> float:
    """The largest relative difference of outputs and gradients of a random row with shared
    prefixes, in bfloat16 by the kernel, from those in float32 on the host. `window`: in tokens."""
    text_config = hf_config.get_text_config()
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    sequences = [np.zeros(length, np.int64) for length in _TRIED_ROW[:, 2]]
    nothing = [np.zeros(0, np.int64)] * len(sequences)
    layout = batching.collate(sequences, nothing, packed=True, rows=_TRIED_ROW[:, :2])
    generator = torch.Generator().manual_seed(0)
    tensors = [  # query, key, value, and the output's gradient
        torch.randn(1, count, layout.input_ids.size, width, generator=generator).bfloat16()
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    exact = _outputs_and_gradients(layout, [t.float() for t in tensors], PER_SEQUENCE, window)
    found = _outputs_and_gradients(layout, [t.to(device) for t in tensors], kernel, window)
    differences = []
    for ours, theirs in zip(found, exact, strict=True):
        differences.append(float((ours.float().cpu() - theirs).norm() / theirs.norm()))
    return max(differences)


def _outputs_and_gradients(
    layout: batching.MicroBatch, tensors: list[Tensor], kernel: str, window: int | None
) -> list[Tensor]:
    """The attention's output, and the gradients of query, key and value."""
    *inputs, slope = tensors
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(slope.device)

    cu_seqlens = to_device(layout.cu_seqlens)
    arguments = boundary_arguments(layout, cu_seqlens, kernel, to_device=to_device)
    with torch.enable_grad():
        layer: Any = torch.nn.Identity()
        output, _ = packed_attention(layer, *inputs, None, sliding_window=window, **arguments)
        gradients = torch.autograd.grad(output, inputs, slope.transpose(1, 2))
    return [output.detach(), *gradients]
