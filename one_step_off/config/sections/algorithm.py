"""The config section algorithm."""

from dataclasses import dataclass
from typing import Any, Optional

from one_step_off.config.keys import config_key
from one_step_off.config.sections.roles import LOSS_AGGREGATIONS


@dataclass
class AlgorithmConfig:
    """The objective. mu: the policy that generated the tokens; theta: the policy being trained."""

    adv_estimator: str = config_key(
        "grpo",
        "advantage estimator: a name from docs/concepts/algorithms.md, "
        "or your own as module:function",
    )
    adv_kwargs: dict[str, Any] = config_key({}, "settings of the estimator, e.g. {pass_k: 4}")
    norm_adv_by_std: bool = config_key(
        True, "GRPO, pass@k, GDPO: divide by the group's standard deviation"
    )
    whiten_adv: Optional[bool] = config_key(
        None, "whiten advantages over all trained tokens; null: as in the estimator's paper"
    )
    gamma: float = config_key(1.0, "discount per trained token", low=0.0, high=1.0)
    lam: float = config_key(1.0, "lambda of GAE", low=0.0, high=1.0)
    policy_loss: str = config_key(
        "vanilla",
        "policy loss: a name from docs/concepts/algorithms.md, or your own as module:function",
    )
    policy_loss_kwargs: dict[str, Any] = config_key({}, "settings of the loss, e.g. {tau_pos: 1.0}")
    clip_ratio: float = config_key(0.2, "PPO clip range, on both sides", low=0.0, high=10.0)
    clip_ratio_low: Optional[float] = config_key(
        None, "lower PPO clip range; null: clip_ratio", low=0.0, high=1.0
    )
    clip_ratio_high: Optional[float] = config_key(
        None, "upper PPO clip range; null: clip_ratio", low=0.0
    )
    clip_ratio_c: Optional[float] = config_key(
        None,
        "dual clip: bound of the ratio where the advantage is negative, e.g. 3; null: no dual clip",
        above=1.0,
    )
    loss_agg: str = config_key(
        "token-mean",
        "how token losses are aggregated; see docs/concepts/algorithms.md",
        choices=LOSS_AGGREGATIONS,
    )
    max_gen_batches: int = config_key(
        1,
        "dynamic sampling (DAPO): generate at most this many batches "
        "to replace zero-variance groups",
        low=1,
    )
    filter_overlong: bool = config_key(
        False, "mask responses that were cut at max_response_length out of the loss (DAPO)"
    )
    entropy_coef: float = config_key(0.0, "weight of the entropy bonus", low=0.0)
    kl_coef: float = config_key(
        0.0,
        "weight of KL(theta, reference) in the loss; a value above 0 needs the role ref",
        low=0.0,
    )
    kl_in_reward: bool = config_key(
        False,
        "add -kl_coef * log(policy/reference) to each token's reward "
        "instead of a KL term in the loss",
    )
    kl_target: Optional[float] = config_key(
        None, "kl_in_reward: adapt kl_coef to this KL, in nats per response", above=0.0
    )
    kl_horizon: int = config_key(
        10000, "kl_target: number of samples over which kl_coef may change by a fifth", low=1
    )
    kl_estimator: str = config_key(
        "k3",
        "KL estimator of the loss; k1 is refused because as a loss it only adds noise",
        choices="k1 k2 k3 abs k1+ k3+ abs+",
    )
    old_log_probs: str = config_key(
        "rollout",
        "policy of the PPO ratio's denominator: rollout: mu; "
        "recompute: proximal, the trainer before the update",
        choices="rollout recompute",
    )
    rollout_correction: str = config_key(
        "none",
        "importance weight proximal/mu (decoupled PPO)",
        choices="none tis mis seq-tis seq-mis geo-mask",
    )
    rollout_correction_cap: float = config_key(2.0, "upper bound of that weight", above=0.0)
    rollout_correction_low: Optional[float] = config_key(
        None, "lower bound of that weight; null: none, and 1 / cap for geo-mask", above=0.0
    )
