"""Which log-probs leave the engine's process, and when. Real engines are compared in
tests/e2e/test_log_prob_scheduler.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from one_step_off.engines.vllm.schedulers import LogProbsAtEnd

Step = dict[str, tuple[list[int], FinishReason | None]]
"""Request -> the tokens of one step, and why it ended."""


def log_probs_of(tokens: list[int]) -> LogprobsLists:
    """Others for each token."""
    column = np.array(tokens)[:, None]
    return LogprobsLists(column, -column / 10, np.array(tokens) + 100)


def scheduler_of(requests: dict[str, SimpleNamespace]) -> LogProbsAtEnd:
    scheduler = object.__new__(LogProbsAtEnd)
    scheduler.requests = requests
    return scheduler


def request_of(
    kind: RequestOutputKind | None, stop: str | list[str] | None = None
) -> SimpleNamespace:
    params = None if kind is None else SamplingParams(logprobs=0, output_kind=kind, stop=stop)
    return SimpleNamespace(sampling_params=params)


@pytest.fixture
def run_step(monkeypatch: pytest.MonkeyPatch):
    """Runs one step; vLLM's method forgets the requests that end, as it does in an engine."""

    def run(scheduler: LogProbsAtEnd, step: Step, has_log_probs: bool = True) -> dict[str, Any]:
        def update(self, scheduler_output, model_runner_output):
            outputs = []
            for name, (tokens, reason) in step.items():
                log_probs = log_probs_of(tokens) if has_log_probs and tokens else None
                outputs.append(EngineCoreOutput(name, tokens, log_probs, finish_reason=reason))
                if reason is not None:
                    self.requests.pop(name, None)
            return {0: EngineCoreOutputs(outputs=outputs)}

        monkeypatch.setattr(Scheduler, "update_from_output", update)
        scheduled = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(step, 1))
        made = SimpleNamespace(logprobs=object() if has_log_probs else None)
        outputs = scheduler.update_from_output(scheduled, made)[0].outputs
        return {output.request_id: output for output in outputs}

    return run


def assert_equal(one: LogprobsLists, other: LogprobsLists) -> None:
    for part, expected in zip(one[:3], other[:3], strict=True):
        np.testing.assert_array_equal(part, expected)


def test_log_probs_leave_with_the_last_token_and_tokens_at_once(run_step):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY)})
    first = run_step(scheduler, {"a": ([3], None)})["a"]
    second = run_step(scheduler, {"a": ([4, 5], None)})["a"]
    last = run_step(scheduler, {"a": ([6], FinishReason.STOP)})["a"]
    assert (first.new_token_ids, second.new_token_ids) == ([3], [4, 5])
    assert first.new_logprobs is second.new_logprobs is None
    assert_equal(last.new_logprobs, log_probs_of([3, 4, 5, 6]))


def test_requests_do_not_mix(run_step):
    kind = RequestOutputKind.FINAL_ONLY
    scheduler = scheduler_of({"a": request_of(kind), "b": request_of(kind)})
    run_step(scheduler, {"a": ([1], None), "b": ([2], None)})
    assert_equal(
        run_step(scheduler, {"a": ([3], FinishReason.LENGTH)})["a"].new_logprobs,
        log_probs_of([1, 3]),
    )
    assert_equal(
        run_step(scheduler, {"b": ([4], FinishReason.LENGTH)})["b"].new_logprobs,
        log_probs_of([2, 4]),
    )


def test_a_name_that_is_used_again_begins_anew(run_step):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY)})
    run_step(scheduler, {"a": ([1], None)})
    scheduler.requests["a"] = request_of(RequestOutputKind.FINAL_ONLY)  # the first was aborted
    last = run_step(scheduler, {"a": ([2], FinishReason.STOP)})["a"]
    assert_equal(last.new_logprobs, log_probs_of([2]))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_streamed_requests_are_left_alone(run_step, kind):
    scheduler = scheduler_of({"a": request_of(kind)})
    assert_equal(run_step(scheduler, {"a": ([1], None)})["a"].new_logprobs, log_probs_of([1]))
    last = run_step(scheduler, {"a": ([2], FinishReason.STOP)})["a"]
    assert_equal(last.new_logprobs, log_probs_of([2]))


@pytest.mark.parametrize("stop", ["end", ["end", "stop"]])
def test_requests_that_the_client_ends_at_a_stop_string_are_left_alone(run_step, stop):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY, stop)})
    for token in (1, 2):
        output = run_step(scheduler, {"a": ([token], None)})["a"]
        assert_equal(output.new_logprobs, log_probs_of([token]))


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_string_is_no_reason_to_leave_a_request_alone(run_step, stop):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY, stop)})
    assert run_step(scheduler, {"a": ([1], None)})["a"].new_logprobs is None


def test_an_end_without_a_token_has_the_log_probs_of_all_before(run_step):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY)})
    run_step(scheduler, {"a": ([1], None)})
    last = run_step(scheduler, {"a": ([], FinishReason.STOP)})["a"]
    assert_equal(last.new_logprobs, log_probs_of([1]))


def test_an_aborted_request_and_one_without_sampling_are_left_alone(run_step):
    scheduler = scheduler_of({"pooling": request_of(None)})
    outputs = run_step(scheduler, {"gone": ([1], None), "pooling": ([], None)})
    assert_equal(outputs["gone"].new_logprobs, log_probs_of([1]))
    assert outputs["pooling"].new_logprobs is None


def test_nothing_is_done_where_no_request_asks_for_log_probs(run_step):
    scheduler = scheduler_of({"a": request_of(RequestOutputKind.FINAL_ONLY)})
    last = run_step(scheduler, {"a": ([1], FinishReason.STOP)}, has_log_probs=False)["a"]
    assert last.new_logprobs is None
