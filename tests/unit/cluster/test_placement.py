"""Pools on several nodes: where their shares go, the largest first."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from one_step_off.cluster import placement
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime.processes import CPU_TRAINER_MALLOC
from one_step_off.runtime.validation import validate

BASE = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=1",
    "placement.device=cuda",
)


class FakeCluster:
    """Nodes with free GPUs. As Ray does, it puts a group that must lie on one node on the
    emptiest."""

    def __init__(self, *free_gpus: int) -> None:
        self.free_gpus = list(free_gpus)

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        size = sum(bundle["GPU"] for bundle in bundles)
        cluster_node = self.free_gpus.index(max(self.free_gpus))
        fits = strategy == "STRICT_PACK" and self.free_gpus[cluster_node] >= size
        if fits:
            self.free_gpus[cluster_node] -= size
        return FakeGroup(cluster_node, bundles, fits)


@dataclass
class FakeGroup:
    cluster_node: int
    bundle_specs: list[dict[str, int]]
    fits: bool

    def wait(self, timeout_seconds: float) -> bool:
        return self.fits


class SlotPosition(NamedTuple):
    cluster_node: int
    pool_node: int
    bundle: int


def create_pools(
    monkeypatch: pytest.MonkeyPatch, cluster: FakeCluster, *overrides: str
) -> dict[str, list[SlotPosition]]:
    """Pool -> the positions of its slots."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(placement, "placement_group", cluster.placement_group)
    monkeypatch.setattr(
        placement.ray, "available_resources", lambda: {"GPU": float(sum(cluster.free_gpus))}
    )
    cfg = load_config([*BASE, *overrides])
    validate(cfg, 0)
    pools: dict[str, Any] = placement.create_pools(cfg, "cuda")
    positions = {}
    for pool, slots in pools.items():
        positions[pool] = [
            SlotPosition(slot.group.cluster_node, slot.node, slot.bundle) for slot in slots
        ]
    return positions


@pytest.mark.parametrize(("actor", "large_node"), [("[4, 8]", 1), ("[8, 4]", 0)])
def test_a_whole_node_is_left_for_the_largest_share(monkeypatch, actor, large_node):
    override = f"placement.pools={{rollout: [4], actor: {actor}}}"
    pools = create_pools(monkeypatch, FakeCluster(8, 8), override)
    assert list(pools) == ["rollout", "actor"]
    assert len(pools["rollout"]) == 4
    assert len(pools["actor"]) == 12
    large_share = [slot for slot in pools["actor"] if slot.pool_node == large_node]
    small_share = [slot for slot in pools["actor"] if slot.pool_node != large_node]
    assert {slot.cluster_node for slot in large_share} == {0}
    assert {slot.cluster_node for slot in small_share + pools["rollout"]} == {1}
    assert [slot.bundle for slot in large_share] == list(range(8))


def test_slots_are_ordered_node_by_node(monkeypatch):
    override = "placement.pools={rollout: [4], actor: [4, 8]}"
    pools = create_pools(monkeypatch, FakeCluster(8, 8), override)
    nodes = [slot.pool_node for slot in pools["actor"]]
    assert nodes == sorted(nodes)


def test_a_replica_is_one_bundle(monkeypatch):
    overrides = ("rollout.tensor_parallel_size=2", "placement.pools={rollout: [4, 2], actor: [4]}")
    pools = create_pools(monkeypatch, FakeCluster(8, 4), *overrides)
    positions = [(slot.pool_node, slot.bundle) for slot in pools["rollout"]]
    assert positions == [(0, 0), (0, 1), (1, 0)]


def test_a_cluster_that_is_too_small_is_one_line(monkeypatch):
    message = r"placement.pools.actor=\[12\]: node 0 needs 12 GPUs on one node, .* 16 free"
    with pytest.raises(ConfigError, match=message):
        create_pools(monkeypatch, FakeCluster(8, 8), "placement.pools={rollout: [4], actor: [12]}")


PAGE_FAULTS_OF_A_THREAD = """
import resource, threading
def work():
    for _ in range(20):
        b"x" * (64 << 20)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_trainer_on_cpus_keeps_the_memory_that_its_threads_free():
    def page_faults(**env: str) -> int:
        command = [sys.executable, "-c", PAGE_FAULTS_OF_A_THREAD]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return int(done.stdout)

    pages = (64 << 20) // resource.getpagesize()
    assert page_faults() > 19 * pages, "without the setting every block is mapped again"
    assert page_faults(GLIBC_TUNABLES=CPU_TRAINER_MALLOC) < 2 * pages
