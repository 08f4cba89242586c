"""What a valid config must hold beyond types and ranges: keys that fit each other, files, and the machine.

Each check is one function that raises a `ConfigError` of one line at the first fault. Cheap checks come first.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from one_step_off.config import Config, ConfigError

ROLES = ("rollout", "actor", "ref")
TINY_MODELS = ("tiny:qwen2", "tiny:qwen3")
FILE_ENDINGS = (".jsonl", ".json", ".parquet")
MOST_PER_NODE = 1024
BUILT_IN_REWARDS = ("gsm8k", "math")
GENERATORS = ("word_problems", "addition", "gsm_symbolic")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_DATA = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")

# Fields of SamplingParams that only say where a sample ends or how it is written out, and what each takes. Anything
# else might change the distribution that is sampled from, which the trainer does not know of, so nothing else passes.
SAMPLING_ALLOWED = {
    "stop": "a text or a list of texts",
    "stop_token_ids": "a list of whole numbers",
    "ignore_eos": "true or false",
    "include_stop_str_in_output": "true or false",
    "skip_special_tokens": "true or false",
    "spaces_between_special_tokens": "true or false",
}
# Fields of SamplingParams that belong to another key, or that the program sets itself.
SAMPLING_OWNED = {
    "temperature": "use rollout.temperature",
    "n": "use rollout.n",
    "max_tokens": "use data.max_response_length",
    "seed": "use trainer.seed and rollout.seed_samples",
    "logprobs": "the program sets it; remove it",
    "flat_logprobs": "the program sets it; remove it",
    "prompt_logprobs": "the program sets it; remove it",
    "output_kind": "the program sets it; remove it",
    "detokenize": "the program sets it; remove it",
}
# Fields that change the distribution that is sampled from: named, so that their message says why.
SAMPLING_BREAKS = (
    "top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias min_tokens logits_processors "
    "bad_words allowed_token_ids structured_outputs guided_decoding thinking_token_budget watermarking extra_args"
).split()

# Fields of AsyncEngineArgs that belong to another key, or that the program relies on.
ENGINE_OWNED = {
    "model": "use model.path",
    "dtype": "use model.dtype",
    "trust_remote_code": "use model.trust_remote_code",
    "tensor_parallel_size": "use rollout.tensor_parallel_size",
    "gpu_memory_utilization": "use rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "use rollout.kv_cache_mb",
    "seed": "use trainer.seed",
    "pipeline_parallel_size": "replicas are tensor-parallel only; remove it",
    "prefill_context_parallel_size": "replicas are tensor-parallel only; remove it",
    "decode_context_parallel_size": "replicas are tensor-parallel only; remove it",
    "nnodes": "a replica lives on one node; remove it",
    "device_ids": "Ray gives each replica its GPUs; remove it",
    "distributed_executor_backend": "the program sets it; remove it",
    "logprobs_mode": "the trainer needs processed_logprobs; remove it",
    "max_logprobs": "the program sets it; remove it",
    "weight_transfer_config": "the weight sync brings its own; remove it",
    "worker_extension_cls": "the weight sync brings its own; remove it",
    "worker_cls": "the weight sync brings its own; remove it",
}
_MORE_REPLICAS = "give placement.pools more GPUs instead, each tensor_parallel_size of them is a replica"
_OTHER_DISTRIBUTION = "the engine's log-probs would no longer be the policy's; remove it"
_OTHER_MODEL = "the trainer would not follow, and the two would hold different models; remove it"
_NO_DRAFTS = "a drafter's weights would stay as they were while the policy's move; remove it"
_NOT_SYNCED = "the weight sync writes the model's own parameters in place, and would miss these; remove it"
_STALE_CACHE = "values cached with older weights would outlive a weight sync; remove it"
# Fields that break what the program relies on, and the values of each that do no harm.
ENGINE_BREAKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": ((None, []), _OTHER_DISTRIBUTION),
    "watermark_config": ((None,), _OTHER_DISTRIBUTION),
    "diffusion_config": ((None,), _OTHER_DISTRIBUTION),
    "kv_cache_dtype": (("auto",), "a cache of lower precision moves the engine's log-probs off the policy's; use auto"),
    "quantization": ((None,), "the weight sync sends plain weights, which quantised layers cannot take; remove it"),
    "quantization_config": (
        (None, {}),
        "the weight sync sends plain weights, which quantised layers cannot take; remove it",
    ),
    "enable_lora": ((False,), "adapters stay out of the weight sync; remove it"),
    "hf_overrides": ((None, {}), _OTHER_MODEL),
    "hf_config_path": ((None,), _OTHER_MODEL),
    "model_class_overrides": ((None, {}), _OTHER_MODEL),
    "model_weights": ((None, ""), _OTHER_MODEL),
    "revision": ((None,), _OTHER_MODEL),
    "code_revision": ((None,), _OTHER_MODEL),
    "runner": (("auto", "generate"), "the replicas generate; remove it"),
    "convert": (("auto", "none"), "the replicas generate; remove it"),
    "pooler_config": ((None,), "the replicas generate; remove it"),
    "speculative_config": ((None,), _NO_DRAFTS),
    "spec_method": ((None,), _NO_DRAFTS),
    "spec_model": ((None,), _NO_DRAFTS),
    "spec_tokens": ((None,), _NO_DRAFTS),
    "cpu_offload_gb": ((0,), _NOT_SYNCED),
    "offload_group_size": ((0,), _NOT_SYNCED),
    "enable_eplb": ((False,), _NOT_SYNCED),
    "kv_transfer_config": ((None,), _STALE_CACHE),
    "ec_transfer_config": ((None,), _STALE_CACHE),
    "kv_offloading_size": ((None,), _STALE_CACHE),
}
# On CPU a prompt must be computed in one piece: a seeded request whose prompt is split kills vLLM's CPU engine.
_SPLIT_PROMPTS = "a prompt computed in parts kills vLLM's CPU engine; remove it"
ENGINE_BREAKS_ON_CPU: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_chunked_prefill": ((False,), _SPLIT_PROMPTS),
    "long_prefill_token_threshold": ((0,), _SPLIT_PROMPTS),
}


def show(value: Any) -> str:
    """A value on one line, as the user would write it, and never long."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, (dict, list)):
        text = repr(value).replace("'", "")
    else:
        text = str(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


def check_combinations(cfg: Config, device: str, num_gpus: int) -> None:
    """Everything that no single key shows. `device` is resolved; `num_gpus` counts this machine's.

    Raises:
        ConfigError: the first fault found.
    """
    _check_required(cfg)
    _check_steps(cfg)
    _check_pools(cfg)
    _check_roles(cfg)
    _check_batch(cfg)
    _check_algorithm(cfg)
    _check_device(cfg, device)
    _check_sampling(cfg)
    _check_engine(cfg, device)
    _check_model(cfg.model.path)
    _check_data("data.train_files", cfg.data.train_files)
    _check_data("data.val_files", cfg.data.val_files)
    for name, files in cfg.data.val_sets.items():
        if name == "val" or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ConfigError(
                f"data.val_sets.{show(name)}: a name has letters, digits, _ . - and is not val; rename it"
            )
        if not files.strip():
            raise ConfigError(f"data.val_sets.{name}='': give its files, or leave it out")
        _check_data(f"data.val_sets.{name}", files)
    _check_reward(cfg)
    _check_output_dir(cfg.trainer.output_dir)
    _check_resume(cfg.trainer.resume)
    _check_logging(cfg)
    _check_machine(cfg, device, num_gpus)


def _check_required(cfg: Config) -> None:
    if not cfg.model.path.strip():
        raise ConfigError("model.path: not set; give a model directory, a hub id, or tiny:qwen2 (and config=FILE?)")
    if not [part for part in cfg.data.train_files.split(",") if part.strip()]:
        raise ConfigError("data.train_files: not set; give files, a hub id, or generator:word_problems")
    for key, value in (("actor.fsdp_size", cfg.actor.fsdp_size), ("data.val_size", cfg.data.val_size)):
        if value == 0:
            raise ConfigError(f"{key}=0: must be at least 1, or -1 for all")
    if cfg.trainer.test_freq == 0:
        raise ConfigError("trainer.test_freq=0: must be at least 1, or -1 for no evaluation in between")
    if cfg.trainer.save_freq == 0:
        raise ConfigError("trainer.save_freq=0: must be at least 1, or -1 for no checkpoints")
    evaluated = bool(cfg.data.val_files.strip() or cfg.data.val_sets)
    if cfg.trainer.test_freq > 0 and not evaluated:
        raise ConfigError(f"trainer.test_freq={cfg.trainer.test_freq}: nothing to evaluate on; set data.val_files")
    if cfg.trainer.val_only and not evaluated:
        raise ConfigError("trainer.val_only=true: nothing to evaluate on; set data.val_files")
    if cfg.rollout.val_n > 1 and cfg.rollout.val_temperature == 0:
        raise ConfigError(
            f"rollout.val_n={cfg.rollout.val_n}: greedy samples are all alike; set rollout.val_temperature above 0"
        )
    betas = cfg.actor.betas
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        raise ConfigError(
            f"actor.betas={show(betas)}: must be two numbers, each at least 0 and below 1, as [0.9, 0.999]"
        )


def _check_steps(cfg: Config) -> None:
    steps, epochs = cfg.trainer.total_steps, cfg.trainer.total_epochs
    if steps is None and epochs is None:
        raise ConfigError("trainer.total_steps: not set, nor is trainer.total_epochs; set one of them")
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"trainer.total_steps={steps}: trainer.total_epochs={epochs} is set too; set one of them to null"
        )


