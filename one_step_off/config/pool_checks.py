"""Checks of pools, of the parallel layout of each role, of batch sizes, and of this machine's
hardware.
"""

import math
import os
import shutil
from typing import Any

from one_step_off.config import packages
from one_step_off.config.errors import ConfigError, key_error, refuse_here
from one_step_off.config.placement import (
    MODEL_PARALLEL,
    SHARE_TOLERANCE,
    data_parallel_size,
    devices_of_pool,
    devices_of_run,
    devices_per_node,
    on_one_node,
    shares_device,
)
from one_step_off.config.registry import BACK_ENDS
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import is_user_spec

ROLES = ("rollout", "actor", "ref", "critic", "reward_model", "teacher")
MAX_PROCESSES_PER_NODE = 1024
MIN_SHARE = 0.05
COMPILERS = ("g++", "clang++", "c++")

# Settings that only the FSDP back end has, and the value that turns each off.
_FSDP_ONLY = {
    "fsdp_size": -1,
    "param_offload": False,
    "optimizer_offload": False,
    "router_bias_update_rate": 0.0,
}


def check_pools(cfg: Config, needed: tuple[str, ...] = ("rollout", "actor")) -> None:
    """Check that every role has a pool and every pool a role, and which roles may share a pool.

    `needed`: the roles that the run cannot do without.
    """
    pools = cfg.placement.pools
    for role, pool in cfg.placement.roles.items():
        location = f"placement.roles.{format_value(role)}={format_value(pool)}"
        if role not in ROLES:
            fix = did_you_mean(role, ROLES, f"use {', '.join(ROLES)}")
            raise ConfigError(f"{location}: unknown role; {fix}")
        if pool not in pools:
            known = ", ".join(pools) or "none"
            fix = did_you_mean(pool, pools, f"add it to placement.pools, which has {known}")
            raise ConfigError(f"{location}: no such pool; {fix}")
    for role in needed:
        if role not in cfg.placement.roles:
            fix = f"add {role}: POOL"
            if role == "rollout":
                fix += ", or run one_step_off.main_sft for supervised steps alone"
            raise key_error(cfg, "placement.roles", f"the role {role} has no pool; {fix}")
    for pool, gpus_per_node in pools.items():
        _check_pool(cfg, pool, gpus_per_node)
    _check_shares(cfg)
    _check_roles_beside_rollout(cfg)


def _check_pool(cfg: Config, pool: str, sizes: list[int | float]) -> None:
    location = f"placement.pools.{format_value(pool)}={format_value(sizes)}"
    counts = all(type(size) is int and 1 <= size <= MAX_PROCESSES_PER_NODE for size in sizes)
    same_share = all(MIN_SHARE <= size < 1 and size == sizes[0] for size in sizes)
    if not sizes or not (counts or same_share):
        raise ConfigError(
            f"{location}: must list the processes (GPUs) of each node (from 1 to 1024), "
            f"such as [4, 4], or the share of one GPU that the pool has on each node "
            f"(from {MIN_SHARE:g} to below 1), such as [0.5]"
        )
    if pool not in cfg.placement.roles.values():
        raise ConfigError(
            f"{location}: no role uses this pool; remove it or name it in placement.roles"
        )


def _check_shares(cfg: Config) -> None:
    """Check that the pools with a share of a device fit on one device together."""
    shares = {pool: size for pool, size in cfg.placement.pools.items() if shares_device(cfg, pool)}
    total = sum(sizes[0] for sizes in shares.values())
    if total > 1 + SHARE_TOLERANCE:
        shown = ", ".join(f"{format_value(pool)} {sizes[0]:g}" for pool, sizes in shares.items())
        raise key_error(
            cfg,
            "placement.pools",
            f"the pools with shares use one GPU together, and their shares make {total:g} "
            f"({shown}); lower them to a sum of 1 at most",
        )
    width = cfg.rollout.tensor_parallel_size
    rollout_pool = cfg.placement.roles.get("rollout")
    if rollout_pool in shares and width > 1:
        raise key_error(
            cfg,
            "rollout.tensor_parallel_size",
            f"a replica has {width} whole GPUs, but placement.pools.{rollout_pool} is a share of "
            "one; use 1, or a pool of whole GPUs",
        )


