"""vLLM's schedulers, where each version of the weights has prefix caches of its own
(`weight_sync.in_flight=keep`).

vLLM clears its prefix cache only together with the KV caches of unfinished requests, and `keep`
keeps those. So a prefix is known by the version that computed it, too. Only the engine's process
can tell that version: a request may wait there while the weights change.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from one_step_off.engines.vllm.log_prob_scheduler import LogProbsAtEnd


class PrefixesPerVersion(Scheduler):
    """Salts each request's prefix with the number of the pause after which it begins. A request
    that waits without any computed token begins after the next one.

    vLLM hashes the salt into the first block of a prompt, and each block's hash into the next.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended_pauses = 0

    def add_request(self, request: Any) -> None:
        """Take a request, which begins with the weights of now unless it has to wait."""
        self._salt(request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or resume. What begins after a pause has other weights than what began before."""
        super().set_pause_state(pause_state)
        if pause_state is not PauseState.UNPAUSED:
            return
        self.ended_pauses += 1
        for request in self.requests.values():
            # A preempted one keeps its salt: the tokens that it has are of older weights.
            if request.num_computed_tokens == 0 and request.num_preemptions == 0:
                self._salt(request)

    def _salt(self, request: Any) -> None:
        own_salt = vars(request).setdefault("own_salt", request.cache_salt or "")
        request.cache_salt = f"{self.ended_pauses}.{own_salt}"
        request.block_hashes.clear()
        request.update_block_hashes()


class LogProbsAtEndPrefixesPerVersion(PrefixesPerVersion, LogProbsAtEnd):
    """The scheduler of engines on CPUs."""


class AsyncPrefixesPerVersion(PrefixesPerVersion, AsyncScheduler):
    """The scheduler of engines on GPUs, if vLLM schedules ahead of them."""


def gpu_scheduler(vllm_config: VllmConfig, **arguments: Any) -> PrefixesPerVersion:
    """The scheduler of engines on GPUs. vLLM decides late whether it schedules ahead of them."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_class = AsyncPrefixesPerVersion if is_async else PrefixesPerVersion
    return scheduler_class(vllm_config=vllm_config, **arguments)
