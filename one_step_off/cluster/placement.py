"""Resource pools as Ray placement groups, and the processes of each role in them."""

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from one_step_off.cluster.core_binding import pin_process
from one_step_off.config import hardware
from one_step_off.config.console_streams import never_fail
from one_step_off.config.errors import ConfigError
from one_step_off.config.hardware import CoresPerProcess
from one_step_off.config.placement import (
    device_share,
    devices_of_process,
    process_cores,
    processes_per_node,
    roles_in_pool,
    shared_devices,
    shares_device,
    why_not_elastic,
)
from one_step_off.config.schema import Config
from one_step_off.config.user_code import redirect_output

RESERVE_TIMEOUT_S = 60.0
"""Seconds for Ray to reserve one placement group, at most; trainer.start_timeout_s may be
shorter."""

JOIN_RESERVE_S = 10.0
"""Seconds for Ray to reserve the placement groups of replicas that join."""

RAY_FRACTIONS = 10_000
"""Ray counts a device in parts of this number."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ProcessSlot:
    """The resources of one process: a bundle of a placement group, or a share of it."""

    group: PlacementGroup
    bundle: int
    """Index of the bundle in its placement group."""
    node: int
    """Index of the node in the pool."""
    cores: tuple[int, ...]
    """The cores that its processes are bound to (CPU runs; empty: none)."""
    devices: float = 1.0
    """GPUs (or Ray's CPUs) of the bundle that belong to this slot. Slots of other pools have the
    rest of a shared device."""

    def shares_bundle(self, other: "ProcessSlot") -> bool:
        """Whether both slots lie on the same device."""
        return self.group is other.group and self.bundle == other.bundle


class PlacedActor:
    """A mixin of actors that `spawn` starts. It has no constructor, so that it fits any class."""

    def bound_pids(self) -> list[int]:
        """The processes that compute for this actor."""
        return [os.getpid()]

    @ray.method(concurrency_group="control")
    def threads_and_cores(self) -> str:
        """For the log: with how many threads this actor's processes compute, and on which cores."""
        threads = os.environ.get("OMP_NUM_THREADS", "not set")
        cores = [sorted(os.sched_getaffinity(pid)) for pid in self.bound_pids()]
        return f"OMP_NUM_THREADS={threads}, its processes are on the cores {cores}"


def create_pools(
    cfg: Config, device: str, replicas: int | None = None
) -> dict[str, list[ProcessSlot]]:
    """Reserve every pool. Returns pool name -> its slots, node by node.

    Each node's part of a pool is one placement group, which must lie on one node of the cluster.
    Pools with shares of a device have one bundle per node together: Ray gives a bundle of at most
    one GPU a single GPU, so all of them get the same one. Replicas that may leave have a placement
    group each, on any node.

    Args:
        cfg: the whole config; placement.pools and placement.roles count here.
        device: "cuda" or "cpu".
        replicas: of those that may leave no more than so many are reserved; None: all.

    Raises:
        ConfigError: the cluster has too little; the message names the pool, what it needs and what
            is free.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    cores_of_pool = process_cores(cfg, device)
    slots_of_part: dict[tuple[str, int], list[ProcessSlot]] = {}
    for pool, node in _largest_part_first(cfg):
        slots_per_node = processes_per_node(cfg, pool)
        count = slots_per_node[node]
        first = sum(slots_per_node[:node])
        width = devices_of_process(cfg, pool)
        key = f"placement.pools.{pool}={cfg.placement.pools[pool]}"
        if _is_elastic(cfg, pool):
            if replicas is not None:
                count = min(count, max(0, replicas - first))
            places = [(_reserve(cfg, key, node, [width], resource), 0) for _ in range(count)]
        else:
            group = _reserve(cfg, key, node, [width] * count, resource)
            places = [(group, bundle) for bundle in range(count)]
        slots = []
        for number, (group, bundle) in enumerate(places):
            cores = tuple(cores_of_pool[pool][first + number])
            slots.append(ProcessSlot(group, bundle, node, cores, width))
        slots_of_part[pool, node] = slots
    slots_of_part |= _shared_slots(cfg, resource, cores_of_pool)

    pools: dict[str, list[ProcessSlot]] = {}
    for pool, sizes in cfg.placement.pools.items():
        pools[pool] = []
        for node in range(len(sizes)):
            pools[pool] += slots_of_part[pool, node]
    return pools


def reserve_replicas(
    cfg: Config, device: str, count: int, present: Sequence[ProcessSlot]
) -> list[ProcessSlot]:
    """Slots for replicas that join, each with a placement group of its own on any node.

    On one machine they get the cores of a replica of the config, those that the fewest have, and
    take none from a trainer.

    Args:
        cfg: the whole config.
        device: "cuda" or "cpu".
        count: of the slots.
        present: the slots of the replicas that there are.

    Raises:
        ConfigError: so many do not fit; nothing stays reserved.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    pool = cfg.placement.roles["rollout"]
    width = devices_of_process(cfg, pool)
    free = ray.available_resources().get(resource, 0)
    bundles = [{resource: width}]
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(count)]
    deadline = time.monotonic() + JOIN_RESERVE_S
    for group in groups:
        if not group.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            for reserved in groups:
                remove_placement_group(reserved)
            each = "" if width == 1 else f", {width} on one node for each replica"
            raise ConfigError(
                f"needs {count * width} {resource}s{each}, but the cluster has {free:g} free"
            )
    choices = [tuple(cores) for cores in process_cores(cfg, device)[pool]]
    users = Counter(slot.cores for slot in present)
    slots = []
    for group in groups:
        cores = min(choices, key=lambda choice: users[choice])
        users[cores] += 1
        slots.append(ProcessSlot(group, 0, 0, cores, width))
    return slots


