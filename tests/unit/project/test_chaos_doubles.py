"""The drawing of pairs of kills, and how their outcomes are counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.doubles import (
    AT_ONCE,
    IN_THE_RECOVERY,
    MAX_DELAY_S,
    RECOVERY_POINTS,
    RELATIONS,
    Double,
    DoubleChaos,
    combinations,
    describe_double,
    double_table,
)
from tests.chaos.kills import ANYWHERE, STOPPABLE, Kill
from tests.chaos.points import KINDS, POINTS, RARE

INJECT = Path(__file__).parents[2] / "chaos/inject"
POINTS_OF = {kind: {point.name for point in POINTS if point.kind == kind} for kind in KINDS}


def drawer(seed: int) -> DoubleChaos:
    """What draws pairs, without a run."""
    command: Any = None
    return DoubleChaos(command, seed, 1.0, 1.0, lambda line: None)


def keys(double: Double) -> tuple[str, str, str]:
    return double.first.kind, double.second.kind, double.relation


def test_every_pair_of_kinds_comes_with_every_relation_that_it_can_have():
    found = combinations(KINDS, trainer_ranks=2)
    assert len(found) == len(set(found))
    assert {relation for *_, relation in found} == set(RELATIONS)
    assert {(first, second) for first, second, _ in found} == {(a, b) for a in KINDS for b in KINDS}
    for kind in ("driver", "critic"):
        assert (kind, kind, AT_ONCE) not in found, "there is only one"
    assert ("trainer", "trainer", AT_ONCE) in found
    assert ("trainer", "trainer", AT_ONCE) not in combinations(KINDS, trainer_ranks=1)


def test_each_combination_is_drawn_once_before_one_is_drawn_again():
    chaos = drawer(seed=3)
    count = len(combinations(KINDS, trainer_ranks=1))
    rounds = [[keys(chaos.draw(list(KINDS), [])) for _ in range(count)] for _ in range(2)]
    for drawn in rounds:
        assert sorted(drawn) == sorted(combinations(KINDS, trainer_ranks=1))
    assert rounds[0] != rounds[1]


def test_the_same_seed_draws_the_same_pairs():
    def drawn(seed: int) -> list[Double]:
        chaos = drawer(seed)
        return [chaos.draw(list(KINDS), []) for _ in range(40)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


def test_drawn_kills_can_happen():
    chaos = drawer(seed=5)
    signals = set()
    for _ in range(300):
        double = chaos.draw(list(KINDS), [])
        first, second = double.first, double.second
        signals |= {(first.kind, first.signal), (second.kind, second.signal)}
        assert 0 <= double.delay_s <= MAX_DELAY_S
        if double.relation == IN_THE_RECOVERY:
            assert first.point == ANYWHERE, "one point at a time can be armed"
            assert second.point in POINTS_OF[second.kind]
            assert second.point in RECOVERY_POINTS[first.kind][second.kind]
        else:
            assert first.point not in RARE
            assert first.point in POINTS_OF[first.kind] | {ANYWHERE}
            assert second.point == ANYWHERE
    stopped = {kind for kind, name in signals if name == "SIGSTOP"}
    assert stopped == set(STOPPABLE)
    assert {kind for kind, name in signals if name == "SIGKILL"} == set(KINDS)


def test_points_of_the_first_kill_can_be_chosen():
    chaos = drawer(seed=2)
    points = {chaos.draw(["engine"], ["between buckets"]).first.point for _ in range(30)}
    assert points == {"between buckets", ANYWHERE}


def pair(*times: float, recovered_s: float | None = 30.0, ended: str = "") -> Double:
    kills = [Kill(i, "engine", "idle", time=time) for i, time in enumerate(times)]
    return Double(kills[0], kills[1], AT_ONCE, recovered_s=recovered_s, ended=ended)


def test_the_table_counts_pairs_of_which_both_hit():
    ended = "the run ended with exit code 1: error: x"
    doubles = [
        pair(1.0, 1.0),
        pair(1.0, 0.0),
        pair(1.0, 1.0, recovered_s=50.0, ended=ended),
        pair(1.0, 1.0, recovered_s=None),
    ]
    last = double_table(doubles).splitlines()[-1]
    assert last == "| engine | engine | at once | 3 | 2 | 1 | 50, 50 |"
    assert "only one of them was hit" in describe_double(doubles[1])
    assert f"| {ended}; started again |" in describe_double(doubles[2])


@pytest.mark.parametrize("is_alive", [True, False])
def test_the_process_at_the_point_kills_another_in_the_same_moment(tmp_path, is_alive):
    """A second process that is already dead is reported as not hit."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if not is_alive:
        other.kill()
        other.wait()
    order = {"id": 4, "kind": "scorer", "point": "scoring", "skip": 0, "signal": "SIGKILL"}
    order["also"] = [[other.pid, "SIGKILL"]]
    (tmp_path / "armed").write_text(json.dumps(order))
    code = """
        from one_step_off.config.schema import RewardConfig
        from one_step_off.rewards.scoring import RewardItem, Scorer
        Scorer(RewardConfig()).score_batch([RewardItem((0, 0), 0, "", "#### 1", "1")])
    """
    paths = f"{INJECT}:{Path(__file__).parents[3]}"
    env = os.environ | {"PYTHONPATH": paths, "CHAOS_FOLDER": str(tmp_path)}
    try:
        at_the_point = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env)
        assert at_the_point.returncode == -signal.SIGKILL
        assert other.wait(10) == -signal.SIGKILL
        hit = json.loads((tmp_path / "hit_4").read_text())
        assert hit["also"] == (order["also"] if is_alive else [])
    finally:
        other.kill()
