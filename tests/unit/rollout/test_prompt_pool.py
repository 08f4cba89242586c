"""The pool of prompts in progress: the bookkeeping alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.schema import Config
from one_step_off.config.sync_schedule import prompts_allowed
from one_step_off.data.samples import Prompt, Sample
from one_step_off.rollout.prompt_pool import PooledPrompt, PromptPool


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

    def __init__(self, cfg: Config, seed: int) -> None:
        self.cfg = cfg
        self.random = random.Random(seed)
        self.pool = PromptPool(cfg.data.train_batch_size, cfg.pipeline.staleness)
        self.begun: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []
        self.generating: list[Prompt] = []

    def begin(self, version: int) -> None:
        """The prompts that the replicas begin when they have received `version`."""
        allowed = prompts_allowed(self.cfg, version)
        begun = [make_prompt(row) for row in range(len(self.begun), allowed)]
        self.begun += [prompt.id for prompt in begun]
        size = self.pool.groups_per_step
        self.pool.begin([PooledPrompt(prompt, prompt.id[1] // size, version) for prompt in begun])
        self.generating += begun

    def complete_one(self) -> None:
        assert self.generating, "everything is complete, and the step still waits"
        prompt = self.generating.pop(self.random.randrange(len(self.generating)))
        self.pool.add_complete([make_sample(prompt, 0, [0])])

    def take(self, step: int) -> None:
        entries = self.pool.prompts.values()
        last_steps = {entry.prompt.id: self.pool.last_step(entry) for entry in entries}
        complete = {entry.prompt.id for entry in entries if entry.samples}
        prompts = [sample.prompt_id for sample in self.pool.take(step)]
        assert len(prompts) == self.pool.groups_per_step
        assert set(prompts) <= complete
        assert all(last_steps[prompt] >= step for prompt in prompts), "a prompt came too late"
        positions = [self.begun.index(prompt) for prompt in prompts]
        assert positions == sorted(positions)
        self.taken += prompts


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
def test_every_prompt_is_taken_once_and_in_time_whatever_is_complete_first(size, staleness, seed):
    """The inequality of the schedule leaves a place for each prompt in a step that it may train
    in."""
    cfg = Config()
    cfg.data.train_batch_size = size
    cfg.pipeline.staleness = staleness
    walk = PoolWalk(cfg, seed)
    walk.begin(0)
    for step in range(1, 12):
        if walk.random.random() < 0.5:  # this step's groups are complete before the sync
            while not walk.pool.choose(step - 1):
                walk.complete_one()
            walk.take(step - 1)
            walk.begin(step)
        else:
            walk.begin(step)
            while not walk.pool.choose(step - 1):
                walk.complete_one()
            walk.take(step - 1)
    assert len(walk.taken) == len(set(walk.taken)), "a prompt was trained on twice"
    assert set(walk.taken) | set(walk.pool.prompts) == set(walk.begun), "a prompt was skipped"


def begin_prompts(pool: PromptPool, rows: range, version: int, turn: int) -> None:
    pool.begin([PooledPrompt(make_prompt(row), turn, version) for row in rows])


def test_the_first_complete_groups_win_unless_another_is_due():
    pool = PromptPool(2, staleness=2)
    begin_prompts(pool, range(4), version=0, turn=1)
    for row in (3, 1):
        pool.add_complete([make_sample(make_prompt(row), 0, [0])])
    samples = pool.take(1)
    assert [sample.prompt_id[1] for sample in samples] == [1, 3]
    assert all("carried" not in sample.extra for sample in samples)
    begin_prompts(pool, range(4, 6), version=1, turn=2)
    for row in (4, 5):
        pool.add_complete([make_sample(make_prompt(row), 0, [1])])
    assert pool.choose(2) == [], "0 and 2 are due in step 2, and not complete"
    for row in (0, 2):
        pool.add_complete([make_sample(make_prompt(row), 0, [0, 1])])
    samples = pool.take(2)
    assert [sample.prompt_id[1] for sample in samples] == [0, 2]
    assert [sample.extra["carried"] for sample in samples] == [1, 1]
    assert pool.generating == 0
    assert list(pool.prompts) == [(0, 4), (0, 5)]


def test_metrics_tell_which_groups_are_late_and_that_short_ones_came_first():
    pool = PromptPool(2, staleness=2)
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
