"""How often an update reads from the device does not depend on how many micro-batches it has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from one_step_off.training.fsdp.fsdp_workers import CriticWorker, PolicyWorker
from one_step_off.training.update_stats import PhaseTimer
from tests.unit.training.fsdp_helpers import OBJECTIVES, config, free_port, make_batch
from tests.unit.training.host_waits import counted_host_waits

WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "to cpu, a copy": lambda x: x.to(device="cpu", copy=True),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked assignment": lambda x: x.__setitem__(x > 1, torch.tensor([1.0])[:0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "allclose": lambda x: torch.allclose(x, x),
    "equal": lambda x: torch.equal(x, x),
    "repeat": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1])),
    "host number": lambda x: torch.as_tensor(3.0, device="cpu"),
    "in backward": lambda x: Reading.apply(x.requires_grad_()).sum().backward(),
}
NO_WAITS = {
    "arithmetic": lambda x: (2 * x + 1).clamp(0, 1).where(x > 0, 0.0).sum(),
    "shape": lambda x: len(x) + x.shape[0] + x.numel(),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "host number that stays there": lambda x: torch.tensor(3.0),
    "from numpy": lambda x: torch.from_numpy(np.zeros(3)),
    "a batch to the device": lambda x: x.to("cpu", non_blocking=True),
}


class Reading(torch.autograd.Function):
    """Reads a value in its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, *gradients):
        float(gradients[0].sum())
        return gradients[0]


@pytest.mark.parametrize("name", WAITS)
def test_the_count_sees(name):
    x = torch.ones(4)
    with counted_host_waits() as counts:
        WAITS[name](x)
    assert counts.total() >= 1


@pytest.mark.parametrize("name", NO_WAITS)
def test_the_count_leaves_out(name):
    x = torch.ones(4)
    with counted_host_waits() as counts:
        NO_WAITS[name](x)
    assert not counts


def waits_of(worker, method, batch):
    with counted_host_waits() as counts:
        getattr(worker, method)(batch)
    return counts


@pytest.mark.parametrize(
    ("objective", "packing"), [("everything", "off"), *((name, "on") for name in OBJECTIVES)]
)
def test_an_update_waits_once_per_step_not_per_micro_batch(
    model_folders, start_single, objective, packing
):
    path = model_folders["tied"]
    batch = make_batch(path)
    waits = []
    for budget in (16384, 40):
        cfg = config(
            path,
            **OBJECTIVES[objective],
            actor__packing=packing,
            actor__micro_batch_tokens=budget,
            actor__activation_checkpointing=True,
        )
        worker = start_single(cfg)
        lengths = [sample.length for sample in batch.samples]
        micro_batches = len(worker._micro_batch_plan(lengths, 1)[0])
        assert (micro_batches == 1) == (budget == 16384)
        waits.append(waits_of(worker, "update", batch))
    assert waits[0] == waits[1]


@pytest.mark.parametrize("packing", ["off", "on"])
def test_the_other_passes_too(model_folders, start_single, packing):
    path = model_folders["tied"]
    batch = make_batch(path)
    lengths = [len(s.response_ids) for s in batch.samples]
    batch.values = [np.zeros(length, np.float32) for length in lengths]
    batch.returns = [np.ones(length, np.float32) for length in lengths]
    for role, cls, method in (
        ("ref", PolicyWorker, "log_prob_and_squares"),
        ("critic", CriticWorker, "values"),
        ("critic", CriticWorker, "update"),
    ):
        waits = []
        for budget in (16384, 40):
            changes = {"actor__packing": packing, "actor__micro_batch_tokens": budget}
            worker = start_single(config(path, **changes), role=role, cls=cls)
            waits.append(waits_of(worker, method, batch))
        assert waits[0] == waits[1], (role, method)


def test_megatron_too(megatron_models):
    """Of a dense model and padded batches. Megatron's layers for CPUs read the boundaries of packed
    sequences, and its experts the number of their tokens."""
    from tests.unit.training import megatron_helpers

    path = str(megatron_models / "qwen2")
    waits = []
    for budget in (16384, 40):
        case = megatron_helpers.case("one", "qwen2", 1, micro_batch_tokens=budget)
        worker = megatron_helpers.WORKERS["actor"](
            config(path, **case.changes), "actor", 0, 1, "cpu"
        )
        try:
            worker.setup("127.0.0.1", free_port())
            waits.append(waits_of(worker, "update", make_batch(path)))
        finally:
            megatron_helpers.end()
    assert waits[0] == waits[1]


class StandInEvent:
    """An event of a GPU, whose clock counts the recorded events in seconds."""

    recorded = 0

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.milliseconds = 0

    def record(self):
        StandInEvent.recorded += 1
        self.milliseconds = 1000 * StandInEvent.recorded

    def elapsed_time(self, end):
        return end.milliseconds - self.milliseconds


def test_a_gpu_s_phases_are_timed_with_one_wait_for_all(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "Event", StandInEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("synchronize"))
    timer = PhaseTimer(torch.device("cuda"))
    for _ in range(3):
        with timer("forward"):
            pass
        with timer("backward"):
            pass
    assert waits == []
    assert timer.totals() == {"forward": 3.0, "backward": 3.0}
    assert waits == ["synchronize"]
