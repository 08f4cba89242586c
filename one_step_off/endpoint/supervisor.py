"""The driver's part of the endpoint: it starts the gateway, watches it, and keeps its port."""

import asyncio
import contextlib
import ipaddress
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from one_step_off.cluster.errors import PhaseTimeout
from one_step_off.cluster.network import address_in_network, reachable_host
from one_step_off.cluster.remote_calls import (
    LIVENESS_TIMEOUT_S,
    name_failures,
    with_time_limit,
)
from one_step_off.config.placement import why_not_elastic
from one_step_off.config.schema import Config
from one_step_off.endpoint.episodes import SERVICE_PREFIX, make_service_key
from one_step_off.endpoint.gateway import Gateway
from one_step_off.endpoint.http_server import InheritedSocket, limits_for, url_host
from one_step_off.endpoint.replica_server import EndpointAccess

FILE_NAME = "endpoint.json"
WATCH_S = 1.0
STOP_S = 5.0
ANY_ADDRESSES = ("", "0.0.0.0", "::")
ROOM_FOR_JOINS = 8
"""Where replicas may join, the gateway has connections for so many times those of the start."""
ANSWER_FACTOR = 4
"""A request's answer may take so many times `agent.timeout_s`."""

Spawn = Callable[..., Any]
"""`cluster.placement.spawn`, but for the environment variables."""


class GatewaySupervisor:
    """The gateway's process. When it dies or hangs it is killed, and Ray starts it again.

    Attributes:
        restarts: how often that has happened.
        on_message: receives one line for the user.
        on_metrics: receives metrics that every row repeats from then on.
    """

    def __init__(self, cfg: Config, replicas: int, one_machine: bool, spawn: Spawn) -> None:
        """Open the port, write `endpoint.json`, and create the process.

        Args:
            replicas: how many there are.
            one_machine: whether all processes are on this machine.
            spawn: starts `Gateway` with these arguments.

        Raises:
            ConfigError: this machine cannot listen at `agent.endpoint_host` and `endpoint_port`.
        """
        self.file = Path(cfg.trainer.output_dir) / FILE_NAME
        former = _read_former(self.file)
        host = cfg.agent.endpoint_host
        self.port = InheritedSocket(host, cfg.agent.endpoint_port, former.get("port", 0))
        service_key = former.get("service_key") or make_service_key()
        reachable = host
        # For agents elsewhere, which the loopback would send to themselves.
        if host in ANY_ADDRESSES:
            reachable = address_in_network() if one_machine else reachable_host("")
        self.base_url = f"http://{url_host(reachable)}:{self.port.port}"
        _write_file(self.file, {"base_url": self.base_url, "service_key": service_key})
        answer_s = ANSWER_FACTOR * cfg.agent.timeout_s
        if not why_not_elastic(cfg):
            replicas *= ROOM_FOR_JOINS
        limits = limits_for(replicas * cfg.agent.max_concurrency)
        self.gateway = spawn(Gateway, (self.port.path, service_key, answer_s, limits))
        is_local_only = not one_machine and _is_loopback(reachable)
        self.access = EndpointAccess(
            base_url="" if is_local_only else self.base_url,
            service_key=service_key,
            host="127.0.0.1" if one_machine else "",
            gateway=self.gateway,
        )
        self.start_s = cfg.trainer.start_timeout_s
        self.restarts = 0
        self.on_message: Callable[[str], None] = lambda line: None
        self.on_metrics: Callable[[dict[str, float], str], None] = lambda metrics, device: None
        self._process: tuple[int, float] | None = None
        self._watching: asyncio.Task | None = None

    def describe(self) -> str:
        """One line for the user."""
        return f"endpoint: {self.base_url} (key per episode; service key in {self.file})"

    async def start(self) -> None:
        """Wait until the gateway listens, and watch it from then on.

        Raises:
            PhaseTimeout, ProcessDied, RoleError: it has not come up.
        """
        self._process = await self._ask(self.start_s)
        self._watching = asyncio.create_task(self._watch())

    def report_to(
        self,
        on_message: Callable[[str], None],
        on_metrics: Callable[[dict[str, float], str], None],
    ) -> None:
        """From now on these receive what happens."""
        self.on_message = on_message
        self.on_metrics = on_metrics
        on_message(self.describe())
        self._report()

    def _report(self) -> None:
        self.on_metrics({"restarts/endpoint": float(self.restarts)}, "")

    async def _ask(self, limit_s: float) -> tuple[int, float]:
        """The process that answers: its id and when it began."""
        answer = name_failures("endpoint", self.gateway.alive.remote())
        return await with_time_limit(limit_s, "endpoint", answer)

    async def _watch(self) -> None:
        """Look after the process until this is canceled. Nothing that happens to it ends the
        run."""
        problem = ""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                process = await self._ask(LIVENESS_TIMEOUT_S)
            except PhaseTimeout as error:
                problem = str(error)
                self._kill()  # it hangs, or Ray is just starting it
            except Exception as error:
                problem = str(error)
            else:
                if process != self._process:
                    self._process = process
                    self.restarts += 1
                    self.on_message(f"the endpoint is back ({problem or 'its process died'})")
                    self._report()
                problem = ""

    def _kill(self) -> None:
        """Kill the last process that answered, if it is still there."""
        pid, created = self._process or (0, 0.0)
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created:
                process.kill()

    async def end(self) -> None:
        """Stop watching, and close the port. The caller ends the process."""
        if self._watching is not None:
            self._watching.cancel()
        try:
            async with asyncio.timeout(STOP_S):
                await self.gateway.stop.remote()
        except Exception:
            self._kill()  # the next attempt needs its port
        self.port.close()


def _read_former(path: Path) -> dict[str, Any]:
    """Port and service key of the previous attempt, or run, in this folder: agents
    elsewhere know them. {}: there was none, or others could have written the file."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            return {}
        content = json.loads(path.read_text())
        key = content["service_key"]
        port = int(content["base_url"].rpartition(":")[2])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    is_key = isinstance(key, str) and key.startswith(SERVICE_PREFIX) and len(key) >= 40
    return {"service_key": key, "port": port} if is_key and 0 < port < 1 << 16 else {}


def _write_file(path: Path, content: dict[str, str]) -> None:
    """Write a file that only this user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(json.dumps(content, indent=2) + "\n")
    new.replace(path)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
