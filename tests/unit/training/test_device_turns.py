"""A role that shares its devices gives back, at the end of each call, what torch only keeps."""

from __future__ import annotations

import contextlib

import pytest
import torch

from one_step_off.cluster.resource_usage import release_cached_memory
from one_step_off.training import model_worker
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import config, make_batch

SHARED = {"rollout": "all", "actor": "all"}
OWN = {"rollout": "rollout", "actor": "actor"}


@pytest.fixture
def releases(monkeypatch):
    """The device of each release, in order."""
    recorded = []

    def release(device):
        recorded.append(device)

    monkeypatch.setattr(model_worker, "release_cached_memory", release)
    return recorded


def after_each_call(worker, batch, folder, releases):
    """How often each of a worker's calls gave memory back."""
    folder.mkdir()
    calls = {
        "log_prob": lambda: worker.log_prob(batch),
        "score": lambda: worker.score([s.response_ids for s in batch.samples]),
        "update": lambda: worker.update(batch),
        "save_state": lambda: (worker.save_state(str(folder)), worker.saved()),
        "load_state": lambda: worker.load_state(str(folder)),
    }
    counts = {}
    for name, call in calls.items():
        before = len(releases)
        call()
        counts[name] = len(releases) - before
    return counts


def test_a_role_in_a_shared_pool_gives_back_at_the_end_of_each_turn(
    model_folders, start_single, tmp_path, releases
):
    path = model_folders["tied"]
    worker = start_single(config(path, placement__roles=SHARED), cls=PolicyWorker)
    assert len(releases) == 1, "what loading needed"
    counts = after_each_call(worker, make_batch(path), tmp_path / "state", releases)
    assert counts == {"log_prob": 1, "score": 1, "update": 1, "save_state": 0, "load_state": 1}
    assert set(releases) == {torch.device("cpu")}


def test_a_role_with_devices_of_its_own_keeps_its_cache(
    model_folders, start_single, tmp_path, releases
):
    path = model_folders["tied"]
    worker = start_single(config(path, placement__roles=OWN), cls=PolicyWorker)
    after_each_call(worker, make_batch(path), tmp_path / "state", releases)
    assert releases == []


def test_gradients_are_gone_before_the_memory_is_given_back(
    model_folders, start_single, monkeypatch
):
    path = model_folders["tied"]
    worker = start_single(config(path, placement__roles=SHARED), cls=PolicyWorker)
    held = []

    def count_gradients(_):
        held.append(sum(p.grad is not None for p in worker.model.parameters()))
        held.append(worker.version)

    monkeypatch.setattr(model_worker, "release_cached_memory", count_gradients)
    worker.update(make_batch(path))
    assert held == [0, 1]


def test_only_gpus_have_a_cache(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))

    @contextlib.contextmanager
    def on_device(device):
        calls.append(str(device))
        yield

    monkeypatch.setattr(torch.cuda, "device", on_device)
    release_cached_memory(torch.device("cpu"))
    assert calls == []
    release_cached_memory(torch.device("cuda", 1))
    assert calls == ["cuda:1", "empty_cache"]


def test_the_peaks_of_memory_by_kind(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 9 + device.index)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5 + device.index)
    cfg = config("unused")
    on_cpu = PolicyWorker(cfg, "actor", 0, 1, "cpu").peak_memory_parts()
    assert on_cpu.keys() == {"resident"}
    assert on_cpu["resident"] > 1 << 20
    worker = PolicyWorker(cfg, "actor", 0, 1, "cuda")
    worker.device = torch.device("cuda", 2)
    assert worker.peak_memory_parts()["reserved"] == 11
    assert worker.peak_memory_bytes() == 7
