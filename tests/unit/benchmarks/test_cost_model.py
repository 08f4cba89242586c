"""The cost model of the weight sync."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.weight_sync import cost_model, model_check
from benchmarks.weight_sync.cost_model import H100, Layout, Model

MODEL = Model("32B", 32.8e9, 771)
LAYOUT = Layout(16, 2, 8)
SPEEDS = ("link", "within", "host", "pack", "copy", "check")
COSTS = ("tensor_s", "message_s", "fixed_s")


@pytest.mark.parametrize(
    "changes",
    [{}, {"changed": 0.02}, {"at_once": 1}, {"pipelined": False}],
)
def test_faster_machines_and_larger_models(changes: dict[str, Any]) -> None:
    """A faster machine is never slower, and a larger model never faster."""
    layout = replace(LAYOUT, **changes)
    base = cost_model.total(H100, MODEL, layout)
    for speed in SPEEDS:
        faster = replace(H100, **{speed: 2 * getattr(H100, speed)})
        assert cost_model.total(faster, MODEL, layout) <= base
    for cost in COSTS:
        slower = replace(H100, **{cost: 2 * getattr(H100, cost)})
        assert cost_model.total(slower, MODEL, layout) >= base
    more_parameters = replace(MODEL, parameters=2 * MODEL.parameters)
    assert cost_model.total(H100, more_parameters, layout) > base
    more_tensors = replace(MODEL, tensors=2 * MODEL.tensors)
    assert cost_model.total(H100, more_tensors, layout) >= base


def test_only_network_cards_count_where_all_else_is_free() -> None:
    """All bytes over the cards' speed. Eight senders at once fill eight cards, sixteen no more."""
    free = dict.fromkeys(COSTS, 0.0)
    instant = dict.fromkeys((speed for speed in SPEEDS if speed != "link"), math.inf)
    machine = replace(H100, **free, **instant)

    def seconds(at_once: int | None) -> float:
        return cost_model.total(machine, MODEL, replace(LAYOUT, at_once=at_once))

    assert seconds(1) == pytest.approx(MODEL.size / H100.link)
    assert seconds(8) == pytest.approx(MODEL.size / H100.link / 8)
    assert seconds(None) == seconds(8)


def test_pipelining_is_never_worse_and_one_bucket_pipelines_nothing() -> None:
    unpipelined = replace(LAYOUT, pipelined=False)
    pipelined_s = cost_model.total(H100, MODEL, LAYOUT)
    assert pipelined_s < cost_model.total(H100, MODEL, unpipelined)
    one_bucket = replace(LAYOUT, bucket=1e15)
    stages = cost_model.phases(H100, MODEL, one_bucket)
    all_stages = H100.fixed_s + sum(stages.values())
    assert cost_model.total(H100, MODEL, one_bucket) == pytest.approx(all_stages)


def test_changed_elements_never_take_more_than_all_of_them() -> None:
    assert cost_model.payload(MODEL, replace(LAYOUT, changed=1.0)) == MODEL.size
    assert cost_model.payload(MODEL, replace(LAYOUT, changed=0.02)) < 0.03 * MODEL.size


def test_overlap_hides_a_sync_from_a_longer_training_alone() -> None:
    assert cost_model.step(10, 20, 3, overlap=False) == 23
    assert cost_model.step(10, 20, 3, overlap=True) == 20
    assert cost_model.step(20, 10, 3, overlap=True) == 23
    assert cost_model.step(20, 10, 3, overlap=False) == 23


SPEEDS_HERE = model_check.Speeds(
    copy_byte=1 / 4e9,
    pack_byte=1 / 8e9,
    check_byte=1 / 20e9,
    load_byte=1 / 3e9,
    load_tensor=2e-5,
    message=1e-3,
    fixed_s=0.02,
    finish_byte=1 / 100e9,
)


