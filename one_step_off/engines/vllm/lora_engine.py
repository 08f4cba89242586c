"""An engine that holds the base model and the adapters apart (weight_sync.lora=adapter): its
arguments, and what every request carries."""

from typing import Any

from one_step_off.config.lora_checks import engine_rank, sends_adapters
from one_step_off.config.schema import Config

ADAPTER_EXTENSION = "one_step_off.engines.vllm.adapter_extension.AdapterWorkerExtension"


def arguments(cfg: Config) -> dict[str, Any]:
    """Fields of vLLM's `AsyncEngineArgs`; empty where the adapters are merged."""
    if not sends_adapters(cfg):
        return {}
    from one_step_off.models.adapted_layers import engine_targets  # transformers: slow to import

    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": engine_rank(cfg.model.lora_rank),
        "lora_target_modules": engine_targets(cfg),
        "worker_extension_cls": ADAPTER_EXTENSION,
    }


def request_of_policy(cfg: Config) -> Any:
    """The `LoRARequest` that every request carries; None where the adapters are merged.

    No request may go without: on CPUs vLLM would give it the adapter of its neighbours in the batch
    or none, by chance.
    """
    if not sends_adapters(cfg):
        return None
    from vllm.lora.request import LoRARequest  # vLLM takes seconds to import

    from one_step_off.weight_sync.base_weights import ADAPTER_ID

    return LoRARequest("policy", ADAPTER_ID, "in memory: weight_sync.lora=adapter")
