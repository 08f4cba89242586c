"""A Hugging Face model as a role needs it: read and checked, or empty; and the logits of its hidden
states.

The policy and its reference are causal language models. Critic and reward model are the same
backbones with a scalar head, which transformers calls sequence classification with one label.

Two mistakes are easy to make and silent, so they are checked when a model is read: a head that is
not computed from the backbone's output, and a checkpoint whose tensors are not found in the model.
"""

import os
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from one_step_off.config.errors import ConfigError, as_config_error, key_error
from one_step_off.config.lengths import engine_length
from one_step_off.config.roles import load_hf_config, role_model_path
from one_step_off.config.schema import Config
from one_step_off.models.checkpoint_layout import CheckpointLayout, OtherLayout
from one_step_off.models.rope import fix_frequencies
from one_step_off.models.stored_weights import StoredWeights
from one_step_off.models.vision import is_vision_config

SCALAR_ROLES = ("critic", "reward_model")
SCALAR_HEAD = "score"
"""The attribute in which transformers keeps the head of a sequence classifier."""


@dataclass(frozen=True)
class ModelClass:
    """The class that makes a role's model.

    Attributes:
        auto_class: one of transformers' Auto classes.
        arguments: its arguments beyond those of every role.
        description: what it makes, for messages.
    """

    auto_class: Any
    arguments: dict[str, int]
    description: str


STATE_LAYERS = {"linear_attention", "conv", "hybrid"}
"""transformers' names of layers with a state, in `layer_types` of a config."""


def has_state_layers(hf_config: Any) -> bool:
    """Whether a model has layers with a state, by its config's `layer_types`."""
    layer_types = getattr(hf_config.get_text_config(), "layer_types", None)
    return not STATE_LAYERS.isdisjoint(layer_types or ())


def model_class_of(cfg: Config, role: str) -> ModelClass:
    """The class of a role's model: a language model, which may read images, or a classifier with
    one label."""
    if role in SCALAR_ROLES:
        auto_class = transformers.AutoModelForSequenceClassification
        return ModelClass(auto_class, {"num_labels": 1}, "model with a scalar head")
    path = role_model_path(cfg, role)
    problem = f"model.path: {path!r}: its config cannot be loaded"
    with as_config_error(problem, "give a complete model"):
        hf_config = load_hf_config(cfg, path)
    if is_vision_config(hf_config):
        return ModelClass(transformers.AutoModelForImageTextToText, {}, "model that reads images")
    return ModelClass(transformers.AutoModelForCausalLM, {}, "causal language model")


def read_checkpoint(
    cfg: Config, role: str, attention: str | None, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, CheckpointLayout | None]:
    """Read a role's whole model and check it. Returns it, and where the checkpoint's tensors lie
    in it; None: not known, and needed only for a role whose weights are streamed.

    Args:
        attention: transformers' name of the attention implementation; None: its default.
        dtype: of the parameters.
        device: "cpu", where everything is checked; or "meta", where only the headers of the weight
            files are read, and checks that need the weights' values are left out.

    Raises:
        ConfigError: the model cannot be loaded, lacks weights, or is of an architecture that cannot
            be trained here.
    """
    path = role_model_path(cfg, role)
    key = "model.path" if path == cfg.model.path else f"{role}.path"
    model_class = model_class_of(cfg, role)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": cfg.model.trust_remote_code,
        "device_map": None if device == "cpu" else device,
        "ignore_mismatched_sizes": True,  # they are refused below
    }
    problem = f"{path!r} is not a {model_class.description} that can be loaded"
    fix = "give a complete model, saved by save_pretrained"
    torch.manual_seed(cfg.trainer.seed)  # of a new scalar head
    # An unknown architecture, a broken file, code that must be trusted: errors of many types.
    with as_config_error(f"{key}: {problem}", fix):
        model, loading_info = model_class.auto_class.from_pretrained(
            path, output_loading_info=True, **options, **model_class.arguments
        )
    missing = _missing_weights(loading_info)
    if role == "critic":  # its head may be new
        missing.discard(f"{SCALAR_HEAD}.weight")
    if missing:
        example = min(missing)
        raise ConfigError(
            f"{key}: {path!r} lacks {len(missing)} weights of the expected shapes, such as "
            f"{example}; {fix}"
        )
    if role in SCALAR_ROLES:
        _check_scalar_head(model, key, path)
    else:
        _refuse_unknown_tensors(loading_info, key, path)
        if device == "cpu":
            check_head(model, path)
    try:
        return model, _checked_layout(model, key, path)
    except ConfigError:
        if role == "actor":
            raise
        return model, None


