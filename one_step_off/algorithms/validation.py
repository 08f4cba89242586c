"""Checks of the algorithm that a config names: estimator, policy loss, KL, corrections."""

from collections.abc import Iterator

from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS, NEEDS
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.schema import Config
from one_step_off.config.validation import (
    BUILT_IN_REWARDS,
    YOURS,
    Check,
    did_you_mean,
    format_value,
    is_user_spec,
)


def algorithm_checks(cfg: Config) -> Iterator[Check]:
    a, n, longest, buffer = (
        cfg.algorithm,
        cfg.rollout.n,
        cfg.data.max_response_length,
        cfg.reward.overlong_buffer,
    )
    noise = a.kl_coef > 0 and a.kl_estimator == "k1" and not a.kl_in_reward
    yield (
        noise,
        "algorithm.kl_estimator",
        "as a loss its gradient has mean zero and only adds noise; use k2 or k3",
    )
    twice = a.rollout_correction != "none" and a.old_log_probs == "rollout"
    yield twice, "algorithm.rollout_correction", "would weight twice; set old_log_probs=recompute"
    low, cap, bound = (
        a.rollout_correction_low,
        a.rollout_correction_cap,
        "algorithm.rollout_correction_low",
    )
    where = f"{bound} algorithm.rollout_correction"
    yield (
        low and a.rollout_correction == "none",
        where,
        "there is no weight to bound; set a correction, or this to null",
    )
    yield (
        low and low > cap,
        bound,
        f"above algorithm.rollout_correction_cap={format_value(cap)}; lower it",
    )
    rewards = list(cfg.reward.functions.values()) or [cfg.reward.function]
    built_in = all(name in BUILT_IN_REWARDS for name in rewards)
    one_reward = built_in and not cfg.reward_model.path and not cfg.reward_model.url
    lacks = {"values": "critic" not in cfg.placement.roles, "parts": one_reward}
    chosen = (
        (ADVANTAGE_ESTIMATORS, a.adv_estimator, "adv_kwargs"),
        (POLICY_LOSSES, a.policy_loss, "policy_loss_kwargs"),
    )
    for registry, spec, own in chosen:
        if spec not in registry:
            said = did_you_mean(spec, registry, f"known are {', '.join(registry)}")
            yield not is_user_spec(spec), registry.key, f"no such name, nor {YOURS}; {said}"
            continue
        entry, known = registry[spec], registry[spec].settings()
        for need in filter(lacks.get, entry.needs):
            yield True, registry.key, f"needs {NEEDS[need]}, or use another, as grpo or rloo"
        why = "reads the reward's parts alone, so algorithm.kl_in_reward and reward.overlong_buffer would do nothing"
        yield (
            "parts" in entry.needs and (a.kl_in_reward or buffer),
            registry.key,
            f"{why}; set them to false and 0",
        )
        why = f"{spec} compares the samples of one prompt, so one alone teaches nothing; use at least 2"
        yield entry.grouped and n == 1, "rollout.n", why
        for name, value in getattr(a, own).items():
            where, number = (
                f"algorithm.{own}.{format_value(name)}={format_value(value)}",
                type(value) in (int, float),
            )
            mend = did_you_mean(
                str(name), known, f"use {', '.join(known)}" if known else "remove it"
            )
            yield name not in known, where, f"no such setting of {spec}; {mend}"
            yield isinstance(known[name], float) and not number, where, "must be a number"
            yield name == "beta" and not value > 0, where, "must be above 0"
            yield name == "share" and not 0 < value <= 1, where, "must be above 0 and at most 1"
            numbers = value.items() if isinstance(value, dict) else [(None, None)]
            by_name = all(isinstance(k, str) and type(v) in (int, float) for k, v in numbers)
            yield (
                name == "weights" and not by_name,
                where,
                "must be numbers by name, as {function: 1, model: 0.5}",
            )
            whole = type(value) is int and 2 <= value <= n
            yield (
                name == "pass_k" and not whole,
                where,
                f"must be a whole number from 2 to rollout.n={n}",
            )
    entry, critic = ADVANTAGE_ESTIMATORS.get(a.adv_estimator), cfg.placement.roles.get("critic")
    why = f"{a.adv_estimator} has no use for it; remove the role, or use adv_estimator=gae"
    yield critic and entry and "values" not in entry.needs, f"placement.roles.critic={critic}", why
    single = a.policy_loss in POLICY_LOSSES and a.policy_loss not in ("vanilla", "clip_cov")
    yield (
        a.clip_ratio_c and single,
        "algorithm.clip_ratio_c",
        f"{a.policy_loss} has no dual clip; set it to null",
    )
    why = "nothing to put there while kl_coef=0; raise kl_coef, or set it to false"
    yield a.kl_in_reward and a.kl_coef == 0, "algorithm.kl_in_reward", why
    yield (
        a.kl_target and not a.kl_in_reward,
        "algorithm.kl_target",
        "needs kl_in_reward=true; set it, or this to null",
    )
    samples = cfg.data.train_batch_size * n
    why = f"shorter than one step of {samples} samples; use ten times as many"
    yield a.kl_target and a.kl_horizon < samples, "algorithm.kl_horizon", why
    yield (
        a.max_gen_batches > 1 and n == 1,
        "algorithm.max_gen_batches",
        "compares samples of a prompt; raise rollout.n",
    )
    yield (
        buffer > longest,
        "reward.overlong_buffer",
        f"longer than data.max_response_length={longest}; lower it",
    )
