"""Episodes of several samples from a replica to the trainer: order, counts, the pool of prompts,
dropped groups, checkpoints."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

import numpy as np
import pytest

from one_step_off.checkpoint.files import read_batch, write_batch
from one_step_off.config.schema import Config
from one_step_off.data.episodes import EpisodeError, check_episodes, episode_numbers
from one_step_off.data.samples import Batch, Prompt, Sample
from one_step_off.rollout.batch_sources import FinishedBatch, InFlight
from one_step_off.rollout.prompt_pool import PooledPrompt, PromptPool
from one_step_off.rollout.scheduled_batches import ScheduledSource
from one_step_off.rollout.trajectory_run import missing_rewards
from tests.unit.data.episode_helpers import cut, make_sample
from tests.unit.rollout.test_prompt_router import group_of
from tests.unit.stand_ins import StandInActor, make_prompts


def episodes_of(row: int) -> list:
    """Two episodes of one prompt, with three and with two samples."""
    return [*cut(make_sample(0, row=row), [2, 4]), *cut(make_sample(1, row=row), [3])]


def test_segments_return_in_order_and_count_as_one_trajectory():
    async def rollout(prompts, sampling):
        return [s for prompt in prompts for s in reversed(episodes_of(prompt.id[1]))]

    group = group_of([StandInActor(rollout=rollout)], n=2)
    samples, _ = asyncio.run(group.generate(make_prompts(0, 1), "step 0", group.train_sampling))
    places = [(s.prompt_id, s.index, s.extra["segment"]["index"]) for s in samples]
    assert len(places) == 10
    assert places == sorted(places)
    check_episodes(samples)
    load = group.router.loads[0]
    assert (load.sent, load.returned) == (4, 4)


def test_the_pool_keeps_episodes_whole():
    pool = PromptPool(groups_per_step=1, staleness=2)
    pool.begin([PooledPrompt(prompt, turn=0, version=0) for prompt in make_prompts(0, 1)])
    pool.add_complete(episodes_of(1))
    assert pool.generating == 1
    pool.add_complete(episodes_of(0))
    first = pool.take(0)
    second = pool.take(1)
    for samples in (first, second):
        check_episodes(samples)
        assert episode_numbers(samples).tolist() == [0, 0, 0, 1, 1]
    assert [s.extra.get("carried") for s in second] == [1] * 5
    assert pool.metrics(second, 1)["carry/groups"] == 1.0


def test_a_batch_with_an_incomplete_episode_is_refused():
    samples = episodes_of(0)
    cfg = Config()

    def batch_of(given):
        restored = InFlight([FinishedBatch(0, given, 0, 0, 0.0)])
        source = ScheduledSource(cfg, None, None, restored=restored)
        return asyncio.run(source.batch(0))[0]

    assert batch_of(samples).prompt_order() == [(0, 0)]
    with pytest.raises(EpisodeError, match="sample 1: has the segments"):
        batch_of(samples[:-1])


def test_dropping_a_prompt_drops_all_its_segments():
    batch = Batch(0, [*episodes_of(0), *episodes_of(1)], (0, 0))
    batch.advantages = [np.ones(len(s.response_ids), np.float32) for s in batch.samples]
    batch.drop({(0, 0)})
    check_episodes(batch.samples)
    assert [s.prompt_id for s in batch.samples] == [(0, 1)] * 5
    assert [s.prompt_id for s in batch.dropped] == [(0, 0)] * 5
    assert len(batch.advantages) == 5
    assert batch.prompt_order() == [(0, 1), (0, 0)]


def test_segments_come_back_from_a_file(tmp_path):
    samples = episodes_of(3)
    samples[1].extra["tool_calls"] = [{"turn": 0, "name": "calculator", "arguments": "{}"}]
    batch = Batch(2, copy.deepcopy(samples), (0, 1))
    write_batch(batch, tmp_path / "step")
    found = read_batch(tmp_path / "step")
    assert [s.extra for s in found.samples] == [s.extra for s in samples]
    assert episode_numbers(found.samples).tolist() == [0, 0, 0, 1, 1]
    for a, b in zip(found.samples, samples, strict=True):
        assert replace(a, **arrays(b)) == replace(b, **arrays(b))
        np.testing.assert_array_equal(a.response_ids, b.response_ids)


def arrays(sample):
    """Its arrays, which == cannot compare."""
    return {name: value for name, value in vars(sample).items() if isinstance(value, np.ndarray)}


def test_rewards_of_agents_are_expected_in_all_rows_of_their_kind():
    """Also of another prompt; rows with another data_source may have the function's."""

    def episode(number: int, data_source: str, own: float | None) -> tuple[Prompt, list[Sample]]:
        prompt = Prompt((0, number), np.arange(2, dtype=np.int32), "q", "1", data_source)
        extra = {} if own is None else {"agent": {"own_reward": own}}
        nothing = np.zeros(0, np.float32)
        return prompt, [
            Sample(prompt.id, 0, prompt.ids, nothing, nothing, nothing, nothing, extra=extra)
        ]

    kinds = [("a", 1.0), ("a", 0.0), ("b", 0.0), ("a", None)]
    episodes = [episode(number, *kind) for number, kind in enumerate(kinds)]
    missing = missing_rewards([prompt for prompt, _ in episodes], [made for _, made in episodes])
    assert list(missing) == [1]
