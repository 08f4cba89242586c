"""Two real engines, with vLLM's scheduler and with ours, give the same tokens and log-probs."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.runtime.process_env import CPU_ENGINE_ENV, process_env
from tests.conftest import tiny_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STOP = ["a", "e", "1", "2"]  # the tiny tokenizer's text has these often

Response = tuple[list[int], list[float]]
"""Tokens and their log-probs."""


def response_of(outputs: list[Any], is_streamed: bool) -> Response:
    """Join what an engine returned for one request."""
    from one_step_off.engines.vllm.schedulers import column_of

    column = column_of(outputs[-1])
    if column is not None:
        return list(outputs[-1].outputs[0].token_ids), column.tolist()
    parts = [output.outputs[0] for output in (outputs if is_streamed else outputs[-1:])]
    tokens = [token for part in parts for token in part.token_ids]
    log_probs = [value for part in parts for value in part.logprobs.logprobs]
    return tokens, log_probs


async def respond(engine: Any, number: int, kind: Any, stop: list[str] | None = None) -> Response:
    """One seeded request; each has its own length, except where a stop string ends it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from one_step_off.engines.vllm.schedulers import COLUMN

    asks_for_column = kind is RequestOutputKind.FINAL_ONLY and stop is None
    params = SamplingParams(
        temperature=1.0,
        max_tokens=3 + number,
        seed=number,
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=stop is not None,
        stop=stop,
        output_kind=kind,
        extra_args={COLUMN: True} if asks_for_column else None,  # vLLM's own scheduler ignores it
    )
    prompt = {"type": "token", "prompt_token_ids": [5 + number, 6, 7, 8]}
    outputs = [
        output async for output in engine.generate(prompt, params, f"{number}-{kind.name}-{stop}")
    ]
    return response_of(outputs, kind is RequestOutputKind.DELTA)


async def responses_of(arguments: dict[str, Any]) -> dict[str, list[Response]]:
    """Kind of output -> the responses of a new engine, while another request is aborted."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        responses = {}
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
            aborted = asyncio.ensure_future(respond(engine, 60, kind))
            asked = [asyncio.ensure_future(respond(engine, number, kind)) for number in range(12)]
            await asked[0]
            aborted.cancel()
            responses[kind.name] = list(await asyncio.gather(*asked))
        stopped = (
            respond(engine, number, RequestOutputKind.FINAL_ONLY, STOP) for number in range(12)
        )
        responses["stop"] = list(await asyncio.gather(*stopped))
        return responses
    finally:
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.ci
def test_same_tokens_and_log_probs_as_with_the_scheduler_of_vllm(models, tmp_path, monkeypatch):
    for name, value in {**process_env("cpu", "127.0.0.1"), **CPU_ENGINE_ENV}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    arguments = engine_args(tiny_config(models("qwen2", True, 0), str(tmp_path)), "cpu")
    assert arguments["scheduler_cls"].endswith(".replica_scheduler")
    arguments["max_model_len"] = 80
    own = asyncio.run(responses_of(arguments))
    theirs = asyncio.run(responses_of(arguments | {"scheduler_cls": None}))
    assert own == theirs
    stopped = own.pop("stop")
    assert all(len(tokens) == len(log_probs) for tokens, log_probs in stopped)
    assert sum(len(tokens) < 3 + number for number, (tokens, _) in enumerate(stopped)) >= 3
    for kind, responses in own.items():
        lengths = [(len(tokens), len(log_probs)) for tokens, log_probs in responses]
        assert lengths == [(3 + number,) * 2 for number in range(12)], kind
    assert own["FINAL_ONLY"] == own["DELTA"]
