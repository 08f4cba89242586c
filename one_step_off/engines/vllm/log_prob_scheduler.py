"""vLLM's scheduler with cheaper log-probs: those of a response leave the engine's process once,
when it has ended.

vLLM sends three small arrays for each new token from the engine's process to its client. Where a
model is small, to pack and unpack them takes a large part of a generation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
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
