"""Pools on several nodes: where their shares go, the largest first."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from one_step_off.cluster import placement
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.runtime.process_env import CPU_TRAINER_MALLOC, engine_env
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
        self.sizes: list[int] = []

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        size = sum(bundle["GPU"] for bundle in bundles)
        cluster_node = self.free_gpus.index(max(self.free_gpus))
        fits = strategy == "STRICT_PACK" and self.free_gpus[cluster_node] >= size
        if fits:
            self.free_gpus[cluster_node] -= size
            self.sizes.append(size)
        return FakeGroup(cluster_node, bundles, fits)

    def remove(self, group: Any) -> None:
        if group.fits:
            self.free_gpus[group.cluster_node] += sum(b["GPU"] for b in group.bundle_specs)


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
    monkeypatch: pytest.MonkeyPatch,
    cluster: FakeCluster,
    *overrides: str,
    replicas: int | None = None,
) -> dict[str, list[SlotPosition]]:
    """Pool -> the positions of its slots."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(placement, "placement_group", cluster.placement_group)
    monkeypatch.setattr(placement, "remove_placement_group", cluster.remove)
    monkeypatch.setattr(
        placement.ray, "available_resources", lambda: {"GPU": float(sum(cluster.free_gpus))}
    )
    cfg = load_config([*BASE, *overrides])
    validate(cfg, 0)
    pools: dict[str, Any] = placement.create_pools(cfg, "cuda", replicas)
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


WIDE_REPLICAS = (
    "rollout.tensor_parallel_size=2",
    "placement.pools={rollout: [4, 2], actor: [4]}",
)


def test_each_replica_that_may_leave_has_a_group_of_its_own(monkeypatch):
    cluster = FakeCluster(8, 4)
    pools = create_pools(monkeypatch, cluster, *WIDE_REPLICAS)
    positions = [(slot.pool_node, slot.bundle) for slot in pools["rollout"]]
    assert positions == [(0, 0), (0, 0), (1, 0)]
    assert cluster.sizes == [4, 2, 2, 2]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_a_later_attempt_needs_no_room_for_replicas_that_have_left(monkeypatch, replicas):
    kept = min(replicas, 3)
    cluster = FakeCluster(4, 2 * kept)
    pools = create_pools(monkeypatch, cluster, *WIDE_REPLICAS, replicas=replicas)
    assert [slot.pool_node for slot in pools["rollout"]] == [0, 0, 1][:kept]
    assert cluster.sizes == [4] + kept * [2]


def test_replicas_that_share_their_pool_are_bundles_of_one_group(monkeypatch):
    cluster = FakeCluster(8)
    overrides = (
        "placement.pools={all: [4]}",
        "placement.roles={rollout: all, actor: all}",
        "pipeline.staleness=0",
    )
    pools = create_pools(monkeypatch, cluster, *overrides)
    assert [slot.bundle for slot in pools["all"]] == [0, 1, 2, 3]
    assert cluster.sizes == [4]


def test_replicas_that_join_get_groups_of_their_own_or_nothing_stays_reserved(monkeypatch):
    cluster = FakeCluster(8, 4)
    create_pools(monkeypatch, cluster, *WIDE_REPLICAS)
    cfg = load_config([*BASE, *WIDE_REPLICAS])
    slot = placement.reserve_replicas(cfg, "cuda", 1, [])[0]
    assert slot.group.bundle_specs == [{"GPU": 2}]
    assert sum(cluster.free_gpus) == 0
    cluster.free_gpus = [1, 3]
    words = "needs 4 GPUs, 2 on one node for each replica, but the cluster has 4 free"
    with pytest.raises(ConfigError, match=words):
        placement.reserve_replicas(cfg, "cuda", 2, [])
    assert cluster.free_gpus == [1, 3]


def test_a_wide_replica_gets_a_node_before_smaller_parts_take_some_of_each(monkeypatch):
    overrides = (
        "rollout.tensor_parallel_size=8",
        "placement.pools={rollout: [8], actor: [4], critic: [4]}",
        "placement.roles={rollout: rollout, actor: actor, critic: critic}",
        "algorithm.adv_estimator=gae",
    )
    cluster = FakeCluster(8, 8)
    pools = create_pools(monkeypatch, cluster, *overrides)
    assert cluster.sizes == [8, 4, 4]
    assert [slot.cluster_node for slot in pools["actor"] + pools["critic"]] == 8 * [1]


