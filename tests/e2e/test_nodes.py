"""Two hosts, which are two network namespaces with a cable between them, as a Ray cluster: runs
over both, and cuts."""

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

import psutil
import pytest

from tests.e2e.test_pipeline import rows

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ADDRESS = {"a": "10.213.7.1", "b": "10.213.7.2"}  # of nothing but these two hosts
CABLE = "cable"  # what both call their end of it
PORT = 6379
# limits of a run here
START_S = 90
SYNC_S = 10
# A sync that breaks (its limit, the other ends', a ping), what is started anew, in a few attempts,
# and the run's end.
BOUND_S = 3 * SYNC_S + 3 * START_S + 60


def ip(*words: str, check: bool = True) -> str:
    """What `ip` says."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def end_all(space: str) -> None:
    """End every process in a namespace."""
    for pid in ip("netns", "pids", space, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def sweep() -> None:
    """End the hosts of tests that were killed themselves."""
    for space, pid in re.findall(r"^(oso(\d+)[ab])\b", ip("netns", "list"), re.M):
        if not psutil.pid_exists(int(pid)):
            end_all(space)
            ip("netns", "del", space, check=False)


class Hosts:
    """Hosts `a` and `b`. They share files and the name of the machine, which either takes for its
    loopback."""

    def __init__(self) -> None:
        self.space = {host: f"oso{os.getpid()}{host}" for host in ADDRESS}
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        # Sockets lie in it, whose paths must be short.
        self.temp = tempfile.mkdtemp(prefix="oso", dir="/tmp")
        try:
            for space in self.space.values():
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            end = ["peer", "name", CABLE, "netns", self.space["b"]]
            ip("-n", self.space["a"], "link", "add", CABLE, "type", "veth", *end)
            for host, space in self.space.items():
                ip("-n", space, "address", "add", f"{ADDRESS[host]}/24", "dev", CABLE)
            self.cable("up")
        except BaseException:
            self.close()
            raise

    def cable(self, state: str) -> None:
        """Plug it in at both ends (up) or pull it out of `b` (down): connections stay, and what is
        sent over them vanishes."""
        for space in self.space.values() if state == "up" else [self.space["b"]]:
            ip("-n", space, "link", "set", CABLE, state)

    def slow(self, megabits: int) -> None:
        """Let so much through per second in either direction, so that a transfer takes a while."""
        for host in self.space:
            rate = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
            self.on(host, "tc", "qdisc", "replace", "dev", CABLE, *rate)

    def carried(self) -> int:
        """Bytes that have gone from one to the other in the direction that has more of them."""
        (link,) = json.loads(ip("-n", self.space["a"], "-s", "-j", "link", "show", CABLE))
        return max(link["stats64"][way]["bytes"] for way in ("rx", "tx"))

    def popen(self, host: str, *command: object, **variables: str) -> subprocess.Popen:
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            **self.token,
            **variables,
        }
        words = ["ip", "netns", "exec", self.space[host], *map(str, command)]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(words, env=env, cwd=ROOT, **out)

    def on(self, host: str, *command: str) -> None:
        words = ["ip", "netns", "exec", self.space[host], *command]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def ray(self, host: str, cpus: int) -> None:
        """Make a host part of the cluster, `a` as its head, with so many seats."""
        ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            f"--node-ip-address={ADDRESS[host]}",
        ]
        ray += [f"--num-cpus={cpus}", "--disable-usage-stats", "--object-store-memory=100000000"]
        if host == "a":
            ray += [
                "--head",
                f"--port={PORT}",
                f"--temp-dir={self.temp}",
                "--include-dashboard=false",
            ]
        else:
            ray += [f"--address={ADDRESS['a']}:{PORT}"]
        started = self.popen(host, *ray)
        out, _ = started.communicate(timeout=120)
        assert started.returncode == 0, out

    def end(self, host: str) -> None:
        """End every process on a host."""
        end_all(self.space[host])

    def run(self, folder: Path, *overrides: str, **changes: object) -> subprocess.Popen:
        """The default run on CPUs, started on `a`."""
        keys = {
            "trainer.output_dir": folder,
            "data.val_files": "",
            "trainer.start_timeout_s": START_S,
            **changes,
        }
        command = [
            sys.executable,
            "-m",
            "one_step_off.main_ppo",
            "config=config/gsm8k_tiny_cpu.yaml",
        ]
        address = {"RAY_ADDRESS": f"{ADDRESS['a']}:{PORT}"}
        return self.popen(
            "a", *command, *(f"{k}={v}" for k, v in keys.items()), *overrides, **address
        )

    def close(self) -> None:
        for space in self.space.values():
            end_all(space)
            ip("netns", "del", space, check=False)  # and its end of the cable with it
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        pytest.skip(f"two hosts are made with {' and '.join(missing)}, which this machine lacks")
    try:
        sweep()
        two = Hosts()
    except OSError as e:
        pytest.skip(f"two hosts need root, network namespaces and veth: {e}")
    with contextlib.closing(two):
        yield two


def steps_of(folder: Path) -> list[int]:
    """Of the ledger; it must not have used a prompt twice."""
    ledger = rows(folder, "ledger.jsonl")
    prompts = [tuple(prompt) for row in ledger for prompt in row["prompts"]]
    assert len(prompts) == len(set(prompts)) == 16 * len(ledger)
    return [row["step"] for row in ledger]


@pytest.mark.parametrize(
    ("seats", "actor", "where"),
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
def test_a_run_over_the_cable(hosts, models, tmp_path, seats, actor, where):
    """Either role on a host of its own; and a trainer whose ranks are on both, so that its own
    collectives cross too."""
    for host, cpus in zip("ab", seats, strict=True):
        hosts.ray(host, cpus)
    before = hosts.carried()
    begin = time.monotonic()
    pools = f"placement.pools={{rollout: [1], actor: {actor}}}"
    run = hosts.run(tmp_path, pools, **{"model.path": models(), "trainer.total_steps": 4})
    said, _ = run.communicate(timeout=400)
    print(f"{time.monotonic() - begin:.0f} s")
    assert run.returncode == 0, said
    assert re.search(r"created pool rollout \[1\] on " + where, said), said
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    metrics = rows(tmp_path, "metrics.jsonl")
    assert [r["sync/bytes"] for r in metrics] == [
        0,
        *[whole := metrics[-1]["sync/full_bytes"]] * 3,
    ]
    assert whole > 3e6
    # And the first one, before the first step. With ranks on both, half of the model may stay on
    # its host.
    assert hosts.carried() - before >= 4 * whole / len(actor)
    assert all(r["canary/logprob_diff_max"] < 1e-4 for r in metrics)


def cut_in_a_sync(hosts: Hosts, run: subprocess.Popen, folder: Path, size: int) -> None:
    """Pull the cable out while weights are on it, after the first checkpoint. `size`: of the model,
    in bytes."""
    deadline = time.monotonic() + 200
    seen = deque([hosts.carried()], maxlen=10)
    while not (folder / "checkpoints" / "step_000002").is_dir() or seen[-1] - seen[0] < size / 4:
        assert run.poll() is None
        assert time.monotonic() < deadline, run.communicate(timeout=1)[0]
        time.sleep(0.02)
        seen.append(hosts.carried())
    assert seen[-1] - seen[0] < size * 3 / 4, "the sync is over; nothing was cut"
    hosts.cable("down")


@pytest.mark.parametrize(
    ("far", "back_s"),
    [("rollout", None), ("actor", None), ("rollout", 3 * SYNC_S)],
    ids=["rollout", "actor", "for_a_while"],
)
def test_a_cable_cut_in_a_sync(hosts, models, tmp_path, far, back_s):
    """The run ends in bounded time by an error that names the sync or the role; with the cable
    back, and Ray on that host anew, the same command goes on from the checkpoint to the end.
    `back_s`: the cable comes back by itself, before Ray gives the host up; then the run may as well
    survive."""
    seats = {"rollout": (2, 1), "actor": (1, 2)}[far]  # two ranks fit one host only
    for host, cpus in zip("ab", seats, strict=True):
        hosts.ray(host, cpus)
    try:
        hosts.slow(40)
    except OSError as e:
        pytest.skip(f"a transfer is slowed down by tc's tbf: {e}")
    keys = {
        "model.path": models(),
        "trainer.total_steps": 8,
        "trainer.save_freq": 2,
        "weight_sync.timeout_s": SYNC_S,
    }
    keys |= {"placement.pools": "{rollout: [1], actor: [2]}", "trainer.step_timeout_s": 4 * START_S}
    run = hosts.run(tmp_path, **keys)
    cut_in_a_sync(hosts, run, tmp_path, Path(models(), "model.safetensors").stat().st_size)
    begin = time.monotonic()
    if back_s:
        time.sleep(back_s)
        hosts.cable("up")
    said, _ = run.communicate(timeout=BOUND_S)
    print(said, f"{time.monotonic() - begin:.0f} s after the cut")
    assert "never retrieved" not in said
    if not back_s or run.returncode:
        assert run.returncode == 1, said
        error = next(
            line for line in said.splitlines() if line.startswith("error: the run ended by")
        )
        named = r"by \w+: (weight sync of version \d+, (rollout|trainer rank) \d|.*(rollout|actor|replica))"
        assert re.search(named, error), said
        go_on(hosts, seats[1], tmp_path, keys)
    assert steps_of(tmp_path) == list(range(8))
    assert (tmp_path / "hf_model").is_dir()


def go_on(hosts: Hosts, cpus: int, folder: Path, keys: dict[str, object]) -> None:
    """Mend the cable, start Ray on host `b` anew, and give the same command."""
    hosts.cable("up")
    hosts.end("b")
    hosts.ray("b", cpus)
    begin = time.monotonic()
    run = hosts.run(folder, **keys)
    said, _ = run.communicate(timeout=400)
    print(said, f"{time.monotonic() - begin:.0f} s from the checkpoint to the end")
    assert run.returncode == 0
    assert re.search(r"resuming from step [246] of 8", said), said
