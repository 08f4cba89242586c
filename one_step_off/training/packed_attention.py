"""Attention over packed sequences, and over padded ones without a mask, as attention functions of
transformers.

A packed micro-batch is one row of sequences, one after the other. The boundaries between them are
computed once per micro-batch on the host (`batching.MicroBatch`), and pass through the model's
forward as keyword arguments down to every attention layer. Three kernels read them:

    flash_attn   the varlen function of the package flash_attn, where it is installed
    torch        torch.nn.attention.varlen, which torch brings along; both need a GPU and bf16
    sequences    torch's scaled_dot_product_attention on one sequence after the other: any device
                 and dtype, exact, and as many kernel launches as there are sequences

With shared prefixes (`batching.MicroBatch`) a sequence has the keys of all its tokens, also of
those that stand in the sequences before it, and the queries of its own. The same kernels compute
it, since they align causal attention at the last query and the last key. On CPUs the third one also
serves roles whose other batches are padded.

transformers makes no mask for an attention function that has none registered. That is wanted: to
know whether a row is packed it reads `position_ids` back from the device, in every forward pass.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from one_step_off.algorithms import batching
from one_step_off.config.errors import ConfigError
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import BackendConfig
from one_step_off.models.hf_model import STATE_LAYERS, empty_model, has_state_layers
from one_step_off.models.vision import is_vision_config
from one_step_off.training import recurrent_layers
from one_step_off.training.token_outputs import gathered_rows

PACKED = "one_step_off_packed"
CAUSAL = "one_step_off_causal"
_PROBE = "one_step_off_probe"
"""Names of attention functions, registered with transformers."""

FLASH_ATTN = "flash_attn"
TORCH_VARLEN = "torch"
PER_SEQUENCE = "sequences"

MAX_HEAD = 256
"""The widest head of the kernels for GPUs, whose width must also be a multiple of 8."""

FIRST_FLASH_GPU = (8, 0)
"""The compute capability from which on these kernels run."""

FIRST_HOPPER_GPU = (9, 0)

_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
_TRIED_LENGTHS = (70, 11)
"""Tokens of the sequences with which packing is tried: chunks of linear attention have 64."""
_PACKED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of relative differences between packed sequences and each alone. Lost positions make more."""
_UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that change the scores, in ways that the kernels do not know."""


@dataclass(frozen=True)
class AttentionChoice:
    """The attention of one role.

    Attributes:
        implementation: the name by which transformers knows it.
        kernel: FLASH_ATTN, TORCH_VARLEN or PER_SEQUENCE where batches are packed; empty: padded.
        has_states: batches are packed for layers with a state, too; see `recurrent_layers`.
    """

    implementation: str
    kernel: str = ""
    has_states: bool = False


class _FirstCall(Exception):
    """Carries the arguments of a model's first call of its attention function."""

    def __init__(self, module: nn.Module, query: Tensor, value: Tensor, mask: Any, kwargs: dict):
        super().__init__("the attention function was called")
        self.module = module
        self.query = query
        self.value = value
        self.mask = mask
        self.kwargs = kwargs


def register() -> None:
    """Make the attention functions of this module known to transformers. May be repeated."""
    AttentionInterface.register(PACKED, packed_attention)
    AttentionInterface.register(CAUSAL, causal_attention)
    AttentionInterface.register(_PROBE, _report_first_call)


def choose(cfg: Config, role: str, device: torch.device) -> AttentionChoice:
    """The attention that `packing` of the role and model.attn_implementation mean on this device,
    for the role's model.

    Raises:
        ConfigError: `packing=on`, or sequence parallelism, which needs it, and the model's
            attention cannot take boundaries.
    """
    register()
    requested = cfg.model.attn_implementation
    if requested == "eager":
        return AttentionChoice(requested)
    padded = "sdpa" if requested == "auto" else requested
    settings = role_settings(cfg, role)
    packing = "on" if settings.sequence_parallel_size > 1 else settings.packing
    model, obstacle = _asked_model(cfg, role, device)
    call = None
    if not obstacle:
        call, obstacle = _first_call(model)
    if call is not None:
        if padded == "sdpa" and not _has_window(call.module.config):
            padded = CAUSAL
        has_states = has_state_layers(model.config)
        choice = AttentionChoice(PACKED, _kernel(cfg, device, call), has_states)
        is_slow = choice.kernel == PER_SEQUENCE
        if packing == "off" or (packing == "auto" and is_slow):
            return AttentionChoice(padded)
        if has_states:
            obstacle = _state_obstacle(model, choice, padded, packing)
        if not obstacle:
            return choice
    if packing == "on":
        raise _cannot_pack(role, settings, obstacle)
    if packing == "auto" and device.type == "cuda":
        logging.getLogger(__name__).warning("%s: batches are padded: %s", role, obstacle)
    return AttentionChoice(padded)


