"""Rewards, agent loops and numbers that misbehave: each under each policy, and what the batch becomes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import random
import sys
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError

from agent_loop.base import AgentLoop, Generated, Trajectory
from one_step_off.algorithms.advantages import ADVANTAGE_ESTIMATORS
from one_step_off.checkpoint import read_batch, write_batch
from one_step_off.cluster.errors import RoleError
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import FAULT_METRICS, Batch, Prompt, Sample
from one_step_off.data.staleness import assert_staleness
from one_step_off.main_ppo import main
from one_step_off.models import tiny_qwen
from one_step_off.monitoring.tracker import Tracker
from one_step_off.rewards.reward import RewardError, RewardItem
from one_step_off.rewards.scoring import Scorer
from one_step_off.rollout.vllm_replica import RewardQueue, RolloutReplica, Room, Sampling
from one_step_off.runtime.replay import describe_quantities
from tests.unit.ray_trainer.test_ray_trainer import World, build, train_all

POLICIES = "stop", "zero", "drop"
PROMPT = Prompt((0, 7), np.arange(2, dtype=np.int32), "q", "1")

# --- rewards ---


def misbehave(response: str, **_: object) -> object:
    """Does what its response says."""
    if response == "raise":
        raise KeyError("why\nnot")
    if response == "hang":
        time.sleep(30)
    if response == "exit":
        sys.exit(3)
    answers = {
        "nan": float("nan"),
        "inf": float("inf"),
        "none": None,
        "text": "1.0",
        "list": [1.0, 2.0],
        "parts": {"a": 1},
    }
    return answers.get(response, 1.0)


class InProcess:
    """A `Scorer` of this process, called as a Ray actor is."""

    def __init__(self, cfg: Config) -> None:
        self.scorer, self.score_batch = Scorer(cfg.reward), self

    async def remote(self, items):
        return self.scorer.score_batch(items)


def replica_of(
    said: str, on_error: str, loop: str = "single_turn", **changes: object
) -> RolloutReplica:
    cfg = Config()
    cfg.reward.function, cfg.reward.timeout_s, cfg.reward.on_error = (
        f"{__name__}:misbehave",
        0.5,
        on_error,
    )
    cfg.agent.loop, cfg.agent.timeout_s, cfg.agent.tool_timeout_s = loop, 0.1, 0.1
    replica, tokenizer = (
        RolloutReplica(cfg, 0, "cpu", [InProcess(cfg)]),
        tiny_qwen.build_tokenizer(),
    )

    async def engine(*_):
        await asyncio.sleep(0.001)
        ids = np.array(tokenizer.encode(said), np.int32)
        return Generated(
            ids, np.zeros(len(ids), np.float32), np.full(len(ids), 4, np.int32), 0, "stop"
        )

    replica.tokenizer, replica._generate, replica.stamp = tokenizer, engine, (0, 4)
    return replica


def sample_of(replica: RolloutReplica, sampling: Sampling | None = None, index: int = 1) -> Sample:
    """One trajectory; afterwards nothing is held."""

    async def bounded():
        return await asyncio.wait_for(
            replica._trajectory(PROMPT, index, sampling or Sampling(2, 1.0, None)), 10
        )

    try:
        return asyncio.run(bounded())
    finally:
        assert replica.room._value == replica.cfg.agent.max_concurrency and replica.room.away == 1


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize("how", ["raise", "hang", "exit", "nan", "inf", "none", "text", "list"])
def test_every_way_in_which_a_reward_function_misbehaves(how, on_error):
    replica = replica_of(how, on_error)
    if on_error == "stop":
        with pytest.raises(RewardError, match=r"misbehave.*prompt \(0, 7\), sample 1: "):
            sample_of(replica)
        return
    sample = sample_of(replica)
    assert (
        sample.reward == 0.0
        and sample.response == how
        and sample.loss_mask.all()
        and len(sample.response_ids)
    )
    assert sample.extra["fault"] == ("reward/timeouts" if how == "hang" else "reward/errors")
    assert (
        sample.extra["error"].startswith("reward.function=") and "\n" not in sample.extra["error"]
    )


@pytest.mark.parametrize("on_error", POLICIES)
def test_a_good_reward_is_untouched_by_the_policy(on_error):
    assert (
        sample_of(replica_of("fine", on_error)).extra
        == {}
        == sample_of(replica_of("fine", on_error)).extra
    )
    assert sample_of(replica_of("parts", on_error)).extra == {"reward_parts": {"a": 1.0}}


class Mortal:
    """A scorer whose process dies of some items, seen from outside: the call fails, and Ray starts it anew."""

    def __init__(self, deadly: set[int], gone: bool = False) -> None:
        self.deadly, self.gone, self.deaths, self.starting, self.score_batch = (
            deadly,
            gone,
            0,
            0,
            self,
        )

    async def remote(self, items):
        await asyncio.sleep(0)
        killed = any(i.index in self.deadly for i in items)
        self.deaths, self.starting = (
            self.deaths + killed,
            2 if killed else max(0, self.starting - 1),
        )
        if self.gone or self.starting:  # Ray refuses every call until the new process is there
            raise ActorDiedError() if self.gone else ActorUnavailableError("dead", None)
        return [float(i.index) for i in items]


@given(st.sets(st.integers(0, 19), max_size=4), st.integers(1, 3))
@settings(max_examples=25)
def test_only_who_kills_its_process_alone_and_again_is_to_blame(deadly, workers):
    scorers = [Mortal(deadly) for _ in range(workers)]

    async def main():
        queue = RewardQueue(scorers)
        return await asyncio.gather(
            *(queue.score(RewardItem((0, 0), i, "q", "x", "1")) for i in range(20))
        )

    with mock.patch(
        "one_step_off.rollout.vllm_replica.asyncio.sleep", lambda s, sleep=asyncio.sleep: sleep(0)
    ):
        found = asyncio.run(asyncio.wait_for(main(), 5))
    assert [f for i, f in enumerate(found) if i not in deadly] == [
        float(i) for i in range(20) if i not in deadly
    ]
    assert all(
        isinstance(found[i], RewardError) and f"sample {i}: killed" in str(found[i]) for i in deadly
    )
    assert sum(s.deaths for s in scorers) <= 3 * len(deadly)


def test_a_worker_that_does_not_come_back_ends_the_run_by_name():
    replica = replica_of("fine", "drop")
    replica.rewards = RewardQueue([Mortal(set(), gone=True)])
    with pytest.raises(
        RuntimeError, match="reward worker 0: its process died and did not come back"
    ):
        sample_of(replica)


# --- agent loops ---


class Loop(AgentLoop):
    """Does one thing after a turn of the policy."""

    how = ""

    async def run(self, prompt, generate, score, limits):
        talk = Trajectory(prompt.ids, limits)
        await talk.say(generate)
        await getattr(self, self.how)(talk, generate, score)
        return None if self.how == "nothing" else talk

    async def broken(self, *_):
        raise KeyError("mood")

    async def for_ever(self, *_):
        await asyncio.Event().wait()

    async def stubborn(self, *_):
        end = time.monotonic() + 1.5  # or the test's event loop would wait for it for ever
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def greedy(self, talk, generate, score):
        for _ in itertools.count():
            await generate(talk.ids, 1)

    async def judge(self, talk, generate, score):
        for _ in itertools.count():
            await score("fine")
            await asyncio.sleep(0)

    async def cancelled(self, *_):
        raise asyncio.CancelledError

    async def unfinished(self, talk, generate, score):
        talk.reward = float("nan")

    async def wrong_reward(self, talk, generate, score):
        talk.reward = "good"

    async def silent(self, talk, generate, score):
        talk.segments.clear()

    async def nothing(self, *_): ...


def test_a_loop_that_fails_while_new_weights_arrive_is_an_error_of_its_sample():
    """With partial rollouts trajectories live on in a sync, and tools go on in it."""
    replica = replica_of("fine", "zero")
    replica.stamp, replica.incarnation = None, 3
    sample = replica._unmade(PROMPT, 1, ValueError("the tool broke"), {})
    assert (
        sample.incarnation == 3
        and sample.reward == 0.0
        and "the tool broke" in sample.extra["error"]
    )


BAD_LOOPS = [
    "broken",
    "for_ever",
    "stubborn",
    "greedy",
    "judge",
    "cancelled",
    "unfinished",
    "wrong_reward",
    "silent",
    "nothing",
]


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize("how", BAD_LOOPS)
def test_every_way_in_which_an_agent_loop_misbehaves(how, on_error, monkeypatch):
    monkeypatch.setattr(Loop, "how", how)
    replica = replica_of("fine", on_error, f"{__name__}:Loop")
    if on_error == "stop":
        with pytest.raises(
            RewardError, match=r"agent loop .*:Loop, prompt \(0, 7\), sample 1: raised "
        ):
            sample_of(replica)
        return
    sample = sample_of(replica)
    assert (
        sample.extra["fault"] == "agent/errors"
        and sample.reward == 0.0
        and len(sample.response_ids) == 0
    )
    late = "raised TimeoutError: it did not end in 0.4 s, twice agent.timeout_s and agent.tool_timeout_s"
    assert (late in sample.extra["error"]) == (how in ("for_ever", "stubborn", "greedy", "judge"))
    assert_staleness(Batch(0, [sample], (0, 4)))


def test_a_greedy_sample_that_failed_is_still_the_greedy_one(monkeypatch):
    monkeypatch.setattr(Loop, "how", "broken")
    sample = sample_of(
        replica_of("fine", "zero", f"{__name__}:Loop"), Sampling(2, 1.0, None, greedy=True), index=2
    )
    assert sample.extra["greedy"] and sample.extra["fault"] == "agent/errors"


@pytest.mark.parametrize("on_error", POLICIES)
def test_slow_generation_and_slow_scoring_are_not_the_loops_time(on_error):
    """Ten times the limit of the loop's own code in each."""
    replica = replica_of("fine", on_error)
    replica.cfg.agent.timeout_s = replica.cfg.agent.tool_timeout_s = 0.02
    engine, scorer = replica._generate, replica.rewards.score

    async def slowly(work, *args):
        await asyncio.sleep(0.8)
        return await work(*args)

    replica._generate = lambda *args: slowly(engine, *args)
    replica.rewards.score = lambda *args: slowly(scorer, *args)
    sample = sample_of(replica)
    assert sample.reward == 1.0 and sample.extra == {}


