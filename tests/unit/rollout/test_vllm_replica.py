"""What a replica does around the engine; the engine itself is in the e2e tests."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError

from agent_loop import tools
from agent_loop.base import AgentLoop, Generated, Loops, Trajectory
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.models import tiny_qwen
from one_step_off.rewards.reward import RewardError, RewardItem
from one_step_off.rollout.replica_group import RolloutGroup
from one_step_off.rollout.vllm_replica import (
    Place,
    RewardQueue,
    RolloutReplica,
    Room,
    Sampling,
    engine_args,
    sample_seed,
    stamps_of,
)
from tests.conftest import tiny_config

Span = namedtuple("Span", "version start end")


def test_stamps_are_read_per_token():
    incarnation, versions = stamps_of([Span("2.7", 0, 3), Span("2.8", 3, 5)], 5)
    assert incarnation == 2
    assert versions.tolist() == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    "spans",
    [None, [], [Span("0.1", 0, 2)], [Span("0.1", 1, 3)], [Span("0.1", 0, 2), Span("1.1", 2, 3)]],
)
def test_a_token_without_one_known_stamp_is_refused(spans):
    with pytest.raises(RuntimeError, match="stamped 3 tokens"):
        stamps_of(spans, 3)


def test_seeds_differ_for_all_neighbours_and_fit_into_63_bits():
    seeds = {
        sample_seed(s, (e, r), i)
        for s in range(3)
        for e in range(-1, 3)
        for r in range(20)
        for i in range(16)
    }
    assert len(seeds) == 3 * 4 * 20 * 16
    assert all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(1, (0, 5), 2) == sample_seed(1, (0, 5), 2)
    # vLLM makes child seeds by adding: no two of ours may be that close.
    ordered = sorted(seeds)
    assert min(b - a for a, b in zip(ordered, ordered[1:], strict=False)) > 64


class FakeScorer:
    """Answers like a Ray actor's method; notes how its calls were filled."""

    def __init__(self, delay: float = 0.0, fail_on: str = "") -> None:
        self.calls: list[int] = []
        self.delay, self.fail_on = delay, fail_on
        self.score_batch = self

    async def remote(self, items: list[RewardItem]) -> list[float | None]:
        self.calls.append(len(items))
        await asyncio.sleep(self.delay)
        if any(i.response == self.fail_on for i in items):
            return [
                RewardError("bad reward") if i.response == self.fail_on else float(i.index)
                for i in items
            ]
        special = {"late": None, "parts": {"right": 1.0, "form": 0.5}}
        return [special.get(i.response, float(i.index)) for i in items]


def item(index: int, response: str = "x") -> RewardItem:
    return RewardItem((0, 0), index, "q", response, "1")


def test_rewards_come_back_to_their_own_samples_in_few_calls():
    async def main():
        scorer = FakeScorer(0.02)
        queue = RewardQueue([scorer])
        rewards = await asyncio.gather(*(queue.score(item(i)) for i in range(50)))
        return rewards, scorer.calls

    rewards, calls = asyncio.run(main())
    assert rewards == [float(i) for i in range(50)]
    assert len(calls) <= 2 and sum(calls) == 50


def test_a_failing_reward_reaches_its_callers_and_later_ones_still_work():
    async def main():
        queue = RewardQueue([FakeScorer(fail_on="boom")])
        found = await asyncio.gather(queue.score(item(0, "boom")), queue.score(item(1)))
        return [*found, await queue.score(item(3))]

    error, *others = asyncio.run(main())
    assert str(error) == "bad reward" and others == [1.0, 3.0]


async def generated(ids, max_tokens, seed, sampling):
    return Generated(np.arange(2), np.full(2, sampling.temperature), np.zeros(2), 0, "stop")


