"""What a valid config must hold beyond types and ranges: keys that fit each other, files, and the machine.

Each group yields its checks in order; only the first that finds something is told, so that a check may rely on those
before it. What only the contents of files tell, `launch.prepare` checks.
"""

import difflib
import importlib.util
import itertools
import math
import operator
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from one_step_off.config.hardware import count_gpus
from one_step_off.config.schema import (
    Config,
    ConfigError,
    RewardConfig,
    data_parallel_size,
    role_settings,
)

ROLES = ("rollout", "actor", "ref", "critic", "reward_model")
TINY_MODELS = ("tiny:qwen2", "tiny:qwen3", "tiny:tools")
FILE_ENDINGS = (".jsonl", ".json", ".parquet")
BUILT_IN_REWARDS = ("gsm8k", "math")
BUILT_IN_LOOPS = ("single_turn", "tool", "retry_with_feedback", "environment")
BUILT_IN_TOOLS = ("calculator", "python")
YOURS = "module:function, of a module in this folder or in PYTHONPATH"
GENERATORS = ("word_problems", "addition", "products", "puzzles")
MODEL_FILES = (
    ("config.json",),
    ("tokenizer.json", "tokenizer.model", "vocab.json"),
    (".safetensors", ".bin"),
)

MODEL_PARALLEL = ("tensor", "pipeline", "context", "expert")

# Fields of SamplingParams that only say where a sample ends or how it is written out, and what each takes. Anything
# else might change the distribution that is sampled from, which the trainer does not know of, so nothing else passes.
_FLAG = "true or false", lambda value: isinstance(value, bool)
_IDS = (
    "a list of whole numbers",
    lambda value: isinstance(value, list) and all(type(v) is int for v in value),
)
_TEXT = (
    "a text or a list of texts",
    lambda v: all(t and type(t) is str for t in (v if isinstance(v, list) else [v])),
)
_FLAGS = "ignore_eos include_stop_str_in_output skip_special_tokens spaces_between_special_tokens".split()
SAMPLING_ALLOWED = {"stop": _TEXT, "stop_token_ids": _IDS} | dict.fromkeys(_FLAGS, _FLAG)
# Fields of SamplingParams and of AsyncEngineArgs that belong to keys of ours, beside those of the same name.
OWNED = {
    "model": "model.path",
    "kv_cache_memory_bytes": "rollout.kv_cache_mb",
    "seed": "trainer.seed",
}
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


def format_value(value: Any) -> str:
    """A value on one line, as the user would write it, and never long."""
    text = str(value).replace("'", "") if isinstance(value, (dict, list)) else str(value)
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


_SECRET = re.compile(
    r"(://)[^/@\s]+@|([?&][\w.-]*(?:token|key|secret|password|sig)[\w.-]*=)[^&#\s'\"]+", re.I
)


def mask_secrets(text: str) -> str:
    """A text without its secrets, each *** instead: of URLs the part before an @ and ?token=... and the like, and what
    environment variables named as secrets hold."""
    for name, value in os.environ.items():
        if len(value) > 7 and re.search("(TOKEN|API_?KEY|SECRET|PASSWORD)$", name):
            text = text.replace(value, "***")
    return _SECRET.sub(lambda m: f"{m[1]}***@" if m[1] else f"{m[2]}***", text)


