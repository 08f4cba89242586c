"""Runs over two hosts, and runs whose cable is cut.

Each host is a network namespace. A virtual cable connects them, and both are nodes of a Ray
cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.commands import PROGRAM, TINY_CONFIG
from tests.e2e.run_folder import read_rows, used_prompts

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ADDRESS = {"a": "10.213.7.1", "b": "10.213.7.2"}  # used by these two hosts alone
CABLE = "cable"  # the name of the cable's end on both hosts
PORT = 6379
START_TIMEOUT_S = 90  # limits of a run here
SYNC_TIMEOUT_S = 10
# A sync that breaks (its own limit, that of the other processes, and a ping), three restarts of
# failed processes, and the end of the run.
BOUND_S = 3 * SYNC_TIMEOUT_S + 3 * START_TIMEOUT_S + 60


def ip(*arguments: str, check: bool = True) -> str:
    """The output of the command `ip`. Raises OSError if it fails and `check` is set."""
    finished = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if check and finished.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {finished.stderr.strip()}")
    return finished.stdout


def kill_processes(namespace: str) -> None:
    """Kill every process in a network namespace."""
    for pid in ip("netns", "pids", namespace, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def remove_orphaned_hosts() -> None:
    """Remove the hosts of tests that were killed themselves."""
    for namespace, pid in re.findall(r"^(oso(\d+)[ab])\b", ip("netns", "list"), re.M):
        if not psutil.pid_exists(int(pid)):
            kill_processes(namespace)
            ip("netns", "del", namespace, check=False)


class Hosts:
    """Hosts `a` and `b`. They share the files and the host name, which resolves to the loopback
    address on each of them."""

    def __init__(self) -> None:
        self.namespaces = {host: f"oso{os.getpid()}{host}" for host in ADDRESS}
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        # Ray's sockets are in this folder, and the path of a socket must be short.
        self.temp_folder = tempfile.mkdtemp(prefix="oso", dir="/tmp")
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Create both namespaces, and the cable between them."""
        for namespace in self.namespaces.values():
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        end_of_b = ["peer", "name", CABLE, "netns", self.namespaces["b"]]
        ip("-n", self.namespaces["a"], "link", "add", CABLE, "type", "veth", *end_of_b)
        for host, namespace in self.namespaces.items():
            ip("-n", namespace, "address", "add", f"{ADDRESS[host]}/24", "dev", CABLE)
        self.plug_in()

    def plug_in(self) -> None:
        """Connect the cable at both ends."""
        for namespace in self.namespaces.values():
            ip("-n", namespace, "link", "set", CABLE, "up")

    def cut(self) -> None:
        """Disconnect the cable from `b`. Connections stay open, and what they send is dropped."""
        ip("-n", self.namespaces["b"], "link", "set", CABLE, "down")

    def limit_bandwidth(self, megabits: int) -> None:
        """Limit each direction to these megabits per second, so that a transfer takes a while."""
        shaping = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
        for host in self.namespaces:
            self.execute(host, "tc", "qdisc", "replace", "dev", CABLE, *shaping)

    def transferred_bytes(self) -> int:
        """The bytes that have crossed the cable in the busier direction."""
        (link,) = json.loads(ip("-n", self.namespaces["a"], "-s", "-j", "link", "show", CABLE))
        statistics = link["stats64"]
        return max(statistics["rx"]["bytes"], statistics["tx"]["bytes"])

    def popen(self, host: str, *command: str, **variables: str) -> subprocess.Popen:
        """Start a command on a host, with these environment variables. Its errors are in its
        output."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = str(ROOT)
        environment["RAY_USAGE_STATS_ENABLED"] = "0"
        environment.update(self.token)
        environment.update(variables)
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[host], *command],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def execute(self, host: str, *command: str) -> None:
        """Run a command on a host. Raises OSError if it fails."""
        words = ["ip", "netns", "exec", self.namespaces[host], *command]
        finished = subprocess.run(words, capture_output=True, text=True, timeout=20)
        if finished.returncode:
            raise OSError(f"{' '.join(command)}: {finished.stderr.strip()}")

    def start_ray(self, host: str, cpus: int) -> None:
        """Make a host a node of the Ray cluster, with this number of CPUs. `a` is the head."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
        command.append(f"--node-ip-address={ADDRESS[host]}")
        command.append(f"--num-cpus={cpus}")
        command.append("--disable-usage-stats")
        command.append("--object-store-memory=100000000")
        if host == "a":
            command.append("--head")
            command.append(f"--port={PORT}")
            command.append(f"--temp-dir={self.temp_folder}")
            command.append("--include-dashboard=false")
        else:
            command.append(f"--address={ADDRESS['a']}:{PORT}")
        process = self.popen(host, *command)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output

    def kill_all(self, host: str) -> None:
        """Kill every process on a host."""
        kill_processes(self.namespaces[host])

    def start_run(self, folder: Path, changes: dict[str, object]) -> subprocess.Popen:
        """Start the tiny run without evaluations on `a`, with these values by dotted key."""
        settings: dict[str, object] = {
            "trainer.output_dir": folder,
            "data.val_files": "",
            "trainer.start_timeout_s": START_TIMEOUT_S,
        }
        settings.update(changes)
        overrides = [f"{key}={value}" for key, value in settings.items()]
        ray_address = f"{ADDRESS['a']}:{PORT}"
        return self.popen("a", *PROGRAM, TINY_CONFIG, *overrides, RAY_ADDRESS=ray_address)

    def close(self) -> None:
        """Kill all processes, and remove both hosts."""
        for namespace in self.namespaces.values():
            kill_processes(namespace)
            ip("netns", "del", namespace, check=False)  # removes its end of the cable too
        shutil.rmtree(self.temp_folder, ignore_errors=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"two hosts are made with {' and '.join(missing)}, which this machine lacks")
    try:
        remove_orphaned_hosts()
        two_hosts = Hosts()
    except OSError as error:
        pytest.skip(f"two hosts need root, network namespaces and veth: {error}")
    with contextlib.closing(two_hosts):
        yield two_hosts


