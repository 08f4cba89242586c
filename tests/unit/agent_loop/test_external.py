"""Agents outside of the replica: how they are started, what they get and what they give."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop import external
from agent_loop.external import AgentFailed
from one_step_off.cluster.core_binding import pin_process
from one_step_off.config.errors import ConfigError
from one_step_off.config.sections.agent import ENVIRONMENT_KINDS
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling
from tests.unit.agent_loop import agents
from tests.unit.agent_loop.external_setting import (
    LIMITS,
    MODULE,
    PROGRAM,
    EndlessEngine,
    sample_of,
)
from tests.unit.agent_loop.stand_ins import make_prompt

# --- the ways to run an agent ---------------------------------------------------------------------


def test_a_program_gets_the_url_the_key_and_the_row_and_sends_its_reward(setting):
    run = setting(command=f"{PROGRAM} rewards")
    episode = run.run()
    assert episode.reward == 0.5
    assert episode.turns == 1
    sample = sample_of(episode)
    assert sample.loss_mask.all()
    assert sample.extra["agent"] == {
        **{"turns": 1.0, "restarts": 0, "killed": 0},
        "own_reward": 1.0,
    }
    assert sample.extra["agent_log"] == f"agents/{episode.name}.log"
    assert run.log() == "the policy said  #### 156\n"


def test_a_row_that_is_too_long_for_a_variable_comes_on_standard_input(setting):
    episode = setting(command=f"{PROGRAM} rewards").run(text="é" * 300_000)
    assert episode.reward == 0.5


@pytest.mark.parametrize(
    "name, reward", [("plain", {"right": 1.0, "length": 0.25}), ("coroutine", 1.0)]
)
def test_a_function_returns_its_reward_and_prints_into_its_log(setting, name, reward):
    run = setting(command=f"{MODULE}:{name}")
    episode = run.run()
    assert episode.reward == reward
    assert "the policy said  #### 156" in run.log(f"{episode.name}.log")


def test_coroutines_run_at_once_in_one_process_and_print_into_their_own_logs(setting):
    run = setting(command=f"{MODULE}:coroutine")

    async def main() -> list[Any]:
        async with run.endpoint.serving():
            episodes = await asyncio.gather(*(run.episode(number=i) for i in range(20)))
            await run.close()
            return episodes

    for i, episode in enumerate(asyncio.run(main())):
        assert run.log(f"{episode.name}.log") == f"{i}: the policy said  #### 156\n"


class BarrierEngine(EndlessEngine):
    """Answers when `count` requests wait; notes the memory that all processes take then."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        super().__init__(tokenizer)
        self.barrier = asyncio.Barrier(count)

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        await self.barrier.wait()
        return await super().__call__(ids, max_tokens)


def test_500_episodes_are_open_at_once_in_little_memory(setting):
    run = setting(command=f"{MODULE}:two_turns")

    def megabytes() -> float:
        host = run.loop.hosts.starting.result().process.pid
        return sum(psutil.Process(pid).memory_info().rss for pid in (host, os.getpid())) / 2**20

    async def rollout(count: int) -> list[Any]:
        engine: Any = BarrierEngine(run.tokenizer, count)
        return await asyncio.gather(*(run.episode(engine=engine) for _ in range(count)))

    async def main() -> list[Any]:
        async with run.endpoint.serving():
            await rollout(1)
            before = megabytes()
            episodes = await rollout(500)
            assert megabytes() < before + 100
            await run.close()
            return episodes

    episodes = asyncio.run(main())
    assert all(len(episode.segments()) == 1 and episode.turns == 2 for episode in episodes)


def test_max_concurrency_bounds_the_open_episodes(setting, monkeypatch):
    run = setting(command=f"{MODULE}:two_turns", max_concurrency=3)
    replica = RolloutReplica(run.loop.cfg, 0, "cpu", [])
    replica.tokenizer = run.tokenizer
    replica.stamp = (0, 0)
    replica.endpoint = run.endpoint
    engine = EndlessEngine(run.tokenizer)
    most_open = 0

    async def generate(ids: Any, max_tokens: int, *_: Any) -> Any:
        nonlocal most_open
        most_open = max(most_open, len(run.endpoint.by_key))
        await asyncio.sleep(0.02)
        return await engine(ids, max_tokens)

    monkeypatch.setattr(replica, "_generate", generate)
    replica.loops.loaded["external"] = run.loop

    async def main() -> list[Any]:
        async with run.endpoint.serving():
            samples = await replica.rollout([make_prompt(run.tokenizer)], Sampling(12, 1.0, None))
            await run.close()
            return list(samples)

    samples = asyncio.run(main())
    assert [sample.reward for sample in samples] == [1.0] * 12
    assert most_open == 3


def test_agents_elsewhere_ask_for_work(setting):
    run = setting()

    async def agent() -> None:
        url = f"{run.endpoint.base_url}/v1/episodes/next"
        from aiohttp import ClientSession

        async with ClientSession() as session, session.get(url) as answer:
            work = await answer.json()
        given = (f"{run.endpoint.base_url}/v1", work["api_key"])
        await asyncio.to_thread(agents.ask, *given, work["row"]["prompt"])
        await asyncio.to_thread(agents.post, *given, "episodes/KEY/reward", {"reward": 2.0})
        await asyncio.to_thread(agents.post, *given, "episodes/KEY/end", {})

    async def main() -> Any:
        async with run.endpoint.serving():
            episode, _ = await asyncio.gather(run.episode(), agent())
            return episode

    assert asyncio.run(main()).reward == 2.0


