"""The experts that vLLM chose for each token (`rollout.replay_routing`).

vLLM's own connector keeps them: by block and hash for prefixes from the cache, by request for the
rest, through preemptions and resets of the cache. vLLM 0.32 uses it in its second model runner
alone, which needs Triton. On CPUs its first runner is given the same connector here.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    PendingAuxOutput,
    get_aux_output_connector,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class RoutingRunner(CPUModelRunner):
    """vLLM's first model runner for CPUs, with the connector of its second one."""

    experts: AuxOutputWorkerConnector
    pending_experts: PendingAuxOutput | None

    @classmethod
    def use_in(cls, runner: Any) -> None:
        """Make a worker's model runner one of this class, before its first request."""
        if type(runner) is cls:
            return
        if type(runner) is not CPUModelRunner:
            raise RuntimeError(
                f"rollout.replay_routing: vLLM runs the model with {type(runner).__name__}, which "
                "is not the first runner for CPUs"
            )
        # vLLM has no place where another class of runner can be named.
        runner.__class__ = cls
        runner.pending_experts = None
        runner.experts = get_aux_output_connector(
            runner.get_model(), runner.vllm_config, runner.kv_cache_config
        )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's. What the routers chose is kept until the tokens are sampled."""
        self.experts.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output, *args, **kwargs)
        if self.execute_model_state is not None:  # the model has run
            rows = len(self.input_batch.req_ids)
            # Copies: the next step writes into the same arrays.
            self.pending_experts = self.experts.prepare_output(
                SimpleNamespace(
                    req_ids=list(self.input_batch.req_ids),
                    query_start_loc_np=self.query_start_loc.np[: rows + 1].copy(),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[:rows].copy(),
                )
            )
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's, with the experts of each request in the output."""
        output = super().sample_tokens(grammar_output)
        pending, self.pending_experts = self.pending_experts, None
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            # Nothing is rejected without speculative decoding, which the config refuses.
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output
