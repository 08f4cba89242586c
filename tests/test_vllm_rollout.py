"""What a replica does around the engine; the engine itself is in the e2e tests."""

from __future__ import annotations

import asyncio
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

from agent_loop.single_turn import Generated
from one_step_off.config import Config
from one_step_off.groups import RolloutGroup
from one_step_off.rewards import RewardItem
from one_step_off.samples import Prompt
from one_step_off.vllm_rollout import RewardQueue, RolloutReplica, Sampling, engine_args, sample_seed, stamps_of

Span = namedtuple("Span", "version start end")


def test_stamps_are_read_per_token():
    incarnation, versions = stamps_of([Span("2.7", 0, 3), Span("2.8", 3, 5)], 5)
    assert incarnation == 2
    assert versions.tolist() == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    "spans", [None, [], [Span("0.1", 0, 2)], [Span("0.1", 1, 3)], [Span("0.1", 0, 2), Span("1.1", 2, 3)]]
)
def test_a_token_without_one_known_stamp_is_refused(spans):
    with pytest.raises(RuntimeError, match="stamped 3 tokens"):
        stamps_of(spans, 3)


def test_seeds_differ_for_all_neighbours_and_fit_into_63_bits():
    seeds = {sample_seed(s, (e, r), i) for s in range(3) for e in range(-1, 3) for r in range(20) for i in range(16)}
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
            raise ValueError("bad reward")
        special = {"late": None, "parts": {"right": 1.0, "form": 0.5}}
        return [special.get(i.response, float(i.index)) for i in items]


def item(index: int, response: str = "x") -> RewardItem:
    return RewardItem((0, 0), index, "q", response, "1")


def test_rewards_come_back_to_their_own_samples_in_few_calls():
    async def main():
        queue = RewardQueue(FakeScorer(0.02))
        rewards = await asyncio.gather(*(queue.score(item(i)) for i in range(50)))
        return rewards, queue.scorer.calls

    rewards, calls = asyncio.run(main())
    assert rewards == [float(i) for i in range(50)]
    assert len(calls) <= 2 and sum(calls) == 50


def test_a_failing_reward_reaches_its_callers_and_later_ones_still_work():
    async def main():
        queue = RewardQueue(FakeScorer(fail_on="boom"))
        with pytest.raises(ValueError, match="bad reward"):
            await queue.score(item(0, "boom"))
        return await queue.score(item(3))

    assert asyncio.run(main()) == 3.0


async def generated(ids, seed, sampling):
    return Generated(np.arange(2), np.full(2, sampling.temperature), np.zeros(2), 0, "stop")


@pytest.mark.parametrize(
    ("response", "reward", "extra"),
    [
        ("late", 0.0, {"reward_timeout": True}),
        ("x", 3.0, {}),
        ("parts", 1.5, {"reward_parts": {"right": 1.0, "form": 0.5}}),
    ],
)
def test_what_the_scorer_says_of_a_sample(response, reward, extra):
    replica = RolloutReplica(Config(), 0, "cpu", FakeScorer())
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: response), generated
    prompt = Prompt((0, 0), np.arange(2), "q", "1")
    sample = asyncio.run(replica._trajectory(prompt, 3, Sampling(1, 1.0, None)))
    assert (sample.reward, sample.extra) == (reward, extra)


@pytest.mark.parametrize("estimator", ["remax", "grpo", f"{__name__}:generated"])
def test_a_greedy_response_beside_the_samples_where_the_estimator_needs_baselines(estimator):
    cfg = Config()
    cfg.algorithm.adv_estimator, cfg.rollout.n = estimator, 2
    generated.needs, wanted = ("baselines",), estimator != "grpo"
    group = RolloutGroup([], cfg, seeded=True)
    assert (group.train.greedy, group.val.greedy) == (wanted, False)
    replica = RolloutReplica(cfg, 0, "cpu", FakeScorer())
    replica.tokenizer, replica._generate = SimpleNamespace(decode=lambda *_, **__: "x"), generated
    replica.stamp = (0, 0)
    prompts = [Prompt((0, row), np.arange(2), "q", "1") for row in range(2)]
    samples, _ = asyncio.run(replica.rollout(prompts, group.train))
    found = [(s.prompt_id[1], s.index, s.log_probs[0], s.extra) for s in samples]
    greedy = {"greedy": True}
    assert found == [(row, i, float(i < 2), greedy if i == 2 else {}) for row in range(2) for i in range(2 + wanted)], (
        "its temperature is 0, and it is scored like the others"
    )
    assert [s.reward for s in samples] == [float(s.index) for s in samples]


def test_nothing_is_generated_before_verified_weights():
    replica = RolloutReplica(Config(), 4, "cpu", FakeScorer())
    with pytest.raises(RuntimeError, match="rollout replica 4 has no verified weights"):
        asyncio.run(replica.rollout([], Sampling(1, 1.0, None)))


class BrokenEngine:
    def __init__(self) -> None:
        self.resumed = False

    async def pause_generation(self, **_):
        pass

    async def collective_rpc(self, *_, **__):
        raise RuntimeError("checksum of bucket 1 differs")

    async def resume_generation(self):
        self.resumed = True


def test_after_a_failed_sync_the_engine_stays_paused_and_unused():
    replica = RolloutReplica(Config(), 0, "cpu", FakeScorer())
    replica.engine, replica.stamp = BrokenEngine(), (0, 3)
    with pytest.raises(RuntimeError, match="checksum"):
        asyncio.run(replica.sync((0, 4)))
    assert not replica.engine.resumed
    with pytest.raises(RuntimeError, match="no verified weights"):
        asyncio.run(replica.rollout([], Sampling(1, 1.0, None)))


class SleepyEngine:
    """Writes down what it is told; awake it must not be woken, asleep it must not be put to sleep again."""

    def __init__(self) -> None:
        self.told: list = []

    async def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        self.told += tags

    async def collective_rpc(self, method: str, args: tuple) -> list[dict]:
        self.told.append(method)
        return [{"bytes": 1.0}]

    async def pause_generation(self, **_) -> None: ...
    async def update_weight_version(self, _) -> None: ...
    async def resume_generation(self) -> None: ...


def test_a_colocated_engine_sleeps_between_its_turns_and_wakes_for_the_sync():
    for device, told in (
        ("cuda", ["sync_weights", "sleep 2", "weights", "sync_weights", "kv_cache"]),
        ("cpu", ["sync_weights", "sync_weights"]),
    ):
        replica = RolloutReplica(Config(), 0, device, FakeScorer())
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


def test_engine_arguments():
    cfg = Config()
    cfg.rollout.engine_kwargs = {"max_num_seqs": 7}
    cpu, gpu = engine_args(cfg, "cpu"), engine_args(cfg, "cuda")
    assert cpu["max_num_seqs"] == gpu["max_num_seqs"] == 7
    assert cpu["kv_cache_memory_bytes"] == 256 << 20 and not cpu["enable_chunked_prefill"]
    assert cpu["max_num_batched_tokens"] >= cpu["max_model_len"] == 512 + 1024
    assert gpu["gpu_memory_utilization"] == 0.85 and "kv_cache_memory_bytes" not in gpu
    assert not gpu["enable_sleep_mode"]
    cfg.placement.roles = {"rollout": "all", "actor": "all"}
    assert engine_args(cfg, "cuda")["enable_sleep_mode"]
    assert cpu["logprobs_mode"] == gpu["logprobs_mode"] == "processed_logprobs"