def did_you_mean(word: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """ "did you mean ...?" with the most similar name, or `otherwise` where none is similar."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}?" if close else otherwise


def resolved_device(cfg: Config, num_gpus: int | None = None) -> str:
    """ "cuda" or "cpu". `num_gpus` None: counted here, and only where `placement.device` is auto."""
    if cfg.placement.device != "auto":
        return cfg.placement.device
    return "cuda" if (count_gpus() if num_gpus is None else num_gpus) > 0 else "cpu"


Check = tuple[Any, str, str]
"""Whether something is wrong; where: a key, two with a blank between, or a text with =; why, and the mend."""


def checks_before_algorithm(cfg: Config, device: str) -> list[Iterator[Check]]:
    """The groups of checks that those of the algorithm rely on."""
    return [_run(cfg), _placement(cfg), _layouts(cfg, device), _batch(cfg), _roles(cfg, device)]


def checks_after_algorithm(cfg: Config, device: str) -> list[Iterator[Check]]:
    """The other groups of checks, but for those of the machine (`lacks`)."""
    groups = [_sampling(cfg), _engine(cfg, device), _model(cfg, device), _data(cfg), _agent(cfg)]
    return [*groups, _output(cfg), _carry(cfg), _sync(cfg, device)]


def missing_hardware(cfg: Config, num_gpus: int | None = None) -> str | None:
    """What this machine lacks to run a config that is valid otherwise, and how to fix it; None if nothing."""
    num_gpus = visible_gpu_count(cfg) if num_gpus is None else num_gpus
    return first_fault(cfg, _machine(cfg, resolved_device(cfg, num_gpus), num_gpus))


def visible_gpu_count(cfg: Config) -> int:
    return 0 if cfg.placement.device == "cpu" else count_gpus()


def first_fault(cfg: Config, checks: Iterable[Check]) -> str | None:
    """The first check that finds something, in a line."""
    for wrong, where, why in checks:
        if wrong:
            keys = () if "=" in where else where.split()
            shown = " and ".join(
                f"{key}={format_value(operator.attrgetter(key)(cfg))}" for key in keys
            )
            return f"{shown or where}: {why}"
    return None


def _owner(cfg: Config, field: str) -> str | None:
    """Our key for a field of vLLM's."""
    same = [section for section in ("model", "rollout") if hasattr(getattr(cfg, section), field)]
    return (
        f"{same[0]}.{field}"
        if same
        else OWNED.get(re.sub("^data_parallel_.*", "data_parallel_size", field))
    )


def _run(cfg: Config) -> Iterator[Check]:
    t, r, beat = cfg.trainer, cfg.rollout, cfg.rollout.heartbeat_s
    path, files, held_out = (
        cfg.model.path,
        cfg.data.train_files,
        cfg.data.val_files.strip() or cfg.data.val_sets,
    )
    yield (
        not path.strip(),
        "model.path",
        "not set; give a directory, a hub id, or tiny:qwen2 (and config=FILE?)",
    )
    yield (
        not files.strip(" ,"),
        "data.train_files",
        "not set; give files, a hub id, or generator:word_problems",
    )
    evaluates = t.test_freq > 0 or t.val_only
    yield (
        evaluates and not held_out,
        "trainer.test_freq trainer.val_only",
        "there is no data; set data.val_files",
    )
    yield (
        r.heartbeat_timeout_s <= beat,
        "rollout.heartbeat_timeout_s",
        f"must be above rollout.heartbeat_s={beat:g}",
    )
    greedy, why = (
        r.val_temperature == 0,
        "greedy samples are all alike; set rollout.val_temperature above 0",
    )
    yield r.val_n > 1 and greedy, "rollout.val_n", why
    score = rf"val/(({'|'.join(map(re.escape, cfg.data.val_sets))})/)?(reward|(avg|pass)@\d+)"
    no_score = t.test_freq < 1 or not re.fullmatch(score, t.keep_best or "")
    mend = "set that above 0, and this to val/reward, val/pass@K or val/SET/reward of a set in data.val_sets"
    yield (
        t.keep_best and no_score,
        "trainer.keep_best",
        f"no score of trainer.test_freq={t.test_freq}; {mend}",
    )
    not_one = (t.total_steps is None) == (t.total_epochs is None)
    yield not_one, "trainer.total_steps trainer.total_epochs", "one must be set, the other null"


def _placement(cfg: Config) -> Iterator[Check]:
    pools, roles = cfg.placement.pools, cfg.placement.roles
    known = ", ".join(pools) or "none"
    for role, pool in roles.items():
        where = f"placement.roles.{format_value(role)}={format_value(pool)}"
        yield role not in ROLES, where, f"unknown role; use {', '.join(ROLES)}"
        yield (
            pool not in pools,
            where,
            f"no such pool; add it to placement.pools, which has {known}",
        )
    for role in ("rollout", "actor"):
        yield role not in roles, "placement.roles", f"the role {role} has no pool; add {role}: POOL"
    for pool, shape in pools.items():
        where, good = (
            f"placement.pools.{format_value(pool)}={format_value(shape)}",
            shape and all(1 <= n <= 1024 for n in shape),
        )
        yield (
            not good,
            where,
            "must list the processes (GPUs) of each node, each from 1 to 1024, as [4, 4]",
        )
        yield (
            pool not in roles.values(),
            where,
            "no role uses this pool; remove it or name it in placement.roles",
        )
    guests = [
        role for role, pool in roles.items() if role != "rollout" and pool == roles["rollout"]
    ]
    share = f"{', '.join(guests)} and rollout share the pool {format_value(roles['rollout'])}"
    why = (
        "one step off needs both at once; set pipeline.staleness=0 or give them pools of their own"
    )
    yield guests and cfg.pipeline.staleness, "placement.roles", f"{share}, but {why}"
    why = "works with rollout.tensor_parallel_size=1 only; set that or give them pools of their own"
    yield (
        guests and cfg.rollout.tensor_parallel_size > 1,
        "placement.roles",
        f"{share}, which {why}",
    )


def _layouts(cfg: Config, device: str) -> Iterator[Check]:
    """What one back end can do and the other cannot, and sizes of model parallelism that do not make up the ranks."""
    for role, pool in (
        (role, pool) for role, pool in cfg.placement.roles.items() if role != "rollout"
    ):
        own, ranks, megatron = (
            role_settings(cfg, role),
            sum(cfg.placement.pools[pool]),
            f"{role}.backend=megatron",
        )
        sizes = {f"{n}_parallel_size": getattr(own, f"{n}_parallel_size") for n in MODEL_PARALLEL}
        (tp, pp, _, ep), parts = sizes.values(), own.virtual_pipeline_parallel_size
        where, why = (
            f"{role}.sequence_parallel=true",
            "nothing to split with tensor_parallel_size=1; set it to false",
        )
        yield own.sequence_parallel and tp == 1, where, why
        where = f"{role}.virtual_pipeline_parallel_size={parts}"
        yield parts and pp == 1, where, f"needs stages; raise {role}.pipeline_parallel_size"
        if own.backend == "fsdp":
            why = f"does not divide the {ranks} ranks of the {role}; use {_divisor(ranks, own.fsdp_size)}, or -1: all"
            yield ranks % own.fsdp_size, f"{role}.fsdp_size", why
            why = "needs a C++ compiler on CPUs, as g++; install one or set it to false"
            no_compiler = (
                own.torch_compile
                and device == "cpu"
                and not any(map(shutil.which, ("g++", "clang++", "c++")))
            )
            yield no_compiler, f"{role}.torch_compile", why
            for name, size in sizes.items():
                yield (
                    size > 1,
                    f"{role}.{name}={size}",
                    f"is Megatron's; set {megatron}, or the size to 1",
                )
            continue
        yield (
            not is_installed("megatron.core"),
            megatron,
            "megatron-core is missing; run MEGATRON=1 shell/setup.sh",
        )
        why = "transformer-engine, for GPUs, is missing; run EXTRA=gpu MEGATRON=1 shell/setup.sh"
        yield device == "cuda" and not is_installed("transformer_engine"), megatron, why
        whole = math.prod(sizes.values()) // ep
        of = ", ".join(
            f"{role}.{name}={size}" for name, size in sizes.items() if size > 1 and name[0] != "e"
        )
        yield (
            ranks % whole,
            of,
            f"would share {whole} ranks, no divisor of its {ranks}; mend them or placement.pools",
        )
        why = f"does not divide the {ranks // pp} ranks of each stage; change it"
        yield (ranks // pp) % ep, f"{role}.expert_parallel_size={ep}", why
        of = "model.attn_implementation"
        yield cfg.model.attn_implementation != "auto", of, f"{megatron} chooses its own; use auto"
        fsdps = {
            "fsdp_size": -1,
            "torch_compile": False,
            "param_offload": False,
            "optimizer_offload": False,
        }
        for name in (name for name, off in fsdps.items() if getattr(own, name, off) != off):
            yield (
                True,
                f"{role}.{name}",
                f"only the fsdp back end has it; set it to {format_value(fsdps[name])}",
            )


def _batch(cfg: Config) -> Iterator[Check]:
    batch, n, width = cfg.data.train_batch_size, cfg.rollout.n, cfg.rollout.tensor_parallel_size
    for role in (role for role in ("actor", "critic") if role in cfg.placement.roles):
        own, shares = role_settings(cfg, role), data_parallel_size(cfg, role)
        mini, where = (
            own.ppo_mini_batch_size,
            f"{role}.ppo_mini_batch_size={own.ppo_mini_batch_size}",
        )
        yield (
            batch % mini,
            where,
            f"does not divide data.train_batch_size={batch}; use {_divisor(batch, mini)}",
        )
        why = f"times rollout.n={n} is too few for {shares} {role} ranks; use at least {-(-shares // n)}"
        yield mini * n < shares, where, why
        good = len(own.betas) == 2 and all(0 <= b < 1 for b in own.betas)
        yield (
            not good,
            f"{role}.betas",
            "must be two numbers, each at least 0 and below 1, as [0.9, 0.999]",
        )
    pool = cfg.placement.roles["rollout"]
    for node, gpus in enumerate(cfg.placement.pools[pool]):
        why = f"does not divide placement.pools.{pool}, {gpus} GPUs on node {node}"
        mend = f"use {_divisor(gpus, width)}, or change the pool"
        yield gpus % width, "rollout.tensor_parallel_size", f"{why}; {mend}"


def _divisor(whole: int, near: int) -> int:
    """The largest divisor of `whole` that is not above `near`; 1 where `near` is below."""
    return next((d for d in range(min(whole, near), 0, -1) if whole % d == 0), 1)


def _carry(cfg: Config) -> Iterator[Check]:
    partial, in_turns, carry = (
        cfg.pipeline.partial_rollout,
        cfg.pipeline.staleness == 0,
        cfg.pipeline.max_carry,
    )
    over, again = cfg.rollout.oversample, cfg.algorithm.max_gen_batches > 1
    yield (
        partial and in_turns,
        "pipeline.partial_rollout",
        "needs pipeline.staleness=1; set that, or this to false",
    )
    yield (
        partial and again,
        "algorithm.max_gen_batches",
        "partial_rollout makes no whole batches; set it to 1",
    )
    yield (
        over > 1 and not partial,
        "rollout.oversample",
        "needs pipeline.partial_rollout=true; set that, or this to 1",
    )
    most = f"more than pipeline.max_carry={carry} can carry; use {1 + carry} at most"
    yield over > 1 + carry, "rollout.oversample", most


def _roles(cfg: Config, device: str) -> Iterator[Check]:
    """What a role needs, and what needs a role."""
    roles, a, rm = cfg.placement.roles, cfg.algorithm, cfg.reward_model
    warmup, steps, model = cfg.trainer.critic_warmup, cfg.trainer.total_steps, rm.path or rm.url
    for role, name in itertools.product(roles, ("param_offload", "optimizer_offload")):
        wrong = device == "cpu" and getattr(getattr(cfg, role), name, False)
        yield (
            wrong,
            f"{role}.{name}",
            "moves data off GPUs, and this run is on CPU; set it to false",
        )
    wrong = ("ref" in roles) != (a.kl_coef > 0)
    yield (
        wrong,
        "algorithm.kl_coef",
        "goes with a reference; set placement.roles.ref=actor and this, or neither",
    )
    where = "trainer.critic_warmup"
    yield (
        warmup and "critic" not in roles,
        where,
        "needs the role critic; set placement.roles.critic",
    )
    yield (
        warmup >= (steps or math.inf),
        where,
        f"leaves the actor none of trainer.total_steps={steps}; make it smaller",
    )
    wrong = ("reward_model" in roles) != bool(rm.path)
    yield wrong, "reward_model.path", "goes with placement.roles.reward_model; set both or neither"
    yield rm.path and rm.url, "reward_model.url", "so is reward_model.path; set one of them"
    why = "must be http://HOST:PORT/PATH or https://..., with its secret where that was masked"
    yield rm.url and not re.fullmatch(r"https?://[^\s/*]+[^*]*", rm.url), "reward_model.url", why
    why = "there is no reward model to weigh against; set it to 1, or set reward_model.path or reward_model.url"
    yield cfg.reward.weight != 1 and not model, "reward.weight", why
    why = "judges before a reward model has scored; set it to 1"
    yield a.max_gen_batches > 1 and model, "algorithm.max_gen_batches", why
    for role in (
        role
        for role in ("critic", "ref", "reward_model")
        if role in roles and getattr(cfg, role).path
    ):
        yield from _model_path(f"{role}.path", getattr(cfg, role).path)


def _sampling(cfg: Config) -> Iterator[Check]:
    for name, value in cfg.rollout.sampling_kwargs.items():
        where = f"rollout.sampling_kwargs.{format_value(name)}={format_value(value)}"
        yield _owner(cfg, name), where, f"use {_owner(cfg, name)}"
        mend = did_you_mean(
            name, SAMPLING_ALLOWED, f"remove it (allowed are {', '.join(SAMPLING_ALLOWED)})", 0.8
        )
        why = "only fields that cannot move the engine's log-probs off the policy's may be set"
        yield name not in SAMPLING_ALLOWED, where, f"{why}; {mend}"
        wanted, fits = SAMPLING_ALLOWED[name]
        yield not fits(value), where, f"must be {wanted}"


def _engine(cfg: Config, device: str) -> Iterator[Check]:
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for name, value in cfg.rollout.engine_kwargs.items():
        where, on_cpu = (
            f"rollout.engine_kwargs.{format_value(name)}={format_value(value)}",
            device == "cpu",
        )
        yield _owner(cfg, name), where, f"use {_owner(cfg, name)}"
        yield (
            name in ENGINE_SET.split(),
            where,
            "the program sets it, one replica to a node; remove it",
        )
        why = "the engine's log-probs would not be the policy's, or the weight sync would miss a part of the model"
        yield (
            name in ENGINE_BREAKS.split() and value and value != "auto",
            where,
            f"{why}; remove it",
        )
        why = "a prompt computed in parts kills vLLM's CPU engine; remove it"
        yield on_cpu and value and name in ENGINE_BREAKS_ON_CPU.split(), where, why
        at_least = name == "max_model_len" or (name == "max_num_batched_tokens" and on_cpu)
        why = f"prompt and response may take {longest} tokens; remove it, or use at least {longest}"
        yield at_least and (not isinstance(value, int) or value < longest), where, why


def check_engine_names(cfg: Config, names: Iterable[str]) -> None:
    """Refuse `rollout.engine_kwargs` that are none of `names`, the fields of the installed vLLM's AsyncEngineArgs. Only
    vLLM knows them, and its import takes long, so this is no part of `validate`. Raises ConfigError."""
    # Fields with an underscore are vLLM's own bookkeeping.
    known = {name for name in names if not name.startswith("_")}
    for name, value in cfg.rollout.engine_kwargs.items():
        if name not in known:
            where, mend = (
                f"rollout.engine_kwargs.{format_value(name)}={format_value(value)}",
                did_you_mean(name, known, "remove it"),
            )
            raise ConfigError(f"{where}: the installed vLLM has no such field; {mend}")


def _model(cfg: Config, device: str) -> Iterator[Check]:
    rank, targets, attention = (
        cfg.model.lora_rank,
        cfg.model.lora_target_modules,
        cfg.model.attn_implementation,
    )
    why = "only the fsdp back end trains adapters; set it to 0, or actor.backend=fsdp"
    yield rank and cfg.actor.backend != "fsdp", "model.lora_rank", why
    named = all(re.fullmatch(r"[\w.-]+", name.strip()) for name in targets.split(","))
    yield (
        rank and not named,
        "model.lora_target_modules",
        "must be all-linear, or names of layers, as q_proj,v_proj",
    )
    this = "on CPU" if device == "cpu" else f"in {cfg.model.dtype}"
    why = f"needs GPUs and model.dtype=bfloat16, and this run is {this}; use auto or sdpa"
    yield (
        attention == "flash_attention_2" and this != "in bfloat16",
        "model.attn_implementation",
        why,
    )
    yield from _model_path("model.path", cfg.model.path)


def _model_path(key: str, path: str) -> Iterator[Check]:
    tiny, names = path.startswith("tiny"), os.listdir(path) if os.path.isdir(path) else []
    yield (
        tiny and path not in TINY_MODELS,
        key,
        f"unknown tiny model; use {' or '.join(TINY_MODELS)}",
    )
    if os.path.isdir(path):
        for endings in MODEL_FILES:
            why = f"the directory has no {' or '.join(endings)}; give one saved by save_pretrained"
            yield not any(name.endswith(endings) for name in names), key, why
    elif not tiny:
        hub_id = not os.path.exists(path) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)
        yield (
            not hub_id,
            key,
            "no such directory, and no hub id as Qwen/Qwen2.5-0.5B-Instruct; check the path",
        )


def _data(cfg: Config) -> Iterator[Check]:
    """Data, and the reward that is scored by it."""
    for name, files in cfg.data.val_sets.items():
        good = name != "val" and re.fullmatch(r"[A-Za-z0-9_.-]+", name) and files.strip(" ,")
        why = "must have a name of letters, digits, _.- (not val), files"
        yield not good, f"data.val_sets.{format_value(name)}={format_value(files)}", why
    named = {"train_files": cfg.data.train_files, "val_files": cfg.data.val_files}
    named |= {f"val_sets.{name}": files for name, files in cfg.data.val_sets.items()}
    for name, source in (
        (name, source.strip()) for name, files in named.items() for source in files.split(",")
    ):
        where, there = f"data.{name}={format_value(source)}", os.path.exists(source)
        if source.startswith("generator:"):
            why = f"no such generator; use generator:{' or generator:'.join(GENERATORS)}"
            yield source.removeprefix("generator:") not in GENERATORS, where, why
        elif source.endswith(FILE_ENDINGS):
            why = f"no such file (working directory {os.getcwd()}); check the path"
            yield not os.path.isfile(source), where, why
        elif source:
            missing = "" if there else "no such file or folder; "
            why = f"{missing}must be a {', '.join(FILE_ENDINGS)} file, generator:NAME or a hub id"
            yield there or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source), where, why
    wanted = f"must be gsm8k, math, or your own as {YOURS}"
    known = cfg.reward.function in BUILT_IN_REWARDS or is_user_spec(cfg.reward.function)
    yield not known, "reward.function", wanted
    for source, name in cfg.reward.functions.items():
        known = name in BUILT_IN_REWARDS or is_user_spec(name)
        yield not known, f"reward.functions.{format_value(source)}={format_value(name)}", wanted
    twice = cfg.reward.functions and cfg.reward.function != RewardConfig.function
    why = "reward.functions names the function of every data_source; put it there, or remove one of the two"
    yield twice, "reward.function", why


