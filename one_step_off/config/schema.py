"""The schema of a config: every key with its type, default, bounds and one line of help.

It imports neither torch nor Ray nor vLLM: a wrong config is refused within a second, before any
engine or GPU is taken. The section agent is in `agent_section.py`, placement and rollout are in
`rollout_sections.py`, pipeline and weight_sync in `pipeline_sections.py`; actor, critic, ref,
reward_model and teacher are in `role_sections.py`. `loading.py` reads a config, and `validation.py`
checks what must fit together.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from one_step_off.config.agent_section import AgentConfig
from one_step_off.config.data_sections import Curriculum, DifficultyFilter, SourceConfig
from one_step_off.config.keys import config_key, files_key, path_key
from one_step_off.config.pipeline_sections import PipelineConfig, WeightSyncConfig
from one_step_off.config.role_sections import (
    LOSS_AGGREGATIONS,
    ActorConfig,
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
)
from one_step_off.config.rollout_sections import PlacementConfig, RolloutConfig
from one_step_off.config.sft_section import SftConfig


@dataclass
class ModelConfig:
    """The policy."""

    path: str = path_key(
        "",
        "HF model directory or hub id; tiny:qwen2, tiny:qwen3, tiny:tools: a small model that is "
        "built on this machine and briefly pretrained (tiny:qwen2-1: with one layer)",
    )
    dtype: str = config_key(
        "bfloat16",
        "dtype of trainer and engine (the trainer's master weights are fp32)",
        choices="bfloat16 float32",
    )
    trust_remote_code: bool = config_key(
        False, "run Python code that comes with the model (only if you trust its author)"
    )
    attn_implementation: str = config_key(
        "auto",
        "attention of the trainer; auto: flash_attn or torch's own for packed batches, else SDPA",
        choices="auto sdpa flash_attention_2 eager",
    )
    lora_rank: int = config_key(
        0, "rank of the actor's LoRA adapters (the base weights are frozen); 0: no LoRA", low=0
    )
    lora_alpha: int = config_key(32, "LoRA scaling is lora_alpha / lora_rank", low=1)
    lora_target_modules: str = config_key(
        "all-linear",
        "names of the linear layers that get adapters; all-linear: all but the language model head",
    )


@dataclass
class DataConfig:
    """Prompts."""

    train_files: str | list[dict[str, Any]] = files_key(
        "",
        "jsonl or parquet files (comma-separated, or a list), hub id, generator:NAME, or "
        "environment: the tasks of agent.environment; or a list of sources with weights "
        "(docs/tutorials/reward_and_data.md)",
        entries=SourceConfig,
    )
    val_files: str = files_key(
        "", "held-out set, in the same forms as train_files; empty: no evaluation"
    )
    val_sets: dict[str, str] = files_key(
        {}, "further held-out sets, in addition to val_files, as a mapping {name: files}"
    )
    chat_template: str = config_key(
        "auto", "auto: the tokenizer's chat template, if it has one", choices="auto always never"
    )
    chat_template_kwargs: dict[str, Any] = config_key(
        {}, "settings of the chat template for all rows, e.g. {enable_thinking: false}"
    )
    instruction: str = config_key("", "text appended to each question of the gsm8k format")
    train_batch_size: int = config_key(
        64, "prompts per step (each gives rollout.n trajectories)", low=1
    )
    max_prompt_length: int = config_key(512, "longest prompt, in tokens", low=1)
    max_response_length: int = config_key(1024, "longest response, in tokens", low=1)
    overlong_prompts: str = config_key(
        "skip", "what to do with prompts longer than max_prompt_length", choices="skip fail"
    )
    bad_rows: str = config_key(
        "skip",
        "what to do with malformed rows (they are counted and listed)",
        choices="skip fail",
    )
    shuffle: bool = config_key(True, "shuffle each epoch, seeded by trainer.seed")
    val_size: int = config_key(
        -1, "use only the first rows of each held-out set; -1: all", low=1, also=-1
    )
    generator_size: int = config_key(
        4096, "number of training rows that generator:NAME generates", low=1
    )
    solved_at: float = config_key(
        1.0,
        "a sample solves its prompt with at least this reward (pass rates, metrics of sources)",
        low=-1e6,
        high=1e6,
    )
    difficulty_filter: dict[str, Any] = config_key(
        {},
        "drop prompts for some epochs that were solved always or never, e.g. {visits: 2}; "
        "empty: off",
        entries=DifficultyFilter,
    )
    curriculum: dict[str, Any] = config_key(
        {},
        "draw prompts more often whose pass rate is near a target, e.g. {target: 0.5}; empty: off",
        entries=Curriculum,
    )


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
class RewardConfig:
    """Rewards."""

    function: str = config_key(
        "gsm8k", "reward function: gsm8k, math, or your own as module:function"
    )
    timeout_s: float = config_key(10.0, "time limit for scoring one sample", above=0.0)
    kwargs: dict[str, Any] = config_key({}, "extra arguments for your reward function(s)")
    functions: dict[str, str] = config_key(
        {}, "instead of function: one for each data_source, e.g. {openai/gsm8k: gsm8k}"
    )
    workers: int = config_key(
        1, "number of scoring processes; a slow function needs several", low=1
    )
    weight: float = config_key(
        1.0,
        "weight of the function's score in the reward; reward_model.weight is that of the model",
        low=-1e6,
        high=1e6,
    )
    on_error: str = config_key(
        "stop",
        "if scoring, an agent loop or an external agent fails: stop the run, give reward zero, or "
        "drop the prompt",
        choices="stop zero drop",
    )
    overlong_buffer: int = config_key(
        0,
        "soft overlong penalty (DAPO): it grows linearly over this many "
        "last tokens of max_response_length",
        low=0,
    )
    overlong_penalty: float = config_key(
        1.0, "penalty of a response of max_response_length tokens", low=0.0
    )


@dataclass
class TrainerConfig:
    """The run."""

    total_steps: Optional[int] = config_key(
        None, "number of steps (set this or total_epochs)", low=1
    )
    total_epochs: Optional[int] = config_key(
        None, "passes over the data (set this or total_steps)", low=1
    )
    test_freq: int = config_key(
        -1, "steps between evaluations; -1: none during training", low=1, also=-1
    )
    val_before_train: bool = config_key(True, "evaluate before the first step")
    val_only: bool = config_key(
        False, "only evaluate the model (or the checkpoint it resumes from), then exit"
    )
    val_after_train: bool = config_key(True, "evaluate after the last step")
    output_dir: str = path_key("outputs/run", "the run folder")
    seed: int = config_key(0, "seed of data order, sampling and initialization", low=0)
    sft_steps: int = config_key(
        0, "supervised steps on the actor before RL, see the section sft; 0: none", low=0
    )
    critic_warmup: int = config_key(0, "number of first steps that train only the critic", low=0)
    save_freq: int = config_key(-1, "steps between checkpoints; -1: none", low=1, also=-1)
    keep_checkpoints: int = config_key(3, "number of newest checkpoints to keep", low=1)
    keep_best: Optional[str] = config_key(
        None, "also keep the checkpoint that is best by this metric, e.g. val/reward; null: off"
    )
    resume: str = path_key(
        "auto",
        "auto: resume from the newest checkpoint in output_dir; never: do not; or a checkpoint's "
        "folder",
    )
    overwrite: bool = config_key(
        False,
        "allow replacing an earlier run in output_dir, or "
        "truncating it to the checkpoint that resume names",
    )
    grace_s: float = config_key(
        120.0,
        "after Ctrl-C, SIGTERM, SIGHUP or SIGUSR1: seconds to finish the step and write its "
        "checkpoint",
        low=0.0,
    )
    save_hf_model: bool = config_key(True, "write hf_model/ at the end")
    max_restarts: int = config_key(
        3,
        "largest number of restarts after failures in a row without completing a new step",
        low=0,
    )
    max_skipped_updates: int = config_key(
        10, "end the run after this many skipped optimizer steps in a row", low=1
    )
    profile_step: Optional[int] = config_key(
        None, "write a torch profile of the updates of this step (counted from 0)", low=0
    )
    start_timeout_s: float = config_key(
        900.0, "time limit for starting engines and trainers", above=0.0
    )
    step_timeout_s: float = config_key(3600.0, "time limit for any phase of a step", above=0.0)


@dataclass
class LoggingConfig:
    """What a run logs in addition to metrics.jsonl, ledger.jsonl and summary.json."""

    tensorboard: bool = config_key(True, "write tensorboard/ in the run folder")
    wandb: bool = config_key(False, "log to Weights & Biases; needs the package wandb")
    wandb_project: str = config_key("one_step_off", "project in W&B")
    wandb_mode: str = config_key(
        "online",
        "offline: log into the run folder until you run `wandb sync`",
        choices="online offline",
    )
    prometheus_port: Optional[int] = config_key(
        None,
        "serve the metrics of each step on this port of 127.0.0.1; null: no server",
        low=1,
        high=65535,
    )
    sample_dump: bool = config_key(
        True, "write all samples to samples/ (read them with python -m one_step_off.view)"
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
