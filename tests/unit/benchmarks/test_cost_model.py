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
    [{}, {"gather": True}, {"changed": 0.02}, {"at_once": 1}, {"pipelined": False}],
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


def measured(megabytes: float, tensors: int) -> dict[str, Any]:
    """What the benchmark would have measured on a machine with known speeds."""
    size = megabytes * 1e6
    bucket_mb = 64
    messages = math.ceil(size / (bucket_mb << 20))
    wire = messages * 1e-3 + size / 3e9
    load = tensors * 4e-4 + size / 1e9
    verify = size / 4e9
    pack = size / 2e9
    *others, longest = sorted([wire, load + verify, pack])
    seconds = 0.04 + longest + sum(others) / messages
    sharded = {
        "seconds": {"median": seconds},
        "split": {"pause": 0.02, "prepare": 0.01, "load": load, "verify": verify, "finish": 0.01},
        "sender": {"gather": 0.75 * pack, "checksum": 0.25 * pack},
    }
    return {
        "bytes": size,
        "tensors": tensors,
        "arguments": {
            "model": f"{megabytes:g} MB",
            "ranks": 1,
            "replicas": 1,
            "tp": 1,
            "bucket_mb": bucket_mb,
        },
        "arms": {"raw": {"seconds": {"median": wire}}, "sharded": sharded},
    }


def test_the_model_finds_the_speeds_that_measurements_were_made_of() -> None:
    results = [measured(1, 26), measured(988, 290), measured(400, 100)]
    machine = model_check.fit_machine(results[:2])
    assert machine.link == pytest.approx(3e9)
    assert machine.tensor_s == pytest.approx(4e-4)
    assert machine.copy == pytest.approx(1e9)
    assert machine.fixed_s == pytest.approx(0.04)
    table = model_check.check_model(results)
    assert table.count("| 1.00 |") == 3
    assert "400 MB, 1 + 1 x TP 1, sharded |" in table
    assert model_check.fit_machine(results[1:2]).tensor_s == 0.0


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
