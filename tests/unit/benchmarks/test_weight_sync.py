"""The benchmark of the weight sync: its report, its arms, and their state in a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.weight_sync import __main__ as weight_sync
from benchmarks.weight_sync import exposed, report, trainer
from benchmarks.weight_sync.arms import ARMS, Product, Sharded, Took
from benchmarks.weight_sync.measure import groups_of_arms
from one_step_off.config.schema import WeightSyncConfig


def took(seconds: float, **split: float) -> Took:
    """A run of an arm; the product's if it has the phase "wait"."""
    extra = {"bytes": 2e6, "wire": 0.25} if "wait" in split else {}
    return Took(seconds, split, {"gather": 0.1}, extra)


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_table_and_plot_of_the_arms(tmp_path: Path) -> None:
    raw_seconds = [0.5, 1.0, 0.5]
    raw_runs = [took(seconds, wire=seconds) for seconds in raw_seconds]
    sharded_runs = [took(seconds, wait=0.6, load=0.4) for seconds in (1.0, 3.0, 1.5)]
    raw = report.summarize(raw_runs, raw_seconds)
    sharded = report.summarize(sharded_runs, raw_seconds)
    assert sharded["ratio_to_raw"]["all"] == [2.0, 3.0, 3.0]
    assert sharded["split"] == {"wait": 0.6, "load": 0.4}
    memory = {"sender": 128e6, "receiver": 64e6}
    result = {
        "what": "A model.",
        "bytes": 4e6,
        "repeats": 3,
        "arms": {
            "raw": raw | {"memory": {}, "said": "the yardstick"},
            "sharded": sharded | {"memory": memory, "said": "in shards"},
        },
        "skipped": {"vllm, NCCL": "no GPUs here"},
    }
    text = report.table(result)
    times = "1.5 (1 to 3) | 3.00 (2.00 to 3.00)"
    rest = "wait 0.6, load 0.4 | 0.25 | gather 0.1 | 2 | 128 | 64"
    assert f"| sharded | {times} | {rest} |" in text
    assert "| vllm, NCCL | not run: no GPUs here |" in text
    assert "- sharded: in shards" in text
    assert len({row.count("|") for row in table_rows(text)}) == 1
    report.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_an_arm_whose_keys_the_program_lacks_is_skipped_by_name() -> None:
    class NotYet(Product):
        keys = {"bucket_mb": 1, "not_yet": True}

    assert NotYet("", None).why_not == "this version has no weight_sync.not_yet"
    assert Sharded("sharded", None).why_not == ""


def make_worker() -> SimpleNamespace:
    """What the functions that Ray calls need of a trainer rank."""
    model = torch.nn.Linear(256, 256, bias=False)
    torch.nn.init.normal_(model.weight, std=0.02)
    cfg = SimpleNamespace(weight_sync=WeightSyncConfig())
    return SimpleNamespace(model=model, rank=0, version=0, sender=None, cfg=cfg)


def bf16_numbers(worker: SimpleNamespace) -> torch.Tensor:
    """The weights in bf16, as integers in which neighboring values differ by 1."""
    return worker.model.weight.detach().bfloat16().view(torch.int16).int()


def test_nudges_change_the_requested_share_by_little() -> None:
    worker = make_worker()
    before = bf16_numbers(worker)
    for version in (1, 2):
        trainer.nudge(worker, 0.02, version)
        after = bf16_numbers(worker)
        steps = (after - before).abs()
        assert 0.015 < (steps > 0).float().mean() <= 0.02
        assert steps.max() <= 2
        before = after


def test_flips_change_the_sign_of_one_in_so_many_elements() -> None:
    worker = make_worker()
    before = worker.model.weight.detach().clone()
    trainer.flip_signs(worker, 8, 3)
    assert (worker.model.weight == -before).float().mean() == 1 / 8
    assert worker.version == 3


def test_each_arm_finds_what_it_set_on_a_worker() -> None:
    worker = make_worker()
    trainer.select_arm(worker, "a", {"bucket_mb": 1})
    worker.sender = "a's"
    worker.mirror = [1]
    trainer.select_arm(worker, "b", {})
    assert worker.sender is None
    assert not hasattr(worker, "mirror")
    assert worker.cfg.weight_sync.bucket_mb is None
    worker.sender = "b's"
    worker.version = 7
    trainer.select_arm(worker, "a", {"bucket_mb": 1})
    assert worker.sender == "a's"
    assert worker.mirror == [1]
    assert worker.version == 7
    assert worker.cfg.weight_sync.bucket_mb == 1
    trainer.select_arm(worker, "b", {})
    assert worker.sender == "b's"
    assert not hasattr(worker, "mirror")


