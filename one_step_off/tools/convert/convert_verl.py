"""Settings of verl whose values have another unit here, or that stand for several keys."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from one_step_off.tools.convert.conversion import Conversion, set_length, set_logging

# What verl's main_ppo does where a script says nothing, and this program does not.
VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor.ppo_mini_batch_size": 256,
    "actor.activation_checkpointing": True,
    "rollout.n": 1,
    "rollout.tensor_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.old_log_probs": "recompute",
    "trainer.seed": 1,
}
# The same of its recipes one_step_off_policy and fully_async_policy: their configs set bypass_mode.
ASYNC_DEFAULTS: dict[str, Any] = VERL_DEFAULTS | {"algorithm.old_log_probs": "rollout"}
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    f"{ROLLOUT}.name": ("vllm",),
    f"{ROLLOUT}.top_p": (1, 1.0),
    f"{ROLLOUT}.top_k": (-1,),
    f"{ROLLOUT}.val_kwargs.top_k": (-1,),
    f"{ROLLOUT}.calculate_log_probs": (True, False),
    f"{ROLLOUT}.free_cache_engine": (True, False),
    f"{ROLLOUT}.load_format": ("dummy_dtensor", "dummy", "auto", "safetensors"),
    f"{ROLLOUT}.multi_turn.enable": (False,),
    "actor_rollout_ref.model.use_remove_padding": (True,),
    "data.prompt_key": ("prompt",),
    "data.reward_fn_key": ("data_source",),
    "data.return_raw_chat": (True, False),
    "reward_model.reward_manager": ("naive",),
    "algorithm.kl_ctrl.type": ("fixed",),
    "algorithm.rollout_correction.rollout_is": (None,),
    "algorithm.rollout_correction.rollout_rs": (None,),
    "trainer.balance_batch": (True, False),
    "trainer.log_val_generations": (0,),
    "--config-name": ("ppo_trainer", "one_step_off_ppo_trainer", "fully_async_ppo_trainer"),
}


def _neutral(c: Conversion) -> None:
    """Settings that say what is so here anyway."""
    for key, values in _NEUTRAL.items():
        if c.is_open(key) and c.given[key] in values:
            c.same_here(key)
    for key in list(c.given):
        if key.endswith("grad_offload") and c.given[key] is False:
            c.same_here(key)
    if c.is_open("--config-name") and c.given["--config-name"] == "ppo_megatron_trainer":
        c.take("--config-name")
        c.set("actor.backend", "megatron", "--config-name")
    base_is_missing = c.is_open("--config-name")
    for key in ("--config-name", "--config-path", "--config-dir"):
        if base_is_missing or "--config-name" not in c.given:
            reason = "the settings of that config are not here: no such file; convert its YAML file"
            c.leave(key, f"{reason} too, and add what it prints to this")
        else:
            c.same_here(key)
    c.leave("defaults", "the configs that it names are not read")


def _batches(c: Conversion) -> None:
    """Sequences per device, or tokens, of one forward pass."""
    dynamic = c.given.get(f"{ACTOR}.use_dynamic_bsz", False)
    for role, prefix, start in (
        ("actor", ACTOR, "ppo_"),
        ("ref", REF, "log_prob_"),
        ("critic", "critic", "ppo_"),
    ):
        flag = f"{prefix}.{start.removeprefix('ppo_')}use_dynamic_bsz"
        _set_micro_batch(c, role, f"{prefix}.{start}", flag, dynamic)
    for key in list(c.given):
        if key.startswith(f"{ROLLOUT}.log_prob_") and "_corr" not in key:
            c.leave(key, "log-probs come in the actor's micro-batches, actor.micro_batch_tokens")
        elif key.startswith("critic.forward_"):
            c.leave(key, "values come in the micro-batches of critic.micro_batch_tokens")


def _set_micro_batch(c: Conversion, role: str, start: str, flag: str, dynamic: Any) -> None:
    """The micro-batches of a role.

    Args:
        start: of their keys.
        flag: their key that says whether micro-batches are cut by tokens; `dynamic` unless set.
    """
    tokens_key = f"{start}max_token_len_per_gpu"
    keys = [f"{start}micro_batch_size_per_gpu", f"{start}micro_batch_size"]
    by_tokens = c.take(flag, default=dynamic)
    c.same_here(flag)
    ours = f"{role}.micro_batch_tokens"
    if by_tokens or not any(c.given.get(key) is not None for key in keys):
        tokens = c.take(tokens_key)
        if tokens is not None:
            c.set(ours, tokens, tokens_key)
        for key in keys:
            c.leave(key, "with use_dynamic_bsz micro-batches are cut by tokens")
        return
    c.leave(tokens_key, "use_dynamic_bsz is off; the number of sequences counts")
    nulls = [key for key in keys if key in c.given and c.given[key] is None]
    c.same_here(*nulls)
    used = next(key for key in keys if c.is_open(key))
    sequences = c.take(*keys)
    if not isinstance(sequences, int):
        c.set(ours, sequences, used)
        return
    if not used.endswith("_per_gpu"):
        gpus = c.number("trainer.n_gpus_per_node", 8) * c.number("trainer.nnodes", 1)
        sequences = max(1, sequences // gpus)
    length = c.number("data.max_prompt_length", 512) + c.number("data.max_response_length", 512)
    c.set(ours, sequences * length, used)
    c.notes.append(
        f"{ours}={sequences * length}: {sequences} sequences of at most {length} tokens"
        + ("; log-probs come in the same micro-batches" if role == "actor" else "")
    )


def _kl(c: Conversion) -> None:
    """A KL loss, or a KL in the reward; both need the reference."""
    loss_keys = [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
    reward_keys = ["algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"]
    in_loss = c.take(loss_keys[0], default=False)
    loss_coef = c.take(loss_keys[1], default=0.001)
    in_reward = c.take(reward_keys[0], default=False)
    reward_coef = c.take(reward_keys[1], default=0.001)
    kind = c.take(loss_keys[2], default="low_var_kl")
    if in_loss:
        c.set("algorithm.kl_coef", loss_coef, *loss_keys[:2])
        names = {"low_var_kl": "k3", "mse": "k2", "abs": "abs", "low_var_kl+": "k3+"}
        if kind in names:
            c.set("algorithm.kl_estimator", names[kind], loss_keys[2])
        else:
            c.leave(loss_keys[2], "as a loss it only adds noise, or is not supported; k3 is used")
        if in_reward:
            for key in reward_keys:
                c.leave(key, "a run has one KL: that of the loss is taken")
    elif in_reward:
        c.set("algorithm.kl_in_reward", True, reward_keys[0])
        c.set("algorithm.kl_coef", reward_coef, reward_keys[1])
    unused = ([] if in_loss else loss_keys) + ([] if in_reward else reward_keys)
    c.same_here(*unused)
    target = "algorithm.kl_ctrl.target_kl"
    if c.is_open("algorithm.kl_ctrl.type"):  # adaptive
        c.leave("algorithm.kl_ctrl.type", "set algorithm.kl_target, which makes it adaptive")
        c.leave(target, "algorithm.kl_target is in nats per response: this times their mean length")
    else:
        c.same_here(target)  # its controller is not on


def _placement(c: Conversion) -> None:
    """GPUs of one pool for all, as verl's hybrid engine has it, or of two pools."""
    actor_keys = ("trainer.n_gpus_per_node", "trainer.nnodes")
    rollout_gpu_keys = ("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node")
    rollout_node_keys = ("rollout.nnodes", f"{ROLLOUT}.nnodes")
    gpus = c.take_whole(actor_keys[0], default=8)
    nodes = c.take_whole(actor_keys[1], default=1)
    rollout_gpus = c.take_whole(*rollout_gpu_keys, default=0)
    rollout_nodes = c.take_whole(*rollout_node_keys, default=1)
    hybrid = c.take("actor_rollout_ref.hybrid_engine", default=True)
    width = c.number(f"{ROLLOUT}.tensor_model_parallel_size", 2)
    theirs = [*actor_keys, "actor_rollout_ref.hybrid_engine"]
    if hybrid and not c.script.is_one_step_off:
        _place_hybrid(c, [gpus] * nodes, width)
        for key in (*rollout_gpu_keys, *rollout_node_keys):
            c.leave(key, "the hybrid engine has the GPUs of trainer.n_gpus_per_node")
    else:
        c.ours["placement.pools"] = {
            "rollout": [rollout_gpus or gpus] * max(1, rollout_nodes),
            "actor": [gpus] * nodes,
        }
        c.set("pipeline.staleness", 1)
        theirs += [*rollout_gpu_keys, *rollout_node_keys]
    c.sources["placement.pools"] = [key for key in theirs if key in c.given]


