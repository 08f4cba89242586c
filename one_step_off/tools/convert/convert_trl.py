"""Settings of TRL whose values have another unit here, or that stand for several keys."""

from collections.abc import Callable
from typing import Any

from one_step_off.config.loading import KEYS
from one_step_off.tools.convert.conversion import Conversion, set_length, set_logging
from one_step_off.tools.convert.other_scripts import Named

# What TRL's GRPOConfig does where a script says nothing, and this program does not.
TRL_DEFAULTS: dict[str, Any] = {
    "data.max_response_length": 256,
    "rollout.n": 8,
    "actor.lr_schedule": "linear",
    "actor.weight_decay": 0.0,
    "actor.activation_checkpointing": True,
    "algorithm.old_log_probs": "recompute",
    "trainer.seed": 42,
}
# The same where use_vllm is on: the importance weights between vLLM and the trainer.
TRL_VLLM_DEFAULTS: dict[str, Any] = {
    "algorithm.rollout_correction": "seq-mis",
    "algorithm.rollout_correction_cap": 3.0,
}
TRL_BATCH_SIZE = 8  # per_device_train_batch_size by default
WEIGHTS = "vllm_importance_sampling_"

# Settings that say what is so here anyway, or change only what is written.
_NEUTRAL = (
    "use_vllm", "bf16", "tf32", "logging_steps", "logging_first_step", "log_completions",
    "num_completions_to_print", "remove_unused_columns", "run_name", "processing_class",
    "dataloader_num_workers", "ddp_timeout", "vllm_server_host", "vllm_server_port",
    "vllm_server_timeout", "push_to_hub", "bias", "lora.bias", "task_type", "lora.task_type",
)  # fmt: skip


def _neutral(c: Conversion) -> None:
    c.same_here(*_NEUTRAL)
    for key in ("top_p", "min_p", "repetition_penalty", "top_k"):
        if c.given.get(key) in (1, 1.0, None, 0, -1):
            c.same_here(key)


def _model_and_data(c: Conversion) -> None:
    model_keys = ("model", "model_name_or_path", "model_name")
    model = c.take(*model_keys)
    if isinstance(model, Named):
        c.leave("model", "made by the script; set model.path")
    elif model is not None:
        c.set("model.path", model, *model_keys)
    dtype = c.take("dtype", "torch_dtype")
    if dtype is not None:
        c.set("model.dtype", str(dtype).removeprefix("torch."), "dtype", "torch_dtype")
    _data(c)
    functions = ("reward_funcs", "reward_functions")
    is_named = c.take(*functions) is not None
    for key in functions if is_named else ():
        c.leave(
            key,
            "TRL's functions take lists; reward.function takes one sample: wrap it as in "
            "docs/reference/from_trl.md#rewards",
        )
    c.notes.append(
        "reward.function=gsm8k is the default here, and what this config trains on until you set "
        "yours: docs/reference/from_trl.md#rewards"
    )


def _data(c: Conversion) -> None:
    name_keys = ("dataset_name", "dataset_config", "dataset_config_name")
    name = c.take(name_keys[0])
    data_config = c.take(*name_keys[1:])
    given_train = c.take("train_dataset")
    train = given_train or (f"{name}:{data_config}" if data_config else name)
    train_keys = ("train_dataset",) if given_train else name_keys
    if given_train:
        for key in name_keys:
            c.leave(key, "train_dataset counts")
    held_out = c.take("eval_dataset")
    for key in (
        "dataset_train_split",
        "dataset_test_split",
        "dataset_train_name",
        "dataset_test_name",
    ):
        c.leave(key, "a data set's split train is read; name files of the split you want")
    for key, files, theirs in (
        ("data.train_files", train, train_keys),
        ("data.val_files", held_out, ("eval_dataset",)),
    ):
        if isinstance(files, Named):
            for their_key in theirs:
                c.leave(their_key, "made by the script; write its rows to a .jsonl file, and set "
                        f"{key}")  # fmt: skip
        elif files is not None:
            c.set(key, files, *theirs)
            c.notes.append(f"{key}={files}: its rows must have columns of docs/tutorials/"
                           "reward_and_data.md")  # fmt: skip