def _is_elastic(cfg: Config, pool: str) -> bool:
    """Whether this is the pool of replicas that may come and go."""
    return pool == cfg.placement.roles.get("rollout") and not why_not_elastic(cfg)


def _largest_part_first(cfg: Config) -> list[tuple[str, int]]:
    """(pool, node of the pool) of all parts with whole devices. A small part fits anywhere, and
    reserved first it might take the only node that a large one fits on."""

    def size(part: tuple[str, int]) -> float:
        pool, node = part
        # Of such a part only a replica must lie on one node.
        is_elastic = _is_elastic(cfg, pool)
        return devices_of_process(cfg, pool) if is_elastic else cfg.placement.pools[pool][node]

    parts = []
    for pool, sizes in cfg.placement.pools.items():
        if not shares_device(cfg, pool):
            parts += [(pool, node) for node in range(len(sizes))]
    return sorted(parts, key=size, reverse=True)


def _shared_slots(
    cfg: Config, resource: str, cores_of_pool: dict[str, CoresPerProcess]
) -> dict[tuple[str, int], list[ProcessSlot]]:
    """(pool, node) -> the slot of each pool with shares, on the device of the node that they
    share."""
    slots_of_part = {}
    for node in range(shared_devices(cfg)):
        shares = {}
        for pool, sizes in cfg.placement.pools.items():
            if shares_device(cfg, pool) and node < len(sizes):
                shares[pool] = device_share(cfg, pool)
        shown = ", ".join(f"{pool}: [{share:g}]" for pool, share in shares.items())
        booked = min(1.0, sum(shares.values()))
        group = _reserve(cfg, f"placement.pools={{{shown}}}", node, [booked], resource)
        for pool, share in shares.items():
            cores = tuple(cores_of_pool[pool][node])
            slots_of_part[pool, node] = [ProcessSlot(group, 0, node, cores, share)]
    return slots_of_part


def _reserve(
    cfg: Config, key: str, node: int, bundles: Sequence[float], resource: str
) -> PlacementGroup:
    """A placement group on one node. Raises ConfigError: no node has so much.

    Args:
        key: names the pool in the error.
        node: of the pool.
        bundles: devices of each bundle.
        resource: "GPU" or "CPU".
    """
    group = placement_group([{resource: size} for size in bundles], strategy="STRICT_PACK")
    if not group.wait(timeout_seconds=min(RESERVE_TIMEOUT_S, cfg.trainer.start_timeout_s)):
        free = ray.available_resources().get(resource, 0)
        needs = f"node {node} needs {sum(bundles):g} {resource}s on one node"
        has = f"the cluster has {free:g} free in all; make the pool smaller or the cluster larger"
        raise ConfigError(f"{key}: {needs}, but {has}")
    return group