def test_work_that_no_agent_asks_for_is_an_error(setting):
    with pytest.raises(AgentFailed, match="GET http.*/v1/episodes/next"):
        setting().run(replace(LIMITS, seconds=0.3))


def test_an_environment_is_run_by_its_adapter(setting, monkeypatch):
    monkeypatch.setitem(external.ADAPTERS, "verifiers", f"{MODULE}:coroutine")
    plan = external.host_plan(setting(environment="verifiers:gsm8k").loop.cfg.agent)
    assert plan is not None
    assert plan.variables == {"AGENT_ENVIRONMENT": "gsm8k"}
    assert setting(environment="verifiers:gsm8k").run().reward == 1.0


def test_the_kinds_of_environments_in_the_config_checks_are_those_that_exist():
    assert set(ENVIRONMENT_KINDS) == set(external.ADAPTERS)


# --- logs -----------------------------------------------------------------------------------------


def test_a_log_has_the_beginning_and_the_end_of_what_is_printed(setting):
    run = setting(command=f"{PROGRAM} talks")
    run.run()
    log = run.log()
    assert len(log) < 200_000
    assert log.startswith("the policy said  #### 156\nxxx")
    assert log.endswith("line 99999\n")
    assert "bytes are left out]" in log


def test_only_so_many_logs_are_kept_of_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(external.AgentLogs.prune, "__defaults__", None)
    logs = external.AgentLogs(str(tmp_path))
    for number in range(700):
        Path(logs.open(f"e{number:03}")).write_text("x")
        logs.end(f"e{number:03}", failed=number < 10)
        path = tmp_path / "agents" / (f"e{number:03}" + (".failed.log" if number < 10 else ".log"))
        os.utime(path, (number, number))
    logs.prune()
    kept = sorted(path.name for path in (tmp_path / "agents").iterdir())
    assert len(kept) == 510
    assert kept[:10] == [f"e{number:03}.failed.log" for number in range(10)]
    assert kept[10] == "e200.log"


# --- checks before the run ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, python, message",
    [
        ("no_such_module:run", "", "No module named 'no_such_module'"),
        (f"{MODULE}:no_such_function", "", "has no attribute 'no_such_function'"),
        (f"{MODULE}:PROXYLESS", "", "PROXYLESS is a OpenerDirector, not a function"),
        (f"{MODULE}:ask_too_much", "", "has no attribute"),
        (f"{MODULE}:leave_processes", "", r"must take \(row, base_url, api_key\)"),
        ("broken_agent:run", "", r"ZeroDivisionError: division by zero \(broken_agent.py:1\)"),
        (f"{MODULE}:plain", "/no/python", "/no/python: No such file or directory"),
        (f"{MODULE}:plain", "/bin/true", "the interpreter ended at once"),
        ("no_such_program --fast", "", "there is no program no_such_program"),
    ],
)
def test_an_agent_that_cannot_run_is_refused_before_the_run(
    setting, tmp_path, monkeypatch, tokenizer, command, python, message
):
    (tmp_path / "broken_agent.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    loop = setting(command=command, python=python).loop
    with pytest.raises(ConfigError, match=message) as error:
        asyncio.run(loop.check(make_prompt(tokenizer)))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"agent.command={command}: ")


@pytest.mark.parametrize("command", ["", f"{PROGRAM} hangs", f"{MODULE}:plain", f"{MODULE}:hangs"])
def test_an_agent_that_can_run_passes(setting, tokenizer, command):
    asyncio.run(setting(command=command).loop.check(make_prompt(tokenizer)))


def test_a_function_whose_import_starts_threads_is_imported_in_each_process(
    setting, tmp_path, monkeypatch
):
    (tmp_path / "threaded_agent.py").write_text(
        "import os, threading, time\n"
        "PID = os.getpid()\n"
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"
        f"from {MODULE} import plain\n"
        "def run(*arguments):\n"
        "    plain(*arguments)\n"
        "    return float(PID == os.getpid())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert setting(command="threaded_agent:run").run().reward == 1.0


def test_an_agent_may_run_by_another_interpreter_without_our_packages(setting, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I -S "$@"\n')
    python.chmod(0o755)
    assert setting(command=f"{MODULE}:coroutine", python=str(python)).run().reward == 1.0


def test_a_run_without_endpoint_is_refused(setting, tokenizer):
    loop = setting(command=f"{MODULE}:plain").loop
    loop.endpoint = None
    with pytest.raises(ConfigError, match="agent.endpoint"):
        asyncio.run(loop.run(make_prompt(tokenizer), None, None, LIMITS))


def test_agents_are_not_bound_to_the_cores_of_their_replica(setting, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    replica = os.fork()
    if replica == 0:
        try:
            pin_process(tuple(cores[:1]))
            run = setting(command=f"{MODULE}:count_cores")
            episode = run.run()
            os._exit(0 if episode.reward == len(cores) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(replica, 0)
    assert os.waitstatus_to_exitcode(status) == 0
