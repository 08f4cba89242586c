"""A trainer process is held to its part of a shared GPU, and a lack of memory names the keys."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from one_step_off.cluster.errors import RoleError
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.training import device_memory
from tests.unit.models.families import CONFIGS

GIB = 1 << 30
HALVES = "placement.pools={rollout: [0.5], actor: [0.5]}"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch was asked to limit, on a GPU of 20 GiB."""
    asked: list[Any] = []
    properties = SimpleNamespace(total_memory=20 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: asked.append(args)
    )
    return asked


def test_the_share_without_the_context_is_the_limit(limits) -> None:
    device = torch.device("cuda", 0)
    device_memory.limit_memory(load_config([HALVES]), "actor", device)
    assert limits == [(pytest.approx(9 / 20), device)]


def test_whole_devices_and_cpus_have_no_limit(limits) -> None:
    device_memory.limit_memory(load_config([]), "actor", torch.device("cuda", 0))
    device_memory.limit_memory(load_config([HALVES]), "actor", torch.device("cpu"))
    assert limits == []


def test_a_share_that_holds_no_process_is_named(limits) -> None:
    cfg = load_config(["placement.pools={rollout: [0.9], actor: [0.05]}"])
    with pytest.raises(ConfigError, match=r"placement.pools.actor=\[0.05\]: .* 1 GiB before any"):
        device_memory.limit_memory(cfg, "actor", torch.device("cuda", 0))


async def fail(message: str) -> None:
    raise RoleError(message)


def test_a_lack_of_memory_names_what_changes_it() -> None:
    lack = "step 3, actor 0, update: OutOfMemoryError: CUDA out of memory."
    work = device_memory.with_memory_advice(load_config([HALVES]), "actor", fail(lack))
    with pytest.raises(RoleError) as raised:
        asyncio.run(work)
    assert str(raised.value).startswith(lack)
    assert "actor.micro_batch_tokens" in str(raised.value)
    assert "placement.pools.actor=[0.5]" in str(raised.value)
    whole = device_memory.with_memory_advice(load_config([]), "actor", fail(lack))
    with pytest.raises(RoleError, match="micro_batch_tokens") as raised:
        asyncio.run(whole)
    assert "placement.pools" not in str(raised.value)
    assert "sequence_parallel_size" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "keys", "helps"),
    [
        ("qwen3", [], True),
        ("qwen3", ["actor.micro_batch_tokens=5000"], False),  # the sequences have 4,608 tokens
        ("qwen3", ["actor.sequence_parallel_size=2"], False),  # of two heads
        ("qwen3", ["placement.pools={rollout: [1], actor: [3]}"], False),
        ("qwen3", ["actor.packing=off"], False),
        ("qwen3_5_text", [], False),  # has layers with a state
    ],
)
def test_more_ranks_for_a_sequence_are_named_where_they_help(tmp_path, family, keys, helps) -> None:
    CONFIGS[family]().save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", "placement.pools={rollout: [1], actor: [2]}"]
    given += ["data.max_response_length=4096", "actor.micro_batch_tokens=1024", *keys]
    work = fail("step 3, actor 0, update: OutOfMemoryError: CUDA out of memory.")
    with pytest.raises(RoleError, match="lower actor.micro_batch_tokens=") as raised:
        asyncio.run(device_memory.with_memory_advice(load_config(given), "actor", work))
    assert ("raise actor.sequence_parallel_size=1" in str(raised.value)) == helps
    assert ("sequence_parallel_size" in str(raised.value)) == helps


def test_other_failures_stay_as_they_are() -> None:
    work = device_memory.with_memory_advice(load_config([HALVES]), "actor", fail("actor 0: x"))
    with pytest.raises(RoleError, match="^actor 0: x$"):
        asyncio.run(work)
