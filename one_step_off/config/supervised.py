"""The config of supervised steps, made out of that of a run: the actor alone, no rollout.

`python -m one_step_off.main_sft` takes any config of `main_ppo`, and `trainer.sft_steps` makes the
supervised steps of a run with its own config. What only reinforcement learning reads is set to its
defaults. The checks of both are below.
"""

import copy
import os
from typing import Any

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.lengths import engine_length
from one_step_off.config.pool_checks import check_batch, check_layouts, check_pools
from one_step_off.config.role_checks import check_roles, check_run
from one_step_off.config.roles import check_optimizers
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import check_data, check_source, split_files
from one_step_off.config.sections.logging import check_loggers
from one_step_off.config.sections.model import check_model
from one_step_off.config.sections.reward import check_rewards
from one_step_off.config.sections.trainer import check_folders
from one_step_off.config.text import format_value

RL_SECTIONS = (
    "rollout",
    "critic",
    "ref",
    "reward_model",
    "teacher",
    "algorithm",
    "reward",
    "agent",
    "pipeline",
    "weight_sync",
)
"""The sections that supervised steps do not read."""

FULL_LR = 2.0e-5
ADAPTER_LR = 2.0e-4
"""The peak learning rates of supervised steps where sft.lr is not set: for all weights, and for
LoRA adapters, as in TRL. Those of RL (actor.lr) are far too small."""

WARM_UP_FOLDER = "sft"
"""In the run folder: the folder of the supervised steps before RL."""


def files_key(cfg: Config, name: str) -> str:
    """The key that names the rows: of the section sft where it is set, else of data. `name`:
    train_files or val_files."""
    # Held-out prompts need no answers, so those of data are taken with its training rows only.
    own = cfg.sft.train_files.strip(" ,") or getattr(cfg.sft, name).strip(" ,")
    return f"sft.{name}" if own else f"data.{name}"


def supervised_files(cfg: Config, name: str) -> str:
    """The rows that the key of `files_key` names. Raises ConfigError: they are a list of
    sources."""
    section, _, _ = files_key(cfg, name).partition(".")
    files: Any = getattr(getattr(cfg, section), name)
    if not isinstance(files, str):
        raise ConfigError(
            f"data.{name}: is a list of sources, which supervised steps do not mix; "
            f"name the files with answers in sft.{name}"
        )
    return files


def supervised_lr(cfg: Config) -> float:
    """The peak learning rate of supervised steps."""
    if cfg.sft.lr is not None:
        return cfg.sft.lr
    return ADAPTER_LR if cfg.model.lora_rank else FULL_LR


def unread_lr_warning(cfg: Config) -> str | None:
    """For a config of `main_sft` that sets the learning rate of RL and not that of supervised
    steps: a line that says which one is used. None: there is nothing to say."""
    if cfg.sft.lr is not None or cfg.actor.lr == Config().actor.lr:
        return None
    return (
        f"warning: actor.lr={cfg.actor.lr:g}: is the learning rate of RL; supervised steps use "
        f"{supervised_lr(cfg):g} unless sft.lr is set"
    )


def supervised_config(cfg: Config) -> Config:
    """The config of supervised steps on the actor: one optimizer step per batch. That of such a
    config is the same.

    Raises ConfigError: the actor has no pool.
    """
    supervised = copy.deepcopy(cfg)
    defaults = Config()
    for section in RL_SECTIONS:
        setattr(supervised, section, getattr(defaults, section))
    supervised.rollout.n = 1  # an answer per row
    pool = cfg.placement.roles.get("actor")
    if pool not in cfg.placement.pools:
        raise key_error(
            cfg,
            "placement.roles",
            "the role actor has no pool; set placement.pools={actor: [1]} and "
            "placement.roles={actor: actor}",
        )
    supervised.placement.pools = {pool: cfg.placement.pools[pool]}
    supervised.placement.roles = {"actor": pool}
    for name in ("train_files", "val_files"):
        files = supervised_files(cfg, name)
        setattr(supervised.sft, name, files)
        setattr(supervised.data, name, files)
    supervised.data.val_sets = {}
    batch_size = cfg.sft.batch_size or cfg.data.train_batch_size
    supervised.data.train_batch_size = batch_size
    supervised.actor.ppo_mini_batch_size = batch_size
    supervised.actor.ppo_epochs = 1
    supervised.trainer.critic_warmup = 0
    supervised.sft.lr = supervised_lr(cfg)
    supervised.actor.lr = supervised.sft.lr
    for name in ("lr_schedule", "warmup_steps"):
        value = getattr(cfg.sft, name)
        if value is not None:
            setattr(supervised.actor, name, value)
    return supervised


def warm_up_config(cfg: Config) -> Config:
    """The config of the `trainer.sft_steps` supervised steps before RL, in a folder of their
    own."""
    supervised = supervised_config(cfg)
    # The rotary embeddings of these steps are those of the RL that follows.
    supervised.rollout.engine_kwargs = {"max_model_len": engine_length(cfg)}
    trainer = supervised.trainer
    trainer.total_steps = cfg.trainer.sft_steps
    trainer.total_epochs = None
    trainer.sft_steps = 0
    trainer.keep_best = None
    trainer.profile_step = None
    trainer.val_only = False
    trainer.save_hf_model = True
    if not supervised.sft.val_files.strip(" ,"):
        trainer.test_freq = -1
    if trainer.resume not in ("auto", "never"):  # a checkpoint of the RL
        trainer.resume = "auto"
    trainer.output_dir = os.path.join(cfg.trainer.output_dir, WARM_UP_FOLDER)
    return supervised


def check_supervised_keys(cfg: Config) -> None:
    """Check the keys of a config for `main_sft` that have no meaning there. Raises ConfigError."""
    if cfg.trainer.sft_steps:
        raise key_error(
            cfg,
            "trainer.sft_steps",
            "counts supervised steps before RL; main_sft makes trainer.total_steps of them: "
            "set it to 0",
        )
    if cfg.trainer.keep_best:
        raise key_error(
            cfg, "trainer.keep_best", "main_sft keeps the newest checkpoints; set it to null"
        )
    if cfg.data.val_sets:
        names = format_value(", ".join(cfg.data.val_sets))
        raise ConfigError(
            f"data.val_sets={names}: supervised runs have one held-out set; "
            "name it in sft.val_files, and set data.val_sets={}"
        )


def check_supervised_files(cfg: Config) -> None:
    """Check the names of the rows with answers, by the keys that the user set. Raises
    ConfigError."""
    for name in ("train_files", "val_files"):
        for source in split_files(supervised_files(cfg, name)):
            check_source(files_key(cfg, name), source)


def check_supervised(supervised: Config, device: str) -> None:
    """Check a config of `supervised_config`. Raises ConfigError."""
    check_run(supervised, held_out_key="sft.val_files")
    check_pools(supervised, needed=("actor",))
    check_layouts(supervised, device)
    check_optimizers(supervised)
    check_batch(supervised)
    check_roles(supervised, device)
    check_model(supervised.model, supervised.actor.backend, device)
    check_rewards(supervised.reward)
    check_data(supervised.data, supervised.reward)
    check_folders(supervised.trainer)
    check_loggers(supervised.logging)


def check_warm_up(cfg: Config, device: str) -> None:
    """Check the supervised steps before RL, if the run makes any. Raises ConfigError."""
    if not cfg.trainer.sft_steps:
        return
    check_supervised_files(cfg)
    check_supervised(warm_up_config(cfg), device)
