"""Checks of the run as a whole, and of what each role needs."""

import math
import re

from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.model import check_model_path
from one_step_off.config.sections.rollout import check_rollout


def check_run(cfg: Config, held_out_key: str = "data.val_files") -> None:
    """Check that the run has a model, data and a length, and that its evaluation can be done.

    `held_out_key`: the key that names the held-out data.
    """
    if not cfg.model.path.strip():
        raise key_error(
            cfg,
            "model.path",
            "not set; give a directory, a hub id, or tiny:qwen2 (is config=FILE missing?)",
        )
    files = cfg.data.train_files
    if isinstance(files, str) and not files.strip(" ,"):
        raise key_error(
            cfg,
            "data.train_files",
            "not set; give files, a hub id, or generator:word_problems",
        )
    evaluates = cfg.trainer.test_freq > 0 or cfg.trainer.val_only
    has_held_out_data = cfg.data.val_files.strip() or cfg.data.val_sets
    if evaluates and not has_held_out_data:
        key = "trainer.val_only" if cfg.trainer.val_only else "trainer.test_freq"
        problem = f"there is no held-out data to evaluate on; set {held_out_key}"
        raise key_error(cfg, key, problem)
    check_rollout(cfg.rollout)
    _check_keep_best(cfg)
    if (cfg.trainer.total_steps is None) == (cfg.trainer.total_epochs is None):
        raise key_error(
            cfg, "trainer.total_steps trainer.total_epochs", "one must be set, the other null"
        )


def _check_keep_best(cfg: Config) -> None:
    keep_best = cfg.trainer.keep_best
    if not keep_best:
        return
    set_names = "|".join(map(re.escape, cfg.data.val_sets))
    is_score = re.fullmatch(rf"val/(({set_names})/)?(reward|(avg|pass)@\d+)", keep_best)
    if cfg.trainer.test_freq < 1 or not is_score:
        fix = (
            "set trainer.test_freq above 0, and this to val/reward, val/pass@K or "
            "val/SET/reward of a set in data.val_sets"
        )
        raise key_error(
            cfg,
            "trainer.keep_best",
            f"not a score that is evaluated with trainer.test_freq={cfg.trainer.test_freq}; {fix}",
        )


def check_roles(cfg: Config, device: str) -> None:
    """Check what a role needs, and what needs a role."""
    roles = cfg.placement.roles
    if device == "cpu":
        _check_no_offload(cfg)
    has_kl = cfg.algorithm.kl_coef > 0
    if has_kl and "ref" not in roles:
        raise key_error(
            cfg,
            "algorithm.kl_coef",
            "needs a reference policy; set placement.roles.ref=actor, or this to 0",
        )
    if "ref" in roles and not has_kl:
        raise key_error(
            cfg,
            "algorithm.kl_coef",
            "placement.roles.ref has no use without a KL; set this above 0, or remove the role",
        )
    _check_critic_warmup(cfg)
    _check_reward_model(cfg)
    for role in ("critic", "ref", "reward_model", "teacher"):
        path = getattr(cfg, role).path
        if role in roles and path:
            check_model_path(f"{role}.path", path)


def _check_no_offload(cfg: Config) -> None:
    for role in cfg.placement.roles:
        for name in ("param_offload", "optimizer_offload"):
            if getattr(getattr(cfg, role), name, False):
                raise key_error(
                    cfg,
                    f"{role}.{name}",
                    "moves data off GPUs, and this run is on CPU; set it to false",
                )


def _check_critic_warmup(cfg: Config) -> None:
    warmup = cfg.trainer.critic_warmup
    total_steps = cfg.trainer.total_steps
    if warmup and "critic" not in cfg.placement.roles:
        raise key_error(
            cfg, "trainer.critic_warmup", "needs the role critic; set placement.roles.critic"
        )
    if warmup >= (total_steps or math.inf):
        raise key_error(
            cfg,
            "trainer.critic_warmup",
            f"leaves the actor no step of trainer.total_steps={total_steps}; make it smaller",
        )


def _check_reward_model(cfg: Config) -> None:
    reward_model = cfg.reward_model
    if ("reward_model" in cfg.placement.roles) != bool(reward_model.path):
        raise key_error(
            cfg,
            "reward_model.path",
            "goes with placement.roles.reward_model; set both or neither",
        )
    if reward_model.path and reward_model.url:
        raise key_error(
            cfg, "reward_model.url", "reward_model.path is set too; set only one of them"
        )
    # A config that a run wrote holds *** where its URL had a secret.
    is_url = re.fullmatch(r"https?://[^\s/*]+[^*]*", reward_model.url)
    if reward_model.url and not is_url:
        raise key_error(
            cfg,
            "reward_model.url",
            "must be http://HOST:PORT/PATH or https://..., with its secret filled in if it was "
            "masked",
        )
    has_model = reward_model.path or reward_model.url
    if cfg.reward.weight != 1 and not has_model:
        raise key_error(
            cfg,
            "reward.weight",
            "there is no reward model to weight against; set it to 1, or set reward_model.path or "
            "reward_model.url",
        )
    if cfg.algorithm.max_gen_batches > 1 and has_model:
        raise key_error(
            cfg,
            "algorithm.max_gen_batches",
            "selects groups before a reward model has scored them; set it to 1",
        )