def test_the_wait_for_a_place_is_not_the_loops_time():
    replica = replica_of("fine", "stop")
    replica.cfg.agent.timeout_s = replica.cfg.agent.tool_timeout_s = 0.02
    replica.room, engine = Room(1), replica._generate

    async def slowly(*args):
        await asyncio.sleep(0.2)
        return await engine(*args)

    replica._generate = slowly
    samples = asyncio.run(replica.rollout([PROMPT], Sampling(6, 1.0, None)))
    assert [s.reward for s in samples] == [1.0] * 6


@pytest.mark.parametrize("on_error", POLICIES)
@pytest.mark.parametrize("error", [RuntimeError("the engine died"), ConfigError("no such thing")])
def test_what_fails_beneath_a_loop_is_not_the_loops_fault(error, on_error):
    """Under no policy may a dead engine look like a bad sample."""
    replica = replica_of("fine", on_error)

    async def dead(*_):
        raise error

    replica._generate = dead
    with pytest.raises(type(error), match=str(error)):
        sample_of(replica)


def test_a_cancelled_rollout_ends_its_loops(monkeypatch):
    monkeypatch.setattr(Loop, "how", "for_ever")
    replica = replica_of("fine", "drop", f"{__name__}:Loop")
    replica.cfg.agent.timeout_s = 60.0

    async def main():
        before = asyncio.all_tasks()
        task = asyncio.create_task(replica.rollout([PROMPT], Sampling(4, 1.0, None)))
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)
        return len(asyncio.all_tasks() - before)

    assert asyncio.run(main()) == 0


