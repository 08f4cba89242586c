"""Rotary embeddings as vLLM computes them: the same frequencies for every batch of a run.

transformers chooses the frequencies of the types `longrope` and `dynamic` anew in each call, by its
longest sequence, so the log-probs of a sequence would depend on its neighbors. vLLM chooses them
once, when the engine starts. `fix_frequencies` does the same for a model in training. What one of
the two reads and the other does not is refused by `check_settings` and
`check_rope`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from one_step_off.config.errors import ConfigError, as_config_error

PLAIN_KEYS = frozenset({"rope_type", "type", "rope_theta"})
"""Keys of `rope_parameters` that both sides read in every model."""

_SECTIONS = {"mrope_section", "mrope_interleaved"}  # the same for text, whatever they say
_YARN = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
READ_BY_BOTH: dict[str, set[str]] = {
    "default": _SECTIONS,
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"} | _YARN | _SECTIONS,
    "longrope": {
        *("short_factor", "long_factor", "original_max_position_embeddings"),
        *("factor", "attention_factor"),  # as far as they lead to vLLM's scale
    },
    "llama3": {
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    },
    "proportional": set(),
}
"""By rope type: the further keys that transformers and vLLM read alike."""

DUAL_CHUNK = "dual_chunk_attention_config"
PARTIAL = "partial_rotary_factor"
CHOOSING_TYPES = ("dynamic", "longrope")
"""Types whose frequencies transformers chooses in each call."""

_FIXED = "fixed"
"""A rope type that transformers' `dynamic_rope_update` leaves alone."""


def rope_parameters(hf_config: Any) -> dict[str, dict[str, Any]]:
    """The settings of the rotary embeddings by type of layer; the type is "" where all layers have
    the same. {}: the model has none."""
    text_config = hf_config.get_text_config()
    for name in ("rope_parameters", "rope_scaling"):  # models with own code may have the old name
        settings = getattr(text_config, name, None)
        if not isinstance(settings, dict) or not settings:
            continue
        if all(isinstance(value, dict) or value is None for value in settings.values()):
            return {key: value for key, value in settings.items() if value}
        return {"": settings}
    return {}


def rope_type(settings: dict[str, Any]) -> str:
    """The type in one layer's settings."""
    return settings.get("rope_type") or settings.get("type") or "default"


def _rotated_part(settings: dict[str, Any]) -> float:
    return settings.get(PARTIAL) or 1.0


def unread_key(settings: dict[str, Any]) -> str | None:
    """A key of one layer's settings that transformers or vLLM ignores; None: there is none."""
    known = PLAIN_KEYS | READ_BY_BOTH.get(rope_type(settings), set()) | {PARTIAL}
    return next((name for name in settings if name not in known), None)


def is_plain(hf_config: Any) -> bool:
    """Whether a model has no rotary embeddings, or those without any setting but their base."""
    if getattr(hf_config.get_text_config(), DUAL_CHUNK, None):
        return False
    return all(
        rope_type(settings) == "default" and settings.keys() <= PLAIN_KEYS
        for settings in rope_parameters(hf_config).values()
    )


def fix_frequencies(model: nn.Module, length: int) -> None:
    """Give each rotary embedding the frequencies that vLLM would use for the whole run.

    Args:
        model: its rotary embeddings are on a real device.
        length: tokens of the longest sequence, vLLM's `max_model_len`.
    """
    for module, layer_type in _rotary_embeddings(model):
        if _type_of(module, layer_type) not in CHOOSING_TYPES:
            continue
        if _type_of(module, layer_type) == "longrope":
            frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
                module.config, None, seq_len=length, layer_type=layer_type or None
            )
            _of_layer(module, "inv_freq", layer_type).copy_(frequencies)
        # Those of `dynamic` stay what they are at the start: those of the trained context, which
        # vLLM's table has and no sequence of a run exceeds.
        if layer_type:
            module.rope_type = module.rope_type | {layer_type: _FIXED}
        else:
            module.rope_type = _FIXED