def check_stored_head(
    model: PreTrainedModel, layout: CheckpointLayout, stored: StoredWeights, path: str
) -> None:
    """`check_head` of a model that was read onto "meta": only its head is read.

    Raises:
        ConfigError: as `check_head`.
    """
    head = model.get_output_embeddings()
    name_of = {id(module): name for name, module in model.named_modules()}
    name = f"{name_of[id(head)]}.weight"
    if head.weight is model.get_input_embeddings().weight:
        name = f"{name_of[id(model.get_input_embeddings())]}.weight"
    name = layout.stored_name(name)
    head.weight = nn.Parameter(stored.read_whole(name).to(model.dtype), requires_grad=False)
    check_head(model, path)


def _missing_weights(loading_info: dict[str, Any]) -> set[str]:
    """Names of the parameters that the checkpoint lacks, or has in another shape."""
    missing = {str(name) for name in loading_info["missing_keys"]}
    mismatched = {str(name) for name in loading_info["mismatched_keys"]}
    return missing | mismatched


def _refuse_unknown_tensors(loading_info: dict[str, Any], key: str, path: str) -> None:
    """Raises ConfigError: the files have tensors that no parameter takes, and that transformers
    does not know as superfluous."""
    unknown = sorted(map(str, loading_info["unexpected_keys"]))
    if unknown:
        raise ConfigError(
            f"{key}: {path!r} has {len(unknown)} tensors that the model has not, such as "
            f"{unknown[0]}: they would be neither trained nor sent; give a checkpoint without them"
        )


def _check_scalar_head(model: PreTrainedModel, key: str, path: str) -> None:
    head = getattr(model, SCALAR_HEAD, None)
    if not isinstance(head, nn.Linear):
        name = type(model).__name__
        raise ConfigError(
            f"{key}: {path!r} ({name}) has no linear head {SCALAR_HEAD}; give another"
        )