class Endpoint:
    """A weight sender that counts how often it is closed and its thread stopped."""

    def __init__(self) -> None:
        self.closed = 0
        self.stopped = 0
        self.wire_thread = self

    def close(self) -> None:
        self.closed += 1

    def stop(self) -> None:
        self.stopped += 1


def test_a_forgotten_arm_leaves_nothing_on_a_worker() -> None:
    worker = make_worker()
    trainer.forget_arm(worker, "raw")  # it never set anything
    trainer.select_arm(worker, "a", {"bucket_mb": 1})
    endpoint = Endpoint()
    worker.sender = endpoint
    worker.mirror = [1]
    worker.version = 3
    trainer.forget_arm(worker, "a")
    assert worker.sender is None
    assert not hasattr(worker, "mirror")
    assert worker.version == 3
    assert endpoint.closed == endpoint.stopped == 1
    assert worker.cfg.weight_sync.bucket_mb is None
    assert "a" not in worker.bench_arms.of_arm


def test_arms_apart_have_the_raw_broadcast_beside_them() -> None:
    raw, a, b = (SimpleNamespace(needs_own_model=False) for _ in range(3))
    delta = SimpleNamespace(needs_own_model=True)
    assert groups_of_arms([raw, a, b], apart=True) == [[raw, a], [raw, b]]
    assert groups_of_arms([raw, a, b], apart=False) == [[raw, a, b]]
    assert groups_of_arms([raw, a, delta, b], apart=False) == [[raw, a, b], [raw, delta]]
    assert groups_of_arms([raw], apart=True) == [[raw]]


def runs_with_steps(*step_seconds: float) -> list[list[dict[str, Any]]]:
    """A run of three equal steps for each of these seconds."""
    phases = {"time/generate_s": 1.0, "time/train_s": 1.8, "time/sync_s": 0.5}
    return [[phases | {"time/step_s": seconds}] * 3 for seconds in step_seconds]


def test_what_a_sync_exposes() -> None:
    runs = {exposed.ZERO: runs_with_steps(2.0, 2.2), exposed.PLAIN: runs_with_steps(2.5, 2.9)}
    found = exposed.summarize(runs)
    assert found[exposed.PLAIN]["exposed"]["all"] == pytest.approx([0.5, 0.7])
    assert found[exposed.ZERO]["exposed"]["median"] == 0.0
    result = {
        "what": "A model.",
        "repeats": 2,
        "steps": 9,
        "settings": {"training longer": found},
        "skipped": {"overlapped": "no key"},
    }
    text = exposed.table(result)
    assert "| plain | 2.7 (2.5 to 2.9) |" in text
    assert "| overlapped | not run: no key |" in text
    assert len({row.count("|") for row in table_rows(text)}) == 1
    assert "training longer: T_train / T_gen = 1.80 without a sync." in text
    wrong_ratio = "T_gen / T_train = 0.56 without a sync, NOT"
    assert wrong_ratio in exposed.phase_ratio("generation longer", found)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--changed", "0.6"], "--changed 0.6 --repeats 9: above 0 up to 0.5"),
        (["--repeats", "0"], "--changed 0.02 --repeats 0: above 0 up to 0.5, and at least 1"),
        (["--steps", "3"], "--steps 3: at least 4, since the first 2 and the last are dropped"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        weight_sync.arguments(["--out", str(tmp_path), *flags])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert error.count("\n") == 1


def test_each_arm_has_the_name_of_its_class():
    for name, arm in ARMS.items():
        assert arm.__name__.lower() == name.replace("-", "").replace(", ", "on").lower()


@pytest.mark.parametrize(
    "benchmark",
    ["agent_loop", "backends", "checkpoint", "lora", "optimizers", "rollout", "weight_sync"],
)
def test_a_command_line_is_read_before_anything_slow_is_imported(benchmark):
    """torch, transformers and vLLM take twenty seconds, and print warnings over the help."""
    code = (
        f"import sys, importlib; sys.argv = ['{benchmark}', '--help']\n"
        f"name = 'benchmarks.{benchmark}'\n"
        "is_folder = hasattr(importlib.import_module(name), '__path__')\n"
        "module = importlib.import_module(name + ('.__main__' if is_folder else ''))\n"
        "try: module.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'transformers', 'vllm'} & sys.modules.keys()\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
