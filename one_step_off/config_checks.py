"""What a valid config must hold beyond types and ranges: keys that fit each other, files, and the machine.

Each group of checks yields the faults that it finds, one line each; only the first is told, so that a check may rely on
those before it. What only the contents of files tell, `launch.prepare` checks.
"""

import difflib
import importlib.util
import itertools
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from one_step_off.advantages import ADVANTAGE_ESTIMATORS, NEEDS
from one_step_off.config import Config, ConfigError, settings_of, shares_of
from one_step_off.cores import count_gpus
from one_step_off.policy_losses import POLICY_LOSSES

ROLES = ("rollout", "actor", "ref", "critic", "reward_model")
TINY_MODELS = ("tiny:qwen2", "tiny:qwen3", "tiny:tools")
FILE_ENDINGS = (".jsonl", ".json", ".parquet")
BUILT_IN_REWARDS = ("gsm8k", "math")
BUILT_IN_LOOPS = ("single_turn", "tool", "retry_with_feedback", "environment")
BUILT_IN_TOOLS = ("calculator", "python")
YOURS = "module:function, of a module in this folder or in PYTHONPATH"
GENERATORS = ("word_problems", "addition", "products", "puzzles")
MODEL_FILES = (("config.json",), ("tokenizer.json", "tokenizer.model", "vocab.json"), (".safetensors", ".bin"))

MODEL_PARALLEL = ("tensor", "pipeline", "context", "expert")

# Fields of SamplingParams that only say where a sample ends or how it is written out, and what each takes. Anything
# else might change the distribution that is sampled from, which the trainer does not know of, so nothing else passes.
_FLAG = "true or false", lambda value: isinstance(value, bool)
_IDS = "a list of whole numbers", lambda value: isinstance(value, list) and all(type(v) is int for v in value)
_TEXT = "a text or a list of texts", lambda v: all(t and type(t) is str for t in (v if isinstance(v, list) else [v]))
_FLAGS = "ignore_eos include_stop_str_in_output skip_special_tokens spaces_between_special_tokens".split()
SAMPLING_ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {"stop": _TEXT, "stop_token_ids": _IDS}
SAMPLING_ALLOWED |= dict.fromkeys(_FLAGS, _FLAG)
# Fields of SamplingParams and of AsyncEngineArgs that belong to keys of ours, beside those of the same name.
OWNED = {"model": "model.path", "kv_cache_memory_bytes": "rollout.kv_cache_mb", "seed": "trainer.seed"}
OWNED["max_tokens"] = "data.max_response_length"
OWNED["data_parallel_size"] = "placement.pools: each tensor_parallel_size of its GPUs is a replica"
# Fields of AsyncEngineArgs that are refused whatever their value, and those that are unless they are off: with these the
# engine's log-probs would not be the policy's, it would hold another model, or parts of one (adapters, drafters,
# offloaded or quantised weights, values cached with older ones) that the weight sync does not write.
ENGINE_SET = """pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size nnodes device_ids
    distributed_executor_backend logprobs_mode max_logprobs weight_transfer_config worker_extension_cls worker_cls"""
ENGINE_BREAKS = """logits_processors watermark_config diffusion_config kv_cache_dtype hf_overrides hf_config_path revision
    model_class_overrides model_weights code_revision quantization quantization_config enable_lora cpu_offload_gb
    offload_group_size enable_eplb speculative_config spec_method spec_model spec_tokens kv_transfer_config
    ec_transfer_config kv_offloading_size"""
# A seeded request whose prompt is split kills vLLM's CPU engine.
ENGINE_BREAKS_ON_CPU = "enable_chunked_prefill long_prefill_token_threshold"


def show(value: Any) -> str:
    """A value on one line, as the user would write it, and never long."""
    text = str(value).replace("'", "") if isinstance(value, (dict, list)) else str(value)
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


