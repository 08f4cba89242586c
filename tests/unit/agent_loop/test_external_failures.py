"""Agents outside of the replica that fail, hang, or are killed: what becomes of their episodes and
processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import selectors
import signal
import socket
import tempfile
from dataclasses import replace
from typing import Any

import psutil
import pytest

from agent_loop import external, host_client
from agent_loop.episode import RewardMissing
from agent_loop.external import AgentFailed
from agent_loop.host.output import Log
from agent_loop.host.process_agents import Agent, ProcessAgents, is_running
from one_step_off.rewards.reward import RewardError
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.rollout.sampling import Sampling
from tests.unit.agent_loop.external_setting import (
    LIMITS,
    MODULE,
    PROGRAM,
    EndlessEngine,
    sample_of,
    wait_for,
    wait_for_file,
)
from tests.unit.agent_loop.stand_in_endpoint import StandInEndpoint
from tests.unit.agent_loop.stand_ins import make_prompt
from tests.unit.rollout.stand_ins import FakeScorer

# --- failures -------------------------------------------------------------------------------------


def test_an_exit_code_is_an_error_with_the_last_line_and_the_log(setting):
    run = setting(command=f"{PROGRAM} 'exits 3'")
    with pytest.raises(
        AgentFailed, match=r"exit code 3 \(agents/.*failed.log\).*something is wrong"
    ):
        run.run()
    assert run.log("*.failed.log") == "the policy said  #### 156\nsomething is wrong\n"


def test_what_the_endpoint_refused_is_in_the_message(setting, monkeypatch):
    """Most clients show the status of an error, and not its reason."""
    opened = StandInEndpoint.open

    def open_refusing(*arguments):
        episode = opened(*arguments)
        episode.refusal = "message 0 has a part of type 'image_url'"
        return episode

    monkeypatch.setattr(StandInEndpoint, "open", open_refusing)
    with pytest.raises(AgentFailed, match=r"the endpoint last refused: message 0 has a part"):
        setting(command=f"{PROGRAM} 'exits 3'").run()


def test_an_exception_is_an_error_with_the_line_of_the_agent(setting):
    with pytest.raises(RuntimeError, match=r"KeyError: 'no such city' \(agents/.*agents.py:\d+"):
        setting(command=f"{MODULE}:fails").run()


@pytest.mark.parametrize("command", [f"{PROGRAM} 'asks for ever'", f"{MODULE}:asks_for_ever"])
def test_an_agent_that_fails_at_a_limit_of_the_episode_is_scored_and_reported(setting, command):
    episode = setting(command=command).run(replace(LIMITS, turns=3))
    assert episode.turns == 3
    assert episode.over == "turns"
    samples = episode.samples(episode.prompt, 0)
    assert samples[-1].finish_reason == "turns"
    for sample in samples:
        assert re.search("HTTP ?Error(: HTTP Error)? 409", sample.extra["agent_failure"])
        assert "\n" not in sample.extra["agent_failure"]


@pytest.mark.parametrize("limits", [{"turn_tokens": 3}, {"tokens": 3}])
def test_an_agent_that_fails_after_an_answer_that_was_cut_off_is_an_error(setting, limits):
    """Nothing shows whether the answer or the agent is to blame."""
    run = setting(command=f"{MODULE}:fails")
    message = r"no such city.*a limit of the run came before it: its last answer was cut off"
    with pytest.raises(RuntimeError, match=message):
        run.run(replace(LIMITS, **limits))
    assert run.log("*.failed.log") == "about to fail\n"


def test_an_agent_that_fails_where_no_room_is_left_is_an_error_that_names_it(setting):
    run = setting(command=f"{PROGRAM} 'asks on and fails'")
    with pytest.raises(AgentFailed, match="exit code 1.*leaves no room.*its last line: .*Error"):
        run.run(replace(LIMITS, tokens=20))


def test_an_agent_that_ends_where_no_room_is_left_is_cut_at_its_length(setting):
    run = setting(command=f"{PROGRAM} 'asks on'")
    episode = run.run(replace(LIMITS, tokens=20))
    sample = sample_of(episode)
    assert sample.finish_reason == "length"
    assert "agent_failure" not in sample.extra
    assert episode.reward == 0.5


def test_a_first_context_without_room_is_named(setting):
    with pytest.raises(AgentFailed, match="without a turn of the policy; a context of .* tokens"):
        setting(command=f"{PROGRAM} rewards").run(question="word " * 4000)


def test_a_reward_before_the_failure_does_not_excuse_it(setting):
    with pytest.raises(AgentFailed, match="exit code 3"):
        setting(command=f"{PROGRAM} 'rewards and exits 3'").run()


def test_the_last_of_two_rewards_counts(setting):
    assert setting(command=f"{PROGRAM} 'gives two rewards'").run().reward == 0.25


@pytest.mark.parametrize("code", [0, 4])
def test_a_function_whose_process_ends_before_it_returns_has_failed(setting, code):
    reason = {0: "exit code 0 before the function had returned", 4: "exit code 4"}[code]
    with pytest.raises(RuntimeError, match=reason):
        setting(command=f"{MODULE}:exits_in_its_function").run(code=code)


def test_what_an_agent_leaves_running_gets_no_more_turns(setting):
    """A task of a coroutine cannot be killed with it."""
    run = setting(command=f"{MODULE}:leaves_a_task")
    run.endpoint.record_s = 0.5  # so that the end takes a while
    slow = SlowEngine(run.tokenizer)
    episode = run.run(engine=slow)
    assert episode.turns == 1
    assert len(slow.requests) == 2, "the second one was in progress at the agent's end"
    assert len(sample_of(episode).response_ids) == len(episode.turns_done[0].generated.ids)


class SlowEngine(EndlessEngine):
    """Its second answer takes longer than the agent."""

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        answer = await super().__call__(ids, max_tokens)
        if len(self.requests) == 2:
            await asyncio.sleep(0.3)
        return answer


# --- rewards of agents and of the function --------------------------------------------------------


def test_an_agent_without_a_reward_is_scored_by_the_function_where_none_gives_one(setting):
    episode = setting(command=f"{PROGRAM} 'gives no reward'").run()
    assert episode.reward is None
    assert sample_of(episode).extra["agent"]["own_reward"] == 0


def test_once_an_agent_has_given_a_reward_an_episode_without_is_an_error(setting, tmp_path):
    run = setting(command=f"{MODULE}:rewards_the_first")
    marker = str(tmp_path / "marker")

    async def main() -> None:
        async with run.endpoint.serving():
            assert (await run.episode(marker=marker)).reward == 1.0
            with pytest.raises(RewardMissing, match="gave no reward .it ended well"):
                await run.episode(marker=marker)
            await run.close()

    asyncio.run(main())


@pytest.mark.parametrize("on_error", ["stop", "zero", "drop"])
def test_rewards_of_agents_and_of_the_function_are_not_mixed_in_a_group(
    setting, tmp_path, on_error
):
    """The agents without a reward end first, before another one is known to have one."""
    run = setting(command=f"{MODULE}:rewards_the_first")
    cfg = run.loop.cfg
    cfg.reward.on_error = on_error
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()])
    replica.tokenizer = run.tokenizer
    replica.stamp = (0, 0)
    replica.endpoint = run.endpoint
    replica.loops.loaded["external"] = run.loop
    engine = EndlessEngine(run.tokenizer)

    async def generate(ids: Any, max_tokens: int, *_: Any) -> Any:
        return await engine(ids, max_tokens)

    replica._generate = generate
    prompt = make_prompt(run.tokenizer, marker=str(tmp_path / "marker"))

    async def main() -> list[Any]:
        async with run.endpoint.serving():
            try:
                return list(await replica.rollout([prompt], Sampling(4, 1.0, None)))
            finally:
                await run.close()

    if on_error == "stop":
        with pytest.raises(RewardError, match="rewards of agents and of reward.function"):
            asyncio.run(main())
        return
    samples = asyncio.run(main())
    errors = [sample for sample in samples if "error" in sample.extra]
    assert len(errors) == 3
    assert all(sample.extra["fault"] == "agent/errors" for sample in errors)
    assert all(len(sample.response_ids) == 0 and sample.reward == 0.0 for sample in errors)
    (rewarded,) = [sample for sample in samples if "error" not in sample.extra]
    assert rewarded.reward == 1.0


class FirstCutEngine(EndlessEngine):
    """Its first answer is cut off."""

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        generated = await super().__call__(ids, max_tokens)
        return replace(generated, finish_reason="stop" if len(self.requests) > 1 else "length")


@pytest.mark.parametrize(
    ("agent", "engine"),
    [("fails_after_its_own_limit", EndlessEngine), ("fails_twice_asked", FirstCutEngine)],
)
def test_an_answer_that_no_limit_of_the_run_cut_off_at_last_excuses_no_failure(
    setting, agent, engine
):
    run = setting(command=f"{MODULE}:{agent}")
    with pytest.raises(RuntimeError, match="KeyError: 'no such city'"):
        run.run(engine=engine(run.tokenizer))


def test_an_agent_may_end_before_its_answer_is_recorded_as_received(setting):
    run = setting(command=f"{PROGRAM} rewards")
    run.endpoint.record_s = 0.5
    assert run.run().turns == 1


def test_a_returned_reward_is_kept_where_the_time_ends_with_the_agent(setting, monkeypatch):
    monkeypatch.setattr(external, "SETTLE_S", 3.0)
    run = setting(command=f"{MODULE}:two_turns")
    run.endpoint.record_s = 2.2
    episode = run.run(replace(LIMITS, seconds=2.0), started=True)
    assert episode.over == "ended", "the wait for a record is not the agent's time"
    assert episode.reward == 1.0
    assert "agent_failure" not in episode.extra


def test_an_agent_without_a_turn_is_an_error(setting):
    with pytest.raises(AgentFailed, match="ended without a turn of the policy"):
        setting(command=f"{PROGRAM} silent").run()


def test_a_coroutine_that_hangs_ends_at_the_time_limit_with_what_it_has(setting):
    limits = replace(LIMITS, seconds=1.5)
    episode = setting(command=f"{MODULE}:hangs").run(limits, started=True)
    assert episode.over == "time"
    sample = sample_of(episode)
    assert sample.extra["agent"]["killed"] == 1
    assert sample.extra["agent_failure"] == "agent.timeout_s=1.5 is over; its agent was killed"
    assert sample.finish_reason == "time"


def test_a_time_limit_is_named_as_the_episode_has_it(setting):
    """A data source may have another one than the config's agent.timeout_s."""
    run = setting(command=f"{MODULE}:hangs")
    episode = run.run(replace(LIMITS, seconds=1.5), started=True)
    assert episode.over_message == "agent.timeout_s=1.5 is over"
    with pytest.raises(AgentFailed, match=r"killed at agent\.timeout_s=0\.5, before"):
        setting(command=f"{MODULE}:asks_nobody").run(replace(LIMITS, seconds=0.5), started=True)


