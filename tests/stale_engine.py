"""vLLM worker extensions with faults: an engine that passes over one layer when it loads version 2,
and says nothing; and one of whose two workers cannot load version 1."""

from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

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


class FailingWorkerExtension(vllm_receiver.SyncWorkerExtension):
    """The second worker raises in the middle of a load, where the file
    `additional_config["fail_once"]` does not exist yet."""

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """See `Worker.sync_weights`."""
        mark = Path(self.vllm_config.additional_config["fail_once"])
        if version == 1 and get_tensor_model_parallel_rank() == 1 and not mark.exists():
            mark.touch()
            fail_to_load(self.weight_transfer_engine.model)
        return super().sync_weights(version, sharded_only)


def fail_to_load(model: Any) -> None:
    """Let `load_weights` raise after the first half of the tensors."""
    real_load = model.load_weights

    def load_weights(tensors: Any) -> set[str]:
        pairs = list(tensors)
        real_load(pairs[: len(pairs) // 2])
        raise RuntimeError("broken on purpose in a load")

    model.load_weights = load_weights
