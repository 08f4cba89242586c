"""`one-step-off convert SCRIPT`: a script of verl or TRL as a config of this program.

Most keys are translated by the tables of `config/other_keys.yaml`. A function here translates those
whose values have another unit or stand for several keys. What the other trainer does by default and
this one does not is written out too.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from one_step_off.algorithms.validation import LOSSES_WITH_DUAL_CLIP
from one_step_off.config.errors import ConfigError, noting_what_is_missing
from one_step_off.config.loading import KEYS, SECTIONS, checked_value, load_config_text
from one_step_off.config.other_scripts import VERL, Named, OtherScript, Setting, read_script
from one_step_off.config.text import format_value
from one_step_off.config.unknown_keys import (
    Row,
    engine_argument,
    hint,
    markdown_to_text,
    rows_of_key,
)
from one_step_off.runtime.validation import validate

USAGE = """usage: one-step-off convert SCRIPT   (or: python -m one_step_off.convert SCRIPT)
  SCRIPT   a shell script of verl (python -m verl.trainer.main_ppo key=value ...), a command or a
           Python script of TRL (GRPOConfig(...), --learning_rate 1e-6), or a YAML file of either
Prints the config as YAML, and as comments what it could not translate."""

# What verl's main_ppo does where a script says nothing, and this program does not.
VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor.ppo_mini_batch_size": 256,
    "rollout.n": 1,
    "rollout.tensor_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.5,
    "algorithm.adv_estimator": "gae",
    "algorithm.clip_ratio_c": 3.0,
    "trainer.seed": 1,
}
# The same of TRL's GRPOConfig.
TRL_DEFAULTS: dict[str, Any] = {
    "data.max_response_length": 256,
    "rollout.n": 8,
    "actor.lr_schedule": "linear",
    "actor.weight_decay": 0.0,
    "trainer.seed": 42,
}
TRL_BATCH_SIZE = 8  # per_device_train_batch_size by default
MISSING: dict[str, Any] = {"model.path": "MODEL", "data.train_files": "TRAIN_FILES"}
"""What a run needs and a script may lack, with what stands for it."""


class NotTranslated(Exception):
    """Why a setting has no counterpart; the message is for the user."""


@dataclass
class Conversion:
    """A script on its way to a config.

    Attributes:
        given: the settings of the script by their own keys; those that are taken are removed.
        ours: our dotted key -> value.
        left: their `key=value` -> why it is not translated.
        notes: what to look at, a line each.
    """

    script: OtherScript
    given: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that the script sets, and all of them are done."""
        values = [self.given.pop(key) for key in keys if key in self.given]
        return values[0] if values else default

    def number(self, key: str, default: int) -> int:
        """The whole number that the script sets a key to, or the default. It is not taken."""
        value = self.given.get(key, default)
        return value if isinstance(value, int) else default

    def set(self, dotted: str, value: Any) -> None:
        """Set one of our keys; a value that it does not take is left."""
        try:
            self.require(dotted, value)
        except NotTranslated as error:
            self.leave(dotted, value, str(error).partition(": ")[2])

    def require(self, dotted: str, value: Any) -> None:
        """Set one of our keys. Raises NotTranslated: it does not take the value."""
        has_variable = "${" in str(value)
        takes_text = dotted not in KEYS or KEYS[dotted].type_text.startswith("text")
        if has_variable and not takes_text:
            raise NotTranslated(f"{dotted}: the script gives this variable no value")
        try:
            if dotted in KEYS and not has_variable:
                value = checked_value(KEYS[dotted], value)
        except ConfigError as error:
            raise NotTranslated(str(error)) from None
        self.ours[dotted] = value

    def leave(self, key: str, value: Any, reason: str) -> None:
        """Note a setting that is not translated."""
        self.left[f"{key}={format_value(value)}"] = reason


def convert(path: str) -> Conversion:
    """The config of a script. Raises ConfigError: it cannot be read, or holds no settings."""
    script = read_script(path)
    conversion = Conversion(script, notes=list(script.notes))
    conversion.given = {setting.key: setting.value for setting in script.settings}
    steps = VERL_STEPS if script.trainer == VERL else TRL_STEPS
    for step in steps:
        step(conversion)
    for key, value in conversion.given.items():
        try:
            _translate(conversion, Setting(key, value))
        except NotTranslated as error:
            conversion.leave(key, value, str(error))
    defaults = VERL_DEFAULTS if script.trainer == VERL else TRL_DEFAULTS
    conversion.ours = defaults | conversion.ours
    _fit(conversion)
    return conversion