def _cannot_pack(role: str, settings: BackendConfig, obstacle: str) -> ConfigError:
    size = settings.sequence_parallel_size
    if size > 1:
        return ConfigError(f"{role}.sequence_parallel_size={size}: {obstacle}; set it to 1")
    return ConfigError(f"{role}.packing=on: {obstacle}; use auto or off")


def _kernel(cfg: Config, device: torch.device, call: _FirstCall) -> str:
    """The fastest kernel for packed sequences that runs here."""
    width = call.query.shape[-1]
    is_fast_head = width == call.value.shape[-1] and width % 8 == 0 and width <= MAX_HEAD
    is_fast_place = device.type == "cuda" and cfg.model.dtype == "bfloat16"
    if not is_fast_place or not is_fast_head or cfg.model.attn_implementation == "sdpa":
        return PER_SEQUENCE
    if torch.cuda.get_device_capability(device) < FIRST_FLASH_GPU:
        return PER_SEQUENCE
    # Only an installed flash_attn counts: fetching a kernel from the hub would make a start depend
    # on the network.
    if transformers.utils.is_flash_attn_2_available():
        return FLASH_ATTN
    return TORCH_VARLEN


def _has_window(hf_config: Any) -> bool:
    """Whether some layer sees only the last tokens."""
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        return True
    has_switch = getattr(hf_config, "use_sliding_window", True)
    return bool(has_switch and getattr(hf_config, "sliding_window", None))


def _asked_model(cfg: Config, role: str, device: torch.device) -> tuple[PreTrainedModel, str]:
    """The model that is asked for its attention, and why it cannot be packed, if that is known.

    It is on the meta device, so that this costs no memory. With layers that have a state it is a
    small copy on the role's device, with which packing is tried.
    """
    model = empty_model(cfg, role, _PROBE, torch.float32)
    obstacle = _class_obstacle(model)
    if not obstacle and has_state_layers(model.config):
        try:
            dtype = getattr(torch, cfg.model.dtype)
            model = recurrent_layers.small_copy(model, device, dtype)
        # Code of many authors: a model that cannot be tried is padded.
        except Exception as e:
            obstacle = f"has layers with a state, and no small copy ({type(e).__name__}: {e})"
    return model, f"{type(model).__name__} {obstacle}" if obstacle else ""


@torch.no_grad()
def _first_call(model: PreTrainedModel) -> tuple[_FirstCall | None, str]:
    """How a model with the attention `_PROBE` calls its attention function; or None, and why
    batches cannot be packed for it."""
    name = type(model).__name__
    boundaries = torch.tensor([0, 1, 2], dtype=torch.int32)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        model.base_model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            cu_seq_lens_q=boundaries,
        )
    except _FirstCall as call:
        obstacle = _call_obstacle(call, boundaries)
        return (None, f"{name} {obstacle}") if obstacle else (call, "")
    # Code of many authors: a model that cannot be asked is padded.
    except Exception as e:
        return None, f"{name} cannot be asked for its attention ({type(e).__name__}: {e})"
    return None, f"{name} does not call transformers' attention functions"


def _class_obstacle(model: PreTrainedModel) -> str:
    hf_config = model.config.get_text_config()
    if is_vision_config(model.config):
        return "reads images, whose positions have three dimensions"
    is_tried = has_state_layers(model.config)
    # A model that runs under flash attention needs nothing that only a mask could tell it.
    takes_functions = model._supports_attention_backend or is_tried
    if not (takes_functions and model._supports_flash_attn):
        return "does not support other attention functions"
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    other_layers = layer_types - _KNOWN_LAYER_TYPES - STATE_LAYERS
    if other_layers or (model._is_stateful and not is_tried):
        return "has layers whose state would run on from one packed sequence into the next"
    return ""


