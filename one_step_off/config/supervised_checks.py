"""Checks of supervised runs (`main_sft`), and of `trainer.sft_steps`."""

from one_step_off.config.data_checks import check_data, check_output, check_source
from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.model_checks import check_model
from one_step_off.config.optimizer_checks import check_optimizers
from one_step_off.config.pool_checks import check_batch, check_layouts, check_pools
from one_step_off.config.role_checks import check_roles, check_run
from one_step_off.config.schema import Config
from one_step_off.config.sources import split_files
from one_step_off.config.supervised import (
    files_key,
    supervised_files,
    warm_up_config,
)
from one_step_off.config.text import format_value


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
    check_model(supervised, device)
    check_data(supervised)
    check_output(supervised)


def check_warm_up(cfg: Config, device: str) -> None:
    """Check the supervised steps before RL, if the run makes any. Raises ConfigError."""
    if not cfg.trainer.sft_steps:
        return
    check_supervised_files(cfg)
    check_supervised(warm_up_config(cfg), device)