# --- batches ---


def with_faults(pipeline, wrong, fault="reward/errors"):
    """The rollouts of this pipeline, with errors in the samples for which wrong(step, row, index)."""
    real, steps = pipeline.roles.rollout.generate, itertools.count()

    async def generate(prompts, what, sampling):
        samples, seconds = await real(prompts, what, sampling)
        step = next(steps)
        for s in samples:
            if wrong(step, s.prompt_id[1], s.index):
                s.reward, s.extra = 0.0, s.extra | {"fault": fault, "error": "on purpose"}
        return samples, seconds

    pipeline.roles.rollout.generate, pipeline.val = generate, None
    return pipeline


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.parametrize("judged", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    "estimator",
    ["grpo", "rloo", "gpg", "remax", "optimal_token_baseline", "reinforce_plus_plus", "gdpo"],
)
def test_a_dropped_group_leaves_the_others_as_they_were(tmp_path, estimator, staleness, judged):
    """The same run, with groups dropped and without: what is left has the same advantages, the rest is on the ledger."""
    found = {}
    if estimator == "gdpo" and not judged:
        pytest.skip("it needs parts")
    for name, row in (("whole", -1), ("less", 3)):
        pipeline = build(tmp_path / name, World(random.Random(0)), 2, staleness)
        pipeline.cfg.algorithm.adv_estimator, pipeline.cfg.reward.on_error = estimator, "drop"
        pipeline.cfg.algorithm.whiten_adv = False
        pipeline.roles.rollout.train_sampling = Sampling(2, 1.0, 0, greedy=estimator == "remax")
        if judged:
            pipeline.roles.reward_model = Judge()
        pipeline.cfg.algorithm.old_log_probs = "recompute"
        found[name] = train_all(
            with_faults(pipeline, lambda step, r, index, bad=row: r == bad and index == 0)
        )
    dropped = 0
    for whole, less in zip(found["whole"], found["less"], strict=True):
        stays = [s.prompt_id[1] != 3 for s in whole.samples]
        dropped += not all(stays)
        assert [s.prompt_id for s in less.samples] == [
            s.prompt_id for s, k in zip(whole.samples, stays, strict=True) if k
        ]
        assert sorted(less.prompt_order()) == sorted(whole.prompt_order())
        if estimator not in ("gpg", "gdpo"):  # which are normalised over the batch
            for a, b in zip(
                less.advantages, itertools.compress(whole.advantages, stays), strict=True
            ):
                np.testing.assert_array_equal(a, b)
        assert len(less.old_log_probs) == len(less.advantages) == len(less.samples)
        assert all(s.extra["dropped"] for s in less.dropped) and all(
            np.isfinite(a).all() for a in less.advantages
        )
    assert dropped
    for row, ledger in zip(
        rows(tmp_path / "less", "metrics.jsonl"),
        rows(tmp_path / "less", "ledger.jsonl"),
        strict=True,
    ):
        gone = [p for p in ledger["prompts"] if p[1] == 3]
        assert (
            row["samples/dropped_groups"] == len(gone) == row["reward/errors"]
            and ledger.get("dropped", []) == gone
        )
        assert row["samples"] == 6 - 2 * len(gone)