def _call_obstacle(call: _FirstCall, boundaries: Tensor) -> str:
    if call.kwargs.get("cu_seq_lens_q") is not boundaries:
        return "does not pass the boundaries of sequences to its attention"
    if call.mask is not None:
        return "makes an attention mask of its own"
    if not _is_causal(call.module, call.kwargs.get("is_causal")):
        return "is not causal"
    for name in _UNSUPPORTED_ARGUMENTS:
        if call.kwargs.get(name) is not None:
            return f"uses {name}, which attention over packed sequences lacks"
    return ""


def _is_causal(module: nn.Module, argument: bool | None) -> bool:
    return getattr(module, "is_causal", True) if argument is None else argument


def _state_obstacle(
    model: PreTrainedModel, choice: AttentionChoice, padded: str, packing: str
) -> str:
    """Why sequences should not be packed for a model whose layers have a state; empty: they may.

    Two random sequences are packed, and passed alone. No gradient may flow from one into the
    other: it would be exactly 0 in any dtype. And the outputs and gradients must be alike but for
    rounding. The medians are compared, since after rounding a router may send a token to other
    experts.

    Args:
        model: small, with random weights.
        choice: how batches would be packed.
        padded: transformers' name of the attention of a sequence alone.
        packing: the role's setting.
    """
    name = type(model).__name__
    is_slow = recurrent_layers.keep_sequences_apart(model)
    if is_slow and packing == "auto":
        return (
            f"without flash-linear-attention the linear attention of {name} would run on one "
            "sequence after the other"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing by more, and they wait for each other
    try:
        with torch.enable_grad():
            leaks, difference = _compare_packed(model, choice, padded)
    # Code of many authors, and kernels of other packages.
    except Exception as e:
        return f"{name} cannot be packed ({type(e).__name__}: {e})"
    finally:
        torch.set_num_threads(threads)
    if leaks:
        return f"{name} has layers whose state runs on from one packed sequence into the next"
    if not difference < _PACKED_TOLERANCE[model.dtype]:
        return f"{name} computes packed sequences otherwise than alone, by {difference:.2g}"
    return ""


def _compare_packed(
    model: PreTrainedModel, choice: AttentionChoice, padded: str
) -> tuple[bool, float]:
    """See `_state_obstacle`.

    Returns:
        Whether a gradient flows from one sequence into the other, and the largest of the medians of
        relative differences.
    """
    nothing = [np.zeros(0, np.int64) for _ in _TRIED_LENGTHS]
    sequences = [np.zeros(length, np.int64) for length in _TRIED_LENGTHS]
    layout = batching.collate(sequences, nothing, packed=True)
    cu_seqlens = torch.from_numpy(layout.cu_seqlens).to(model.device)
    arguments = boundary_arguments(layout, cu_seqlens, choice.kernel, choice.has_states)
    arguments["position_ids"] = torch.from_numpy(layout.position_ids).to(model.device)
    width = model.get_input_embeddings().weight.shape[1]
    generator = torch.Generator().manual_seed(0)

    def random_rows() -> list[Tensor]:
        shapes = [(1, length, width) for length in _TRIED_LENGTHS]
        rows = [torch.randn(shape, generator=generator) for shape in shapes]
        return [row.to(model.device, model.dtype).requires_grad_() for row in rows]

    inputs, factors = random_rows(), random_rows()
    weights = [weight for weight in model.base_model.parameters() if weight.requires_grad]

    model.set_attn_implementation(PACKED)
    packed = _output(model, torch.cat(inputs, 1), **arguments).split(_TRIED_LENGTHS, 1)
    gradients = [
        _gradients((output * factor).sum(), [*inputs, *weights])
        for output, factor in zip(packed, factors, strict=True)
    ]
    leaks = any(gradients[i][1 - i].count_nonzero() for i in range(2))

    model.set_attn_implementation(padded)
    differences = []
    for i in range(2):
        alone = _output(model, inputs[i])
        of_inputs, *of_weights = _gradients((alone * factors[i]).sum(), [inputs[i], *weights])
        pairs = zip(gradients[i][2:], of_weights, strict=True)
        by_weight = [_difference(a.reshape(1, -1), b.reshape(1, -1)) for a, b in pairs]
        differences.append(_difference(packed[i], alone))
        differences.append(_difference(gradients[i][i], of_inputs))
        differences.append(np.median(by_weight))
    return leaks, float(np.max(differences))


def _output(model: PreTrainedModel, inputs: Tensor, **arguments: Any) -> Tensor:
    output = model.base_model(inputs_embeds=inputs, use_cache=False, **arguments)
    return output.last_hidden_state


def _gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return torch.autograd.grad(
        loss, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """The median over the rows [..., width] of |found - expected| / |expected|."""
    norms = expected.float().norm(dim=-1).clamp(min=1e-30)
    distances = (found.float() - expected.float()).norm(dim=-1)
    return (distances / norms).median().item()


def boundary_arguments(
    layout: batching.MicroBatch,
    cu_seqlens: Tensor,
    kernel: str,
    has_states: bool = False,
    to_device: Callable[[np.ndarray], Tensor] = torch.from_numpy,
) -> dict[str, Any]:
    """The keyword arguments of a model's forward pass that give its layers the boundaries.

    Args:
        layout: a packed micro-batch.
        cu_seqlens: `layout.cu_seqlens` on the model's device.
        kernel, has_states: of `AttentionChoice`.
        to_device: brings an array to the model's device.
    """
    arguments = {
        # The names that transformers' own models and attention functions know.
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": layout.max_seqlen,
        "max_length_k": layout.max_seqlen,
        "packed_kernel": kernel,
    }
    if kernel == PER_SEQUENCE or has_states:
        # What cuts on the host must not read the device for that.
        arguments["sequence_lengths"] = np.diff(layout.cu_seqlens)
    if layout.common is not None and kernel == PER_SEQUENCE:
        arguments["common"] = layout.common
    elif layout.common is not None:
        keys = layout.keys()
        lengths = [len(own) for own in keys]
        cu_keys = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        arguments["key_index"] = to_device(np.concatenate(keys))
        arguments["cu_seq_lens_k"] = to_device(cu_keys)
        arguments["max_length_k"] = max(lengths)
    if has_states:
        tokens = torch.arange(layout.input_ids.shape[1], device=cu_seqlens.device)
        arguments["seq_idx"] = torch.bucketize(tokens, cu_seqlens[1:], out_int32=True, right=True)[
            None
        ]
    return arguments


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sequence_lengths: np.ndarray | None = None,
    packed_kernel: str = "",
    common: np.ndarray | None = None,
    key_index: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences of one packed row. It is not compiled: its
    kernels gain nothing, and it would be compiled again for other boundaries.

    Args:
        module: the layer that calls.
        query: [1, heads, T, width]; key, value: [1, key-value heads, T, width].
        scaling: factor of the scores; None: 1 / sqrt(width).
        sliding_window: tokens that a token sees, itself included; None: all before it.
        cu_seq_lens_q: int32 [sequences + 1]; the first token of each sequence, and T.
        max_length_q: tokens of the longest sequence.
        sequence_lengths: for the kernel PER_SEQUENCE, the tokens of each sequence. (A list would
            be a constant to torch.compile: a compilation for each.)
        packed_kernel: of `AttentionChoice`.
        common: of `batching.MicroBatch`, for the kernel PER_SEQUENCE.
        key_index: int64 [keys]; with shared prefixes, for the other kernels: the positions of the
            keys of each sequence.
        cu_seq_lens_k, max_length_k: as those of the queries.

    Returns:
        [1, T, heads, width], and None for the weights.

    Raises:
        RuntimeError: the boundaries are missing, or the layer wants what no kernel here computes.
            Without this error tokens would see other sequences, which nothing would show.
    """
    if cu_seq_lens_q is None or not packed_kernel or len(query) != 1:
        raise RuntimeError("packed attention needs one row and the boundaries of its sequences")
    has_bias = any(kwargs.get(name) is not None for name in _UNSUPPORTED_ARGUMENTS)
    if attention_mask is not None or dropout or has_bias or not _is_causal(module, is_causal):
        names = ", ".join(_UNSUPPORTED_ARGUMENTS)
        raise RuntimeError(f"packed attention is causal, without mask, dropout, {names}")
    if packed_kernel == PER_SEQUENCE:
        lengths = sequence_lengths.tolist()
        shared = [0] * len(lengths) if common is None else common.tolist()
        output = attend_per_sequence(query, key, value, lengths, scaling, sliding_window, shared)
        return output.transpose(1, 2), None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    boundaries = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    if key_index is not None:
        key, value = gathered_rows(key, key_index), gathered_rows(value, key_index)
        boundaries = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    left = -1 if sliding_window is None else sliding_window - 1
    attend = _attend_flash_attn if packed_kernel == FLASH_ATTN else _attend_torch
    return attend(query, key, value, boundaries, scaling, left)[None], None


def _attend_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: tuple[Tensor, Tensor, int, int],
    scaling: float | None,
    left: int,
) -> Tensor:
    """Attention of each sequence's queries to its keys; the last key is that of the last query.

    Args:
        query: [T, heads, width]; key, value: [keys, key-value heads, width].
        boundaries: of the queries and of the keys; the most of either in one sequence.
        left: tokens before a token that it sees; -1: all.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        query, key, value, *boundaries, scale=scaling, window_size=(left, 0), enable_gqa=True
    )


def _attend_flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: tuple[Tensor, Tensor, int, int],
    scaling: float | None,
    left: int,
) -> Tensor:
    """As `_attend_torch`, by the package flash_attn."""
    from flash_attn import flash_attn_varlen_func  # ty: ignore[import-not-found]  (optional)

    return flash_attn_varlen_func(
        query, key, value, *boundaries, softmax_scale=scaling, causal=True, window_size=(left, 0)
    )


