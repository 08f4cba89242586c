"""Our schedulers decide what vLLM's own decide, and their clients receive the same, with less work.
Real engines are compared in tests/e2e/test_log_prob_scheduler.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from one_step_off.engines.engine import EngineLoad
from one_step_off.engines.vllm import engine_stats
from one_step_off.engines.vllm.engine_args import RETURN_EXPERTS
from one_step_off.engines.vllm.engine_stats import LoadReports
from one_step_off.engines.vllm.schedulers import (
    AsyncPrefixesPerVersion,
    AsyncReplicaScheduler,
    BlockEdges,
    PrefixesPerVersion,
    ReplicaScheduler,
    prefixes_per_version,
    replica_scheduler,
)
from tests.unit.engines.vllm.scheduler_drive import Drive, Record, Scene, make_scheduler


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[None]:
    """One entry per call of a method of `ReplicaScheduler`, from now on."""
    calls = []
    own = getattr(ReplicaScheduler, name)

    def counted(self, *args):
        calls.append(None)
        return own(self, *args)

    monkeypatch.setattr(ReplicaScheduler, name, counted)
    return calls


KINDS = ("column", "final", "streamed", "top", "none", "scored")


def drive_both(models: Any, scene: Scene) -> tuple[Record, Record]:
    """The records of vLLM's scheduler and of ours."""
    theirs = AsyncScheduler if scene.is_async else Scheduler
    return tuple(
        Drive(make_scheduler(made, models(), scene), scene).run()
        for made in (theirs, replica_scheduler)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_async", [False, True])
def test_every_step_is_vllms(models, is_async, seed, monkeypatch):
    """Starts, ends, stop tokens, prefix hits, preemptions, aborts, syncs in mid-sequence."""
    scene = Scene(
        is_async,
        blocks=40,
        requests=80,
        seed=seed,
        has_stats=seed % 2 == 1,
        is_second_runner=seed >= 2,
    )
    short_ways = count_calls(monkeypatch, "_add_rows")
    theirs, ours = drive_both(models, scene)
    assert len(short_ways) > 10
    assert len(ours.steps) == len(theirs.steps) > 70
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        assert one == other
    assert ours.answers == theirs.answers
    assert (ours.hits, ours.preemptions) == (theirs.hits, theirs.preemptions)
    assert sorted(ours.events) == sorted(theirs.events)
    assert bool(ours.events) == scene.has_stats
    assert ours.hits > 100 and ours.preemptions > 5
    assert ours.messages == 0 < theirs.messages, "no log-prob travels by itself"
    reasons = {answer[-1] for answers in ours.answers.values() for answer in answers}
    assert {"stop", "length"} <= reasons
    versions = [answer[2] for answers in ours.answers.values() for answer in answers]
    assert any(spans and len(spans) > 1 for spans in versions), "weights change in mid-sequence"


@pytest.mark.parametrize("is_async", [False, True])
def test_other_requests_in_the_same_steps_are_left_alone(models, is_async):
    """Streamed, with several log-probs per token, with none, and those that score a prompt."""
    theirs, ours = drive_both(models, Scene(is_async, blocks=60, requests=90, kinds=KINDS, seed=9))
    assert ours.steps == theirs.steps
    assert ours.answers == theirs.answers
    assert ours.prompt_log_probs == theirs.prompt_log_probs
    assert len(ours.prompt_log_probs) > 3


@pytest.mark.parametrize("kinds", [("column",), ("column", "final", "top")])
def test_several_tokens_of_a_row_in_one_step(models, kinds):
    """Drafts that are accepted, and an end in the middle of them."""
    scene = Scene(is_async=False, blocks=60, drafts=3, requests=60, kinds=kinds, seed=3)
    theirs, ours = drive_both(models, scene)
    assert ours.steps == theirs.steps
    assert ours.answers == theirs.answers
    drafted = [count for step in ours.steps for count in step[0].values() if count == 4]
    assert len(drafted) > 10


@pytest.mark.parametrize("is_async", [False, True])
def test_the_books_of_hybrid_models_are_vllms(models, is_async):
    """Two groups of blocks, of which one holds states: no row is plain, no manager replaced."""
    scene = Scene(is_async, blocks=60, requests=60, seed=4, has_states=True)
    theirs, ours = drive_both(models, scene)
    assert ours.steps == theirs.steps
    assert ours.answers == theirs.answers
    assert (ours.hits, ours.preemptions) == (theirs.hits, theirs.preemptions)
    assert ours.hits > 0
    assert ours.messages == 0 < theirs.messages
    scheduler = make_scheduler(replica_scheduler, models(), scene)
    assert not scheduler.has_plain_rows
    assert type(scheduler.kv_cache_manager) is KVCacheManager


class ReadsReports(Drive):
    """Keeps what the client of a replica learns of its engine.

    Attributes:
        loads: after each step, with the share of the cache by the scheduler's own books.
        waits: of each request that has ended: seconds in the queue, and until its first token.
    """

    def __init__(self, scheduler: Any, scene: Scene) -> None:
        super().__init__(scheduler, scene)
        self.reports = LoadReports(SimpleNamespace(output_processor=self.processor))
        self.loads: list[tuple[EngineLoad, float]] = []
        self.waits: list[list[float]] = []

    def finish(self, scheduled: Any, output: Any) -> None:
        own_update = self.scheduler.update_from_output

        def update(*args: Any) -> dict[int, Any]:
            outputs_by_client = own_update(*args)
            for outputs in outputs_by_client.values():
                received = self.decoder.decode(self.encoder.encode(outputs))
                self.processor.update_scheduler_stats(received.scheduler_stats)
            self.loads.append((self.reports.load, self.scheduler.kv_cache_manager.usage))
            return outputs_by_client

        self.scheduler.update_from_output = update
        try:
            super().finish(scheduled, output)
        finally:
            self.scheduler.update_from_output = own_update

    def read(self, answer: Any) -> None:
        super().read(answer)
        if answer.finished and answer.kv_transfer_params:
            self.waits.append(answer.kv_transfer_params[engine_stats.WAITS])


@pytest.mark.parametrize("has_stats", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_the_client_learns_how_full_the_engine_is(models, is_async, has_stats, monkeypatch):
    """Preemptions of a full cache count, and those of a sync that clears it do not."""
    monkeypatch.setattr(engine_stats, "LOOK_S", 0.0)
    scene = Scene(is_async, blocks=40, requests=80, seed=1, has_stats=has_stats)
    drive = ReadsReports(make_scheduler(replica_scheduler, models(), scene), scene)
    record = drive.run()
    loads = [load for load, _ in drive.loads]
    assert all(load.kv_usage == usage for load, usage in drive.loads)
    assert max(load.kv_usage for load in loads) > 0.8
    assert max(load.running for load in loads) <= 8
    assert max(load.waiting for load in loads) > 0
    counts = [load.preemptions for load in loads]
    assert counts == sorted(counts)
    assert 5 < counts[-1] < record.preemptions, "some of a sync"
    assert len(drive.waits) > 20
    assert all(queue_s >= 0 and prefill_s >= 0 for queue_s, prefill_s in drive.waits)
    assert max(map(sum, drive.waits)) > 0


def test_reports_are_few(models, monkeypatch):
    monkeypatch.setattr(engine_stats, "LOOK_S", 3600.0)
    scene = Scene(requests=40)
    drive = ReadsReports(make_scheduler(replica_scheduler, models(), scene), scene)
    drive.run()
    assert len({load for load, _ in drive.loads}) == 1


def test_a_name_that_is_used_again_begins_anew(models):
    scene = Scene(is_async=True, requests=1)
    drive = Drive(make_scheduler(replica_scheduler, models(), scene), scene)
    drive.add()
    request = drive.scheduler.requests["0"]
    request.log_prob_column.extend([-1.0, -2.0])
    drive.scheduler.finish_requests("0", 9)
    drive.processor.abort_requests(["0"], internal=False)
    drive.asked.clear()
    drive.add()
    assert len(drive.scheduler.requests["0"].log_prob_column) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_vllms_methods_are_called_at_the_edges_of_blocks_alone(models, is_async, monkeypatch):
    """One row: about as many calls as it has blocks, and not as many as tokens."""
    calls = []
    vllms = [(KVCacheManager, "allocate_slots"), (KVCacheManager, "cache_blocks")]
    for owner, name in [*vllms, (Scheduler, "_update_request_with_output")]:
        own = getattr(owner, name)

        def count(self, request, *args, name=name, own=own, **kwargs):
            calls.append(name)
            return own(self, request, *args, **kwargs)

        monkeypatch.setattr(owner, name, count)
    scene = Scene(is_async, requests=1, blocks=60, seed=2)
    drive = Drive(make_scheduler(replica_scheduler, models(), scene), scene)
    drive.params = lambda kind, own=drive.params: _long(own(kind))
    drive.disturb = lambda: None
    tokens = len(drive.run().answers["0"][0][0])
    blocks = tokens // 4 + 2
    assert tokens == 40
    assert calls.count("allocate_slots") <= 2 * blocks + 1 < tokens
    assert calls.count("cache_blocks") <= blocks + 1
    assert calls.count("_update_request_with_output") <= 2 * blocks + 1


def _long(params: Any) -> Any:
    params.max_tokens = 40
    params.stop_token_ids = []
    return params


@pytest.mark.parametrize("change", ["caching", "drafts", "spec"])
def test_other_caches_keep_vllms_manager(models, change):
    scene = Scene(is_async=True)
    scheduler = make_scheduler(AsyncScheduler, models(), scene)
    manager = scheduler.kv_cache_manager
    if change == "caching":
        manager.enable_caching = False
    elif change == "drafts":
        scheduler.num_spec_tokens = 2
    else:
        (group,) = manager.coordinator.single_type_managers
        group.__class__ = type("WindowManager", (type(group),), {})
    assert BlockEdges.use_in(scheduler) is None
    assert type(manager) is KVCacheManager


def keep_config(self, vllm_config, **_):
    self.vllm_config = vllm_config
    self.aux_output_connector = None


def test_the_schedulers_are_made_of_vllms(monkeypatch):
    """vLLM decides late whether it schedules ahead. On CPUs one that is to return experts gets the
    connector of vLLM's that asks for them."""
    expected = {
        (replica_scheduler, False): ReplicaScheduler,
        (replica_scheduler, True): AsyncReplicaScheduler,
        (prefixes_per_version, False): PrefixesPerVersion,
        (prefixes_per_version, True): AsyncPrefixesPerVersion,
    }
    for vllms in (Scheduler, AsyncScheduler):
        monkeypatch.setattr(vllms, "__init__", keep_config)
    monkeypatch.setattr(BlockEdges, "use_in", lambda scheduler: None)
    for (make, is_async), made in expected.items():
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
        config.additional_config = {}
        scheduler = make(config, block_size=16)
        assert type(scheduler) is made
        assert scheduler.aux_output_connector is None
        config.additional_config = {RETURN_EXPERTS: True}
        connector = make(config, block_size=16).aux_output_connector
        assert type(connector) is AuxOutputSchedulerConnector
        assert issubclass(made, AsyncScheduler) == is_async
