"""Weights into vLLM: the engine's part in the weight sync, inside each vLLM worker process.

vLLM imports this module through `worker_extension_cls`, before the worker creates its process
groups. The import registers the transfer engine `one_step_off` with vLLM's factory.
`SyncWorkerExtension` runs a whole update in one RPC: with vLLM's three separate calls an engine
step may run between them and meet half-loaded layers. A failed update leaves half-loaded layers
too: nothing is generated with them, and the next update begins by discarding them.

This holds for the first update only, if the model's parameters are used as they were loaded: it
proves where each of the checkpoint's numbers lies (shard_layout.py). All later updates bring what
this worker keeps, straight into the parameters, and no layer is loaded again.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.utils.nccl import unpinned_nccl_env

from one_step_off.cluster.bounded_waits import exit_when_stuck
from one_step_off.cluster.errors import SyncError
from one_step_off.distributed_util import bind_rendezvous_to_its_host
from one_step_off.engines.receiving_worker import ReceivingWorker
from one_step_off.engines.vllm import cpu_models
from one_step_off.engines.vllm.engine_args import RETURN_EXPERTS
from one_step_off.engines.vllm.load_recording import NotInPlace, TensorShapes
from one_step_off.engines.vllm.reload_proof import ReloadProof
from one_step_off.engines.vllm.shard_layout import ShardLayout
from one_step_off.weight_sync.shard_blocks import plain_shards

MISSING_NAMES_SHOWN = 3

logger = init_logger("vllm.one_step_off")  # below "vllm", so that its messages are shown


class OneStepOffTransferEngine(ReceivingWorker, base.WeightTransferEngine):
    """Receives tensors by their Hugging Face names and loads them, by vLLM's layerwise reload or in
    place."""

    shard_layout: ShardLayout | None = None
    """What this worker keeps of every tensor. None: not learned, or whole tensors must travel."""
    layout_is_proved = False
    """The last ordinary load has shown that `shard_layout` is right."""
    reload_proof: ReloadProof | None = None
    """Of a quantized model, whose parameters are not what is received."""
    sharded_only = False
    """The update under way brings what this worker keeps, and nothing is loaded by name."""

    def learn_shards(self, shapes: dict[str, Any], expects_deltas: bool) -> dict[str, Any]:
        """Learn which boxes of the tensors this worker keeps; the next ordinary update proves it.

        Plain data only, since it crosses process borders.

        Args:
            shapes: name of a tensor -> [name of its dtype, its shape], of all that are sent.
            expects_deltas: what the model holds will be read, too. Packed layers need a plain copy
                for that.

        Returns:
            "kept": name -> [[start, stop] of each box], as `shards_from_plain` reads it; None:
            whole tensors must travel, because of "reason".

        Raises:
            SyncError: the model is quantized, and its reload cannot be proved.
        """
        self.shard_layout = None
        self.layout_is_proved = False
        named_shapes = {name: (dtype, tuple(shape)) for name, (dtype, shape) in shapes.items()}
        if self.model_config.quantization is not None:
            self._discard_failed_update()  # of the attempt before, where engines stay
            self.reload_proof = _learn_reload(self.model, named_shapes)
            return {"kept": None, "reason": "the model is quantized"}
        try:
            if self.model_config.enable_sleep_mode:
                raise NotInPlace("a sleeping engine releases its weights")
            self.shard_layout = ShardLayout.learn(self.model, named_shapes, expects_deltas)
        except NotInPlace as error:
            _log_whole_tensors(error)
            return {"kept": None, "reason": str(error)}
        return {"kept": plain_shards(self.shard_layout.kept), "reason": ""}

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the senders' groups of a new epoch. `init_info`: see `ReceivingWorker.join_groups`.

        Raises:
            SyncError: as `WeightReceiver.connect`.
        """
        if not hasattr(self, "expected_names"):
            # The names that vLLM's own loader checks: every sync must load every parameter. Taken
            # from the whole model: after a failed update, a tied head has a name of its own.
            self.expected_names = {name for name, _ in self.model.named_parameters()}
        # Members of a communicator must agree on NCCL's settings. vLLM changes them for its own
        # communicators if it is batch invariant, and the trainer does not.
        with unpinned_nccl_env():
            worker = get_tensor_model_parallel_rank()
            self.join_groups(init_info, torch.device(self.device), worker)

    def start_weight_update(self) -> None:
        """Bring the layers back to the form in which checkpoints load (on CPU they are packed for
        oneDNN)."""
        self.report: dict[str, Any] = {}
        self.receiver.layout = self.shard_layout if self.layout_is_proved else None
        if self.sharded_only:
            self.shard_layout.start()
            return  # the layout covers every parameter
        self.layout_is_proved = False
        self.loaded_names: set[str] = set()
        start = time.perf_counter()
        self._discard_failed_update()
        initialize_layerwise_reload(self.model)
        if self.reload_proof:
            self.reload_proof.start()
        if self.device.type == "cpu":
            self._drop_expert_kernels()
        self.report = {"prepare": time.perf_counter() - start}

    def receive_weights(self, update_info: dict[str, int]) -> None:
        """Receive all buckets of "version"; verified by checksum and by name when this returns.

        Raises:
            SyncError: as `WeightReceiver.receive`, or parameters were not loaded.
        """
        self.report |= self.receiver.receive(
            self._load, **update_info, sharded_only=self.sharded_only
        )
        if self.sharded_only:
            return
        expected = self.reload_proof.loaded_names if self.reload_proof else self.expected_names
        missing = sorted(expected - self.loaded_names)
        if missing:
            raise SyncError(
                f"{self.receiver.name}: {len(missing)} parameters were not loaded, "
                f"such as {missing[:MISSING_NAMES_SHOWN]}"
            )

    # vLLM's wrapper of `receive_weights` would synchronize the device, which the receiver does
    # where needed.
    update_weights = receive_weights

    def finish_weight_update(self) -> None:
        """Pack the layers again, and let attention layers derive again what they derive from
        weights."""
        start = time.perf_counter()
        if self.sharded_only:
            self.shard_layout.finish(self.model_config.dtype)
        else:
            finalize_layerwise_reload(self.model, self.model_config)
            self._pack_tied_head()
            if self.reload_proof:
                self.reload_proof.check()
            self._prove_layout()
            if self.receiver.mirror and not self.layout_is_proved:
                self.receiver.mirror.pin()
        self.report["in_place"] = float(self.sharded_only)
        self.report["layout_proved"] = float(self.layout_is_proved)
        self.report["finish"] = time.perf_counter() - start

    def stores_of_workers(self) -> list[dist.Store]:
        """The senders' stores, with a prefix that only the workers of this replica share."""
        first_receiver = self.receiver.index - get_tensor_model_parallel_rank()
        prefix = f"replica{first_receiver}"
        return [dist.PrefixStore(prefix, signal.store) for signal in self.receiver.abort_signals]

    def shutdown(self) -> None:
        """The groups end with the process."""

    def _discard_failed_update(self) -> None:
        """Reset layers that a failed update has left half-loaded: the reload would take what they
        hold for its own."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                _place_kernel_tensors(layer, info)
                info.reset()

    def _drop_expert_kernels(self) -> None:
        """vLLM packs experts for CPUs only while it creates their kernel, so it must create it
        again."""
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def _pack_tied_head(self) -> None:
        """Pack a tied lm_head on CPUs. It owns no weight, so the reload passes it over, and its
        packed copy would stay at the old version with no more than a warning."""
        head = getattr(self.model, "lm_head", None)
        is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        if self.device.type == "cpu" and is_tied and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def _prove_layout(self) -> None:
        """After an ordinary update: compare what the learned layout finds in the parameters with
        what was loaded. A layout that is wrong is dropped."""
        if not self.shard_layout:
            return
        try:
            self.shard_layout.prove()
            self.layout_is_proved = True
        except NotInPlace as error:
            self.shard_layout = None
            _log_whole_tensors(error)

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors of a bucket, and copy what the reload still refers to.

        The reload processes a fused layer (qkv, gate and up) when its last part has come. Parts
        that came earlier wait as references into the bucket, whose buffer is about to be reused.
        """
        proof = self.reload_proof or self.shard_layout
        if proof:
            proof.note_loaded(tensors)
        self.loaded_names |= self.model.load_weights(tensors)
        if len(self.receiver.plan.buckets) > 1:
            for layer in self.model.modules():
                _copy_waiting_parts(layer)


