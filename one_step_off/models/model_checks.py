"""Checks of a model's files before it is loaded: is it a language model that we can train?

`check_models` is the entry: it checks the policy's model, and those of critic, reference, reward
model and teachers that differ from it.
"""

import importlib
import math
import sys
from importlib import metadata
from typing import Any

from one_step_off.config.errors import ConfigError, as_config_error, first_line
from one_step_off.config.lengths import engine_length
from one_step_off.config.placement import devices_per_node, resolved_device
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import load_hf_config, load_section_tokenizer, role_settings
from one_step_off.config.schema import Config
from one_step_off.config.teachers import config_of_teacher, teacher_key, teacher_paths
from one_step_off.models.adapted_layers import check_adapted_layers
from one_step_off.models.divided_sequences import check_sequence_parallel
from one_step_off.models.experts import check_experts
from one_step_off.models.quantization import quantization_method

MODEL_SECTIONS = (
    "model",
    "critic",
    "ref",
    "reward_model",
    "teacher",
)  # the sections of a config with a `path`
STALE_IN_VLLM = {
    "gpt_oss": "its loader copies experts past the hooks of a reload, so the engine would go on "
    "with those that it began with",
}
"""`model_type` of a model that vLLM serves and cannot update -> why. A test notices when it can."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # or an index of several such files

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def check_models(cfg: Config, longest_sequence: int) -> Any:
    """Check the files of every model of the run.

    Args:
        cfg: the config, with the paths of the models in the sections MODEL_SECTIONS.
        longest_sequence: tokens of the longest prompt with the longest response.

    Returns:
        The policy's tokenizer.

    Raises:
        ConfigError: a model cannot be loaded, is of the wrong kind, or does not fit the others.
    """
    from one_step_off.models import vision  # transformers: slow to import

    name = _key_and_path(cfg, "model")
    model_config = _check_files(cfg, "model", longest_sequence)
    if vision.is_vision_config(model_config):
        vision.check_limits(cfg)
    elif not cfg.model.trust_remote_code:  # a model's own code decides what kind of model it is
        _require_causal_model(name, model_config)
    _check_frozen_parts(cfg)
    _check_updates_in_engine(cfg, name, model_config)
    _check_attention_heads(cfg, name, model_config)
    _check_rotary_embeddings(cfg, "actor", name, model_config)
    if cfg.rollout.replay_routing:
        _check_routers(cfg, name)
    tokenizer = load_tokenizer(cfg, "model")
    if cfg.model.lora_rank and not cfg.model.trust_remote_code:
        check_adapted_layers(cfg)
    for name in teacher_paths(cfg):
        _check_teacher(cfg, name, longest_sequence, tokenizer, model_config)
    for role in ("critic", "ref", "reward_model"):
        path = getattr(cfg, role).path
        has_own_model = path not in ("", cfg.model.path)
        if role in cfg.placement.roles and has_own_model:
            role_config = _check_files(cfg, role, longest_sequence)
            _check_rotary_embeddings(cfg, role, _key_and_path(cfg, role), role_config)
            _check_vocabulary(cfg, role, tokenizer)
    check_sequence_parallel(cfg)
    if not cfg.model.trust_remote_code:
        check_experts(cfg)
    return tokenizer


def _check_teacher(
    cfg: Config, name: str, longest_sequence: int, tokenizer: Any, policy_config: Any
) -> None:
    """Check the files of a teacher, and that it can score every token of the policy.

    Args:
        name: of the teacher.
        tokenizer, policy_config: of the policy; the latter is the Hugging Face config.
    """
    own = config_of_teacher(cfg, name)
    needed = policy_config.get_text_config().vocab_size
    if cfg.teacher.top_k >= needed:
        raise ConfigError(
            f"teacher.top_k={cfg.teacher.top_k}: the policy has {needed} token ids; use fewer, or 0"
        )
    # An engine takes a prompt only where one more token fits.
    has_engine = role_settings(cfg, "teacher").backend == "vllm"
    if own.teacher.path == cfg.model.path and not has_engine:
        return
    key = teacher_key(name)
    try:
        teacher_config = _check_files(own, "teacher", longest_sequence + has_engine, has_engine)
        if not cfg.model.trust_remote_code:
            _require_causal_model(_key_and_path(own, "teacher"), teacher_config)
        if not has_engine:
            name = _key_and_path(own, "teacher")
            _check_rotary_embeddings(own, "teacher", name, teacher_config)
        _check_vocabulary(own, "teacher", tokenizer)
    except ConfigError as error:
        raise ConfigError(str(error).replace("teacher.path=", f"{key}=")) from error
    size = teacher_config.get_text_config().vocab_size
    if size < needed:
        raise ConfigError(
            f"{key}={own.teacher.path}: has {size} token ids, and the policy {needed}, so it "
            "cannot score all of them; give a model of the same family with as many"
        )


def load_tokenizer(cfg: Config, section: str) -> Any:
    """The tokenizer of a section's model. Raises ConfigError if there is none."""
    what = f"{_key_and_path(cfg, section)}: its tokenizer cannot be loaded"
    fix = "give a model directory with its tokenizer, or a hub id that this machine can reach"
    with as_config_error(what, fix):
        tokenizer = load_section_tokenizer(cfg, section)
        # Where the files are missing transformers may create a tokenizer of the right class without
        # a vocabulary.
        token_ids = tokenizer("1 + 1 = 2", add_special_tokens=False)["input_ids"]
        if not token_ids:
            raise ValueError("no vocabulary")
    return tokenizer


