"""Resource pools as Ray placement groups, and the processes of each role in them."""

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from one_step_off.cluster.core_binding import pin_process
from one_step_off.config.loading import process_cores, processes_per_node
from one_step_off.config.schema import Config, ConfigError
from one_step_off.config.user_code import redirect_output


@dataclass(frozen=True)
class ProcessSlot:
    """A place for one process: a bundle of a placement group, its node in the pool, and its cores (CPU runs)."""

    group: PlacementGroup
    bundle: int
    node: int
    cores: tuple[int, ...]


def create_pools(cfg: Config, device: str) -> dict[str, list[ProcessSlot]]:
    """Reserve every pool; returns pool name -> its seats, node by node. Each node's share of a pool is one placement
    group that must lie on one node. Raises ConfigError: the cluster has too little; says which pool, what it wants and
    what there is."""
    resource, cores = "GPU" if device == "cuda" else "CPU", process_cores(cfg, device)
    seats: dict[tuple[str, int], list[ProcessSlot]] = {}
    shares = [
        (pool, node) for pool, shape in cfg.placement.pools.items() for node in range(len(shape))
    ]
    # The largest first: a small share may go anywhere, and must not take the one node that a large one fits on.
    for pool, node in sorted(shares, key=lambda share: -cfg.placement.pools[share[0]][share[1]]):
        width = cfg.rollout.tensor_parallel_size if pool == cfg.placement.roles["rollout"] else 1
        *before, count = processes_per_node(cfg, pool)[: node + 1]
        group = placement_group([{resource: width}] * count, strategy="STRICT_PACK")
        if not group.wait(timeout_seconds=min(60.0, cfg.trainer.start_timeout_s)):
            free = ray.available_resources().get(resource, 0)
            needs = f"node {node} needs {count * width} {resource}s on one node"
            has = f"the cluster has {free:g} free in all; give the pool less or the cluster more"
            raise ConfigError(
                f"placement.pools.{pool}={cfg.placement.pools[pool]}: {needs}, but {has}"
            )
        own = cores[pool][sum(before) :]
        seats[pool, node] = [ProcessSlot(group, i, node, tuple(own[i])) for i in range(count)]
    return {
        pool: [seat for at in shares if at[0] == pool for seat in seats[at]]
        for pool in cfg.placement.pools
    }


def describe_pools(cfg: Config, pools: dict[str, list[ProcessSlot]]) -> str:
    """What `create_pools` has reserved, and where: "pool train [2, 2] on 10.0.0.1 10.0.0.2: actor, critic; ..."."""
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    parts = []
    for pool, seats in pools.items():
        groups = {seat.node: seat.group for seat in seats}
        where = [
            hosts[placement_group_table(group)["bundles_to_node_id"][0]]
            for group in groups.values()
        ]
        roles = [role for role, at in cfg.placement.roles.items() if at == pool]
        parts.append(
            f"pool {pool} {cfg.placement.pools[pool]} on {' '.join(where)}: {', '.join(roles)}"
        )
    return "; ".join(parts)


def spawn(
    cls: type,
    args: tuple,
    seat: ProcessSlot | None,
    device: str,
    share: float = 1.0,
    env: dict | None = None,
    log: str = "",
) -> Any:
    """Start `cls(*args)` as a Ray actor in a seat (or anywhere), pinned to the seat's cores. `share`: part of the
    seat's GPUs and cores that Ray books for it; several roles may share a seat. `log`: the file that its output goes to;
    empty: Ray's own."""
    cores = seat.cores if seat else ()

    class Pinned(cls):  # the affinity must be set before torch starts its threads
        def __init__(self, *a: Any) -> None:
            pin_process(cores)
            if log:
                redirect_output(log)
            super().__init__(*a)

    Pinned.__name__ = Pinned.__qualname__ = cls.__name__
    threads = max(1, len(cores))
    if device == "cuda" and seat:
        # Left alone, Ray would give one thread: the optimiser of offloaded parameters runs on the host's cores.
        threads = max(1, (os.cpu_count() or 1) // max(1, len(seat.group.bundle_specs)))
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": variables | (env or {})}}
    options |= {
        "max_restarts": getattr(cls, "restarts", 0),
        "max_concurrency": getattr(cls, "calls_at_once", None),
    }
    if seat:
        bundle = seat.group.bundle_specs[seat.bundle]
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(seat.group, seat.bundle)
        options |= {
            "num_gpus": bundle.get("GPU", 0) * share,
            "num_cpus": bundle.get("CPU", 0) * share,
        }
    wrap = ray.remote(concurrency_groups=cls.threads) if hasattr(cls, "threads") else ray.remote
    return wrap(Pinned).options(**options).remote(*args)
