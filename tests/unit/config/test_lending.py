"""placement.lend: what is refused, and what the engine on a lent device gets."""

from __future__ import annotations

import pytest

from one_step_off.cluster.placement import ProcessSlot
from one_step_off.config import placement
from one_step_off.config.errors import ConfigError
from one_step_off.engines.transformers.engine import TransformersEngine
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.runtime.persistent_actors import PersistentActors
from tests.unit.config.config_helpers import SHARED, fault, good

LEND = "placement.lend=true"


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("placement.roles", [*SHARED, "pipeline.staleness=0"]),
        ("placement.pools", ["placement.pools={rollout: [0.5], actor: [0.5]}"]),
        ("placement.pools", ["placement.pools={rollout: [1], actor: [0.5]}"]),
        ("pipeline.staleness", ["pipeline.staleness=0"]),
        (
            "rollout.tensor_parallel_size",
            ["rollout.tensor_parallel_size=2", "placement.pools.rollout=[2]"],
        ),
        ("rollout.routing", ["rollout.routing=static"]),
        ("weight_sync.in_flight", ["weight_sync.in_flight=recompute"]),
        ("weight_sync.keep_sent", ["weight_sync.keep_sent=false"]),
        ("weight_sync.transport", ["weight_sync.transport=shared_folder"]),
        ("weight_sync.lora", ["weight_sync.lora=adapter", "model.lora_rank=8"]),
        ("agent.endpoint", ["agent.endpoint=true"]),
    ],
)
def test_what_cannot_go_with_it_is_refused_by_name(key: str, overrides: list[str]) -> None:
    line = fault(LEND, *overrides)
    assert line.startswith(f"{key}=")
    assert "placement.lend=true does not go with it" in line


def test_an_engine_that_frees_no_gpu_is_refused_on_one() -> None:
    TransformersEngine.check(good(LEND))
    TransformersEngine.check(good("placement.device=cuda"))
    with pytest.raises(ConfigError, match="placement.lend=true.*does not free its GPU"):
        TransformersEngine.check(good(LEND, "placement.device=cuda"))


def test_replicas_cannot_come_and_go_beside_lent_ones() -> None:
    assert placement.why_not_elastic(good()) == ""
    assert "placement.lend=true" in placement.why_not_elastic(good(LEND))


def test_a_lent_replica_takes_a_part_of_each_slot_of_the_actors_pool() -> None:
    roles = "placement.roles={rollout: rollout, actor: train, critic: train, ref: other}"
    pools = "placement.pools={rollout: [1], train: [2], other: [1]}"
    cfg = good(LEND, roles, pools, "algorithm.adv_estimator=gae", "algorithm.kl_coef=0.1")
    assert placement.processes_per_slot(cfg, "train") == 3
    assert placement.processes_per_slot(cfg, "other") == 1
    assert placement.processes_per_slot(cfg, "rollout") == 1
    assert placement.lent_pool(cfg) == "train"
    assert placement.lent_pool(good()) is None


def test_the_engine_on_a_lent_gpu_can_sleep_and_the_others_write_in_place() -> None:
    cfg = good(LEND, "placement.device=cuda", "rollout.gpu_memory_utilization=0.3")
    engines = PersistentActors.__new__(PersistentActors)
    engines.cfg = cfg
    engines.kv_cache_bytes = {}
    engines.lent_slots = {1: ProcessSlot(None, 0, 0, ())}
    lent = engine_args(engines._replica_cfg(1), "cuda")
    own = engine_args(engines._replica_cfg(0), "cuda")
    assert lent["enable_sleep_mode"]
    assert not own["enable_sleep_mode"]
    assert lent["gpu_memory_utilization"] == own["gpu_memory_utilization"] == 0.3


def test_the_placement_says_what_is_lent() -> None:
    assert "actor [1] on cpu: actor x 1, rollout x 1 while the actor waits" in (
        placement.placement_text(good(LEND), [0, 1])
    )