def empty_model(
    cfg: Config, role: str, attention: str | None, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model with parameters on the meta device and real buffers (rotary frequencies are not in
    checkpoints)."""
    model_class = model_class_of(cfg, role)
    trust = cfg.model.trust_remote_code
    hf_config = load_hf_config(cfg, role_model_path(cfg, role), **model_class.arguments)
    with accelerate.init_empty_weights(include_buffers=False):
        model = model_class.auto_class.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust
        )
    # init_empty_weights makes a new Parameter at each registration, which unties tied ones.
    model.tie_weights()
    fix_frequencies(model, engine_length(cfg))
    # A padding index would keep a gradient from its token where that token is no padding.
    model.get_input_embeddings().padding_idx = None
    return model


def frozen_names(names: list[str], cfg: Config) -> list[str]:
    """The parameters that model.freeze leaves out of training.

    Args:
        names: of all parameters.

    Raises:
        ConfigError: a pattern names none of them, or all are frozen.
    """
    frozen: set[str] = set()
    for pattern in cfg.model.freeze:
        found = [name for name in names if _has_part(name, pattern)]
        if not found:
            examples = sorted({name.rpartition(".layers.")[0] or name for name in names})[:3]
            raise key_error(
                cfg, "model.freeze", f"no parameter has {pattern!r} in its name; as {examples[0]}"
            )
        frozen.update(found)
    if frozen and len(frozen) == len(names):
        raise key_error(cfg, "model.freeze", "nothing would be trained; name fewer parameters")
    return [name for name in names if name in frozen]


def _has_part(name: str, pattern: str) -> bool:
    """Whether the dotted name has the dotted pattern as whole parts."""
    return f".{pattern}." in f".{name}."


class _BackboneOutput(BaseModelOutput):
    """Stands for the output of the backbone: hidden states, and None for whatever else is asked."""

    def __getattr__(self, name: str) -> None:
        return None


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits [n, vocabulary] of the backbone's output `hidden` [n, H].

    They are computed by the model's own forward with its backbone replaced: after the head Cohere
    and Granite scale, Falcon-H1 multiplies and Gemma caps softly, and no architecture need be known
    here.
    """
    output = _BackboneOutput(last_hidden_state=hidden[None])
    model.base_model.forward = lambda *args, **kwargs: output
    try:
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return type(model).forward(model, input_ids=tokens, use_cache=False).logits[0]
    finally:
        del model.base_model.forward


@torch.no_grad()
def check_head(model: PreTrainedModel, path: str) -> None:
    """Refuse a model whose head `logits_of` cannot compute, such as one that asks a part of its
    backbone (OPT).

    Raises:
        ConfigError: two different hidden states have the same logits, or computing them fails.
    """
    where = f"model.path: {path!r} ({type(model).__name__})"
    size = model.config.get_text_config().hidden_size
    problem = f"{where}: the logits of this architecture cannot be checked"
    with as_config_error(problem, "give another model"):
        rising = torch.full((4, size), 0.01, dtype=model.dtype).cumsum(-1)
        falling = torch.full((4, size), -0.02, dtype=model.dtype).cumsum(-1)
        rising_logits = logits_of(model, rising)
        falling_logits = logits_of(model, falling)
    if torch.equal(rising_logits, falling_logits):
        raise ConfigError(
            f"{where} makes its logits in a way this trainer does not know: "
            "not from the output of its backbone; give another model"
        )


def _checked_layout(model: PreTrainedModel, key: str, path: str) -> CheckpointLayout:
    """Where the checkpoint's tensors lie in a model that was read from it.

    Raises:
        ConfigError: the weights could not be streamed under the names in the files, or the files
            have other names than these. Names the first such tensor.
    """
    where = f"{key}: {path!r} ({type(model).__name__})"
    fix = "the fsdp back end cannot stream its weights; give another model"
    try:
        layout = CheckpointLayout.of_model(model)
        layout.check_cuttable()
    except OtherLayout as error:
        raise ConfigError(
            f"{where} is stored in a layout that cannot be read out of the one in training: "
            f"{error}; {fix}"
        ) from error
    stored = StoredWeights.find(path) if os.path.isdir(path) else None
    unnamed = [] if stored is None else _names_not_stored(model, layout, stored)
    if unnamed:
        raise ConfigError(
            f"{where}: {len(unnamed)} of its tensors have other names in the files than those "
            f"that transformers' conversion gives, such as {unnamed[0]}; {fix}"
        )
    return layout


def _names_not_stored(
    model: PreTrainedModel, layout: CheckpointLayout, stored: StoredWeights
) -> list[str]:
    """The layout's names that the files do not have."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    tied = {names[0]: names for names in names_of.values() if len(names) > 1}
    # transformers takes files that were written by the backbone alone: GPT-2's.
    prefix = f"{model.base_model_prefix}."
    missing = []
    for place in layout.places:
        names = {place.name, *tied.get(place.parameter, ())} - {f"{SCALAR_HEAD}.weight"}
        names |= {name.removeprefix(prefix) for name in names}
        if names and names.isdisjoint(stored.file_of):
            missing.append(place.name)
    return missing
