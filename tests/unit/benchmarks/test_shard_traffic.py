"""What travels of large models when each worker receives what it keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.common.large_models import KIMI_K2, QWEN3_235B, QWEN25_7B, QWEN25_32B, LargeModel
from benchmarks.weight_sync import model_check
from benchmarks.weight_sync.shard_traffic import routes_of, schedule_s, traffic_of

LINK, NO_MESSAGE_COST = 1e9, 0.0


def bytes_of(model: LargeModel) -> int:
    return 2 * sum(math.prod(shape) for shape in model.shapes().values())


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [(QWEN25_7B, 7.6e9, 339), (QWEN25_32B, 32.8e9, 771), (QWEN3_235B, 235e9, 36_945)],
)
def test_models_have_the_published_sizes(model, parameters, tensors):
    assert bytes_of(model) / 2 == pytest.approx(parameters, rel=0.01)
    assert len(model.shapes()) == tensors


def test_the_largest_model_has_a_trillion_parameters():
    assert bytes_of(KIMI_K2) / 2 == pytest.approx(1.03e12, rel=0.01)


def test_workers_get_their_share_and_what_all_keep():
    model = replace(QWEN25_7B, layers=2, dense_layers=2)
    routes = routes_of(model, 2, 4, False, 64 << 20)
    received = [0] * 4
    for messages in routes.messages:
        for message in messages:
            for receiver in routes.sets[message.receivers]:
                received[receiver] += message.nbytes
    assert bytes_of(model) <= sum(received) <= 1.001 * bytes_of(model)
    assert max(received) == min(received)


def test_two_senders_send_at_once_to_two_workers():
    model = replace(QWEN25_7B, layers=1, dense_layers=1)
    whole_s = bytes_of(model) / LINK
    assert schedule_s(routes_of(model, 1, 2, False, 1 << 30), LINK, 0.0) >= whole_s
    at_once_s = schedule_s(routes_of(model, 2, 2, False, 1 << 30), LINK, 0.0)
    assert at_once_s == pytest.approx(whole_s / 2, rel=0.02)


def test_a_bucket_of_one_workers_experts_keeps_the_other_workers_waiting():
    model = replace(QWEN3_235B, layers=1, vocabulary=64)
    small_s = schedule_s(routes_of(model, 8, 8, True, 64 << 20), LINK, 0.0)
    large_s = schedule_s(routes_of(model, 8, 8, True, 8 << 30), LINK, 0.0)
    assert small_s > 4 * large_s


def test_the_layers_in_between_are_extrapolated():
    """To what planning all of them gives."""
    model = replace(QWEN25_7B, layers=6, dense_layers=6, vocabulary=1024)
    arguments = (2, 2, False, 64 << 20, LINK, NO_MESSAGE_COST)
    found = traffic_of(replace(model, layers=70, dense_layers=70), *arguments)
    routes = routes_of(replace(model, layers=70, dense_layers=70), *arguments[:4])
    assert found.wire_s == pytest.approx(schedule_s(routes, LINK, 0.0), rel=0.02)


def measured(seconds: float, worker_bytes: float, tp: int) -> dict:
    """A run of 1 GB, whose load takes 1 s per GB received where a worker has a core."""
    split = {"pause": 0.01, "prepare": 0.0, "load": worker_bytes / 1e9, "verify": 1e-9, "finish": 0}
    arm = {
        "seconds": {"median": seconds},
        "split": split,
        "sender": {"gather": 0.01, "checksum": 0.01},
        "extra": {"worker_bytes": worker_bytes},
    }
    flags = {"model": "x", "ranks": 1, "replicas": 1, "tp": tp, "bucket_mb": 64, "unpacked": True}
    raw = {"seconds": {"median": 0.1}}
    return {
        "bytes": 1e9,
        "tensors": 1,
        "arguments": flags,
        "cores": 2,
        "arms": {"raw": raw, "sharded": arm},
    }


def test_two_workers_on_one_core_load_their_halves_as_slowly_as_one_loads_all():
    one = measured(1.0, 1e9, 1)
    two = measured(1.0, 0.5e9, 2)
    speeds = model_check.fit_speeds([one])

    def predicted_s(result: dict) -> float:
        return model_check.predict(speeds, model_check.Run.of(result, "sharded"))

    assert predicted_s(two) == pytest.approx(predicted_s(one), rel=0.01)
    assert predicted_s(two | {"cores": 4}) < 0.6 * predicted_s(one)