_SECRET = re.compile(r"(://)[^/@\s]+@|([?&][\w.-]*(?:token|key|secret|password|sig)[\w.-]*=)[^&#\s'\"]+", re.I)


def masked(text: str) -> str:
    """A text without its secrets, each *** instead: of URLs the part before an @ and ?token=... and the like, and what
    environment variables named as secrets hold."""
    for name, value in os.environ.items():
        if len(value) > 7 and re.search("(TOKEN|API_?KEY|SECRET|PASSWORD)$", name):
            text = text.replace(value, "***")
    return _SECRET.sub(lambda m: f"{m[1]}***@" if m[1] else f"{m[2]}***", text)


def nearest(word: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """ "did you mean ...?" with the most similar name, or `otherwise` where none is similar."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else otherwise


def resolved_device(cfg: Config, num_gpus: int | None = None) -> str:
    """ "cuda" or "cpu". `num_gpus` None: counted here, and only where `placement.device` is auto."""
    if cfg.placement.device != "auto":
        return cfg.placement.device
    return "cuda" if (count_gpus() if num_gpus is None else num_gpus) > 0 else "cpu"


def validate(cfg: Config, num_gpus: int | None = None) -> None:
    """Check what belongs together, what the config names on disk, and what the machine must have. `num_gpus`: of this
    machine; None: counted here, where it matters. Raises ConfigError: the first fault found."""
    if num_gpus is None:
        num_gpus = 0 if cfg.placement.device == "cpu" else count_gpus()
    device = resolved_device(cfg, num_gpus)
    groups = [_run(cfg), _placement(cfg), _layouts(cfg, device), _batch(cfg), _roles(cfg, device), _algorithm(cfg)]
    groups += [_sampling(cfg), _engine(cfg, device), _model(cfg, device), _data(cfg), _agent(cfg), _output(cfg)]
    groups += [_carry(cfg), _sync(cfg, device), _machine(cfg, device, num_gpus)]
    for fault in itertools.chain(*groups):
        raise ConfigError(fault)


def _owner(cfg: Config, field: str) -> str | None:
    """Our key for a field of vLLM's."""
    same = [section for section in ("model", "rollout") if hasattr(getattr(cfg, section), field)]
    return f"{same[0]}.{field}" if same else OWNED.get(re.sub("^data_parallel_.*", "data_parallel_size", field))


def _run(cfg: Config) -> Iterator[str]:
    t, r = cfg.trainer, cfg.rollout
    if not cfg.model.path.strip():
        yield "model.path: not set; give a model directory, a hub id, or tiny:qwen2 (and config=FILE?)"
    if not cfg.data.train_files.strip(" ,"):
        yield "data.train_files: not set; give files, a hub id, or generator:word_problems"
    if not (cfg.data.val_files.strip() or cfg.data.val_sets) and (t.test_freq > 0 or t.val_only):
        yield f"trainer.test_freq={t.test_freq}, trainer.val_only={show(t.val_only)}: has no data; set data.val_files"
    if r.heartbeat_timeout_s <= r.heartbeat_s:
        yield f"rollout.heartbeat_timeout_s={r.heartbeat_timeout_s:g}: must be above rollout.heartbeat_s={r.heartbeat_s:g}"
    if r.val_n > 1 and r.val_temperature == 0:
        yield f"rollout.val_n={r.val_n}: greedy samples are all alike; set rollout.val_temperature above 0"
    score = rf"val/(({'|'.join(map(re.escape, cfg.data.val_sets))})/)?(reward|(avg|pass)@\d+)"
    if t.keep_best and (t.test_freq < 1 or not re.fullmatch(score, t.keep_best)):
        mend = "set that above 0, and this to val/reward, val/pass@K or val/SET/reward of a set in data.val_sets"
        yield f"trainer.keep_best={t.keep_best}: no score of trainer.test_freq={t.test_freq}; {mend}"
    if (t.total_steps is None) == (t.total_epochs is None):
        steps, epochs = show(t.total_steps), show(t.total_epochs)
        yield f"trainer.total_steps={steps} and trainer.total_epochs={epochs}: one must be set, the other null"


def _placement(cfg: Config) -> Iterator[str]:
    pools, roles = cfg.placement.pools, cfg.placement.roles
    for role, pool in roles.items():
        where = f"placement.roles.{show(role)}={show(pool)}"
        if role not in ROLES:
            yield f"{where}: unknown role; use {', '.join(ROLES)}"
        if pool not in pools:
            yield f"{where}: no such pool; add it to placement.pools, which has {', '.join(pools) or 'none'}"
    for role in (role for role in ("rollout", "actor") if role not in roles):
        yield f"placement.roles={show(roles)}: the role {role} has no pool; add {role}: POOL"
    for pool, shape in pools.items():
        where = f"placement.pools.{show(pool)}={show(shape)}"
        if not shape or not all(1 <= n <= 1024 for n in shape):
            yield f"{where}: must list the processes (GPUs) of each node, each from 1 to 1024, as [4, 4]"
        if pool not in roles.values():
            yield f"{where}: no role uses this pool; remove it or name it in placement.roles"
    guests = [role for role, pool in roles.items() if role != "rollout" and pool == roles.get("rollout")]
    where = f"placement.roles: {', '.join(guests)} and rollout share the pool {show(roles.get('rollout'))}, "
    if guests and cfg.pipeline.staleness:
        yield f"{where}but one step off needs both at once; set pipeline.staleness=0 or give them pools of their own"
    elif guests and cfg.rollout.tensor_parallel_size > 1:
        yield f"{where}which works with rollout.tensor_parallel_size=1 only; set that or give them pools of their own"


def _layouts(cfg: Config, device: str) -> Iterator[str]:
    """What one back end can do and the other cannot, and sizes of model parallelism that do not make up the ranks."""
    for role, pool in ((role, pool) for role, pool in cfg.placement.roles.items() if role != "rollout"):
        own, ranks = settings_of(cfg, role), sum(cfg.placement.pools[pool])
        sizes = {f"{n}_parallel_size": getattr(own, f"{n}_parallel_size") for n in MODEL_PARALLEL}
        tp, pp, _, ep = sizes.values()
        if own.sequence_parallel and tp == 1:
            yield f"{role}.sequence_parallel=true: there is nothing to split with tensor_parallel_size=1; set it to false"
        if (parts := own.virtual_pipeline_parallel_size) and pp == 1:
            yield f"{role}.virtual_pipeline_parallel_size={parts}: needs stages; raise {role}.pipeline_parallel_size"
        if own.backend == "fsdp":
            if ranks % abs(own.fsdp_size):
                use = f"use {_divisor(ranks, own.fsdp_size)}, or -1 for all"
                yield f"{role}.fsdp_size={own.fsdp_size}: does not divide the {ranks} ranks of the {role}; {use}"
            if own.torch_compile and device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
                yield f"{role}.torch_compile=true: needs a C++ compiler on CPUs, as g++; install one or set it to false"
            for name in (name for name, size in sizes.items() if size > 1):
                yield f"{role}.{name}={sizes[name]}: is Megatron's; set {role}.backend=megatron, or the size to 1"
            continue
        where = f"{role}.backend=megatron: the package"
        if not _installed("megatron.core"):
            yield f"{where} megatron-core is missing; run MEGATRON=1 shell/setup.sh"
        if device == "cuda" and not _installed("transformer_engine"):
            yield f"{where} transformer-engine, for GPUs, is missing; run EXTRA=gpu MEGATRON=1 shell/setup.sh"
        if ranks % (whole := math.prod(sizes.values()) // ep):
            of = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 and name[0] != "e")
            yield f"{role}: {of} would share {whole} ranks, no divisor of its {ranks}; mend them or placement.pools"
        if (ranks // pp) % ep:
            yield f"{role}.expert_parallel_size={ep}: does not divide the {ranks // pp} ranks of each stage; change it"
        if (attention := cfg.model.attn_implementation) != "auto":
            yield f"model.attn_implementation={attention}: {role}.backend=megatron chooses its own; use auto"
        fsdps = {"fsdp_size": -1, "torch_compile": False, "param_offload": False, "optimizer_offload": False}
        for name, off in fsdps.items():
            if getattr(own, name, off) != off:
                yield f"{role}.{name}={show(getattr(own, name))}: only the fsdp back end has it; set it to {show(off)}"


def _batch(cfg: Config) -> Iterator[str]:
    batch, n = cfg.data.train_batch_size, cfg.rollout.n
    pools, roles, width = cfg.placement.pools, cfg.placement.roles, cfg.rollout.tensor_parallel_size
    for role in (role for role in ("actor", "critic") if role in roles):
        own = settings_of(cfg, role)
        mini, where = own.ppo_mini_batch_size, f"{role}.ppo_mini_batch_size={own.ppo_mini_batch_size}"
        if batch % mini:
            yield f"{where}: does not divide data.train_batch_size={batch}; use {_divisor(batch, mini)}"
        if mini * n < (shares := shares_of(cfg, role)):
            yield f"{where}: times rollout.n={n} is too few for {shares} {role} ranks; use at least {-(-shares // n)}"
        if len(own.betas) != 2 or not all(0 <= b < 1 for b in own.betas):
            yield f"{role}.betas={show(own.betas)}: must be two numbers, each at least 0 and below 1, as [0.9, 0.999]"
    for node, gpus in enumerate(pools[roles["rollout"]]):
        if gpus % width:
            where = f"rollout.tensor_parallel_size={width}: does not divide placement.pools.{roles['rollout']}"
            yield f"{where}, {gpus} GPUs on node {node}; use {_divisor(gpus, width)}, or change the pool"


def _divisor(whole: int, near: int) -> int:
    """The largest divisor of `whole` that is not above `near`."""
    return next(d for d in range(min(whole, near), 0, -1) if whole % d == 0)


def _carry(cfg: Config) -> Iterator[str]:
    p, over, most = cfg.pipeline, cfg.rollout.oversample, cfg.algorithm.max_gen_batches
    if p.partial_rollout and p.staleness == 0:
        yield "pipeline.partial_rollout=true: carries samples over steps; set pipeline.staleness=1, or this to false"
    if p.partial_rollout and most > 1:
        yield f"algorithm.max_gen_batches={most}: needs whole batches; set it to 1, or pipeline.partial_rollout=false"
    if over > 1 and not p.partial_rollout:
        yield f"rollout.oversample={over:g}: carries what is not complete; set pipeline.partial_rollout=true, or this to 1"
    if over > 1 + p.max_carry:
        yield f"rollout.oversample={over:g}: more than pipeline.max_carry={p.max_carry} can carry; use {1 + p.max_carry} at most"


def _roles(cfg: Config, device: str) -> Iterator[str]:
    """What a role needs, and what needs a role."""
    roles, a, rm = cfg.placement.roles, cfg.algorithm, cfg.reward_model
    for role, name in itertools.product(roles, ("param_offload", "optimizer_offload")):
        if device == "cpu" and getattr(getattr(cfg, role), name, False):
            yield f"{role}.{name}=true: moves data off GPUs, and this run is on CPU; set it to false"
    if ("ref" in roles) != (a.kl_coef > 0):
        yield f"algorithm.kl_coef={a.kl_coef:g}: goes with a reference; set placement.roles.ref=actor and this, or neither"
    warmup, steps = cfg.trainer.critic_warmup, cfg.trainer.total_steps
    if warmup and "critic" not in roles:
        yield f"trainer.critic_warmup={warmup}: needs the role critic; set placement.roles.critic"
    if warmup and steps is not None and warmup >= steps:
        yield f"trainer.critic_warmup={warmup}: leaves the actor none of trainer.total_steps={steps}; make it smaller"
    if ("reward_model" in roles) != bool(rm.path):
        yield f"reward_model.path={show(rm.path)}: goes with placement.roles.reward_model; set both or neither"
    if rm.path and rm.url:
        yield f"reward_model.url={show(rm.url)}: so is reward_model.path; set one of them"
    if rm.url and not re.fullmatch(r"https?://[^\s/*]+[^*]*", rm.url):
        yield f"reward_model.url={show(rm.url)}: must be http://HOST:PORT/PATH or https://..., with its secret where that was masked"
    if cfg.reward.weight != 1 and not (rm.path or rm.url):
        alone = "weighs reward.function against a reward model, and there is none"
        yield f"reward.weight={cfg.reward.weight:g}: {alone}; set it to 1, or set reward_model.path or reward_model.url"
    if a.max_gen_batches > 1 and (rm.path or rm.url):
        yield f"algorithm.max_gen_batches={a.max_gen_batches}: judges before a reward model has scored; set it to 1"
    for role in (role for role in ("critic", "ref", "reward_model") if role in roles and getattr(cfg, role).path):
        yield from _model_path(f"{role}.path", getattr(cfg, role).path)


def _algorithm(cfg: Config) -> Iterator[str]:
    a, n, longest = cfg.algorithm, cfg.rollout.n, cfg.data.max_response_length
    if a.kl_coef > 0 and a.kl_estimator == "k1" and not a.kl_in_reward:
        yield "algorithm.kl_estimator=k1: as a loss its gradient has mean zero and only adds noise; use k2 or k3"
    if a.rollout_correction != "none" and a.old_log_probs == "rollout":
        yield f"algorithm.rollout_correction={a.rollout_correction}: would weight twice; set old_log_probs=recompute"
    one_reward = cfg.reward.function in BUILT_IN_REWARDS and not cfg.reward_model.path and not cfg.reward_model.url
    lacks = {"values": "critic" not in cfg.placement.roles, "parts": one_reward}
    chosen = (ADVANTAGE_ESTIMATORS, a.adv_estimator, "adv_kwargs"), (POLICY_LOSSES, a.policy_loss, "policy_loss_kwargs")
    for registry, spec, own in chosen:
        if spec not in registry:
            if not _is_yours(spec):
                said = nearest(spec, registry, f"known are {', '.join(registry)}")
                yield f"{registry.key}={show(spec)}: no such name, nor {YOURS}; {said}"
            continue
        entry, known = registry[spec], registry[spec].own()
        for need in entry.needs:
            if lacks.get(need):
                yield f"{registry.key}={spec}: needs {NEEDS[need]}, or use another, as grpo or rloo"
        if "parts" in entry.needs and (a.kl_in_reward or cfg.reward.overlong_buffer):
            idle = "algorithm.kl_in_reward and reward.overlong_buffer would do nothing; set them to false and 0"
            yield f"{registry.key}={spec}: reads the reward's parts alone, so {idle}"
        if entry.grouped and n == 1:
            yield f"rollout.n=1: {spec} compares the samples of one prompt, so one alone teaches nothing; use at least 2"
        for name, value in getattr(a, own).items():
            where = f"algorithm.{own}.{show(name)}={show(value)}"
            if name not in known:
                mend = nearest(str(name), known, f"use {', '.join(known)}" if known else "remove it")
                yield f"{where}: no such setting of {spec}; {mend}"
            elif isinstance(known[name], float) and type(value) not in (int, float):
                yield f"{where}: must be a number"
            elif name == "share" and not 0 < value <= 1:
                yield f"{where}: must be above 0 and at most 1"
            elif name == "weights" and not _numbers_by_name(value):
                yield f"{where}: must be numbers by name, as {{function: 1, model: 0.5}}"
            elif name == "pass_k" and (type(value) is not int or not 2 <= value <= n):
                yield f"{where}: must be a whole number from 2 to rollout.n={n}"
    entry = ADVANTAGE_ESTIMATORS.get(a.adv_estimator)
    if entry and not lacks["values"] and "values" not in entry.needs:
        yield f"placement.roles.critic: {a.adv_estimator} has no use for it; remove the role, or use adv_estimator=gae"
    if a.clip_ratio_c is not None and a.policy_loss in POLICY_LOSSES and a.policy_loss not in ("vanilla", "clip_cov"):
        yield f"algorithm.clip_ratio_c={a.clip_ratio_c:g}: {a.policy_loss} has no dual clip; set it to null"
    if a.kl_in_reward and a.kl_coef == 0:
        yield "algorithm.kl_in_reward=true: nothing to put there while kl_coef=0; raise kl_coef, or set it to false"
    if a.kl_target is not None and not a.kl_in_reward:
        yield f"algorithm.kl_target={a.kl_target:g}: adapts the KL in the reward only; set algorithm.kl_in_reward=true"
    samples = cfg.data.train_batch_size * n
    if a.kl_target is not None and a.kl_horizon < samples:
        yield f"algorithm.kl_horizon={a.kl_horizon}: shorter than one step of {samples} samples; use ten times as many"
    if a.max_gen_batches > 1 and n == 1:
        yield f"algorithm.max_gen_batches={a.max_gen_batches}: one sample alone scores like itself; raise rollout.n"
    if cfg.reward.overlong_buffer > longest:
        yield f"reward.overlong_buffer={cfg.reward.overlong_buffer}: longer than data.max_response_length={longest}; lower it"


def _numbers_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and type(v) in (int, float) for k, v in value.items())


def _sampling(cfg: Config) -> Iterator[str]:
    for name, value in cfg.rollout.sampling_kwargs.items():
        where = f"rollout.sampling_kwargs.{show(name)}={show(value)}"
        if _owner(cfg, name):
            yield f"{where}: use {_owner(cfg, name)}"
        elif name not in SAMPLING_ALLOWED:
            mend = nearest(name, SAMPLING_ALLOWED, f"remove it (allowed are {', '.join(SAMPLING_ALLOWED)})", 0.8)
            yield f"{where}: only fields that cannot move the engine's log-probs off the policy's may be set; {mend}"
        elif not SAMPLING_ALLOWED[name][1](value):
            yield f"{where}: must be {SAMPLING_ALLOWED[name][0]}"


def _engine(cfg: Config, device: str) -> Iterator[str]:
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for name, value in cfg.rollout.engine_kwargs.items():
        where = f"rollout.engine_kwargs.{show(name)}={show(value)}"
        if _owner(cfg, name):
            yield f"{where}: use {_owner(cfg, name)}"
        if name in ENGINE_SET.split():
            yield f"{where}: the program sets it, one replica to a node; remove it"
        if name in ENGINE_BREAKS.split() and value and value != "auto":
            why = "the engine's log-probs would not be the policy's, or the weight sync would miss a part of the model"
            yield f"{where}: {why}; remove it"
        if name in ENGINE_BREAKS_ON_CPU.split() and value and device == "cpu":
            yield f"{where}: a prompt computed in parts kills vLLM's CPU engine; remove it"
        at_least = name == "max_model_len" or (name == "max_num_batched_tokens" and device == "cpu")
        if at_least and (not isinstance(value, int) or value < longest):
            yield f"{where}: prompt and response may take {longest} tokens; remove it, or use at least {longest}"


def check_engine_names(cfg: Config, names: Iterable[str]) -> None:
    """Refuse `rollout.engine_kwargs` that are none of `names`, the fields of the installed vLLM's AsyncEngineArgs. Only
    vLLM knows them, and its import takes long, so this is no part of `validate`. Raises ConfigError."""
    # Fields with an underscore are vLLM's own bookkeeping.
    known = {name for name in names if not name.startswith("_")}
    for name, value in cfg.rollout.engine_kwargs.items():
        if name not in known:
            where, mend = f"rollout.engine_kwargs.{show(name)}={show(value)}", nearest(name, known, "remove it")
            raise ConfigError(f"{where}: the installed vLLM has no such field; {mend}")


def _model(cfg: Config, device: str) -> Iterator[str]:
    rank, targets, attention = cfg.model.lora_rank, cfg.model.lora_target_modules, cfg.model.attn_implementation
    if rank and cfg.actor.backend != "fsdp":
        yield f"model.lora_rank={rank}: only the fsdp back end trains adapters; set it to 0, or actor.backend=fsdp"
    if rank and not all(re.fullmatch(r"[\w.-]+", name.strip()) for name in targets.split(",")):
        yield f"model.lora_target_modules={show(targets)}: must be all-linear, or names of layers, as q_proj,v_proj"
    where, this = f"model.attn_implementation={attention}", "on CPU" if device == "cpu" else f"in {cfg.model.dtype}"
    if attention == "flash_attention_2" and this != "in bfloat16":
        yield f"{where}: needs GPUs and model.dtype=bfloat16, and this run is {this}; use auto or sdpa"
    yield from _model_path("model.path", cfg.model.path)


def _model_path(key: str, path: str) -> Iterator[str]:
    where = f"{key}={show(path)}"
    if path.startswith("tiny"):
        if path not in TINY_MODELS:
            yield f"{where}: unknown tiny model; use {' or '.join(TINY_MODELS)}"
    elif os.path.isdir(path):
        names = os.listdir(path)
        for endings in MODEL_FILES:
            if not any(name.endswith(endings) for name in names):
                yield f"{where}: the directory has no {' or '.join(endings)}; give one saved by save_pretrained"
    elif os.path.exists(path) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        yield f"{where}: no such directory, and no hub id as Qwen/Qwen2.5-0.5B-Instruct; check the path"


def _data(cfg: Config) -> Iterator[str]:
    """Data, and the reward that is scored by it."""
    for name, files in cfg.data.val_sets.items():
        if name == "val" or not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not files.strip(" ,"):
            yield f"data.val_sets.{show(name)}={show(files)}: must have a name of letters, digits, _.- (not val), files"
    named = {"train_files": cfg.data.train_files, "val_files": cfg.data.val_files}
    named |= {f"val_sets.{name}": files for name, files in cfg.data.val_sets.items()}
    for name, source in ((name, source.strip()) for name, files in named.items() for source in files.split(",")):
        where = f"data.{name}={show(source)}"
        if source.startswith("generator:"):
            if source.removeprefix("generator:") not in GENERATORS:
                yield f"{where}: no such generator; use generator:{' or generator:'.join(GENERATORS)}"
        elif source.endswith(FILE_ENDINGS):
            if not os.path.isfile(source):
                yield f"{where}: no such file (working directory {os.getcwd()}); check the path"
        elif source and (os.path.exists(source) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source)):
            missing = "" if os.path.exists(source) else "no such file or folder; "
            yield f"{where}: {missing}must be a {', '.join(FILE_ENDINGS)} file, generator:NAME or a hub id"
    reward = cfg.reward.function
    if reward not in BUILT_IN_REWARDS and not _is_yours(reward):
        yield f"reward.function={show(reward)}: must be gsm8k, math, or your own as {YOURS}"


