"""An engine with vLLM's own LoRA kernels, for comparison."""

from one_step_off.weight_sync.vllm_adapter import AdapterWorkerExtension


class VllmKernelsExtension(AdapterWorkerExtension):
    """The product's extension without its kernels for CPUs."""

    has_own_kernels = False