class Judge:
    """A reward model."""

    async def rewards(self, batch):
        return [float(s.index) for s in batch.samples]


def test_zero_counts_and_marks_but_keeps_the_group(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 2, 1)
    pipeline.cfg.reward.on_error = "zero"
    batches = train_all(
        with_faults(pipeline, lambda step, row, index: index == 1 and step == 0, "agent/errors")
    )
    assert [len(b.samples) for b in batches] == [6, 6] and all(
        s.reward == 0 for s in batches[0].samples
    )
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [r["agent/errors"] for r in metrics] == [3, 0] and [
        r["samples/dropped_groups"] for r in metrics
    ] == [0, 0]
    assert pipeline.tracker.summary()["agent/errors"] == 3


def test_zero_gives_gdpo_parts_of_zero(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 1, 1)
    pipeline.cfg.algorithm.adv_estimator, pipeline.cfg.reward.on_error = "gdpo", "zero"
    with_faults(pipeline, lambda step, row, index: index == 1)
    real = pipeline.roles.rollout.generate

    async def generate(*args):
        samples, seconds = await real(*args)
        for s in samples:
            s.extra |= {} if "error" in s.extra else {"reward_parts": {"right": 1.0, "form": 0.5}}
        return samples, seconds

    pipeline.roles.rollout.generate = generate
    (batch,) = train_all(pipeline)
    assert all(
        np.sign(a[0]) == (1 if s.index == 0 else -1)
        for a, s in zip(batch.advantages, batch.samples, strict=True)
    )


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_of_which_nothing_is_left_counts_and_changes_nothing(tmp_path, staleness):
    pipeline = build(tmp_path, World(random.Random(0)), 4, staleness, test_freq=1)
    pipeline.cfg.reward.on_error, learnt, update = "drop", [], pipeline.roles.actor.update

    async def noted(batch, learn=True):
        learnt.append((batch.step, learn, len(batch.samples)))
        return await update(batch, learn)

    pipeline.roles.actor.update = noted
    asyncio.run(with_faults(pipeline, lambda step, row, index: step == 1).fit())
    assert learnt == [(0, True, 6), (1, False, 0), (2, True, 6), (3, True, 6)]
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [r["step"] for r in metrics] == [0, 1, 2, 3] and metrics[1]["reward/mean"] is None
    assert metrics[1]["samples/dropped_groups"] == 3 and metrics[2]["staleness/max"] == staleness
    again = Tracker(str(tmp_path), 4, out=io.StringIO())
    again.start(4)
    assert again.summary()["reward/last"] == pytest.approx(0.5), (
        "None in an earlier run's row is left out"
    )


