"""vLLM's own NCCL settings do not reach the communicators that it shares with the trainer."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch

from one_step_off.engines import receiving_worker
from one_step_off.engines.receiving_worker import ReceivingWorker
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.weight_piece import WeightPiece

PIECE = ("w", "float32", (2, 2), 0, 2)
BUCKET_BYTES = 64


def info_of(senders: list) -> dict[str, Any]:
    """What a worker is given to join the groups of these senders, each a list of pieces."""
    return {
        "pieces": senders,
        "bucket_bytes": BUCKET_BYTES,
        "first_receiver": 0,
        "host": "",
        "timeout_s": 1.0,
    }


def test_a_batch_invariant_engine_joins_the_groups_with_the_trainers_settings(monkeypatch):
    from vllm.utils import nccl

    from one_step_off.engines.vllm import worker_extension as vllm_receiver

    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_NO_CACHE", "")
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setattr(vllm_receiver, "get_tensor_model_parallel_rank", lambda: 0)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})  # as vLLM does with VLLM_BATCH_INVARIANT=1

    used = []
    engine = object.__new__(vllm_receiver.OneStepOffTransferEngine)
    plan = BucketPlan.build([[WeightPiece(*PIECE)]], BUCKET_BYTES)
    engine.device = "cpu"
    engine.expected_names = {"w"}
    engine.receiver = SimpleNamespace(
        connect=lambda **_: used.append(os.environ["NCCL_PROTO"]), plan=plan
    )
    engine.init_transfer_engine(info_of([[PIECE]]))
    assert used == ["LL"]
    assert os.environ["NCCL_PROTO"] == "Simple"


def test_trainers_that_divide_the_model_otherwise_get_another_receiver(monkeypatch):
    """As restarted ones may. With the old receiver each sync would fail: another bucket plan."""
    connected = []

    class Receiver:
        def __init__(self, plan, *_) -> None:
            self.plan = plan
            self.closed = False
            self.wire_thread = SimpleNamespace(stop=lambda: None)

        def connect(self, **_) -> None:
            connected.append(self)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(receiving_worker, "WeightReceiver", Receiver)
    worker = ReceivingWorker()
    halves = [[("w", "float32", (2, 2), 0, 1)], [("w", "float32", (2, 2), 1, 2)]]
    for senders in ([[PIECE]], [[PIECE]], halves):
        worker.join_groups(info_of(senders), torch.device("cpu"))
    first, same, other = connected
    assert same is first
    assert other is not first
    assert other.plan.senders == 2
    assert first.closed
    assert not other.closed
