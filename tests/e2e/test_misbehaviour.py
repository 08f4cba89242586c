"""Real processes: reward workers that die, a run with rewards and updates that misbehave, and a
replay."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.algorithms.trajectories import Options, Trajectories
from one_step_off.config.schema import Config
from tests.conftest import tiny_config
from tests.e2e.run_folder import file_contents, read_rows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RESPONSES = ["a", "exit", "bb", "crash", "ccc", "kill", "dddd", "quit", "spin", "eeeee"]
DEADLY_RESPONSES = {
    "exit": "killed the process",
    "crash": "killed the process",
    "kill": "killed the process",
    "spin": "killed the process",
    "quit": "raised SystemExit",
}
"""What the error of each deadly response says."""


def deadly(response: str, **_: object) -> float:
    """A reward function that does what the response asks for."""
    if response == "exit":
        os._exit(1)
    if response == "quit":
        sys.exit(1)
    if response == "crash":
        ctypes.string_at(0)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "spin":
        sum(itertools.repeat(0))  # C code that never releases the interpreter's lock
    if response == "pid":
        return float(os.getpid())
    return float(len(response))


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Ray with two CPUs on this machine alone."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


async def score_all(scorers: list[Any], responses: list[str]) -> list[Any]:
    """The rewards or the errors of all responses, scored together."""
    from one_step_off.rewards.reward import RewardItem
    from one_step_off.rollout.reward_queue import RewardQueue

    queue = RewardQueue(scorers)
    items = [RewardItem((0, 0), index, "", text, "") for index, text in enumerate(responses)]
    return await asyncio.gather(*(queue.score(item) for item in items))


def assert_only_deadly_responses_fail(scorers: list[Any]) -> None:
    """Each deadly response gets an error that tells what it did, and each other one its reward."""
    from one_step_off.rewards.reward import RewardError

    begin = time.monotonic()
    results = asyncio.run(score_all(scorers, RESPONSES))
    assert time.monotonic() - begin < 100
    for response, result in zip(RESPONSES, results, strict=True):
        if response in DEADLY_RESPONSES:
            assert isinstance(result, RewardError), response
            assert DEADLY_RESPONSES[response] in str(result)
        else:
            assert result == len(response)


@pytest.mark.slow
def test_reward_workers_die_and_come_back():
    """Only the response that kills a worker has an error. A worker killed from outside costs no
    sample its reward."""
    with local_ray():
        import ray

        from one_step_off.cluster.placement import spawn
        from one_step_off.config.schema import RewardConfig
        from one_step_off.rewards.scoring import Scorer

        cfg = RewardConfig(function=f"{__name__}:deadly", timeout_s=0.5)
        scorers = [spawn(Scorer, (cfg,), None, "cpu") for _ in range(2)]
        assert_only_deadly_responses_fail(scorers)
        pids = asyncio.run(score_all(scorers, ["pid"] * 20))
        for pid in set(pids):
            os.kill(int(pid), signal.SIGKILL)
        assert asyncio.run(score_all(scorers, ["a", "bb"] * 5)) == [1.0, 2.0] * 5
        for scorer in scorers:
            ray.kill(scorer)


def kill_this_process_in_two_calls(counter_file: str) -> None:
    """Exit in the first two calls of all processes together. The file has one letter for each."""
    with open(counter_file, "a") as counter:
        if counter.tell() < 2:
            counter.write("x")
            counter.flush()
            os._exit(1)


def fails_for_multiples_of_three(
    response: str, ground_truth: str, counter_file: str, **_: object
) -> float:
    """Raise, hang or return nan where three divides the answer, by the length of the response.

    The first two calls kill their process: the trial call before the start, and one in the run.
    """
    kill_this_process_in_two_calls(counter_file)
    if int(ground_truth) % 3 == 0:
        if len(response) % 3 == 0:
            raise ValueError("three divides the answer")
        if len(response) % 3 == 1:
            time.sleep(60)
        return float("nan")
    letters = sum(character.isalpha() for character in response)
    return letters / max(1, len(response))


estimator_calls = itertools.count()


def nan_in_the_second_call(trajectories: Trajectories, options: Options) -> np.ndarray:
    """An advantage estimator with one value that is no number, in the second step."""
    advantages = trajectories.rewards - trajectories.rewards.mean()
    if next(estimator_calls) == 1:
        advantages[3] = np.nan
    return advantages


def misbehaving_config(model: str, folder: Path, counter_file: Path) -> Config:
    """A run that drops the samples whose reward fails, and skips an update."""
    settings = {
        "reward.function": f"{__name__}:fails_for_multiples_of_three",
        "reward.kwargs": {"counter_file": str(counter_file)},
        "reward.timeout_s": 0.3,
        "reward.on_error": "drop",
        "algorithm.adv_estimator": f"{__name__}:nan_in_the_second_call",
        "data.val_files": "",
        "data.train_batch_size": 8,
        "trainer.save_freq": 1,
        "trainer.save_hf_model": False,
    }
    return tiny_config(model, str(folder), **settings)


def assert_dropped_groups(row: dict, consumed: dict, samples: list[dict]) -> None:
    """The metrics, the ledger and the samples of a step agree on the groups that it dropped.

    Args:
        row: the step's metrics.
        consumed: the step's row in the ledger.
        samples: the step's samples, dropped ones included.
    """
    dropped = len(consumed.get("dropped", []))
    assert len(consumed["prompts"]) == 8
    assert row["samples/dropped_groups"] == dropped
    assert row["samples"] == 4 * (8 - dropped)
    assert row["reward/errors"] + row["reward/timeouts"] == 4 * dropped
    assert len(samples) == 32
    assert sum("error" in sample for sample in samples) == 4 * dropped
    for sample in samples:
        must_fail = int(sample["ground_truth"]) % 3 == 0
        assert ("error" in sample) == must_fail
        assert ("dropped" in sample) == must_fail


def assert_replayed(output: str) -> None:
    """The replay of the skipped update tells which values are not finite."""
    assert re.search(r"step 1 again, with the weights of \S+checkpoints/step_000001", output), (
        output
    )
    assert re.search(
        r"advantages: \d+ of \d+ trained tokens are not finite\s+nan at prompt", output
    ), output
    assert re.search(r"ratio: 0 of \d+ trained tokens are not finite", output), output
    actor_line = r"actor: .*actor/loss nan, .*actor/skipped_updates 1,"
    assert re.search(actor_line, output.replace("\n", " ")), output


@pytest.mark.slow
def test_a_run_continues_and_a_skipped_update_is_replayed(models, tmp_path, capfd):
    from one_step_off import main_ppo
    from one_step_off.runtime import launch

    run_folder = tmp_path / "run"
    counter_file = tmp_path / "killed_calls"
    assert launch.run(misbehaving_config(models(), run_folder, counter_file)) == 0
    assert counter_file.read_text() == "xx"
    rows = read_rows(run_folder, "metrics.jsonl")
    ledger = read_rows(run_folder, "ledger.jsonl")
    assert [row["actor/skipped_updates"] for row in rows] == [0, 1, 0], (
        "one of the two mini-batches of step 1 has the advantage that is no number"
    )
    assert sum(row["samples/dropped_groups"] for row in rows) > 0
    for row, consumed in zip(rows, ledger, strict=True):
        samples = read_rows(run_folder, f"samples/step_{row['step']:06d}.jsonl")
        assert_dropped_groups(row, consumed, samples)
    skipped_updates = list((run_folder / "skipped").iterdir())
    assert [folder.name for folder in skipped_updates] == ["step_000001"]
    before = file_contents(run_folder)
    capfd.readouterr()
    arguments = [f"config={run_folder / 'config.yaml'}", "--replay", str(skipped_updates[0])]
    assert main_ppo.main(arguments) == 0
    assert_replayed(capfd.readouterr().out)
    after = {path: path.read_bytes() for path in before}
    assert after == before, "a replay changes nothing of the run"
