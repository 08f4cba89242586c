"""Real processes: reward workers that die, a run with rewards and updates that misbehave, and a
replay."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def deadly(response: str, **_: object) -> float:
    """A reward function that does what the response says."""
    if response == "exit":
        os._exit(1)
    if response == "quit":
        sys.exit(1)
    if response == "crash":
        ctypes.string_at(0)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "spin":
        sum(itertools.repeat(0))  # C code, with the interpreter's lock
    if response == "pid":
        return float(os.getpid())
    return float(len(response))


@pytest.mark.slow
def test_reward_workers_die_and_come_back():
    """Only who kills them is to blame; a worker killed from outside costs nobody a reward."""
    import ray

    from one_step_off.cluster.placement import spawn
    from one_step_off.config.schema import RewardConfig
    from one_step_off.rewards.reward import RewardError, RewardItem
    from one_step_off.rewards.scoring import Scorer
    from one_step_off.rollout.reward_queue import RewardQueue

    said = ["a", "exit", "bb", "crash", "ccc", "kill", "dddd", "quit", "spin", "eeeee"]

    async def main(queue, texts):
        return await asyncio.gather(
            *(queue.score(RewardItem((0, 0), i, "", t, "")) for i, t in enumerate(texts))
        )

    options = {
        "num_cpus": 2,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "log_to_driver": False,
    }
    ray.init(address="local", **options)
    try:
        cfg = RewardConfig(function=f"{__name__}:deadly", timeout_s=0.5)
        scorers = [spawn(Scorer, (cfg,), None, "cpu") for _ in range(2)]
        begin = time.monotonic()
        found = asyncio.run(main(RewardQueue(scorers), said))
        assert time.monotonic() - begin < 100
        for text, reward in zip(said, found, strict=True):
            if text not in ("exit", "crash", "kill", "quit", "spin"):
                assert reward == len(text)
            else:
                assert isinstance(reward, RewardError), text
                assert ("raised SystemExit" if text == "quit" else "killed the process") in str(
                    reward
                )
        pids = asyncio.run(main(RewardQueue(scorers), ["pid"] * 20))
        for pid in set(pids):
            os.kill(int(pid), signal.SIGKILL)
        assert asyncio.run(main(RewardQueue(scorers), ["a", "bb"] * 5)) == [1.0, 2.0] * 5
        for scorer in scorers:
            ray.kill(scorer)
    finally:
        ray.shutdown()


def moody(response: str, ground_truth: str, flag: str, **_: object) -> float:
    """For an answer that three divides it raises, hangs or is no number, by the response; the first
    two calls, that before the start and one in the run, kill their process."""
    with open(flag, "a") as f:
        if f.tell() < 2:
            f.write("x")
            f.flush()
            os._exit(1)
    if int(ground_truth) % 3 == 0:
        how = len(response) % 3
        if how == 0:
            raise ValueError("moody")
        if how == 1:
            time.sleep(60)
        return float("nan")
    return sum(c.isalpha() for c in response) / max(1, len(response))


calls = itertools.count()


def broken_once(t, o):
    """Advantages of which one is no number, in the second step."""
    values = t.rewards - t.rewards.mean()
    if next(calls) == 1:
        values[3] = np.nan
    return values


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_groups_were_dropped(out: Path) -> None:
    """Each group with a sample that was not scored is left out, counted, and marked in the dump."""
    metrics = read_rows(out / "metrics.jsonl")
    ledger = read_rows(out / "ledger.jsonl")
    assert sum(row["samples/dropped_groups"] for row in metrics) > 0
    for row, consumed in zip(metrics, ledger, strict=True):
        dropped = consumed.get("dropped", [])
        assert len(consumed["prompts"]) == 8
        assert len(dropped) == row["samples/dropped_groups"]
        assert row["samples"] == 4 * (8 - len(dropped))
        assert row["reward/errors"] + row["reward/timeouts"] == 4 * len(dropped)
        samples = read_rows(out / f"samples/step_{row['step']:06d}.jsonl")
        assert len(samples) == 32
        assert sum("error" in sample for sample in samples) == 4 * len(dropped)
        for sample in samples:
            fails = int(sample["ground_truth"]) % 3 == 0
            assert fails == ("error" in sample) == ("dropped" in sample)


def assert_replay(out: Path, capfd: pytest.CaptureFixture) -> None:
    """The skipped update is repeated, with the reason, and the run stays as it was."""
    from one_step_off import main_ppo

    folder = out / "skipped" / "step_000001"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    capfd.readouterr()
    assert main_ppo.main([f"config={out / 'config.yaml'}", "--replay", str(folder)]) == 0
    printed = capfd.readouterr().out
    one_line = printed.replace("\n", " ")
    for words in (
        r"step 1 again, with the weights of \S+checkpoints/step_000001",
        r"advantages: \d+ of \d+ trained tokens are not finite\s+nan at prompt",
        r"ratio: 0 of \d+ trained tokens are not finite",
        r"actor: .*actor/loss nan, .*actor/skipped_updates 1,",
    ):
        assert re.search(words, one_line), printed
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_run_goes_on_and_a_skipped_update_is_replayed(models, tmp_path, capfd):
    from one_step_off.runtime import launch

    out = tmp_path / "run"
    flag = tmp_path / "flag"
    changes = {
        "reward.function": f"{__name__}:moody",
        "reward.kwargs": {"flag": str(flag)},
        "reward.timeout_s": 0.3,
        "reward.on_error": "drop",
        "algorithm.adv_estimator": f"{__name__}:broken_once",
        "data.val_files": "",
        "data.train_batch_size": 8,
        "trainer.save_freq": 1,
        "trainer.save_hf_model": False,
    }
    assert launch.run(tiny_config(models(), str(out), **changes)) == 0
    skipped = [row["actor/skipped_updates"] for row in read_rows(out / "metrics.jsonl")]
    assert skipped == [0, 1, 0], "the mini-batch with the advantage that is no number, alone"
    assert flag.read_text() == "xx"
    assert_groups_were_dropped(out)
    assert_replay(out, capfd)
