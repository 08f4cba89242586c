"""A worker extension for engines whose linears use their parameters as they were loaded, as on a GPU: vLLM packs them for
every CPU kernel but torch's own, which it takes where there is no other."""

import hashlib

import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from one_step_off.weight_sync import vllm_receiver

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *args: False


class SyncWorkerExtension(vllm_receiver.SyncWorkerExtension):
    def fingerprint(self) -> str:
        """Of the bits of all parameters."""
        digest = hashlib.blake2b()
        for name, tensor in self.weight_transfer_engine.model.named_parameters():
            digest.update(
                name.encode()
                + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        return digest.hexdigest()