def assert_steps(folder: Path, count: int) -> None:
    """The ledger has each step once, in order, and no prompt twice."""
    assert [row["step"] for row in read_rows(folder, "ledger.jsonl")] == list(range(count))
    assert len(used_prompts(folder)) == 16 * count


@pytest.mark.parametrize(
    ("cpus", "actor_pool", "placement"),
    [
        pytest.param(
            (1, 1),
            [1],
            r"([\d.]+): rollout; pool actor \[1\] on (?!\1:)[\d.]+: actor",
            id="a_role_each",
        ),
        pytest.param(
            (2, 1),
            [1, 1],
            r"\S+ rollout; pool actor \[1, 1\] on ([\d.]+) (?!\1:)[\d.]+: actor",
            id="ranks_on_both",
        ),
    ],
)
def test_a_run_over_the_cable(hosts, models, tmp_path, cpus, actor_pool, placement):
    """Each role on its own host. Then a trainer with ranks on both hosts, so that its collectives
    cross the cable too."""
    hosts.start_ray("a", cpus[0])
    hosts.start_ray("b", cpus[1])
    bytes_before = hosts.transferred_bytes()
    begin = time.monotonic()
    changes = {
        "placement.pools": f"{{rollout: [1], actor: {actor_pool}}}",
        "model.path": models(),
        "trainer.total_steps": 4,
    }
    run = hosts.start_run(tmp_path, changes)
    output, _ = run.communicate(timeout=400)
    print(f"{time.monotonic() - begin:.0f} s")
    assert run.returncode == 0, output
    assert re.search(r"created pool rollout \[1\] on " + placement, output), output
    assert_steps(tmp_path, 4)
    metrics = read_rows(tmp_path, "metrics.jsonl")
    model_bytes = metrics[-1]["sync/full_bytes"]
    assert model_bytes > 3e6
    synced_bytes = [row["sync/bytes"] for row in metrics]
    assert synced_bytes == [0, model_bytes, model_bytes, model_bytes]
    # A fourth sync comes before the first step. With ranks on both hosts, half of the model may
    # stay on its host.
    transferred_bytes = hosts.transferred_bytes() - bytes_before
    assert transferred_bytes >= 4 * model_bytes / len(actor_pool)
    assert all(row["canary/logprob_diff_max"] < 1e-4 for row in metrics)