def _translate(conversion: Conversion, setting: Setting) -> None:
    """Translate one setting by the tables. Raises NotTranslated."""
    key, value = setting.key, setting.value
    found = rows_of_key(conversion.script.trainer, key, value)
    if engine_argument(key) and not (found and "engine_kwargs" not in found[0].here):
        conversion.require(f"rollout.engine_kwargs.{engine_argument(key)}", value)
    elif found:
        _translate_by_row(conversion, found[0], key, value)
    elif key in KEYS:
        conversion.require(key, value)
    else:
        _, advice = hint(key, value, KEYS, SECTIONS)
        is_nothing = advice == "remove it" or advice.startswith("use model, data")
        raise NotTranslated("no such setting here" if is_nothing else advice)


def _translate_by_row(conversion: Conversion, row: Row, key: str, value: Any) -> None:
    codes = re.findall(r"`([a-z_]+\.[a-z_0-9.]+)(?:=([^`]*))?`", row.here)
    wanted = dict(row.keys).get(key)
    if row.here.startswith("the same") and key in KEYS:
        conversion.require(key, value)
    elif codes and row.here.startswith("`") and wanted is not None:
        for name, text in codes:
            if text:
                conversion.require(name, yaml.safe_load(text))
    elif codes and row.here.startswith("`") and not codes[0][1]:
        conversion.require(codes[0][0], value)
    else:
        page = ""
        raise NotTranslated(markdown_to_text(row.here, page).removeprefix("no key: "))


# --- verl -----------------------------------------------------------------------------------------


def _verl_neutral(c: Conversion) -> None:
    """Settings that say what is so here anyway."""
    neutral: dict[str, tuple[Any, ...]] = {
        "actor_rollout_ref.rollout.name": ("vllm",),
        "actor_rollout_ref.rollout.top_p": (1, 1.0),
        "actor_rollout_ref.rollout.top_k": (-1,),
        "actor_rollout_ref.rollout.val_kwargs.top_k": (-1,),
        "actor_rollout_ref.rollout.calculate_log_probs": (True, False),
        "actor_rollout_ref.rollout.free_cache_engine": (True, False),
        "actor_rollout_ref.rollout.load_format": ("dummy_dtensor", "dummy", "auto", "safetensors"),
        "actor_rollout_ref.rollout.multi_turn.enable": (False,),
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (1,),
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (1,),
        "actor_rollout_ref.model.use_remove_padding": (True,),
        "data.prompt_key": ("prompt",),
        "data.reward_fn_key": ("data_source",),
        "data.return_raw_chat": (True, False),
        "reward_model.reward_manager": ("naive",),
        "algorithm.kl_ctrl.type": ("fixed",),
        "algorithm.filter_groups.enable": (False,),
        "trainer.balance_batch": (True, False),
    }
    for key, values in neutral.items():
        if key in c.given and c.given[key] in values:
            c.take(key)
    for key in list(c.given):
        if key.startswith(("--", "hydra.")) or key.endswith(
            ("grad_offload", "log_val_generations")
        ):
            c.take(key)


def _verl_batches(c: Conversion) -> None:
    """Sequences per device, or tokens, of one forward pass."""
    tokens = c.take("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    sequences = c.take(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.ppo_micro_batch_size",
    )
    c.take("actor_rollout_ref.actor.use_dynamic_bsz")
    for role in ("rollout", "ref"):
        for name in ("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu"):
            c.take(f"actor_rollout_ref.{role}.{name}")
        c.take(f"actor_rollout_ref.{role}.log_prob_use_dynamic_bsz")
        c.take(f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu")
    for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
                 "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu",
                 "forward_micro_batch_size", "forward_micro_batch_size_per_gpu"):  # fmt: skip
        c.take(f"critic.{name}")  # by default the actor's
    if tokens is None and isinstance(sequences, int):
        length = c.number("data.max_prompt_length", 512)
        length += c.number("data.max_response_length", 512)
        tokens = sequences * length
        c.notes.append(
            f"actor.micro_batch_tokens={tokens}: {sequences} sequences of at most {length} tokens; "
            "log-probs come in the same micro-batches"
        )
    if tokens is not None:
        c.set("actor.micro_batch_tokens", tokens)


