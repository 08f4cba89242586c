"""weight_sync.lora=adapter: what does not go with it is refused before any engine starts."""

from __future__ import annotations

import pytest

from one_step_off.config import lora_checks
from one_step_off.runtime.validation import validate
from tests.unit.config.config_helpers import SHARED, fault, good

ADAPTER = ("weight_sync.lora=adapter", "model.lora_rank=8")

FAULTS = [
    (["model.lora_rank=0"], ["weight_sync.lora=adapter", "no adapters", "model.lora_rank"]),
    (["model.lora_rank=513"], ["model.lora_rank=513", "at most 512", "merged"]),
    (["model.lora_target_modules=q_proj,lm_head"], ["q_proj,lm_head", "head", "leave it out"]),
    (["weight_sync.mode=delta"], ["weight_sync.mode=delta", "use weight_sync.mode=full"]),
    (["rollout.engine_kwargs.load_format=dummy"], ["load_format=dummy", "auto or hf or"]),
    (["rollout.engine_kwargs.max_loras=2"], ["engine_kwargs.max_loras=2", "remove it"]),
    (["rollout.engine_kwargs.enable_lora=false"], ["enable_lora=false", "remove it"]),
    (["rollout.engine_kwargs.fully_sharded_loras=true"], ["fully_sharded_loras", "remove it"]),
    (["actor.backend=megatron"], ["model.lora_rank=8", "only the fsdp back end"]),
    (["weight_sync.lora=alone"], ["weight_sync.lora=alone", "merged, adapter"]),
]


@pytest.mark.parametrize(("changes", "parts"), FAULTS, ids=[changes[0] for changes, _ in FAULTS])
def test_a_fault_is_named_with_its_fix(changes, parts):
    line = fault(*ADAPTER, *changes)
    for part in parts:
        assert part in line, line


def test_an_engine_that_gives_its_memory_away_is_refused():
    on_gpus = ("placement.device=cuda", "model.dtype=bfloat16")
    line = fault(*ADAPTER, *SHARED, *on_gpus, "pipeline.staleness=0", num_gpus=2)
    assert "weight_sync.lora=adapter" in line
    assert "a pool of its own" in line


def test_gpus_compute_in_bfloat16():
    on_gpus = ("placement.device=cuda", "placement.pools={rollout: [1], actor: [1]}")
    line = fault(*ADAPTER, *on_gpus, num_gpus=2)
    assert "model.dtype=float32" in line
    assert "use model.dtype=bfloat16" in line
    validate(good(*ADAPTER, *on_gpus, "model.dtype=bfloat16"), 2)


def test_valid_combinations():
    validate(good(*ADAPTER), 0)
    validate(good(*ADAPTER, "weight_sync.overlap=true", "model.lora_rank=512"), 0)
    validate(good(*ADAPTER, *SHARED, "pipeline.staleness=0"), 0)
    validate(good("model.lora_rank=8", "weight_sync.mode=delta"), 0)


@pytest.mark.parametrize(
    ("rank", "allowed"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)]
)
def test_the_engine_has_the_smallest_rank_that_holds_the_adapter(rank, allowed):
    assert lora_checks.engine_rank(rank) == allowed
