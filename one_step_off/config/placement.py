"""Where the processes of a config run: device, pools, processes per node, cores of each process.

A pool is a list with one entry per node. A whole number counts devices (GPUs; on CPUs: processes),
and each has a process of its own. A number below 1 is a share: the pool has one process on the
node, which uses that part of a device. All pools with shares on a node use the same device, so
`{rollout: [0.5], actor: [0.5]}` puts both on one GPU.
"""

import math
import os

from one_step_off.config import hardware
from one_step_off.config.hardware import CoresPerProcess
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config

MODEL_PARALLEL = ("tensor", "pipeline", "context", "expert", "sequence")
"""The dimensions of model parallelism, as in the keys `tensor_parallel_size` and so on."""

SHARE_TOLERANCE = 1e-6
"""Shares are decimal fractions, whose sum may exceed 1 by rounding."""


def resolved_device(cfg: Config, num_gpus: int | None = None) -> str:
    """The device of a run: "cuda" or "cpu".

    `num_gpus`: GPUs of this machine; None: they are counted, if `placement.device` is auto.
    """
    if cfg.placement.device != "auto":
        return cfg.placement.device
    if num_gpus is None:
        num_gpus = hardware.count_gpus()
    return "cuda" if num_gpus > 0 else "cpu"


def visible_gpu_count(cfg: Config) -> int:
    """GPUs that this machine offers to a run; 0 for a run on CPU, for which they are not
    counted.
    """
    if cfg.placement.device == "cpu":
        return 0
    return hardware.count_gpus()


def roles_in_pool(cfg: Config, pool: str) -> list[str]:
    """The roles that run in a pool."""
    return [role for role, own_pool in cfg.placement.roles.items() if own_pool == pool]


def shares_device(cfg: Config, pool: str) -> bool:
    """Whether the pool has a share of a device on each of its nodes, not whole devices."""
    return any(size < 1 for size in cfg.placement.pools[pool])


def rollout_and_actor_share(cfg: Config) -> bool:
    """Whether rollout and actor use one device: they have one pool, or each a share, or the actor's
    devices are lent."""
    roles = cfg.placement.roles
    if roles["rollout"] == roles["actor"] or cfg.placement.lend:
        return True
    return all(shares_device(cfg, roles[role]) for role in ("rollout", "actor"))


def why_not_elastic(cfg: Config) -> str:
    """Why the number of replicas cannot change during a run; "" if it can."""
    pool = cfg.placement.roles.get("rollout")
    if pool is None:
        return "the run has no rollout replicas"
    others = roles_in_pool(cfg, pool)
    others.remove("rollout")
    if others:
        return f"the replicas share the pool {pool} with {', '.join(others)}"
    if shares_device(cfg, pool):
        return f"the pool {pool} has a share of a device, not whole devices"
    if cfg.placement.lend:
        return "placement.lend=true has replicas on the actor's devices too"
    return ""


def lent_pool(cfg: Config) -> str | None:
    """The pool whose devices generate too while their roles wait: the actor's; None: none does."""
    lends = cfg.placement.lend and "rollout" in cfg.placement.roles
    return cfg.placement.roles.get("actor") if lends else None


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


def start_limit_s(cfg: Config, role: str) -> float:
    """Seconds for a process of a role to start: `trainer.start_timeout_s`, and as long again where
    it may have to wait for its turn on a GPU that it shares (`cluster/device_turns.py`)."""
    limit_s = cfg.trainer.start_timeout_s
    pool = cfg.placement.roles.get(role)
    takes_turns = pool in cfg.placement.pools and shares_device(cfg, pool)
    if takes_turns and cfg.placement.device != "cpu":
        return 2 * limit_s
    return limit_s


def share_beside_engine(cfg: Config) -> float:
    """The part of a device's memory that a replica has beside its engine's own: for the buffers and
    communicators of the weight sync."""
    pool = cfg.placement.roles["rollout"]
    share = device_share(cfg, pool) if pool in cfg.placement.pools else 1.0
    used = share * cfg.rollout.gpu_memory_utilization
    given = cfg.rollout.engine_kwargs.get("gpu_memory_utilization", used)  # of the whole device
    return max(0.0, share - given)


def on_one_node(sizes: list[int | float]) -> int | float:
    """The size of a pool with these sizes per node, if all of it were on a single node."""
    return sizes[0] if sizes[0] < 1 else sum(sizes)


def processes_per_slot(cfg: Config, pool: str | None) -> int:
    """How many processes share each slot of a pool: one of each role and of each teacher, and a
    lent replica."""
    roles = [role for role, its_pool in cfg.placement.roles.items() if its_pool == pool]
    count = len(roles)
    if pool is not None and pool == lent_pool(cfg):
        count += 1
    if "teacher" in roles:
        count += len({cfg.teacher.path, *cfg.teacher.by_source.values()}) - 1
    return count


def data_parallel_size(cfg: Config, role: str) -> int:
    """Into how many parts the ranks of a role split a batch.

    FSDP: one part per rank, or per group of ranks that divide its sequences. Megatron: one part per
    group of ranks that holds one whole model.
    """
    settings = role_settings(cfg, role)
    ranks = devices_of_pool(cfg, cfg.placement.roles[role])
    ranks_per_model = (
        settings.tensor_parallel_size
        * settings.pipeline_parallel_size
        * settings.context_parallel_size
        * settings.sequence_parallel_size
    )
    return ranks // ranks_per_model