def _key_and_path(cfg: Config, section: str) -> str:
    return f"{section}.path={getattr(cfg, section).path}"


def _check_updates_in_engine(cfg: Config, name: str, model_config: Any) -> None:
    """Refuse a model whose weights vLLM takes once, and then silently no more."""
    reason = STALE_IN_VLLM.get(model_config.get_text_config().model_type)
    if reason and "rollout" in cfg.placement.roles and cfg.rollout.engine == "vllm":
        raise ConfigError(
            f"{name}: vLLM cannot take new weights of this family ({reason}); give another model, "
            "or set rollout.engine=transformers"
        )


def _check_attention_heads(cfg: Config, name: str, model_config: Any) -> None:
    """vLLM splits the attention heads over its tensor-parallel ranks."""
    num_heads = getattr(model_config.get_text_config(), "num_attention_heads", None)
    num_ranks = cfg.rollout.tensor_parallel_size
    if num_heads is not None and num_heads % num_ranks:
        key = f"rollout.tensor_parallel_size={num_ranks}"
        pool = devices_per_node(cfg, cfg.placement.roles["rollout"])
        fitting = nearest_divisor(math.gcd(num_heads, *pool), num_ranks)
        raise ConfigError(
            f"{key}: does not divide the {num_heads} attention heads of {name}; use {fitting}"
        )


def _check_rotary_embeddings(cfg: Config, role: str, name: str, model_config: Any) -> None:
    """Those of a model in training must not depend on the batch, and be those of its engine."""
    from one_step_off.models import hf_model, rope  # transformers: slow to import

    if rope.is_plain(model_config):
        return
    has_engine = role == "actor" and "rollout" in cfg.placement.roles
    if has_engine:
        rope.check_settings(model_config, name)
    with as_config_error(f"{name}: its class cannot be built", "give another model"):
        model = hf_model.empty_model(cfg, role, None, None)
    rope.check_rope(model, name, engine_length(cfg), has_engine)


def _check_routers(cfg: Config, name: str) -> None:
    from one_step_off.models import hf_model, router_replay  # transformers: slow to import

    with as_config_error(f"{name}: its class cannot be built", "give another model"):
        model = hf_model.empty_model(cfg, "actor", None, None)
    router_replay.check(model, name)
    is_on_cpu = resolved_device(cfg) == "cpu"
    if is_on_cpu and cfg.rollout.engine == "vllm" and hf_model.has_state_layers(model.config):
        raise ConfigError(
            f"rollout.replay_routing=true: on CPUs vLLM serves {name} without its prefix cache, "
            "which keeps the experts; set rollout.replay_routing=false"
        )


def _check_frozen_parts(cfg: Config) -> None:
    """Raises ConfigError: model.freeze names no parameter, or all of them."""
    if not cfg.model.freeze:
        return
    from one_step_off.models import hf_model  # transformers: slow to import

    problem = f"model.path={cfg.model.path}: its class cannot be built"
    with as_config_error(problem, "give another model"):
        model = hf_model.empty_model(cfg, "actor", None, None)
    hf_model.frozen_names([name for name, _ in model.named_parameters()], cfg)


def _check_vocabulary(cfg: Config, role: str, policy_tokenizer: Any) -> None:
    """Critic, reference and teacher read the policy's token ids; a reward model may have tokens of
    its own."""
    tokenizer = load_tokenizer(cfg, role)
    if role == "reward_model":
        return
    if tokenizer.get_vocab() != policy_tokenizer.get_vocab():
        name = _key_and_path(cfg, role)
        raise ConfigError(
            f"{name}: its token ids do not match those of model.path; give a model of the same "
            "family"
        )


