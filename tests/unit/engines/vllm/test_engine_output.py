"""The weight version and log-prob of every token, and the seeds of samples."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from one_step_off.config.schema import Config
from one_step_off.engines.engine import GenerationRequest
from one_step_off.engines.vllm.engine import (
    experts_of,
    generated_tokens,
    sampling_params,
    token_versions,
)
from one_step_off.engines.vllm.schedulers import COLUMN
from one_step_off.rollout.sampling import sample_seed


class Span(NamedTuple):
    """As vLLM reports which weights made which tokens."""

    version: str
    start: int
    end: int


def test_versions_are_read_per_token():
    attempt, versions = token_versions([Span("2.7", 0, 3), Span("2.8", 3, 5)], 5)
    assert attempt == 2
    assert versions.tolist() == [7, 7, 7, 8, 8]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [Span("0.1", 0, 2)],
        [Span("0.1", 1, 3)],
        [Span("0.1", 0, 2), Span("1.1", 2, 3)],
    ],
)
def test_a_token_without_one_known_version_is_refused(spans):
    with pytest.raises(RuntimeError, match="stamped 3 tokens"):
        token_versions(spans, 3)


def last_output(flat: list[float], column: list[float] | None) -> RequestOutput:
    """Of a request for three tokens."""
    completion = CompletionOutput(0, "", [5, 6, 7], None, None, finish_reason="length")
    completion.logprobs = FlatLogprobs(logprobs=flat)
    completion.weight_versions = [Span("0.3", 0, 3)]
    kept = None if column is None else {COLUMN: np.array(column, np.float32).tobytes()}
    return RequestOutput("a", None, [1], None, [completion], True, kv_transfer_params=kept)


@pytest.mark.parametrize(
    ("flat", "column"), [([], [-0.5, -1.25, -0.75]), ([-0.5, -1.25, -0.75], None)]
)
def test_log_probs_are_read_from_the_column_or_from_vllms_lists(flat, column):
    made = generated_tokens(last_output(flat, column))
    assert (made.ids.tolist(), made.versions.tolist()) == ([5, 6, 7], [3, 3, 3])
    assert made.log_probs.tolist() == [-0.5, -1.25, -0.75]
    assert made.log_probs.dtype == np.float32


@pytest.mark.parametrize(("flat", "column"), [([], None), ([], [-0.5]), ([-0.5, -1.0], None)])
def test_a_token_without_a_log_prob_is_refused(flat, column):
    with pytest.raises(RuntimeError, match="log-probs for 3 tokens"):
        generated_tokens(last_output(flat, column))


def test_draft_tokens_are_counted():
    output = last_output([-0.5, -1.25, -0.75], None)
    assert generated_tokens(output).draft_tokens is None
    counts = RequestSpecDecodeMetrics.new(4)
    for proposed, accepted in [(4, 0), (4, 3), (2, 2)]:
        counts.observe(proposed, accepted)
    output.outputs[0].spec_decode_metrics = counts
    assert generated_tokens(output).draft_tokens == (10, 5)


@pytest.mark.parametrize("tokens", [None, 0, 2, 4])
def test_experts_of_some_tokens_alone_are_refused(tokens):
    output = last_output([-0.5, -1.0, -2.0], None)
    if tokens is not None:
        output.outputs[0].routed_experts = np.zeros((tokens, 2, 2), np.uint8)
    with pytest.raises(RuntimeError, match=f"the experts of {tokens or 0} tokens, not of 3"):
        experts_of(output)
    output.outputs[0].routed_experts = np.zeros((3, 2, 2), np.uint8)
    assert experts_of(output) is output.outputs[0].routed_experts


@pytest.mark.parametrize(
    ("run_stop", "stop", "asks"),
    [(None, (), True), ("end", (), False), (None, ("end",), False), ([], (), False)],
)
def test_a_column_is_asked_for_where_the_engine_alone_ends_the_request(run_stop, stop, asks):
    cfg = Config()
    if run_stop is not None:
        cfg.rollout.sampling_kwargs = {"stop": run_stop}
    request = GenerationRequest(np.array([1], np.int32), 4, 1.0, stop=stop)
    params = sampling_params(cfg, request)
    assert (COLUMN in (params.extra_args or {})) == asks
    assert (params.logprobs, params.n) == (0, 1)


def test_seeds_differ_for_all_neighbors_and_fit_into_63_bits():
    places = list(itertools.product(range(3), range(-1, 3), range(20), range(16)))
    seeds = {sample_seed(seed, (epoch, row), i) for seed, epoch, row, i in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, (0, 5), 2) == sample_seed(1, (0, 5), 2)
    # vLLM makes further seeds by adding: no two of ours may be that close.
    gaps = [b - a for a, b in itertools.pairwise(sorted(seeds))]
    assert min(gaps) > 64


def test_each_turn_has_a_seed_of_its_own_and_the_first_that_of_a_single_turn():
    assert len({sample_seed(7, (0, 0), 0, turn) for turn in range(5)}) == 5
    assert sample_seed(7, (0, 0), 0, 0) == sample_seed(7, (0, 0), 0)