def attend_per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    common: Sequence[int] = (),
) -> Tensor:
    """Causal attention of packed sequences, one after the other.

    Args:
        query: [1, heads, T, width]; key, value: [1, key-value heads, T, width].
        lengths: tokens of each sequence; they sum to T.
        scaling, sliding_window: as in `packed_attention`.
        common: how many keys each sequence has in common with the one before it, which come before
            its own. Empty: none has any.

    Returns:
        [1, heads, T, width].
    """
    queries, keys, values = (tensor.split(lengths, 2) for tensor in (query, key, value))
    outputs = []
    own_key, own_value = key, value
    for i, own_query in enumerate(queries):
        if common and common[i]:
            # From those of the sequence before, which may have them from others before it.
            own_key = torch.cat([own_key[:, :, : common[i]], keys[i]], 2)
            own_value = torch.cat([own_value[:, :, : common[i]], values[i]], 2)
        else:
            own_key, own_value = keys[i], values[i]
        mask = _causal_mask(own_query, own_key.shape[2], sliding_window)
        output = F.scaled_dot_product_attention(
            own_query,
            own_key,
            own_value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output)
    return torch.cat(outputs, 2)


def _causal_mask(query: Tensor, keys: int, sliding_window: int | None) -> Tensor | None:
    """bool [L, keys] of the keys that each of L queries sees, of which the last one sees the last
    key; None where torch's own causal attention is that."""
    length = query.shape[2]
    before = keys - length
    has_window = sliding_window is not None and keys > sliding_window
    if not before and not has_window:
        return None
    mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(before)
    return mask.triu(before + 1 - sliding_window) if has_window else mask


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a padded micro-batch: transformers' own "sdpa", but without the mask that
    transformers would make for that name. See `packed_attention` for the arguments, and where
    `packed_kernel` says that the micro-batch is packed, because it shares prefixes.

    Raises:
        RuntimeError: the layer has a window, for which a mask is needed.
    """
    if kwargs.get("packed_kernel"):
        return packed_attention(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs
        )
    if sliding_window is not None:
        raise RuntimeError("a layer with a sliding window needs the attention sdpa, with a mask")
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _report_first_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    raise _FirstCall(module, query, value, attention_mask, kwargs)
