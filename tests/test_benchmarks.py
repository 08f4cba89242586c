"""What the benchmarks make of measurements; that the commands run is seen when they are run."""

from __future__ import annotations

from benchmarks import throughput


def rows(step: float, gen: float, train: float, sync: float) -> list[dict]:
    return [
        {"time/step_s": step * k, "time/generate_s": gen, "time/train_s": train, "time/sync_s": sync, "samples": 10.0}
        for k in (0.5, 1.0, 1.5)
    ]


def test_medians_headline_and_table(tmp_path):
    arms = {
        "synchronous": throughput.summarise(
            [rows(2.0, 0.8, 1.0, 0.1), rows(2.2, 0.9, 1.1, 0.1), rows(9.0, 5.0, 5.0, 0.1)]
        ),
        "one step off": throughput.summarise([rows(1.2, 0.8, 1.0, 0.1)] * 3),
    }
    assert arms["synchronous"]["step"] == {"median": 2.2, "min": 2.0, "max": 9.0, "runs": [2.0, 2.2, 9.0]}
    assert arms["one step off"]["samples/s"]["median"] == 30 / 3.6
    result = {"arms": arms, "runs": 3, "warmup": 2, "headline": throughput.headline(arms)}
    assert result["headline"]["speedup"] == 2.2 / 1.2
    assert result["headline"]["step_over_limit"] == 1.2 / 1.1
    said = throughput.table(result)
    assert "| one step off | 1.2 (1.2 to 1.2) |" in said and "1.83 times as fast" in said
    throughput.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_failing_arm_says_why(tmp_path):
    import pytest

    with pytest.raises(RuntimeError, match=r"(?s)ended with 2:.*rollout.nn"):
        throughput.run_arm("config/gsm8k_tiny_cpu.yaml", 1, tmp_path, ["rollout.nn=1"])
