"""vLLM's own NCCL settings do not reach the communicators that it shares with the trainer."""

from __future__ import annotations

import os
from types import SimpleNamespace


def test_a_batch_invariant_engine_joins_the_groups_with_the_trainers_settings(monkeypatch):
    from vllm.utils import nccl

    from one_step_off.weight_sync import vllm_receiver

    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_NO_CACHE", "")
    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setattr(vllm_receiver, "get_tensor_model_parallel_rank", lambda: 0)
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple"})  # as vLLM does with VLLM_BATCH_INVARIANT=1

    used = []
    engine = object.__new__(vllm_receiver.OneStepOffTransferEngine)
    engine.receiver = SimpleNamespace(connect=lambda kept: used.append(os.environ["NCCL_PROTO"]))
    engine.init_transfer_engine([[("w", "float32", (2, 2), 0, 2)]], 64, 0, "", 1.0)
    assert used == ["LL"]
    assert os.environ["NCCL_PROTO"] == "Simple"