def _place_hybrid(c: Conversion, sizes: list[int], width: int) -> None:
    """One pool for all roles, or two halves where an engine spans several GPUs.

    Args:
        sizes: GPUs of each node.
        width: GPUs of an engine.
    """
    if width == 1:
        c.ours["placement.pools"] = {"all": sizes}
        c.ours["placement.roles"] = {"rollout": "all", "actor": "all"}
        c.set("pipeline.staleness", 0)
        c.notes.append(
            "pipeline.staleness=0 with one pool is verl's hybrid engine; for one step off give "
            "rollout and actor pools of their own, and set pipeline.staleness=1"
        )
        return
    half = len(sizes) // 2
    rollout, actor = sizes[:half], sizes[half:]
    if len(sizes) == 1:
        rollout = [max(1, sizes[0] // 2 // width) * width]
        actor = [max(1, sizes[0] - rollout[0])]
    c.ours["placement.pools"] = {"rollout": rollout, "actor": actor}
    c.set("pipeline.staleness", 1)
    c.notes.append(
        f"placement.pools: verl's hybrid engine shares all GPUs; here engines of {width} GPUs need "
        "a pool of their own, so each group gets half of them, and generates one step off "
        "(pipeline.staleness=0 for verl's synchronous order)"
    )


def _run(c: Conversion) -> None:
    """Length, names, loggers and checkpoints of the run."""
    epochs = c.take("trainer.total_epochs", default=30)
    steps = c.take("trainer.total_training_steps")
    set_length(c, steps, epochs, "trainer.total_training_steps", "trainer.total_epochs")
    set_logging(c, "trainer.logger", ["console", "wandb"], "trainer.project_name")
    name = c.take("trainer.experiment_name")
    folder = c.take("trainer.default_local_dir")
    if folder:
        c.set("trainer.output_dir", folder, "trainer.default_local_dir")
        c.leave("trainer.experiment_name", "a run is named by its folder, trainer.output_dir")
    elif name:
        c.set("trainer.output_dir", f"outputs/{name}", "trainer.experiment_name")
    mode = c.take("trainer.resume_mode", default="auto")
    resume_path = c.take("trainer.resume_from_path")
    if mode == "disable":
        c.set("trainer.resume", "never", "trainer.resume_mode")
    elif mode == "auto":
        c.set("trainer.resume", "auto", "trainer.resume_mode")
    else:
        c.leave("trainer.resume_mode", "checkpoints of verl cannot be resumed; start from a model")
    if resume_path:
        c.leave("trainer.resume_from_path", "a checkpoint of verl; start from a model")
    else:
        c.same_here("trainer.resume_from_path")
    if c.given.get("trainer.device") in ("cpu", "cuda"):
        c.set("placement.device", c.take("trainer.device"), "trainer.device")


def _data(c: Conversion) -> None:
    for key in ("data.train_files", "data.val_files"):
        files = c.take(key)
        if isinstance(files, str) and files.startswith("["):
            files = [part.strip(" '\"") for part in files.strip("[]").split(",")]
        if files is not None:
            c.set(key, ",".join(map(str, files)) if isinstance(files, list) else files, key)
    skips = c.take("data.filter_overlong_prompts", default=False)
    truncation = c.take("data.truncation", default="error")
    c.set("data.overlong_prompts", "skip" if skips else "fail", "data.filter_overlong_prompts")
    if truncation != "error" and not skips:
        c.leave("data.truncation", "prompts are not cut; data.overlong_prompts=fail")
    else:
        c.same_here("data.truncation")


def _training(c: Conversion) -> None:
    """Schedules and settings whose values have other names."""
    strategies = (f"{ACTOR}.strategy", f"{ACTOR}.fsdp_config.strategy")
    strategy = c.take(*strategies)
    megatron_keys = [key for key in c.given if key.startswith(f"{ACTOR}.megatron.")]
    if strategy == "megatron" or megatron_keys:
        c.set("actor.backend", "megatron", *strategies)
    elif strategy is not None:
        value = "fsdp" if strategy == "fsdp2" else strategy
        c.set("actor.backend", value, *strategies)
    for role in ("actor", "ref"):
        key = f"actor_rollout_ref.{role}.megatron.param_offload"
        if c.take(key):
            c.leave(key, "the megatron back end keeps its weights on the GPUs")
        else:
            c.same_here(key)
    _warmup(c)
    top_p = c.take(f"{ROLLOUT}.val_kwargs.top_p")
    if top_p is not None:
        c.set("rollout.val_top_p", top_p, f"{ROLLOUT}.val_kwargs.top_p")
    sample_keys = (f"{ROLLOUT}.val_kwargs.do_sample", f"{ROLLOUT}.val_kwargs.temperature")
    samples = c.take(sample_keys[0], default=False)
    temperature = c.take(sample_keys[1], default=0)
    c.set("rollout.val_temperature", temperature if samples else 0.0, *sample_keys)
    loss = c.take(f"{ACTOR}.policy_loss.loss_mode")
    if loss is not None:
        ours = "gmpo" if loss == "geo_mean" else loss
        c.set("algorithm.policy_loss", ours, f"{ACTOR}.policy_loss.loss_mode")
    weights = "algorithm.rollout_correction.rollout_is"
    names = {"token": "tis", "sequence": "seq-tis"}
    if c.is_open(weights) and c.given[weights] in names:
        c.set("algorithm.rollout_correction", names[c.take(weights)], weights)


def _warmup(c: Conversion) -> None:
    """Warm-up in steps of the run, or a share of them, as optimizer steps."""
    key, ratio_key = f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio"
    steps, ratio = c.take(key, default=-1), c.take(ratio_key, default=0)
    batch = c.number("data.train_batch_size", 1024)
    mini_batch = max(1, c.number(f"{ACTOR}.ppo_mini_batch_size", 256))
    per_step = max(1, -(-batch // mini_batch) * c.number(f"{ACTOR}.ppo_epochs", 1))
    total = c.number("trainer.total_training_steps", 0)
    if isinstance(steps, int) and steps > 0:
        c.set("actor.warmup_steps", steps * per_step, key)
        c.leave(ratio_key, f"{key} counts")
        if per_step > 1:
            c.notes.append(
                f"actor.warmup_steps={steps * per_step}: verl counts {steps} steps of the run, "
                f"with {per_step} optimizer steps in each"
            )
        return
    if isinstance(steps, int) or steps is None:
        c.same_here(key)
    else:
        c.set("actor.warmup_steps", steps, key)
    if not ratio:
        c.same_here(ratio_key)
    elif total and isinstance(ratio, float):
        c.set("actor.warmup_steps", int(ratio * total) * per_step, ratio_key)
    else:
        c.leave(
            ratio_key,
            f"set actor.warmup_steps to {ratio} times the steps of the run times {per_step}, the "
            "optimizer steps in each",
        )


def _rewards(c: Conversion) -> None:
    path_keys = ("custom_reward_function.path", "reward.custom_reward_function.path")
    name_keys = ("custom_reward_function.name", "reward.custom_reward_function.name")
    path = c.take(*path_keys)
    name = c.take(*name_keys, default="compute_score")
    if path:
        c.set("reward.function", f"{Path(str(path)).stem}:{name}", *path_keys, *name_keys)
        c.notes.append(
            f"reward.function: {path} must be in the working directory or on PYTHONPATH, and take "
            "response in place of solution_str: docs/tutorials/reward_and_data.md"
        )
    else:
        c.same_here(*path_keys, *name_keys)
    enable_keys = ("reward_model.enable", "reward.reward_model.enable")
    model_keys = ("reward_model.model.path", "reward.reward_model.model_path")
    is_enabled, model = c.take(*enable_keys, default=False), c.take(*model_keys)
    if is_enabled and model:
        c.set("reward_model.path", model, *enable_keys, *model_keys)
    elif not is_enabled:
        c.same_here(*enable_keys, *model_keys)
    else:
        for key in enable_keys:
            c.leave(key, "the script names no model; set reward_model.path")
    if not path and not is_enabled:
        c.notes.append(
            "reward.function=gsm8k is the default here, and what this config trains on until you "
            "set another; verl chooses by data_source: see reward.functions"
        )
    _overlong_rewards(c)


def _overlong_rewards(c: Conversion) -> None:
    """The penalty of verl's reward manager dapo for responses that are almost too long."""
    for prefix in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
        keys = [f"{prefix}.{name}" for name in ("enable", "len", "penalty_factor", "log")]
        enabled, length, penalty, _ = [c.take(key) for key in keys]
        managers = ("reward_model.reward_manager", "reward.reward_manager.name")
        if enabled and length:
            c.set("reward.overlong_buffer", length, *keys[:2], *managers)
            c.set("reward.overlong_penalty", 1.0 if penalty is None else penalty, keys[2])
            c.take(*managers)
            c.same_here(*keys[3:])
        elif not enabled:
            c.same_here(*keys)
    for key in ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len"):
        if c.given.get(key) == c.number("data.max_response_length", 512):
            c.same_here(key)
        else:
            c.leave(key, "the penalty counts from data.max_response_length")


def _groups(c: Conversion) -> None:
    """Dynamic sampling."""
    start = "algorithm.filter_groups."
    is_on = c.take(f"{start}enable", default=False)
    batches = c.take(f"{start}max_num_gen_batches", default=10)
    metric = c.take(f"{start}metric", default="acc")
    if is_on:
        c.set(
            "algorithm.max_gen_batches",
            batches or 10,
            f"{start}enable",
            f"{start}max_num_gen_batches",
        )
        c.leave(f"{start}metric", f"groups are compared by their rewards, not by {metric}")
    else:
        c.same_here(*(start + name for name in ("enable", "max_num_gen_batches", "metric")))


VERL_STEPS: tuple[Callable[[Conversion], None], ...] = (
    _neutral,
    _batches,
    _kl,
    _placement,
    _run,
    _data,
    _training,
    _rewards,
    _groups,
)