def _verl_kl(c: Conversion) -> None:
    """A KL loss, or a KL in the reward; both need the reference."""
    in_loss = c.take("actor_rollout_ref.actor.use_kl_loss", default=False)
    loss_coef = c.take("actor_rollout_ref.actor.kl_loss_coef", default=0.001)
    in_reward = c.take("algorithm.use_kl_in_reward", default=False)
    reward_coef = c.take("algorithm.kl_ctrl.kl_coef", default=0.001)
    kind = c.take("actor_rollout_ref.actor.kl_loss_type", default="low_var_kl")
    if in_loss and in_reward:
        c.leave("algorithm.use_kl_in_reward", True, "a run has one KL: that of the loss is taken")
    if in_loss:
        c.set("algorithm.kl_coef", loss_coef)
        names = {"low_var_kl": "k3", "mse": "k2", "abs": "abs", "low_var_kl+": "k3+"}
        if kind in names:
            c.set("algorithm.kl_estimator", names[kind])
        else:
            reason = "as a loss it only adds noise, or is not supported; k3 is used"
            c.leave("actor_rollout_ref.actor.kl_loss_type", kind, reason)
    elif in_reward:
        c.set("algorithm.kl_in_reward", True)
        c.set("algorithm.kl_coef", reward_coef)


def _verl_placement(c: Conversion) -> None:
    """GPUs of one pool for all, as verl's hybrid engine has it, or of two pools."""
    gpus = c.take("trainer.n_gpus_per_node", default=8)
    nodes = c.take("trainer.nnodes", default=1)
    if not (isinstance(gpus, int) and isinstance(nodes, int)):
        c.leave("trainer.n_gpus_per_node", f"{gpus} x {nodes}", "no number; set placement.pools")
        gpus, nodes = 8, 1
    rollout_gpus = c.take(
        "rollout.n_gpus_per_node", "actor_rollout_ref.rollout.n_gpus_per_node", default=0
    )
    rollout_nodes = c.take("rollout.nnodes", "actor_rollout_ref.rollout.nnodes", default=1)
    hybrid = c.take("actor_rollout_ref.hybrid_engine", default=True)
    width = c.number("actor_rollout_ref.rollout.tensor_model_parallel_size", 2)
    if hybrid and not c.script.is_one_step_off:
        _place_hybrid(c, [gpus] * nodes, width)
    else:
        c.ours["placement.pools"] = {
            "rollout": [rollout_gpus or gpus] * rollout_nodes,
            "actor": [gpus] * nodes,
        }
        c.set("pipeline.staleness", 1)


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


def _verl_run(c: Conversion) -> None:
    """Length, names, loggers and checkpoints of the run."""
    epochs = c.take("trainer.total_epochs", default=30)
    steps = c.take("trainer.total_training_steps")
    _set_length(c, steps, epochs)
    project = c.take("trainer.project_name")
    name = c.take("trainer.experiment_name")
    folder = c.take("trainer.default_local_dir")
    _set_logging(c, c.take("trainer.logger", default=["console", "wandb"]), project)
    if folder or name:
        c.set("trainer.output_dir", folder or f"outputs/{name}")
    mode = c.take("trainer.resume_mode", default="auto")
    resume_path = c.take("trainer.resume_from_path")
    if mode == "disable":
        c.set("trainer.resume", "never")
    elif mode == "resume_path" and resume_path:
        c.leave("trainer.resume_from_path", resume_path, "a checkpoint of verl; start from a model")
    device = c.take("trainer.device")
    if device in ("cpu", "cuda"):
        c.set("placement.device", device)


def _verl_data(c: Conversion) -> None:
    for key in ("data.train_files", "data.val_files"):
        files = c.take(key)
        if isinstance(files, str) and files.startswith("["):
            files = [part.strip(" '\"") for part in files.strip("[]").split(",")]
        if files is not None:
            c.set(key, ",".join(files) if isinstance(files, list) else files)
    skips = c.take("data.filter_overlong_prompts", default=False)
    truncation = c.take("data.truncation", default="error")
    c.set("data.overlong_prompts", "skip" if skips else "fail")
    if truncation != "error" and not skips:
        c.leave("data.truncation", truncation, "prompts are not cut; data.overlong_prompts=fail")