def _check_pools(cfg: Config) -> None:
    pools = cfg.placement.pools
    if not pools:
        raise ConfigError("placement.pools={}: no pools; write {rollout: [1], actor: [1]}")
    for name, shape in pools.items():
        if not shape or not all(1 <= n <= MOST_PER_NODE for n in shape):
            raise ConfigError(
                f"placement.pools.{show(name)}={show(shape)}: must list the "
                f"processes (GPUs) of each node, each from 1 to {MOST_PER_NODE}, as [4, 4]"
            )


def _check_roles(cfg: Config) -> None:
    pools, roles = cfg.placement.pools, cfg.placement.roles
    for role, pool in roles.items():
        if role not in ROLES:
            raise ConfigError(
                f"placement.roles.{show(role)}={show(pool)}: unknown role; the roles are {', '.join(ROLES)}"
            )
        if pool not in pools:
            raise ConfigError(
                f"placement.roles.{role}={show(pool)}: no such pool; placement.pools has {', '.join(pools)}"
            )
    for role in ("rollout", "actor"):
        if role not in roles:
            raise ConfigError(f"placement.roles={show(dict(roles))}: the role {role} has no pool; add {role}: POOL")
    for pool in pools:
        if pool not in roles.values():
            raise ConfigError(
                f"placement.pools.{pool}={show(pools[pool])}: no role uses this pool; remove it or name it in placement.roles"
            )
    shared = [r for r in roles if r != "rollout" and roles[r] == roles["rollout"]]
    if shared:
        why = "one step off needs them at the same time" if cfg.pipeline.staleness else "sharing is not supported yet"
        raise ConfigError(
            f"placement.roles.{shared[0]}={roles['rollout']}: the role rollout is in this pool too, but {why}; "
            "give them pools of their own"
        )


