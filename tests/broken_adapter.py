"""A vLLM worker extension that breaks an adapter after it has come over the wire: what an error in
vLLM's loader would do."""

import torch

from one_step_off.engines.vllm.adapter_extension import AdapterWorkerExtension

BROKEN_VERSION = 1


class FlippedBitExtension(AdapterWorkerExtension):
    """One bit of version 1 is flipped between the checksums and vLLM's buffers."""

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, float]:
        """As `AdapterWorkerExtension.sync_weights`."""
        slot = self.policy_adapter
        real_activate = slot.activate

        def activate() -> None:
            matrix = list(slot.received.values())[-1]
            matrix.view(torch.int32).view(-1)[-1] ^= 1
            real_activate()

        if version == BROKEN_VERSION:
            slot.activate = activate
        try:
            return super().sync_weights(version, sharded_only)
        finally:
            slot.activate = real_activate
