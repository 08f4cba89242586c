"""The benchmark of staleness: what it makes of flags and of measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks.staleness import __main__ as benchmark
from benchmarks.staleness import arms, report


def timed_rows(steps: int, period: int) -> list[dict[str, float]]:
    """Steps of 1 s; every `period` of them the replicas wait 0.3 s and receive weights for 0.1 s.
    The first and the last ones are ten times as long."""
    rows = []
    for step in range(steps):
        has_sync = step % period == 0
        is_edge = step < period or step >= steps - period
        rows.append(
            {
                "time/step_s": 10.0 if is_edge else 1.0,
                "time/train_s": 0.8,
                "time/sync_s": 0.1 * has_sync,
                "time/wait_trainer_s": 0.3 * has_sync,
                "samples": 50.0,
                "staleness/max": float(period),
                "staleness/age_0": 0.0,
                "staleness/age_1": 0.25,
                "staleness/age_2": 0.75,
            }
        )
    return rows


@pytest.mark.parametrize("period", [1, 2, 4])
def test_the_start_and_the_end_of_a_run_do_not_count(period):
    found = arms.speed_figures(timed_rows(16, period), period)
    assert found["samples/s"] == pytest.approx(50.0)
    assert found["rollout idle"] == pytest.approx(0.4 / period)
    assert found["rollout syncs"] == pytest.approx(0.1 / period)
    assert found["trainer idle"] == pytest.approx(0.2)
    assert found["mean age"] == pytest.approx(1.75)
    assert found["oldest"] == period
    with pytest.raises(ValueError, match=f"needs {3 * period} at least"):
        arms.speed_figures(timed_rows(3 * period - 1, period), period)


def test_the_flags_name_the_runs(tmp_path):
    flags = ["--out", str(tmp_path), "--ages", "0", "2", "--modes", "wait", "keep"]
    flags += ["--seeds", "3", "--corrections", "none", "mis"]
    _, args, overrides = benchmark.arguments([*flags, "rollout.n=4"])
    runs = benchmark.runs_of(args, overrides, [])
    names = [(run.part, run.name, run.number) for run in runs]
    speed = [("speed", name, 0) for name in ("k=0 wait", "k=2 wait", "k=2 keep")]
    learning = [
        ("learning", f"{name}, {correction}", 3)
        for correction in ("none", "mis")
        for name in ("k=0 wait", "k=2 wait", "k=2 keep")
    ]
    assert names == speed + learning
    assert len({run.folder_name for run in runs}) == len(runs)
    assert "algorithm.rollout_correction=mis" in runs[-1].keys
    assert "weight_sync.in_flight=keep" in runs[-1].keys
    assert all("rollout.n=4" in run.keys for run in runs)


def test_too_few_steps_are_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path / "out"), "--ages", "8", "--steps", "20"])
    assert "20 steps: staleness 8 needs 24 at least" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_parts_may_be_run_one_after_another(tmp_path, monkeypatch):
    """Each keeps what the earlier ones have measured."""

    def run_arm(config, keys, folder, overrides):
        folder.mkdir(parents=True)
        rows = timed_rows(6, 1)
        for row in rows:
            row |= {"reward/mean": 0.5, "staleness/ratio_age_1": 1.25}
        (folder / "evaluations.jsonl").write_text(json.dumps({"val/reward": 0.75}) + "\n")
        return rows

    monkeypatch.setattr(benchmark, "run_arm", run_arm)
    common = ["--out", str(tmp_path), "--ages", "1", "--steps", "6"]
    assert benchmark.main([*common, "--modes", "wait", "--parts", "speed"]) == 0
    flags = ["--modes", "wait", "keep", "--parts", "learning", "--seeds", "0", "1"]
    assert benchmark.main([*common, *flags]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["speed"]) == {"k=1 wait"}
    assert result["learning"]["k=1 keep, none"]["1"]["ratio by age"] == {"1": 1.25}
    table = (tmp_path / "result.md").read_text().splitlines()
    assert table[2].startswith("| k=1 wait | 50.0 | 1.00 | 40.0% |")
    assert table[2].endswith("| 0.500 (0.500 to 0.500), 0.750 |")
    assert table[3].startswith("| k=1 keep | - |")
    assert (tmp_path / "staleness.png").exists()
    assert report.arm_names(result) == ["k=1 wait", "k=1 keep"]