def _check_batch(cfg: Config) -> None:
    batch, mini = cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size
    if batch % mini:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={mini}: does not divide data.train_batch_size={batch}; use {_divisor(batch, mini)}"
        )
    ranks = sum(cfg.placement.pools[cfg.placement.roles["actor"]])
    samples = mini * cfg.rollout.n
    if samples < ranks:
        raise ConfigError(
            f"actor.ppo_mini_batch_size={mini}: with rollout.n={cfg.rollout.n} a mini-batch has {samples} samples for "
            f"{ranks} trainer ranks; use at least {-(-ranks // cfg.rollout.n)} prompts"
        )
    if cfg.actor.fsdp_size > 0 and ranks % cfg.actor.fsdp_size:
        raise ConfigError(
            f"actor.fsdp_size={cfg.actor.fsdp_size}: does not divide the {ranks} ranks of the actor; "
            f"use {_divisor(ranks, cfg.actor.fsdp_size)}, or -1 for all"
        )
    pool, width = cfg.placement.roles["rollout"], cfg.rollout.tensor_parallel_size
    for node, gpus in enumerate(cfg.placement.pools[pool]):
        if gpus % width:
            raise ConfigError(
                f"rollout.tensor_parallel_size={width}: does not divide the {gpus} GPUs of node {node} in "
                f"placement.pools.{pool}={show(cfg.placement.pools[pool])}; use {_divisor(gpus, width)}, or change the pool"
            )


