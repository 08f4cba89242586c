"""How often a run begins anew after a death, and where: with stand-ins for its lives; real deaths are in the e2e tests."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring.tracker import Tracker
from one_step_off.runtime import launch

BEGINNING = {"at": 5}


class Stream:
    """A position in the data, as all that a life moves and a restart puts back."""

    def __init__(self) -> None:
        self.position = dict(BEGINNING)

    def state_dict(self) -> dict:
        return dict(self.position)

    def load_state_dict(self, state: dict) -> None:
        self.position = dict(state)


class Killed(Exception):
    """What ended the process."""


def run(
    monkeypatch, tmp_path, max_restarts: int, reached: list, **of_pipeline: object
) -> SimpleNamespace:
    """A run without checkpoints whose lives die after so many steps; an entry that is no number is raised, or is "end".
    Tells for each life its incarnation, where in the data it began and whether one had started before."""
    cfg, out, began, script = Config(), io.StringIO(), [], iter(reached)
    cfg.trainer.output_dir, cfg.trainer.max_restarts = str(tmp_path), max_restarts
    stream = Stream()
    data = SimpleNamespace(stream=stream)
    prepared = launch.Prepared(cfg, "cpu", data, [], None, {}, [])
    tracker = Tracker(str(tmp_path), 10, out)

    async def life(prepared, tracker, started, *_):
        began.append((prepared.incarnation, prepared.data.stream.state_dict(), started))
        checkpointer = SimpleNamespace(newest=None, folder=tmp_path / "checkpoints", in_use=False)
        prepared.pipeline = SimpleNamespace(
            **{"stopping": False, "checkpointer": checkpointer} | of_pipeline
        )
        how = next(script)
        if isinstance(how, Exception):
            raise how
        if how == "end":
            return
        tracker.steps = [{"step": i} for i in range(how)]
        stream.position["at"] += 100
        raise launch.Died(f"actor 0 is gone after {how} steps") from Killed(f"life {len(began)}")

    monkeypatch.setattr(launch, "_to_the_end", life)
    monkeypatch.setattr(launch, "open_files", lambda prepared, tracker, wandb: tracker.start(0))
    found = SimpleNamespace(began=began, raised=None, out=out, prepared=prepared)
    try:
        launch._lives(prepared, tracker, None)
    except (Killed, ConfigError, ValueError) as e:
        found.raised = e
    assert not list(script), "it gave up before the end of what was to come"
    return found


@pytest.mark.parametrize(
    ("max_restarts", "reached"),
    [
        (0, [0]),
        (0, [7]),
        (1, [3, 3]),
        (2, [0, 0, 0]),
        (2, [1, 1, 1]),
        (2, [3, 1, 2]),  # further than the life before it, but not than any
        (2, [3, 2, 3]),
        (2, [1, 1, 2, 2, 2]),  # the count starts anew after a step that is further
        (2, [3, 0, 4, 1, 4]),
        (3, [1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_so_many_deaths_in_a_row_without_a_new_step_end_the_run(
    max_restarts, reached, monkeypatch, tmp_path
):
    found = run(monkeypatch, tmp_path, max_restarts, reached)
    assert str(found.raised) == f"life {len(reached)}", "the cause of the last death, not a Died"
    assert [began[0] for began in found.began] == list(range(len(reached)))


@pytest.mark.parametrize("reached", [["end"], [0, "end"], [1, 2, 3, 4, 5, "end"]])
def test_a_run_that_gets_further_each_time_is_never_given_up(reached, monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, 1, reached)
    assert found.raised is None and len(found.began) == len(reached)


def test_without_a_checkpoint_each_life_begins_where_the_run_did(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, 2, [4, 2, "end"])
    assert found.began == [(0, BEGINNING, False), (1, BEGINNING, True), (2, BEGINNING, True)]
    lines = [line for line in found.out.getvalue().splitlines() if "going on" in line]
    assert lines == [
        "actor 0 is gone after 4 steps; going on from the beginning as incarnation 1",
        "actor 0 is gone after 2 steps; going on from the beginning as incarnation 2",
    ]


def test_a_run_that_was_told_to_stop_begins_no_other_life(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, 5, [3], stopping=True)
    assert (
        str(found.raised) == "life 1"
        and len(found.began) == 1
        and "going on" not in found.out.getvalue()
    )


def test_an_error_that_is_no_death_ends_the_run_at_once(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, 5, [ValueError("a mistake of ours")])
    assert str(found.raised) == "a mistake of ours" and len(found.began) == 1


def test_where_no_other_life_can_begin_the_death_is_told_and_why(monkeypatch, tmp_path):
    """As with a host that is lost: what failed there is the cause, and not the pool that has no room any more."""
    found = run(monkeypatch, tmp_path, 3, [2, ConfigError("placement.pools.actor=[2]: too little")])
    assert isinstance(found.raised, Killed) and str(found.raised) == "life 1"
    assert found.raised.__notes__ == [
        "no other life could begin: placement.pools.actor=[2]: too little"
    ]
    found = run(monkeypatch, tmp_path, 3, [ConfigError("placement.pools.actor=[2]: too little")])
    assert isinstance(found.raised, ConfigError), "what does not fit the first time is bad input"
