"""An engine with vLLM's own LoRA kernels, for comparison."""

from one_step_off.engines.vllm.adapter_extension import AdapterWorkerExtension


class VllmKernelsExtension(AdapterWorkerExtension):
    """The product's extension without its kernels for CPUs."""

    has_own_kernels = False
