"""What a run writes down."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.monitoring.flops import Meter, ModelShape
from one_step_off.monitoring.summary import sample_stats
from one_step_off.monitoring.tracker import Tracker
from tests.unit.data.episode_helpers import cut


def sample(reward, length, version=0, row=0, index=0, epoch=0):
    z = np.zeros(length)
    return Sample(
        (epoch, row),
        index,
        np.arange(2),
        z,
        z,
        z > -1,
        np.full(length, version),
        reward=reward,
        finish_reason="length" if length > 3 else "stop",
    )


def times(step_s=2.0, gen=1.0, train=1.5):
    return {
        "time/step_s": step_s,
        "time/generate_s": gen,
        "time/train_s": train,
        "time/sync_s": 0.1,
        "time/wait_trainer_s": 0.4,
        "time/wait_rollout_s": 0.0,
    }


def test_rows_ledger_and_summary(tmp_path):
    tracker = Tracker(str(tmp_path), 3, out=io.StringIO())
    tracker.evaluation(0, [sample(0.0, 2, epoch=-1), sample(1.0, 2, row=1, epoch=-1)], 0.5)
    for step in range(3):
        batch = Batch(
            step, [sample(step, 2, row=step), sample(step + 1.0, 4, row=step, index=1)], (0, 0)
        )
        tracker.step(
            batch, step, times(step_s=2.0 + step, gen=1.0) | {"actor/grad_norm": float("nan")}
        )
    summary = tracker.summary()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2]
    assert rows[0]["val/reward"] == 0.5
    assert rows[0]["val/version"] == 0
    assert "val/reward" not in rows[1]
    assert rows[1]["reward/mean"] == 1.5
    assert rows[1]["reward/std"] == 0.5
    assert rows[2]["response_length/mean"] == 3
    assert rows[2]["response_length/cut_share"] == 0.5
    assert rows[2]["staleness/min"] == rows[2]["staleness/max"] == 2
    assert rows[0]["actor/grad_norm"] is None, "JSON has no NaN"
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert ledger == [{"step": s, "prompts": [[0, s]]} for s in range(3)]
    # Medians and shares over the steps after the first: 3 s and 4 s.
    assert summary["median/time/step_s"] == 3.5
    assert summary["overlap_ratio"] == 3.5 / 1.5
    assert "sync/overlapped" not in summary, "these steps do not say it"
    assert summary["idle_share/rollout"] == 0.2 / 7.0 + 0.4 / 3.0, (
        "the last step's wait was within the one before"
    )
    assert summary["idle_share/trainer"] == 1 - 3.0 / 7.0
    assert summary["samples_per_s"] == 4 / 7.0
    assert (summary["reward/first"], summary["reward/last"]) == (0.5, 2.5), (
        "of one step each: they never overlap"
    )
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_summary_has_the_share_of_overlapped_steps(tmp_path):
    tracker = Tracker(str(tmp_path), 5, out=io.StringIO())
    for step, overlapped in enumerate((1.0, 0.0, 0.0, 0.0, 1.0)):
        metrics = times() | {"sync/overlapped": overlapped}
        tracker.step(Batch(step, [sample(step, 2)], (0, 0)), step, metrics)
    assert tracker.summary()["sync/overlapped"] == 0.25, "without the first step"


def rewards_of(tmp_path, steps: int) -> tuple:
    tracker = Tracker(str(tmp_path), steps, out=io.StringIO())
    for step in range(steps):
        tracker.step(Batch(step, [sample(step, 2)], (0, 0)), step, times())
    found = tracker.summary()
    return found["reward/first"], found["reward/last"], found["reward/averaged_steps"]


def test_first_and_last_rewards_are_of_different_steps(tmp_path):
    assert rewards_of(tmp_path, 1) == (0, 0, 1)
    assert rewards_of(tmp_path, 5) == (0.5, 3.5, 2)
    assert rewards_of(tmp_path, 20) == (2, 17, 5)


def test_unjudged_responses_are_counted_and_named_once(tmp_path):
    out = io.StringIO()
    tracker = Tracker(str(tmp_path), 3, out=out)
    for step, count in enumerate((0.0, 2.0, 1.0)):
        samples = [sample(0, 2), sample(0, 2)]
        samples[1].extra = {
            "fault": "reward/timeouts",
            "error": "not scored within reward.timeout_s",
        }
        tracker.step(Batch(step, samples, (0, 0)), 0, times() | {"reward/timeouts": count})
    assert out.getvalue().count("warning") == 1
    assert "not scored within reward.timeout_s" in out.getvalue()
    assert tracker.summary()["reward/timeouts"] == 3


def failed_sample(row: int) -> Sample:
    failed = sample(row, 0)
    failed.extra = {"fault": "agent/errors", "error": "exit code 1; its last line: no city"}
    return failed


def limited_sample(row: int) -> Sample:
    limited = sample(row, 2)
    limited.extra = {"agent": {"turns": 2.0}, "agent_failure": "agent.timeout_s=6 is over"}
    return limited


def test_the_share_of_failed_agents_is_seen_and_its_first_reason_named(tmp_path):
    out = io.StringIO()
    tracker = Tracker(str(tmp_path), 4, out=out)
    good = [sample(row, 2) for row in range(8)]
    steps = [
        good,
        [limited_sample(8), *good[:7]],
        [*good[:7], failed_sample(9)],
        [*good[:6], failed_sample(9), limited_sample(8)],
    ]
    for step, samples in enumerate(steps):
        tracker.step(Batch(step, samples, (0, 0)), 0, times())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("agent/failed_share") for row in rows] == [None, 0.125, 0.125, 0.25]
    lines = out.getvalue().splitlines()
    warnings = [line for line in lines if line.startswith("warning")]
    assert warnings == [
        "warning: step 1: 1 of 8 agents failed (0 errors, see reward.on_error; 1 at a limit of the "
        "run); the first: agent.timeout_s=6 is over",
        "warning: step 3: 2 of 8 agents failed (1 errors, see reward.on_error; 1 at a limit of the "
        "run); the first: exit code 1; its last line: no city",
    ]
    assert [line.count("agents failed 12%") for line in lines if line.startswith("step")] == [
        *(0, 1, 1, 0)
    ]
    assert "agents failed 25%" in lines[-1]
    assert tracker.summary()["agent/failed_share"] == 0.125


def test_failed_agents_of_dropped_groups_and_of_evaluations_are_seen(tmp_path):
    out = io.StringIO()
    tracker = Tracker(str(tmp_path), 1, out=out)
    batch = Batch(0, [sample(0, 2), failed_sample(1)], (0, 0))
    batch.drop({batch.samples[1].prompt_id})
    tracker.step(batch, 0, times())
    assert "1 of 2 agents failed" in out.getvalue()
    held_out = [limited_sample(0)]
    held_out[0].prompt_id = (-1, 0)
    tracker.evaluation(1, held_out, 1.0)
    assert "warning: evaluation of v1: 1 of 1 agents failed" in out.getvalue()
    assert tracker.evaluations[-1]["val/agent/failed_share"] == 1.0


def test_a_new_run_does_not_append_to_the_old_ones_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("old\n")
    Tracker(str(tmp_path), 1, out=io.StringIO()).start(0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    first = Tracker(str(tmp_path), 4, out=io.StringIO())
    for step in range(3):
        first.step(Batch(step, [sample(step, 2, row=step)], (0, 0)), step, times())
    second = Tracker(str(tmp_path), 4, out=io.StringIO())
    second.start(
        2, [{"val/reward": 0.25, "val/version": 0.0}], {"val/reward": 0.25, "val/version": 0.0}
    )
    second.step(Batch(2, [sample(7, 2, row=9)], (0, 0)), 2, times())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [r["reward/mean"] for r in rows] == [0, 1, 7]
    assert rows[2]["val/reward"] == 0.25
    assert [r["prompts"] for r in ledger] == [[[0, 0]], [[0, 1]], [[0, 9]]]
    summary = second.summary()
    assert summary["steps"] == 3
    assert summary["val/first"] == 0.25
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 1


def rows_of(folder, name):
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def three_steps(folder) -> None:
    tracker = Tracker(str(folder), 3, io.StringIO())
    tracker.start(0)
    for step in range(3):
        tracker.step(Batch(step, [sample(1.0, 2, row=step)], expected_stamp=(0, 0)), step, times())


def test_a_row_that_a_kill_cut_off_does_not_keep_the_run_from_going_on(tmp_path):
    three_steps(tmp_path)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text[:-9])
    tracker = Tracker(str(tmp_path), 3, io.StringIO())
    tracker.start(2)
    assert tracker.steps_before == 2
    assert rows_of(tmp_path, "metrics.jsonl") == rows_of(tmp_path, "ledger.jsonl") == [0, 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_kill_while_a_resumed_run_drops_rows_keeps_those_before_its_checkpoint(
    tmp_path, monkeypatch, name
):
    three_steps(tmp_path)
    real = Path.write_text

    def cut(self, text, *args):
        if name in self.name:
            real(self, text[: len(text) // 2])
            raise KeyboardInterrupt
        return real(self, text, *args)

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        Tracker(str(tmp_path), 3, io.StringIO()).start(2)
    monkeypatch.undo()
    Tracker(str(tmp_path), 3, io.StringIO()).start(2)
    assert rows_of(tmp_path, "metrics.jsonl") == rows_of(tmp_path, "ledger.jsonl") == [0, 1]


def test_no_evaluation_is_missing_when_two_end_within_one_step(tmp_path):
    tracker = Tracker(str(tmp_path), 1, out=io.StringIO())
    for version in (3, 4):
        tracker.evaluation(version, [sample(0.5, 2, epoch=-1)], 0.1)
    tracker.step(Batch(3, [sample(1, 2)], (0, 0)), 3, times())
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [r["val/version"] for r in rows] == [3, 4]


def test_a_resumed_run_goes_on_in_the_files_of_the_first(tmp_path):
    first = Tracker(str(tmp_path), 3, out=io.StringIO())
    first.start(0)
    for step in range(3):
        first.step(Batch(step, [sample(step, 2, row=step)], (0, 0)), step, times())
    first.summary()
    again = Tracker(str(tmp_path), 3, out=io.StringIO())
    again.start(2, [{"val/version": 0.0, "val/reward": 0.5}], {"val/reward": 0.7})
    assert not (tmp_path / "summary.json").exists()
    again.step(Batch(2, [sample(9, 2, row=9)], (0, 0)), 2, times())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["reward/mean"]) for r in rows] == [(0, 0), (1, 1), (2, 9)]
    assert rows[2]["val/reward"] == 0.7
    assert again.summary()["steps"] == 3
    assert again.summary()["steps_before"] == 2
    assert again.evaluations[0]["val/reward"] == 0.5


def test_speed_and_memory_in_rows_and_summary(tmp_path):
    tracker = Tracker(str(tmp_path), 2, out=io.StringIO())
    tracker.meter = Meter(Config(), ModelShape(1000, 2, 8))
    tracker.report_usage({"memory/trainer_peak_bytes": 5.0}, "NVIDIA H100 80GB HBM3")
    for step in range(2):
        tracker.span("actor", "update", step, tracker.begin + step, tracker.begin + step + 0.4)
        tracker.step(Batch(step, [sample(step, 2)], (0, 0)), step, times(gen=0.5))
    tracker.report_usage({"memory/trainer_peak_bytes": 7.0, "memory/rollout_peak_bytes": 9.0}, "")
    summary = tracker.summary()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["memory/trainer_peak_bytes"] == 5
    assert row["tokens_per_s/rollout"] == 4
    assert summary["memory/trainer_peak_bytes"] == 7
    assert summary["memory/rollout_peak_bytes"] == 9
    assert summary["tokens_per_s/rollout"] == 4
    assert 0 < summary["mfu/trainer_of_step"] < summary["mfu/trainer"] < 1
    assert summary["device"] == "NVIDIA H100 80GB HBM3"
    assert row["time/actor_update_begin_s"] == pytest.approx(0, abs=1e-6), "a row says when"
    assert summary["median/time/actor_update_s"] == pytest.approx(0.4), "and the summary how long"
    assert not [name for name in summary if name.endswith(("_begin_s", "_end_s"))], (
        "of timestamps there is no median"
    )


def test_the_first_row_after_a_failure_says_how_long_it_took(tmp_path):
    tracker = Tracker(str(tmp_path), 3, out=io.StringIO())
    for step in range(3):
        if step == 1:
            tracker.restart_begin = time.perf_counter() - 4.0
        tracker.step(Batch(step, [sample(step, 2)], (0, 0)), step, times())
    recoveries = [row.get("restarts/recovery_s") for row in tracker.steps]
    assert recoveries == [None, pytest.approx(4.0, abs=1.0), None]


def test_the_output_of_tools_is_part_of_the_response_and_not_generated(tmp_path):
    tracker = Tracker(str(tmp_path), 1, out=io.StringIO())
    talk = sample(0, 10)
    talk.versions[2:8] = -1
    tracker.step(Batch(0, [talk], (0, 0)), 0, times(step_s=2.0))
    assert tracker.summary()["response_tokens_per_s"] == 4 / 2.0
    assert tracker.steps[0]["response_length/mean"] == 10


def test_staleness_is_over_all_tokens(tmp_path):
    tracker = Tracker(str(tmp_path), 2, out=io.StringIO())
    tracker.step(
        Batch(0, [sample(0, 2, version=3), sample(0, 1, version=5)], (0, 0)), 5, times(step_s=2.0)
    )
    tracker.step(Batch(1, [], (0, 0)), 6, times(step_s=2.0))
    names = "tokens/response", "staleness/min", "staleness/max"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [[row[name] for name in names] for row in rows] == [[3.0, 0.0, 2.0], [0.0, None, None]]


def test_batches_that_an_earlier_run_skipped_make_room_for_this_run_s(tmp_path):
    """Only so many are kept, and --replay would show them with other weights."""
    for step in (3, 8, 12):
        (tmp_path / f"skipped/step_{step:06d}").mkdir(parents=True)
    tracker = Tracker(str(tmp_path), 20, out=io.StringIO())
    tracker.start(8)
    assert [p.name for p in (tmp_path / "skipped").iterdir()] == ["step_000003"]
    tracker.start(0)
    assert not list((tmp_path / "skipped").iterdir())


def test_a_step_without_a_sync_is_in_the_summary_too(tmp_path):
    """The last replica failed in it, and the run was resumed."""
    tracker = Tracker(str(tmp_path), 4, out=io.StringIO())
    for step in range(4):
        found = times()
        if step == 2:
            found = {
                k: v for k, v in found.items() if k not in ("time/sync_s", "time/wait_trainer_s")
            }
        tracker.step(Batch(step, [sample(step, 2)], (0, 0)), step, found)
    assert 0 < tracker.summary()["idle_share/rollout"] < 1


def test_figures_of_episodes_come_with_external_agents_or_with_segments(tmp_path):
    def figures(has_external_agents, samples):
        tracker = Tracker(str(tmp_path), 1, out=io.StringIO())
        tracker.has_external_agents = has_external_agents
        tracker.evaluation(0, [replace(s, prompt_id=(-1, 0)) for s in samples], 0.5)
        tracker.step(Batch(0, samples, (0, 0)), 0, times())
        row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        names = ("episode/", "val/episode", "reward/mean", "val/reward")
        return {name: value for name, value in row.items() if name.startswith(names)}

    alone = [sample(1.0, 4), sample(0.0, 2, index=1)]
    rewards = {"reward/mean": 0.5, "val/reward": 0.5}
    assert figures(False, alone) == rewards
    counts = {"segments": 1.0, "turns": 1.0, "trained_tokens": 3.0}
    prefixed = {f"{prefix}/{name}": n for prefix in EPISODES for name, n in counts.items()}
    assert figures(True, alone) == rewards | prefixed
    segments = [*cut(alone[0], [1, 3]), alone[1]]
    counts = {"segments": 2.0, "turns": 2.0, "trained_tokens": 3.0}
    prefixed = {f"{prefix}/{name}": n for prefix in EPISODES for name, n in counts.items()}
    assert figures(False, segments) == rewards | prefixed | {"val/episodes": 2.0}
    text = (tmp_path / "evaluations.jsonl").read_text()
    assert '"val/samples": 4.0' in text


EPISODES = ("episode", "val/episode")


def test_rows_say_what_speculation_gave(tmp_path):
    """Of 40 tokens 15 were accepted draft tokens: sequences took 25 steps of their engine."""
    tracker = Tracker(str(tmp_path), 2, out=io.StringIO())
    for step in range(2):
        samples = [sample(0.0, 10, step, row=step, index=index) for index in range(4)]
        for index, accepted in enumerate([0, 5, 10, 0]):
            samples[index].extra["draft_tokens"] = [10 * (index > 0), accepted, 10]
        tracker.step(Batch(step, samples, (0, step)), step, times())
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["rollout/acceptance_rate"] == 0.5
    assert row["rollout/acceptance_length"] == 40 / 25
    assert tracker.summary()["rollout/acceptance_length"] == 1.6
    silent = sample(0.0, 10)
    silent.extra["draft_tokens"] = [0, 0, 10]
    stats = sample_stats([silent])
    assert (stats["rollout/acceptance_rate"], stats["rollout/acceptance_length"]) == (0.0, 1.0)
    assert "rollout/acceptance_rate" not in sample_stats([sample(0.0, 10)])
