"""The cost model of the weight sync, and what its benchmark makes of measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.weight_sync import __main__ as weight_sync
from benchmarks.weight_sync import arms as sync_arms
from benchmarks.weight_sync import cost_model as sync_model
from benchmarks.weight_sync import exposed as sync_exposed
from benchmarks.weight_sync import report as sync_report
from benchmarks.weight_sync import trainer as sync_trainer
from benchmarks.weight_sync.cost_model import H100, Layout, Model
from one_step_off.config.schema import WeightSyncConfig

MODEL = Model("32B", 32.8e9, 771)
LAYOUT = Layout(16, 2, 8)
SPEEDS = ("link", "within", "host", "pack", "copy", "check")


@pytest.mark.parametrize(
    "how", [{}, {"gather": True}, {"changed": 0.02}, {"at_once": 1}, {"pipelined": False}]
)
def test_a_faster_machine_is_never_slower_and_a_larger_model_never_faster(how: dict):
    layout = replace(LAYOUT, **how)
    base = sync_model.total(H100, MODEL, layout)
    for speed in SPEEDS:
        assert (
            sync_model.total(replace(H100, **{speed: 2 * getattr(H100, speed)}), MODEL, layout)
            <= base
        )
    for cost in ("tensor_s", "message_s", "fixed_s"):
        assert (
            sync_model.total(replace(H100, **{cost: 2 * getattr(H100, cost)}), MODEL, layout)
            >= base
        )
    assert sync_model.total(H100, replace(MODEL, parameters=2 * MODEL.parameters), layout) > base
    assert sync_model.total(H100, replace(MODEL, tensors=2 * MODEL.tensors), layout) >= base


def test_the_limits_of_the_model():
    free = replace(H100, tensor_s=0.0, message_s=0.0, fixed_s=0.0)
    fast = {speed: math.inf for speed in SPEEDS if speed not in ("link", "within")}
    # Nothing but one card counts: all bytes over its speed. Eight senders at once fill eight cards, sixteen no more.
    wire = replace(free, **fast, within=math.inf)
    assert sync_model.total(wire, MODEL, replace(LAYOUT, at_once=1)) == pytest.approx(
        MODEL.size / H100.link
    )
    eight, all_of_them = (
        sync_model.total(wire, MODEL, replace(LAYOUT, at_once=n)) for n in (8, None)
    )
    assert eight == all_of_them == pytest.approx(MODEL.size / H100.link / 8)
    # Pipelined it is never worse than in turns, and one bucket pipelines nothing.
    turns, once = replace(LAYOUT, pipelined=False), replace(LAYOUT, bucket=1e15)
    assert sync_model.total(H100, MODEL, LAYOUT) < sync_model.total(H100, MODEL, turns)
    stages = sync_model.phases(H100, MODEL, once)
    assert sync_model.total(H100, MODEL, once) == pytest.approx(H100.fixed_s + sum(stages.values()))
    # Changed elements never take more than all of them.
    assert sync_model.payload(MODEL, replace(LAYOUT, changed=1.0)) == MODEL.size
    assert sync_model.payload(MODEL, replace(LAYOUT, changed=0.02)) < 0.03 * MODEL.size


def test_overlap_hides_a_sync_from_a_longer_training_alone():
    assert sync_model.step(10, 20, 3, overlap=False) == 23
    assert sync_model.step(10, 20, 3, overlap=True) == 20
    assert (
        sync_model.step(20, 10, 3, overlap=True) == sync_model.step(20, 10, 3, overlap=False) == 23
    )


def measured(mb: float, tensors: int) -> dict:
    """What the benchmark would have measured on a machine with known speeds."""
    size, bucket = mb * 1e6, 64
    messages = math.ceil(size / (bucket << 20))
    wire, load, verify, pack = (
        messages * 1e-3 + size / 3e9,
        tensors * 4e-4 + size / 1e9,
        size / 4e9,
        size / 2e9,
    )
    split = {"pause": 0.02, "prepare": 0.01, "load": load, "verify": verify, "finish": 0.01}
    stages = sorted([wire, load + verify, pack])
    took = 0.04 + stages[2] + sum(stages[:2]) / messages
    return {
        "bytes": size,
        "tensors": tensors,
        "arguments": {
            "model": f"{mb:g} MB",
            "ranks": 1,
            "replicas": 1,
            "tp": 1,
            "bucket_mb": bucket,
        },
        "arms": {
            "raw": {"seconds": {"median": wire}},
            "sharded": {
                "seconds": {"median": took},
                "split": split,
                "sender": {"gather": 0.75 * pack, "checksum": 0.25 * pack},
            },
        },
    }


def test_the_model_finds_the_speeds_that_measurements_were_made_of():
    results = [measured(1, 26), measured(988, 290), measured(400, 100)]
    machine = sync_model.fitted(results[:2])
    assert machine.link == pytest.approx(3e9) and machine.tensor_s == pytest.approx(4e-4)
    assert machine.copy == pytest.approx(1e9) and machine.fixed_s == pytest.approx(0.04)
    said = sync_model.checked(results)
    assert said.count("| 1.00 |") == 3 and "400 MB, 1 + 1 x TP 1 |" in said
    assert sync_model.fitted(results[1:2]).tensor_s == 0.0


def test_the_estimates_say_what_they_are():
    said = sync_model.estimates()
    assert said.startswith("Estimates, not measurements") and all(
        name in said for name in sync_model.CASES
    )
    assert "senders at once" in sync_model.cards()


def took(seconds: float, **split: float) -> sync_arms.Took:
    return sync_arms.Took(
        seconds, split, {"gather": 0.1}, {"bytes": 2e6, "wire": 0.25} if "wait" in split else {}
    )


def test_table_and_plot_of_the_arms(tmp_path: Path):
    raws = [0.5, 1.0, 0.5]
    arms = {
        "raw": sync_report.summarise([took(s, wire=s) for s in raws], raws)
        | {"memory": {}, "said": "the yardstick"},
        "sharded": sync_report.summarise(
            [took(s, wait=0.6, load=0.4) for s in (1.0, 3.0, 1.5)], raws
        )
        | {"memory": {"sender": 128e6, "receiver": 64e6}, "said": "in shards"},
    }
    assert arms["sharded"]["ratio_to_raw"]["all"] == [2.0, 3.0, 3.0]
    assert arms["sharded"]["split"] == {"wait": 0.6, "load": 0.4}
    result = {
        "what": "A model.",
        "bytes": 4e6,
        "repeats": 3,
        "arms": arms,
        "skipped": {"vllm, NCCL": "no GPUs here"},
    }
    said = sync_report.table(result)
    assert (
        "| sharded | 1.5 (1 to 3) | 3.00 (2.00 to 3.00) | wait 0.6, load 0.4 | 0.25 | gather 0.1 | 2 | 128 | 64 |"
        in said
    )
    assert "| vllm, NCCL | not run: no GPUs here |" in said and "- sharded: in shards" in said
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    sync_report.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_an_arm_whose_keys_the_program_lacks_is_skipped_by_name():
    class Later(sync_arms.Product):
        keys = {"bucket_mb": 1, "not_yet": True}

    assert Later(None).why_not == "this version has no weight_sync.not_yet"
    assert sync_arms.Sharded(None).why_not == ""


def worker() -> SimpleNamespace:
    """As much of a trainer rank as the functions want that Ray calls on one."""
    model = torch.nn.Linear(256, 256, bias=False)
    torch.nn.init.normal_(model.weight, std=0.02)
    return SimpleNamespace(
        model=model,
        rank=0,
        version=0,
        sender=None,
        cfg=SimpleNamespace(weight_sync=WeightSyncConfig()),
    )


def test_weights_that_change_by_the_share_asked_for_and_to_a_neighbour():
    own = worker()
    bits = [own.model.weight.detach().bfloat16().view(torch.int16).int()]
    for version in (1, 2):
        sync_trainer.nudge(own, 0.02, version)
        bits.append(own.model.weight.detach().bfloat16().view(torch.int16).int())
        steps = (bits[-1] - bits[-2]).abs()
        assert 0.015 < (steps > 0).float().mean() <= 0.02 and steps.max() <= 2
    before = own.model.weight.detach().clone()
    sync_trainer.flip(own, 8, 3)
    assert (own.model.weight == -before).float().mean() == 1 / 8 and own.version == 3


def test_each_arm_finds_what_it_left_in_a_worker():
    own = worker()
    sync_trainer.select(own, "a", {"bucket_mb": 1})
    own.sender, own.mirror = "a's", [1]
    sync_trainer.select(own, "b", {})
    assert own.sender is None and not hasattr(own, "mirror") and own.cfg.weight_sync.bucket_mb == 64
    own.sender, own.version = "b's", 7
    sync_trainer.select(own, "a", {"bucket_mb": 1})
    assert (own.sender, own.mirror, own.version, own.cfg.weight_sync.bucket_mb) == (
        "a's",
        [1],
        7,
        1,
    )
    sync_trainer.select(own, "b", {})
    assert own.sender == "b's" and not hasattr(own, "mirror")


def test_an_arm_leaves_nothing_in_a_worker():
    class Thread:
        closed = 0

        def close(self) -> None:
            self.closed += 1

        stop = close

    own, end = worker(), Thread()
    end.wire = end  # ty: ignore[missing-attribute]
    sync_trainer.forget(own, "raw")  # it never had anything
    sync_trainer.select(own, "a", {"bucket_mb": 1})
    own.sender, own.mirror, own.version = end, [1], 3
    sync_trainer.forget(own, "a")
    assert (
        own.sender is None and not hasattr(own, "mirror") and own.version == 3 and end.closed == 2
    )
    assert own.cfg.weight_sync.bucket_mb == 64 and "a" not in own.bench_arms


def test_arms_apart_have_the_raw_broadcast_beside_them():
    assert weight_sync.together(["raw", "a", "b"], apart=True) == [["raw", "a"], ["raw", "b"]]
    assert weight_sync.together(["raw", "a", "b"], apart=False) == [["raw", "a", "b"]]
    assert weight_sync.together(["raw"], apart=True) == [["raw"]]


def test_what_a_sync_exposes():
    def runs(*steps: float) -> list[list[dict]]:
        times = {"time/generate_s": 1.0, "time/train_s": 1.8, "time/sync_s": 0.5}
        return [[{"time/step_s": s} | times] * 3 for s in steps]

    found = sync_exposed.summarise(
        {sync_exposed.ZERO: runs(2.0, 2.2), sync_exposed.PLAIN: runs(2.5, 2.9)}
    )
    assert found[sync_exposed.PLAIN]["exposed"]["all"] == pytest.approx([0.5, 0.7])
    assert found[sync_exposed.ZERO]["exposed"]["median"] == 0.0
    result = {
        "what": "A model.",
        "repeats": 2,
        "steps": 9,
        "settings": {"training longer": found},
        "skipped": {"overlapped": "no key"},
    }
    said = sync_exposed.table(result)
    assert "| plain | 2.7 (2.5 to 2.9) |" in said and "| overlapped | not run: no key |" in said
    assert len({line.count("|") for line in said.splitlines() if line.startswith("|")}) == 1
    assert "training longer: T_train / T_gen = 1.80 without a sync." in said
    assert "T_gen / T_train = 0.56 without a sync, NOT" in sync_exposed.longer(
        "generation longer", found
    )


def test_the_page_shows_the_estimates_as_the_script_prints_them():
    page = (Path(__file__).parents[3] / "docs/measured/weight_sync_estimates.md").read_text()
    for line in (sync_model.estimates() + sync_model.cards()).splitlines():
        assert not line.startswith("|") or line in page, (
            "put the output of python -m benchmarks.sync_model into the page"
        )
