"""Agents outside of the replica: how they are started, end, fail and are cleaned up after."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_loop import external, host_client
from agent_loop.base import Limits, Loops
from agent_loop.external import AgentFailed, ExternalLoop
from agent_loop.host.process_tree import is_running
from one_step_off.config.agent_checks import ENVIRONMENT_KINDS
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from tests.unit.agent_loop import agents
from tests.unit.agent_loop.stand_in_endpoint import StandInEndpoint
from tests.unit.agent_loop.stand_ins import ScriptedEngine, make_prompt

LIMITS = Limits(tokens=800, turns=8, seconds=60.0)
FOLDER = str(Path(__file__).parent)
PROGRAM = f"{sys.executable} {agents.__file__}"
MODULE = agents.__name__
WAIT_S = 10.0


class EndlessEngine(ScriptedEngine):
    """Says the same at each turn."""

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        self.turns = [" #### 156"]
        return await super().__call__(ids, max_tokens)


class Setting:
    """A loop at a stand-in endpoint."""

    def __init__(self, tokenizer: Any, folder: Path, **agent_settings: Any) -> None:
        cfg = Config()
        cfg.agent.loop = "external"
        cfg.trainer.output_dir = str(folder)
        for name, value in agent_settings.items():
            setattr(cfg.agent, name, value)
        self.folder = folder
        self.tokenizer = tokenizer
        self.endpoint = StandInEndpoint(tokenizer)
        loop = Loops(cfg, tokenizer, self.endpoint).get()
        assert isinstance(loop, ExternalLoop)
        self.loop = loop

    async def episode(self, limits: Limits = LIMITS, engine: Any = None, **extra: Any) -> Any:
        """One episode by the loop."""
        engine = engine or EndlessEngine(self.tokenizer)
        score: Any = None
        prompt = make_prompt(self.tokenizer, **extra)
        return await self.loop.run(prompt, engine, score, limits)

    def run(self, limits: Limits = LIMITS, **extra: Any) -> Any:
        """One episode, and the end of the program."""

        async def main() -> Any:
            async with self.endpoint.serving():
                try:
                    return await self.episode(limits, **extra)
                finally:
                    await self.close()

        return asyncio.run(main())

    async def close(self) -> None:
        if self.loop.hosts is not None:
            await asyncio.to_thread(self.loop.hosts.close)

    def log(self, name: str = "*.log") -> str:
        """The only log."""
        (path,) = self.folder.glob(f"agents/{name}")
        return path.read_text()


@pytest.fixture
def setting(tokenizer, tmp_path):
    return lambda **settings: Setting(tokenizer, tmp_path, **settings)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


async def wait_for_file(path: Path) -> list[int]:
    """The ids of processes in a file that an agent writes."""
    await asyncio.to_thread(wait_for, path.exists)
    return [int(pid) for pid in path.read_text().split()]


def sample_of(episode: Any) -> Any:
    (sample,) = episode.samples(episode.prompt, 0)
    return sample


# --- the ways to run an agent ---------------------------------------------------------------------


def test_a_program_gets_the_url_the_key_and_the_row_and_sends_its_reward(setting):
    run = setting(command=f"{PROGRAM} rewards")
    episode = run.run()
    assert episode.reward == 0.5
    assert episode.turns == 1
    sample = sample_of(episode)
    assert sample.loss_mask.all()
    assert sample.extra["agent"] == {"turns": 1.0, "restarts": 0, "killed": 0}
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


# --- failures -------------------------------------------------------------------------------------


def test_an_exit_code_is_an_error_with_the_last_line_and_the_log(setting):
    run = setting(command=f"{PROGRAM} 'exits 3'")
    with pytest.raises(
        AgentFailed, match=r"exit code 3 \(agents/.*failed.log\).*something is wrong"
    ):
        run.run()
    assert run.log("*.failed.log") == "the policy said  #### 156\nsomething is wrong\n"


def test_an_exception_is_an_error_with_the_line_of_the_agent(setting):
    with pytest.raises(RuntimeError, match=r"KeyError: 'no such city' \(agents/.*agents.py:\d+"):
        setting(command=f"{MODULE}:fails").run()


@pytest.mark.parametrize("command", [f"{PROGRAM} 'asks for ever'", f"{MODULE}:asks_for_ever"])
def test_an_agent_that_fails_at_a_limit_of_the_episode_is_scored(setting, command):
    episode = setting(command=command).run(replace(LIMITS, turns=3))
    assert episode.turns == 3
    assert episode.over == "turns"


def test_an_agent_that_fails_after_an_answer_that_was_cut_off_is_scored(setting):
    run = setting(command=f"{MODULE}:fails")
    episode = run.run(replace(LIMITS, turn_tokens=3))
    assert sample_of(episode).finish_reason in ("length", "turn_length")
    assert run.log("*.failed.log") == "about to fail\n"


def test_an_agent_without_a_turn_is_an_error(setting):
    with pytest.raises(AgentFailed, match="ended without a turn of the policy"):
        setting(command=f"{PROGRAM} silent").run()


def test_a_coroutine_that_hangs_ends_at_the_time_limit_with_what_it_has(setting):
    begin = time.monotonic()
    episode = setting(command=f"{MODULE}:hangs").run(replace(LIMITS, seconds=1.5))
    assert time.monotonic() - begin < 8
    assert episode.over == "time"
    assert sample_of(episode).extra["agent"]["killed"] == 1


@pytest.mark.parametrize("command", [f"{PROGRAM} hangs", f"{MODULE}:plain_hangs"])
def test_all_processes_of_an_agent_end_at_the_time_limit(setting, tmp_path, command):
    path = tmp_path / "pids"
    episode = setting(command=command).run(replace(LIMITS, seconds=3.0), pids=str(path))
    assert episode.over == "time"
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 3
    assert not [pid for pid in pids if is_running(pid)]


def test_a_program_leaves_no_process_behind_at_its_end(setting, tmp_path):
    path = tmp_path / "pids"
    run = setting(command=f"{PROGRAM} leaves")

    async def main() -> None:
        async with run.endpoint.serving():
            await run.episode(pids=str(path))
            assert not [pid for pid in await wait_for_file(path) if is_running(pid)]
            await run.close()

    asyncio.run(main())


def test_a_program_that_was_killed_begins_again(setting, tmp_path):
    run = setting(command=f"{PROGRAM} 'killed once'")
    episode = run.run(marker=str(tmp_path / "marker"))
    assert len(run.endpoint.opened) == 2
    assert run.endpoint.opened[0].over == "ended"
    assert sample_of(episode).extra["agent"]["restarts"] == 1


@pytest.mark.parametrize("command", [f"{PROGRAM} hangs", f"{MODULE}:plain_hangs"])
def test_killed_agents_are_given_up_after_three_times(setting, tmp_path, command):
    path = tmp_path / "pids"
    run = setting(command=command)

    async def main() -> list[int]:
        pids = []
        async with run.endpoint.serving():
            episode = asyncio.create_task(run.episode(pids=str(path)))
            for _ in range(3):
                pids += await wait_for_file(path)
                path.unlink()
                os.kill(pids[-3], signal.SIGKILL)
            with pytest.raises(AgentFailed, match="killed by signal 9, 3 times"):
                await episode
            assert not [pid for pid in pids if is_running(pid)]
            await run.close()
        return pids

    assert len(asyncio.run(main())) == 9


@pytest.mark.parametrize("command", [f"{PROGRAM} hangs", f"{MODULE}:plain_hangs"])
def test_the_episodes_of_a_killed_host_begin_again_and_it_leaves_nothing(
    setting, tmp_path, command
):
    path = tmp_path / "pids"
    run = setting(command=command)

    async def main() -> None:
        async with run.endpoint.serving():
            episode = asyncio.create_task(run.episode(pids=str(path)))
            first = await wait_for_file(path)
            path.unlink()
            host = run.loop.hosts.starting.result()
            os.kill(host.process.pid, signal.SIGKILL)
            second = await wait_for_file(path)
            # Those that have left the session end with the run.
            await asyncio.to_thread(wait_for, lambda: not is_running(first[0]))
            for pid in first[1:]:
                os.kill(pid, signal.SIGKILL)
            assert run.loop.hosts.starting.result() is not host
            await run.close()
            assert not [pid for pid in second if is_running(pid)]
            episode.cancel()

    asyncio.run(main())


def test_the_coroutines_of_a_killed_host_begin_again(setting):
    run = setting(command=f"{MODULE}:hangs")

    async def main() -> None:
        async with run.endpoint.serving():
            limits = replace(LIMITS, seconds=4.0)
            tasks = [asyncio.create_task(run.episode(limits)) for _ in range(5)]
            opened = run.endpoint.opened
            await asyncio.to_thread(wait_for, lambda: sum(e.turns for e in opened) >= 5)
            os.kill(run.loop.hosts.starting.result().process.pid, signal.SIGKILL)
            episodes = await asyncio.gather(*tasks)
            assert [episode.facts["restarts"] for episode in episodes] == [1] * 5
            assert all(episode.turns == 1 for episode in episodes)
            await run.close()

    asyncio.run(main())


def test_a_host_whose_coroutine_cannot_be_cancelled_is_replaced_and_killed(
    setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(host_client, "END_S", 0.5)
    monkeypatch.setattr(host_client, "KILL_S", 0.1)
    marker = tmp_path / "marker"
    run = setting(command=f"{MODULE}:stubborn")

    async def main() -> None:
        async with run.endpoint.serving():
            episode = await run.episode(replace(LIMITS, seconds=1.5), marker=str(marker))
            assert episode.over == "time"
            first = int(marker.read_text())
            await asyncio.to_thread(wait_for, lambda: not is_running(first))
            episode = await run.episode(marker=str(marker))
            assert episode.reward != first
            await run.close()

    asyncio.run(main())


def test_the_agents_of_a_killed_replica_end(setting, tmp_path):
    path = tmp_path / "pids"
    replica = os.fork()
    if replica == 0:
        try:
            setting(command=f"{PROGRAM} hangs").run(pids=str(path))
        finally:
            os._exit(1)
    wait_for(path.exists)
    pids = [int(pid) for pid in path.read_text().split()]
    assert all(is_running(pid) for pid in pids)
    os.kill(replica, signal.SIGKILL)
    os.waitpid(replica, 0)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


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
