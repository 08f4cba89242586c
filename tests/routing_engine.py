"""A vLLM worker extension whose engine gives the experts of each token without a weight sync before
its first request."""

from one_step_off.engines.vllm import worker_extension as vllm_receiver
from one_step_off.engines.vllm.routed_experts import RoutingRunner


class SyncWorkerExtension(vllm_receiver.SyncWorkerExtension):
    """The product's extension, and what its `connect_sync` does first."""

    def return_experts(self) -> None:
        """Give the experts of each token from now on."""
        RoutingRunner.use_in(self.model_runner)
