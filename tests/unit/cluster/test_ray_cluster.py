"""The patches of Ray: they must fail here, and not in a run, when Ray changes what they build
on."""

from __future__ import annotations

import inspect
import mmap
import socket
import threading
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services, worker

from one_step_off.cluster import ray_cluster
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config

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
    """Another release: read the patched functions again, adjust them if need be, and name the
    release in them."""
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


# --- joining and starting ------------------------------------------------------------------------

GRPC_SETTINGS = b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0"  # what a gRPC server sends first
HTTP_ANSWER = b"HTTP/1.1 400 Bad Request\r\n\r\n"


def serve_once(server: socket.socket, answer: bytes) -> str:
    """Answer one connection in a thread; returns the address."""

    def accept() -> None:
        connection, _ = server.accept()
        connection.sendall(answer)
        connection.close()

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_an_address_where_nothing_answers_is_refused_at_once():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        words = f"RAY_ADDRESS={address}: no Ray cluster answers there"
        with pytest.raises(ConfigError, match=words):
            ray_cluster.require_cluster(address)


def test_an_address_where_another_program_answers_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = serve_once(server, HTTP_ANSWER)
        with pytest.raises(ConfigError, match="another program answers; start one with ray start"):
            ray_cluster.require_cluster(address)


def test_an_address_where_a_grpc_server_answers_is_good():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_cluster.require_cluster(serve_once(server, GRPC_SETTINGS))


def test_ray_resolves_other_addresses_by_itself():
    ray_cluster.require_cluster("auto")


def test_a_cluster_that_refuses_the_connection_is_named(monkeypatch):
    """Ray's head asks for a token, which the error of `ray.init` does not mention."""

    def refuse(**options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at x")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    words = "Ray does not start: ConnectionError: Failed to connect.*RAY_ADDRESS and RAY_AUTH_"
    with pytest.raises(ConfigError, match=words):
        ray_cluster.start_ray(Config())
