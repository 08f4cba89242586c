"""The engine's side of the weight sync: what vLLM mixes into each of its workers through `worker_extension_cls`.

A whole update is one RPC: with vLLM's own three calls an engine step may fall between them and meet half-loaded layers.
"""

from __future__ import annotations

import time

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from one_step_off.distributed_util import BucketPlan, Receiver, SyncError
from one_step_off.workers import WeightPiece


class SyncWorkerExtension:
    """Methods for `collective_rpc`. Arguments and answers are plain data only, since they cross process borders."""

    def connect_sync(
        self,
        pieces: list[list[tuple]],
        bucket_bytes: int,
        addresses: list[tuple[str, int]],
        receivers: int,
        first_receiver: int,
        host: str,
        timeout_s: float,
    ) -> None:
        """Build the plan and join the senders' groups. `pieces[s]`: the fields of sender s's WeightPieces."""
        plan = BucketPlan.build(
            [[WeightPiece(n, dtype, tuple(shape), a, b) for n, dtype, shape, a, b in sent] for sent in pieces],
            bucket_bytes,
        )
        index = first_receiver + get_tensor_model_parallel_rank()
        self.weight_receiver = Receiver(plan, index, self.device, host, timeout_s)
        self.weight_receiver.connect(addresses, receivers)
        # Names as vLLM's own loader checks them: every parameter of the model must be loaded by every sync.
        self.weight_names = {name for name, _ in self.model_runner.get_model().named_parameters()}

    def sync_weights(self, version: int) -> dict[str, float]:
        """One whole update, loaded in place by vLLM's layerwise reload. Returns seconds per phase and bytes.

        Raises:
            SyncError: it is not complete and exact by checksum and by name; the model must not be used then.
        """
        model, receiver = self.model_runner.get_model(), self.weight_receiver
        loaded: set[str] = set()

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            loaded.update(model.load_weights(tensors))
            if len(receiver.plan.buckets) > 1:
                _keep_pending(model)

        with set_current_vllm_config(self.vllm_config):
            begin = time.perf_counter()
            initialize_layerwise_reload(model)  # to the form in which checkpoints load; on CPU layers are packed
            prepare = time.perf_counter() - begin
            report = receiver.receive(load, version)
            if missing := sorted(self.weight_names - loaded):
                raise SyncError(f"{receiver.who}: {len(missing)} parameters were not loaded, as {missing[:3]}")
            begin = time.perf_counter()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            finalize_layerwise_reload(model, self.model_config)
            # A tied lm_head owns no weight of its own, so the reload passes it over, and on CPU its packed copy would
            # stay at the old version behind a mere warning.
            head = getattr(model, "lm_head", None)
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            if self.device.type == "cpu" and tied and hasattr(head, "quant_method"):
                head.quant_method.process_weights_after_loading(head)
        return report | {"prepare": prepare, "finish": time.perf_counter() - begin}


def _keep_pending(model: torch.nn.Module) -> None:
    """Copy what the reload still holds of a bucket, since the bucket's buffer is about to be reused.

    The reload processes a fused layer (qkv, gate and up) when its last part has come; parts that came
    earlier wait as references into the bucket.
    """
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for key, value in bound.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta and not hasattr(value, "is_own_copy"):
                    bound.arguments[key] = value.clone()
                    bound.arguments[key].is_own_copy = True
