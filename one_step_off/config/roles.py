"""The settings, model and parallelism of one role of a config."""

from dataclasses import fields, replace
from typing import Any

from one_step_off.config.device_shares import devices_of_pool
from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import ActorConfig, BackendConfig


def role_settings(cfg: Config, role: str) -> Any:
    """The config section of a role, with every null replaced by the actor's value.

    Three settings do not follow the actor: the parallel sizes where the role has another back end,
    the virtual stages where the role sets its own number of pipeline stages, and the settings of
    the optimizer where it has another one.
    """
    section = getattr(cfg, role)
    defaults = cfg.actor
    if section.backend not in (None, defaults.backend):
        size_names = [f.name for f in fields(BackendConfig) if "parallel" in f.name]
        defaults = replace(defaults, **{name: getattr(ActorConfig, name) for name in size_names})
    elif section.pipeline_parallel_size is not None:
        defaults = replace(defaults, virtual_pipeline_parallel_size=None)
    own_optimizer = getattr(section, "optimizer", None)
    if own_optimizer not in (None, defaults.optimizer):
        defaults = replace(defaults, optimizer_kwargs={})
    unset_names = [f.name for f in fields(section) if getattr(section, f.name) is None]
    return replace(section, **{name: getattr(defaults, name) for name in unset_names})


def data_parallel_size(cfg: Config, role: str) -> int:
    """Into how many parts the ranks of a role split a batch.

    FSDP: one part per rank. Megatron: one part per group of ranks that holds one whole model.
    """
    settings = role_settings(cfg, role)
    ranks = devices_of_pool(cfg, cfg.placement.roles[role])
    ranks_per_model = (
        settings.tensor_parallel_size
        * settings.pipeline_parallel_size
        * settings.context_parallel_size
    )
    return ranks // ranks_per_model


def role_model_path(cfg: Config, role: str) -> str:
    """The model that a role starts from: its own path, or else model.path."""
    section = getattr(cfg, role)
    return getattr(section, "path", "") or cfg.model.path


def vocabulary_size(cfg: Config, section: str) -> int:
    """How many token ids the model that a config section names has logits for.

    Imports transformers, and raises what transformers raises.
    """
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(
        getattr(cfg, section).path, trust_remote_code=cfg.model.trust_remote_code
    )
    return hf_config.get_text_config().vocab_size


def load_section_tokenizer(cfg: Config, section: str) -> Any:
    """The tokenizer of the model that a config section names.

    Imports transformers, and raises what transformers raises.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        getattr(cfg, section).path, trust_remote_code=cfg.model.trust_remote_code
    )
