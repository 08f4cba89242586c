"""A back end of the user's own, as docs/how_to/add_a_trainer_back_end.md has it: found by its name,
trained with, and refused in a sentence where it is none."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.registry import BACK_ENDS
from one_step_off.runtime import prepare as prepare_module
from one_step_off.runtime import processes
from one_step_off.runtime.processes import RunProcesses
from one_step_off.runtime.validation import validate
from one_step_off.training.back_ends import worker_class
from one_step_off.training.fsdp import fsdp_workers
from tests.unit.training.fsdp_helpers import MODELS, config, end, make_batch, start, write_model

OWN = """
    from one_step_off.training.fsdp import fsdp_workers


    class CountingActor(fsdp_workers.ActorWorker):
        steps = 0

        def _clip_and_step(self, grad_norm, learning_rate):
            super()._clip_and_step(grad_norm, learning_rate)
            self.steps += 1


    WORKERS = {**fsdp_workers.WORKERS, "actor": CountingActor}
    ONE_ROLE = {"actor": CountingActor}
    NO_TABLE = CountingActor
"""
KEYS = [
    "model.path=tiny:qwen2",
    "model.dtype=float32",
    "data.train_files=generator:word_problems",
    "placement.device=cpu",
    "trainer.total_steps=2",
]


@pytest.fixture
def models(tmp_path) -> Iterator[dict[str, str]]:
    write_model(MODELS["untied"](), tmp_path / "untied")
    yield {"untied": str(tmp_path / "untied")}
    end()


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    """A folder with the user's module, from which the program was started."""
    (tmp_path / "own_back_end.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_back_ends_of_this_program_are_found():
    assert worker_class("actor.backend", "fsdp", "actor") is fsdp_workers.ActorWorker
    assert worker_class("actor.backend", "fsdp", "supervised") is fsdp_workers.SupervisedWorker


def test_a_users_back_end_trains(own, models):
    cfg = load_config([*KEYS, "actor.backend=own_back_end:WORKERS"])
    validate(cfg, num_gpus=0, machine=False)
    prepare_module.check_own_back_ends(cfg)
    cls = worker_class("actor.backend", cfg.actor.backend, "actor")
    assert cls.__name__ == "CountingActor"
    own_config = config(models["untied"], actor__backend=cfg.actor.backend)
    worker = start(own_config, cls=cls)
    before = [tensor.clone() for tensor in worker.weight_tensors()]
    worker.released = worker.version  # as after a sync
    worker.update(make_batch(models["untied"]))
    assert worker.steps > 0
    after = list(worker.weight_tensors())
    assert any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_its_ranks_are_created(own, monkeypatch):
    created = []
    monkeypatch.setattr(processes, "spawn", lambda cls, *_: created.append(cls))
    run = object.__new__(RunProcesses)
    run.cfg = load_config([*KEYS, "actor.backend=own_back_end:WORKERS"])
    run.device = "cpu"

    class Stand:
        pools = {"actor": [None]}
        host = ""

        def slot_share(self, pool):
            return 1.0

    run.engines = Stand()
    stream = type("Stream", (), {"total_steps": 3})
    run.prepared = type("Inputs", (), {"data": type("Data", (), {"stream": stream})})
    run._spawn_ranks("actor", run.cfg)
    assert [cls.__name__ for cls in created] == ["CountingActor"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("own_back_end:ONE_ROLE", "has no worker for the role ref, only actor; add one"),
        ("own_back_end:NO_TABLE", "is no dict of worker classes by role; name one"),
        ("own_back_end:WORKER", "did you mean own_back_end:WORKERS"),
    ],
)
def test_what_is_no_back_end_is_refused_before_any_engine_starts(spec, words, own):
    keys = ["placement.roles={rollout: rollout, actor: actor, ref: actor}", "algorithm.kl_coef=0.1"]
    cfg = load_config([*KEYS, *keys, f"actor.backend={spec}"])
    validate(cfg, num_gpus=0, machine=False)
    with pytest.raises(ConfigError, match=words):
        prepare_module.check_own_back_ends(cfg)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.backend=fdsp", "did you mean fsdp"),
        ("actor.backend=vllm", "must be one of fsdp, megatron, or your own as module:TABLE"),
        ("actor.backend=no_such_module:WORKERS", "no such back end"),
    ],
)
def test_an_unknown_name_is_refused(key, words):
    with pytest.raises(ConfigError, match=words):
        validate(load_config([*KEYS, key]), num_gpus=0, machine=False)


def test_every_name_is_a_value_that_the_config_takes():
    for name in BACK_ENDS:
        assert name in load_config([f"actor.backend={name}"]).actor.backend