def _check_files(
    cfg: Config, section: str, longest_sequence: int, may_be_quantized: bool = False
) -> Any:
    """What every model must pass: config, weights, context length. Returns the Hugging Face config.

    `may_be_quantized`: it is loaded by vLLM alone, whose own checks say what it can serve.
    """
    from transformers.utils.hub import has_file

    path = getattr(cfg, section).path
    name = _key_and_path(cfg, section)
    weight_files = [f"{file}{suffix}" for file in WEIGHT_FILES for suffix in ("", ".index.json")]
    try:
        model_config = load_hf_config(cfg, path)
        has_weights = any(has_file(path, file) for file in weight_files)
    except Exception as error:
        reason = first_line(error)
        raise ConfigError(
            f"{name}: its config cannot be loaded ({reason}); {_how_to_fix(error)}"
        ) from error
    if not may_be_quantized:
        _refuse_quantized_weights(section, path, name, model_config)
    if not has_weights:
        kinds = " or ".join(WEIGHT_FILES)
        raise ConfigError(
            f"{name}: has no weights that can be trained ({kinds}; GGUF files cannot); "
            "give a model saved by save_pretrained"
        )
    context_length = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context_length is not None and longest_sequence > context_length:
        keys = "data.max_prompt_length + data.max_response_length"
        raise ConfigError(
            f"{keys} = {longest_sequence}: {name} supports {context_length} tokens; lower one of "
            "them"
        )
    return model_config


def _refuse_quantized_weights(section: str, path: str, name: str, model_config: Any) -> None:
    method = quantization_method(path, model_config)
    if method is None:
        return
    fix = "give the original model"
    if section == "teacher":
        fix += ", or set teacher.backend=vllm, which can serve it"
    raise ConfigError(
        f"{name}: its weights are quantized ({method}), which the trainer cannot load; {fix}"
    )


def _how_to_fix(error: BaseException) -> str:
    """The advice for a model that cannot be loaded, by the cause that the hub's client names."""
    from huggingface_hub import errors

    cause = error.__cause__ or error
    login = "run `hf auth login`"
    if isinstance(cause, errors.GatedRepoError):
        return f"the model is gated: request access on its page, then {login} or set HF_TOKEN"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"no such model on the hub, or a private one: check the id, or {login}"
    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return "check the network and HF_HUB_OFFLINE, or give a model directory"
    version = metadata.version("transformers")
    return (
        "give a model directory saved by save_pretrained or a hub id; "
        f"a model newer than transformers {version} needs a newer one, "
        "a model with its own code needs model.trust_remote_code=true"
    )


def _require_causal_model(name: str, model_config: Any) -> None:
    """Refuse a model that is not a causal language model. Raises ConfigError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = getattr(model_config, "architectures", None) or [""]
    architecture = architectures[0]
    causal_architectures = {known.lower() for known in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    is_causal = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    was_saved_as_other = bool(architecture) and architecture.lower() not in causal_architectures
    if not is_causal or was_saved_as_other:
        what = f"{architecture or 'its model'} (model type {model_config.model_type!r})"
        raise ConfigError(
            f"{name}: {what} is not a causal language model of transformers; "
            "give one that generates text"
        )


def check_torch_companions() -> None:
    """Refuse packages that cannot be imported beside this torch.

    `pip install "one_step_off[cpu]"` may take torchvision, torchaudio and torchcodec from an index
    that only has their CUDA builds. transformers and vLLM find them, import them, and fail with an
    error that does not name the cause.

    Raises:
        ConfigError: some cannot be imported; the message names them and says how to remove them.
    """
    torch_version = metadata.version("torch")
    if not torch_version.endswith("+cpu"):
        return
    broken = [name for name in COMPANIONS if _is_other_build(name) and not _imports(name)]
    if not broken:
        return
    names = ", ".join(f"{name} {metadata.version(name)}" for name in broken)
    raise ConfigError(
        f"{names}: cannot be imported beside torch {torch_version}, "
        "and transformers and vLLM import them; "
        f"remove them: {sys.executable} -m pip uninstall {' '.join(broken)}"
    )


def _is_other_build(package: str) -> bool:
    """Whether an installed package is not a CPU build by its version. Importing is slow, and needed
    only then.
    """
    try:
        return not metadata.version(package).endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _imports(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (
        Exception
    ):  # RuntimeError of a missing operator, OSError of a missing library, ImportError
        return False
    return True
