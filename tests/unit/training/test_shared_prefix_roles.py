"""What every role computes where the samples of a prompt share it is what it computes for each
alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import transformers

from one_step_off.algorithms.shared_prefixes import SharingRule
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import (
    MODELS,
    OBJECTIVES,
    SIZES,
    VOCAB,
    Recorder,
    RecordingCritic,
    assert_gradients_equal,
    config,
    make_batch,
    write_model,
)
from tests.unit.training.test_packed_roles import assert_same_arrays, assert_same_metrics

ALWAYS = SharingRule(1.0, 0.0, 0.0, least_saving=0.0, least_gain=0.0, row_tokens=60)
PACKINGS = ("auto", "on")


def grouped(path, seed):
    return make_batch(path, prompts=4, n=5, seed=seed)


def worker_of(start_single, rule, role, cls, path, packing="auto", **changes):
    """A worker whose batches make several micro-batches, most of them with shared prefixes."""
    settings = {"actor__packing": packing, "actor__micro_batch_tokens": 60} | changes
    worker = start_single(config(path, **settings), role=role, cls=cls)
    assert worker.batch_share.sharing.row_tokens == 60
    worker.batch_share.sharing = rule
    return worker


def assert_alike_but_for_the_share(shared, plain):
    assert shared.pop("actor/shared_prefix_share", 1.0) > 0.2
    assert_same_metrics(shared, plain)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_the_actor_trains_alike(model_folders, start_single, name, seed, packing):
    path = model_folders[name]
    objective = OBJECTIVES["sequences" if seed == 2 else "everything"]
    gradients = []
    metrics = []
    for rule in (ALWAYS, None):
        worker = worker_of(start_single, rule, "actor", Recorder, path, packing, **objective)
        metrics.append(worker.update(grouped(path, seed)))
        gradients.append(worker.gradients)
    assert_gradients_equal(*gradients)
    assert_alike_but_for_the_share(*metrics)