@pytest.mark.parametrize(
    ("response", "reward", "extra"),
    [
        ("late", 0.0, {"fault": "reward/timeouts", "error": "not judged within reward.timeout_s"}),
        ("x", 3.0, {}),
        ("parts", 1.5, {"reward_parts": {"right": 1.0, "form": 0.5}}),
    ],
)
def test_what_the_scorer_says_of_a_sample(response, reward, extra):
    replica = RolloutReplica(Config(), 0, "cpu", [FakeScorer()])
    replica.tokenizer, replica._generate = (
        SimpleNamespace(decode=lambda *_, **__: response),
        generated,
    )
    prompt = Prompt((0, 0), np.arange(2), "q", "1")
    sample = asyncio.run(replica._trajectory(prompt, 3, Sampling(1, 1.0, None)))
    assert (sample.reward, sample.extra) == (reward, extra)


class Numbers(AgentLoop):
    """Takes what `score` gives for a number, or hands it on, or its parts, as its setting says."""

    def __init__(self, cfg, tokenizer, *, how="number"):
        super().__init__(cfg, tokenizer)
        self.how = how

    async def run(self, prompt, generate, score, limits):
        talk = Trajectory(prompt.ids, limits)
        await talk.say(generate)
        found = await score("parts")
        ways = {"number": lambda: 0.5 * found + 1, "as it is": lambda: found}
        ways |= {
            "scaled": lambda: found.scaled(2.0),
            "parts": lambda: found.parts,
            "total": lambda: found.total,
        }
        talk.reward = ways[self.how]()
        return talk


@pytest.mark.parametrize(
    ("how", "reward", "parts"),
    [
        ("number", 1.75, {}),
        ("as it is", 1.5, {"right": 1.0, "form": 0.5}),
        ("scaled", 3.0, {"right": 2.0, "form": 1.0}),
        ("parts", 1.5, {"right": 1.0, "form": 0.5}),
        ("total", 1.5, {}),
    ],
)
def test_a_loop_may_take_what_score_gives_for_a_number_or_read_its_parts(how, reward, parts):
    cfg, name = Config(), f"{__name__}:Numbers"
    cfg.agent.loop, cfg.agent.loop_kwargs = name, {name: {"how": how}}
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()])
    replica.tokenizer, replica._generate = tiny_qwen.build_tokenizer(), generated
    sample = asyncio.run(
        replica._trajectory(Prompt((0, 0), np.arange(2), "q", "1"), 3, Sampling(1, 1.0, None))
    )
    assert (sample.reward, sample.extra.get("reward_parts", {})) == (reward, parts) and type(
        sample.reward
    ) is float


class Noting(FakeScorer):
    """Keeps what it is sent."""

    async def remote(self, items):
        self.items = items
        return await super().remote(items)


@pytest.mark.parametrize(
    ("function", "functions", "sent"),
    [
        ("gsm8k", {}, {}),
        ("my_rewards:f", {}, {"level": 3}),
        ("gsm8k", {"a": "math"}, {}),
        ("gsm8k", {"a": "m:f"}, {"level": 3}),
    ],
)
def test_the_rows_other_columns_go_to_functions_of_the_users_own_and_into_no_sample(
    function, functions, sent
):
    cfg = Config()
    cfg.reward.function, cfg.reward.functions, scorer = function, functions, Noting()
    replica = RolloutReplica(cfg, 0, "cpu", [scorer])
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: "x"), generated
    prompt = Prompt((0, 0), np.arange(2), "q", "1", "a", extra={"level": 3}, where="rows.jsonl:1")
    sample = asyncio.run(replica._trajectory(prompt, 3, Sampling(1, 1.0, None)))
    assert [(i.extra_info, i.where, i.data_source) for i in scorer.items] == [
        (sent, "rows.jsonl:1", "a")
    ]
    assert sample.extra == {}


@pytest.mark.parametrize(
    ("tries", "reward", "late"),
    [(["late"] * 2, 0.0, True), (["x", "late"], 0.0, True), (["late", "x"], 1.5, False)],
)
def test_a_last_try_of_which_the_reward_is_late_is_marked_as_such(tries, reward, late):
    cfg, tokenizer, engine = Config(), tiny_qwen.build_tokenizer(), iter(tries)
    cfg.agent.loop, cfg.agent.max_turns = "retry_with_feedback", 2
    cfg.agent.loop_kwargs = {"retry_with_feedback": {"passes_at": 9.0, "discount": 0.5}}

    async def said(*_):
        ids = np.array(tokenizer.encode(next(engine)), np.int32)
        return Generated(ids, np.zeros(len(ids)), np.zeros(len(ids)), 0, "stop")

    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()])
    replica.tokenizer, replica._generate = tokenizer, said
    sample = asyncio.run(
        replica._trajectory(Prompt((0, 0), np.arange(2), "q", "1"), 3, Sampling(1, 1.0, None))
    )
    assert (sample.reward, "error" in sample.extra) == (reward, late)
    assert sample.extra["agent"]["tries"] == 2