def test_replicas_that_join_one_after_another_share_cores_with_different_ones(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement.ray, "available_resources", lambda: {"CPU": 9.0})
    monkeypatch.setattr(
        placement, "placement_group", lambda bundles, strategy: FakeGroup(0, bundles, True)
    )
    monkeypatch.setattr(placement, "process_cores", lambda cfg, device: {"rollout": [[0], [1]]})
    cfg = load_config([*BASE, "placement.pools={rollout: [2], actor: [1]}"])
    present = [placement.ProcessSlot(Any, 0, 0, (core,)) for core in (0, 1)]
    for _ in range(2):
        present += placement.reserve_replicas(cfg, "cpu", 1, present)
    assert sorted(slot.cores for slot in present) == [(0,), (0,), (1,), (1,)]
    del present[0]
    assert placement.reserve_replicas(cfg, "cpu", 1, present)[0].cores == present[1].cores


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


def page_faults(**env: str) -> int:
    """Of a process that allocates and frees 64 MiB twenty times."""
    command = [sys.executable, "-c", PAGE_FAULTS_OF_A_THREAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_trainer_on_cpus_keeps_the_memory_that_its_threads_free():
    pages = (64 << 20) // resource.getpagesize()
    assert page_faults() > 19 * pages, "without the setting every block is mapped again"
    assert page_faults(GLIBC_TUNABLES=CPU_TRAINER_MALLOC) < 2 * pages


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here"
)
def test_an_engine_on_cpus_faults_large_memory_in_by_huge_pages():
    pages = (64 << 20) // resource.getpagesize()
    (tunables,) = {engine_env("cpu", host)["GLIBC_TUNABLES"] for host in ("", "127.0.0.1")}
    assert page_faults(GLIBC_TUNABLES=tunables) < pages
    assert "GLIBC_TUNABLES" not in engine_env("cuda", "")


def test_pools_with_shares_have_one_bundle(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(placement, "placement_group", FakeCluster(2).placement_group)
    pools = "placement.pools={rollout: [0.3], actor: [0.5], critic: [1]}"
    roles = "placement.roles={rollout: rollout, actor: actor, critic: critic, ref: actor}"
    keys = ("algorithm.adv_estimator=gae", "algorithm.kl_coef=0.1")
    cfg = load_config([*BASE, pools, roles, *keys])
    validate(cfg, 0)
    slots: dict[str, Any] = placement.create_pools(cfg, "cuda")
    (rollout,), (actor,), (critic,) = slots["rollout"], slots["actor"], slots["critic"]
    assert rollout.shares_bundle(actor)
    assert not critic.shares_bundle(actor)
    assert actor.group.bundle_specs == [{"GPU": 0.8}]
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda *_: None)
    options = placement._slot_options(actor, share=1 / 2)
    assert options["num_gpus"] == 0.25
    assert placement._slot_options(critic, share=1.0)["num_gpus"] == 1


def test_what_is_booked_never_exceeds_the_bundle(monkeypatch):
    """Three roles in a half: a sixth of a GPU each. Rounded up, Ray would start only two."""
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda *_: None)
    group: Any = FakeGroup(0, [{"GPU": 0.5}], True)
    slot = placement.ProcessSlot(group, 0, 0, (), 0.5)
    booked = placement._slot_options(slot, share=1 / 3)["num_gpus"]
    assert 3 * booked <= 0.5
    assert booked == pytest.approx(1 / 6, abs=1e-4)


GPU_OF_EACH_ROLE = """
import ray
from one_step_off.cluster.placement import create_pools, spawn
from one_step_off.config.loading import load_config

class Role:
    def gpus(self):
        return ray.get_gpu_ids()

ray.init(address="local", num_gpus=4, num_cpus=4, include_dashboard=False, log_to_driver=False)
cfg = load_config(["placement.pools={rollout: [0.5], actor: [0.3], critic: [2]}",
                   "placement.roles={rollout: rollout, actor: actor, critic: critic}"])
pools = create_pools(cfg, "cuda")
roles = [spawn(Role, (), slot, "cuda") for slots in pools.values() for slot in slots]
print(ray.get([role.gpus.remote() for role in roles]))
"""


def test_ray_gives_pools_with_shares_the_same_gpu():
    """Ray itself, which takes the number of GPUs as given: no GPU is needed."""
    result = subprocess.run(
        [sys.executable, "-c", GPU_OF_EACH_ROLE], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rollout, actor, *critic = eval(result.stdout.splitlines()[-1])
    assert rollout == actor
    assert len(rollout) == 1
    assert len({*map(tuple, [rollout, *critic])}) == 3