def _divisor(whole: int, near: int) -> int:
    """The largest divisor of `whole` that is not above `near`."""
    pairs = ((d, whole // d) for d in range(1, math.isqrt(whole) + 1) if whole % d == 0)
    return max(d for pair in pairs for d in pair if d <= near)


def _check_algorithm(cfg: Config) -> None:
    a = cfg.algorithm
    if a.adv_estimator == "grpo" and cfg.rollout.n == 1:
        raise ConfigError(
            "rollout.n=1: GRPO compares the samples of one prompt, so one alone teaches nothing; use at least 2"
        )
    if a.kl_coef > 0 and a.kl_estimator == "k1":
        raise ConfigError(
            "algorithm.kl_estimator=k1: estimates the value of the KL, but as a loss its gradient has mean zero and only "
            "adds noise; use k2 or k3"
        )
    has_ref = "ref" in cfg.placement.roles
    if a.kl_coef > 0 and not has_ref:
        raise ConfigError(f"algorithm.kl_coef={a.kl_coef:g}: needs the role ref; set placement.roles.ref=actor")
    if has_ref and a.kl_coef == 0:
        raise ConfigError(
            "placement.roles.ref: nothing uses it while algorithm.kl_coef=0; remove the role or raise kl_coef"
        )
    if a.rollout_correction != "none" and a.old_log_probs == "rollout":
        raise ConfigError(
            f"algorithm.rollout_correction={a.rollout_correction}: would weight twice with old_log_probs=rollout; "
            "set algorithm.old_log_probs=recompute, or rollout_correction=none"
        )


def _check_device(cfg: Config, device: str) -> None:
    if device != "cpu":
        return
    for name in ("param_offload", "optimizer_offload"):
        if getattr(cfg.actor, name):
            raise ConfigError(f"actor.{name}=true: moves data off GPUs, and this run is on CPU; set it to false")
    if cfg.model.attn_implementation == "flash_attention_2":
        raise ConfigError(
            "model.attn_implementation=flash_attention_2: needs GPUs, and this run is on CPU; use auto or sdpa"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]}?" if close else ""


def _check_sampling(cfg: Config) -> None:
    for name, value in cfg.rollout.sampling_kwargs.items():
        where = f"rollout.sampling_kwargs.{show(name)}={show(value)}"
        if name in SAMPLING_OWNED:
            raise ConfigError(f"{where}: {SAMPLING_OWNED[name]}")
        if name in SAMPLING_BREAKS:
            extra = f"; rollout.{name} stays at its default" if name in ("top_p", "top_k") else ""
            raise ConfigError(f"{where}: the engine's log-probs would no longer be the policy's{extra}; remove it")
        if name not in SAMPLING_ALLOWED:
            mend = _nearest(str(name), SAMPLING_ALLOWED) or f"allowed are {', '.join(SAMPLING_ALLOWED)}"
            raise ConfigError(f"{where}: not a sampling field that a run may set; {mend}")
        if not _fits(value, SAMPLING_ALLOWED[name]):
            raise ConfigError(f"{where}: must be {SAMPLING_ALLOWED[name]}")


def _fits(value: Any, kind: str) -> bool:
    """Whether a value is of one of the kinds in SAMPLING_ALLOWED."""
    if kind == "true or false":
        return isinstance(value, bool)
    if kind == "a list of whole numbers":
        return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(v, str) and v for v in texts)


