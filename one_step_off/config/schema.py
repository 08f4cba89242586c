"""The schema of a run: every key with its type, default, bounds and one line of help.

This module imports neither torch nor Ray nor vLLM, so that a wrong config is answered in a second,
before any engine or GPU is taken. Loading, overrides and validation live in `config_io.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import Any, Optional


def key(default: Any, help: str, *, choices: str = "", **facts: Any) -> Any:
    """One config key. `choices`: the values it may have, with blanks between. `facts`: `low`, `high`, `above`, `also`:
    inclusive bounds, an exclusive lower one, and a value beside them; `path`: it names files, so ~ is the home directory;
    `shared`: other roles have it as the actor has it, unless they set it, see `following`."""
    meta = facts | {"help": help, "choices": tuple(choices.split())}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: deepcopy(default), metadata=meta)
    return field(default=default, metadata=meta)


LOSS_AGGREGATIONS = "token-mean token-sum sequence-mean seq-mean-token-sum seq-sum-norm"

paths = partial(key, path=True)
shared = partial(key, shared=True)


def following(base: type) -> Any:
    """The keys of `base`, of which the shared ones are null unless set: as the actor has them."""
    told = {
        f: f.metadata | {"help": f"{f.metadata['help']}; null: as the actor"} for f in fields(base)
    }
    keys = []
    for f in told:
        if "shared" in f.metadata:
            kind = Optional[f.type]  # ty: ignore[invalid-type-form]  (made at run time)
            keys.append((f.name, kind, field(default=None, metadata=told[f])))
    return make_dataclass(f"Following{base.__name__}", keys, bases=(base,))


@dataclass
class ModelConfig:
    """The policy."""

    path: str = paths(
        "",
        "HF model directory or hub id; tiny:qwen2, tiny:qwen3, tiny:tools: a small warm-started one",
    )
    dtype: str = key(
        "bfloat16", "dtype of trainer and engine (masters are fp32)", choices="bfloat16 float32"
    )
    trust_remote_code: bool = key(
        False, "run Python code that comes with the model (only if you trust its author)"
    )
    attn_implementation: str = key(
        "auto", "auto: flash if had, else sdpa", choices="auto sdpa flash_attention_2 eager"
    )
    lora_rank: int = key(
        0, "rank of the actor's LoRA adapters, trained beside frozen weights; 0: none", low=0
    )
    lora_alpha: int = key(32, "adapters count lora_alpha / lora_rank times", low=1)
    lora_target_modules: str = key(
        "all-linear", "linear layers with adapters, by name; all-linear: all but the head"
    )


@dataclass
class DataConfig:
    """Prompts."""

    train_files: str = paths(
        "", "jsonl or parquet files (with commas), hub id, or generator:NAME (see recipes)"
    )
    val_files: str = paths("", "held-out set, same forms as train_files; empty: no evaluation")
    val_sets: dict[str, str] = key({}, "more held-out sets, beside val_files: name: files")
    chat_template: str = key(
        "auto", "auto: the tokenizer's, if it has one", choices="auto always never"
    )
    instruction: str = key("", "text appended to each question of the gsm8k format")
    train_batch_size: int = key(64, "prompts per step (each makes rollout.n trajectories)", low=1)
    max_prompt_length: int = key(512, "longest prompt, in tokens", low=1)
    max_response_length: int = key(1024, "longest response, in tokens", low=1)
    overlong_prompts: str = key("skip", "what to do with longer prompts", choices="skip fail")
    bad_rows: str = key(
        "skip", "what to do with malformed rows (they are counted and named)", choices="skip fail"
    )
    shuffle: bool = key(True, "shuffle each epoch, by trainer.seed")
    val_size: int = key(-1, "use only the first rows of the held-out set; -1: all", low=1, also=-1)
    generator_size: int = key(4096, "rows that generator:word_problems makes for training", low=1)


@dataclass
class PlacementConfig:
    """Where each role lives."""

    pools: dict[str, list[int]] = key(
        {"rollout": [1], "actor": [1]}, "pool name: processes (GPUs) per node, as [4, 4]"
    )
    roles: dict[str, str] = key({"rollout": "rollout", "actor": "actor"}, "role name: pool name")
    device: str = key(
        "auto", "cuda, cpu, or auto: cuda where this machine has GPUs", choices="auto cuda cpu"
    )
    pin_cores: bool = key(
        True,
        "CPU runs on one machine: pin each process to its own cores, rollout and trainer apart",
    )


@dataclass
class RolloutConfig:
    """Generation by vLLM."""

    n: int = key(8, "trajectories per prompt (the group)", low=1)
    temperature: float = key(
        1.0, "sampling temperature; the trainer divides its logits by it too", above=0.0
    )
    top_p: float = key(
        1.0,
        "nucleus sampling; other than 1 changes the log-probs and is refused",
        low=1.0,
        high=1.0,
    )
    top_k: int = key(
        -1, "top-k sampling; other than -1 changes the log-probs and is refused", low=-1, high=-1
    )
    tensor_parallel_size: int = key(1, "GPUs per replica", low=1)
    seed_samples: str = key(
        "auto", "a seed per sample: reproducible; auto: on CPU only", choices="auto on off"
    )
    gpu_memory_utilization: float = key(
        0.85, "share of each GPU's memory for vLLM", above=0.0, high=1.0
    )
    kv_cache_mb: int = key(256, "KV cache of each replica on CPU, in MiB", low=1)
    sampling_kwargs: dict[str, Any] = key(
        {}, "more of vLLM's SamplingParams: stop, stop_token_ids and the like"
    )
    engine_kwargs: dict[str, Any] = key({}, "passed through to vLLM's AsyncEngineArgs")
    routing: str = key(
        "auto", "prompts to replicas; auto: static with seeds", choices="auto static least_loaded"
    )
    oversample: float = key(
        1.0, "partial_rollout: batches of prompts under way; those complete first win", low=1.0
    )
    heartbeat_s: float = key(
        5.0, "seconds between two questions whether a replica is there", above=0.0
    )
    heartbeat_timeout_s: float = key(
        60.0, "a replica that does not answer for so long is started anew", above=0.0
    )
    progress_timeout_s: float = key(
        1800.0, "as is one that works, and finishes no request for so long", above=0.0
    )
    val_n: int = key(1, "samples per held-out prompt", low=1)
    val_temperature: float = key(0.0, "temperature of evaluation; 0: greedy", low=0.0)
    val_passes_at: float = key(
        1.0, "pass@k: a held-out sample passes whose reward is at least this"
    )
    val_top_p: float = key(1.0, "nucleus sampling of evaluation", above=0.0, high=1.0)
    val_max_response_length: Optional[int] = key(
        None, "longest response of evaluation, if another", low=1
    )


@dataclass
class BackendConfig:
    """What the training back end needs to know of any role."""

    backend: str = shared("fsdp", "training back end", choices="fsdp megatron")
    micro_batch_tokens: int = shared(
        16384, "tokens per forward pass and rank, padding included", low=1
    )
    tensor_parallel_size: int = shared(1, "megatron: ranks that share each layer", low=1)
    pipeline_parallel_size: int = shared(1, "megatron: stages of layers", low=1)
    virtual_pipeline_parallel_size: Optional[int] = key(
        None, "megatron: parts of each stage; null: one", low=2
    )
    context_parallel_size: int = shared(1, "megatron: ranks that share each sequence", low=1)
    expert_parallel_size: int = shared(1, "megatron: ranks that share the experts", low=1)
    sequence_parallel: bool = shared(
        False, "megatron: split norms over the tensor-parallel ranks too"
    )
    fsdp_size: int = key(-1, "ranks that share one copy (HSDP); -1: all", low=1, also=-1)
    torch_compile: bool = key(
        False, "fsdp: compile each decoder layer by torch.compile; the first steps take long"
    )
    param_offload: bool = key(False, "GPUs: parameters wait in host memory")


@dataclass
class TrainedConfig(BackendConfig):
    """What it needs to know of a role that learns."""

    lr: float = key(1.0e-6, "peak learning rate of AdamW", above=0.0)
    betas: list[float] = key([0.9, 0.999], "AdamW's two betas")
    eps: float = key(1.0e-8, "AdamW's epsilon", above=0.0)
    weight_decay: float = key(0.01, "AdamW's weight decay", low=0.0)
    grad_clip: float = key(1.0, "largest global gradient norm", above=0.0)
    max_grad_norm_skip: Optional[float] = key(
        None, "a larger norm skips the step; null: none does", above=0.0
    )
    lr_schedule: str = key("constant", "after the warm-up", choices="constant cosine linear")
    warmup_steps: int = key(0, "optimiser steps of linear warm-up", low=0)
    min_lr_ratio: float = key(0.0, "cosine and linear end at lr times this", low=0.0, high=1.0)
    ppo_mini_batch_size: int = shared(
        64, "prompts per optimiser step; divides data.train_batch_size", low=1
    )
    ppo_epochs: int = shared(1, "passes over each batch", low=1)
    optimizer_offload: bool = key(
        False, "GPUs: optimiser state waits in host memory between updates"
    )
    activation_checkpointing: bool = key(False, "recompute activations in the backward pass")


@dataclass
class ActorConfig(TrainedConfig):
    """Training of the policy."""

    log_prob_chunk: int = key(2048, "tokens whose logits exist at once", low=1)


@dataclass
class CriticConfig(following(TrainedConfig)):
    """The critic: the model with a scalar head in place of the language model head."""

    path: str = paths(
        "", "HF model directory or hub id (a reward model's head is kept); empty: model.path"
    )
    lr: float = key(1.0e-5, "peak learning rate of AdamW", above=0.0)
    loss_agg: str = key(
        "token-mean", "as algorithm.loss_agg, of the value loss", choices=LOSS_AGGREGATIONS
    )
    clip_range_value: float = key(
        0.5, "a value that moves further from the old one has its loss clipped", above=0.0
    )


@dataclass
class RefConfig(following(BackendConfig)):
    """The frozen reference policy."""

    path: str = paths("", "HF model directory or hub id; empty: model.path")


@dataclass
class RewardModelConfig(following(BackendConfig)):
    """A reward model: a sequence classifier with one output in a pool of its own, or a server."""

    path: str = paths("", "HF sequence-classification model (role reward_model)")
    url: str = key(
        "", "instead of a role: a server; POST {prompts, responses, ground_truths} -> {scores}"
    )
    weight: float = key(
        1.0,
        "of its score in the reward; reward.weight is that of reward.function",
        low=-1e6,
        high=1e6,
    )
    timeout_s: float = key(60.0, "limit for one request to the server", above=0.0)
    retries: int = key(3, "how often a request that failed is repeated", low=0)
    max_concurrency: int = key(8, "requests at once", low=1)
    request_size: int = key(32, "samples per request", low=1)


@dataclass
class AlgorithmConfig:
    """The objective. mu: the policy that made the tokens; theta: the one being trained."""

    adv_estimator: str = key(
        "grpo", "advantages: a name of docs/concepts/algorithms.md, or your own as module:function"
    )
    adv_kwargs: dict[str, Any] = key({}, "the estimator's own settings, as {pass_k: 4}")
    norm_adv_by_std: bool = key(
        True, "GRPO, pass@k, GDPO: divide by the group's standard deviation"
    )
    whiten_adv: Optional[bool] = key(
        None, "whiten advantages over all trained tokens; null: as the estimator's paper"
    )
    gamma: float = key(1.0, "discount per trained token", low=0.0, high=1.0)
    lam: float = key(1.0, "GAE's lambda", low=0.0, high=1.0)
    policy_loss: str = key(
        "vanilla", "a name of docs/concepts/algorithms.md, or your own as module:function"
    )
    policy_loss_kwargs: dict[str, Any] = key({}, "the loss's own settings, as {tau_pos: 1.0}")
    clip_ratio: float = key(0.2, "PPO clip, both sides", low=0.0, high=10.0)
    clip_ratio_low: Optional[float] = key(
        None, "lower clip, if other than clip_ratio", low=0.0, high=1.0
    )
    clip_ratio_high: Optional[float] = key(None, "upper clip, if other than clip_ratio", low=0.0)
    clip_ratio_c: Optional[float] = key(
        None, "dual clip: bound of bad tokens' ratio, as 3; null: none", above=1.0
    )
    loss_agg: str = key(
        "token-mean",
        "sum of the policy's token losses; docs/concepts/algorithms.md",
        choices=LOSS_AGGREGATIONS,
    )
    max_gen_batches: int = key(
        1, "dynamic sampling (DAPO): generations at most, to replace dull groups", low=1
    )
    filter_overlong: bool = key(
        False, "leave out of the loss what was cut at max_response_length (DAPO)"
    )
    entropy_coef: float = key(0.0, "weight of the entropy bonus", low=0.0)
    kl_coef: float = key(
        0.0, "weight of KL(theta, reference) in the loss; above 0 needs the role ref", low=0.0
    )
    kl_in_reward: bool = key(
        False, "put -kl_coef * log(policy/reference) into each token's reward, not into the loss"
    )
    kl_target: Optional[float] = key(
        None, "kl_in_reward: adapt kl_coef to this KL in nats per response", above=0.0
    )
    kl_horizon: int = key(10000, "kl_target: samples in which kl_coef may change by a fifth", low=1)
    kl_estimator: str = key(
        "k3",
        "of the KL in the loss; k1 only adds noise: refused",
        choices="k1 k2 k3 abs k1+ k3+ abs+",
    )
    old_log_probs: str = key(
        "rollout", "clip theta/mu; or theta/proximal (recompute)", choices="rollout recompute"
    )
    rollout_correction: str = key(
        "none", "weight by proximal/mu", choices="none tis mis seq-tis seq-mis geo-mask"
    )
    rollout_correction_cap: float = key(2.0, "cap of that weight", above=0.0)
    rollout_correction_low: Optional[float] = key(
        None, "its lower bound; null: none, geo-mask 1 / cap", above=0.0
    )


@dataclass
class RewardConfig:
    """Rewards."""

    function: str = key("gsm8k", "gsm8k, math, or your own as module:function")
    timeout_s: float = key(10.0, "limit for one sample", above=0.0)
    kwargs: dict[str, Any] = key({}, "extra arguments of your function, or of all of them")
    functions: dict[str, str] = key(
        {}, "instead of function: data_source: function, as {openai/gsm8k: gsm8k}"
    )
    workers: int = key(1, "processes that score; a slow function needs several", low=1)
    weight: float = key(
        1.0, "of its score in the reward; reward_model.weight is the model's", low=-1e6, high=1e6
    )
    on_error: str = key(
        "stop",
        "scoring or a loop fails: end the run, score 0, drop prompt",
        choices="stop zero drop",
    )
    overlong_buffer: int = key(
        0, "the last tokens of max_response_length cost reward, more and more (DAPO)", low=0
    )
    overlong_penalty: float = key(
        1.0, "reward that a response of max_response_length loses", low=0.0
    )


@dataclass
class AgentConfig:
    """Agent loops: how a prompt becomes a trajectory. data.max_response_length holds all its turns and tool outputs."""

    loop: str = key(
        "single_turn",
        "a loop of docs/tutorials/your_own_agent.md, or your own as module:Class; a row may name another",
    )
    loop_kwargs: dict[str, Any] = key({}, "settings of loops by name, as {tool: {format: llama}}")
    tools: str = key(
        "",
        "of the loop tool, with commas: calculator, python, your own as module:function, mcp:URL",
    )
    max_turns: int = key(8, "turns of the model in one trajectory", low=1)
    max_turn_tokens: Optional[int] = key(None, "longest turn of the model, in tokens", low=1)
    timeout_s: float = key(600.0, "after this time a trajectory begins no new turn", above=0.0)
    tool_timeout_s: float = key(
        10.0, "limit for one call of a tool, or one step of an environment", above=0.0
    )
    tool_output_chars: int = key(2000, "longest answer of a tool; the rest is cut off", low=1)
    max_concurrency: int = key(1024, "trajectories under way at once in each replica", low=1)


@dataclass
class PipelineConfig:
    """The pipeline."""

    staleness: int = key(
        1, "1: one step off (rollout and training overlap); 0: synchronous", low=0, high=1
    )
    partial_rollout: bool = key(
        False, "a sync interrupts what is unfinished; it goes on with the new weights"
    )
    max_carry: int = key(
        1, "partial_rollout: steps that a prompt may be trained on later than planned", low=0
    )


@dataclass
class WeightSyncConfig:
    """Weights from the trainer into vLLM."""

    overlap: bool = key(
        True, "send while the next step's first forward and backward pass run (staleness 1)"
    )
    mode: str = key(
        "full", "delta: send only the elements that changed, bit by bit", choices="full delta"
    )
    full_every: int = key(50, "delta: every so many syncs send everything", low=1)
    sender: str = key(
        "sharded", "gather: rank 0 gathers and sends, to compare with", choices="sharded gather"
    )
    bucket_mb: int = key(64, "size of each of the two reused buffers at both ends, in MiB", low=1)
    keep_sent: bool = key(
        True, "senders keep what they sent, in host memory, for a replica that comes back"
    )
    timeout_s: float = key(120.0, "limit for each phase of a sync", above=0.0)
    canary_sequences: int = key(
        4, "token sequences that engine and trainer both score after each sync", low=1
    )
    canary_tolerance: Optional[float] = key(
        None, "largest log-prob difference; null: fp32 1e-3, bf16 1.0", above=0.0
    )


@dataclass
class TrainerConfig:
    """The run."""

    total_steps: Optional[int] = key(None, "steps to train (this or total_epochs)", low=1)
    total_epochs: Optional[int] = key(None, "passes over the data (this or total_steps)", low=1)
    test_freq: int = key(-1, "steps between evaluations; -1: none in between", low=1, also=-1)
    val_before_train: bool = key(True, "evaluate before the first step")
    val_only: bool = key(False, "evaluate the model (or the checkpoint it resumes from) and end")
    val_after_train: bool = key(True, "evaluate after the last step")
    output_dir: str = paths("outputs/run", "the run folder")
    seed: int = key(0, "seed of data order, samples and initialisation", low=0)
    critic_warmup: int = key(0, "first steps in which only the critic learns", low=0)
    save_freq: int = key(-1, "steps between checkpoints; -1: none", low=1, also=-1)
    keep_checkpoints: int = key(3, "how many of the newest checkpoints stay", low=1)
    keep_best: Optional[str] = key(
        None, "the checkpoint best by this figure stays too, as val/reward; null: none"
    )
    resume: str = paths(
        "auto", "auto: from output_dir's newest checkpoint; never; or a checkpoint's folder"
    )
    overwrite: bool = key(
        False,
        "an earlier run in output_dir may be replaced, or cut back to the checkpoint that resume names",
    )
    grace_s: float = key(
        120.0, "after Ctrl-C or SIGTERM: time to reach and write a checkpoint", low=0.0
    )
    save_hf_model: bool = key(True, "write hf_model/ at the end")
    max_restarts: int = key(
        3, "restarts from the last checkpoint, in a row without a new step, after a death", low=0
    )
    max_skipped_updates: int = key(
        10, "so many skipped optimiser steps in a row end the run", low=1
    )
    profile_step: Optional[int] = key(
        None, "torch's profile of the updates of this step, counted from 0", low=0
    )
    start_timeout_s: float = key(900.0, "limit for starting engines and trainers", above=0.0)
    step_timeout_s: float = key(3600.0, "limit for any one phase of a step", above=0.0)


@dataclass
class LoggingConfig:
    """What a run writes down besides metrics.jsonl, ledger.jsonl and summary.json."""

    tensorboard: bool = key(True, "write tensorboard/ in the run folder")
    wandb: bool = key(False, "log to Weights & Biases; needs the package wandb")
    wandb_project: str = key("one_step_off", "project in W&B")
    wandb_mode: str = key(
        "online", "offline: in the run folder until `wandb sync`", choices="online offline"
    )
    prometheus_port: Optional[int] = key(
        None, "serve each step's figures on this port of 127.0.0.1", low=1, high=65535
    )
    sample_dump: bool = key(
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
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


def role_settings(cfg: Config, role: str) -> Any:
    """The section of a role, with what it leaves open (null) as the actor has it; but the sizes only with its back end,
    and its virtual stages only with its stages."""
    own, actor = getattr(cfg, role), cfg.actor
    if own.backend not in (None, actor.backend):
        sizes = (f.name for f in fields(BackendConfig) if "parallel" in f.name)
        actor = replace(actor, **{name: getattr(ActorConfig, name) for name in sizes})
    elif own.pipeline_parallel_size is not None:
        actor = replace(actor, virtual_pipeline_parallel_size=None)
    return replace(
        own, **{f.name: getattr(actor, f.name) for f in fields(own) if getattr(own, f.name) is None}
    )


def data_parallel_size(cfg: Config, role: str) -> int:
    """Into how many shares a role's ranks split a batch: all of them, or under Megatron those that hold one model."""
    own, ranks = role_settings(cfg, role), sum(cfg.placement.pools[cfg.placement.roles[role]])
    return ranks // (
        own.tensor_parallel_size * own.pipeline_parallel_size * own.context_parallel_size
    )


def role_model_path(cfg: Config, role: str) -> str:
    """The model that a role begins with."""
    return getattr(getattr(cfg, role), "path", "") or cfg.model.path


def load_section_tokenizer(cfg: Config, section: str) -> Any:
    """The tokenizer of a section's model. Imports transformers, and raises what it raises."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        getattr(cfg, section).path, trust_remote_code=cfg.model.trust_remote_code
    )


class ConfigError(Exception):
    """Bad input from the user. The message is one line: the key or file, the value, and the mend. Exit code 2."""


@contextmanager
def as_config_error(what: str, mend: str, kinds: Any = Exception) -> Iterator[None]:
    """What the block raises of `kinds` (a class, or several) becomes the ConfigError "what: type: first line; mend"."""
    try:
        yield
    except kinds as e:
        while isinstance(e, BaseExceptionGroup):  # of tasks: its first says enough
            e = e.exceptions[0]
        raise ConfigError(f"{what}: {type(e).__name__}: {first_line(e)}; {mend}") from e


@contextmanager
def located_config_error(where: str) -> Iterator[None]:
    """Put a place, as file and line, in front of what a ConfigError says."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{where}{e}") from None


def first_line(error: BaseException) -> str:
    """What a library's error says in its first line, with the second where the first only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