@pytest.mark.parametrize("estimator", ["remax", "grpo", f"{__name__}:generated"])
def test_a_greedy_response_beside_the_samples_where_the_estimator_needs_baselines(estimator):
    cfg = Config()
    cfg.algorithm.adv_estimator, cfg.rollout.n = estimator, 2
    own: Any = generated
    own.needs, wanted = ("baselines",), estimator != "grpo"
    group = RolloutGroup([], cfg, seeded=True)
    assert (group.train_sampling.greedy, group.val_sampling.greedy) == (wanted, False)
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()])
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: "x"), generated
    replica.stamp = (0, 0)
    prompts = [Prompt((0, row), np.arange(2), "q", "1") for row in range(2)]
    samples = asyncio.run(replica.rollout(prompts, group.train_sampling))
    found = [(s.prompt_id[1], s.index, s.log_probs[0], s.extra) for s in samples]
    greedy = {"greedy": True}
    assert found == [
        (row, i, float(i < 2), greedy if i == 2 else {})
        for row in range(2)
        for i in range(2 + wanted)
    ], "its temperature is 0, and it is scored like the others"
    assert [s.reward for s in samples] == [float(s.index) for s in samples]


def test_nothing_is_generated_before_verified_weights():
    replica = RolloutReplica(Config(), 4, "cpu", [FakeScorer()])
    with pytest.raises(RuntimeError, match="rollout replica 4 has no verified weights"):
        asyncio.run(replica.rollout([], Sampling(1, 1.0, None)))


class Scheduler:
    """Of an engine that works on nothing."""

    async def pause_scheduler_async(self, **_) -> None: ...


class BrokenEngine:
    engine_core = Scheduler()

    def __init__(self) -> None:
        self.resumed = False

    async def collective_rpc(self, *_, **__):
        raise RuntimeError("checksum of bucket 1 differs")

    async def resume_generation(self):
        self.resumed = True


def test_after_a_failed_sync_the_engine_stays_paused_and_unused():
    replica = RolloutReplica(Config(), 0, "cpu", [FakeScorer()])
    replica.engine, replica.stamp = BrokenEngine(), (0, 3)
    with pytest.raises(RuntimeError, match="checksum"):
        asyncio.run(replica.sync((0, 4)))
    assert not replica.engine.resumed
    with pytest.raises(RuntimeError, match="no verified weights"):
        asyncio.run(replica.rollout([], Sampling(1, 1.0, None)))


class SleepyEngine:
    """Writes down what it is told; awake it must not be woken, asleep it must not be put to sleep again."""

    engine_core = Scheduler()

    def __init__(self) -> None:
        self.told: list = []

    async def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        self.told += tags

    async def collective_rpc(self, method: str, args: tuple) -> list[dict]:
        self.told.append(method)
        return [{"bytes": 1.0}]

    async def update_weight_version(self, _) -> None: ...
    async def resume_generation(self) -> None: ...


def test_a_colocated_engine_sleeps_between_its_turns_and_wakes_for_the_sync():
    for device, told in (
        ("cuda", ["sync_weights", "sleep 2", "weights", "sync_weights", "kv_cache"]),
        ("cpu", ["sync_weights", "sync_weights"]),
    ):
        replica = RolloutReplica(Config(), 0, device, [FakeScorer()])
        replica.engine = SleepyEngine()

        async def turns(replica=replica):
            await replica.sync((0, 0))
            await replica.sleep()
            await replica.sleep()  # every role that comes to its turn asks
            with pytest.raises(RuntimeError, match="no verified weights"):
                await replica.rollout([], Sampling(1, 1.0, None))
            await replica.sync((0, 1))

        asyncio.run(turns())
        assert replica.engine.told == told and replica.stamp == (0, 1)


