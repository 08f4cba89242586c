"""A worker that fails in any part of an update tells all that may wait for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from one_step_off.cluster.bounded_waits import Aborted, AbortSignal
from one_step_off.cluster.errors import SyncError
from one_step_off.engines.vllm import worker_extension
from tests.unit.weight_sync.weight_stream import WeightStream

PARTS = ["start_weight_update", "update_weights", "finish_weight_update"]


@pytest.mark.parametrize("failing", PARTS)
def test_a_failed_update_is_given_up_and_the_workers_of_the_replica_hear_of_it(
    monkeypatch, failing
):
    monkeypatch.setattr(worker_extension, "get_tensor_model_parallel_rank", lambda: 0)
    stream = WeightStream({"w": (4, 2)}, 1, 1, timeout_s=60.0)
    engine = object.__new__(worker_extension.OneStepOffTransferEngine)
    engine.receiver = stream.receivers[0]
    engine.reload_proof = object()

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    worker = worker_extension.SyncWorkerExtension()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    worker.weight_transfer_engine = engine
    for part in PARTS:
        setattr(worker, part, fail if part == failing else lambda *_: None)
    with pytest.raises(RuntimeError, match="no memory"):
        worker.sync_weights(0)
    with pytest.raises(SyncError, match="given up, since no memory"):
        stream.senders[0].send(iter(()), 0)
    store = dist.PrefixStore("1", stream.senders[0].store)
    with pytest.raises(Aborted, match="no memory"):
        AbortSignal(dist.PrefixStore("replica0", store)).check()
