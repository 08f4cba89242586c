"""In-place updates over real senders and receivers, and the fallback to a mirror."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.in_place import InPlaceModel, NotInPlace
from tests.unit.weight_sync.weight_stream import (
    Job,
    Weights,
    WeightStream,
    assert_no_errors,
    assert_received,
    perturb,
    random_weights,
)

# Two senders own the rows, so that tensors are joined. `embed` travels in strips; `norm`, `bias`
# and `one` leave padding.
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
ROWS_OF_QK = {"q": slice(0, 24), "k": slice(24, 32)}


class Model(torch.nn.Module):
    """q and k fused in one parameter, every other tensor in its own."""

    def __init__(self, reorder: Callable = lambda qk: qk) -> None:
        """`reorder`: what the model's kernels do with qk after loading."""
        super().__init__()
        shapes = {name: shape for name, shape in SHAPES.items() if name not in ROWS_OF_QK}
        shapes["qk"] = (32, 31)
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
        self.reorder = reorder
        self.loads = 0

    def load_weights(self, weights):
        self.loads += 1
        for name, tensor in weights:
            self.hf_tensor(name).copy_(tensor)

    def hf_tensor(self, name: str) -> torch.Tensor:
        if name in ROWS_OF_QK:
            return self.qk.data[ROWS_OF_QK[name]]
        return getattr(self, name)

    def hf_tensors(self) -> Weights:
        return {name: self.hf_tensor(name) for name in SHAPES}


def sync(stream: WeightStream, models: list[Model], weights: Weights, version: int) -> list:
    """One sync into `models`, one of each receiver."""

    def load_into_models(jobs: list[Job]) -> None:
        del jobs[-len(models) :]
        for receiver, model in zip(stream.receivers, models, strict=True):
            jobs.append(lambda r=receiver, m=model: r.receive(m.load_weights, version))

    results, _ = stream.sync(weights, version, change_jobs=load_into_models)
    return results


def switch_to_in_place(stream: WeightStream, models: list[Model]) -> None:
    for receiver, model in zip(stream.receivers, models, strict=True):
        model.qk.copy_(model.reorder(model.qk))
        receiver.in_place = InPlaceModel(
            receiver.plan, receiver.join_buffer, receiver.checksums, model
        )
        receiver.mirror = None


def delta_stream(
    receivers: int, same_device: list[list[int]] | None = None, full_every: int = 20
) -> WeightStream:
    """Two senders of deltas; the plan has strips and joined tensors."""
    stream = WeightStream(
        SHAPES, 2, receivers, bucket_bytes=16_000, dtype="bfloat16", same_device=same_device
    )
    whole = [bucket for bucket in stream.plan.buckets if bucket.completes_tensors]
    assert len(whole) < len(stream.plan.buckets)
    assert any(bucket.join_offsets for bucket in whole)
    for sender in stream.senders:
        sender.full_every = full_every
    return stream


@pytest.mark.parametrize(
    ("receivers", "same_device"),
    [(2, None), (1, [[0], []])],
    ids=["two over gloo", "one on a sender's device"],
)
def test_fifty_in_place_updates_leave_the_bits_of_a_full_sync(receivers, same_device):
    stream = delta_stream(receivers, same_device)
    models = [Model() for _ in range(receivers)]
    weights = random_weights(SHAPES, "bfloat16")
    assert_no_errors(sync(stream, models, weights, 0))
    switch_to_in_place(stream, models)
    loads_before = [model.loads for model in models]
    bytes_of_sync = {}
    for version in range(1, 51):
        perturb(weights)
        if version == 7:
            weights["up"].normal_()
        results = sync(stream, models, weights, version)
        assert_no_errors(results)
        assert_received([model.hf_tensors() for model in models], weights)
        bytes_of_sync[version] = sum(report["bytes"] for report in results[:2])
    assert [model.loads for model in models] == loads_before, "nothing was loaded by name"
    assert all(receiver.mirror is None for receiver in stream.receivers)
    full_bytes = stream.plan.total_bytes
    full_syncs = [version for version, size in bytes_of_sync.items() if size >= full_bytes]
    assert full_syncs == [20, 40]
    median_bytes = sorted(bytes_of_sync.values())[len(bytes_of_sync) // 2]
    assert median_bytes < 0.15 * full_bytes


def test_a_model_that_reorders_its_parameters_keeps_a_correct_mirror():
    stream = delta_stream(1)
    model = Model(reorder=lambda qk: qk.flip(0))
    weights = random_weights(SHAPES, "bfloat16")
    sync(stream, [model], weights, 0)
    with pytest.raises(NotInPlace, match="other bytes than were sent"):
        switch_to_in_place(stream, [model])
    for version in range(1, 4):
        perturb(weights)
        assert_no_errors(sync(stream, [model], weights, version))
        assert_received([model.hf_tensors()], weights)
    (receiver,) = stream.receivers
    assert receiver.mirror
    assert not receiver.in_place


def test_parameters_changed_by_others_are_detected_and_fixed_by_the_next_epoch():
    stream = delta_stream(1)
    model = Model()
    weights = random_weights(SHAPES, "bfloat16")
    sync(stream, [model], weights, 0)
    switch_to_in_place(stream, [model])
    model.qk.view(torch.int16)[3, 3] += 1
    perturb(weights)
    results = sync(stream, [model], weights, 1)
    errors = [str(result) for result in results if isinstance(result, SyncError)]
    assert any("checksum of bucket" in error for error in errors)
    assert not stream.receivers[0].in_place

    stream.receivers = [stream.new_receiver(0)]
    stream.connect(2)
    for version in (1, 2, 3):
        assert_no_errors(sync(stream, [model], weights, version))
        assert_received([model.hf_tensors()], weights)
        if version == 1:
            switch_to_in_place(stream, [model])
        perturb(weights)


def test_the_padding_between_tensors_is_the_same_at_both_ends():
    """Buffers are reused: what an earlier bucket left between two tensors would travel, and no
    parameter holds it."""
    stream = delta_stream(1)
    model = Model()
    weights = random_weights(SHAPES, "bfloat16")
    for sender in stream.senders:
        for buffer in sender.buffers:
            buffer.random_(0, 256)
    sync(stream, [model], weights, 0)
    switch_to_in_place(stream, [model])
    perturb(weights)
    assert_no_errors(sync(stream, [model], weights, 1))
