"""The base model under adapters: what a worker has loaded is compared with what trainers hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync import base_weights
from one_step_off.weight_sync.base_weights import BaseModel, ask_trainers
from one_step_off.weight_sync.replica_layouts import ReplicaLayouts
from one_step_off.weight_sync.weight_piece import FrozenBlock, WeightPiece

MODEL = {"a": torch.randn(5, 3), "b": torch.randn(4), "scale": torch.randn(())}


def blocks_of_rank(rank: int, dtype: str = "float32") -> list[FrozenBlock]:
    """Rank 0 has the first two rows of each tensor, rank 1 the others."""
    blocks = []
    for name, tensor in MODEL.items():
        if not tensor.ndim and rank > 0:
            continue
        rows = len(tensor) if tensor.ndim else 1
        start, stop = ((0, 2), (2, rows))[rank] if tensor.ndim else (0, 1)
        piece = WeightPiece(name, dtype, tuple(tensor.shape), start, stop)
        blocks.append(base_weights.frozen_block(piece, piece.slice_of(tensor)))
    return blocks


def base_model(dtype: str = "float32") -> BaseModel:
    return BaseModel([*blocks_of_rank(0, dtype), *blocks_of_rank(1, dtype)])


def test_the_same_model_passes_and_may_have_more_names():
    loaded = {**MODEL, "tied head": MODEL["a"]}
    base_weights.compare(base_model().blocks, loaded.items(), "worker 0")
    assert base_model().nbytes == 4 * (15 + 4 + 1)


def test_digests_are_of_the_dtype_in_which_both_compute():
    """The files are in fp32, and both round them to bf16."""
    base_weights.compare(base_model("bfloat16").blocks, MODEL.items(), "worker 0")
    nearly = MODEL | {"b": MODEL["b"] * (1 + 1e-7)}
    base_weights.compare(base_model("bfloat16").blocks, nearly.items(), "worker 0")
    with pytest.raises(SyncError):
        base_weights.compare(base_model().blocks, nearly.items(), "worker 0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["a"].view(torch.int32).view(-1)[14:].bitwise_xor_(1), "1 tensors .* differ"),
        (lambda m: m["b"].view(torch.int32)[:1].bitwise_xor_(1), r"such as \['b'\]"),
        (lambda m: m.pop("scale"), r"not in the engine's checkpoint, such as \['scale'\]"),
        (lambda m: m.update(a=m["a"].T.contiguous()), "1 tensors .* differ"),
        (lambda m: m.update(a=torch.cat([m["a"], m["a"][:1]])), "1 tensors .* differ"),
    ],
)
def test_another_model_is_refused_by_name(change, message):
    loaded = {name: tensor.clone() for name, tensor in MODEL.items()}
    change(loaded)
    with pytest.raises(SyncError, match=f"worker 1: .*{message}.*weight_sync.lora=merged"):
        base_weights.compare(base_model().blocks, loaded.items(), "worker 1")


class Rank:
    """A trainer that holds some of the blocks."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.base_digests = SimpleNamespace(remote=self._digests)

    async def _digests(self) -> list[FrozenBlock]:
        return blocks_of_rank(self.number)


class Replica:
    """Compares as a worker does."""

    def __init__(self, loaded: dict[str, torch.Tensor]) -> None:
        self.loaded = loaded
        self.asked = 0
        self.prove_base = SimpleNamespace(remote=self._prove)

    async def _prove(self, shapes: dict[str, Any], blocks: list) -> list[dict[str, Any]]:
        assert shapes == {"lora_A": ["float32", [2, 3]]}
        self.asked += 1
        base_weights.compare(blocks, self.loaded.items(), "worker 0")
        return [{"kept": None, "reason": "adapters"}]


async def no_abort(error: Exception) -> None:
    """Nothing to end."""


def test_each_new_replica_proves_its_base_once_and_whole_tensors_travel(monkeypatch):
    from one_step_off.weight_sync import replica_layouts

    monkeypatch.setattr(replica_layouts, "store_once", lambda value: value)

    async def check() -> None:
        layouts = ReplicaLayouts([[WeightPiece("lora_A", "float32", (2, 3), 0, 2)]], 5.0)
        layouts.base = await ask_trainers([Rank(0), Rank(1)], 5.0)
        first, second = Replica(MODEL), Replica(MODEL)
        await layouts.learn({0: first}, no_abort)
        await layouts.learn({0: first, 1: second}, no_abort)
        assert (first.asked, second.asked) == (1, 1)
        assert layouts.kept_by([first, second]) is None
        broken = Replica(MODEL | {"b": MODEL["b"] + 1})
        with pytest.raises(Exception, match="rollout 2.*worker 0: 1 tensors .* differ"):
            await layouts.learn({2: broken}, no_abort)

    asyncio.run(check())
