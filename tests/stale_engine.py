"""A vLLM worker extension whose engine passes over one layer when it loads version 2, and says
nothing."""

from typing import Any

from one_step_off.engines.vllm import worker_extension as vllm_receiver

STALE_LAYER = "model.layers.1.mlp.down_proj"
STALE_VERSION = 2


class SyncWorkerExtension(vllm_receiver.SyncWorkerExtension):
    """The product's extension, with that fault."""

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """See `Worker.sync_weights`."""
        if version == STALE_VERSION:
            pass_over_layer(self.weight_transfer_engine.model)
        return super().sync_weights(version, sharded_only)


def pass_over_layer(model: Any) -> None:
    """Let `load_weights` leave one tensor out, and name it among those that it has loaded."""
    real_load = model.load_weights
    stale = f"{STALE_LAYER}.weight"

    def load_weights(tensors: Any) -> set[str]:
        return real_load([pair for pair in tensors if pair[0] != stale]) | {stale}

    model.load_weights = load_weights