def processes_per_node(cfg: Config, pool: str) -> list[int]:
    """The number of processes on each node of a pool.

    One process per GPU, or per share of a GPU; in a pool of engines one per
    `tensor_parallel_size` GPUs.
    """
    gpus_per_process = devices_of_process(cfg, pool)
    return [gpus // gpus_per_process for gpus in devices_per_node(cfg, pool)]


def devices_of_process(cfg: Config, pool: str) -> int:
    """Whole devices of one process of the pool: the tensor parallel size of its engines, else 1."""
    if pool == cfg.placement.roles.get("rollout"):
        return cfg.rollout.tensor_parallel_size
    if pool == cfg.placement.roles.get("teacher"):
        settings = role_settings(cfg, "teacher")
        if settings.backend == "vllm":
            return settings.tensor_parallel_size
    return 1


def process_cores(
    cfg: Config, device: str, cores: list[int] | None = None
) -> dict[str, CoresPerProcess]:
    """Pool name -> the cores of each of its processes; empty lists where they are not pinned.

    Rollout and trainers in separate pools share no core where there are at least two. The
    exception: in a synchronous run (staleness 0) with more processes than cores, they share all of
    them. With shares of devices, each device is an equal part of the cores, and the processes that
    share it have the same cores.

    Args:
        device: "cpu" or "cuda"; processes on GPUs are not pinned.
        cores: the cores to divide; None: those that this process may use.
    """
    counts = {pool: sum(processes_per_node(cfg, pool)) for pool in cfg.placement.pools}
    plan: dict[str, CoresPerProcess] = {pool: [[]] * count for pool, count in counts.items()}
    if device != "cpu" or not cfg.placement.pin_cores or not _runs_on_this_node_only(cfg):
        return plan
    if cores is None:
        cores = sorted(os.sched_getaffinity(0))
    if shared_devices(cfg):
        return _cores_of_devices(cfg, cores)
    rollout_pool = cfg.placement.roles.get("rollout")
    rollout_count = counts.pop(rollout_pool, 0)
    trainer_count = sum(counts.values())
    crowded = rollout_count + trainer_count > len(cores)
    alone = rollout_count == 0 or trainer_count == 0
    share_cores = alone or (cfg.pipeline.staleness == 0 and crowded)
    rollout_cores, trainer_cores = hardware.divide_cores(
        rollout_count, trainer_count, cores, share_cores
    )
    if rollout_pool is not None:
        plan[rollout_pool] = rollout_cores
    for pool, count in counts.items():
        plan[pool] = trainer_cores[:count]
        trainer_cores = trainer_cores[count:]
    return plan


def _cores_of_devices(cfg: Config, cores: list[int]) -> dict[str, CoresPerProcess]:
    """As `process_cores`, where pools share a device: it comes first, then the whole devices."""
    cores_of_device = hardware.divide_evenly(devices_of_run(cfg), cores)
    shared = cores_of_device[: shared_devices(cfg)]
    whole = cores_of_device[shared_devices(cfg) :]
    plan = {}
    for pool in cfg.placement.pools:
        count = sum(processes_per_node(cfg, pool))
        if shares_device(cfg, pool):
            plan[pool] = shared[:count]
        else:
            plan[pool] = whole[:count]
            whole = whole[count:]
    return plan


def _runs_on_this_node_only(cfg: Config) -> bool:
    """Whether all processes run on this machine: the cores of other machines are not known here."""
    if os.environ.get("RAY_ADDRESS"):
        return False
    return all(len(gpus_per_node) == 1 for gpus_per_node in cfg.placement.pools.values())


def placement_text(cfg: Config, cores: list[int] | None = None) -> str:
    """What runs where, for a valid config: one line per pool.

    Example: "all [2] on cpu: rollout x 2, actor x 2; cores 0 1".
    """
    device = resolved_device(cfg)
    lines = []
    for pool, cores_per_process in process_cores(cfg, device, cores).items():
        roles_of_pool = [role for role, name in cfg.placement.roles.items() if name == pool]
        roles = [_role_text(cfg, role, len(cores_per_process)) for role in roles_of_pool]
        if pool == lent_pool(cfg):
            roles.append(f"rollout x {len(cores_per_process)} while the actor waits")
        line = f"{pool} {cfg.placement.pools[pool]} on {device}: {', '.join(roles)}"
        if any(cores_per_process):
            core_lists = [",".join(map(str, own_cores)) for own_cores in cores_per_process]
            line += f"; cores {' '.join(core_lists)}"
        lines.append(line)
    return "\n".join(lines)


def _role_text(cfg: Config, role: str, processes: int) -> str:
    """A role with its processes and its model parallelism, as "actor x 4 (TP 2)"."""
    settings = cfg.rollout if role == "rollout" else role_settings(cfg, role)
    sizes = []
    for dimension in MODEL_PARALLEL:
        size = getattr(settings, f"{dimension}_parallel_size", 1)
        if size > 1:
            sizes.append(f"{dimension[0].upper()}P {size}")
    text = f"{role} x {processes}"
    if sizes:
        text += f" ({' x '.join(sizes)})"
    return text