def test_a_run_of_which_nothing_is_ever_left_ends_by_name(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 40, 1)
    pipeline.cfg.reward.on_error, pipeline.cfg.trainer.max_skipped_updates = "drop", 3
    with pytest.raises(
        RoleError, match="step 2: trainer.max_skipped_updates=3 were skipped in a row: all groups"
    ):
        asyncio.run(with_faults(pipeline, lambda *_: True).fit())


def test_dynamic_sampling_leaves_groups_with_errors_to_be_dropped_and_seen(tmp_path):
    pipeline = build(tmp_path, World(random.Random(0)), 2, 1, rows=60)
    pipeline.cfg.algorithm.max_gen_batches, pipeline.cfg.reward.on_error = 3, "drop"
    batches = train_all(with_faults(pipeline, lambda step, row, index: row % 3 == 0))
    assert sum(len(b.dropped) for b in batches) and all(
        s.prompt_id[1] % 3 for b in batches for s in b.samples
    )
    ledger = rows(tmp_path, "ledger.jsonl")
    assert all(len(row["prompts"]) == 3 for row in ledger)


@given(st.data())
@settings(max_examples=30)
def test_drop_takes_what_goes_with_each_sample(data):
    groups = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    bad = data.draw(st.sets(st.integers(0, 4)))
    samples = [tiny(row, i) for i, row in enumerate(groups)]
    each = [np.full(3, i, np.float32) for i in range(len(groups))]
    batch = Batch(0, samples, (0, 0), advantages=list(each), values=list(each), old_log_probs=None)
    batch.drop({(0, row) for row in bad})
    left = [i for i, row in enumerate(groups) if row not in bad]
    assert [s.index for s in batch.samples] == left and batch.old_log_probs is None
    assert [int(a[0]) for a in batch.advantages] == left == [int(v[0]) for v in batch.values]
    assert {s.index for s in batch.dropped} == set(range(len(groups))) - set(left)
    assert set(batch.prompt_order()) == {(0, row) for row in groups}
    assert not any("dropped" in s.extra for s in samples), (
        "the samples of a checkpoint are not written on"
    )


