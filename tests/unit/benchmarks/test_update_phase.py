"""The benchmark of PPO's update phase: actor and critic split or on one core."""

from __future__ import annotations

from benchmarks import update_phase


def row(actor: float, critic: float, phase: float) -> dict[str, float]:
    """The metrics of a step, in seconds."""
    return {
        "time/actor_update_s": actor,
        "time/critic_update_s": critic,
        "time/update_s": phase,
        "time/train_s": phase + 0.1,
    }


def test_the_update_phase_against_the_arithmetic() -> None:
    one_core = [row(3.0, 1.0, 4.0)] * 3 + [row(9.0, 9.0, 18.0)] * 2
    arms = {
        "one core": update_phase.summarize(one_core),
        "split": update_phase.summarize([row(3.0, 1.0, 3.2)] * 3),
    }
    found = update_phase.headline(arms)
    assert found == {"speedup": 4.0 / 3.2, "best": 4.0 / 3.0}
    text = update_phase.table({"arms": arms, "steps": 3, "headline": found})
    assert "| split | 3 | 1 | 3.2 | 3.3 |" in text
    assert "1.25 times as fast; the arithmetic allows 1.33" in text
