"""A vLLM worker extension whose engine holds other weights than it received: in one replica, after
one sync, and after all of the sync's own checks. Only the canary can find that."""

from typing import Any

from one_step_off.engines.vllm import worker_extension as vllm_receiver

SPOILED_VERSION = 2
SPOILED_RECEIVER = 1


class SyncWorkerExtension(vllm_receiver.SyncWorkerExtension):
    """The product's extension, with a last norm that is too large."""

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        report = super().sync_weights(version, sharded_only)
        engine = self.weight_transfer_engine
        if version == SPOILED_VERSION and engine.receiver.index == SPOILED_RECEIVER:
            parameters = dict(engine.model.named_parameters())
            parameters["model.norm.weight"].data.mul_(1.5)
        return report
