"""Checks of the algorithm that a config names: estimator, policy loss, KL, corrections, overlong
responses.

Each function raises `ConfigError` at the first fault.
"""

from typing import Any

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS, NEEDS
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.registry import Entry, Registry
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import reward_names
from one_step_off.config.sections.reward import BUILT_IN_REWARDS
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import USER_FUNCTION_FORM, did_you_mean_function, is_user_spec

LOSSES_WITH_DUAL_CLIP = ("vanilla", "clip_cov")


def check_algorithm(cfg: Config) -> None:
    """Check the section algorithm, and what it needs from other sections. Raises ConfigError."""
    _check_kl_estimator(cfg)
    _check_rollout_correction(cfg)
    algorithm = cfg.algorithm
    _check_named_function(
        cfg,
        ADVANTAGE_ESTIMATORS,
        algorithm.adv_estimator,
        "adv_kwargs",
        algorithm.adv_kwargs,
    )
    _check_named_function(
        cfg,
        POLICY_LOSSES,
        algorithm.policy_loss,
        "policy_loss_kwargs",
        algorithm.policy_loss_kwargs,
    )
    _check_critic_is_used(cfg)
    _check_dual_clip(cfg)
    _check_kl_in_reward(cfg)
    if algorithm.max_gen_batches > 1 and cfg.rollout.n == 1:
        raise key_error(
            cfg, "algorithm.max_gen_batches", "compares samples of a prompt; raise rollout.n"
        )
    longest = cfg.data.max_response_length
    if cfg.reward.overlong_buffer > longest:
        raise key_error(
            cfg,
            "reward.overlong_buffer",
            f"longer than data.max_response_length={longest}; lower it",
        )


def _check_kl_estimator(cfg: Config) -> None:
    algorithm = cfg.algorithm
    has_kl_loss = algorithm.kl_coef > 0 and not algorithm.kl_in_reward
    if has_kl_loss and algorithm.kl_estimator == "k1":
        raise key_error(
            cfg,
            "algorithm.kl_estimator",
            "as a loss its gradient has mean zero and only adds noise; use k2 or k3",
        )


def _check_rollout_correction(cfg: Config) -> None:
    algorithm = cfg.algorithm
    has_correction = algorithm.rollout_correction != "none"
    if has_correction and algorithm.old_log_probs == "rollout":
        raise key_error(
            cfg,
            "algorithm.rollout_correction",
            "would weight tokens twice; set old_log_probs=recompute",
        )
    low = algorithm.rollout_correction_low
    cap = algorithm.rollout_correction_cap
    if low and not has_correction:
        raise key_error(
            cfg,
            "algorithm.rollout_correction_low algorithm.rollout_correction",
            "there is no weight to bound; set a correction, or this to null",
        )
    if low and low > cap:
        raise key_error(
            cfg,
            "algorithm.rollout_correction_low",
            f"above algorithm.rollout_correction_cap={format_value(cap)}; lower it",
        )


def _check_named_function(
    cfg: Config, registry: Registry, spec: str, kwargs_key: str, kwargs: dict[str, Any]
) -> None:
    """Check an estimator or loss: its name, what it needs, and its own settings."""
    if spec not in registry:
        if not is_user_spec(spec):
            fix = did_you_mean_function(spec, registry, f"known are {', '.join(registry)}")
            raise key_error(cfg, registry.key, f"no such name, and not {USER_FUNCTION_FORM}; {fix}")
        # The user's own: `check_own_functions` imports it when the run is prepared.
        return
    entry = registry[spec]
    _check_entry(cfg, registry.key, spec, entry, kwargs_key, kwargs)
    known = entry.settings()
    for name, value in kwargs.items():
        problem = _setting_problem(name, value, known[name], cfg.rollout.n)
        if problem:
            location = f"algorithm.{kwargs_key}.{format_value(name)}={format_value(value)}"
            raise ConfigError(f"{location}: {problem}")


def check_own_functions(cfg: Config) -> None:
    """Import the user's own estimator and loss, and check what they need and the names of their
    settings. Raises ConfigError."""
    algorithm = cfg.algorithm
    for registry, spec, kwargs_key, kwargs in (
        (ADVANTAGE_ESTIMATORS, algorithm.adv_estimator, "adv_kwargs", algorithm.adv_kwargs),
        (
            POLICY_LOSSES,
            algorithm.policy_loss,
            "policy_loss_kwargs",
            algorithm.policy_loss_kwargs,
        ),
    ):
        if spec not in registry:
            _check_entry(cfg, registry.key, spec, registry.find(spec), kwargs_key, kwargs)


