"""Advantages of a training batch: its samples, rewards and the roles' answers, put together for the
estimators.

Pure functions of a `Batch`. The estimators themselves are in `advantages.py`.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from one_step_off.algorithms import advantages
from one_step_off.algorithms.core_algos import KLController
from one_step_off.algorithms.distillation import distill
from one_step_off.config.schema import Config
from one_step_off.data.episodes import episode_numbers, episodes_of, first_positions
from one_step_off.data.samples import Batch, Sample


def make_kl_controller(cfg: Config, adapted_coef: float | None) -> KLController:
    """The coefficient of the KL penalty.

    Args:
        adapted_coef: out of a checkpoint; used if the coefficient is adaptive.
    """
    algorithm = cfg.algorithm
    controller = KLController(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
    if algorithm.kl_target is not None and adapted_coef is not None:
        controller.value = adapted_coef
    return controller


def reward_parts(samples: list[Sample]) -> dict[str, np.ndarray] | None:
    """The parts of the rewards: name -> float64 [B]. A part that a sample lacks is NaN, or 0 if its
    reward is 0 for an error. None where no sample has parts."""
    parts_of_samples = [sample.extra.get("reward_parts", {}) for sample in samples]
    names = dict.fromkeys(name for parts in parts_of_samples for name in parts)
    if not names:
        return None
    defaults = [0.0 if "error" in sample.extra else np.nan for sample in samples]
    columns = {}
    for name in names:
        rows = zip(parts_of_samples, defaults, strict=True)
        columns[name] = np.array([parts.get(name, default) for parts, default in rows])
    return columns


def shaped_rewards(samples: list[Sample], cfg: Config) -> np.ndarray:
    """The rewards with the punishment of overlong responses, float64 [B].

    An episode is punished once, for its longest segment: `data.max_response_length` limits each of
    them, and an agent that keeps its contexts short may work for as long as it likes.
    """
    lengths = np.array([len(sample.response_ids) for sample in samples], np.int64)
    episodes = episode_numbers(samples)
    if episodes is not None:
        longest = np.zeros(len(samples), np.int64)
        np.maximum.at(longest, episodes, lengths)
        lengths = longest[episodes]
    penalties = advantages.overlong_penalty(
        lengths,
        cfg.data.max_response_length,
        cfg.reward.overlong_buffer,
        cfg.reward.overlong_penalty,
    )
    return np.array([sample.reward for sample in samples]) + penalties


def set_baselines(samples: list[Sample], scored: list[Sample], cfg: Config) -> None:
    """Give each sample the shaped reward of its prompt's greedy response as `extra["baseline"]`.

    Args:
        samples: those to train on.
        scored: the greedy responses too.
    """
    rewards = shaped_rewards(scored, cfg).tolist()
    baselines = {
        sample.prompt_id: reward
        for sample, reward in zip(scored, rewards, strict=True)
        if "greedy" in sample.extra
    }
    for sample in samples:
        if sample.prompt_id in baselines:
            sample.extra["baseline"] = baselines[sample.prompt_id]


def fill_advantages(batch: Batch, cfg: Config, kl_controller: KLController) -> dict[str, float]:
    """Set the batch's `advantages` and, with a critic's `values`, its `returns`.

    With `algorithm.filter_overlong` responses that were cut off lose their loss mask, and with one
    of its segments an episode as a whole. With `algorithm.kl_in_reward` every token's reward gets
    -beta * (log p - log p_ref), and the controller adapts beta. A teacher's advantages are added
    last.

    Returns:
        Metrics: the mean over episodes of each part of the reward, the KL per episode, and those of
        the teachers.

    Raises:
        ConfigError: the estimator needs something that the batch has not.
    """
    algorithm = cfg.algorithm
    parts = reward_parts(batch.samples)
    episodes = episodes_of(batch)
    first_of_episodes = first_positions(batch.samples)
    metrics = _mean_parts(parts or {}, first_of_episodes)
    if algorithm.filter_overlong:
        batch.samples = _without_overlong(batch.samples, episodes)
    # By the weights about to be trained, if the trainer was asked; else by the engine's.
    log_probs = batch.old_log_probs or [sample.log_probs for sample in batch.samples]
    token_rewards = None
    if algorithm.kl_in_reward:
        log_ratios = [p - ref for p, ref in zip(log_probs, batch.ref_log_probs, strict=True)]
        token_rewards = [-kl_controller.value * log_ratio for log_ratio in log_ratios]
        metrics["kl/response"] = _mean_kl(log_ratios, batch.samples, episodes)
        metrics["kl/coef"] = kl_controller.value
        kl_controller.update(metrics["kl/response"], len(first_of_episodes))
    trajectories = advantages.Trajectories(
        rewards=shaped_rewards(batch.samples, cfg),
        groups=[sample.prompt_id for sample in batch.samples],
        masks=[sample.loss_mask for sample in batch.samples],
        token_rewards=token_rewards,
        values=batch.values,
        parts=parts,
        baselines=_baselines(batch.samples),
        log_probs=log_probs,
        prob_squares=batch.prob_squares,
        episodes=episodes,
    )
    batch.advantages, batch.returns = advantages.estimate_advantages(
        algorithm.adv_estimator,
        trajectories,
        advantages.Options(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std),
        algorithm.whiten_adv,
        **algorithm.adv_kwargs,
    )
    return metrics | distill(batch, log_probs, cfg)


def _mean_parts(parts: dict[str, np.ndarray], positions: np.ndarray) -> dict[str, float]:
    """The metric of each part of the reward: its mean over the samples at these positions."""
    return {
        f"reward/{name}/mean": float(np.nanmean(part[positions])) for name, part in parts.items()
    }


def _without_overlong(samples: list[Sample], episodes: np.ndarray | None) -> list[Sample]:
    cut_off = np.array([sample.finish_reason == "length" for sample in samples], bool)
    if episodes is not None:
        # The reward is that of the whole episode: it says as little of the other segments.
        cut_off = np.isin(episodes, episodes[cut_off])
    masks = advantages.mask_overlong([sample.loss_mask for sample in samples], cut_off.tolist())
    return [replace(sample, loss_mask=mask) for sample, mask in zip(samples, masks, strict=True)]


def _mean_kl(
    log_ratios: list[np.ndarray], samples: list[Sample], episodes: np.ndarray | None
) -> float:
    """The mean of the episodes' KL (nats, summed over trained tokens); episodes without trained
    tokens aside."""
    sums_of_episodes: dict[int, Any] = {}
    numbers = range(len(samples)) if episodes is None else episodes.tolist()
    for number, log_ratio, sample in zip(numbers, log_ratios, samples, strict=True):
        if sample.loss_mask.any():
            kl = log_ratio[sample.loss_mask].sum()
            sums_of_episodes[number] = sums_of_episodes.get(number, 0) + kl
    return float(np.mean(list(sums_of_episodes.values()))) if sums_of_episodes else 0.0


def _baselines(samples: list[Sample]) -> np.ndarray | None:
    """The rewards of the prompts' greedy responses, float [B]; None if a sample lacks one."""
    if not all("baseline" in sample.extra for sample in samples):
        return None
    return np.array([sample.extra["baseline"] for sample in samples])