def _check_roles_beside_rollout(cfg: Config) -> None:
    """Check what is needed for other roles to share the rollout pool."""
    roles = cfg.placement.roles
    rollout_pool = roles.get("rollout")
    guests = [role for role, pool in roles.items() if role != "rollout" and pool == rollout_pool]
    if not guests:
        return
    sharing = f"{', '.join(guests)} and rollout share the pool {format_value(rollout_pool)}"
    if cfg.pipeline.staleness:
        raise key_error(
            cfg,
            "placement.roles",
            f"{sharing}, but one step off needs both at once; "
            "set pipeline.staleness=0 or give them separate pools",
        )
    if cfg.rollout.tensor_parallel_size > 1:
        raise key_error(
            cfg,
            "placement.roles",
            f"{sharing}, which works with rollout.tensor_parallel_size=1 only; "
            "set that or give them separate pools",
        )


def check_lending(cfg: Config) -> None:
    """Check what placement.lend needs: a trainer that waits while others generate, on whole devices
    of its own, and engines and senders that can be woken with the last weights."""
    if not cfg.placement.lend:
        return
    staleness, sync, rollout = cfg.pipeline.staleness, cfg.weight_sync, cfg.rollout
    actor_pool, rollout_pool = (cfg.placement.roles[role] for role in ("actor", "rollout"))
    shares = shares_device(cfg, actor_pool) or shares_device(cfg, rollout_pool)
    # Which key forbids it, where it does so, why, and what to do.
    limits = [
        (
            "placement.roles",
            actor_pool == rollout_pool,
            "rollout has the actor's devices already",
            "give them separate pools",
        ),
        ("placement.pools", shares, "a share of a device cannot be lent", "use whole devices"),
        (
            "pipeline.staleness",
            staleness == 0,
            "one pool for rollout and actor is for that (config/colocated.yaml)",
            "set it to 1",
        ),
        (
            "rollout.tensor_parallel_size",
            rollout.tensor_parallel_size > 1,
            "each of the actor's devices has an engine of its own",
            "set it to 1",
        ),
        (
            "rollout.routing",
            rollout.routing == "static",
            "it gives all prompts out before a device is lent",
            "use auto",
        ),
        (
            "weight_sync.in_flight",
            sync.in_flight != "wait",
            "unfinished responses would be lost whenever a device is given back",
            "use wait",
        ),
        (
            "weight_sync.keep_sent",
            not sync.keep_sent,
            "the trainer has newer weights when it waits",
            "set it to true",
        ),
        (
            "weight_sync.transport",
            sync.transport == "shared_folder",
            "its files are for one set of replicas",
            "use auto",
        ),
        (
            "weight_sync.lora",
            sync.lora == "adapter",
            "a sleeping engine has no base model, and no sync brings it back",
            "use merged",
        ),
        (
            "agent.endpoint",
            cfg.agent.endpoint,
            "an agent's episode cannot move to another replica",
            "set it to false",
        ),
    ]
    for key, forbids, why, fix in limits:
        if forbids:
            raise key_error(cfg, key, f"placement.lend=true does not go with it: {why}; {fix}")


def check_layouts(cfg: Config, device: str) -> None:
    """Check each trainer role: settings that its back end lacks, and sizes that do not make up its
    ranks.
    """
    for role, pool in cfg.placement.roles.items():
        if role == "rollout":
            continue
        settings = role_settings(cfg, role)
        if role == "teacher" and settings.backend == "vllm":
            continue  # `check_teacher` checks it
        _check_back_end(role, settings.backend)
        ranks = devices_of_pool(cfg, pool)
        sizes = {}
        for dimension in MODEL_PARALLEL:
            name = f"{dimension}_parallel_size"
            sizes[name] = getattr(settings, name)
        _check_stages(role, settings)
        if settings.backend == "fsdp":
            _check_fsdp_layout(cfg, role, settings, sizes, ranks, device)
        elif settings.backend == "megatron":
            _check_megatron_packages(role, device)
            _check_megatron_layout(role, sizes, ranks)
            _check_megatron_settings(cfg, role, settings)


def _check_back_end(role: str, back_end: str) -> None:
    """A user's own is imported when the run is prepared."""
    if back_end in BACK_ENDS or is_user_spec(back_end):
        return
    known = [*BACK_ENDS, "vllm"] if role == "teacher" else BACK_ENDS
    otherwise = f"must be one of {', '.join(known)}, or your own as module:TABLE"
    fix = did_you_mean(back_end, known, otherwise)
    raise ConfigError(f"{role}.backend={format_value(back_end)}: no such back end; {fix}")


def _check_stages(role: str, settings: Any) -> None:
    if settings.sequence_parallel and settings.tensor_parallel_size == 1:
        raise ConfigError(
            f"{role}.sequence_parallel=true: nothing to split with tensor_parallel_size=1; "
            "set it to false"
        )
    virtual_stages = settings.virtual_pipeline_parallel_size
    if virtual_stages and settings.pipeline_parallel_size == 1:
        raise ConfigError(
            f"{role}.virtual_pipeline_parallel_size={virtual_stages}: "
            f"needs pipeline stages; raise {role}.pipeline_parallel_size"
        )


