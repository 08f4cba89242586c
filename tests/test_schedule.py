"""The learning rate of a run that is resumed with another number of steps: no jump, by formula, in the trainer and on screen."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off import core_algos, launch, schedule
from one_step_off.config import Config, ConfigError
from one_step_off.schedule import Decay
from tests.conftest import tiny_config
from tests.test_fsdp_workers import checkpoints, config, make_batch, single  # noqa: F401


def rate(step: int, decay: Decay, kind: str, warmup: int = 2, floor: float = 0.1) -> float:
    return core_algos.learning_rate(step, decay.total, 1.0, kind, warmup, floor, decay.begin, decay.done)


@given(
    st.sampled_from(["cosine", "linear"]), st.integers(0, 5), st.integers(3, 40),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 60)), max_size=3), st.floats(0, 1),
)  # fmt: skip
def test_the_rate_never_jumps_however_often_a_run_is_resumed(kind, warmup, total, resumes, floor):
    """At the step at which it goes on, and in each after it: no further than the decay's own steps; and the run's last
    step has the lowest rate."""
    decay, step = Decay(total, warmup), 0
    for later, longer in resumes:
        step += later
        new = Decay(step + longer, warmup)
        before, decay = decay, schedule.resumed(new, decay, step)
        old, now = (rate(step, which, kind, warmup, floor) for which in (before, decay))
        assert now == pytest.approx(old, abs=1e-12)
        assert schedule.resumed(new, decay, step) == decay, "resumed again where it was, as after a death"
    rates = [rate(s, decay, kind, warmup, floor) for s in range(max(step, warmup), max(decay.total, warmup + 1))]
    assert all(a >= b - 1e-12 for a, b in zip(rates, rates[1:], strict=False))
    if decay.total - 1 > max(decay.begin, warmup):
        assert rates[-1] == pytest.approx(floor)


def test_by_hand():
    saved = Decay(11, 0)
    assert schedule.resumed(Decay(11, 0), saved, 5) == saved, "of the same length nothing changes, bit for bit"
    decay = schedule.resumed(Decay(21, 0), saved, 5)
    assert decay == Decay(21, 5, 0.5)
    assert [rate(s, decay, "linear", 0, 0.0) for s in (5, 8, 20)] == [0.5, 0.4, 0.0]
    assert rate(5, Decay(21, 0), "linear", 0, 0.0) == 0.75, "what a recomputed one would have jumped to"
    assert schedule.resumed(Decay(21, 4), Decay(11, 3), 2) == Decay(21, 4), "still in the warm-up: as a new one"
    assert schedule.unpacked(schedule.packed(Decay(2**31, 7, 0.1))) == Decay(2**31, 7, 0.1)


def test_a_worker_goes_on_with_the_rate_that_it_had(checkpoints, single, tmp_path):  # noqa: F811
    """Saved in a run of 10 steps (as `start` has it) and loaded in one of 40; the one that is not is told the old rate."""
    cfg = config(checkpoints["tied"], actor__lr=1e-3, actor__lr_schedule="linear")
    cfg.trainer.total_steps = 10
    worker, batch = single(cfg), make_batch(checkpoints["tied"])
    for _ in range(3):
        worker.update(batch)
    os.makedirs(tmp_path / "saved")
    worker.save_state(str(tmp_path / "saved"))
    worker.saved()
    unbroken = worker.update(batch)["actor/lr"]
    assert unbroken == pytest.approx(1e-3 * (1 - 3 / 9))
    longer = single(cfg)
    longer._total_steps = 40
    longer.load_state(str(tmp_path / "saved"))
    assert longer.update(batch)["actor/lr"] == pytest.approx(unbroken)
    assert longer.update(batch)["actor/lr"] == pytest.approx(unbroken * (1 - 1 / 36))


def saved_at(folder, step: int, decay: Decay | None) -> None:
    """What `schedule` reads of a checkpoint."""
    folder.mkdir(parents=True)
    own = {} if decay is None else {"decay": schedule.packed(decay)}
    np.savez(folder / "actor_rank_0.npz", optimizer_steps=step, **own)


def test_what_is_said(tmp_path):
    cfg = Config()
    cfg.actor.lr, cfg.actor.lr_schedule, said = 1e-4, "linear", []
    saved_at(tmp_path / "at", 5, Decay(11, 0))
    schedule.announce(cfg, tmp_path / "at", 11, said.append)
    assert said == [], "of the same length"
    schedule.announce(cfg, tmp_path / "at", 21, said.append)
    assert said == ["actor.lr_schedule=linear: was for 11 optimiser steps, and is for 21 now; it goes on from its rate at "
                    "step 5, 5e-05, to 0, without a jump"]  # fmt: skip
    saved_at(tmp_path / "end", 11, Decay(11, 0))
    with pytest.raises(
        ConfigError, match=r"at step 11 it had come to its end, a rate of 0, and would stay there; set actor"
    ):
        schedule.announce(cfg, tmp_path / "end", 21, said.append)
    cfg.actor.min_lr_ratio = 0.1
    schedule.announce(cfg, tmp_path / "end", 21, said.append)
    assert said[1].endswith("it goes on from its rate at step 11, 1e-05, to 1e-05, without a jump")
    saved_at(tmp_path / "old", 5, None)
    schedule.announce(cfg, tmp_path / "old", 21, said.append)
    assert re.search("warning: .* does not tell its length; the rate may jump", said[2]) and len(said) == 3
    cfg.actor.lr_schedule = "constant"
    schedule.announce(cfg, tmp_path / "at", 21, said.append)
    assert len(said) == 3


@pytest.mark.parametrize(("step", "val_only"), [(5, False), (11, False), (11, True)])
def test_a_run_says_it_before_any_engine_starts(step, val_only, models, tmp_path, monkeypatch, capsys):
    cfg = tiny_config(models(), str(tmp_path), **{"trainer.total_steps": 21, "actor.lr_schedule": "cosine"})
    cfg.trainer.val_only = val_only
    path, prepare, ran = tmp_path / "checkpoints" / f"step_{step:06d}", launch.prepare, []
    saved_at(path, step, Decay(11, 0))
    state = {"step": step, "evaluations": [], "unwritten": {}, "has_samples": False}
    own_dir = cfg.trainer.output_dir

    def prepared(*args):
        aside = replace(cfg, trainer=replace(cfg.trainer, resume="never"))  # the stand-in is no whole checkpoint
        found = prepare(aside, *args[1:])
        return replace(found, cfg=cfg, resume_from=path, state=state)

    monkeypatch.setattr(launch, "prepare", prepared)
    monkeypatch.setattr(launch, "run_on_ray", lambda prepared, tracker: ran.append(SimpleNamespace(tracker=tracker)))
    if step == 11 and not val_only:
        with pytest.raises(
            ConfigError, match="actor.lr_schedule=cosine: was for 11 optimiser steps, and is for 21 now"
        ):
            launch.run(cfg)
        assert not ran and not os.path.exists(f"{own_dir}/config.yaml")
        return
    assert launch.run(cfg) == 0 and len(ran) == 1
    assert ("and is for 21 now" in " ".join(capsys.readouterr().out.split())) == (not val_only)