def _lora(c: Conversion) -> None:
    names = (("lora.r", "lora_r"), ("lora.lora_alpha", "lora_alpha"),
             ("lora.target_modules", "lora_target_modules"))  # fmt: skip
    uses = c.take("use_peft")
    rank, alpha, modules = [c.take(*keys) for keys in names]
    if uses is False or (uses is None and rank is None):
        c.same_here("use_peft", *(key for keys in names for key in keys))
        return
    c.set("model.lora_rank", 16 if rank is None else rank, "use_peft", *names[0])
    c.set("model.lora_alpha", 32 if alpha is None else alpha, *names[1])
    if modules:
        listed = modules if isinstance(modules, str) else ",".join(modules)
        c.set("model.lora_target_modules", listed, *names[2])


def _processes(c: Conversion) -> int:
    """Of accelerate or torchrun; 1 where the script does not say a number."""
    processes = c.script.processes
    return processes if isinstance(processes, int) and processes > 0 else 1


def _batches(c: Conversion) -> None:
    """Samples per device become prompts per step and per mini-batch."""
    processes = _processes(c)
    mini_keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    step_keys = ("generation_batch_size", "steps_per_generation")
    per_device = c.take_whole(mini_keys[0], default=TRL_BATCH_SIZE)
    accumulation = c.take_whole(mini_keys[1], default=1)
    per_generation = c.take_whole(step_keys[1], default=accumulation)
    generations = max(1, c.number("num_generations", 8))
    whole = per_device * processes * per_generation
    samples = c.take_whole(step_keys[0], default=whole)
    c.same_here("per_device_eval_batch_size")
    if step_keys[0] in c.given:
        c.leave(step_keys[1], f"{step_keys[0]} counts")
    if c.script.processes != processes:
        c.notes.append("the script does not say its number of processes; 1 is assumed")
    mini_batch = per_device * processes * accumulation
    for key, count, theirs in (
        ("data.train_batch_size", samples, (*step_keys, *mini_keys)),
        ("actor.ppo_mini_batch_size", mini_batch, mini_keys),
    ):
        if count % generations:
            c.notes.append(f"{key}: {count} samples are no whole number of groups of {generations}")
        c.set(key, max(1, count // generations), *theirs)


def _placement(c: Conversion) -> None:
    processes = _processes(c)
    mode = c.take("vllm_mode", default="server")
    width = c.take_whole("vllm_tensor_parallel_size", default=1)
    c.set("rollout.tensor_parallel_size", width, "vllm_tensor_parallel_size")
    if mode == "colocate":
        c.ours["placement.pools"] = {"all": [processes]}
        c.ours["placement.roles"] = {"rollout": "all", "actor": "all"}
        c.set("pipeline.staleness", 0, "vllm_mode")
        if not c.is_open("vllm_gpu_memory_utilization"):
            c.set("rollout.gpu_memory_utilization", 0.3)  # its default
    else:
        c.same_here("vllm_mode")
        c.ours["placement.pools"] = {"rollout": [width], "actor": [processes]}
        c.notes.append(
            f"placement.pools: {width + processes} GPUs, {width} more than the script's processes: "
            "the engine has GPUs of its own, and pipeline.staleness=1 generates while it trains; "
            "TRL waits: pipeline.staleness=0"
        )


def _training(c: Conversion) -> None:
    beta_keys = ("adam_beta1", "adam_beta2")
    betas = [c.take(key) for key in beta_keys]
    if any(beta is not None for beta in betas):
        defaults = KEYS["actor.betas"].default
        c.set("actor.betas", [default if beta is None else beta
                              for beta, default in zip(betas, defaults, strict=True)],
              *beta_keys)  # fmt: skip
    optimizer = c.take("optim")
    if optimizer is not None:
        known = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit"}
        is_adamw = str(optimizer).startswith(("adamw_torch", "adamw_hf"))
        if optimizer not in known and not is_adamw:
            c.leave("optim", "actor.optimizer has adamw, adamw_8bit and muon")
        else:
            c.set("actor.optimizer", known.get(optimizer, "adamw"), "optim")
    schedule = c.take("lr_scheduler_type")
    if schedule is not None:
        name = "constant" if schedule == "constant_with_warmup" else schedule
        c.set("actor.lr_schedule", name, "lr_scheduler_type")


def _objective(c: Conversion) -> None:
    beta = c.take("beta")
    if beta:
        c.set("algorithm.kl_coef", beta, "beta")
    else:
        c.same_here("beta")
    scale = c.given.get("scale_rewards")
    if isinstance(scale, bool):
        c.set("algorithm.norm_adv_by_std", c.take("scale_rewards"), "scale_rewards")
    loss = c.given.get("loss_type")
    if loss in ("cispo", "sapo"):
        c.set("algorithm.policy_loss", c.take("loss_type"), "loss_type")
    if c.given.get("importance_sampling_level") == "token" or loss == "luspo":
        c.same_here("importance_sampling_level")
    _weights(c)


def _weights(c: Conversion) -> None:
    """The importance weights between vLLM and the trainer. TRL has them only with vLLM."""
    names = ("correction", "mode", "cap", "clip_max", "clip_min")
    keys = [WEIGHTS + name for name in names]
    is_on = c.take(keys[0]) is not False
    uses_vllm = c.given.get("use_vllm") is True
    if not (is_on and uses_vllm):
        c.same_here(*keys)
        if uses_vllm:
            c.set("algorithm.rollout_correction", "none", keys[0])
        return
    c.same_here(keys[0])
    for key, value in TRL_VLLM_DEFAULTS.items():
        c.ours[key] = value  # the script's own values replace them


def _run(c: Conversion) -> None:
    """Lengths and intervals. TRL counts optimizer steps, this program batches of prompts."""
    mini_batches = -(-c.ours["data.train_batch_size"] // c.ours["actor.ppo_mini_batch_size"])
    per_step = mini_batches * c.number("num_iterations", 1)
    steps = c.take("max_steps")
    is_count = isinstance(steps, int)
    has_steps = is_count and steps > 0
    ours = -(-steps // per_step) if has_steps else None if is_count else steps
    epochs = c.take("num_train_epochs", default=3)
    set_length(c, ours, epochs, "max_steps", "num_train_epochs")
    for strategy, freq, default, key in (
        ("eval_strategy", "eval_steps", None, "trainer.test_freq"),
        ("save_strategy", "save_steps", 500, "trainer.save_freq"),
    ):
        kind = c.take(strategy)
        every = c.take(freq, default=default)
        if kind == "epoch":
            c.leave(strategy, f"{key} counts steps")
            c.leave(freq, f"{strategy}=epoch counts")
        elif kind != "no" and isinstance(every, int):
            c.set(key, max(1, every // per_step), strategy, freq)
        elif kind == "no" or every is None:
            c.same_here(strategy, freq)
        else:
            c.leave(freq, f"{key} is a whole number of steps")
            c.same_here(strategy)
    if per_step > 1:
        c.notes.append(
            f"trainer: TRL counts optimizer steps, of which there are {per_step} in a step here"
        )
    set_logging(c, "report_to", "none", "wandb_project", "project")
    _warmup(c, steps if has_steps else 0)
    if isinstance(c.given.get("resume_from_checkpoint"), bool):
        c.same_here("resume_from_checkpoint")


def _warmup(c: Conversion, steps: int) -> None:
    """Warm-up as a share of the run's optimizer steps, which are 0 where they are not known."""
    ratio = c.take("warmup_ratio")
    key = "warmup_ratio"
    if not ratio and isinstance(c.given.get("warmup_steps"), float):
        key, ratio = "warmup_steps", c.take("warmup_steps")
    if "warmup_steps" in c.given and key == "warmup_ratio" and c.given["warmup_steps"]:
        c.leave(key, "warmup_steps counts")
    elif not ratio:
        c.same_here(key)
    elif steps and isinstance(ratio, float):
        c.set("actor.warmup_steps", round(ratio * steps), key)
    else:
        c.leave(
            key,
            f"set actor.warmup_steps to {ratio} times the optimizer steps of the run, which the "
            "script does not say (max_steps)",
        )


TRL_STEPS: tuple[Callable[[Conversion], None], ...] = (
    _neutral,
    _model_and_data,
    _lora,
    _batches,
    _placement,
    _training,
    _objective,
    _run,
)