def test_engine_arguments_make_the_engine_that_is_meant(models, monkeypatch):
    """As vLLM understands them: it has taken every name, and its own checks have changed none of the values."""
    from vllm import AsyncEngineArgs

    from one_step_off.runtime.processes import ENGINE_ENV
    from one_step_off.weight_sync.vllm_receiver import SyncWorkerExtension

    for name, value in ENGINE_ENV[
        "cpu"
    ].items():  # as in a replica's process; without it the executor is another
        monkeypatch.setenv(name, value)
    cfg = tiny_config(
        models(), "", **{"data.max_response_length": 32, "rollout.val_max_response_length": 64}
    )
    cfg.rollout.engine_kwargs = {"max_num_seqs": 7}
    made = AsyncEngineArgs(**engine_args(cfg, "cpu")).create_engine_config()
    assert made.device_config.device_type == "cpu"
    assert made.model_config.model == cfg.model.path and made.model_config.dtype == torch.float32
    assert made.model_config.max_model_len == 128 + 64, (
        "the longest prompt with the longest response"
    )
    assert made.model_config.seed == cfg.trainer.seed and made.model_config.enforce_eager
    assert made.model_config.logprobs_mode == "processed_logprobs"
    assert made.scheduler_config.max_num_seqs == 7, "the user's own keys go on top"
    assert not made.scheduler_config.enable_chunked_prefill, (
        "a prompt split over two steps would kill a CPU engine"
    )
    assert made.scheduler_config.max_num_batched_tokens >= 7 * made.model_config.max_model_len
    assert (
        made.cache_config.kv_cache_memory_bytes == 64 << 20 and made.cache_config.block_size == 32
    )
    assert made.parallel_config.tensor_parallel_size == 1
    assert made.parallel_config.distributed_executor_backend == "uni"
    assert (
        made.parallel_config.worker_extension_cls
        == f"{SyncWorkerExtension.__module__}.{SyncWorkerExtension.__name__}"
    )
    assert made.weight_transfer_config.backend == "one_step_off"


@pytest.mark.parametrize(("width", "executor"), [(1, "uni"), (2, "mp")])
@pytest.mark.parametrize("shared", [False, True])
def test_engine_arguments_on_gpus_are_known_to_vllm(models, width, executor, shared):
    """What they make needs a GPU; that the names exist does not."""
    from vllm import AsyncEngineArgs

    cfg = tiny_config(models(), "", **{"rollout.tensor_parallel_size": width})
    cfg.placement.roles = {"rollout": "all", "actor": "all" if shared else "other"}
    made = AsyncEngineArgs(**engine_args(cfg, "cuda"))
    default = AsyncEngineArgs(model=cfg.model.path)
    assert made.gpu_memory_utilization == cfg.rollout.gpu_memory_utilization
    assert made.kv_cache_memory_bytes is None and made.block_size == default.block_size
    assert made.enable_chunked_prefill == default.enable_chunked_prefill
    assert made.enforce_eager == default.enforce_eager, "CUDA graphs"
    assert made.enable_sleep_mode == shared, "its memory is another role's while it sleeps"
    assert (made.tensor_parallel_size, made.distributed_executor_backend) == (width, executor)


def test_a_user_key_that_vllm_does_not_know_is_refused(models):
    from vllm import AsyncEngineArgs

    cfg = tiny_config(models(), "", **{"rollout.engine_kwargs": {"no_such_key": 1}})
    with pytest.raises(TypeError, match="no_such_key"):
        AsyncEngineArgs(**engine_args(cfg, "cpu"))


def test_slow_rewards_are_scored_side_by_side():
    async def main():
        scorers = [FakeScorer(0.05) for _ in range(4)]
        queue = RewardQueue(scorers)
        rewards = await asyncio.gather(*(queue.score(item(i)) for i in range(20)))
        return rewards, [scorer.calls for scorer in scorers]

    rewards, calls = asyncio.run(main())
    assert rewards == [float(i) for i in range(20)]
    assert all(calls) and max(sum(own) for own in calls) <= 8


