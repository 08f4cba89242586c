"""A vLLM worker extension whose engine uses its parameters as they were loaded, as on a GPU.

On CPUs vLLM packs the parameters of linear layers for every kernel except torch's own. It uses
torch's where no other kernel is available, so this module hides the others.
"""

import hashlib

import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils

from one_step_off.engines.vllm import worker_extension as vllm_receiver

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *args: False


class SyncWorkerExtension(vllm_receiver.SyncWorkerExtension):
    """The product's extension, and a hash of the engine's parameters."""

    def fingerprint(self) -> str:
        """The hash of the names and the bits of all parameters."""
        digest = hashlib.blake2b()
        for name, tensor in self.weight_transfer_engine.model.named_parameters():
            flat_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(flat_bytes.numpy().tobytes())
        return digest.hexdigest()
