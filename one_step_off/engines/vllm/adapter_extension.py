"""LoRA adapters into vLLM, without the model (weight_sync.lora=adapter): the part of a vLLM worker.

The adapter's matrices come over the same groups, in the same buckets and under the same checks as
whole models do. `AdapterWorkerExtension` takes the place of `SyncWorkerExtension`: what was
received goes into a slot of vLLM's LoRA, and the base model stays as the engine has loaded it.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.model_loader import get_model_loader

from one_step_off.cluster.errors import SyncError
from one_step_off.engines.vllm.adapter_slot import AdapterSlot
from one_step_off.engines.vllm.worker_extension import SyncWorkerExtension
from one_step_off.weight_sync import base_weights


class AdapterWorkerExtension(SyncWorkerExtension):
    """Mixed into vLLM's worker; `collective_rpc` reaches its methods."""

    # Of this class; vLLM refuses an extension that sets what its worker has.
    policy_adapter: AdapterSlot
    has_own_kernels = True
    """Whether layers on CPUs get `OneAdapterKernels`; the benchmark measures vLLM's too."""
    rank: int

    def prove_base(self, shapes: dict[str, Any], blocks: list[list[Any]]) -> dict[str, Any]:
        """Check that the engine can hold these matrices, and that its base model is the trainers'.

        Args:
            shapes: of the matrices: name -> [dtype, shape].
            blocks: of `base_weights.BaseModel`.

        Returns:
            As `learn_shards`: whole tensors travel.

        Raises:
            SyncError: a matrix has no place; the base differs; or vLLM's loader cannot show what it
                has loaded.
        """
        who = f"worker {self.rank}"
        self.policy_adapter = AdapterSlot(self.model_runner.lora_manager, who)
        if self.has_own_kernels and self.device.type == "cpu":
            use_fast_kernels(self.policy_adapter.adapters)
        self.policy_adapter.check_names(shapes)
        config = self.vllm_config
        loader = get_model_loader(replace(config.load_config, use_tqdm_on_load=False))
        if not hasattr(loader, "get_all_weights"):
            raise SyncError(f"{who}: {type(loader).__name__} cannot show what it has loaded")
        loaded = loader.get_all_weights(config.model_config, self.policy_adapter.adapters.model)
        base_weights.compare(blocks, loaded, who)
        return {"kept": None, "reason": "adapters alone are sent"}

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """One whole update. Returns seconds per phase, and bytes.

        Args:
            version: of the weights.
            sharded_only: always False, as `prove_base` has answered.

        Raises:
            SyncError: as `WeightReceiver.receive`, or the engine's buffers do not hold what was
                received. The engine has no adapter then.
        """
        adapter = self.policy_adapter
        adapter.clear()
        receiver = self.weight_transfer_engine.receiver
        try:
            report = receiver.receive(adapter.note_received, version, sharded_only)
            begin = time.perf_counter()
            adapter.activate()
            activated = time.perf_counter()
            adapter.verify()
            verified = time.perf_counter()
        except BaseException:
            adapter.clear()
            raise
        report["finish"] = activated - begin
        report["verify"] = report.get("verify", 0.0) + verified - activated
        return report


class OneAdapterKernels(PunicaWrapperCPU):
    """vLLM's LoRA on CPUs, for engines with one slot that every request uses: two plain products.

    vLLM's own kernels look up a slot for each token, and copy its matrices: for 1000 tokens they
    copy 1000 times A and B.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add the adapter's part to the output `y` [tokens, outputs] of a layer, for its input `x`
        [tokens, inputs]; see `PunicaWrapperBase`."""
        y = y.view(-1, y.shape[-1])
        x = x.reshape(-1, x.shape[-1])
        begin = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            hidden = x @ a[0, 0].T
            y[:, begin : begin + size].addmm_(hidden, b[0, 0].T, alpha=scale)
            begin += size


def use_fast_kernels(adapters: Any) -> None:
    """Give every layer `OneAdapterKernels`. `adapters`: vLLM's `LoRAModelManager`.

    Raises:
        SyncError: this vLLM has other kernels for CPUs than those whose place they take.
    """
    for wrapper in adapters.punica_wrapper_mapping.values():
        if type(wrapper) is not PunicaWrapperCPU:
            raise SyncError(
                f"vLLM's LoRA kernels on CPUs are {type(wrapper).__name__}, not PunicaWrapperCPU; "
                "set weight_sync.lora=merged"
            )
    kernels = OneAdapterKernels(1, 1, adapters.device)
    for layer in adapters.modules.values():
        layer.set_mapping(kernels)
