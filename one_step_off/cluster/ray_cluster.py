"""Ray itself: joining a cluster or starting one, and the cleanup of what a run leaves behind."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from one_step_off.cluster import process_cleanup
from one_step_off.config.errors import as_config_error
from one_step_off.config.placement import devices_of_pool
from one_step_off.config.schema import Config

# The first bytes of an HTTP/2 connection, as a gRPC client sends them: the preface and an empty
# SETTINGS frame.
HTTP2_SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS_FRAME
HTTP2_SETTINGS_TYPE = b"\4"
CONNECT_TIMEOUT_S = 10
EXTRA_CPUS = 2  # for Ray's own tasks, beside one CPU per process of ours
SHORT_PATH = 40  # characters; a socket's path in the run's folder has 107 at most
WORKER_DIED = "killed while executing a task by an unexpected system error"


def require_cluster(address: str) -> None:
    """Refuse a RAY_ADDRESS where no Ray cluster answers; Ray itself would retry for minutes.

    Args:
        address: the value of RAY_ADDRESS. Only "host:port" is checked; Ray resolves "auto" and the
            like by itself.

    Raises:
        ConfigError: nothing answers there, or something that does not speak gRPC.
    """
    host, _, port = address.rpartition(":")
    is_host_and_port = host and "/" not in host and port.isdecimal()
    if not is_host_and_port:
        return
    what = f"RAY_ADDRESS={address}: no Ray cluster answers there"
    fix = "start one with ray start --head, or unset RAY_ADDRESS to use this machine alone"
    with as_config_error(what, fix, (OSError, OverflowError)):
        target = (host.strip("[]"), int(port))
        with socket.create_connection(target, timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(HTTP2_GREETING)
            if os.environ.get("RAY_USE_TLS"):
                return
            # Bytes 0 to 2 are the frame's length, byte 3 is its type.
            frame_type = connection.recv(4)[3:]
            if frame_type != HTTP2_SETTINGS_TYPE:
                raise ConnectionError("another program answers")


def start_ray(cfg: Config) -> str:
    """Join the cluster that RAY_ADDRESS names, or start one that listens on this machine's loopback
    only.

    Returns:
        Ray's session folder.

    Raises:
        ConfigError: Ray does not start, no cluster answers, or it refuses the connection.
    """
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    joins_cluster = bool(os.environ.get("RAY_ADDRESS"))
    use_loopback_address(not joins_cluster)
    hide_worker_death_reports()
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    token_hint = ""
    if joins_cluster:
        token_hint = " and RAY_AUTH_TOKEN (with RAY_AUTH_MODE=token) where it asks for one"
    else:
        options |= _local_options(cfg)
    fix = f"check RAY_ADDRESS{token_hint}, and that TMPDIR has free space and a short path"
    errors = (OSError, ValueError, RuntimeError, ray.exceptions.RayError)
    with as_config_error("Ray does not start", fix, errors):
        context: Any = ray.init(**options)
        return context.address_info["session_dir"]


def _local_options(cfg: Config) -> dict[str, Any]:
    """The arguments of `ray.init` for a cluster of this machine alone."""
    # One logical CPU per process of ours: several processes may share a core, which Ray's own count
    # would refuse.
    num_processes = sum(devices_of_pool(cfg, pool) for pool in cfg.placement.pools)
    return {
        # Without "local" Ray would join a cluster that another `ray start` left on this machine.
        "address": "local",
        "num_cpus": num_processes + EXTRA_CPUS,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }


def use_loopback_address(enabled: bool) -> None:
    """Patch of Ray 2.60 (`ray._private.ray_constants`): whether Ray takes 127.0.0.1 as this node's
    address.

    Reason: Ray replaces a given 127.0.0.1 by the machine's address in the network and listens
    there, unless this constant says that the platform cannot form clusters (as on Windows and
    macOS)."""
    import ray

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = not enabled


class PrintOtherLines:
    """In place of Ray's function that prints lines: it leaves out the report of a process that
    died."""

    def __init__(self, print_lines: Callable[..., None]) -> None:
        self.print_lines = print_lines

    def __call__(self, data: dict[str, Any], ignore_prefix: bool) -> None:
        """Print `data["lines"]`, unless they report a death. The arguments are those of Ray's
        function."""
        if WORKER_DIED not in data["lines"][0]:
            self.print_lines(data, ignore_prefix=ignore_prefix)


def hide_worker_death_reports() -> None:
    """Patch of Ray 2.60 (`ray._private.worker.print_to_stdstream`): leave out its report of a
    process that died.

    Reason: `ray.init` has no option for it. Ray prints ten lines for each such process, between
    those of the run. The run reports the failure in one line, and the ten lines stay in Ray's logs.
    """
    import ray

    worker_module = ray._private.worker
    if not isinstance(worker_module.print_to_stdstream, PrintOtherLines):
        worker_module.print_to_stdstream = PrintOtherLines(worker_module.print_to_stdstream)


@contextlib.contextmanager
def cleanup_after_run() -> Iterator[None]:
    """Give the block a folder for temporary files, and end all that it started once it is over.

    A small process outlives this one and cleans up, also when this one is killed; see
    `process_cleanup.py`."""
    parent = tempfile.gettempdir()
    if len(parent) >= SHORT_PATH:
        parent = "/tmp"
    folder = tempfile.mkdtemp(prefix="one_step_off_", dir=parent)
    started_at = time.time() - 1
    command = [sys.executable, "-P", process_cleanup.__file__, folder, str(started_at)]
    # A session of its own, or Ctrl-C in the terminal would end it before the run.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        os.environ[process_cleanup.RUN_FOLDER_VARIABLE] = folder
        # Without it setproctitle would overwrite the environment by which the cleanup recognizes
        # processes.
        os.environ["SPT_NOENV"] = "1"
        yield
