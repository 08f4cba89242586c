"""What a replica and its vLLM engine do around `AsyncLLM`, which itself is in the e2e tests."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from agent_loop import tools
from agent_loop.base import Loops
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.rollout.replica import RolloutReplica
from tests.unit.rollout.stand_ins import UNSEEDED, FakeScorer, vllm_engine
from tests.unit.stand_ins import tiny_tokenizer


def test_nothing_is_generated_before_verified_weights():
    replica = RolloutReplica(Config(), 4, "cpu", [FakeScorer()])
    with pytest.raises(RuntimeError, match="rollout replica 4 has no verified weights"):
        asyncio.run(replica.rollout([], UNSEEDED))


class IdleScheduler:
    """The scheduler of an engine that works on nothing."""

    async def pause_scheduler_async(self, **_) -> None: ...


class BrokenEngine:
    """An engine whose workers cannot receive weights."""

    engine_core = IdleScheduler()

    def __init__(self) -> None:
        self.resumed = False

    async def collective_rpc(self, *_, **__):
        raise RuntimeError("checksum of bucket 1 differs")

    async def resume_generation(self):
        self.resumed = True


def test_after_a_failed_sync_the_engine_stays_paused_and_unused():
    replica = RolloutReplica(Config(), 0, "cpu", [FakeScorer()])
    replica.engine = engine = vllm_engine(BrokenEngine())
    replica.stamp = (0, 3)
    with pytest.raises(RuntimeError, match="checksum"):
        asyncio.run(replica.sync((0, 4)))
    assert not engine.llm.resumed
    with pytest.raises(RuntimeError, match="no verified weights"):
        asyncio.run(replica.rollout([], UNSEEDED))


class SleepingEngine:
    """Records its calls. An engine that is awake must not be woken, and one that sleeps must not be
    put to sleep again."""

    engine_core = IdleScheduler()

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        self.calls += tags

    async def collective_rpc(self, method: str, args: tuple) -> list[dict]:
        self.calls.append(method)
        return [{"bytes": 1.0}]

    async def update_weight_version(self, _) -> None: ...
    async def resume_generation(self) -> None: ...


class PausingEngine(SleepingEngine):
    """Records how it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_core = self

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"{mode} {clear_cache}")


@pytest.mark.parametrize(
    ("in_flight", "pause"),
    [("wait", "wait True"), ("recompute", "keep True"), ("keep", "keep False")],
)
def test_what_a_sync_does_with_requests(in_flight, pause):
    cfg = Config()
    cfg.weight_sync.in_flight = in_flight
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()])
    replica.engine = engine = vllm_engine(PausingEngine())

    async def main():
        for version in (3, 4):
            (report,) = await replica.sync((1, version))
            assert report["paused"] >= report["pause"]

    asyncio.run(main())
    assert engine.llm.calls == [pause, "sync_weights"] * 2


@pytest.mark.parametrize(
    ("device", "calls"),
    [
        ("cuda", ["sync_weights", "sleep 2", "weights", "sync_weights", "kv_cache"]),
        ("cpu", ["sync_weights", "sync_weights"]),
    ],
)
def test_a_colocated_engine_sleeps_between_its_turns_and_wakes_for_the_sync(device, calls):
    replica = RolloutReplica(Config(), 0, device, [FakeScorer()])
    replica.engine = engine = vllm_engine(SleepingEngine(), device)

    async def main():
        await replica.sync((0, 0))
        await replica.sleep()
        await replica.sleep()  # every role whose turn comes asks
        with pytest.raises(RuntimeError, match="no verified weights"):
            await replica.rollout([], UNSEEDED)
        await replica.sync((0, 1))

    asyncio.run(main())
    assert engine.llm.calls == calls
    assert replica.stamp == (0, 1)


@pytest.fixture
def start_with(tmp_path, monkeypatch):
    """A function that starts a replica, whose engine is what a function returns in vLLM's place."""
    tiny_tokenizer().save_pretrained(tmp_path)
    Qwen2Config().save_pretrained(tmp_path)
    monkeypatch.setattr("gc.freeze", lambda: None)

    def start(replica, make_engine):
        replica.cfg.model.path = str(tmp_path)
        llm = SimpleNamespace(
            AsyncLLM=SimpleNamespace(from_vllm_config=lambda made, **_: make_engine(made))
        )
        models = SimpleNamespace(engine_config=lambda given: given)
        monkeypatch.setitem(sys.modules, "one_step_off.engines.vllm.cpu_models", models)
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)
        return asyncio.run(replica.start())

    return start


def test_the_loops_of_the_data_are_made_before_the_engine(start_with):
    names = ("single_turn", "retry_with_feedback")
    replica = RolloutReplica(Config(), 0, "cpu", [], loops=names)
    loaded_before_engine = []

    def make_engine(_):
        loaded_before_engine.extend(replica.loops.loaded)
        scheduler = SimpleNamespace(max_num_seqs=7)
        cache = SimpleNamespace(kv_cache_max_concurrency=2.5)
        return SimpleNamespace(
            vllm_config=SimpleNamespace(scheduler_config=scheduler, cache_config=cache),
            output_processor=SimpleNamespace(update_scheduler_stats=None),
        )

    max_sequences, _ = start_with(replica, make_engine)
    assert max_sequences == 7
    engine: Any = replica.engine
    assert engine.longest_sequences == 2.5
    assert loaded_before_engine == list(names)


def test_an_engine_that_does_not_start_names_the_reason(start_with, tmp_path):
    """It is in the log of the engine's process. vLLM raises only that there is one."""
    log = tmp_path / "rollout_0.log"
    log.write_text("ERROR 11-25 20:55:07 [core.py:15] ValueError: of an earlier start\n")
    replica = RolloutReplica(Config(), 0, "cpu", [], log=str(log))

    def make_engine(_):
        with log.open("a") as file:
            file.write("ERROR 11-25 20:55:08 [core.py:15] ValueError: no memory for the cache\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    reason = "^its engine did not start: ValueError: no memory for the cache$"
    with pytest.raises(RuntimeError, match=reason):
        start_with(replica, make_engine)


def test_replicas_ask_no_server_for_the_schemas_that_the_driver_has(monkeypatch):
    url = "http://127.0.0.1:9/mcp"
    schema = {"name": "f", "description": "", "parameters": {"type": "object"}}
    monkeypatch.setattr("agent_loop.tools.MCP_SCHEMAS", {})
    monkeypatch.setattr("one_step_off.rollout.replica.MCP_SCHEMAS", tools.MCP_SCHEMAS)
    cfg = Config()
    cfg.agent.tools = f"mcp:{url}"
    cfg.agent.loop = "tool"
    cfg.agent.loop_kwargs = {"tool": {"taught": True}}
    with pytest.raises(ConfigError, match="the server lists no tools"):
        Loops(cfg, tiny_tokenizer()).get()
    replica = RolloutReplica(cfg, 0, "cpu", [FakeScorer()], {url: [schema]})
    replica.tokenizer = tiny_tokenizer()
    assert replica.loops.get().tools == [{"type": "function", "function": schema}]
