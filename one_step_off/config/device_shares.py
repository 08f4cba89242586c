"""Pools and the devices that they use: whole ones, or a share of one.

A pool is a list with one entry per node. A whole number counts devices (GPUs; on CPUs: processes),
and each has a process of its own. A number below 1 is a share: the pool has one process on the
node, which uses that part of a device. All pools with shares on a node use the same device, so
`{rollout: [0.5], actor: [0.5]}` puts both on one GPU.
"""

import math

from one_step_off.config.schema import Config
from one_step_off.config.teachers import processes_per_slot

SHARE_TOLERANCE = 1e-6
"""Shares are decimal fractions, whose sum may exceed 1 by rounding."""


def shares_device(cfg: Config, pool: str) -> bool:
    """Whether the pool has a share of a device on each of its nodes, not whole devices."""
    return any(size < 1 for size in cfg.placement.pools[pool])


def device_share(cfg: Config, pool: str) -> float:
    """The part of a device that each process of the pool has: 1 where its devices are whole."""
    return float(min([1, *cfg.placement.pools[pool]]))


def devices_per_node(cfg: Config, pool: str) -> list[int]:
    """The number of devices on each node of a pool; a share counts as one device."""
    return [math.ceil(size) for size in cfg.placement.pools[pool]]


def devices_of_pool(cfg: Config, pool: str) -> int:
    """The number of devices that a pool uses."""
    return sum(devices_per_node(cfg, pool))


def shared_devices(cfg: Config) -> int:
    """The number of devices that are used by pools with shares: one per node."""
    nodes = [len(sizes) for pool, sizes in cfg.placement.pools.items() if shares_device(cfg, pool)]
    return max(nodes, default=0)


def devices_of_run(cfg: Config) -> int:
    """The number of devices that all pools use together."""
    whole = sum(
        devices_of_pool(cfg, pool) for pool in cfg.placement.pools if not shares_device(cfg, pool)
    )
    return whole + shared_devices(cfg)


def memory_share(cfg: Config, role: str) -> float:
    """The part of a device's memory that a process of a role with a model may use.

    Roles in one pool with a share divide it evenly, since each keeps its weights there. 1 where the
    pool has whole devices: then nothing limits the role.
    """
    pool = cfg.placement.roles.get(role)
    if pool not in cfg.placement.pools:  # a worker outside of a run
        return 1.0
    if not shares_device(cfg, pool):
        return 1.0
    holders = processes_per_slot(cfg, pool)
    if pool == cfg.placement.roles.get("rollout"):
        holders -= 1
    return device_share(cfg, pool) / holders


def on_one_node(sizes: list[int | float]) -> int | float:
    """The size of a pool with these sizes per node, if all of it were on a single node."""
    return sizes[0] if sizes[0] < 1 else sum(sizes)
