"""The settings and the model of one role of a config, and the check of its optimizer."""

from dataclasses import fields, replace
from typing import Any

from one_step_off.config.schema import Config
from one_step_off.config.sections.roles import (
    OPTIMIZERS,
    ActorConfig,
    BackendConfig,
    check_optimizer,
)

TRAINED_ROLES = ("actor", "critic")
"""The roles that have an optimizer."""


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


def role_model_path(cfg: Config, role: str) -> str:
    """The model that a role starts from: its own path, or else model.path."""
    section = getattr(cfg, role)
    return getattr(section, "path", "") or cfg.model.path


def load_hf_config(cfg: Config, path: str, **changes: Any) -> Any:
    """The Hugging Face config of the model at `path`, with some of its values changed.

    Imports transformers, and raises what transformers raises.
    """
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    return AutoConfig.from_pretrained(path, trust_remote_code=trust, **changes)


def vocabulary_size(cfg: Config) -> int:
    """How many token ids the policy's model has logits for. Raises as `load_hf_config`."""
    return load_hf_config(cfg, cfg.model.path).get_text_config().vocab_size


def load_section_tokenizer(cfg: Config, section: str) -> Any:
    """The tokenizer of the model that a config section names.

    Imports transformers, and raises what transformers raises.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        getattr(cfg, section).path, trust_remote_code=cfg.model.trust_remote_code
    )


def own_optimizers(cfg: Config) -> dict[str, Any]:
    """Role -> its settings, of the roles whose optimizer is a class of the user's own."""
    found = {}
    for role in TRAINED_ROLES:
        if role in cfg.placement.roles:
            settings = role_settings(cfg, role)
            if settings.optimizer not in OPTIMIZERS:
                found[role] = settings
    return found


def check_optimizers(cfg: Config) -> None:
    """Check the optimizer of each role that is trained, see `check_optimizer`."""
    for role in TRAINED_ROLES:
        if role in cfg.placement.roles:
            check_optimizer(role, role_settings(cfg, role))