def _check_fsdp_layout(
    cfg: Config, role: str, settings: Any, sizes: dict[str, int], ranks: int, device: str
) -> None:
    if settings.packing == "on" and cfg.model.attn_implementation == "eager":
        raise key_error(
            cfg, f"{role}.packing", "model.attn_implementation=eager cannot pack; use auto or off"
        )
    if ranks % settings.fsdp_size:
        divisor = nearest_divisor(ranks, settings.fsdp_size)
        raise key_error(
            cfg,
            f"{role}.fsdp_size",
            f"does not divide the {ranks} ranks of the {role}; use {divisor}, or -1: all",
        )
    if settings.torch_compile and device == "cpu" and not any(map(shutil.which, COMPILERS)):
        raise key_error(
            cfg,
            f"{role}.torch_compile",
            "needs a C++ compiler on CPUs, such as g++; install one or set it to false",
        )
    _check_expert_ranks(role, settings, ranks)
    _check_sequence_ranks(cfg, role, settings, ranks)
    for name, size in sizes.items():
        if size > 1 and name not in ("expert_parallel_size", "sequence_parallel_size"):
            raise ConfigError(
                f"{role}.{name}={size}: only the megatron back end supports it; set "
                f"{role}.backend=megatron, or the size to 1"
            )


def _check_expert_ranks(role: str, settings: Any, ranks: int) -> None:
    """The model's own number of experts is checked with its files."""
    size = settings.expert_parallel_size
    location = f"{role}.expert_parallel_size={size}"
    if ranks % size:
        raise ConfigError(
            f"{location}: does not divide the {ranks} ranks of the {role}; "
            f"use {nearest_divisor(ranks, size)}"
        )
    if size > 1 and settings.fsdp_size not in (-1, ranks):
        raise ConfigError(
            f"{location}: divides the experts over all ranks, and {role}.fsdp_size="
            f"{settings.fsdp_size} has copies of the model; set that to -1"
        )


def _check_sequence_ranks(cfg: Config, role: str, settings: Any, ranks: int) -> None:
    """The model's own number of attention heads is checked with its files."""
    size = settings.sequence_parallel_size
    location = f"{role}.sequence_parallel_size={size}"
    if ranks % size:
        raise ConfigError(
            f"{location}: does not divide the {ranks} ranks of the {role}; "
            f"use {nearest_divisor(ranks, size)}"
        )
    if size > 1 and settings.packing == "off":
        raise ConfigError(f"{location}: divides packed rows; set {role}.packing=auto, or this to 1")
    if size > 1 and cfg.model.attn_implementation == "eager":
        raise ConfigError(
            f"{location}: model.attn_implementation=eager cannot pack; set that to auto, or this "
            "to 1"
        )


def _check_megatron_packages(role: str, device: str) -> None:
    location = f"{role}.backend=megatron"
    if not packages.is_installed("megatron.core"):
        problem = "megatron-core is missing; run MEGATRON=1 shell/setup.sh"
        refuse_here(ConfigError(f"{location}: {problem}"))
    if device == "cuda" and not packages.is_installed("transformer_engine"):
        problem = (
            "transformer-engine, for GPUs, is missing; run EXTRA=gpu MEGATRON=1 shell/setup.sh"
        )
        refuse_here(ConfigError(f"{location}: {problem}"))


def _check_megatron_layout(role: str, sizes: dict[str, int], ranks: int) -> None:
    sequence_size = sizes["sequence_parallel_size"]
    if sequence_size > 1:
        raise ConfigError(
            f"{role}.sequence_parallel_size={sequence_size}: only the fsdp back end supports it; "
            f"with megatron set {role}.context_parallel_size, and this to 1"
        )
    expert_size = sizes["expert_parallel_size"]
    ranks_per_model = math.prod(sizes.values()) // expert_size
    if ranks % ranks_per_model:
        shown = []
        for name, size in sizes.items():
            if size > 1 and name != "expert_parallel_size":
                shown.append(f"{role}.{name}={size}")
        raise ConfigError(
            f"{', '.join(shown)}: would share {ranks_per_model} ranks, which does not divide its "
            f"{ranks} ranks; "
            "change them or placement.pools"
        )
    ranks_per_stage = ranks // sizes["pipeline_parallel_size"]
    if ranks_per_stage % expert_size:
        raise ConfigError(
            f"{role}.expert_parallel_size={expert_size}: "
            f"does not divide the {ranks_per_stage} ranks of each stage; change it"
        )


