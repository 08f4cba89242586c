"""Which requests share prefixes where a sync keeps the KV caches. A run with real engines is in
tests/e2e/test_staleness.py."""

from __future__ import annotations

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from one_step_off.engines.vllm.schedulers import PrefixesPerVersion, ReplicaScheduler

BLOCK_TOKENS = 4
PROMPT = list(range(2 * BLOCK_TOKENS + 1))


@pytest.fixture
def scheduler(monkeypatch) -> PrefixesPerVersion:
    """vLLM's own needs a model's KV cache to be made. Its requests and their hashes are real."""
    init_none_hash(sha256)

    def add_request(self, request):
        self.requests[request.request_id] = request

    monkeypatch.setattr(ReplicaScheduler, "__init__", lambda self: None)
    monkeypatch.setattr(ReplicaScheduler, "add_request", add_request)
    scheduler = PrefixesPerVersion()
    scheduler.requests = {}
    scheduler._pause_state = PauseState.UNPAUSED
    return scheduler


def add(scheduler: PrefixesPerVersion, name: str, salt: str | None = None) -> Request:
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    params = SamplingParams(max_tokens=1)
    request = Request(name, PROMPT, params, None, cache_salt=salt, block_hasher=hasher)
    scheduler.add_request(request)
    assert len(request.block_hashes) == len(PROMPT) // BLOCK_TOKENS
    return request


def sync(scheduler: PrefixesPerVersion) -> None:
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.pause_state is PauseState.PAUSED_ALL
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.pause_state is PauseState.UNPAUSED


def shared_blocks(one: Request, other: Request) -> int:
    return len(set(one.block_hashes) & set(other.block_hashes))


def test_requests_of_one_version_share_prefixes_and_those_of_two_do_not(scheduler):
    before, beside = add(scheduler, "before"), add(scheduler, "beside")
    assert shared_blocks(before, beside) == 2
    before.num_computed_tokens = beside.num_computed_tokens = len(PROMPT)
    sync(scheduler)
    after = add(scheduler, "after")
    assert shared_blocks(after, before) == 0
    assert shared_blocks(after, add(scheduler, "another")) == 2
    assert shared_blocks(before, beside) == 2, "they keep their caches"


def test_a_request_that_waits_begins_after_the_sync(scheduler):
    """It came before the pause, or during it, and nothing of it is computed."""
    begun = add(scheduler, "begun")
    begun.num_computed_tokens = 1
    waits = add(scheduler, "waits")
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    comes = add(scheduler, "comes")
    scheduler.set_pause_state(PauseState.UNPAUSED)
    after = add(scheduler, "after")
    assert shared_blocks(waits, after) == 2
    assert shared_blocks(comes, after) == 2
    assert shared_blocks(begun, after) == 0
    assert len(waits.block_hashes) == 2, "its old hashes are gone"


def test_a_preempted_request_keeps_its_version(scheduler):
    """Its tokens so far are of older weights; only its blocks were given to others."""
    preempted = add(scheduler, "preempted")
    preempted.num_preemptions = 1
    sync(scheduler)
    assert shared_blocks(preempted, add(scheduler, "after")) == 0


def test_a_requests_own_salt_is_kept(scheduler):
    mine = add(scheduler, "mine", salt="user")
    assert shared_blocks(mine, add(scheduler, "plain")) == 0
    sync(scheduler)
    assert shared_blocks(mine, add(scheduler, "same", salt="user")) == 2
    assert shared_blocks(mine, add(scheduler, "other")) == 0