def _learn_reload(model: torch.nn.Module, shapes: TensorShapes) -> ReloadProof:
    """Raises SyncError: there is no proof of a reload of this quantized model."""
    try:
        return ReloadProof.learn(model, shapes)
    except NotInPlace as error:
        raise SyncError(
            f"nothing would show that the quantized engine has the new weights: {error}; set "
            "rollout.quantization=none"
        ) from error


def _log_whole_tensors(error: NotInPlace) -> None:
    logger.info("weight sync: whole tensors travel, because %s", error)


def _copy_waiting_parts(layer: torch.nn.Module) -> None:
    """Replace the tensors that wait in a layer's reload by copies, once each."""
    for _, bound in get_layerwise_info(layer).loaded_weights:
        for key, value in bound.arguments.items():
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            if not hasattr(value, "is_own_copy"):
                copy = value.clone()
                copy.is_own_copy = True
                bound.arguments[key] = copy


class SyncWorkerExtension:
    """Mixed into vLLM's worker; `collective_rpc` reaches its methods."""

    # Of the worker. Declared only: vLLM refuses an extension that sets what its worker has.
    device: torch.device
    vllm_config: Any
    model_runner: Any
    weight_transfer_engine: Any
    available_kv_cache_memory_bytes: int
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]
    reload_weights: Callable[..., None]

    def kv_cache_bytes(self) -> int:
        """The size of the KV cache: as given, or as the worker chose by measuring the GPU's
        memory."""
        given = self.vllm_config.cache_config.kv_cache_memory_bytes
        return given or self.available_kv_cache_memory_bytes

    def let_drafts_reach_the_end(self) -> None:
        """See `cpu_models`; called once with `rollout.speculation`, before the first request."""
        cpu_models.let_drafts_reach_the_end(self.model_runner)

    def learn_shards(self, shapes: dict[str, Any], expects_deltas: bool) -> dict[str, Any]:
        """What this worker keeps of every tensor; see `OneStepOffTransferEngine.learn_shards`."""
        return self.weight_transfer_engine.learn_shards(shapes, expects_deltas)

    def connect_sync(self, info: dict[str, Any]) -> None:
        """Join the groups of a new epoch; see `init_transfer_engine`."""
        if RETURN_EXPERTS in self.vllm_config.additional_config:
            from one_step_off.engines.vllm.routed_experts import RoutingRunner  # of CPUs alone

            RoutingRunner.use_in(self.model_runner)  # before the first request
        self.weight_transfer_engine.init_transfer_engine(info)

    def sync_weights(self, version: int, sharded_only: bool = False) -> dict[str, Any]:
        """One whole update. Returns seconds per phase, and bytes.

        Args:
            version: of the weights.
            sharded_only: as `WeightReceiver.receive`.
        """
        engine = self.weight_transfer_engine
        engine.sharded_only = sharded_only
        # Workers that quantize agree on the largest numbers of each layer.
        is_joint = engine.reload_proof and self.vllm_config.parallel_config.tensor_parallel_size > 1
        with exit_when_stuck(engine.stores_of_workers() if is_joint else ()):
            try:
                self.start_weight_update()
                self.update_weights({"version": version})
                self.finish_weight_update()
            except BaseException as error:
                # vLLM ends a failed update only in `update_weights`, and would refuse the next one.
                self._weight_update_active = False
                engine.receiver.give_up(error)  # other processes may wait for this one
                raise
        return engine.report


bind_rendezvous_to_its_host()
cpu_models.prepare()
cpu_models.set_temperatures()
WeightTransferEngineFactory.register_engine("one_step_off", OneStepOffTransferEngine)
