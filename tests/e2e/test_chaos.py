"""A real run continues when its processes are killed, and leaves nothing behind.
`python -m tests.chaos` goes further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.__main__ import compare_stopped_runs, main, parse_arguments, run_with_kills
from tests.chaos.doubles import RELATIONS
from tests.chaos.points import KINDS
from tests.e2e.rewards import AFTER_A_MOMENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_a_replica_and_an_engine_die_one_after_the_other(tmp_path: Path):
    """The replica dies in mid-generation. After its restart the engine dies between two buckets."""
    arguments = ["--kills=2", "--kinds=replica,engine", "--points=generating,between buckets"]
    arguments += ["--seed=1", f"--out={tmp_path}/c"]
    result = run_with_kills(parse_arguments(arguments), resume_after=False)
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert result["starts"] == 1, "the run itself never ended"
    assert {(kill["kind"], kill["point"]) for kill in result["kills"] if kill["time"]} == {
        ("replica", "generating"),
        ("engine", "between buckets"),
    }


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(1800)
def test_one_of_each_kind_of_process_dies_and_the_run_continues(tmp_path: Path):
    """At any moment: driver, replica, trainer, critic and reward worker. The reference engine has
    no process of its own: test_external_agents.py kills one of vLLM."""
    kinds = [kind for kind in KINDS if kind != "engine"]
    arguments = [f"--kinds={','.join(kinds)}", f"--kills={len(kinds)}", "--each", "--critic"]
    arguments += ["--points=anywhere", "--seed=3", "--limit=400", f"--out={tmp_path}/c"]
    arguments += ["rollout.engine=transformers", f"reward.function={AFTER_A_MOMENT}"]
    # The driver resumes after its own death, and test_resume.py resumes a run that was ended.
    result = run_with_kills(parse_arguments(arguments), resume_after=False)
    assert result["wrong"] == [], json.dumps(result, indent=1)
    hits = [kill["kind"] for kill in result["kills"] if kill["time"]]
    assert sorted(hits) == sorted(kinds), json.dumps(result, indent=1)


@pytest.mark.slow
def test_everything_dies(tmp_path: Path):
    assert main(["--kills=10", "--critic", "--seed=1", f"--out={tmp_path}/c"]) == 0


@pytest.mark.slow
def test_both_replicas_die_in_every_relation(tmp_path: Path):
    """At one moment, some seconds apart, and the second in the recovery from the first. The run
    itself goes on each time."""
    arguments = ["--double", "--kinds=replica", "--kills=6", "--seed=4", f"--out={tmp_path}/c"]
    result = run_with_kills(parse_arguments(arguments), resume_after=False)
    assert result["wrong"] == [], json.dumps(result, indent=1)
    relations = {double["relation"] for double in result["doubles"]}
    assert relations == set(RELATIONS), json.dumps(result, indent=1)
    assert result["starts"] == 1, "the run itself never ended"


@pytest.mark.slow
def test_stopped_anywhere_and_resumed_are_the_same_bits(tmp_path: Path):
    arguments = ["--kills=4", "--exact", "--seed=2", f"--out={tmp_path}/c"]
    result = compare_stopped_runs(parse_arguments(arguments))
    assert result["wrong"] == [], json.dumps(result, indent=1)
    assert len(result["stops"]) == 4, json.dumps(result, indent=1)
