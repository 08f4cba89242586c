"""Resource pools as Ray placement groups, and the processes of each role in them."""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from one_step_off.cluster.core_binding import pin_process
from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import process_cores, processes_per_node
from one_step_off.config.schema import Config
from one_step_off.config.user_code import redirect_output

RESERVE_TIMEOUT_S = 60.0
"""Seconds for Ray to reserve one placement group, at most; trainer.start_timeout_s may be
shorter."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ProcessSlot:
    """The resources of one process: a bundle of a placement group."""

    group: PlacementGroup
    bundle: int
    """Index of the bundle in its placement group."""
    node: int
    """Index of the node in the pool."""
    cores: tuple[int, ...]
    """The cores that its processes are bound to (CPU runs; empty: none)."""


def create_pools(cfg: Config, device: str) -> dict[str, list[ProcessSlot]]:
    """Reserve every pool. Returns pool name -> its slots, node by node.

    Each node's share of a pool is one placement group, which must lie on one node of the cluster.

    Args:
        cfg: the whole config; placement.pools and placement.roles count here.
        device: "cuda" or "cpu".

    Raises:
        ConfigError: the cluster has too little; the message names the pool, what it needs and what
            is free.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    cores_of_pool = process_cores(cfg, device)
    slots_of_share: dict[tuple[str, int], list[ProcessSlot]] = {}
    for pool, node in _largest_share_first(cfg):
        slots_per_node = processes_per_node(cfg, pool)
        count = slots_per_node[node]
        first = sum(slots_per_node[:node])
        group = _reserve(cfg, pool, node, count, resource)
        slots = []
        for bundle in range(count):
            cores = tuple(cores_of_pool[pool][first + bundle])
            slots.append(ProcessSlot(group, bundle, node, cores))
        slots_of_share[pool, node] = slots

    pools: dict[str, list[ProcessSlot]] = {}
    for pool, shape in cfg.placement.pools.items():
        pools[pool] = []
        for node in range(len(shape)):
            pools[pool] += slots_of_share[pool, node]
    return pools


def _largest_share_first(cfg: Config) -> list[tuple[str, int]]:
    """(pool, node of the pool) of all shares. A small share fits anywhere, and reserved first it
    might take the only node that a large one fits on."""
    shares = []
    for pool, shape in cfg.placement.pools.items():
        for node in range(len(shape)):
            shares.append((pool, node))
    return sorted(shares, key=lambda share: cfg.placement.pools[share[0]][share[1]], reverse=True)


def _reserve(cfg: Config, pool: str, node: int, count: int, resource: str) -> PlacementGroup:
    """A placement group of `count` bundles on one node. Raises ConfigError: no node has so much."""
    width = 1
    if pool == cfg.placement.roles["rollout"]:
        width = cfg.rollout.tensor_parallel_size
    group = placement_group([{resource: width}] * count, strategy="STRICT_PACK")
    if not group.wait(timeout_seconds=min(RESERVE_TIMEOUT_S, cfg.trainer.start_timeout_s)):
        free = ray.available_resources().get(resource, 0)
        needs = f"node {node} needs {count * width} {resource}s on one node"
        has = f"the cluster has {free:g} free in all; make the pool smaller or the cluster larger"
        key = f"placement.pools.{pool}={cfg.placement.pools[pool]}"
        raise ConfigError(f"{key}: {needs}, but {has}")
    return group


def describe_pools(cfg: Config, pools: dict[str, list[ProcessSlot]]) -> str:
    """What `create_pools` has reserved, and where: "pool train [2, 2] on 10.0.0.1 10.0.0.2: actor,
    critic; ..."."""
    host_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    descriptions = []
    for pool, slots in pools.items():
        groups = {slot.node: slot.group for slot in slots}
        hosts = []
        for group in groups.values():
            node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
            hosts.append(host_of_node[node_of_bundle[0]])
        roles = [role for role, its_pool in cfg.placement.roles.items() if its_pool == pool]
        shape = cfg.placement.pools[pool]
        descriptions.append(f"pool {pool} {shape} on {' '.join(hosts)}: {', '.join(roles)}")
    return "; ".join(descriptions)


def spawn(
    cls: type,
    args: tuple,
    slot: ProcessSlot | None,
    device: str,
    share: float = 1.0,
    env: dict | None = None,
    log: str = "",
) -> Any:
    """Start `cls(*args)` as a Ray actor and return its handle.

    Attributes of `cls` that are read here: `restarts` (how often Ray restarts it, default 0),
    `calls_at_once` (of an asynchronous actor), `threads` (concurrency group -> its number of
    threads).

    Args:
        cls: the actor's class.
        args: of its constructor.
        slot: where it runs, bound to the slot's cores; None: anywhere.
        device: "cuda" or "cpu".
        share: the part of the slot's GPUs and cores that Ray books for it; several roles may share
            a slot.
        env: environment variables.
        log: the file for its output; empty: Ray's own.
    """
    cores = slot.cores if slot else ()
    actor_class = _pinned_class(cls, cores, log)
    threads = str(_thread_count(slot, cores, device))
    variables = dict.fromkeys(THREAD_VARIABLES, threads)
    options: dict[str, Any] = {
        "num_cpus": 0,
        "runtime_env": {"env_vars": variables | (env or {})},
        "max_restarts": getattr(cls, "restarts", 0),
        "max_concurrency": getattr(cls, "calls_at_once", None),
    }
    if slot:
        options |= _slot_options(slot, share)
    if hasattr(cls, "threads"):
        remote_class = ray.remote(concurrency_groups=cls.threads)(actor_class)
    else:
        remote_class = ray.remote(actor_class)
    return remote_class.options(**options).remote(*args)


def _pinned_class(cls: type, cores: tuple[int, ...], log: str) -> type:
    """A subclass with the name of `cls` that binds its process to `cores` before torch starts its
    threads."""

    class Pinned(cls):
        def __init__(self, *args: Any) -> None:
            pin_process(cores)
            if log:
                redirect_output(log)
            super().__init__(*args)

    Pinned.__name__ = cls.__name__
    Pinned.__qualname__ = cls.__name__
    return Pinned


def _thread_count(slot: ProcessSlot | None, cores: tuple[int, ...], device: str) -> int:
    """Threads for OpenMP and MKL: one per core of the slot.

    On GPUs an equal part of the host's cores: Ray would set one thread, and the optimizer of
    offloaded parameters runs on the host.
    """
    if device == "cuda" and slot:
        processes_of_node = max(1, len(slot.group.bundle_specs))
        return max(1, (os.cpu_count() or 1) // processes_of_node)
    return max(1, len(cores))


def _slot_options(slot: ProcessSlot, share: float) -> dict[str, Any]:
    """Ray's options for an actor that takes `share` of the slot's bundle."""
    bundle = slot.group.bundle_specs[slot.bundle]
    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, slot.bundle),
        "num_gpus": bundle.get("GPU", 0) * share,
        "num_cpus": bundle.get("CPU", 0) * share,
    }
