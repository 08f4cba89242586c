"""External agents that cannot be run, and an endpoint that cannot listen."""

from __future__ import annotations

import socket

import pytest

from one_step_off.runtime.prepare import prepare
from one_step_off.runtime.validation import validate
from tests.bad_input import base, refused
from tests.conftest import tiny_config

MISTAKES = [
    ("an environment and a command",
     ["agent.command=python x.py", "agent.environment=openenv:http://a"],
     ["agent.command=python x.py and agent.environment=openenv:http://a", "remove one"]),
    ("an unknown kind of environment", ["agent.environment=verifier:gsm8k"],
     ["agent.environment=verifier:gsm8k", "did you mean verifiers?"]),
    ("an environment without a name", ["agent.environment=openenv:"],
     ["agent.environment=openenv:", "names none"]),
    ("an open quote in the program", ["agent.command=python 'x.py"],
     ["agent.command=", "check the quotes"]),
    ("no such interpreter", ["agent.python=/no/python"],
     ["agent.python=/no/python", "no such program"]),
    ("the address of another machine", ["agent.endpoint=true", "agent.endpoint_host=192.0.2.1"],
     ["agent.endpoint_host=192.0.2.1", "an address of this machine"]),
    ("an address that no host has",
     ["agent.loop=external", "agent.endpoint_host=no.such.host.invalid"],
     ["agent.endpoint_host=no.such.host.invalid", "an address of this machine"]),
    ("a module that is missing", ["agent.loop=external", "agent.command=no_agent:run"],
     ["agent.command=no_agent:run", "No module named 'no_agent'", "agent.python"]),
    ("a program that is missing", ["agent.loop=external", "agent.command=no_agent --fast"],
     ["agent.command=no_agent --fast", "there is no program no_agent"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "parts"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_an_agent_that_cannot_run(argv, parts, models, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused([*base(tmp_path, models()), *argv], parts, tmp_path, capsys)


def test_a_port_that_is_taken(models, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        argv = ["agent.loop=external", f"agent.endpoint_port={port}"]
        parts = [f"agent.endpoint_port={port}", "Address already in use", "name another"]
        refused([*base(tmp_path, models()), *argv], parts, tmp_path, capsys)


@pytest.mark.parametrize("loop", ["single_turn", "external"])
def test_an_agent_that_no_row_uses_is_reported(models, tmp_path, loop):
    cfg = tiny_config(models(), str(tmp_path / "run"), **{"agent.loop": loop})
    cfg.agent.command = "true"
    lines: list[str] = []
    validate(cfg)
    prepare(cfg, lines.append)
    warned = [line for line in lines if "no row of this run uses external agents" in line]
    assert len(warned) == int(loop == "single_turn"), lines