def cut_during_a_sync(hosts: Hosts, run: subprocess.Popen, folder: Path, model_bytes: int) -> None:
    """Cut the cable while weights cross it, after the first checkpoint."""
    deadline = time.monotonic() + 200
    first_checkpoint = folder / "checkpoints" / "step_000002"
    counts = deque([hosts.transferred_bytes()], maxlen=10)
    while not first_checkpoint.is_dir() or counts[-1] - counts[0] < model_bytes / 4:
        if run.poll() is not None or time.monotonic() >= deadline:
            pytest.fail(run.communicate(timeout=1)[0])
        time.sleep(0.02)
        counts.append(hosts.transferred_bytes())
    assert counts[-1] - counts[0] < model_bytes * 3 / 4, "the sync is over; nothing was cut"
    hosts.cut()


def slow_run_settings(model: str) -> dict[str, Any]:
    """Eight steps with a checkpoint after every second one, and short time limits of syncs."""
    return {
        "model.path": model,
        "trainer.total_steps": 8,
        "trainer.save_freq": 2,
        "weight_sync.timeout_s": SYNC_TIMEOUT_S,
        "placement.pools": "{rollout: [1], actor: [2]}",
        "trainer.step_timeout_s": 4 * START_TIMEOUT_S,
    }


def assert_error_names_the_failed_part(output: str) -> None:
    """The error of the run names the sync or the role that failed."""
    errors = [line for line in output.splitlines() if line.startswith("error: the run ended by")]
    pattern = (
        r"by \w+: "
        r"(weight sync of version \d+, (rollout|trainer rank) \d|.*(rollout|actor|replica))"
    )
    assert errors, output
    assert re.search(pattern, errors[0]), output


@pytest.mark.parametrize(
    ("remote_role", "reconnect_after_s"),
    [
        pytest.param("rollout", None, id="rollout"),
        pytest.param("actor", None, id="actor"),
        pytest.param("rollout", 3 * SYNC_TIMEOUT_S, id="for_a_while"),
    ],
)
def test_a_cable_cut_in_a_sync(hosts, models, tmp_path, remote_role, reconnect_after_s):
    """The run ends in bounded time by an error that names the sync or the role. After the cable and
    Ray on host `b` are back, the same command resumes from the checkpoint to the end. With
    `reconnect_after_s` the cable comes back before Ray marks the host as dead. Then the run may
    also survive."""
    cpus = {"a": 2, "b": 1}  # both trainer ranks are on one host
    if remote_role == "actor":
        cpus = {"a": 1, "b": 2}
    for host, cpu_count in cpus.items():
        hosts.start_ray(host, cpu_count)
    try:
        hosts.limit_bandwidth(40)
    except OSError as error:
        pytest.skip(f"a transfer is slowed down by tc's tbf: {error}")
    settings = slow_run_settings(models())
    run = hosts.start_run(tmp_path, settings)
    model_bytes = Path(models(), "model.safetensors").stat().st_size
    cut_during_a_sync(hosts, run, tmp_path, model_bytes)
    begin = time.monotonic()
    if reconnect_after_s:
        time.sleep(reconnect_after_s)
        hosts.plug_in()
    output, _ = run.communicate(timeout=BOUND_S)
    print(output, f"{time.monotonic() - begin:.0f} s after the cut")
    assert "never retrieved" not in output
    if not reconnect_after_s or run.returncode:
        assert run.returncode == 1, output
        assert_error_names_the_failed_part(output)
        resume(hosts, cpus["b"], tmp_path, settings)
    assert_steps(tmp_path, 8)
    assert (tmp_path / "hf_model").is_dir()


def resume(hosts: Hosts, cpus: int, folder: Path, settings: dict[str, Any]) -> None:
    """Plug in the cable, restart Ray on host `b` with these CPUs, and run the same command."""
    hosts.plug_in()
    hosts.kill_all("b")
    hosts.start_ray("b", cpus)
    begin = time.monotonic()
    run = hosts.start_run(folder, settings)
    output, _ = run.communicate(timeout=400)
    print(output, f"{time.monotonic() - begin:.0f} s from the checkpoint to the end")
    assert run.returncode == 0, output
    assert re.search(r"resuming from step [246] of 8", output), output