def _verl_training(c: Conversion) -> None:
    """Schedules and settings whose values have other names."""
    prefix = "actor_rollout_ref.actor."
    strategy = c.take(f"{prefix}strategy", f"{prefix}fsdp_config.strategy")
    is_megatron = any(key.startswith(f"{prefix}megatron.") for key in c.given)
    if strategy == "megatron" or is_megatron:
        c.set("actor.backend", "megatron")
    for role in ("actor", "ref"):
        value = c.take(f"actor_rollout_ref.{role}.megatron.param_offload")
        if value:
            reason = "the megatron back end keeps its weights on the GPUs"
            c.leave(f"actor_rollout_ref.{role}.megatron.param_offload", value, reason)
    warmup = c.take(f"{prefix}optim.lr_warmup_steps", default=-1)
    if isinstance(warmup, int) and warmup > 0:
        batch = c.number("data.train_batch_size", 1024)
        mini_batch = c.number(f"{prefix}ppo_mini_batch_size", 256)
        per_step = max(1, -(-batch // mini_batch) * c.number(f"{prefix}ppo_epochs", 1))
        c.set("actor.warmup_steps", warmup * per_step)
        if per_step > 1:
            c.notes.append(
                f"actor.warmup_steps={warmup * per_step}: verl counts {warmup} steps of the run, "
                f"with {per_step} optimizer steps in each"
            )
    ratio = c.take(f"{prefix}optim.lr_warmup_steps_ratio")
    if ratio:
        reason = "actor.warmup_steps counts optimizer steps; set the share of the run's"
        c.leave(f"{prefix}optim.lr_warmup_steps_ratio", ratio, reason)
    top_p = c.take("actor_rollout_ref.rollout.val_kwargs.top_p")
    if top_p is not None:
        c.set("rollout.val_top_p", top_p)
    samples = c.take("actor_rollout_ref.rollout.val_kwargs.do_sample", default=False)
    temperature = c.take("actor_rollout_ref.rollout.val_kwargs.temperature", default=0)
    c.set("rollout.val_temperature", temperature if samples else 0.0)
    loss = c.take(f"{prefix}policy_loss.loss_mode")
    if loss is not None:
        c.set("algorithm.policy_loss", "gmpo" if loss == "geo_mean" else loss)


def _verl_rewards(c: Conversion) -> None:
    path = c.take("custom_reward_function.path", "reward.custom_reward_function.path")
    name = c.take(
        "custom_reward_function.name",
        "reward.custom_reward_function.name",
        default="compute_score",
    )
    if path:
        c.set("reward.function", f"{Path(str(path)).stem}:{name}")
        c.notes.append(
            f"reward.function: {path} must be in the working directory or on PYTHONPATH, and take "
            "response in place of solution_str: docs/tutorials/reward_and_data.md"
        )
    if c.take("reward_model.enable", "reward.reward_model.enable", default=False):
        model = c.take("reward_model.model.path", "reward.reward_model.model_path")
        if model:
            c.set("reward_model.path", model)
    elif not path:
        c.notes.append(
            "reward.function=gsm8k is the default here; verl chooses by data_source: see "
            "reward.functions"
        )
    for prefix in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
        enabled = c.take(f"{prefix}.enable", default=False)
        length = c.take(f"{prefix}.len")
        penalty = c.take(f"{prefix}.penalty_factor")
        c.take(f"{prefix}.log")
        if enabled and length:
            c.set("reward.overlong_buffer", length)
            c.set("reward.overlong_penalty", 1.0 if penalty is None else penalty)
            c.take("reward_model.reward_manager", "reward.reward_manager.name")
    c.take("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len")


def _verl_groups(c: Conversion) -> None:
    """Dynamic sampling."""
    if c.take("algorithm.filter_groups.enable", default=False):
        batches = c.take("algorithm.filter_groups.max_num_gen_batches", default=10)
        c.set("algorithm.max_gen_batches", batches or 10)
        c.take("algorithm.filter_groups.metric")


VERL_STEPS: tuple[Callable[[Conversion], None], ...] = (
    _verl_neutral,
    _verl_batches,
    _verl_kl,
    _verl_placement,
    _verl_run,
    _verl_data,
    _verl_training,
    _verl_rewards,
    _verl_groups,
)


# --- TRL ------------------------------------------------------------------------------------------


def _trl_neutral(c: Conversion) -> None:
    """Settings that say what is so here anyway, or change only what is written."""
    for key in (
        "use_vllm",
        "bf16",
        "tf32",
        "logging_steps",
        "logging_first_step",
        "log_completions",
        "num_completions_to_print",
        "remove_unused_columns",
        "run_name",
        "processing_class",
        "dataloader_num_workers",
        "ddp_timeout",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_server_timeout",
        "push_to_hub",
        "bias",
        "lora.bias",
        "task_type",
        "lora.task_type",
    ):
        c.take(key)
    for key in ("top_p", "min_p", "repetition_penalty", "top_k"):
        if c.given.get(key) in (1, 1.0, None, 0, -1):
            c.take(key)


def _trl_model_and_data(c: Conversion) -> None:
    model = c.take("model", "model_name_or_path", "model_name")
    if isinstance(model, Named):
        c.leave("model", model, "made by the script; set model.path")
    elif model is not None:
        c.set("model.path", model)
    dtype = c.take("dtype", "torch_dtype")
    if dtype is not None:
        c.set("model.dtype", str(dtype).removeprefix("torch."))
    name = c.take("dataset_name")
    data_config = c.take("dataset_config", "dataset_config_name")
    train = c.take("train_dataset") or (f"{name}:{data_config}" if data_config else name)
    held_out = c.take("eval_dataset")
    c.take("dataset_train_split", "dataset_test_split", "dataset_train_name", "dataset_test_name")
    for key, files in (("data.train_files", train), ("data.val_files", held_out)):
        if isinstance(files, Named):
            c.leave(key, files, "made by the script; write its rows to a .jsonl file and name that")
        elif files is not None:
            c.set(key, files)
            c.notes.append(f"{key}={files}: its rows must have columns of docs/tutorials/"
                           "reward_and_data.md")  # fmt: skip
    functions = c.take("reward_funcs", "reward_functions")
    if functions is not None:
        c.leave(
            "reward_funcs",
            functions,
            "TRL's functions take lists; reward.function takes one sample: wrap it as in "
            "docs/reference/from_trl.md#rewards",
        )


def _trl_lora(c: Conversion) -> None:
    uses = c.take("use_peft", default=None)
    rank = c.take("lora.r", "lora_r")
    alpha = c.take("lora.lora_alpha", "lora_alpha")
    modules = c.take("lora.target_modules", "lora_target_modules")
    if uses is False or (uses is None and rank is None):
        return
    c.set("model.lora_rank", 16 if rank is None else rank)
    c.set("model.lora_alpha", 32 if alpha is None else alpha)
    if modules:
        c.set(
            "model.lora_target_modules", modules if isinstance(modules, str) else ",".join(modules)
        )


def _trl_batches(c: Conversion) -> None:
    """Samples per device become prompts per step and per mini-batch."""
    processes = c.script.processes or 1
    per_device = c.take("per_device_train_batch_size", default=TRL_BATCH_SIZE)
    accumulation = c.take("gradient_accumulation_steps", default=1)
    per_generation = c.take("steps_per_generation", default=accumulation)
    generations = c.number("num_generations", 8)
    samples = c.take("generation_batch_size", default=per_device * processes * per_generation)
    mini_batch = per_device * processes * accumulation
    c.take("per_device_eval_batch_size")
    if c.script.processes is None:
        c.notes.append("the script does not say its number of processes; 1 is assumed")
    for key, count in (
        ("data.train_batch_size", samples),
        ("actor.ppo_mini_batch_size", mini_batch),
    ):
        if count % generations:
            c.notes.append(f"{key}: {count} samples are no whole number of groups of {generations}")
        c.set(key, max(1, count // generations))


def _trl_placement(c: Conversion) -> None:
    processes = c.script.processes or 1
    mode = c.take("vllm_mode", default="server")
    width = c.take("vllm_tensor_parallel_size", default=1)
    c.set("rollout.tensor_parallel_size", width)
    if mode == "colocate":
        c.ours["placement.pools"] = {"all": [processes]}
        c.ours["placement.roles"] = {"rollout": "all", "actor": "all"}
        c.set("pipeline.staleness", 0)
    else:
        c.ours["placement.pools"] = {"rollout": [width], "actor": [processes]}
        c.notes.append(
            "placement.pools: the engine has GPUs of its own, and pipeline.staleness=1 generates "
            "while it trains; TRL waits: pipeline.staleness=0"
        )


def _trl_training(c: Conversion) -> None:
    betas = [c.take("adam_beta1"), c.take("adam_beta2")]
    if any(beta is not None for beta in betas):
        defaults = KEYS["actor.betas"].default
        c.set("actor.betas", [default if beta is None else beta
                              for beta, default in zip(betas, defaults, strict=True)])  # fmt: skip
    _trl_optimizer(c, c.take("optim"))
    schedule = c.take("lr_scheduler_type")
    if schedule is not None:
        name = "constant" if schedule == "constant_with_warmup" else schedule
        try:
            c.set("actor.lr_schedule", name)
        except NotTranslated as error:
            c.leave("lr_scheduler_type", schedule, str(error))


def _trl_optimizer(c: Conversion, optimizer: Any) -> None:
    if optimizer is not None:
        known = {"adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit"}
        is_adamw = str(optimizer).startswith(("adamw_torch", "adamw_hf"))
        if optimizer not in known and not is_adamw:
            c.leave("optim", optimizer, "actor.optimizer has adamw, adamw_8bit and muon")
        else:
            c.set("actor.optimizer", known.get(optimizer, "adamw"))


def _trl_objective(c: Conversion) -> None:
    beta = c.take("beta")
    if beta:
        c.set("algorithm.kl_coef", beta)
    scale = c.take("scale_rewards")
    if scale in (True, False):
        c.set("algorithm.norm_adv_by_std", bool(scale))
    elif scale is not None:
        c.given["scale_rewards"] = scale
    if c.given.get("loss_type") in ("cispo", "sapo"):
        c.set("algorithm.policy_loss", c.take("loss_type"))
    if c.given.get("importance_sampling_level") == "token":
        c.take("importance_sampling_level")
    if c.take("vllm_importance_sampling_correction") is False:
        c.take("vllm_importance_sampling_mode", "vllm_importance_sampling_cap")


def _trl_run(c: Conversion) -> None:
    """Lengths and intervals. TRL counts optimizer steps, this program batches of prompts."""
    mini_batches = -(-c.ours["data.train_batch_size"] // c.ours["actor.ppo_mini_batch_size"])
    per_step = mini_batches * c.number("num_iterations", 1)
    steps = c.take("max_steps")
    has_steps = isinstance(steps, int) and steps > 0
    epochs = c.take("num_train_epochs", default=3)
    _set_length(c, -(-steps // per_step) if has_steps else None, epochs)
    for strategy, freq, default, key in (
        ("eval_strategy", "eval_steps", None, "trainer.test_freq"),
        ("save_strategy", "save_steps", 500, "trainer.save_freq"),
    ):
        kind = c.take(strategy)
        every = c.take(freq, default=default)
        if kind == "epoch":
            c.leave(strategy, kind, f"{key} counts steps")
        elif kind != "no" and isinstance(every, int):
            c.set(key, max(1, every // per_step))
    if per_step > 1:
        c.notes.append(
            f"trainer: TRL counts optimizer steps, of which there are {per_step} in a step here"
        )
    _set_logging(c, c.take("report_to", default="none"), c.take("wandb_project", "project"))
    ratio = c.take("warmup_ratio")
    if ratio and has_steps:
        c.set("actor.warmup_steps", round(ratio * steps))
    elif ratio:
        c.leave("warmup_ratio", ratio, "actor.warmup_steps counts optimizer steps")
    if isinstance(c.given.get("resume_from_checkpoint"), bool):
        c.take("resume_from_checkpoint")


TRL_STEPS: tuple[Callable[[Conversion], None], ...] = (
    _trl_neutral,
    _trl_model_and_data,
    _trl_lora,
    _trl_batches,
    _trl_placement,
    _trl_training,
    _trl_objective,
    _trl_run,
)


# --- both -----------------------------------------------------------------------------------------


def _set_length(c: Conversion, steps: Any, epochs: Any) -> None:
    """One of steps and epochs; steps count where a script has both."""
    if steps is not None:
        c.set("trainer.total_steps", steps)
        return
    whole = max(1, round(epochs)) if isinstance(epochs, int | float) else epochs
    c.set("trainer.total_epochs", whole)


def _set_logging(c: Conversion, loggers: Any, project: Any) -> None:
    names = loggers if isinstance(loggers, list) else str(loggers).strip("[]'").split(",")
    names = [str(name).strip(" '\"") for name in names]
    c.set("logging.tensorboard", "tensorboard" in names or "all" in names)
    c.set("logging.wandb", "wandb" in names or "all" in names)
    if project:
        c.set("logging.wandb_project", project)
    for name in set(names) - {"console", "tensorboard", "wandb", "none", "all", ""}:
        c.leave("logger", name, "there are the console, TensorBoard, W&B and Prometheus")


def _fit(c: Conversion) -> None:
    """What the keys need of one another: roles of the objective, and values that are missing."""
    ours = c.ours
    pools = ours["placement.pools"]
    actor_pool = "all" if "all" in pools else "actor"
    roles = dict(ours.get("placement.roles") or {"rollout": "rollout", "actor": "actor"})
    if ours.get("algorithm.kl_coef"):
        roles["ref"] = actor_pool
    if ours.get("algorithm.adv_estimator") == "gae":
        roles["critic"] = actor_pool
    if ours.get("reward_model.path"):
        roles["reward_model"] = actor_pool
    if ours.get("algorithm.policy_loss", "vanilla") not in LOSSES_WITH_DUAL_CLIP:
        ours.pop("algorithm.clip_ratio_c", None)
    ours.setdefault("placement.device", "cuda")
    ours["placement.roles"] = roles
    batch, mini_batch = ours.get("data.train_batch_size"), ours.get("actor.ppo_mini_batch_size")
    if batch and mini_batch and mini_batch > batch:
        ours["actor.ppo_mini_batch_size"] = batch
        c.notes.append(
            f"actor.ppo_mini_batch_size={batch}: {mini_batch} is more than a whole batch"
        )
    per_node = min(gpus for sizes in pools.values() for gpus in sizes)
    if ours.get("rollout.tensor_parallel_size", 1) > per_node:
        c.notes.append("rollout.tensor_parallel_size: lower it, or raise the pool of the rollout")
    for key, placeholder in MISSING.items():
        if not ours.get(key):
            ours[key] = placeholder
            c.notes.append(f"{key}: the script does not say; put yours in place of {placeholder}")


def config_text(c: Conversion) -> str:
    """The config as YAML."""
    tree: dict[str, dict[str, Any]] = {}
    order = {key: i for i, key in enumerate(KEYS)}
    for dotted in sorted(c.ours, key=lambda key: order[".".join(key.split(".")[:2])]):
        section, name, *inner = dotted.split(".")
        value = _plain(c.ours[dotted])
        if inner:
            tree.setdefault(section, {}).setdefault(name, {})[".".join(inner)] = value
        elif value != KEYS[dotted].default:
            tree.setdefault(section, {})[name] = value
    return yaml.dump(tree, None, _Dumper, sort_keys=False, width=10**6)


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line."""


_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, True)
)


def _plain(value: Any) -> Any:
    """A value as YAML writes it; an environment variable that is not set here gets its name as
    its default, so that the file loads."""
    if not isinstance(value, str):
        return value
    return re.sub(r"\$\{oc\.env:(\w+)\}", r"${oc.env:\1,\1}", str(value))


def faults_of(text: str) -> list[str]:
    """What is wrong with a converted config, as the program's own checks say it."""
    try:
        cfg = load_config_text(text)
        with noting_what_is_missing() as missing:
            validate(cfg, machine=False)
    except ConfigError as error:
        return [str(error)]
    return missing


def main(argv: list[str]) -> int:
    """Run the command with these arguments; returns its exit code. Raises ConfigError."""
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        asks_for_help = argv[:1] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if asks_for_help else sys.stderr)
        return 0 if asks_for_help else 2
    conversion = convert(argv[0])
    text = config_text(conversion)
    trainer = conversion.script.trainer
    page = "from_verl" if trainer == VERL else "from_trl"
    print(f"# {argv[0]}, a script of {trainer}; see docs/reference/{page}.md")
    print(text, end="")
    lists = (
        ("not translated", [f"{key}: {reason}" for key, reason in conversion.left.items()]),
        ("look at", conversion.notes),
        ("to do before it runs here", faults_of(text)),
    )
    for title, lines in lists:
        if lines:
            print(f"\n# {title}:")
            for line in lines:
                print(f"#   {' '.join(line.split())}")
    return 0