@pytest.mark.parametrize("command", [f"{PROGRAM} hangs", f"{MODULE}:plain_hangs"])
def test_all_processes_of_an_agent_end_when_its_time_is_over(setting, tmp_path, command):
    """A time limit cancels the loop's wait, as this does."""
    path = tmp_path / "pids"
    run = setting(command=command)

    async def main() -> list[int]:
        async with run.endpoint.serving():
            episode = asyncio.create_task(run.episode(pids=str(path)))
            pids = await wait_for_file(path)
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)
            running = [pid for pid in pids if is_running(pid)]
            await run.close()
            assert len(pids) == 3
            return running

    assert asyncio.run(main()) == []


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
    limits = replace(LIMITS, turn_tokens=3)  # an answer that is cut off explains no kill
    episode = run.run(limits, marker=str(tmp_path / "marker"))
    first, second = run.endpoint.opened
    assert second.begin == first.begin, "it has the time that is left"
    assert second.limits.seconds == limits.seconds, "messages name the whole limit"
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


class GatedEngine(EndlessEngine):
    """Answers once its gate is open."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.gate = asyncio.Event()
        self.asked = 0

    async def __call__(self, ids: Any, max_tokens: int, stop: tuple[str, ...] = ()) -> Any:
        self.asked += 1
        await self.gate.wait()
        return await super().__call__(ids, max_tokens)


def test_the_coroutines_of_a_killed_host_begin_again(setting):
    run = setting(command=f"{MODULE}:two_turns")

    async def main() -> None:
        engine = GatedEngine(run.tokenizer)
        async with run.endpoint.serving():
            tasks = [asyncio.create_task(run.episode(engine=engine)) for _ in range(5)]
            await asyncio.to_thread(wait_for, lambda: engine.asked == 5)
            os.kill(run.loop.hosts.starting.result().process.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: engine.asked == 10)
            engine.gate.set()
            episodes = await asyncio.gather(*tasks)
            assert [episode.facts["restarts"] for episode in episodes] == [1] * 5
            assert all(episode.turns == 2 for episode in episodes)
            await run.close()

    asyncio.run(main())


def test_a_host_whose_coroutine_cannot_be_cancelled_is_replaced_and_killed(
    setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(host_client, "END_S", 0.5)
    monkeypatch.setattr(host_client, "KILL_S", 0.1)
    marker = tmp_path / "pids"
    run = setting(command=f"{MODULE}:stubborn")

    async def main() -> None:
        async with run.endpoint.serving():
            await run.loop.hosts._host()  # its start is not the episode's time
            episode = await run.episode(replace(LIMITS, seconds=1.5), pids=str(marker))
            assert episode.over == "time"
            first = int(marker.read_text())
            await asyncio.to_thread(wait_for, lambda: not is_running(first))
            episode = await run.episode(pids=str(marker))
            assert episode.reward != first
            await run.close()

    asyncio.run(main())


@pytest.mark.parametrize("command", [f"{PROGRAM} hangs", f"{MODULE}:stubborn"])
def test_the_agents_of_a_killed_replica_end(setting, tmp_path, command):
    path = tmp_path / "pids"
    replica = os.fork()
    if replica == 0:
        try:
            setting(command=command).run(pids=str(path))
        finally:
            os._exit(1)
    wait_for(lambda: path.exists() and path.read_text())
    pids = [int(pid) for pid in path.read_text().split()]
    assert all(is_running(pid) for pid in pids)
    os.kill(replica, signal.SIGKILL)
    os.waitpid(replica, 0)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_program_ends_with_its_host_where_the_replica_cannot_help(setting, tmp_path):
    path = tmp_path / "pids"
    replica = os.fork()
    if replica == 0:
        try:
            setting(command=f"{PROGRAM} hangs").run(pids=str(path))
        finally:
            os._exit(1)
    wait_for(path.exists)
    program, *others = [int(pid) for pid in path.read_text().split()]
    os.kill(replica, signal.SIGSTOP)
    psutil.Process(program).parent().kill()
    try:
        wait_for(lambda: not is_running(program))
    finally:
        for pid in (replica, *others):  # in a run its cleanup finds these by their environment
            os.kill(pid, signal.SIGKILL)
        os.waitpid(replica, 0)


def test_output_that_is_reported_with_the_end_of_its_process_is_read_once(tmp_path, monkeypatch):
    """Whatever comes first, the program must not read what it has closed."""
    control, replica = socket.socketpair()
    wakeup, signals = socket.socketpair()
    output, output_writer = os.pipe()
    host = ProcessAgents(control, (0, 0), ["program"])
    host.wakeup = wakeup
    agent = Agent("1", "key", 1 << 22, output, Log(str(tmp_path / "log")), tempfile.TemporaryFile())
    host.agents[agent.pid] = agent
    host.selector.register(wakeup, selectors.EVENT_READ, host._read_wakeup)
    host.selector.register(output, selectors.EVENT_READ, lambda: host._read_output(agent))
    signals.send(b"x")
    os.write(output_writer, b"done\n")
    os.close(output_writer)
    select = host.selector.select
    monkeypatch.setattr(host.selector, "select", lambda: sorted(select(), key=is_output))
    ended = iter([(agent.pid, 0), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(ended))

    def is_output(event: Any) -> bool:
        return event[0].fd == output

    host.handle_events()
    assert json.loads(replica.recv(1000)) == {"ended": "1", "exit": 0, "log": "done"}
