"""The schedulers of vLLM's engine in a run.

- `LogProbsAtEnd`: the log-probs of a response leave the engine's process once, when it has ended.
  vLLM sends three small arrays for each new token from the engine's process to its client. Where a
  model is small, to pack and unpack them takes a large part of a generation.
- `PrefixesPerVersion`: each version of the weights has prefix caches of its own
  (`weight_sync.in_flight=keep`). vLLM clears its prefix cache only together with the KV caches of
  unfinished requests, and `keep` keeps those. So a prefix is known by the version that computed it,
  too. Only the engine's process can tell that version: a request may wait there while the weights
  change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists


class LogProbsAtEnd(Scheduler):
    """Keeps the log-probs of the requests whose client waits for the whole response
    (`RequestOutputKind.FINAL_ONLY`), and adds them to the last output. Token ids leave at once, as
    ever: the client gives each the weight version under which it arrives.

    Streamed requests are as in vLLM, and so are those with stop strings: the client looks for these
    in the text, and ends the request before the engine does. The log-probs of an aborted request
    are lost.
    """

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """What vLLM's own method returns, without the log-probs of unfinished responses."""
        if model_runner_output.logprobs is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        # The scheduler forgets a request in the step in which it ends.
        waiting_for_end = {
            name: self.requests[name]
            for name in scheduler_output.num_scheduled_tokens
            if name in self.requests and _ends_in_the_engine(self.requests[name])
        }
        outputs_by_client = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in outputs_by_client.values():
            for output in outputs.outputs:
                if output.request_id in waiting_for_end:
                    _keep_until_end(waiting_for_end[output.request_id], output)
        return outputs_by_client


def _ends_in_the_engine(request: Any) -> bool:
    """Whether the client waits for a last output, and the engine alone says which it is."""
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.stop
    )


def _keep_until_end(request: Any, output: Any) -> None:
    """Move the log-probs of an output to its request, or all of them to its last output. They are
    an attribute of the request, so they go when vLLM drops it."""
    kept = vars(request).setdefault("kept_log_probs", [])
    if output.new_logprobs is not None:
        kept.append(output.new_logprobs)
    output.new_logprobs = joined(kept) if output.finish_reason is not None and kept else None


def joined(parts: list[LogprobsLists]) -> LogprobsLists:
    """The log-probs of consecutive tokens of one request, as one."""
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )


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