def are_reserved(pools: dict[str, list[ProcessSlot]]) -> bool:
    """Whether all slots are still there. Those of a node that has failed are not: Ray looks for
    another node, and what is started in them waits meanwhile."""
    groups = {id(slot.group): slot.group for slots in pools.values() for slot in slots}
    return all(placement_group_table(group)["state"] == "CREATED" for group in groups.values())


def describe_pools(cfg: Config, pools: dict[str, list[ProcessSlot]]) -> str:
    """What `create_pools` has reserved, and where: "pool train [2, 2] on 10.0.0.1 10.0.0.2: actor,
    critic; ..."."""
    host_of_node = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    descriptions = []
    for pool, slots in pools.items():
        hosts: dict[tuple[int, str], str] = {}
        for group, node in {id(slot.group): (slot.group, slot.node) for slot in slots}.values():
            node_id = placement_group_table(group)["bundles_to_node_id"][0]
            hosts[node, node_id] = host_of_node[node_id]
        roles = ", ".join(roles_in_pool(cfg, pool))
        shape = cfg.placement.pools[pool]
        descriptions.append(f"pool {pool} {shape} on {' '.join(hosts.values())}: {roles}")
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
    threads), `beside_driver` (whether it must run on the driver's node).

    Args:
        cls: the actor's class.
        args: of its constructor.
        slot: where it runs, bound to the slot's cores; None: anywhere.
        device: "cuda" or "cpu".
        share: the part of the slot's devices that Ray books for it; several roles may share a slot.
        env: environment variables.
        log: the file for its output; empty: Ray's own.
    """
    cores = slot.cores if slot else ()
    actor_class = _pinned_class(cls, cores, log)
    variables = dict.fromkeys(THREAD_VARIABLES, str(_thread_count(slot, device)))
    options: dict[str, Any] = {
        "num_cpus": 0,
        "runtime_env": {"env_vars": variables | (env or {})},
        "max_restarts": getattr(cls, "restarts", 0),
        "max_concurrency": getattr(cls, "calls_at_once", None),
    }
    if slot:
        options |= _slot_options(slot, share)
    elif getattr(cls, "beside_driver", False):
        node = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
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
            never_fail()
            super().__init__(*args)

    Pinned.__name__ = cls.__name__
    Pinned.__qualname__ = cls.__name__
    return Pinned


def _thread_count(slot: ProcessSlot | None, device: str) -> int:
    """Threads for OpenMP and MKL: one for each of the slot's cores.

    On GPUs an equal part of the host's cores for each of its GPUs: Ray would set one thread, and
    the optimizer of offloaded parameters runs on the host.
    """
    if device == "cuda" and slot:
        gpus_of_node = max(1, _most_gpus_of_a_node(), len(slot.group.bundle_specs))
        return max(1, (os.cpu_count() or 1) // gpus_of_node)
    return max(1, len(slot.cores) if slot else 0)


@functools.cache
def _most_gpus_of_a_node() -> int:
    """The driver's node may have none."""
    nodes = ray.nodes() if ray.is_initialized() else []
    counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    return max(hardware.count_gpus(), *counts, 0)


def _slot_options(slot: ProcessSlot, share: float) -> dict[str, Any]:
    """Ray's options for an actor that takes `share` of the slot."""
    bundle = slot.group.bundle_specs[slot.bundle]
    devices = slot.devices * share
    if devices < 1:
        # Rounded down: rounded up, the actors of a bundle would need more than it has.
        devices = math.floor(devices * RAY_FRACTIONS) / RAY_FRACTIONS
    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, slot.bundle),
        "num_gpus": devices if "GPU" in bundle else 0,
        "num_cpus": devices if "CPU" in bundle else 0,
    }
