"""The processes of a run on a shared device: who receives weights without a network, and the
restart of an engine beside a trainer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.placement import ProcessSlot
from one_step_off.config.loading import load_config
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.runtime.persistent_actors import PersistentActors
from one_step_off.runtime.processes import RunProcesses
from tests.unit.stand_ins import ActorMethod

HALVES = "placement.pools={rollout: [0.5, 0.5], actor: [0.5, 0.5]}"


def processes(*overrides: str, **attributes: Any) -> Any:
    """A `RunProcesses` that has started nothing. `attributes`: of it, or of its engines."""
    run: Any = object.__new__(RunProcesses)
    run.cfg = load_config(["model.path=tiny:qwen2", *overrides])
    run.engines = object.__new__(PersistentActors)
    run.engines.cfg = run.cfg
    run.engines.kv_cache_bytes = {}
    run.engines.endpoint = None
    run.engines.lent_slots = {}
    run.engines.former_rollout = None
    run.device = "cpu"
    run.keeps_engines = False
    run.reused_groups = set()
    for name, value in attributes.items():
        of_engines = name in ("pools", "rollout", "lent_slots")
        setattr(run.engines if of_engines else run, name, value)
    return run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_shared_device_the_rank_sends_to_the_replica_beside_it(device: str) -> None:
    groups: list[Any] = [object(), object()]  # a bundle on each of two nodes
    slots = [ProcessSlot(group, 0, node, (), 0.5) for node, group in enumerate(groups)]
    pools = {"rollout": slots, "actor": slots}
    run = processes(HALVES, pools=pools, device=device)
    assert run._replicas_on_device_of_rank() == [[0], [1]]


@pytest.mark.parametrize(("device", "expected"), [("cpu", [[2, 3], [2, 3]]), ("cuda", [[2], [3]])])
def test_the_rank_on_a_lent_device_sends_to_the_lent_replica_there(
    device: str, expected: list[list[int]]
) -> None:
    rollout = [ProcessSlot(object(), 0, 0, ()) for _ in range(2)]
    group: Any = object()
    actor = [ProcessSlot(group, bundle, 0, ()) for bundle in range(2)]
    pools = {"rollout": rollout, "actor": actor}
    lent = dict(enumerate(actor, start=2))
    run = processes("placement.lend=true", pools=pools, lent_slots=lent, device=device)
    assert run._replicas_on_device_of_rank() == expected


def test_engines_load_and_lent_ones_sleep_before_the_trainers_load() -> None:
    order: list[str] = []
    trainers = SimpleNamespace(
        colocated=None, setup=ActorMethod(lambda: order.append("trainers")).remote
    )
    sync = SimpleNamespace(connect=ActorMethod(lambda: order.append("sync")).remote)
    run = processes(
        "placement.lend=true",
        pools={},
        lent_slots={1: None},
        groups={"actor": trainers},
        roles=SimpleNamespace(sync=sync),
    )
    run.engines.load = ActorMethod(lambda: order.append("engines"), delay=0.02).remote
    asyncio.run(run.setup())
    assert order == ["engines", "trainers", "sync"]


def test_on_separate_devices_all_weights_go_over_the_network() -> None:
    group: Any = object()
    trainer_group: Any = object()
    rollout = [ProcessSlot(group, bundle, 0, ()) for bundle in range(2)]
    actor = [ProcessSlot(trainer_group, bundle, 0, ()) for bundle in range(2)]
    run = processes(pools={"rollout": rollout, "actor": actor}, device="cuda")
    assert run._replicas_on_device_of_rank() == [[], []]


def test_a_restarted_engine_gets_the_kv_cache_of_the_first_start() -> None:
    run = processes(HALVES, "rollout.engine_kwargs={max_num_seqs: 8}").engines
    assert run._replica_cfg(0) is run.cfg, "the first start measures"
    run.kv_cache_bytes = {0: 1 << 30}
    restarted = run._replica_cfg(0)
    arguments = engine_args(restarted, "cuda")
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert arguments["gpu_memory_utilization"] < 0.1, "the trainer has taken memory by then"
    assert arguments["max_num_seqs"] == 8
    assert run._replica_cfg(1) is run.cfg
    assert "kv_cache_memory_bytes" not in run.cfg.rollout.engine_kwargs


class Parts:
    """Stands for all roles; notes the order in which they load."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def group(self, name: str, colocated: Any = None) -> Any:
        async def setup() -> None:
            self.loaded.append(f"{name} begins")
            await asyncio.sleep(0)
            self.loaded.append(f"{name} ends")

        return SimpleNamespace(setup=setup, colocated=colocated, replicas=[], role=name)

    def run(self, *overrides: str, **attributes: Any) -> Any:
        """A `RunProcesses` of these roles: the replicas and the config's others."""

        async def connect() -> None:
            self.loaded.append("connected")

        rollout = self.group("rollout")
        roles = SimpleNamespace(rollout=rollout, sync=SimpleNamespace(connect=connect))
        run = processes(*overrides, roles=roles, rollout=rollout, **attributes)
        others = [role for role in run.cfg.placement.roles if role != "rollout"]
        run.groups = {role: self.group(role) for role in others}
        return run


@pytest.mark.parametrize("sizes", ["[0.5]", "[1]"])
def test_engines_and_trainers_load_at_once(sizes: str) -> None:
    """On a GPU that they share the processes themselves take turns."""
    parts = Parts()
    asyncio.run(parts.run(f"placement.pools={{rollout: {sizes}, actor: {sizes}}}").setup())
    assert parts.loaded[:3] == ["rollout begins", "actor begins", "rollout ends"]
    assert parts.loaded[-1] == "connected"


def test_a_teacher_that_was_kept_is_not_loaded_again() -> None:
    parts = Parts()
    overrides = (
        "placement.pools={rollout: [1], actor: [0.5], teacher: [0.5]}",
        "placement.roles={rollout: rollout, actor: actor, teacher: teacher}",
        "teacher.path=tiny:teacher",
        "teacher.backend=vllm",
    )
    asyncio.run(parts.run(*overrides, device="cuda", reused_groups={"teacher"}).setup())
    assert "teacher begins" not in parts.loaded
    assert "actor ends" in parts.loaded