def _check_engine(cfg: Config, device: str) -> None:
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    breaks = ENGINE_BREAKS | (ENGINE_BREAKS_ON_CPU if device == "cpu" else {})
    for name, value in cfg.rollout.engine_kwargs.items():
        where = f"rollout.engine_kwargs.{show(name)}={show(value)}"
        if name in ENGINE_OWNED:
            raise ConfigError(f"{where}: {ENGINE_OWNED[name]}")
        if str(name).startswith("data_parallel_"):
            raise ConfigError(f"{where}: {_MORE_REPLICAS}")
        if name in breaks:
            harmless, why = breaks[name]
            if value not in harmless:
                raise ConfigError(f"{where}: {why}")
        at_least = name == "max_model_len" or (name == "max_num_batched_tokens" and device == "cpu")
        if at_least and (not isinstance(value, int) or value < longest):
            raise ConfigError(
                f"{where}: prompt and response may take {longest} tokens; remove it, or use at least {longest}"
            )


def check_engine_names(cfg: Config, names: Iterable[str]) -> None:
    """Whether `rollout.engine_kwargs` are fields of the installed vLLM. Only it knows them, and its import takes long.

    Args:
        names: the fields of AsyncEngineArgs.

    Raises:
        ConfigError: a name that is none of them.
    """
    # Fields with an underscore are vLLM's own bookkeeping.
    known = {name for name in names if not name.startswith("_")}
    for name, value in cfg.rollout.engine_kwargs.items():
        if name not in known:
            mend = _nearest(str(name), sorted(known)) or "remove it"
            raise ConfigError(
                f"rollout.engine_kwargs.{show(name)}={show(value)}: the installed vLLM has no such field; {mend}"
            )


