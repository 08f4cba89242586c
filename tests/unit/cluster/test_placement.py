"""Pools on several nodes: where the shares go, and that large ones are not shut out by small ones."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from typing import Any

import pytest

from one_step_off.cluster import placement
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.runtime.processes import KEEPING
from one_step_off.runtime.validation import validate

BASE = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=1",
    "placement.device=cuda",
)


class Nodes:
    """Stands for a cluster: like Ray, it gives a group that must lie on one node the emptiest one."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)

    def group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        size = sum(bundle["GPU"] for bundle in bundles)
        node = self.free.index(max(self.free))
        fits = strategy == "STRICT_PACK" and self.free[node] >= size
        self.free[node] -= size if fits else 0

        class Group:
            where = node
            bundle_specs = bundles

            def wait(self, timeout_seconds: float) -> bool:
                return fits

        return Group()


def seats(
    monkeypatch: pytest.MonkeyPatch, nodes: Nodes, *overrides: str
) -> dict[str, list[tuple[int, int, int]]]:
    """Pool -> (node of the cluster, node of the pool, bundle) of each seat."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(placement, "placement_group", nodes.group)
    monkeypatch.setattr(
        placement.ray, "available_resources", lambda: {"GPU": float(sum(nodes.free))}
    )
    cfg = load_config([*BASE, *overrides])
    validate(cfg, 0)
    found: dict[str, Any] = placement.create_pools(cfg, "cuda")
    return {pool: [(s.group.where, s.node, s.bundle) for s in of] for pool, of in found.items()}


@pytest.mark.parametrize("actor", ["[4, 8]", "[8, 4]"])
def test_a_whole_node_is_left_for_the_largest_share(
    monkeypatch: pytest.MonkeyPatch, actor: str
) -> None:
    found = seats(monkeypatch, Nodes(8, 8), f"placement.pools={{rollout: [4], actor: {actor}}}")
    large = 0 if actor == "[8, 4]" else 1
    assert [len(of) for of in found.values()] == [4, 12] and list(found) == ["rollout", "actor"]
    assert {where for where, node, _ in found["actor"] if node == large} == {0}
    assert {where for where, node, _ in found["actor"] if node != large} | {
        s[0] for s in found["rollout"]
    } == {1}
    ranks = [node for _, node, _ in found["actor"]]
    assert ranks == sorted(ranks), "ranks count node by node"
    assert [bundle for _, node, bundle in found["actor"] if node == large] == list(range(8))


def test_a_replica_is_one_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = "rollout.tensor_parallel_size=2", "placement.pools={rollout: [4, 2], actor: [4]}"
    found = seats(monkeypatch, Nodes(8, 4), *wide)
    assert [(node, bundle) for _, node, bundle in found["rollout"]] == [(0, 0), (0, 1), (1, 0)]


def test_too_little_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"placement.pools.actor=\[12\]: node 0 needs 12 GPUs on one node, .* 16 free",
    ):
        seats(monkeypatch, Nodes(8, 8), "placement.pools={rollout: [4], actor: [12]}")


FREEING = """
import resource, threading
def work():
    for _ in range(20):
        b"x" * (64 << 20)
thread = threading.Thread(target=work); thread.start(); thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_trainer_on_cpus_keeps_the_memory_that_its_threads_free():
    def faults(**env: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", FREEING], env=env, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    pages = (64 << 20) // resource.getpagesize()
    assert faults() > 19 * pages, "else there is nothing to keep"
    assert faults(GLIBC_TUNABLES=KEEPING) < 2 * pages
