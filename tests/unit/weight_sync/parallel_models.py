"""Real vLLM models under tensor parallelism on CPUs: a forked process for each rank, over gloo."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.unit import forked_ranks

LIMIT_S = 120.0
JOIN_S = 10.0
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,  # vLLM pads it, to 256 or more
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True)
class Case:
    """A model, and how many workers share it."""

    kind: str
    workers: int
    tied: bool = False
    experts_are_whole: bool = False
    """Expert parallelism: a worker keeps whole experts."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Of its config."""
    dtype: str = "bfloat16"
    engine: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine."""

    @property
    def config(self) -> dict[str, Any]:
        sizes = dict(SIZES)
        if self.kind == "qwen2":  # vLLM takes its head size from hidden_size
            sizes |= {"hidden_size": 128, "head_dim": 32}
        experts = EXPERTS if self.kind == "qwen3_moe" else {}
        return {
            "architectures": [ARCHITECTURES[self.kind]],
            "model_type": self.kind,
            "tie_word_embeddings": self.tied,
            "torch_dtype": self.dtype,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **sizes,
            **experts,
            **self.changes,
        }

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        """Random weights, named and shaped as in a checkpoint."""
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config))
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in _checkpoint_shapes(model, self).items():
            values = torch.randn(shape, generator=generator) * 0.1
            tensors[name] = values.to(getattr(torch, self.dtype))
        return tensors


def _checkpoint_shapes(model: torch.nn.Module, case: Case) -> dict[str, tuple[int, ...]]:
    """transformers fuses experts in its model; checkpoints hold each on its own."""
    shapes = {}
    for name, tensor in model.state_dict().items():
        if case.tied and name == "lm_head.weight":
            continue
        prefix, found, leaf = name.rpartition(".experts.")
        if not found:
            shapes[name] = tuple(tensor.shape)
            continue
        for expert in range(len(tensor)):
            rows, columns = tensor.shape[1:]
            if leaf == "gate_up_proj":
                for part in ("gate_proj", "up_proj"):
                    shapes[f"{prefix}.experts.{expert}.{part}.weight"] = (rows // 2, columns)
            else:
                shapes[f"{prefix}.experts.{expert}.down_proj.weight"] = (rows, columns)
    return shapes


@dataclass
class Worker:
    """One rank of a case, inside its process."""

    case: Case
    rank: int
    vllm_config: Any

    def model(self, tensors: dict[str, torch.Tensor], packed: bool) -> torch.nn.Module:
        """A new vLLM model with these weights; `packed`: for CPU kernels, as an engine has it."""
        from vllm.model_executor.model_loader.utils import (
            initialize_model,
            process_weights_after_loading,
        )
        from vllm.utils.torch_utils import set_default_torch_dtype

        # A layer of attention has one name for all models of a process.
        self.vllm_config.compilation_config.static_forward_context.clear()
        with set_default_torch_dtype(getattr(torch, self.case.dtype)):
            model = initialize_model(self.vllm_config)
        model.load_weights(list(tensors.items()))
        if packed:
            cpu = torch.device("cpu")
            process_weights_after_loading(model, self.vllm_config.model_config, cpu)
        return model

    def reload(
        self,
        model: torch.nn.Module,
        tensors: dict[str, torch.Tensor],
        note: Callable[[list], None] = lambda tensors: None,
    ) -> None:
        """Load newer weights as the receiver does, each tensor in a bucket of its own."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(model)
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        for name, tensor in tensors.items():
            note([(name, tensor)])
            model.load_weights([(name, tensor)])
        finalize_layerwise_reload(model, self.vllm_config.model_config)
        if self.case.tied:
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def run_workers(case: Case, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run job(worker, *args) in every rank of the case. Returns what each returned.

    Raises:
        AssertionError: a rank failed, or did not end within LIMIT_S.
    """
    context = forked_ranks.context()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.config))
        processes = []
        for rank in range(case.workers):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (case, rank, folder, sender, job, args)
            process = forked_ranks.process(_run_rank, arguments)
            process.start()
            sender.close()
            processes.append((process, receiver))
        try:
            return [_result(rank, *process) for rank, process in enumerate(processes)]
        finally:
            for process, _ in processes:
                process.join(JOIN_S)
                process.kill()
            for memory in Path("/dev/shm").glob(f"{Path(folder).name}-*"):
                memory.unlink()  # vLLM's shared memory, which forked processes leave


def _result(rank: int, process: Any, receiver: Any) -> Any:
    assert receiver.poll(LIMIT_S), f"rank {rank} gave no result"
    try:
        error, result = receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None
    assert not error, f"rank {rank}: {error}"
    return result


def _run_rank(
    case: Case, rank: int, folder: str, sender: Any, job: Callable[..., Any], args: tuple
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    try:
        torch.set_num_threads(1)
        os.environ["VLLM_DIST_IDENT"] = Path(folder).name  # as vLLM's CPU worker names its group
        engine_args = EngineArgs(
            model=folder,
            dtype=case.dtype,
            enforce_eager=True,
            max_model_len=64,
            skip_tokenizer_init=True,
            load_format="dummy",
            tensor_parallel_size=case.workers,
            enable_expert_parallel=case.experts_are_whole,
            **case.engine,
        )
        config = engine_args.create_engine_config()
        with set_current_vllm_config(config):
            store = f"file://{folder}/store"
            init_distributed_environment(case.workers, rank, store, rank, "gloo")
            initialize_model_parallel(case.workers)
            result = job(Worker(case, rank, config), *args)
        sender.send(("", result))
        if case.workers > 1:
            torch.distributed.barrier()  # the others may still read from this one
    except BaseException:
        sender.send((traceback.format_exc(), None))
