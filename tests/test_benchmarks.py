"""What the benchmarks make of measurements; that the commands run is seen when they are run."""

from __future__ import annotations

from benchmarks import learning, throughput, update_phase
from one_step_off.config_io import load


def rows(step: float, gen: float, train: float, sync: float) -> list[dict]:
    return [
        {"time/step_s": step * k, "time/generate_s": gen, "time/train_s": train, "time/sync_s": sync, "samples": 10.0}
        for k in (0.5, 1.0, 1.5)
    ]


def test_medians_headline_and_table(tmp_path):
    arms = {
        "colocated sync": throughput.summarise([rows(1.8, 0.5, 0.6, 0.1)] * 3),
        "disaggregated sync": throughput.summarise(
            [rows(2.0, 0.8, 1.0, 0.1), rows(2.2, 0.9, 1.1, 0.1), rows(9.0, 5.0, 5.0, 0.1)]
        ),
        "one step off": throughput.summarise([rows(1.2, 0.8, 1.0, 0.1)] * 3),
    }
    assert arms["disaggregated sync"]["step"] == {"median": 2.2, "min": 2.0, "max": 9.0, "runs": [2.0, 2.2, 9.0]}
    assert arms["one step off"]["samples/s"]["median"] == 30 / 3.6
    result = {"arms": arms, "runs": 3, "warmup": 2, "headline": throughput.headline(arms)}
    assert result["headline"]["speedup"] == 2.2 / 1.2
    assert result["headline"]["speedup_over_colocated"] == 1.8 / 1.2
    assert result["headline"]["step_over_limit"] == 1.2 / 1.1
    said = throughput.table(result)
    assert "| one step off | 1.2 (1.2 to 1.2) |" in said and "1.83 times as fast" in said
    throughput.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_failing_arm_says_why(tmp_path):
    import pytest

    with pytest.raises(RuntimeError, match=r"(?s)ended with 2:.*rollout.nn"):
        throughput.run_arm("config/gsm8k_tiny_cpu.yaml", [], tmp_path, ["rollout.nn=1"])


def test_the_colocated_arm_has_the_devices_of_all_pools():
    cfg = load(["config=config/gsm8k_tiny_cpu.yaml", "placement.pools={rollout: [2], actor: [3]}"])
    keys = throughput.arms_of(cfg)["colocated sync"]
    assert keys[:2] == ["placement.pools={all: [3]}", "placement.roles={rollout: all, actor: all}"]
    cfg.placement.device, cfg.placement.pools = "cuda", {"rollout": [2, 2], "actor": [4]}
    assert throughput.arms_of(cfg)["colocated sync"][0] == "placement.pools={all: [6, 2]}"


def test_the_update_phase_against_the_arithmetic():
    def row(actor: float, critic: float, phase: float) -> dict:
        return {
            "time/actor_update_s": actor,
            "time/critic_update_s": critic,
            "time/update_s": phase,
            "time/train_s": phase + 0.1,
        }

    arms = {
        "one core": update_phase.summarise([row(3.0, 1.0, 4.0)] * 3 + [row(9.0, 9.0, 18.0)] * 2),
        "split": update_phase.summarise([row(3.0, 1.0, 3.2)] * 3),
    }
    found = update_phase.headline(arms)
    assert found == {"speedup": 4.0 / 3.2, "best": 4.0 / 3.0}
    said = update_phase.table({"arms": arms, "steps": 3, "headline": found})
    assert "| split | 3 | 1 | 3.2 | 3.3 |" in said and "1.25 times as fast; the arithmetic allows 1.33" in said


def test_curves_of_seeds(tmp_path):
    rows_ = [{"reward/mean": r} for r in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    run = learning.summarise(rows_, [{"val/version": 0.0, "val/reward": 0.0}, {"val/version": 7.0, "val/reward": 0.9}])
    assert learning.table({3: run}).splitlines()[-1] == "| 3 | 0.300 | 0.500 | 0.000 | 0.900 |"
    learning.plot({3: run}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