def tiny(row: int, index: int, length: int = 3) -> Sample:
    ids = np.arange(length, dtype=np.int32)
    given = ids, np.zeros(length, np.float32), np.ones(length, bool), np.zeros(length, np.int32)
    return Sample((0, row), index, np.arange(2, dtype=np.int32), *given, reward=float(index))


# --- updates ---


class Skipping:
    """An actor whose loss is not finite in some steps."""

    def __init__(self, world, bad) -> None:
        self.world, self.bad, self.row = world, bad, 0

    async def update(self, batch, learn=True):
        while self.world.engine_version != self.world.version:
            await asyncio.sleep(0)
        self.world.version += 1
        wrong = self.bad(batch.step)
        self.row = self.row + 1 if wrong else 0
        return {"actor/skipped_updates": float(wrong), "actor/skipped_in_a_row": float(self.row)}


def test_skipped_updates_are_kept_for_replay_and_bounded(tmp_path):
    world = World(random.Random(0))
    pipeline = build(tmp_path, world, 30, 1)
    pipeline.val, pipeline.cfg.trainer.max_skipped_updates = None, 4
    pipeline.roles.actor = Skipping(world, lambda step: step % 4 in (1, 2, 3) or step > 20)
    with pytest.raises(
        RoleError, match="step 24: trainer.max_skipped_updates=4 were skipped in a row: a loss or"
    ):
        asyncio.run(pipeline.fit())
    kept = sorted(p.name for p in (tmp_path / "skipped").iterdir())
    assert kept == [f"step_{step:06d}" for step in (1, 2, 3, 5, 6)], "the first few"
    batch = read_batch(tmp_path / "skipped" / "step_000003")
    assert (
        batch.step == 3
        and batch.expected_stamp == (0, 2)
        and len(batch.samples) == 6 == len(batch.advantages)
    )