def _agent(cfg: Config) -> Iterator[str]:
    own = cfg.agent
    loops, tools = (BUILT_IN_LOOPS, YOURS.replace("function", "Class")), (BUILT_IN_TOOLS, YOURS)
    named = [("loop", own.loop, *loops), *(("loop_kwargs", name, *loops) for name in own.loop_kwargs)]
    named += [("tools", tool.strip(), *tools) for tool in own.tools.split(",") if tool.strip()]
    for key, spec, known, yours in named:
        if spec not in known and not _is_yours(spec) and not (key == "tools" and spec.startswith("mcp:http")):
            mend = nearest(spec, known, f"use {', '.join(known)}, or your own as {yours}")
            yield f"agent.{key}={show(spec)}: no such name; {mend}"
    for name, own in cfg.agent.loop_kwargs.items():
        if not isinstance(own, dict):
            yield f"agent.loop_kwargs.{name}={show(own)}: must be a mapping of this loop's settings, as {{format: llama}}"


def _is_yours(spec: str) -> bool:
    """Whether `module:function` names a module that is there; the function is looked up when the run starts."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # `python -m` finds modules beside the user's config; so must the installed program.
        sys.path.append(os.getcwd())
    named = re.fullmatch(r"([^\W\d]\w*)[\w.]*:[^\W\d][\w.]*", spec)
    return bool(named) and (named[1] in sys.modules or importlib.util.find_spec(named[1]) is not None)


def _output(cfg: Config) -> Iterator[str]:
    path, resume, log = cfg.trainer.output_dir, cfg.trainer.resume, cfg.logging
    absolute = Path(os.path.abspath(path))
    parent = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    if not path.strip():
        yield "trainer.output_dir: not set; name a folder, as outputs/run"
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK) or "\0" in path:
        yield f"trainer.output_dir={show(path)}: {parent} is not a folder that can be written to; name another"
    if resume not in ("auto", "never") and not os.path.isfile(os.path.join(resume, "state.json")):
        mend = nearest(resume, ("auto", "never"), "use auto, never, or OUTPUT_DIR/checkpoints/step_000050")
        yield f"trainer.resume={show(resume)}: no checkpoint there (state.json is missing); {mend}"
    for name in (name for name in ("tensorboard", "wandb") if getattr(log, name) and not _installed(name)):
        yield f"logging.{name}=true: the package {name} is missing; pip install {name}, or set it to false"
    if log.wandb and not log.wandb_project.strip():
        yield "logging.wandb_project: empty; name a project"


def _installed(package: str) -> bool:
    """Whether a package can be imported, without doing so. A mere folder of that name (W&B makes wandb/) is none."""
    try:
        found = sys.modules.get(package) or importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return False
    return getattr(found, "origin", None) is not None or getattr(found, "__file__", None) is not None


def _sync(cfg: Config, device: str) -> Iterator[str]:
    own, mend = cfg.weight_sync, "set weight_sync.overlap=false"
    if own.overlap and own.sender == "gather":
        yield f"weight_sync.sender=gather: gathers by the trainer's collectives, not beside training; {mend}"
    if own.sender == "gather" and own.mode == "delta":
        yield "weight_sync.mode=delta: each rank compares its own shard; use weight_sync.sender=sharded"
    if own.overlap and device == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield f"CUDA_DEVICE_MAX_CONNECTIONS=1: a send that waits would hold up training; unset it, or {mend}"


def _machine(cfg: Config, device: str, num_gpus: int) -> Iterator[str]:
    if os.environ.get("RAY_ADDRESS"):
        return  # what the other nodes of a cluster have is unknown here; placement checks it
    pools, cluster = cfg.placement.pools, "smaller pools, or set RAY_ADDRESS to a cluster"
    for name, shape in pools.items():
        if len(shape) > 1:
            where = f"placement.pools.{show(name)}={show(shape)}"
            yield f"{where}: {len(shape)} nodes, but this machine is one; use [{sum(shape)}], {cluster}"
    if device == "cuda" and (wanted := sum(map(sum, pools.values()))) > num_gpus:
        few = f"{wanted} GPUs, but this machine has {num_gpus}; use placement.device=cpu"
        yield f"placement.pools={show(pools)}: {few}, {cluster}"
