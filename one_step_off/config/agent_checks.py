"""Checks of external agents: how they are started, and where the endpoint listens."""

import errno
import os
import shlex
import shutil
import socket

from one_step_off.config.errors import key_error, refuse_here
from one_step_off.config.schema import Config
from one_step_off.config.text import did_you_mean

# Repeated here because importing their owner takes long; a test keeps them equal.
ENVIRONMENT_KINDS = ("verifiers", "openenv")


def check_external_agents(cfg: Config) -> None:
    """Check the keys of loop=external and of the endpoint. Raises ConfigError."""
    agent = cfg.agent
    if agent.command and agent.environment:
        raise key_error(
            cfg,
            "agent.command agent.environment",
            "an environment brings its own agent; remove one of the two",
        )
    if agent.environment:
        _check_environment(cfg)
    if agent.command:
        _check_command(cfg)
    if agent.python and shutil.which(agent.python) is None:
        problem = "no such program; name a Python interpreter, such as /my/venv/bin/python"
        refuse_here(key_error(cfg, "agent.python", problem))
    if agent.endpoint or agent.loop == "external":
        _check_host(cfg)


def _check_environment(cfg: Config) -> None:
    kind, _, name = cfg.agent.environment.partition(":")
    if kind not in ENVIRONMENT_KINDS:
        fix = did_you_mean(kind, ENVIRONMENT_KINDS, "use verifiers:NAME or openenv:URL")
        raise key_error(cfg, "agent.environment", f"no such kind of environment; {fix}")
    if not name.strip():
        raise key_error(cfg, "agent.environment", "names none; use verifiers:NAME or openenv:URL")


def _check_command(cfg: Config) -> None:
    try:
        words = shlex.split(cfg.agent.command)
    except ValueError as e:
        raise key_error(cfg, "agent.command", f"{e}; check the quotes") from e
    if not words:
        raise key_error(cfg, "agent.command", "blank; name a program, or leave it empty")


def _check_host(cfg: Config) -> None:
    """Raises ConfigError: the endpoint cannot listen there."""
    host = cfg.agent.endpoint_host
    ours = "an address of this machine, 127.0.0.1, or 0.0.0.0 for all of them"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, cfg.agent.endpoint_port, type=socket.SOCK_STREAM
        )[0]
        if not host:
            raise OSError(None, "empty")
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as e:
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            raise key_error(
                cfg, "agent.endpoint_port", f"{os.strerror(e.errno)}; name another, or 0"
            ) from e
        refuse_here(key_error(cfg, "agent.endpoint_host", f"{e.strerror}; name {ours}"))