def _agent(cfg: Config) -> Iterator[Check]:
    own = cfg.agent
    loops, tools = (BUILT_IN_LOOPS, YOURS.replace("function", "Class")), (BUILT_IN_TOOLS, YOURS)
    named = [
        ("loop", own.loop, *loops),
        *(("loop_kwargs", name, *loops) for name in own.loop_kwargs),
    ]
    named += [("tools", tool.strip(), *tools) for tool in own.tools.split(",") if tool.strip()]
    for key, spec, known, yours in named:
        there = (
            spec in known or is_user_spec(spec) or (key == "tools" and spec.startswith("mcp:http"))
        )
        mend = did_you_mean(spec, known, f"use {', '.join(known)}, or your own as {yours}")
        yield not there, f"agent.{key}={format_value(spec)}", f"no such name; {mend}"
    for name, own in cfg.agent.loop_kwargs.items():
        why = "must be a mapping of this loop's settings, as {format: llama}"
        yield not isinstance(own, dict), f"agent.loop_kwargs.{name}={format_value(own)}", why


def is_user_spec(spec: str) -> bool:
    """Whether `module:function` names a module that is there; the function is looked up when the run starts."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # `python -m` finds modules beside the user's config; so must the installed program.
        sys.path.append(os.getcwd())
    named = re.fullmatch(r"([^\W\d]\w*)[\w.]*:[^\W\d][\w.]*", spec)
    return bool(named) and (
        named[1] in sys.modules or importlib.util.find_spec(named[1]) is not None
    )


def _output(cfg: Config) -> Iterator[Check]:
    path, resume, log = cfg.trainer.output_dir, cfg.trainer.resume, cfg.logging
    absolute = Path(os.path.abspath(path))
    parent = next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))
    open_to_us = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK) and "\0" not in path
    yield not path.strip(), "trainer.output_dir", "not set; name a folder, as outputs/run"
    yield (
        not open_to_us,
        "trainer.output_dir",
        f"{parent} is not a folder that can be written to; name another",
    )
    there = resume in ("auto", "never") or os.path.isfile(os.path.join(resume, "state.json"))
    mend = did_you_mean(
        resume, ("auto", "never"), "use auto, never, or OUTPUT_DIR/checkpoints/step_000050"
    )
    yield not there, "trainer.resume", f"no checkpoint there (state.json is missing); {mend}"
    for name in (name for name in ("tensorboard", "wandb") if getattr(log, name)):
        why = f"the package {name} is missing; pip install {name}, or set it to false"
        yield not is_installed(name), f"logging.{name}", why
    yield (
        log.wandb and not log.wandb_project.strip(),
        "logging.wandb_project",
        "empty; name a project",
    )


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without doing so. A mere folder of that name (W&B makes wandb/) is none."""
    try:
        found = sys.modules.get(package) or importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even the package around it
        return False
    return (
        getattr(found, "origin", None) is not None or getattr(found, "__file__", None) is not None
    )


