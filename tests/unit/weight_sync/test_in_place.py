"""Changes written straight into a model's parameters, over real senders and receivers, and the fallback to a mirror."""

from __future__ import annotations

import functools

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.in_place import InPlaceModel, NotInPlace
from one_step_off.weight_sync.receiver import WeightReceiver
from tests.unit.weight_sync.test_distributed_util import CPU, Net, normal, same

# Rows that two senders own, so that tensors are joined; `embed` travels in strips; `norm`, `bias` and `one` leave padding.
SHAPES = {
    "embed": (400, 64),
    "q": (24, 31),
    "k": (8, 31),
    "norm": (33,),
    "up": (64, 40),
    "bias": (5,),
    "one": (),
    "n": (1,),
}


class Model(torch.nn.Module):
    """q and k fused in one parameter, the rest each in its own. `reorder`: what its kernels want after loading."""

    def __init__(self, reorder=lambda qk: qk) -> None:
        super().__init__()
        shapes = {name: shape for name, shape in SHAPES.items() if name not in "qk"} | {
            "qk": (32, 31)
        }
        for name, shape in shapes.items():
            self.register_parameter(
                name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False)
            )
        self.reorder, self.loads = reorder, 0

    def load_weights(self, weights):
        self.loads += 1
        for name, tensor in weights:
            rows = {"q": slice(0, 24), "k": slice(24, 32)}.get(name)
            (getattr(self, name) if rows is None else self.qk.data[rows]).copy_(tensor)

    def hf(self) -> dict[str, torch.Tensor]:
        return {
            n: {"q": self.qk[:24], "k": self.qk[24:]}.get(n) if n in "qk" else getattr(self, n)
            for n in SHAPES
        }


def sync(net: Net, models: list[Model], tensors: dict[str, torch.Tensor], version: int) -> list:
    """One sync into `models`, one of each receiver."""

    def into(jobs) -> None:
        jobs[-len(models) :] = [
            functools.partial(receiver.receive, model.load_weights, version)
            for receiver, model in zip(net.receivers, models, strict=True)
        ]

    return net.sync(tensors, version, change=into)[0]


def go_in_place(net: Net, models: list[Model]) -> None:
    for receiver, model in zip(net.receivers, models, strict=True):
        model.qk.copy_(model.reorder(model.qk))
        receiver.live = InPlaceModel(receiver.plan, receiver.room, receiver.sums, model)
        receiver.mirror = None


def perturb(tensors: dict[str, torch.Tensor], share: float = 0.02) -> None:
    for tensor in tensors.values():
        words = tensor.view(torch.int16)
        step = torch.randint(-2, 3, words.shape, dtype=torch.int16)
        words += torch.where(torch.rand(words.shape) < share, step, torch.zeros_like(step))


def net_of(receivers: int, near=None, full_every: int = 20) -> Net:
    net = Net(SHAPES, 2, receivers, bucket_bytes=16_000, dtype="bfloat16", near=near)
    assert not all(bucket.ends for bucket in net.plan.buckets) and any(
        b.joined for b in net.plan.buckets if b.ends
    )
    for sender in net.senders:
        sender.full_every = full_every
    return net


@pytest.mark.parametrize(("receivers", "near"), [(2, None), (1, [[0], []])])
def test_fifty_updates_in_place_leave_the_bits_of_a_full_sync(receivers, near):
    net, models, sizes = net_of(receivers, near), [Model() for _ in range(receivers)], []
    tensors = normal(SHAPES, "bfloat16")
    assert not [r for r in sync(net, models, tensors, 0) if isinstance(r, Exception)]
    go_in_place(net, models)
    loads = [model.loads for model in models]
    for version in range(1, 51):
        perturb(tensors)
        if version == 7:
            tensors["up"].normal_()
        results = sync(net, models, tensors, version)
        assert not [r for r in results if isinstance(r, Exception)], results
        assert all(same([model.hf()], tensors) for model in models), version
        sizes.append(sum(r["bytes"] for r in results[:2]))
    assert [model.loads for model in models] == loads, "nothing was loaded as a checkpoint is"
    assert all(receiver.mirror is None for receiver in net.receivers)
    assert [i for i, size in enumerate(sizes, 1) if size >= net.plan.total_bytes] == [20, 40]
    assert sorted(sizes)[len(sizes) // 2] < 0.15 * net.plan.total_bytes


def test_a_model_that_reorders_its_parameters_keeps_a_right_mirror():
    net, models = net_of(1), [Model(reorder=lambda qk: qk.flip(0))]
    tensors = normal(SHAPES, "bfloat16")
    sync(net, models, tensors, 0)
    with pytest.raises(NotInPlace, match="other bytes than were sent"):
        go_in_place(net, models)
    for version in range(1, 4):
        perturb(tensors)
        results = sync(net, models, tensors, version)
        assert not [r for r in results if isinstance(r, Exception)] and same(
            [models[0].hf()], tensors
        )
    assert net.receivers[0].mirror and not net.receivers[0].live


def test_parameters_that_changed_behind_its_back_are_caught_and_mended_by_the_next_epoch():
    net, models = net_of(1), [Model()]
    tensors = normal(SHAPES, "bfloat16")
    sync(net, models, tensors, 0)
    go_in_place(net, models)
    models[0].qk.view(torch.int16)[3, 3] += 1
    perturb(tensors)
    assert any(
        "checksum of bucket" in str(r)
        for r in sync(net, models, tensors, 1)
        if isinstance(r, SyncError)
    )
    assert not net.receivers[0].live and not same([models[0].hf()], tensors)
    net.receivers = [WeightReceiver(net.plan, 0, CPU, "127.0.0.1", 10.0)]
    net.connect(2)
    for version in (1, 2, 3):
        results = sync(net, models, tensors, version)
        assert not [r for r in results if isinstance(r, Exception)] and same(
            [models[0].hf()], tensors
        ), results
        if version == 1:
            go_in_place(net, models)
        perturb(tensors)


def test_what_lies_between_tensors_is_the_same_at_both_ends():
    """Buffers are reused: what an earlier bucket left between two tensors would travel, and no parameter holds it."""
    net, models = net_of(1), [Model()]
    tensors = normal(SHAPES, "bfloat16")
    for sender in net.senders:
        for buffer in sender.buffers:
            buffer.random_(0, 256)
    sync(net, models, tensors, 0)
    go_in_place(net, models)
    perturb(tensors)
    assert not [r for r in sync(net, models, tensors, 1) if isinstance(r, Exception)]
