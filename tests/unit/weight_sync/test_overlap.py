"""When a step trains beside its weight sync: `weight_sync.overlap`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.config.schema import Config
from one_step_off.weight_sync.overlap import (
    DECIDING_STEPS,
    StepPhases,
    SyncOverlap,
    hidden_share,
    should_overlap,
)

TRAINING_LONGER = StepPhases(generate_s=1.0, train_s=2.0, sync_s=0.1)
GENERATION_LONGER = StepPhases(generate_s=2.0, train_s=1.0, sync_s=0.1)

seconds = st.floats(0, 1e4)
phases = st.builds(StepPhases, seconds, seconds, seconds)
several_steps = st.lists(phases, min_size=DECIDING_STEPS, max_size=5)


def make_config(overlap: str) -> Config:
    cfg = Config()
    cfg.weight_sync.overlap = overlap
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    return cfg


def metrics_of(step: StepPhases) -> dict[str, float]:
    return {
        "time/generate_s": step.generate_s,
        "time/train_s": step.train_s,
        "time/sync_s": step.sync_s,
    }


def settings_of_run(steps: list[StepPhases], cfg: Config | None = None) -> list[bool]:
    """The setting of each step of a run whose steps have these phases, whatever the setting."""
    schedule = SyncOverlap(cfg or make_config("auto"))
    chosen = []
    for step in steps:
        chosen.append(schedule.begin_step())
        assert schedule.end_step(metrics_of(step)) == {"sync/overlapped": float(chosen[-1])}
    return chosen


def changes(chosen: list[bool]) -> list[int]:
    """The steps whose setting is not that of the step before."""
    return [i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]]


@pytest.mark.parametrize(
    ("train_s", "share"), [(0.0, 0.0), (1.0, 0.0), (1.1, 0.25), (1.2, 0.5), (1.4, 1.0), (9.0, 1.0)]
)
def test_a_sync_is_hidden_as_far_as_training_outlasts_generation(train_s, share):
    """A sync of 0.4 s, and 1 s of generation."""
    assert hidden_share([StepPhases(1.0, train_s, 0.4)]) == pytest.approx(share)


def test_the_share_is_what_overlap_saves_of_a_step():
    """max(generate, train) + sync against max(generate + sync, train)."""
    for train_s in (0.3, 0.9, 1.0, 1.2, 1.3, 1.7):
        after = 1.0 if train_s < 1.0 else train_s
        saved = after + 0.5 - max(1.5, train_s)
        assert hidden_share([StepPhases(1.0, train_s, 0.5)]) == pytest.approx(saved / 0.5)


def test_one_unusual_step_decides_nothing():
    for usual, unusual in [
        (TRAINING_LONGER, GENERATION_LONGER),
        (GENERATION_LONGER, TRAINING_LONGER),
    ]:
        steps = [usual, usual, unusual, usual]
        assert hidden_share(steps) == hidden_share([usual])


@given(several_steps, st.floats(0, 100), st.booleans())
def test_longer_training_never_ends_overlap_and_longer_generation_never_begins_it(
    steps, more_s, overlapped
):
    chosen = should_overlap(steps, overlapped)
    longer_training = [replace(step, train_s=step.train_s + more_s) for step in steps]
    assert should_overlap(longer_training, overlapped) >= chosen
    longer_generation = [replace(step, generate_s=step.generate_s + more_s) for step in steps]
    assert should_overlap(longer_generation, overlapped) <= chosen


@given(several_steps)
def test_between_the_two_limits_the_present_setting_stays(steps):
    begins = should_overlap(steps, overlapped=False)
    stays = should_overlap(steps, overlapped=True)
    assert stays >= begins
    share = hidden_share(steps)
    assert (stays and not begins) == (0.1 <= share < 0.25)


@given(st.lists(phases, max_size=60))
def test_between_two_changes_there_are_steps_enough_to_decide(steps):
    at = [0, *changes(settings_of_run(steps))]
    for before, after in zip(at, at[1:], strict=False):
        assert after - before >= DECIDING_STEPS


@given(phases, st.integers(0, 30))
def test_equal_steps_change_the_setting_once_at_most(step, count):
    chosen = settings_of_run([step] * count)
    assert len(changes(chosen)) <= 1
    assert chosen[:DECIDING_STEPS] == [False] * min(count, DECIDING_STEPS)


def test_auto_follows_the_phases():
    steps = [TRAINING_LONGER] * 8 + [GENERATION_LONGER] * 8
    chosen = settings_of_run(steps)
    assert changes(chosen) == [3, 11], "three of five steps must have the other longer phase"
    assert chosen[0] is False


def test_the_phases_of_one_setting_say_nothing_about_the_other():
    """After a change the medians begin again: two steps of the new setting change nothing."""
    steps = [TRAINING_LONGER] * 3 + [GENERATION_LONGER] * 3 + [TRAINING_LONGER] * 2
    assert settings_of_run(steps) == [False] * 3 + [True] * 3 + [False] * 2


def test_steps_without_a_sync_do_not_count():
    without_sync = replace(TRAINING_LONGER, sync_s=0.0)
    assert settings_of_run([without_sync] * 9) == [False] * 9
    steps = [without_sync] + [TRAINING_LONGER] * 4
    assert changes(settings_of_run(steps)) == [4], "three steps with a sync decide"
    schedule = SyncOverlap(make_config("auto"))
    for _ in range(9):  # no replica was left for the sync: the step has no such metric
        assert not schedule.begin_step()
        schedule.end_step({"time/generate_s": 1.0, "time/train_s": 2.0})


@pytest.mark.parametrize("step", [TRAINING_LONGER, GENERATION_LONGER])
@pytest.mark.parametrize(("overlap", "expected"), [("true", True), ("false", False)])
def test_fixed_settings_stay(step, overlap, expected):
    assert settings_of_run([step] * 9, make_config(overlap)) == [expected] * 9


@pytest.mark.parametrize(("overlap", "expected"), [("auto", True), ("false", False)])
def test_on_a_shared_device_auto_overlaps_from_the_first_step(overlap, expected):
    cfg = make_config(overlap)
    cfg.placement.pools = {"rollout": [0.5], "actor": [0.5]}
    assert settings_of_run([GENERATION_LONGER] * 9, cfg) == [expected] * 9


@pytest.mark.parametrize("overlap", ["auto", "true", "false"])
def test_what_takes_turns_never_overlaps(overlap):
    synchronous = make_config(overlap)
    synchronous.pipeline.staleness = 0
    one_pool = make_config(overlap)
    one_pool.placement.roles = {"rollout": "all", "actor": "all"}
    for cfg in (synchronous, one_pool):
        assert settings_of_run([TRAINING_LONGER] * 9, cfg) == [False] * 9


def test_steps_between_two_syncs_count_together():
    """With staleness 2 the sync of two steps is hidden by the training of both, beyond the
    generation of both."""
    cfg = make_config("auto")
    cfg.pipeline.staleness = 2
    alone = [StepPhases(1.0, 1.2, 0.4), StepPhases(1.0, 1.2, 0.0)]
    overlap = SyncOverlap(cfg)
    chosen = []
    for step in alone * 4:
        chosen.append(overlap.begin_step())
        overlap.end_step(metrics_of(step))
    assert chosen == [False] * 6 + [True] * 2
    assert not should_overlap([StepPhases(1.0, 1.05, 0.4)] * 3, overlapped=False)
    assert should_overlap([StepPhases(2.0, 2.1, 0.4)] * 3, overlapped=False)
