"""The pool of unfinished prompts: the bookkeeping alone."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rollout.partial_rollouts import PartialRolloutPool
from one_step_off.runtime.validation import validate
from tests.conftest import tiny_config


def make_prompt(row: int) -> Prompt:
    return Prompt((0, row), np.arange(2, dtype=np.int32), "q", "1")


def make_sample(
    prompt: Prompt, index: int, versions: list[int], length: int | None = None
) -> Sample:
    """A sample whose tokens were made by these versions, in order, repeated up to `length`."""
    made_by = np.sort(np.resize(np.array(versions, np.int32), length or len(versions)))
    count = len(made_by)
    return Sample(
        prompt.id,
        index,
        prompt.ids,
        response_ids=np.arange(count, dtype=np.int32),
        log_probs=np.zeros(count, np.float32),
        loss_mask=np.ones(count, bool),
        versions=made_by,
        reward=float(index),
    )


class PoolWalk:
    """A pool that is filled and emptied as a run does, with groups completed in random order."""

    def __init__(self, groups_per_step: int, max_carry: int, oversample: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = PartialRolloutPool(groups_per_step, max_carry)
        self.oversample = oversample
        self.begun: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []
        self.generating: list[Prompt] = []

    def begin(self, version: int, step: int) -> None:
        """The prompts that the replicas begin when they have received `version`, during `step`."""
        size = self.pool.groups_per_step
        waits_for_step = version == step
        most = math.ceil((waits_for_step + self.oversample) * size)
        prompts = []
        for _ in range(most - len(self.pool.unfinished)):
            prompts.append(make_prompt(len(self.begun)))
            self.begun.append(prompts[-1].id)
        self.pool.begin(prompts, version, version + 1)
        self.generating += prompts

    def complete_one(self) -> None:
        assert self.generating, "everything is complete, and the step still waits"
        prompt = self.generating.pop(self.random.randrange(len(self.generating)))
        self.pool.add_complete([make_sample(prompt, 0, [0])])

    def take(self, step: int) -> None:
        entries = self.pool.unfinished.values()
        last_steps = {entry.prompt.id: entry.last_step for entry in entries}
        complete = {entry.prompt.id for entry in entries if entry.samples}
        prompts = [sample.prompt_id for sample in self.pool.take(step)]
        assert len(prompts) == self.pool.groups_per_step
        assert set(prompts) <= complete
        assert all(last_steps[prompt] >= step for prompt in prompts), "a prompt came too late"
        positions = [self.begun.index(prompt) for prompt in prompts]
        assert positions == sorted(positions)
        self.taken += prompts


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6))
def test_every_prompt_is_taken_once_and_in_time_whatever_is_complete_first(
    data, size, max_carry, seed
):
    oversample = data.draw(st.floats(1.0, 1 + max_carry))
    walk = PoolWalk(size, max_carry, oversample, seed)
    for step in range(1, 9):
        walk.begin(step - 1, step)
        # The next prompts may be begun before this step's are complete.
        if walk.random.random() < 0.5:
            walk.begin(step, step)
        while not walk.pool.choose(step):
            walk.complete_one()
        walk.take(step)
    assert len(walk.taken) == len(set(walk.taken)), "a prompt was trained on twice"
    assert set(walk.taken) | set(walk.pool.unfinished) == set(walk.begun), "a prompt was skipped"


def test_the_first_complete_groups_win_unless_another_is_due():
    pool = PartialRolloutPool(2, max_carry=1)
    pool.begin([make_prompt(row) for row in range(4)], version=0, step=1)
    for row in (3, 1):
        pool.add_complete([make_sample(make_prompt(row), 0, [0])])
    samples = pool.take(1)
    assert [sample.prompt_id[1] for sample in samples] == [1, 3]
    assert all("carried" not in sample.extra for sample in samples)
    pool.begin([make_prompt(4), make_prompt(5)], version=1, step=2)
    for row in (4, 5):
        pool.add_complete([make_sample(make_prompt(row), 0, [1])])
    assert pool.choose(2) == [], "0 and 2 are due in step 2, and not complete"
    for row in (0, 2):
        pool.add_complete([make_sample(make_prompt(row), 0, [0, 1])])
    samples = pool.take(2)
    assert [sample.prompt_id[1] for sample in samples] == [0, 2]
    assert [sample.extra["carried"] for sample in samples] == [1, 1]
    assert pool.generating == 0
    assert list(pool.unfinished) == [(0, 4), (0, 5)]


def test_metrics_tell_which_groups_are_late_and_that_short_ones_came_first():
    pool = PartialRolloutPool(2, max_carry=1)
    on_time = [make_sample(make_prompt(row), 0, [0], length=4) for row in (0, 1)]
    assert pool.metrics(on_time, 1) == {
        "carry/under_way": 0,
        "carry/groups": 0,
        "carry/interrupted": 0,
        "carry/old_tokens": 0,
        "carry/length_bias": 1.0,
    }
    late = [make_sample(make_prompt(2), i, [0, 1], length=20) for i in range(2)]
    for sample in late:
        sample.extra["carried"] = 1
    on_time = [
        make_sample(make_prompt(3), 0, [1], length=4),
        make_sample(make_prompt(4), 0, [1], length=8),
    ]
    found = pool.metrics([*late, *on_time], 2)
    assert found["carry/groups"] == 1
    assert found["carry/interrupted"] == 0.5
    assert found["carry/old_tokens"] == pytest.approx(20 / 52)
    # Those that are on time have 4 and 8 tokens; since the start there were 60 tokens in 6 samples.
    assert found["carry/length_bias"] == pytest.approx(6.0 / 10.0)


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"pipeline.partial_rollout": True, "pipeline.staleness": 0}, "pipeline.staleness=1"),
        ({"rollout.oversample": 1.5}, "pipeline.partial_rollout=true"),
        ({"pipeline.partial_rollout": True, "rollout.oversample": 2.5}, "use 2 at most"),
        ({"pipeline.partial_rollout": True, "algorithm.max_gen_batches": 2}, "set it to 1"),
    ],
)
def test_keys_that_do_not_fit_partial_rollouts_are_refused(models, tmp_path, keys, fix):
    with pytest.raises(ConfigError, match=fix):
        validate(tiny_config(models("qwen2", True), str(tmp_path), **keys), 0)