def test_a_cancelled_trajectory_takes_no_other_ones_reward():
    async def main():
        queue = RewardQueue([FakeScorer(0.05)])
        tasks = [asyncio.create_task(queue.score(item(i))) for i in range(5)]
        await asyncio.sleep(0.01)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert isinstance(found.pop(2), asyncio.CancelledError) and found == [0.0, 1.0, 3.0, 4.0]


def test_trajectories_under_way_are_bounded_and_slots_are_refilled():
    """A reward that takes long holds no slot; each turn has a seed of its own, the first one that of a single turn."""
    cfg, most, under_way, seeds = Config(), 0, 0, []
    cfg.agent.max_concurrency = 3

    async def engine(ids, max_tokens, seed, sampling):
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        seeds.append(seed)
        return await generated(ids, max_tokens, seed, sampling)

    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer(0.3) for _ in range(12)])
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: "x"), engine
    replica.stamp = (0, 0)
    prompts = [Prompt((0, row), np.arange(2), "q", "1") for row in range(12)]
    begin = time.perf_counter()
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, 7)))
    assert most == 3 and len(samples) == 12
    assert time.perf_counter() - begin < 4 * 0.3, (
        "the next ones generate while rewards are worked out"
    )
    assert sorted(seeds) == sorted(sample_seed(7, p.id, 0) for p in prompts)
    assert len({sample_seed(7, (0, 0), 0, turn) for turn in range(5)}) == 5
    assert sample_seed(7, (0, 0), 0, 0) == sample_seed(7, (0, 0), 0)


def test_a_try_that_is_being_judged_keeps_no_other_one_waiting():
    """One place, and rewards of 0.3 s: all first tries are over before the first one is judged."""
    cfg, began = Config(), []
    cfg.agent.loop, cfg.agent.max_concurrency, cfg.agent.max_turns = "retry_with_feedback", 1, 2
    tokenizer = tiny_qwen.build_tokenizer()

    async def engine(ids, max_tokens, seed, sampling):
        began.append((time.perf_counter(), len(ids)))
        return await generated(ids, max_tokens, seed, sampling)

    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer(0.3, "boom") for _ in range(8)])
    replica.tokenizer, replica._generate, replica.stamp = tokenizer, engine, (0, 0)
    prompts = [Prompt((0, row), np.arange(2), "q", "1") for row in range(8)]
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, None)))
    assert len(samples) == 8 and all(s.extra["agent"]["tries"] == 2 for s in samples)
    first, second = ([at for at, n in began if (n == 2) == first] for first in (True, False))
    assert len(first) == len(second) == 8 and max(first) - min(first) < 0.3 <= min(second) - min(
        first
    )
    assert replica.room._value == 1


class Stubborn(AgentLoop):
    """Has itself judged after each of four turns, whatever comes of it, and twice at once in the end."""

    async def run(self, prompt, generate, score, limits):
        talk = Trajectory(prompt.ids, limits, reward=0.0)
        while said := await talk.say(generate):
            text = "boom" if talk.turns % 2 else "x"
            with contextlib.suppress(
                TimeoutError
            ):  # the second turn's takes too long for this loop
                talk.reward = await asyncio.wait_for(score(text), 0.03 if talk.turns == 2 else None)
            talk.hear("user", said.ids)
        await asyncio.gather(score("x"), score("x"))
        return talk


def test_what_becomes_of_judging_changes_no_number_of_places():
    """Rewards that fail, take too long for the loop, or are asked for twice at once: never more than three generate."""
    cfg, most, under_way = Config(), 0, 0
    cfg.agent.loop, cfg.agent.max_concurrency, cfg.agent.max_turns = f"{__name__}:Stubborn", 3, 4
    cfg.reward.on_error = "zero"

    async def engine(*request):
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return await generated(*request)

    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer(0.05, "boom") for _ in range(40)])
    replica.tokenizer, replica._generate, replica.stamp = (
        tiny_qwen.build_tokenizer(),
        engine,
        (0, 0),
    )
    prompts = [Prompt((0, row), np.arange(2), "q", "1") for row in range(12)]
    samples = asyncio.run(replica.rollout(prompts, Sampling(1, 1.0, None)))
    assert [s.extra["agent"]["turns"] for s in samples] == [4.0] * 12
    assert most == 3 and replica.room._value == 3 and replica.room.away == 12