def measured(megabytes: float, tensors: int, **flags: int) -> dict[str, Any]:
    """What the benchmark would have measured on a machine of two cores with SPEEDS_HERE: as much
    time for each phase as its CPU time, so that threads of the link have used no core meanwhile."""
    size = megabytes * 1e6
    tp = flags.get("tp", 1)
    arguments = {"model": f"{megabytes:g} MB", "ranks": 1, "replicas": 1, "bucket_mb": 64}
    result: dict[str, Any] = {
        "bytes": size,
        "tensors": tensors,
        "cores": 2,
        "arguments": arguments | {"tp": tp} | flags,
        "arms": {"sharded": {"extra": {"worker_bytes": size / tp}}},
    }
    run = model_check.Run.of(result, "sharded")
    raw_s = run.size * SPEEDS_HERE.copy_byte + run.buckets * SPEEDS_HERE.message
    result["arms"]["raw"] = {"seconds": {"median": raw_s}}
    pack_s = run.size * SPEEDS_HERE.pack_byte
    result["arms"]["sharded"] |= {
        "seconds": {"median": model_check.predict(SPEEDS_HERE, run)},
        "split": {
            "pause": SPEEDS_HERE.fixed_s,
            "prepare": 0.0,
            "wait": 1e9,  # not a phase in which a worker works
            "load": run.worker_bytes * SPEEDS_HERE.load_byte + tensors * SPEEDS_HERE.load_tensor,
            "verify": run.worker_bytes * SPEEDS_HERE.check_byte,
            "finish": run.size * SPEEDS_HERE.finish_byte,
        },
        "sender": {"gather": 0.75 * pack_s, "checksum": 0.25 * pack_s},
    }
    return result


def test_the_model_finds_the_speeds_that_measurements_were_made_of() -> None:
    results = [measured(1, 26), measured(988, 290), measured(400, 100, ranks=2), measured(700, 9)]
    results.append(measured(988, 290, tp=2))
    speeds = model_check.fit_speeds(results[:2])
    for name, value in vars(SPEEDS_HERE).items():
        # The way of the first and the last bucket is divided otherwise for a single bucket.
        assert getattr(speeds, name) == pytest.approx(value, rel=0.05), name
    table = model_check.check_model(results)
    assert table.count("| 1.00 |") == 5
    assert "400 MB, 2 + 1 x TP 1, sharded |" in table
    assert model_check.fit_speeds(results[1:2]).load_tensor == 0.0


def test_phases_that_shared_their_core_with_the_link_cost_less_than_they_took() -> None:
    """Measured by the clock, all phases of this run took 1.5 times their CPU time."""
    result = measured(988, 290)
    arm = result["arms"]["sharded"]
    for phases, names in (("split", ("load", "verify")), ("sender", ("gather", "checksum"))):
        for name in names:
            arm[phases][name] *= 1.5
    speeds = model_check.fit_speeds([measured(1, 26), result])
    assert speeds.pack_byte == pytest.approx(SPEEDS_HERE.pack_byte, rel=0.05)
    run = model_check.Run.of(result, "sharded")
    assert model_check.predict(speeds, run) == pytest.approx(arm["seconds"]["median"], rel=0.02)


def test_a_side_that_works_alone_decides() -> None:
    """Loading that takes ten times as long as all else, on the workers' half of the cores."""
    slow = replace(SPEEDS_HERE, load_byte=10 / 1e9)
    run = model_check.Run.of(measured(1000, 10), "sharded")
    assert model_check.predict(slow, run) == pytest.approx(10.3, rel=0.05)
    assert model_check.predict(slow, replace(run, cores=8)) == pytest.approx(10.3, rel=0.05)


def test_the_estimates_say_what_they_are() -> None:
    text = cost_model.estimates()
    assert text.startswith("Estimates, not measurements")
    assert all(name in text for name in cost_model.CASES)
    assert "| senders, 235B" in cost_model.by_senders()


def test_the_page_shows_the_estimates_as_the_script_prints_them() -> None:
    page = (Path(__file__).parents[3] / "docs/measured/weight_sync_estimates.md").read_text()
    smallest_case = next(iter(cost_model.CASES))
    tables = cost_model.estimates() + cost_model.by_senders()
    lines = (tables + cost_model.all_ranks_send([smallest_case])).splitlines()
    for line in lines:
        if line.startswith("|"):
            assert line in page, "put the output of python -m benchmarks.sync_model into the page"
