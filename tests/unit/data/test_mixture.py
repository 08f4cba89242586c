"""The stream of several sources: full batches by the weights, whole epochs of each source, and an
exact resume whatever was measured."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.config.sections.data import Curriculum, DifficultyFilter
from one_step_off.data.mixture import DrawRules, MixedStream, PromptSource
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Batch, Prompt, PromptId, Sample

FILTER = DifficultyFilter(2, max_dropped=0.5, return_after=2)


def prompts_of(rows: int, first_row: int = 0) -> list[Prompt]:
    """Prompts whose row numbers are not their positions, as where rows were skipped."""
    return [
        Prompt((0, first_row + 2 * i + 1), np.array([i], np.int32), str(i), str(i))
        for i in range(rows)
    ]


def stream_of(
    sizes: list[int], weights: list[float], batch: int = 4, draw: DrawRules | None = None, **length
) -> MixedStream:
    sources = []
    first_row = 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        sources.append(PromptSource(f"s{index}", prompts_of(size, first_row), weight))
        first_row += 2 * size
    return MixedStream(sources, batch, True, 3, draw=draw, **(length or {"steps": 10}))


def sample_of(prompt_id: PromptId, index: int, reward: float, **extra: Any) -> Sample:
    empty = np.zeros(0, np.int32)
    tokens = np.arange(5, dtype=np.int32)
    return Sample(
        prompt_id, index, empty, tokens, np.zeros(5), np.ones(5, bool), tokens, 0, reward,
        extra=extra,
    )  # fmt: skip


def batch_of(step: int, prompts: list[Prompt]) -> Batch:
    """Two samples per prompt, with rewards that depend on row, epoch and index."""
    samples = []
    for prompt in prompts:
        epoch, row = prompt.id
        hardness = row % 3  # never, sometimes, always
        for index in range(2):
            is_lucky = random.Random(f"{row} {epoch} {index}").random() < 0.5
            reward = float(hardness == 2 or (hardness == 1 and is_lucky))
            samples.append(sample_of(prompt.id, index, reward))
    return Batch(step, samples, (0, 0))


def run(stream: MixedStream, first: int, end: int, lag: int, pending: list[Batch]) -> list[Any]:
    """Steps `first` to `end` of a pipeline whose results are known `lag` steps late. Returns what
    it drew, and what it reported."""
    drawn = []
    for step in range(first, end):
        stream.begin_step(step, step - 1 - lag)
        batch = batch_of(step, stream.next_batch())
        drawn.append([list(id) for id in batch.prompt_order()])
        pending.append(batch)
        while len(pending) > lag:
            trained = pending.pop(0)
            drawn.append([stream.record(trained), trained.notes])
    return drawn


sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.3, 0.7, 1.0, 2.0])), min_size=1, max_size=3
)
draws = st.sampled_from(
    [
        DrawRules(),
        DrawRules(rules=FILTER),
        DrawRules(curriculum=Curriculum(max_interval=3)),
        DrawRules(rules=FILTER, curriculum=Curriculum()),
    ]
)


@settings(deadline=None)
@given(sources=sizes_and_weights, batch=st.integers(1, 9), draw=draws, lag=st.integers(0, 1))
def test_batches_are_full_by_the_weights_and_ids_are_unique(sources, batch, draw, lag) -> None:
    sizes = [size for size, _ in sources]
    weights = [weight for _, weight in sources]
    stream = stream_of(sizes, weights, batch, draw)
    ids = [tuple(i) for step in run(stream, 0, 12, lag, []) for i in step if isinstance(i, list)]
    assert len(ids) == 12 * batch
    assert len(set(ids)) == len(ids)
    source_of_row = {}
    first_row = 0
    for index, size in enumerate(sizes):
        source_of_row |= dict.fromkeys(range(first_row, first_row + 2 * size), index)
        first_row += 2 * size
    drawn = Counter(source_of_row[row] for _, row in ids)
    for index, weight in enumerate(weights):
        assert abs(drawn[index] - len(ids) * weight / sum(weights)) < 1 + 1e-9


@settings(deadline=None)
@given(sources=sizes_and_weights, seed=st.integers(0, 99))
def test_each_source_has_whole_epochs_of_its_own(sources, seed) -> None:
    stream = stream_of([size for size, _ in sources], [weight for _, weight in sources], 10)
    ids = [prompt.id for _ in range(20) for prompt in stream.next_batch()]
    for order in stream._orders:
        rows = {prompt.id[1] for prompt in order.prompts}
        epochs = [epoch for epoch, row in ids if row in rows]
        assert epochs == sorted(epochs)
        for epoch in range(max(epochs, default=0)):
            assert {row for e, row in ids if e == epoch and row in rows} == rows


def test_one_source_is_drawn_as_without_a_list() -> None:
    plain = PromptStream(prompts_of(7), 4, True, 3, 10)
    listed = stream_of([7], [0.3])
    expected = [prompt.id for _ in range(9) for prompt in plain.next_batch()]
    assert [prompt.id for _ in range(9) for prompt in listed.next_batch()] == expected
    assert listed.total_steps == plain.total_steps
    # So a checkpoint from before the filter was switched on fits.
    state = plain.state_dict()
    filtered = MixedStream(
        [PromptSource("", prompts_of(7))], 4, True, 3, 10, draw=DrawRules(1.0, FILTER)
    )
    filtered.load_state_dict(state)
    expected = [prompt.id for prompt in plain.next_batch()]
    assert [prompt.id for prompt in filtered.next_batch()] == expected


@settings(deadline=None)
@given(sources=sizes_and_weights, batch=st.integers(1, 9), epochs=st.integers(1, 3))
def test_total_epochs_sees_every_prompt_of_every_source(sources, batch, epochs) -> None:
    sizes = [size for size, _ in sources]
    weights = [weight for _, weight in sources]
    stream = stream_of(sizes, weights, batch, epochs=epochs)
    visits: Counter[int] = Counter()
    for step in range(stream.total_steps):
        if step == stream.total_steps - 1:
            assert min(visits[p.id[1]] for p in stream.prompts) < epochs, "a step too many"
        visits.update(prompt.id[1] for prompt in stream.next_batch())
    assert min(visits[prompt.id[1]] for prompt in stream.prompts) >= epochs


@settings(deadline=None, max_examples=60)
@given(
    sources=sizes_and_weights,
    batch=st.integers(1, 7),
    draw=draws,
    lag=st.integers(0, 1),
    stop=st.integers(1, 15),
)
def test_resume_is_exact(sources, batch, draw, lag, stop) -> None:
    """A checkpoint of step `stop` has its samples, and the results of all steps before it."""
    sizes = [size for size, _ in sources]
    weights = [weight for _, weight in sources]
    whole = stream_of(sizes, weights, batch, draw)
    pending: list[Batch] = []
    run(whole, 0, stop, lag, pending)
    saved = whole.state_dict()
    arrays = saved.pop("arrays", None)
    saved = json.loads(json.dumps(saved)) | ({"arrays": arrays} if arrays else {})
    expected = run(whole, stop, 20, lag, list(pending))
    resumed = stream_of(sizes, weights, batch, draw)
    resumed.next_batch()
    resumed.load_state_dict(saved)
    restored = [Batch(b.step, b.samples, (0, 0)) for b in pending]
    assert run(resumed, stop, 20, lag, restored) == expected


def test_the_draw_does_not_know_results_before_their_time() -> None:
    """A result of the step before may be there or not when a step is drawn: the draw is the
    same."""

    def drawn(early: bool) -> list[Any]:
        stream = stream_of([6], [1.0], 3, DrawRules(rules=DifficultyFilter(1, max_dropped=0.9)))
        ids = []
        waiting: list[Batch] = []
        for step in range(10):
            for batch in waiting[: None if early else -1]:
                stream.record(batch)
            waiting = [] if early else waiting[-1:]
            stream.begin_step(step, step - 2)
            prompts = stream.next_batch()
            ids.append([prompt.id for prompt in prompts])
            waiting.append(batch_of(step, prompts))
        return ids

    assert drawn(early=True) == drawn(early=False)


def test_metrics_of_sources_count_trajectories_once() -> None:
    stream = stream_of([3, 3], [1.0, 1.0], 2)
    stream.begin_step(0, -2)
    first, second = sorted(stream.next_batch(), key=lambda prompt: prompt.id[1])
    samples = [
        sample_of(first.id, 0, 1.0, replaced_visits=[[0, first.id[1], 2, 0]]),
        sample_of(first.id, 0, 1.0),  # a second segment
        sample_of(first.id, 1, 0.5),
        sample_of(first.id, 2, 0.0, error="its reward raised"),
        sample_of(first.id, 3, 9.0, greedy=True),
        sample_of(second.id, 0, 2.0),
    ]
    metrics = stream.record(Batch(0, samples, (0, 0)))
    assert metrics == {
        "source/s0/prompts": 1,
        "source/s0/reward/mean": 0.75,
        "source/s0/response_length/mean": 5,
        "source/s0/solve_rate": 0.25,
        "source/s0/epoch": pytest.approx(1 / 3),
        "source/s1/prompts": 1,
        "source/s1/reward/mean": 2.0,
        "source/s1/response_length/mean": 5,
        "source/s1/solve_rate": 1.0,
        "source/s1/epoch": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda: stream_of([5, 3], [0.7, 0.4]), "other sources or weights"),
        (lambda: stream_of([5], [1.0]), "other sources or weights"),
        (lambda: stream_of([5, 4], [0.7, 0.3]), "other prompts or another order"),
        (lambda: PromptStream(prompts_of(5), 4, True, 3, 10), "other prompts or another order"),
    ],
)
def test_another_stream_does_not_resume(other, problem) -> None:
    stream = stream_of([5, 3], [0.7, 0.3])
    stream.next_batch()
    with pytest.raises(ConfigError, match=problem):
        other().load_state_dict(stream.state_dict())
    same = stream_of([5, 3], [7, 3])
    same.load_state_dict(stream.state_dict())
    assert [p.id for p in same.next_batch()] == [p.id for p in stream.next_batch()]