def test_a_batch_is_read_as_it_was_written(tmp_path):
    samples = [tiny(i // 2, i, length) for i, length in enumerate((3, 0, 1, 5))]
    each = [
        np.random.default_rng(0).normal(size=len(s.response_ids)).astype(np.float32)
        for s in samples
    ]
    each[3][2] = np.nan
    samples[1].extra = {"error": "why", "agent": {"turns": 2.0}}
    batch = Batch(12, samples, (1, 11), advantages=each, values=[-a for a in each])
    write_batch(batch, tmp_path / "b")
    again = read_batch(tmp_path / "b")
    assert (again.step, again.expected_stamp, again.returns, again.ref_log_probs) == (
        12,
        (1, 11),
        None,
        None,
    )
    for a, b in zip(each, again.advantages, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    assert again.samples[1].extra == samples[1].extra and again.samples[3].prompt_id == (0, 1)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="--replay .*: no batch: .*skipped/step_000012"):
            read_batch(folder)


TORN = {
    "no batch.npz": lambda b: (b / "batch.npz").unlink(),
    "batch.npz cut off": lambda b: (b / "batch.npz").write_bytes(
        (b / "batch.npz").read_bytes()[:-200]
    ),
    "samples.npz cut off": lambda b: (b / "samples.npz").write_bytes(
        (b / "samples.npz").read_bytes()[:200]
    ),
    "a flipped byte": lambda b: (b / "batch.npz").write_bytes(
        flipped((b / "batch.npz").read_bytes())
    ),
    "no stamp": lambda b: np.savez(b / "batch.npz", advantages=np.zeros(9)),
    "an array of nothing": lambda b: np.savez(b / "batch.npz", stamp=(1, 0, 0), other=np.zeros(9)),
    "rows of other fields": lambda b: (b / "samples.jsonl").write_text(
        '{"prompt_id": [0, 1]}\n' * 4
    ),
    "rows that are none": lambda b: (b / "samples.jsonl").write_text("3\n" * 4),
    "a row too few": lambda b: (b / "samples.jsonl").write_text(
        (b / "samples.jsonl").read_text().partition("\n")[2]
    ),
}


def flipped(content: bytes) -> bytes:
    """With another byte in the first array."""
    at = content.index(b"NUMPY") + 130
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


@pytest.mark.parametrize("tear", TORN.values(), ids=TORN.keys())
def test_a_torn_batch_is_refused_in_one_line(tear, tmp_path, capsys):
    samples = [tiny(i // 2, i, length) for i, length in enumerate((3, 0, 1, 5))]
    each = [np.ones(len(s.response_ids), np.float32) for s in samples]
    write_batch(Batch(12, samples, (1, 11), advantages=each), tmp_path / "b")
    tear(tmp_path / "b")
    keys = [
        "model.path=tiny:qwen2",
        "data.train_files=generator:word_problems",
        "trainer.total_steps=1",
    ]
    keys += ["placement.device=cpu", f"trainer.output_dir={tmp_path}/out"]
    assert main([*keys, "--replay", str(tmp_path / "b")]) == 2
    line = capsys.readouterr().err.removesuffix("\n")
    assert line.startswith(f"error: --replay {tmp_path}/b: no batch: ") and "\n" not in line
    assert line.endswith("; name a folder as OUTPUT_DIR/skipped/step_000012")


def test_findings_name_the_tokens():
    samples = [tiny(0, 0), tiny(0, 1)]
    samples[0].loss_mask[0] = False
    values = [np.array([np.nan, 1.0, -2.0]), np.array([np.inf, 0.0, 5.0])]
    lines = describe_quantities(
        samples,
        {"ratio": values, "good": [np.zeros(3), np.ones(3)], "all bad": [np.full(3, np.nan)] * 2},
    )
    assert lines[0] == "ratio: 1 of 5 trained tokens are not finite", (
        "what is not trained on is not told"
    )
    assert lines[1:4] == [
        "  inf at prompt (0, 0), sample 1 (reward 1), token 0",
        "  -2 at prompt (0, 0), sample 0 (reward 0), token 2",
        "  5 at prompt (0, 0), sample 1 (reward 1), token 2",
    ]
    assert lines[-4] == "all bad: 5 of 5 trained tokens are not finite" and len(lines) == 4 + 3 + 4


def test_every_estimator_takes_samples_without_tokens():
    """What an agent loop did not end has none."""
    from one_step_off.algorithms.advantages import Options, Trajectories, estimate_advantages

    lengths = np.array([3, 0, 0, 2])
    arrays = [np.full(n, -0.5, np.float32) for n in lengths]
    t = Trajectories(np.array([1.0, 0.0, 0.0, 0.5]), ["a", "a", "b", "b"], [np.ones(n, bool) for n in lengths],
                     values=arrays, parts={"x": np.array([1.0, 0.0, 0.0, 0.5])}, baselines=np.zeros(4),
                     log_probs=arrays, prob_squares=[-a for a in arrays])  # fmt: skip
    for name in ADVANTAGE_ESTIMATORS:
        found = estimate_advantages(name, t, Options())[0]
        assert [len(a) for a in found] == lengths.tolist() and all(
            np.isfinite(a).all() for a in found
        ), name


def test_the_faults_are_metrics_from_the_first_step(tmp_path):
    asyncio.run(build(tmp_path, World(random.Random(0)), 1, 1).fit())
    (row,) = rows(tmp_path, "metrics.jsonl")
    assert all(row[name] == 0 for name in (*FAULT_METRICS, "samples/dropped_groups"))
