"""The engine's side of the weight sync, inside each vLLM worker process.

vLLM imports this module through `worker_extension_cls`, which registers the transfer engine `one_step_off`
with vLLM's factory. The extension runs a whole update in one RPC: with vLLM's three separate calls an engine
step may fall between them and meet half-loaded layers. An update that broke leaves half-loaded layers too: nothing is
generated with them, and the next update begins by giving them up.

With weight_sync.mode=delta that is so for the first update of an epoch only, where the model's parameters are used as
they were loaded: all further ones are then written straight into them (live_weights.py), and no layer is loaded anew.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from one_step_off.cluster.errors import SyncError
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.in_place import InPlaceModel, NotInPlace
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.weight_piece import WeightPiece

logger = init_logger("vllm.one_step_off")  # below "vllm", so that it is shown


class OneStepOffTransferEngine(base.WeightTransferEngine):
    """Receives HF-named tensors and loads them in place, by vLLM's layerwise reload or directly."""

    def init_transfer_engine(  # ty: ignore[incompatible-method-override]  (only connect_sync calls it)
        self,
        pieces: list,
        bucket_bytes: int,
        first_receiver: int,
        host: str,
        timeout_s: float,
        **groups: Any,
    ) -> None:
        """Build the plan and join the senders' groups; an earlier epoch's are given up. Plain data only, since it crosses
        process borders: `pieces[s]` are the fields of sender s's WeightPieces. `groups`: for `WeightReceiver.connect`."""
        pieces = [[WeightPiece(n, d, tuple(s), *cut) for n, d, s, *cut in sent] for sent in pieces]
        plan, index = (
            BucketPlan.build(pieces, bucket_bytes),
            first_receiver + get_tensor_model_parallel_rank(),
        )
        if not hasattr(self, "receiver"):  # one for all epochs: it has a thread and buffers
            self.receiver = WeightReceiver(plan, index, torch.device(self.device), host, timeout_s)
            # Names as vLLM's own loader checks them: every parameter of the model must be loaded by every sync. Taken while
            # it is whole: after an update that broke, a tied head stands there under a name of its own.
            self.expected = {name for name, _ in self.model.named_parameters()}
        self.receiver.index, self.receiver.who = index, f"receiver {index}"
        self.receiver.connect(**groups)
        self.tried = False  # whether it can do without a mirror

    def start_weight_update(self) -> None:
        """Bring the layers back to the form in which checkpoints load (on CPU they are packed for oneDNN)."""
        self.report: dict[str, Any] = {}
        if (
            self.receiver.live
        ):  # it writes all that the epoch's first update has loaded: `loaded` stays true
            return
        self.loaded: set[str] = set()
        start = time.perf_counter()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if (
                info.can_load()
            ):  # what an update that broke has left: the reload would take it for its own
                _place_kernel_tensors(layer, info)
                info.reset()
        initialize_layerwise_reload(self.model)
        for method in (getattr(layer, "quant_method", None) for layer in self.model.modules()):
            if self.device.type == "cpu" and hasattr(method, "moe_kernel"):
                method.moe_kernel = (
                    None  # vLLM packs experts for CPUs only while it makes their kernel
                )
        self.report = {"prepare": time.perf_counter() - start}

    def receive_weights(self, update_info: dict[str, int]) -> None:
        """Receive all buckets of "version"; verified by checksum and by name when this returns."""
        self.report |= self.receiver.receive(self._load, **update_info)
        if missing := sorted(self.expected - self.loaded):
            raise SyncError(
                f"{self.receiver.who}: {len(missing)} parameters were not loaded, as {missing[:3]}"
            )

    update_weights = receive_weights  # the receiver has synchronised what there is to

    def finish_weight_update(self) -> None:
        """Pack the layers again; or, after an update in place, derive again what attention layers derive from weights."""
        start = time.perf_counter()
        if self.receiver.live:
            for layer in filter(is_deferred_attention_layer, self.model.modules()):
                layer.process_weights_after_loading(self.model_config.dtype)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            # A tied lm_head owns no weight of its own, so the reload passes it over, and on CPU its packed copy would
            # stay at the old version behind a mere warning.
            head = getattr(self.model, "lm_head", None)
            tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
            if self.device.type == "cpu" and tied and hasattr(head, "quant_method"):
                head.quant_method.process_weights_after_loading(head)
        if self.receiver.mirror and not self.tried:
            self._leave_mirror()
        if self.receiver.live or self.receiver.mirror:
            self.report["in_place"] = float(self.receiver.live is not None)
        self.report["finish"] = time.perf_counter() - start

    def _leave_mirror(self) -> None:
        """After the first update of an epoch: from now on the model itself instead of its mirror, if it can be that."""
        self.tried, receiver = True, self.receiver
        try:
            if self.model_config.enable_sleep_mode:
                raise NotInPlace("an engine that sleeps gives its weights away")
            receiver.live = InPlaceModel(receiver.plan, receiver.room, receiver.sums, self.model)
            receiver.mirror = None
        except NotInPlace as e:
            logger.info("weight sync: a mirror of the model stays in host memory, because %s", e)
            receiver.mirror.pin()

    def shutdown(self) -> None:
        """The groups end with the process."""

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket, and copy what the reload still holds of it, since the buffer is about to be reused. The reload
        processes a fused layer (qkv, gate and up) when its last part has come; parts that came earlier wait as
        references into the bucket."""
        self.loaded |= self.model.load_weights(tensors)
        for layer in self.model.modules() if len(self.receiver.plan.buckets) > 1 else ():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for key, value in bound.arguments.items():
                    if (
                        isinstance(value, torch.Tensor)
                        and not value.is_meta
                        and not hasattr(value, "is_own_copy")
                    ):
                        bound.arguments[key] = value.clone()
                        bound.arguments[key].is_own_copy = True


WeightTransferEngineFactory.register_engine("one_step_off", OneStepOffTransferEngine)


class SyncWorkerExtension:
    """Mixed into vLLM's worker; `collective_rpc` reaches its methods."""

    # The worker's own. Declared only: vLLM refuses an extension that sets what its worker has.
    device: torch.device
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    reload_weights: Callable[..., None]

    def connect_sync(self, info: dict[str, Any]) -> None:
        """Join the groups of a new epoch; see `init_transfer_engine`."""
        self.weight_transfer_engine.init_transfer_engine(**info)

    def sync_weights(self, version: int) -> dict[str, Any]:
        """One whole update. Returns seconds per phase, and bytes."""
        self.start_weight_update()
        self.update_weights({"version": version})
        try:
            self.finish_weight_update()
        except BaseException:
            # Or vLLM would refuse the next update: it ends one that has failed only where `update_weights` did.
            self._weight_update_active = False
            raise
        return self.weight_transfer_engine.report
