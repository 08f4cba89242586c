"""The patches of Ray: they must fail here, and not in a run, when Ray changes what they build on."""

from __future__ import annotations

import inspect
import mmap
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services, worker

from one_step_off.cluster import ray_cluster

RAYLET = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"


@pytest.fixture
def print_function(monkeypatch):
    """Ray's function, which is put back after the test."""
    original = worker.print_to_stdstream
    if isinstance(original, ray_cluster.PrintOtherLines):
        original = original.print_lines
    monkeypatch.setattr(worker, "print_to_stdstream", original)
    return original


def test_the_patches_were_written_for_this_ray():
    """Another release: read the patched functions again, adjust them if need be, and name the release in them."""
    major, minor, *_ = ray.__version__.split(".")
    release = f"Ray {major}.{minor}"
    assert release in ray_cluster.hide_worker_death_reports.__doc__
    assert release in ray_cluster.use_loopback_address.__doc__


def test_ray_prints_errors_through_the_function_that_is_patched(print_function):
    assert list(inspect.signature(print_function).parameters) == ["data", "ignore_prefix"]
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)


def test_ray_still_reports_deaths_in_the_words_that_are_left_out():
    with (
        open(RAYLET, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary,
    ):
        assert binary.find(ray_cluster.WORKER_DIED.encode()) >= 0


def test_only_the_report_of_a_death_is_left_out(print_function, monkeypatch, capsys):
    printed = []
    monkeypatch.setattr(
        worker, "print_to_stdstream", lambda data, ignore_prefix: printed.append(data["lines"][0])
    )
    ray_cluster.hide_worker_death_reports()
    ray_cluster.hide_worker_death_reports()  # a second run in this process
    died = f"The worker died or was {ray_cluster.WORKER_DIED}. There are some potential causes"
    for line in (died, "the node is low on memory"):
        worker.print_to_stdstream({"lines": [line]}, ignore_prefix=False)
    assert printed == ["the node is low on memory"]


def test_ray_takes_the_loopback_address_where_it_cannot_form_clusters(monkeypatch):
    monkeypatch.setattr(worker, "_global_node", None)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    ray_cluster.use_loopback_address(True)
    assert services.get_node_ip_address() == "127.0.0.1"
    ray_cluster.use_loopback_address(False)
    assert ray_constants.ENABLE_RAY_CLUSTER
