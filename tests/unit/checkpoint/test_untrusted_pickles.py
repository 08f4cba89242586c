"""Pickles in a checkpoint: nothing of them is run, whatever they hold."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

from one_step_off import checkpoint
from one_step_off.config.errors import ConfigError
from tests.unit.checkpoint.checkpoint_helpers import assert_refused, rewrite_manifest


class Evil:
    """Unpickled, it makes a file named `pwned` in the working folder."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_pickle_that_would_run_something_is_refused_and_not_run(run, start_single, monkeypatch):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    (path / "actor" / ".metadata").write_bytes(pickle.dumps(Evil()))
    rewrite_manifest(path)
    with pytest.raises(
        ConfigError,
        match=r"the part of the actor does not fit .*names posix.system, which is not allowed",
    ):
        start_single(cfg).load_state(str(path))
    assert_refused(
        run, "actor/.metadata: UnpicklingError: names posix.system, which is not allowed there"
    )
    assert not Path("pwned").exists()
    pickle.loads(pickle.dumps(Evil()))
    assert Path("pwned").exists(), "it would have"


def test_a_pickle_inside_of_a_data_file_is_not_run(run, start_single, monkeypatch):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    worker = start_single(cfg)
    real = worker._state()
    real["optimizer"]["param_groups"][0]["lr"] = Evil()
    dcp.save(real, checkpoint_id=path / "actor")
    rewrite_manifest(path)
    assert checkpoint.find(cfg) == path, "the driver cannot see it"
    with pytest.raises(ConfigError, match="the part of the actor does not fit its model"):
        worker.load_state(str(path))  # which asks for it
    assert not Path("pwned").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("name", ["actor_rank_0.npz", "samples.npz"])
def test_a_pickle_inside_of_an_array_is_not_run(run, start_single, monkeypatch, name):
    cfg, path = run
    monkeypatch.chdir(path.parent)
    np.savez(
        path / name,
        **dict.fromkeys(("version", "prompt_lengths"), np.array([Evil()], object)),
        allow_pickle=True,
    )
    rewrite_manifest(path)
    with pytest.raises((ConfigError, ValueError), match="allow_pickle=False"):
        start_single(cfg).load_state(str(path)) if name.startswith(
            "actor"
        ) else checkpoint.read_samples(path)
    assert not Path("pwned").exists()