def _rotary_embeddings(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """transformers' rotary embeddings of a model, each with the types of its layers; the type is ""
    where it has one set of frequencies for all."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            yield module, ""
        elif isinstance(kind, dict):
            for layer_type in kind:
                yield module, layer_type


def _type_of(module: Any, layer_type: str) -> str:
    return module.rope_type[layer_type] if layer_type else module.rope_type


def _of_layer(module: Any, name: str, layer_type: str) -> Any:
    """An attribute of a rotary embedding that each type of layer has."""
    return getattr(module, f"{layer_type}_{name}" if layer_type else name)


def check_rope(model: PreTrainedModel, name: str, length: int, has_engine: bool) -> None:
    """Check that a model computes the same rotary embeddings in every batch, and those of vLLM.

    Args:
        model: on the meta device, its buffers on a real one, with fixed frequencies.
        name: of the model, for messages.
        length: see `fix_frequencies`.
        has_engine: an engine samples from this model.

    Raises:
        ConfigError: names the setting.
    """
    hf_config = model.config.get_text_config()
    by_layer = rope_parameters(hf_config)
    embeddings = list(_rotary_embeddings(model))
    # A class with embeddings in code of its own has none here.
    types = {_type_of(*embedding) for embedding in embeddings}
    types = types or {rope_type(settings) for settings in by_layer.values()}
    if types.intersection(CHOOSING_TYPES):
        raise ConfigError(
            f"{name}: {type(model).__name__} chooses its rotary frequencies by the longest "
            "sequence of a batch, in code of its own; give another model"
        )
    for module, layer_type in embeddings:
        _check_independence(module, layer_type, name, length)
        if has_engine and layer_type in by_layer:
            _check_scale(module, layer_type, by_layer[layer_type], name)
    if any(_rotated_part(settings) != 1 for settings in by_layer.values()):
        _check_partial(model, hf_config, by_layer, name)


def check_settings(model_config: Any, name: str) -> None:
    """Refuse what vLLM or transformers alone would read.

    Args:
        model_config: the Hugging Face config of a model that an engine samples from.
        name: of the model, for messages.

    Raises:
        ConfigError: names the setting.
    """
    hf_config = model_config.get_text_config()
    fix = "use a copy of the model whose config.json lacks it, or another model"
    if getattr(hf_config, DUAL_CHUNK, None):
        raise ConfigError(
            f"{name}: its {DUAL_CHUNK} is read by vLLM and not by transformers; {fix}"
        )
    for settings in rope_parameters(hf_config).values():
        kind = rope_type(settings)
        if kind not in READ_BY_BOTH:
            known = ", ".join(READ_BY_BOTH)
            raise ConfigError(
                f"{name}: its rope_type={kind} is not one that transformers and vLLM compute alike "
                f"({known}); give another model"
            )
        key = unread_key(settings)
        # HunYuan's own classes read alpha, on both sides, and nothing else then.
        if kind == "dynamic" and settings.get("alpha"):
            key = None if hf_config.model_type.startswith("hunyuan") else "alpha"
        if key is not None:
            raise ConfigError(
                f"{name}: of its rope_parameters, {key}={settings[key]} is read by only one of "
                f"transformers and vLLM for rope_type={kind}; {fix}"
            )


def _cos_and_sin(module: Any, layer_type: str, positions: torch.Tensor) -> list[torch.Tensor]:
    options = {"layer_type": layer_type} if layer_type else {}
    result = module(torch.zeros(1), positions[None], **options)
    return list(result) if isinstance(result, tuple) else [result]


@torch.no_grad()
def _check_independence(module: Any, layer_type: str, name: str, length: int) -> None:
    """Refuse an embedding of a position that depends on the other positions of the call."""
    problem = f"{name}: its rotary embeddings cannot be computed"
    with as_config_error(problem, "give another model"):
        first = torch.arange(2)
        alone = _cos_and_sin(module, layer_type, first)
        # The longest sequence stands for those that it may meet.
        beside_others = _cos_and_sin(module, layer_type, torch.cat([first, torch.tensor([length])]))
    for short, long in zip(alone, beside_others, strict=True):
        if not torch.equal(short, long[..., :2, :]):
            raise ConfigError(
                f"{name}: its rotary embeddings ({type(module).__name__}) depend on the longest "
                "sequence of a batch, and vLLM's do not; give another model"
            )


def _check_scale(module: Any, layer_type: str, settings: dict[str, Any], name: str) -> None:
    """Refuse a longrope model whose attention is scaled otherwise in vLLM, which derives the scale
    from the two context lengths alone."""
    if rope_type(settings) != "longrope":
        return
    scale = _of_layer(module, "attention_scaling", layer_type)
    trained_length = settings["original_max_position_embeddings"]
    ratio = module.config.max_position_embeddings / trained_length
    engine_scale = math.sqrt(1 + math.log(ratio) / math.log(trained_length)) if ratio > 1 else 1.0
    if not math.isclose(scale, engine_scale, rel_tol=1e-6):
        key = "attention_factor" if settings.get("attention_factor") is not None else "factor"
        raise ConfigError(
            f"{name}: of its rope_parameters, {key}={settings.get(key)} scales the attention by "
            f"{scale:.4f}, and vLLM by {engine_scale:.4f}; use a copy of the model whose "
            "config.json lacks it, or another model"
        )


def _check_partial(
    model: PreTrainedModel, hf_config: Any, by_layer: dict[str, dict[str, Any]], name: str
) -> None:
    """Refuse a model whose class rotates all of each head, though its settings say a part."""
    head_size = getattr(hf_config, "head_dim", None)
    head_size = head_size or hf_config.hidden_size // hf_config.num_attention_heads
    for module, layer_type in _rotary_embeddings(model):
        settings = by_layer.get(layer_type, {})
        part = _rotated_part(settings)
        if rope_type(settings) == "proportional":  # all of it, the rest by an angle of 0
            continue
        # The class's own function knows what its layers rotate; those of other types are shared.
        options = {"layer_type": layer_type} if layer_type else {}
        frequencies, _ = module.compute_default_rope_parameters(module.config, **options)
        if frequencies.numel() != math.ceil(int(head_size * part) / 2):
            raise ConfigError(
                f"{name}: {type(model).__name__} does not rotate the part of each head that its "
                f"{PARTIAL}={part} names, and vLLM does; give another model"
            )