def _check_entry(
    cfg: Config, key: str, spec: str, entry: Entry, kwargs_key: str, kwargs: dict[str, Any]
) -> None:
    """Check what a function needs, and the names of its settings."""
    _check_needs(cfg, key, entry)
    if entry.grouped and cfg.rollout.n == 1:
        raise key_error(
            cfg,
            "rollout.n",
            f"{spec} compares the samples of one prompt, so a single sample has no advantage; "
            "use at least 2",
        )
    known = entry.settings()
    for name, value in kwargs.items():
        if name in known or entry.takes_any_setting:
            continue
        location = f"algorithm.{kwargs_key}.{format_value(name)}={format_value(value)}"
        otherwise = f"use {', '.join(known)}" if known else "remove it"
        fix = did_you_mean(str(name), known, otherwise)
        raise ConfigError(f"{location}: no such setting of {spec}; {fix}")


def _check_needs(cfg: Config, key: str, entry: Entry) -> None:
    """Check that the run has the inputs of an estimator."""
    if "values" in entry.needs and "critic" not in cfg.placement.roles:
        raise key_error(cfg, key, f"needs {NEEDS['values']}, or use another, such as grpo or rloo")
    if "parts" not in entry.needs:
        return
    if _has_single_reward(cfg):
        raise key_error(cfg, key, f"needs {NEEDS['parts']}, or use another, such as grpo or rloo")
    if cfg.algorithm.kl_in_reward or cfg.reward.overlong_buffer:
        raise key_error(
            cfg,
            key,
            "uses only the parts of the reward, so algorithm.kl_in_reward and "
            "reward.overlong_buffer "
            "would do nothing; set them to false and 0",
        )


def _has_single_reward(cfg: Config) -> bool:
    """Whether the reward certainly has no parts: only built-in functions, and no reward model."""
    all_built_in = all(name in BUILT_IN_REWARDS for name in reward_names(cfg.data, cfg.reward))
    has_model = cfg.reward_model.path or cfg.reward_model.url
    return all_built_in and not has_model


def _setting_problem(name: str, value: Any, default: Any, n: int) -> str | None:
    """What is wrong with the value of an estimator's or loss's own setting; None if nothing."""
    is_number = type(value) in (int, float)
    if isinstance(default, float) and not is_number:
        return "must be a number"
    if name == "beta" and not value > 0:
        return "must be above 0"
    if name == "share" and not 0 < value <= 1:
        return "must be above 0 and at most 1"
    if name == "weights" and not _is_mapping_of_numbers(value):
        return "must be numbers by name, such as {function: 1, model: 0.5}"
    if name == "pass_k" and not (type(value) is int and 2 <= value <= n):
        return f"must be a whole number from 2 to rollout.n={n}"
    return None


def _is_mapping_of_numbers(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(key, str) and type(number) in (int, float) for key, number in value.items()
    )


def _check_critic_is_used(cfg: Config) -> None:
    pool = cfg.placement.roles.get("critic")
    name = cfg.algorithm.adv_estimator
    entry = ADVANTAGE_ESTIMATORS.get(name)
    if pool and entry and "values" not in entry.needs:
        raise ConfigError(
            f"placement.roles.critic={pool}: {name} does not use a critic; "
            "remove the role, or use adv_estimator=gae"
        )


def _check_dual_clip(cfg: Config) -> None:
    loss = cfg.algorithm.policy_loss
    is_built_in = loss in POLICY_LOSSES
    if cfg.algorithm.clip_ratio_c and is_built_in and loss not in LOSSES_WITH_DUAL_CLIP:
        raise key_error(cfg, "algorithm.clip_ratio_c", f"{loss} has no dual clip; set it to null")


def _check_kl_in_reward(cfg: Config) -> None:
    algorithm = cfg.algorithm
    if algorithm.kl_in_reward and algorithm.kl_coef == 0:
        raise key_error(
            cfg,
            "algorithm.kl_in_reward",
            "has no effect with kl_coef=0; raise kl_coef, or set it to false",
        )
    if algorithm.kl_target and not algorithm.kl_in_reward:
        raise key_error(
            cfg, "algorithm.kl_target", "needs kl_in_reward=true; set it, or this to null"
        )
    samples_per_step = cfg.data.train_batch_size * cfg.rollout.n
    if algorithm.kl_target and algorithm.kl_horizon < samples_per_step:
        raise key_error(
            cfg,
            "algorithm.kl_horizon",
            f"shorter than one step of {samples_per_step} samples; use ten times as many",
        )
