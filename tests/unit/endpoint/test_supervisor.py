"""The driver's part of the endpoint: its port, its file, and the watch over the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import psutil
import pytest

from agent_loop.base import AgentLoop, uses_endpoint
from one_step_off.cluster.errors import ProcessDied
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.endpoint import supervisor as supervisor_module
from one_step_off.endpoint.http_server import InheritedSocket, borrow_port
from one_step_off.endpoint.supervisor import GatewaySupervisor
from tests.unit.stand_ins import ActorMethod, StandInActor

spawned: list[tuple] = []
"""The arguments of the gateways that tests have started."""


class OutsideLoop(AgentLoop):
    needs_endpoint = True


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path / "run")
    return cfg


@pytest.fixture
def make(cfg: Config) -> Iterator[Callable[..., GatewaySupervisor]]:
    """make(alive, one_machine): a supervisor whose gateway answers `alive` with that."""
    made: list[GatewaySupervisor] = []
    spawned.clear()

    def make_one(alive: Any = (1, 0.0), one_machine: bool = True) -> GatewaySupervisor:
        actor = StandInActor(alive=alive, stop=None)

        def spawn(cls: type, args: tuple) -> StandInActor:
            spawned.append(args)
            return actor

        made.append(GatewaySupervisor(cfg, 8, one_machine, spawn))
        return made[-1]

    yield make_one
    for supervisor in made:
        supervisor.port.close()


@pytest.mark.parametrize(
    ("endpoint", "loops", "needed"),
    [
        (False, ["single_turn", ""], False),
        (True, ["single_turn"], True),
        (False, ["single_turn", f"{__name__}:OutsideLoop"], True),
    ],
)
def test_a_run_has_an_endpoint_if_it_or_one_of_its_loops_asks_for_it(
    cfg: Config, endpoint: bool, loops: list[str], needed: bool
):
    cfg.agent.endpoint = endpoint
    assert uses_endpoint(cfg, loops) is needed


def test_the_file_of_the_run_holds_the_service_key_and_only_its_user_may_read_it(make):
    supervisor = make()
    assert stat.S_IMODE(supervisor.file.stat().st_mode) == 0o600
    content = json.loads(supervisor.file.read_text())
    assert content == {
        "base_url": f"http://127.0.0.1:{supervisor.port.port}",
        "service_key": supervisor.access.service_key,
    }
    line = supervisor.describe()
    assert line.startswith(f"endpoint: {content['base_url']} (key per episode; service key in ")
    assert content["service_key"] not in line


def test_the_next_attempt_has_the_same_port_and_the_same_service_key(make, monkeypatch):
    monkeypatch.setattr("one_step_off.endpoint.http_server.FORMER_ENDS_S", 0.1)
    first = make()
    first.port.close()
    second = make()
    assert second.base_url == first.base_url
    assert second.access.service_key == first.access.service_key
    third = make()  # while the second one has the port
    assert third.base_url != second.base_url


@pytest.mark.parametrize("content", ["", "[]", '{"service_key": "short", "base_url": "x:1"}', "5"])
def test_a_file_that_is_none_of_ours_is_replaced(make, cfg: Config, content: str):
    file = Path(cfg.trainer.output_dir) / "endpoint.json"
    file.parent.mkdir()
    file.write_text(content)
    file.chmod(0o600)
    assert json.loads(make().file.read_text())["service_key"].startswith("ose-fleet-")


def test_a_key_that_others_could_have_read_is_not_used_again(make):
    first = make()
    first.file.chmod(0o644)
    second = make()
    assert second.access.service_key != first.access.service_key
    assert stat.S_IMODE(second.file.stat().st_mode) == 0o600


def test_the_next_attempt_waits_for_the_end_of_the_former_one(make, cfg: Config):
    former = make()
    cfg.agent.endpoint_port = former.port.port
    Timer(0.2, former.port.close).start()
    assert make().base_url == former.base_url


def test_a_large_run_may_have_more_connections(make, cfg: Config):
    make().port.close()
    cfg.agent.max_concurrency = 16
    make()
    assert [args[3].connections for args in spawned] == [8 * 8 * 1024 * 4, 8 * 8 * 16 * 4]


def test_where_no_replica_can_join_there_are_connections_for_those_of_the_start(make, cfg: Config):
    cfg.placement.roles = {"rollout": "all", "actor": "all"}
    make()
    assert spawned[0][3].connections == 8 * 1024 * 4


def test_a_port_that_is_taken_is_an_error_that_names_the_keys(make, cfg: Config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cfg.agent.endpoint_port = taken.getsockname()[1]
        problem = rf"agent.endpoint_host=127.0.0.1 agent.endpoint_port={cfg.agent.endpoint_port}: "
        with pytest.raises(ConfigError, match=problem):
            make()
    cfg.agent.endpoint_host = "203.0.113.7"
    with pytest.raises(ConfigError, match="name an address of this machine"):
        make()


def test_agents_beside_replicas_of_other_nodes_do_not_use_this_nodes_loopback(make, cfg: Config):
    first = make(one_machine=False)
    assert (first.access.base_url, first.access.host) == ("", "")
    assert make(one_machine=True).access.base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_agents_elsewhere_get_an_address_of_this_machine_that_they_can_reach(
    make, cfg: Config, monkeypatch, host: str
):
    """Not the loopback, where they would call themselves, nor the address of no machine."""
    monkeypatch.setattr(supervisor_module, "address_in_network", lambda: "192.0.2.7")
    cfg.agent.endpoint_host = host
    try:
        supervisor = make(one_machine=True)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    url = f"http://192.0.2.7:{supervisor.port.port}"
    assert supervisor.access.base_url == url
    assert json.loads(supervisor.file.read_text())["base_url"] == url
    assert supervisor.access.host == "127.0.0.1", "the replicas' own servers stay on the loopback"


async def watched(supervisor: GatewaySupervisor, restarts: int) -> list[Any]:
    """What a supervisor reports until it has counted so many restarts."""
    reported: list[Any] = []
    await supervisor.start()
    supervisor.report_to(reported.append, lambda metrics, device: reported.append(metrics))
    try:
        async with asyncio.timeout(5):
            while supervisor.restarts < restarts:
                await asyncio.sleep(0.005)
    finally:
        await supervisor.end()
    return reported


def test_a_gateway_that_died_is_counted_once_when_it_is_back(make, monkeypatch):
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.01)
    answers = iter([(1, 0.0), (1, 0.0), ProcessDied("pid 1"), ProcessDied("pid 1"), (2, 5.0)])

    def alive() -> tuple[int, float]:
        answer = next(answers, (2, 5.0))
        if isinstance(answer, Exception):
            raise answer
        return answer

    reported = asyncio.run(watched(make(alive), 1))
    assert reported[1] == {"restarts/endpoint": 0.0}
    assert reported[2].startswith("the endpoint is back (")
    assert reported[3:] == [{"restarts/endpoint": 1.0}]


def test_a_gateway_that_hangs_is_killed(make, monkeypatch):
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.01)
    monkeypatch.setattr(supervisor_module, "LIVENESS_TIMEOUT_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as hanging:
        process = (hanging.pid, psutil.Process(hanging.pid).create_time())
        calls = 0

        async def alive() -> tuple[int, float]:
            nonlocal calls
            calls += 1
            if calls > 1 and hanging.poll() is None:
                await asyncio.sleep(60)
            return process if calls == 1 else (os.getpid(), 1.0)

        try:
            reported = asyncio.run(watched(make(ActorMethod(alive)), 1))
        finally:
            code = hanging.poll()
            hanging.kill()
    assert code == -signal.SIGKILL
    assert reported[-1] == {"restarts/endpoint": 1.0}


def test_another_process_with_the_same_id_is_not_killed(make, monkeypatch):
    supervisor = make()
    supervisor._process = (os.getpid(), 12345.0)
    killed: list[int] = []
    monkeypatch.setattr(psutil.Process, "kill", lambda process: killed.append(process.pid))
    supervisor._kill()
    assert killed == []


def test_the_port_stays_open_from_one_borrower_to_the_next():
    port = InheritedSocket("127.0.0.1", 0)
    folder = Path(port.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    first = borrow_port(port.path)
    assert first.getsockname() == ("127.0.0.1", port.port)
    first.close()
    with socket.create_connection(("127.0.0.1", port.port)) as client:
        client.sendall(b"x")
        second = borrow_port(port.path)
        second.setblocking(True)
        accepted, _ = second.accept()
        assert accepted.recv(1) == b"x"
        accepted.close()
        second.close()
    port.close()
    assert not folder.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port.port))
    with pytest.raises(OSError):
        borrow_port(port.path)


def test_a_run_without_agents_imports_no_server():
    code = (
        "import sys, one_step_off.runtime.launch, one_step_off.rollout.replica; "
        "print([name for name in sys.modules if name == 'one_step_off.endpoint.gateway' "
        "or name.startswith('aiohttp.web')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