def _check_megatron_settings(cfg: Config, role: str, settings: Any) -> None:
    if cfg.model.attn_implementation != "auto":
        raise key_error(
            cfg,
            "model.attn_implementation",
            f"{role}.backend=megatron chooses its own; use auto",
        )
    is_split = settings.context_parallel_size > 1 or settings.virtual_pipeline_parallel_size
    if settings.packing == "on" and is_split:
        raise key_error(
            cfg,
            f"{role}.packing",
            "context parallelism and virtual pipeline stages need padded batches; use auto or off",
        )
    for name, off in _FSDP_ONLY.items():
        if getattr(settings, name, off) != off:
            raise key_error(
                cfg,
                f"{role}.{name}",
                f"only the fsdp back end supports it; set it to {format_value(off)}",
            )


def check_batch(cfg: Config) -> None:
    """Check batch sizes against mini-batches and ranks, and rollout GPUs against the tensor
    parallel size.
    """
    for role in ("actor", "critic"):
        if role in cfg.placement.roles:
            _check_mini_batch(cfg, role)
    if "rollout" not in cfg.placement.roles:
        return
    width = cfg.rollout.tensor_parallel_size
    pool = cfg.placement.roles["rollout"]
    nodes = devices_per_node(cfg, pool)
    for node, gpus in enumerate(nodes):
        if gpus % width:
            raise key_error(
                cfg,
                "rollout.tensor_parallel_size",
                f"does not divide placement.pools.{pool}, {gpus} GPUs on node {node}; "
                f"use {nearest_divisor(math.gcd(*nodes), width)}, or change the pool",
            )


def _check_mini_batch(cfg: Config, role: str) -> None:
    settings = role_settings(cfg, role)
    batch_size = cfg.data.train_batch_size
    mini_batch_size = settings.ppo_mini_batch_size
    location = f"{role}.ppo_mini_batch_size={mini_batch_size}"
    ranks = data_parallel_size(cfg, role)
    n = cfg.rollout.n
    least = math.ceil(ranks / n)
    fix = f"raise data.train_batch_size to {least}"
    if least <= batch_size:
        fix = f"use {nearest_divisor(batch_size, mini_batch_size, least)}"
    if batch_size % mini_batch_size:
        raise ConfigError(f"{location}: does not divide data.train_batch_size={batch_size}; {fix}")
    if mini_batch_size < least:
        raise ConfigError(
            f"{location}: times rollout.n={n} is too few for {ranks} {role} ranks; {fix}"
        )
    valid_betas = len(settings.betas) == 2 and all(0 <= beta < 1 for beta in settings.betas)
    if not valid_betas:
        raise key_error(
            cfg,
            f"{role}.betas",
            "must be two numbers, each at least 0 and below 1, such as [0.9, 0.999]",
        )


def nearest_divisor(whole: int, given: int, least: int = 1) -> int:
    """The divisor of `whole` that is nearest to `given`, the smaller one of two; at least `least`,
    which is at most `whole`.
    """
    divisors = [d for d in range(max(least, 1), whole + 1) if whole % d == 0]
    return min(divisors, key=lambda d: (abs(d - given), d))


def check_hardware(cfg: Config, device: str, num_gpus: int) -> None:
    """Check that this machine has the nodes and GPUs of the pools. Raises ConfigError."""
    if os.environ.get("RAY_ADDRESS"):
        return  # what the nodes of a cluster have is not known here; the placement groups check it
    pools = cfg.placement.pools
    fix = "smaller pools, or set RAY_ADDRESS to a cluster"
    for name, gpus_per_node in pools.items():
        if len(gpus_per_node) > 1:
            raise ConfigError(
                f"placement.pools.{format_value(name)}={format_value(gpus_per_node)}: "
                f"{len(gpus_per_node)} nodes, but this machine is one; "
                f"use [{on_one_node(gpus_per_node)}], {fix}"
            )
    gpus_needed = devices_of_run(cfg)
    if device == "cuda" and gpus_needed > num_gpus:
        raise key_error(
            cfg,
            "placement.pools",
            f"{gpus_needed} GPUs, but this machine has {num_gpus}; use placement.device=cpu, "
            f"{_one_gpu_fix(num_gpus)}{fix}",
        )


def _one_gpu_fix(num_gpus: int) -> str:
    if num_gpus != 1:
        return ""
    return "shares of the GPU, such as placement.pools={rollout: [0.5], actor: [0.5]}, "
