"""The processes of a run on a shared device: who receives weights without a network, and the
restart of an engine beside a trainer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from one_step_off.cluster.placement import ProcessSlot
from one_step_off.config.loading import load_config
from one_step_off.rollout.engine_args import engine_args
from one_step_off.runtime.engines import RunEngines
from one_step_off.runtime.processes import RunProcesses

HALVES = "placement.pools={rollout: [0.5, 0.5], actor: [0.5, 0.5]}"


def processes(*overrides: str, **attributes: Any) -> Any:
    """A `RunProcesses` that has started nothing. `attributes`: of it, or of its engines."""
    run: Any = object.__new__(RunProcesses)
    run.cfg = load_config(["model.path=tiny:qwen2", *overrides])
    run.engines = object.__new__(RunEngines)
    run.engines.cfg = run.cfg
    run.engines.kv_cache_bytes = {}
    run.engines.endpoint = None
    run.engines.former_rollout = None
    run.keeps_engines = False
    run.kept_roles = set()
    for name, value in attributes.items():
        setattr(run.engines if name in ("pools", "rollout") else run, name, value)
    return run


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_shared_device_the_rank_sends_to_the_replica_beside_it(device: str) -> None:
    groups: list[Any] = [object(), object()]  # a bundle on each of two nodes
    slots = [ProcessSlot(group, 0, node, (), 0.5) for node, group in enumerate(groups)]
    pools = {"rollout": slots, "actor": slots}
    run = processes(HALVES, pools=pools, device=device)
    assert run._replicas_on_device_of_rank() == [[0], [1]]


def test_on_separate_devices_all_weights_go_over_the_network() -> None:
    group: Any = object()
    trainer_group: Any = object()
    rollout = [ProcessSlot(group, bundle, 0, ()) for bundle in range(2)]
    actor = [ProcessSlot(trainer_group, bundle, 0, ()) for bundle in range(2)]
    run = processes(pools={"rollout": rollout, "actor": actor}, device="cuda")
    assert run._replicas_on_device_of_rank() == [[], []]


def test_spares_have_a_part_of_their_slots() -> None:
    """Of the trainers' pool alone: a replica books its whole device."""
    keys = [
        "placement.pools={rollout: [1], actor: [1]}",
        "placement.roles={rollout: rollout, actor: actor, critic: actor, ref: actor}",
    ]
    without = processes(*keys).engines
    with_spares = processes(*keys, "trainer.warm_spares=true").engines
    assert without.slot_share("actor") == pytest.approx(1 / 3)
    assert with_spares.slot_share("actor") == pytest.approx(1 / 5)
    assert without.slot_share("rollout") == with_spares.slot_share("rollout") == 1.0


def test_a_restarted_engine_gets_the_kv_cache_of_the_first_start() -> None:
    run = processes(HALVES, "rollout.engine_kwargs={max_num_seqs: 8}").engines
    assert run._replica_cfg(0) is run.cfg, "the first start measures"
    run.kv_cache_bytes = {0: 1 << 30}
    restarted = run._replica_cfg(0)
    arguments = engine_args(restarted, "cuda")
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
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

        return SimpleNamespace(setup=setup, colocated=colocated, replicas=[])


@pytest.mark.parametrize(
    ("pools", "order"),
    [
        ("{rollout: [0.5], actor: [0.5]}", ["rollout begins", "rollout ends", "actor begins"]),
        ("{rollout: [1], actor: [1]}", ["actor begins", "rollout begins", "actor ends"]),
    ],
)
def test_on_a_shared_device_the_engine_measures_before_the_trainer_loads(pools, order) -> None:
    parts = Parts()

    async def connect() -> None:
        parts.loaded.append("connected")

    rollout = parts.group("rollout")
    roles = SimpleNamespace(rollout=rollout, sync=SimpleNamespace(connect=connect))
    groups = {"actor": parts.group("actor")}
    run = processes(f"placement.pools={pools}", roles=roles, groups=groups, rollout=rollout)
    asyncio.run(run.setup())
    assert parts.loaded[:3] == order
    assert parts.loaded[-1] == "connected"
