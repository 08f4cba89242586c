"""The prompt stream: each prompt once per epoch, and an exact resume."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt


def stream_of(
    rows: int, batch: int, shuffle: bool = True, seed: int = 0, **length: Any
) -> PromptStream:
    """A stream over `rows` prompts whose row numbers are not their positions."""
    prompts = [Prompt((0, 3 * i + 1), np.array([i], np.int32), str(i), str(i)) for i in range(rows)]
    return PromptStream(prompts, batch, shuffle, seed, **(length or {"steps": 10}))


sizes = st.integers(1, 12)


@given(
    rows=sizes,
    batch=st.integers(1, 30),
    steps=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_no_prompt_is_lost_or_repeated(
    rows: int, batch: int, steps: int, shuffle: bool, seed: int
) -> None:
    stream = stream_of(rows, batch, shuffle, seed)
    batches = [stream.next_batch() for _ in range(steps)]
    assert all(len(b) == batch for b in batches)
    ids = [p.id for b in batches for p in b]
    assert len(set(ids)) == len(ids)
    assert [e for e, _ in ids] == sorted(e for e, _ in ids)
    per_epoch = Counter(e for e, _ in ids)
    for epoch in range(max(per_epoch)):
        assert per_epoch[epoch] == rows
    assert {r for _, r in ids} <= {3 * i + 1 for i in range(rows)}
    assert all(p.text == str((p.id[1] - 1) // 3) for b in batches for p in b)


@given(
    rows=sizes,
    first=st.integers(1, 30),
    second=st.integers(1, 30),
    before=st.integers(0, 8),
    after=st.integers(1, 8),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_resume_is_exact(
    rows: int, first: int, second: int, before: int, after: int, shuffle: bool, seed: int
) -> None:
    whole = stream_of(rows, first, shuffle, seed)
    for _ in range(before):
        whole.next_batch()
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed = stream_of(rows, first, shuffle, seed)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    expected = [p.id for _ in range(after) for p in whole.next_batch()]
    assert [p.id for _ in range(after) for p in resumed.next_batch()] == expected
    # Another batch size continues at the same prompt.
    other = stream_of(rows, second, shuffle, seed)
    other.load_state_dict(saved)
    actual = [p.id for _ in range(after) for p in other.next_batch()]
    common = min(len(actual), len(expected))
    assert actual[:common] == expected[:common]


@given(rows=sizes, batch=st.integers(1, 30), epochs=st.integers(1, 5))
def test_total_epochs_sees_every_prompt(rows: int, batch: int, epochs: int) -> None:
    stream = stream_of(rows, batch, epochs=epochs)
    ids = [p.id for _ in range(stream.total_steps) for p in stream.next_batch()]
    assert sum(e < epochs for e, _ in ids) == rows * epochs
    assert 0 <= len(ids) - rows * epochs < batch


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int) -> list[int]:
        stream = stream_of(50, 50, seed=seed)
        return [p.id[1] for _ in range(2) for p in stream.next_batch()]

    assert order(1) == order(1) != order(2)
    assert order(1)[:50] != order(1)[50:]
    assert [p.id[1] for p in stream_of(5, 5, shuffle=False).next_batch()] == [1, 4, 7, 10, 13]


def test_another_stream_does_not_resume() -> None:
    state = stream_of(10, 3).state_dict()
    for other in (stream_of(11, 3), stream_of(10, 3, seed=1), stream_of(10, 3, shuffle=False)):
        with pytest.raises(ConfigError, match="other prompts or another order"):
            other.load_state_dict(state)
        assert other.state_dict()["epoch"] == other.state_dict()["offset"] == 0
