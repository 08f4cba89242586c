"""The schema of a config: a dataclass for each section, the documentation of its keys. A section
with checks has a file in `sections/`; the others stand here.

It imports neither torch nor Ray nor vLLM: a wrong config is refused within a second, before any
engine or GPU is taken. `loading.py` reads a config.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from one_step_off.config.keys import config_key, files_key
from one_step_off.config.sections.agent import AgentConfig
from one_step_off.config.sections.data import DataConfig
from one_step_off.config.sections.logging import LoggingConfig
from one_step_off.config.sections.model import ModelConfig
from one_step_off.config.sections.reward import RewardConfig
from one_step_off.config.sections.roles import (
    LOSS_AGGREGATIONS,
    ActorConfig,
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
)
from one_step_off.config.sections.rollout import RolloutConfig
from one_step_off.config.sections.trainer import TrainerConfig
from one_step_off.config.sections.weight_sync import WeightSyncConfig


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


@dataclass
class PipelineConfig:
    """The pipeline."""

    staleness: int = config_key(
        1,
        "k: a token that is trained is at most k versions old. 0: synchronous; 1: one step off "
        "(rollout and training overlap); more: longer responses delay training less",
        low=0,
        high=16,
    )
    batch_source: str = config_key(
        "auto",
        "where the batches come from. auto: whole batches, or with weight_sync.in_flight = "
        "recompute or keep a pool of prompts; or module:Class of your own",
    )


@dataclass
class PlacementConfig:
    """Which role runs on which processes."""

    pools: dict[str, list[int | float]] = config_key(
        {"rollout": [1], "actor": [1]},
        "pool name: GPUs (processes) on each node, e.g. [4, 4], or a share of one GPU, e.g. [0.5]",
    )
    roles: dict[str, str] = config_key(
        {"rollout": "rollout", "actor": "actor"}, "role name: pool name"
    )
    device: str = config_key(
        "auto",
        "cuda, cpu, or auto: cuda if this machine has GPUs, else cpu",
        choices="auto cuda cpu",
    )
    pin_cores: bool = config_key(
        True,
        "CPU runs on one machine: pin each process to its own cores, "
        "separate for rollout and trainer",
    )
    lend: bool = config_key(
        False,
        "the actor's GPUs generate while the actor waits for its batch: each has a replica that "
        "sleeps meanwhile. What an engine may take (rollout.gpu_memory_utilization) must be free "
        "beside the actor's weights and moments",
    )


@dataclass
class SftConfig:
    """Supervised fine-tuning: python -m one_step_off.main_sft, or trainer.sft_steps before RL."""

    train_files: str = files_key(
        "",
        "rows with answers (messages, question + answer, prompt + completion): files, hub id or "
        "generator:NAME; empty: data.train_files",
    )
    val_files: str = files_key(
        "",
        "held-out rows with answers; empty: data.val_files, where train_files is empty too",
    )
    batch_size: Optional[int] = config_key(
        None, "rows per optimizer step; null: data.train_batch_size", low=1
    )
    max_length: Optional[int] = config_key(
        None,
        "longest row, in tokens; null: data.max_prompt_length + data.max_response_length",
        low=2,
    )
    overlong: str = config_key(
        "skip",
        "what to do with longer rows (they are counted); cut: drop the tokens beyond max_length, "
        "so that the answer has no end",
        choices="skip cut fail",
    )
    lr: Optional[float] = config_key(
        None, "peak learning rate; null: 2e-5, and 2e-4 with adapters (model.lora_rank)", above=0.0
    )
    lr_schedule: Optional[str] = config_key(
        None,
        "learning rate after the warm-up; null: actor.lr_schedule",
        choices="constant cosine linear",
    )
    warmup_steps: Optional[int] = config_key(
        None, "optimizer steps of linear warm-up; null: actor.warmup_steps", low=0
    )


@dataclass
class Config:
    """A run's whole configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