def test_a_place_that_is_waited_for_when_the_trajectory_ends_is_not_kept():
    async def main():
        room = Room(1)
        one, other = Place(room, 1.0), Place(room, 1.0)
        await one.take()
        late = asyncio.create_task(other.take())
        await asyncio.sleep(0)
        other.leave(over=True)
        one.leave()
        await late
        assert room._value == 1 and room.away == 2
        await asyncio.gather(one.take(), one.take())
        assert room._value == 0

    asyncio.run(main())


class Away(AgentLoop):
    """Waits for a tool."""

    async def run(self, prompt, generate, score, limits):
        talk = Trajectory(prompt.ids, limits)
        await talk.say(generate)
        await asyncio.sleep(0.3)
        return talk


@pytest.mark.parametrize("loop", ["single_turn", f"{__name__}:Away"])
def test_a_replica_says_when_it_has_room(loop):
    """Also of prompts that have not come yet; what is judged, or waits for a tool, takes none."""
    cfg = Config()
    cfg.agent.loop = loop
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer(0.3)])
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: "x"), generated
    replica.stamp = (0, 0)

    async def main():
        assert await asyncio.wait_for(replica.wait_for_capacity(3, 4), 5) == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.wait_for_capacity(4, 4), 0.05)
        room, begin = asyncio.create_task(replica.wait_for_capacity(4, 4)), time.perf_counter()
        work = asyncio.create_task(
            replica.rollout([Prompt((0, 0), np.arange(2), "q", "1")], Sampling(2, 1.0, None))
        )
        assert await asyncio.wait_for(room, 5) >= 1 and time.perf_counter() - begin < 0.2
        await work
        assert await replica.wait_for_capacity(4, 3) == 2

    asyncio.run(main())


def test_the_loops_of_the_data_are_made_before_the_engine(tmp_path, monkeypatch):
    tiny_qwen.build_tokenizer().save_pretrained(tmp_path)
    cfg, made = Config(), []
    cfg.model.path = str(tmp_path)
    replica = RolloutReplica(cfg, 0, "cpu", [], loops=("single_turn", "retry_with_feedback"))

    def engine(_):
        made.extend(replica.loops.made)
        return SimpleNamespace(
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=7))
        )

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(AsyncEngineArgs=dict))
    llm = SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=engine))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)
    monkeypatch.setattr("gc.freeze", lambda: None)
    places, _ = asyncio.run(replica.start())
    assert places == 7
    assert made == ["single_turn", "retry_with_feedback"]


def test_replicas_ask_no_server_for_the_schemas_that_the_driver_has(monkeypatch):
    url, schema = (
        "http://127.0.0.1:9/mcp",
        {"name": "f", "description": "", "parameters": {"type": "object"}},
    )
    monkeypatch.setattr("agent_loop.tools.LISTED", {})
    monkeypatch.setattr("one_step_off.rollout.vllm_replica.LISTED", tools.LISTED)
    cfg = Config()
    cfg.agent.tools, cfg.agent.loop, cfg.agent.loop_kwargs = (
        f"mcp:{url}",
        "tool",
        {"tool": {"taught": True}},
    )
    with pytest.raises(ConfigError, match="the server lists no tools"):
        Loops(cfg, tiny_qwen.build_tokenizer()).get()
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()], {url: [schema]})
    replica.tokenizer = tiny_qwen.build_tokenizer()
    assert replica.loops.get().tools == [{"type": "function", "function": schema}]


def test_replicas_begin_with_different_scorers_and_a_dead_one_is_named():
    class Dead:
        async def remote(self, items):
            raise ActorDiedError

    async def main():
        scorers = [FakeScorer() for _ in range(3)]
        for replica in range(4):
            await RewardQueue(scorers, replica).score(item(0))
        with pytest.raises(RuntimeError, match="reward worker 0: its process died"):
            await RewardQueue([SimpleNamespace(score_batch=Dead())]).score(item(0))
        return [len(scorer.calls) for scorer in scorers]

    assert asyncio.run(main()) == [2, 1, 1]
