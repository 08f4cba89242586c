"""Comparisons of the checks fail where they must: with stand-ins for what they compare.

That a check compares the right things is not shown here: it runs on CPUs in tests/e2e.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from one_step_off.tools.gpu_check import peers
from one_step_off.tools.gpu_check.check import CheckFailed, Context
from one_step_off.tools.gpu_check.checks import (
    devices,
    engines,
    groups,
    packing,
    runs,
    speed,
    weights,
)
from one_step_off.tools.gpu_check.peers import Failed, all_results, run_peers
from one_step_off.weight_sync.bucket_plan import BucketPlan
from tests.unit.tools.gpu_check.peer_functions import dies, hangs, raises

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


def packed_results(layout: int = 0, **changes: Any) -> list[dict[str, Any]]:
    padded = {"log_probs": [np.zeros(50, np.float32)], "grad_norm": 2.0, "loss": 0.1}
    padded |= {"seconds": 1.0, "attention": "sdpa", "tokens_shared": 0.5}
    results = [padded, padded, padded]
    results[layout] = padded | changes
    return results


@pytest.mark.parametrize("layout", [1, 2], ids=["packed", "shared"])
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], layout: int
) -> None:
    monkeypatch.setattr(packing, "run_peers", lambda jobs, limit: packed_results())
    assert packing.packing(context(tmp_path))["log-probs, largest"] == 0
    monkeypatch.setattr(packing, "run_peers", lambda jobs, limit: packed_results(layout, **changes))
    with pytest.raises(CheckFailed, match="packed and padded"):
        packing.packing(context(tmp_path))


def test_a_kernel_that_shares_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = packed_results(2, tokens_shared=0.0)
    monkeypatch.setattr(packing, "run_peers", lambda jobs, limit: results)
    with pytest.raises(CheckFailed, match="no prompt was shared"):
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


def rows(changes: dict[str, Any] | None = None, step: int = 2) -> list[dict[str, Any]]:
    """The metrics of four good steps, one off, with deltas on one device; `changes` in one."""
    names = "time/step_s time/generate_s time/train_s time/sync_s staleness/max".split()
    common = dict.fromkeys([*names, *runs.FINITE], 1.0) | {"actor/skipped_updates": 0.0}
    sync = {"sync/wire_s": 0.0, "sync/changed_share": 0.5}
    made = [common | {"sync/bytes": 0.0}] + [common | sync for _ in range(3)]
    made[step] |= changes or {}
    return made


def run_figures(folder: Path, steps: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    expected = {"settings": {}, "staleness": 1, "is_one_device": True, "sends_deltas": True}
    return runs._figures(folder, 4, runs._Run(**(expected | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor/grad_norm": 0.0}, "step 3 of 4: actor/grad_norm is 0, so nothing is trained"),
        ({"actor/grad_norm": None}, "actor/grad_norm is None"),
        ({"actor/grad_norm": float("inf")}, "actor/grad_norm is inf"),
        ({"actor/loss": None}, "actor/loss is None"),
        ({"actor/lr": 0.0}, "actor/lr is 0, so nothing is trained"),
        ({"actor/skipped_updates": 1.0}, "an update was skipped"),
        ({"sync/bytes": 0.0}, "no weights were sent"),
        ({"sync/changed_share": 0.0}, "the update changed nothing"),
        ({"sync/wire_s": 0.1}, "one device needs no network"),
    ],
)
def test_a_run_that_trains_nothing_or_sends_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """An optimizer that does nothing has a learning rate or changes of 0, a dead sync no bytes."""
    assert run_figures(tmp_path, rows())["step, s"] == 1.0
    with pytest.raises(CheckFailed, match=message):
        run_figures(tmp_path, rows(changes))


def test_a_run_without_any_delta(tmp_path: Path) -> None:
    """Not each sync needs to be one: a run sends all weights where that is faster."""
    full = {"sync/changed_share": None}
    run_figures(tmp_path, rows(full))
    with pytest.raises(CheckFailed, match="no delta was sent"):
        run_figures(tmp_path, [row | full for row in rows()])


def test_a_run_with_missing_steps_or_another_staleness(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="has 3 steps of 4"):
        run_figures(tmp_path, rows()[:3])
    with pytest.raises(CheckFailed, match="not 0 steps old"):
        run_figures(tmp_path, rows(), staleness=0)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('error: x'); raise SystemExit(3)", "ended with code 3: error: x"),
        ("import time; time.sleep(60)", "did not end in 0 s"),
    ],
)
def test_a_run_that_fails_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(program))
    monkeypatch.setattr(runs, "random_checkpoint", lambda context: "model")
    limit_s = runs.MARGIN_S + (0.4 if "sleep" in script else 20)
    with pytest.raises(CheckFailed, match=message):
        runs._run(Context("cpu", 0, tmp_path, tmp_path, "", limit_s), runs._Run({}, 1))


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


@pytest.mark.parametrize(
    ("loss", "gradient"),
    [(float("nan"), 1.0), (1.0, float("inf")), (1.0, 0.0)],
)
def test_a_pass_that_computes_nothing(loss: float, gradient: float) -> None:
    speed._require_computed(1.0, [torch.ones(2), None])
    with pytest.raises(CheckFailed, match="is (nan|inf|0)"):
        speed._require_computed(loss, [torch.full((2,), gradient)])


def test_the_rate_of_deltas_is_not_that_of_a_full_sync() -> None:
    received = [{"bytes": 2e9, "seconds": seconds} for seconds in (8.0, 4.0, 1.0, 2.0)]
    assert len(received) == weights.VERSIONS
    assert weights._rate("delta", received) == 2.0
    assert weights._rate("full", received) == 1.0


def test_syncs_that_should_be_deltas_and_are_full() -> None:
    full = {"bytes": 100.0, "changed": float("nan")}
    small = {"bytes": 3.0, "changed": 1.0}
    weights._require_deltas([full, small, small, full])
    for wrong in (full, small | {"bytes": 30.0}, small | {"changed": float("nan")}):
        with pytest.raises(CheckFailed, match="version 2 was no delta"):
            weights._require_deltas([full, small, wrong, full])


def test_expandable_segments_that_share_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for results, told in (([None, True], "exactly"), ([Failed("no"), Failed("no")], "not shared")):
        monkeypatch.setattr(weights, "run_peers", lambda *_, results=results: results)
        assert told in weights.shared_expandable(context(tmp_path))["expandable segments"]
    monkeypatch.setattr(weights, "run_peers", lambda *_: [None, False])
    with pytest.raises(CheckFailed, match="wrong bytes"):
        weights.shared_expandable(context(tmp_path))


class StandInGroup:
    """A group in which other bytes arrive."""

    def start_receive(self, buffer: torch.Tensor) -> None:
        buffer.fill_(1)

    def finish_receive(self, buffer: torch.Tensor) -> None:
        pass


def test_a_broadcast_that_brings_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups.MESSAGE_BYTES, "cpu", 1024)
    with pytest.raises(CheckFailed, match="other bytes arrived"):
        groups._broadcast_speed(cast(Any, StandInGroup()), 1, CPU)


def test_a_connect_that_ends_too_late_or_without_an_error() -> None:
    assert "freed after 5.0 s: no" in groups._ended_in_time((5.0, "no"), 5.0, "dies").popitem()[1]
    with pytest.raises(CheckFailed, match=r"connect took 60\.0 s, its limit is 5\.0 s"):
        groups._ended_in_time((60.0, "no"), 5.0, "dies")
    with pytest.raises(CheckFailed, match="receiver dies: connect succeeded"):
        groups._ended_in_time(Failed("connect succeeded"), 5.0, "dies")


def test_a_dead_peer_that_does_not_free_the_others() -> None:
    dead = Failed("its process ended with code 9")
    assert list(groups._freed_in_time([(1.0, "gone"), dead], 5.0)) == ["the sender"]
    with pytest.raises(CheckFailed, match="the sender was not freed: no answer"):
        groups._freed_in_time([Failed("no answer"), dead], 5.0)
    with pytest.raises(CheckFailed, match=r"the other receiver was freed after 6\.0 s only"):
        groups._freed_in_time([(1.0, "gone"), dead, (6.0, "gone")], 5.0)


def test_a_sleep_that_frees_less_than_the_weights() -> None:
    engines._require_freed(100, 100, {})
    with pytest.raises(CheckFailed, match="sleep gave"):
        engines._require_freed(99, 100, {})


def test_an_update_that_is_not_in_place_on_a_gpu() -> None:
    assert engines._require_in_place({"in_place": 1.0}, "cuda") == "in place"
    assert engines._require_in_place({"in_place": 0.0}, "cpu") == "by reload"
    for report in ({"in_place": 0.0}, {}):
        with pytest.raises(CheckFailed, match="not written in place"):
            engines._require_in_place(report, "cuda")


def test_new_weights_that_change_nothing_or_not_everything() -> None:
    zeros = [np.zeros(10)]
    assert engines._require_moved([np.ones(10)], zeros) == 1
    with pytest.raises(CheckFailed, match="changed nothing"):
        engines._require_moved(zeros, zeros)
    # In bfloat16, what stale norm weights of one layer were seen to shift.
    for dtype, shift in (("bfloat16", 0.011), ("float32", 2e-4)):
        engines._require_same_weights([np.full(10, shift / 3)], zeros, dtype)
        with pytest.raises(CheckFailed, match="other weights than a fresh one"):
            engines._require_same_weights([np.full(10, shift)], zeros, dtype)


def test_streams_that_all_wait_and_waits_that_are_not_seen() -> None:
    assert devices._figures(["-.", "X-"], ["-X", "X-"])["waiting pairs, one kernel spins"] == 1
    with pytest.raises(CheckFailed, match="nothing can overlap"):
        devices._figures(["-X", "X-"], ["-X", "X-"])
    devices._require_seen(True)
    with pytest.raises(CheckFailed, match="this check is blind"):
        devices._require_seen(False)


def test_a_failed_peer_is_no_result() -> None:
    with pytest.raises(CheckFailed, match="b: gone"):
        all_results([1, Failed("gone")], ["a", "b"])
