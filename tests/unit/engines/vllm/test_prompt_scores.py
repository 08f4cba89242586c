"""What vLLM's log-probs of given tokens become."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from one_step_off.config.schema import Config
from one_step_off.engines.vllm.prompt_scores import log_probs_of, top_log_probs_of
from one_step_off.engines.vllm.teacher_engine import TeacherEngine, teacher_engine_args

pytest.importorskip("vllm")

# Of each token but the first, as vLLM gives them: the token itself, then the likeliest.
ROWS = [{5: -2.0, 8: -0.5, 9: -1.5}, {8: -0.25, 9: -1.75}, {7: -9.0, 30: -0.1, 6: -4.0}]
IDS = np.array([1, 5, 8, 7], np.int32)


async def answer(ids: np.ndarray, params: Any) -> SimpleNamespace:
    """The engine's output for IDS."""
    assert params.max_tokens == 1
    assert ids.tolist() == IDS.tolist()
    rows = [{t: SimpleNamespace(logprob=x) for t, x in row.items()} for row in ROWS]
    return SimpleNamespace(prompt_logprobs=[None, *rows])


def test_the_log_probs_of_all_tokens_but_the_first() -> None:
    found = asyncio.run(log_probs_of(answer, IDS))
    assert found.dtype == np.float32
    assert found.tolist() == [-2.0, -0.25, -9.0]


def test_the_likeliest_tokens_whether_or_not_the_token_is_one_of_them() -> None:
    found = asyncio.run(top_log_probs_of(answer, IDS, first=2, count=2))
    expected = [[-0.25, -0.25, -1.75, 8, 9], [-9.0, -0.1, -4.0, 30, 6]]
    np.testing.assert_allclose(found, expected)


def engine_with(top_k: int, vocabulary: int) -> TeacherEngine:
    """A teacher's engine that answers as `answer`."""
    cfg = Config()
    cfg.teacher.top_k = top_k
    engine = TeacherEngine(cfg, 0, "cpu")
    engine.vocabulary = vocabulary
    engine._request = answer
    return engine


def test_a_responses_tokens_are_scored_and_an_empty_one_has_none() -> None:
    work = ([IDS, IDS], [2, 4])
    plain = asyncio.run(engine_with(0, 31).score_responses(work))
    assert [array.tolist() for array in plain] == [[-0.25, -9.0], []]
    top = asyncio.run(engine_with(2, 31).score_responses(work))
    assert [array.shape for array in top] == [(2, 5), (0, 5)]


def test_a_token_that_the_student_does_not_have_is_named() -> None:
    with pytest.raises(RuntimeError, match="token 30, and the student has 30; .*backend=fsdp"):
        asyncio.run(engine_with(2, 30).score_responses(([IDS], [2])))


@pytest.mark.parametrize("top_k", [0, 2])
def test_log_probs_that_are_nan_end_the_run(top_k: int) -> None:
    """vLLM loads a quantized checkpoint without its scales, and then computes NaN."""

    async def nan(ids: np.ndarray, params: Any) -> SimpleNamespace:
        output = await answer(ids, params)
        output.prompt_logprobs[2][8].logprob = float("nan")
        return output

    engine = engine_with(top_k, 31)
    engine._request = nan
    engine.cfg.teacher.path = "org/teacher"
    with pytest.raises(RuntimeError, match="teacher.path=org/teacher: vLLM's log-probs are NaN; "):
        asyncio.run(engine.score_responses(([IDS], [2])))


def test_the_engine_takes_the_longest_response_and_its_own_arguments() -> None:
    cfg = Config()
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor", "teacher": "teacher"}
    cfg.placement.pools = {"rollout": [1], "actor": [1], "teacher": [1]}
    cfg.teacher.path = "org/teacher"
    cfg.teacher.backend = "vllm"
    cfg.teacher.top_k = 12
    cfg.teacher.engine_kwargs = {"max_num_seqs": 3}
    args = teacher_engine_args(cfg, "cpu")
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    assert args["model"] == "org/teacher"
    assert args["max_model_len"] == longest + 1
    assert args["max_logprobs"] == 12
    assert args["max_num_seqs"] == 3
    assert not args["enable_chunked_prefill"]
    on_gpu = teacher_engine_args(cfg, "cuda")
    assert on_gpu["gpu_memory_utilization"] == cfg.rollout.gpu_memory_utilization