def _sync(cfg: Config, device: str) -> Iterator[Check]:
    own, mend = cfg.weight_sync, "set weight_sync.overlap=false"
    gather, one_queue = own.sender == "gather", os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    why = f"gathers by the trainer's collectives, not beside training; {mend}"
    yield own.overlap and gather, "weight_sync.sender", why
    why = "each rank compares its own shard; use weight_sync.sender=sharded"
    yield gather and own.mode == "delta", "weight_sync.mode", why
    why = f"a send that waits would hold up training; unset it, or {mend}"
    yield own.overlap and device == "cuda" and one_queue, "CUDA_DEVICE_MAX_CONNECTIONS=1", why


def _machine(cfg: Config, device: str, num_gpus: int) -> Iterator[Check]:
    if os.environ.get("RAY_ADDRESS"):
        return  # what the other nodes of a cluster have is unknown here; placement checks it
    pools, cluster = cfg.placement.pools, "smaller pools, or set RAY_ADDRESS to a cluster"
    for name, shape in pools.items():
        why = f"{len(shape)} nodes, but this machine is one; use [{sum(shape)}], {cluster}"
        yield len(shape) > 1, f"placement.pools.{format_value(name)}={format_value(shape)}", why
    wanted = sum(map(sum, pools.values()))
    why = f"{wanted} GPUs, but this machine has {num_gpus}; use placement.device=cpu, {cluster}"
    yield device == "cuda" and wanted > num_gpus, "placement.pools", why
