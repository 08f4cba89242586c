"""What is in flight, into a checkpoint and out of it."""

from __future__ import annotations

import json

from one_step_off.checkpoint.in_flight import restored_in_flight, samples_and_state
from one_step_off.rollout.batch_sources import FinishedBatch, InFlight
from one_step_off.rollout.prompt_pool import PooledPrompt
from tests.unit.rollout.test_prompt_pool import make_prompt, make_sample


def find(prompt_id):
    return make_prompt(prompt_id[1])


def test_what_is_written_is_read():
    prompts = [make_prompt(row) for row in range(5)]
    batches = [
        FinishedBatch(5, [make_sample(prompts[0], i, [3]) for i in range(2)], 3, 0, 1.5),
        FinishedBatch(6, [make_sample(prompts[1], i, [3]) for i in range(3)], 3, 0, 2.5),
    ]
    pool = [
        PooledPrompt(prompts[2], 7, 4, [make_sample(prompts[2], 0, [4, 5])]),
        PooledPrompt(prompts[3], 7, 5, notes={"replaces": [[0, 9]]}),
        PooledPrompt(prompts[4], 8, 5, [make_sample(prompts[4], i, [5]) for i in range(2)]),
    ]
    samples, state = samples_and_state(InFlight(batches, pool, {0: 2}))
    state = json.loads(json.dumps(state)) | {"step": 5, "incarnation": 1}
    found = restored_in_flight(state, samples, find)
    assert found.past == {0: 2, 1: 5}
    assert found.batches == batches
    for entry, expected in zip(found.pool, pool, strict=True):
        assert entry.prompt.id == expected.prompt.id
        assert (entry.turn, entry.version) == (expected.turn, expected.version)
        assert entry.samples == expected.samples
        assert entry.notes == expected.notes


def test_nothing_in_flight_has_no_samples():
    samples, state = samples_and_state(InFlight())
    assert samples is None
    found = restored_in_flight(state | {"step": 3, "incarnation": 0}, [], find)
    assert found == InFlight(past={0: 3})
