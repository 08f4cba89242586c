"""Each comparison of the checks fails where it must: with stand-ins for what it compares."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.gpu_check import peers
from one_step_off.gpu_check.check import CheckFailed, Context
from one_step_off.gpu_check.checks import devices, engines, groups, packing, runs, speed, weights
from one_step_off.gpu_check.peers import Failed, all_results, run_peers
from one_step_off.weight_sync.bucket_plan import BucketPlan
from tests.unit.gpu_check.peer_functions import dies, hangs, raises

CPU = torch.device("cpu")


def context(folder: Path, device: str = "cpu") -> Context:
    return Context(device, 0, folder, folder, "", 60.0)


def test_peers_that_fail_die_or_hang_have_no_result() -> None:
    results = run_peers(
        [(dies, ()), (hangs, ()), (raises, ()), (abs, (-3,))], 8.0, one_may_die=True
    )
    assert [getattr(result, "reason", result) for result in results] == [
        "its process ended with code 5",
        "no answer in time",
        "ValueError: no",
        3,
    ]
    with pytest.raises(CheckFailed, match="first: its process ended with code 5"):
        all_results(results, ["first", "second", "third", "fourth"])


def test_a_peer_that_waits_for_a_failed_one_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "TIME_AFTER_FAILURE_S", 0.2)
    begin = time.monotonic()
    results = run_peers([(hangs, ()), (raises, ())], 50.0)
    assert time.monotonic() - begin < 40
    with pytest.raises(CheckFailed, match="second: ValueError: no"):
        all_results(results, ["first", "second"])


def test_weights_that_differ_by_a_bit() -> None:
    first, second = weights.versions(weights.SMALL, 2, CPU)
    weights._compare(first, {name: tensor.clone() for name, tensor in first.items()}, 0)
    with pytest.raises(CheckFailed, match="version 1 differs: embed"):
        weights._compare(first, second, 1)
    with pytest.raises(CheckFailed, match="other tensors"):
        weights._compare({}, first, 0)


def test_a_nan_that_arrives_is_no_difference() -> None:
    """Bits are compared, not numbers."""
    nan = {"a": torch.full((2,), float("nan"), dtype=torch.bfloat16)}
    weights._compare(nan, {"a": nan["a"].clone()}, 0)


def test_from_version_to_version_few_weights_change() -> None:
    first, second = weights.versions(weights.SMALL, 2, CPU)
    changed = (first["embed"] != second["embed"]).float().mean().item()
    assert 0 < changed <= weights.CHANGED_SHARE


def test_the_small_weights_travel_in_several_buckets_with_strips() -> None:
    plan = BucketPlan.build(weights.pieces(weights.SMALL), weights.BUCKET_BYTES)
    assert len(plan.buckets) > 2 and not all(bucket.completes_tensors for bucket in plan.buckets)


def packed_results(**changes: Any) -> list[dict[str, Any]]:
    padded = {"log_probs": [np.zeros(50, np.float32)], "grad_norm": 2.0, "loss": 0.1}
    padded |= {"seconds": 1.0, "attention": "sdpa"}
    return [padded, padded | changes]


@pytest.mark.parametrize(
    "changes",
    [
        {"log_probs": [np.eye(1, 50, dtype=np.float32)[0]]},
        {"log_probs": [np.full(50, 5e-5, np.float32)]},
        {"grad_norm": 2.01},
        {"log_probs": [np.full(50, np.nan, np.float32)]},
    ],
    ids=["one token", "the mean", "the gradient", "nan"],
)
def test_packed_sequences_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(packing, "run_peers", lambda jobs, limit: packed_results())
    assert packing.packing(context(tmp_path))["log-probs, largest"] == 0
    monkeypatch.setattr(packing, "run_peers", lambda jobs, limit: packed_results(**changes))
    with pytest.raises(CheckFailed, match="packed and padded"):
        packing.packing(context(tmp_path))


class StandInEngine:
    """Scores and tokens, with noise from call to call."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise
        self.shift = 0.0
        self.calls = 0

    def score(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        self.calls += 1
        # Tokens are asked for in between, so every other call is for scores.
        sign = (-1) ** (self.calls // 2)
        return [np.full(5, -1.0 + self.shift + sign * self.noise / 2)]

    def generate(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        return self.score(sequences)


@pytest.mark.parametrize(("noise", "shift"), [(0.0, 1e-7), (0.01, 0.06)])
def test_an_engine_that_answers_otherwise_than_as_loaded(noise: float, shift: float) -> None:
    engine = StandInEngine(noise)
    loaded = engines._Loaded(engine, [])
    assert loaded.repeats == (noise == 0)
    loaded.compare("later")
    engine.shift = shift
    with pytest.raises(CheckFailed, match="later: scores differ by"):
        loaded.compare("later")


@pytest.mark.parametrize(("dtype", "shift"), [("float32", 2e-4), ("bfloat16", 0.2)])
def test_an_engine_that_differs_from_the_trainer(dtype: str, shift: float) -> None:
    zeros = [np.zeros(10)]
    engines._require_close(zeros, [np.full(10, shift / 10)], dtype, "both")
    with pytest.raises(CheckFailed, match="both: log-probs differ"):
        engines._require_close(zeros, [np.full(10, shift)], dtype, "both")


def test_a_run_with_missing_steps_or_another_staleness(tmp_path: Path) -> None:
    names = "time/step_s time/generate_s time/train_s time/sync_s canary/logprob_diff_max"
    row = dict.fromkeys([*names.split(), "staleness/max", "ratio/mean"], 1.0)
    rows = [json.dumps(row)] * 3
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    assert runs._figures(tmp_path, 3, 1)["step, s"] == 1.0
    with pytest.raises(CheckFailed, match="has 3 steps of 5"):
        runs._figures(tmp_path, 5, 1)
    with pytest.raises(CheckFailed, match="not 0 steps old"):
        runs._figures(tmp_path, 3, 0)


def test_the_cause_of_a_failed_run_is_its_last_error() -> None:
    output = "step 1\nerror: the run ended by SyncError: x\nlogs are in y\n"
    assert runs._cause(output) == "error: the run ended by SyncError: x"
    assert runs._cause("") == "no output"


def test_a_device_that_multiplies_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    devices._check_product(CPU)
    matmul = torch.Tensor.__matmul__

    def wrong_in_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return matmul(left, right) + 0.02 * (left.dtype == torch.float32)

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_in_float32)
    with pytest.raises(CheckFailed, match=r"a matrix product is wrong by 0\.0"):
        devices._check_product(CPU)


def test_pairs_of_many_devices_are_bounded() -> None:
    assert groups._groups(2) == [(0, 1)]
    assert groups._groups(3) == [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert len(groups._groups(8)) == 29
    assert groups._groups(16)[-2:] == [(14, 15), tuple(range(16))]


def test_flops_of_a_pass_are_three_forward_passes() -> None:
    figures = speed._figures(CPU, 10**6, seconds=2.0, tokens=1000, flops=4e12)
    assert figures["tokens/s"] == 500 and figures["TFLOP/s"] == 2


def test_a_failed_peer_is_no_result() -> None:
    with pytest.raises(CheckFailed, match="b: gone"):
        all_results([1, Failed("gone")], ["a", "b"])
