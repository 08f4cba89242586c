"""The learning rate of a run that is resumed with another number of steps: no jump, by formula, in
the trainer and on screen.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.algorithms import schedule
from one_step_off.algorithms.schedule import Decay, DecayPlan, SavedSchedule
from one_step_off.config.schema import Config
from one_step_off.runtime import launch
from one_step_off.runtime.prepare import ResumePoint
from tests.conftest import tiny_config
from tests.unit.stand_ins import train_with
from tests.unit.training.fsdp_helpers import config, make_batch


def rate(step: int, decay: Decay, kind: str, warmup: int = 2, floor: float = 0.1) -> float:
    return schedule.learning_rate(
        step, decay.total, 1.0, kind, warmup, floor, decay.begin, decay.done
    )


@given(
    st.sampled_from(["cosine", "linear"]), st.integers(0, 5), st.integers(3, 40), st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60), st.integers(1, 4)), max_size=3),
    st.floats(0, 1),
)  # fmt: skip
def test_the_rate_never_jumps_however_often_a_run_is_resumed(
    kind, warmup, total, per_step, resumes, floor
):
    """At the step at which it goes on, unless the decay was complete there, and in each after it:
    no further than the decay's own steps; and it is complete after the run's last step. `resumes`:
    trainer steps made, those to come, and optimizer steps in each from then on."""
    plan = DecayPlan(kind, total, 0, per_step)
    step = 0
    trainer_step = 0
    decay = schedule.new_decay(plan, warmup)
    for made, to_come, now_per_step in resumes:
        trainer_step += made
        step += made * plan.per_step
        saved = SavedSchedule(step, trainer_step, decay, plan)
        plan = DecayPlan(kind, trainer_step + to_come, 0, now_per_step)
        before, decay = decay, schedule.resumed_decay(plan, warmup, saved)
        assert plan == saved.plan or decay.total == step + to_come * now_per_step
        old, now = (rate(step, which, kind, warmup, floor) for which in (before, decay))
        if before.progress(step) >= 1:  # as a run that was as long from its beginning
            assert decay == Decay(decay.total, warmup) or decay == before
        else:
            assert now == pytest.approx(old, abs=1e-12)
        again = SavedSchedule(step, trainer_step, decay, plan)
        assert schedule.resumed_decay(plan, warmup, again) == decay, (
            "resumed again where it was, as after a death"
        )
    rates = [
        rate(s, decay, kind, warmup, floor)
        for s in range(max(step, warmup), max(decay.total, warmup + 1))
    ]
    assert all(a >= b - 1e-12 for a, b in zip(rates, rates[1:], strict=False))
    if decay.total > max(decay.begin, warmup, step):
        assert rate(decay.total, decay, kind, warmup, floor) == pytest.approx(floor)
        assert rates[-1] > floor or floor > 1 - 1e-9, "the last step learns too"


def plan(total: int, kind: str = "linear", first_step: int = 0, per_step: int = 1) -> DecayPlan:
    return DecayPlan(kind, total, first_step, per_step)


def test_by_hand():
    saved = SavedSchedule(5, 5, Decay(10, 0), plan(10))
    assert schedule.resumed_decay(plan(10), 0, saved) == saved.decay, (
        "of the same length nothing changes, bit for bit"
    )
    decay = schedule.resumed_decay(plan(20), 0, saved)
    assert decay == Decay(20, 5, 0.5)
    assert [rate(s, decay, "linear", 0, 0.0) for s in (5, 8, 20)] == [0.5, 0.4, 0.0]
    assert rate(19, decay, "linear", 0, 0.0) == pytest.approx(0.5 / 15), "the last step learns"
    assert rate(5, Decay(20, 0), "linear", 0, 0.0) == 0.75, (
        "what a recomputed one would have jumped to"
    )
    warming = SavedSchedule(2, 2, Decay(11, 3), plan(11))
    assert schedule.resumed_decay(plan(21), 4, warming) == Decay(21, 4), (
        "still in the warm-up: as a new one"
    )


def test_a_finished_run_that_is_made_longer():
    """Its decay was complete: it goes on as in a run that was as long from its beginning."""
    finished = SavedSchedule(10, 10, Decay(10, 2), plan(10))
    decay = schedule.resumed_decay(plan(20), 2, finished)
    assert decay == Decay(20, 2)
    rates = [rate(s, decay, "linear", 2, 0.0) for s in range(10, 20)]
    assert rates[0] == pytest.approx(10 / 18) and rates[-1] == pytest.approx(1 / 18)


def test_a_decay_that_the_run_did_not_have_begins_now():
    constant = SavedSchedule(100, 100, Decay(100, 3), plan(100, "constant"))
    assert schedule.resumed_decay(plan(200), 3, constant) == Decay(200, 100)
    assert schedule.resumed_decay(
        plan(200, "cosine"), 3, SavedSchedule(60, 60, Decay(200, 3), plan(200))
    ) == Decay(200, 60)
    assert schedule.resumed_decay(
        plan(200), 30, SavedSchedule(5, 5, Decay(100, 30), plan(100, "constant"))
    ) == Decay(200, 30)
    cooling = SavedSchedule(100, 100, Decay(200, 100), plan(200))
    assert schedule.resumed_decay(plan(200), 3, cooling) == Decay(200, 100), (
        "killed before its first step, and resumed again"
    )


def test_checkpoints_of_earlier_versions():
    """Without a plan the decay counts as one of today's schedule; without a decay as that of a new
    run.
    """
    assert schedule.resumed_decay(plan(10), 0, SavedSchedule(5, 5, Decay(10, 0), None)) == Decay(
        10, 0
    )
    assert schedule.resumed_decay(plan(20), 0, SavedSchedule(5, 5, Decay(10, 0), None)) == Decay(
        20, 5, 0.5
    )
    assert schedule.resumed_decay(
        plan(10, per_step=2), 0, SavedSchedule(5, 5, Decay(10, 0), None)
    ) == Decay(15, 5, 0.5)
    assert schedule.resumed_decay(plan(21), 2, SavedSchedule(5, 5, None, None)) == Decay(21, 2)


def test_what_is_kept_is_read():
    decay = Decay(2**31, 7, 0.1)
    made_for = plan(2**31, "cosine", 9, 4)
    counters = {"optimizer_steps": np.array(12), "version": np.array(5)}
    assert schedule.from_arrays(schedule.to_arrays(decay, made_for) | counters) == SavedSchedule(
        12, 5, decay, made_for
    )


def test_a_worker_goes_on_with_the_rate_that_it_had(model_folders, start_single, tmp_path):
    """Saved in a run of 10 steps (as `start` has it) and loaded in one of 40; the one that is not
    is told the old rate.
    """
    cfg = config(model_folders["tied"], actor__lr=1e-3, actor__lr_schedule="linear")
    cfg.trainer.total_steps = 10
    worker = start_single(cfg)
    batch = make_batch(model_folders["tied"])
    for _ in range(3):
        worker.update(batch)
    os.makedirs(tmp_path / "saved")
    worker.save_state(str(tmp_path / "saved"))
    worker.saved()
    unbroken = worker.update(batch)["actor/lr"]
    assert unbroken == pytest.approx(1e-3 * (1 - 3 / 10))
    longer = start_single(cfg)
    longer.total_steps = 40
    longer.load_state(str(tmp_path / "saved"))
    assert longer.update(batch)["actor/lr"] == pytest.approx(unbroken)
    assert longer.update(batch)["actor/lr"] == pytest.approx(unbroken * (1 - 1 / 37))


def started(start_single, cfg):
    worker = start_single(cfg)
    worker.total_steps = cfg.trainer.total_steps
    return worker


def saved_after(worker, batch, steps: int, folder) -> list[float]:
    """The rates of so many trainer steps, then a checkpoint."""
    rates = [worker.update(batch)["actor/lr"] for _ in range(steps)]
    os.makedirs(folder)
    worker.save_state(str(folder))
    worker.saved()
    return rates


def resumed_from(folder, start_single, cfg):
    worker = started(start_single, cfg)
    worker.load_state(str(folder))
    return worker


def test_constant_then_cool_down(model_folders, start_single, tmp_path):
    """The decay begins where it is asked for, at the peak, however many constant steps there were;
    and it is not refused.
    """
    cfg = config(model_folders["tied"], actor__lr=1e-3)
    messages = []
    cfg.trainer.total_steps = 4
    batch = make_batch(model_folders["tied"])
    worker = started(start_single, cfg)
    assert saved_after(worker, batch, 4, tmp_path / "constant") == [1e-3] * 4
    cfg.actor.lr_schedule = "linear"
    cfg.trainer.total_steps = 9
    schedule.report_resumed_schedules(cfg, tmp_path / "constant", 9, messages.append)
    assert messages == [
        "actor.lr_schedule=linear: was constant; the decay begins at step 4, "
        "with a rate of 0.001, and ends at step 8 with 0.0002"
    ]
    cooling = resumed_from(tmp_path / "constant", start_single, cfg)
    rates = saved_after(cooling, batch, 2, tmp_path / "cooling")
    rates += [resumed_from(tmp_path / "cooling", start_single, cfg).update(batch)["actor/lr"]]
    assert rates == pytest.approx([1e-3, 0.8e-3, 0.6e-3]), "resumed again it goes on"
    schedule.report_resumed_schedules(cfg, tmp_path / "cooling", 9, messages.append)
    assert len(messages) == 1


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2)])
def test_other_mini_batches_from_a_resume_on(first, then, model_folders, start_single, tmp_path):
    """A trainer step has two optimizer steps, then one, or the reverse: the rate is continuous, and
    ends with the run.
    """
    cfg = config(
        model_folders["tied"],
        actor__lr=1e-3,
        actor__lr_schedule="linear",
        actor__ppo_mini_batch_size=first,
    )
    cfg.trainer.total_steps = 6
    batch = make_batch(model_folders["tied"])
    worker = started(start_single, cfg)
    saved_after(worker, batch, 3, tmp_path / "saved")
    done = 3 * 4 // first
    per_step = 4 // then
    rate_there = 1e-3 * (1 - done / (2 * done))
    cfg.actor.ppo_mini_batch_size = then
    messages = []
    schedule.report_resumed_schedules(cfg, tmp_path / "saved", 6, messages.append)
    assert len(messages) == 1
    assert (
        f"was for {2 * done} optimizer steps, and is for {done + 3 * per_step} now" in messages[0]
    )
    worker = resumed_from(tmp_path / "saved", start_single, cfg)
    assert worker.decay == Decay(done + 3 * per_step, done, pytest.approx(0.5))
    step = worker.decay
    assert schedule.learning_rate(
        done, step.total, 1e-3, "linear", 0, 0.0, step.begin, step.done
    ) == pytest.approx(rate_there)
    rates = [worker.update(batch)["actor/lr"] for _ in range(3)]
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))
    assert worker.optimizer_steps == worker.decay.total
    assert rates[-1] > 0
    end = schedule.learning_rate(
        worker.optimizer_steps, step.total, 1e-3, "linear", 0, 0.0, step.begin, step.done
    )
    assert end == pytest.approx(0.0, abs=1e-12)


def test_a_longer_critic_warmup_and_more_epochs(model_folders, start_single, tmp_path):
    """The actor's remaining optimizer steps are counted, not those of a run that had these settings
    from its beginning.
    """
    cfg = config(model_folders["tied"], actor__lr=1e-3, actor__lr_schedule="cosine")
    cfg.trainer.total_steps = 10
    worker = started(start_single, cfg)
    saved_after(worker, make_batch(model_folders["tied"]), 2, tmp_path / "saved")
    cfg.trainer.critic_warmup = 4
    cfg.actor.ppo_epochs = 3
    assert resumed_from(tmp_path / "saved", start_single, cfg).decay == Decay(
        2 + 6 * 3, 2, pytest.approx(2 / 10)
    )


def test_steps_that_made_fewer_optimizer_steps_do_not_bend_the_decay(
    model_folders, start_single, tmp_path
):
    """A step whose groups were dropped has fewer mini-batches; a run that is resumed as it was is
    still exactly the same.
    """
    cfg = config(
        model_folders["tied"],
        actor__lr=1e-3,
        actor__lr_schedule="cosine",
        actor__ppo_mini_batch_size=2,
    )
    cfg.trainer.total_steps = 6
    whole = make_batch(model_folders["tied"])
    fewer = make_batch(model_folders["tied"], prompts=1)
    worker = started(start_single, cfg)
    saved_after(worker, fewer, 2, tmp_path / "saved")
    unbroken = [worker.update(whole)["actor/lr"] for _ in range(2)]
    again = resumed_from(tmp_path / "saved", start_single, cfg)
    assert again.optimizer_steps == 2
    assert [again.update(whole)["actor/lr"] for _ in range(2)] == unbroken


def saved_at(folder, step: int, decay: Decay | None, made_for: DecayPlan | None = None) -> None:
    """What `schedule` reads of a checkpoint; without `made_for` that of an earlier version."""
    folder.mkdir(parents=True)
    own = {} if decay is None else {"decay": np.array([decay.total, decay.begin, decay.done])}
    if made_for is not None:
        own = schedule.to_arrays(decay, made_for)
    np.savez(folder / "actor_rank_0.npz", optimizer_steps=step, version=step, **own)


def test_what_is_said(tmp_path):
    cfg = Config()
    cfg.actor.lr = 1e-4
    cfg.actor.lr_schedule = "linear"
    messages = []
    saved_at(tmp_path / "at", 5, Decay(10, 0), plan(10))
    schedule.report_resumed_schedules(cfg, tmp_path / "at", 10, messages.append)
    assert messages == [], "of the same length"
    schedule.report_resumed_schedules(cfg, tmp_path / "at", 20, messages.append)
    assert messages == [
        "actor.lr_schedule=linear: was for 10 optimizer steps, and is for 20 now; "
        "it continues from its rate at step 5, 5e-05, to 3.33e-06, without a jump"
    ]
    saved_at(tmp_path / "end", 11, Decay(11, 0), plan(11))
    schedule.report_resumed_schedules(cfg, tmp_path / "end", 22, messages.append)
    assert messages[1] == (
        "actor.lr_schedule=linear: was for 11 optimizer steps, and is for 22 now; it was "
        "complete, and is planned anew: 5e-05 at step 11, and 4.55e-06 at the end, as in a run "
        "of this length"
    )
    saved_at(tmp_path / "old", 5, None)
    schedule.report_resumed_schedules(cfg, tmp_path / "old", 21, messages.append)
    assert re.search("warning: .* does not record its length; the rate may jump", messages[2])
    assert len(messages) == 3
    cfg.actor.lr_schedule = "constant"
    schedule.report_resumed_schedules(cfg, tmp_path / "at", 21, messages.append)
    assert len(messages) == 3
    cfg.actor.lr_schedule = "linear"
    saved_at(tmp_path / "untold", 5, Decay(11, 0))
    for total in (11, 21):
        schedule.report_resumed_schedules(cfg, tmp_path / "untold", total, messages.append)
    assert len(messages) == 5
    assert all(
        "does not record its schedule, which is assumed to be linear" in line
        for line in messages[3:]
    )
    cfg.actor.min_lr_ratio = 0.0
    cfg.actor.ppo_epochs = 2
    schedule.report_resumed_schedules(cfg, tmp_path / "end", 11, messages.append)
    assert len(messages) == 5, "a run that is over takes no further step, and is not refused"


@pytest.mark.parametrize(("step", "val_only"), [(5, False), (11, False), (11, True)])
def test_a_run_says_it_before_any_engine_starts(
    step, val_only, models, tmp_path, monkeypatch, capsys
):
    cfg = tiny_config(
        models(), str(tmp_path), **{"trainer.total_steps": 21, "actor.lr_schedule": "cosine"}
    )
    cfg.trainer.val_only = val_only
    path = tmp_path / "checkpoints" / f"step_{step:06d}"
    prepare = launch.prepare
    ran = []
    saved_at(path, step, Decay(11, 0), plan(11, "cosine"))
    state = {"step": step, "evaluations": [], "unwritten": {}, "has_samples": False}

    def prepared(*args):
        aside = replace(
            cfg, trainer=replace(cfg.trainer, resume="never")
        )  # the stand-in is no whole checkpoint
        result = prepare(aside, *args[1:])
        return replace(result, cfg=cfg, resume_point=ResumePoint(path, state))

    monkeypatch.setattr(launch, "prepare", prepared)
    train_with(monkeypatch, lambda prepared, tracker: ran.append(SimpleNamespace(tracker=tracker)))
    assert launch.run(cfg) == 0
    assert len(ran) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert ("and is for 21 now" in out) == (not val_only)
    assert ("planned anew" in out) == (step == 11 and not val_only), "it was complete"