def _check_model(path: str) -> None:
    if path.startswith("tiny"):
        if path not in TINY_MODELS:
            raise ConfigError(f"model.path={show(path)}: unknown tiny model; use {' or '.join(TINY_MODELS)}")
        return
    if "\0" in path:
        raise ConfigError(f"model.path={show(path)}: holds a NUL character; check the path")
    full = os.path.expanduser(path)
    if not (path[0] in "/.~" or path.count("/") > 1 or os.path.exists(full)):
        if not _HUB_ID.fullmatch(path):
            raise ConfigError(
                f"model.path={show(path)}: neither a directory that exists nor a hub id as Qwen/Qwen2.5-0.5B-Instruct; "
                "check the path"
            )
        return
    if not os.path.isdir(full):
        raise ConfigError(f"model.path={show(path)}: no such directory; give a directory with config.json, or a hub id")
    try:
        names = os.listdir(full)
    except OSError as e:
        raise ConfigError(f"model.path={show(path)}: cannot be read: {e.strerror}; check its permissions") from None
    wanted = {
        "config.json": "config.json" in names,
        "a tokenizer (tokenizer.json, tokenizer.model or vocab.json)": bool(
            {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(names)
        ),
        "weights (*.safetensors or *.bin)": any(n.endswith((".safetensors", ".bin", ".gguf")) for n in names),
    }
    for what, there in wanted.items():
        if not there:
            raise ConfigError(
                f"model.path={show(path)}: the directory has no {what}; give one saved by save_pretrained"
            )


def _check_data(key: str, spec: str) -> None:
    for source in (part.strip() for part in spec.split(",")):
        if not source:
            continue
        where = f"{key}={show(source)}"
        if source.startswith("generator:"):
            if source.removeprefix("generator:") not in GENERATORS:
                raise ConfigError(f"{where}: no such generator; use generator:{' or generator:'.join(GENERATORS)}")
        elif "\0" in source:
            raise ConfigError(f"{where}: holds a NUL character; check the path")
        elif source.endswith(FILE_ENDINGS):
            _check_file(where, source)
        elif os.path.exists(source):
            raise ConfigError(
                f"{where}: not a {', '.join(FILE_ENDINGS)} file; give such a file, or several with commas"
            )
        elif not _HUB_DATA.fullmatch(source):
            raise ConfigError(
                f"{where}: neither a {', '.join(FILE_ENDINGS)} file, nor generator:word_problems, nor a hub id as "
                "openai/gsm8k; check the path"
            )


def _check_file(where: str, path: str) -> None:
    try:
        if not os.path.isfile(path):
            raise ConfigError(f"{where}: no such file (working directory {os.getcwd()}); check the path")
        with open(path, "rb") as f:
            if not f.read(1):
                raise ConfigError(f"{where}: the file is empty; write at least one row")
    except OSError as e:
        raise ConfigError(f"{where}: cannot be read: {e.strerror}; check its permissions") from None


def _check_reward(cfg: Config) -> None:
    spec = cfg.reward.function
    if spec in BUILT_IN_REWARDS:
        if cfg.reward.kwargs:
            raise ConfigError(
                f"reward.kwargs={show(dict(cfg.reward.kwargs))}: the built-in {spec} takes none; remove them"
            )
        return
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", spec):
        raise ConfigError(f"reward.function={show(spec)}: must be gsm8k, math, or your own as module:function")
    top = spec.partition(":")[0].partition(".")[0]
    if os.getcwd() not in sys.path and "" not in sys.path:
        # `python -m` finds modules beside the user's config; so must the installed program.
        sys.path.append(os.getcwd())
    try:
        found = top in sys.modules or importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise ConfigError(f"reward.function={show(spec)}: no module {top}; start in its folder or set PYTHONPATH")


def _check_output_dir(path: str) -> None:
    where = f"trainer.output_dir={show(path)}"
    if not path.strip() or "\0" in path:
        raise ConfigError(f"{where}: must name a folder, as outputs/run")
    full = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(full) and not os.path.isdir(full):
        raise ConfigError(f"{where}: a file of that name exists; name a folder")
    parent = full
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        raise ConfigError(f"{where}: {parent} is not a folder; name a path that can be made")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {parent} cannot be written to; name another folder or change its permissions")
    too_long = [part for part in full.split("/") if len(os.fsencode(part)) > 255]
    if too_long:
        raise ConfigError(f"{where}: a folder's name may have 255 bytes; shorten it")


def _check_logging(cfg: Config) -> None:
    for name in ("tensorboard", "wandb"):
        if getattr(cfg.logging, name) and not _installed(name):
            raise ConfigError(
                f"logging.{name}=true: the package {name} is missing; pip install {name}, or set it to false"
            )
    if cfg.logging.wandb and not cfg.logging.wandb_project.strip():
        raise ConfigError("logging.wandb_project: empty; name a project")


def _installed(package: str) -> bool:
    """Whether a package can be imported, without doing so. A mere folder of that name (W&B makes wandb/) is none."""
    found = sys.modules.get(package) or importlib.util.find_spec(package)
    return getattr(found, "origin", None) is not None or getattr(found, "__file__", None) is not None


def _check_resume(wish: str) -> None:
    if wish in ("auto", "never"):
        return
    where = f"trainer.resume={show(wish)}"
    if not wish or not os.path.isdir(wish):
        mend = _nearest(wish, ("auto", "never")) or "use auto, never, or OUTPUT_DIR/checkpoints/step_000050"
        raise ConfigError(f"{where}: no such folder; {mend}")
    if not os.path.isfile(os.path.join(wish, "state.json")):
        raise ConfigError(
            f"{where}: no checkpoint there (state.json is missing); name a folder as OUTPUT_DIR/checkpoints/step_000050"
        )


def _check_machine(cfg: Config, device: str, num_gpus: int) -> None:
    """What a lone machine has. In a cluster the other nodes are unknown here; placement checks them later."""
    pools = cfg.placement.pools
    if os.environ.get("RAY_ADDRESS"):
        return
    if device == "cuda" and num_gpus == 0:
        raise ConfigError(
            "placement.device=cuda: this machine has no GPU; use cpu or auto, or set RAY_ADDRESS to a cluster"
        )
    for name, shape in pools.items():
        if len(shape) > 1:
            raise ConfigError(
                f"placement.pools.{show(name)}={show(list(shape))}: {len(shape)} nodes, but this machine is one; "
                f"use [{sum(shape)}], or set RAY_ADDRESS to a cluster"
            )
    wanted = sum(sum(shape) for shape in pools.values())
    if device == "cuda" and wanted > num_gpus:
        each = ", ".join(f"{name}: {show(list(shape))}" for name, shape in pools.items())
        raise ConfigError(
            f"placement.pools={{{each}}}: {wanted} GPUs, but this machine has {num_gpus}; make the pools smaller, "
            "or set RAY_ADDRESS to a cluster"
        )
