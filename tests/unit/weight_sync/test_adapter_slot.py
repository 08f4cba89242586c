"""vLLM's LoRA buffers in real models, whole and under tensor parallelism: they hold what was
received, or the worker says where they do not; and the kernels that read them on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.cluster.errors import SyncError
from tests.unit.weight_sync.parallel_models import Case, Worker, run_workers

RANK = 3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
"""Not up_proj: its part of vLLM's gate_up_proj stays empty."""
ENGINE = {
    "enable_lora": True,
    "max_loras": 1,
    "max_cpu_loras": 1,
    "max_lora_rank": 8,
    "lora_target_modules": TARGETS,
}
Matrices = dict[str, torch.Tensor]


def random_matrices(worker: Worker, seed: int) -> Matrices:
    """An adapter by the names of the stream."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, worker.case.dtype)
    matrices = {}
    for name, tensor in worker.case.tensors(0).items():
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] in TARGETS and name.endswith(".weight"):
            outputs, inputs = tensor.shape
            a = torch.randn(RANK, inputs, generator=generator).to(dtype)
            b = torch.randn(outputs, RANK, generator=generator).to(dtype)
            matrices |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    return matrices


def slot_of(worker: Worker) -> Any:
    """The slot of a model of this worker, as the engine makes it."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    from one_step_off.engines.vllm.adapter_slot import AdapterSlot

    model = worker.model(worker.case.tensors(0), packed=False)
    cpu = torch.device("cpu")
    manager = LRUCacheWorkerLoRAManager(worker.vllm_config, cpu, model.embedding_modules)
    manager.create_lora_manager(model, worker.vllm_config)
    return AdapterSlot(manager, f"worker {worker.rank}")


def receive(slot: Any, matrices: Matrices) -> None:
    """As the receiver gives them: views into a buffer that is used again."""
    for name, matrix in matrices.items():
        buffer = matrix.clone()
        slot.note_received([(name, buffer)])
        buffer.zero_()


def refusal_of(slot: Any) -> str:
    with pytest.raises(SyncError) as refused:
        slot.verify()
    return str(refused.value)


def flip_a_bit(tensor: torch.Tensor) -> None:
    words = tensor.view(torch.int16)
    words.view(-1)[len(words.view(-1)) // 2] ^= 1


def fill_and_break(worker: Worker) -> list[np.ndarray]:
    """Two versions, and what must be noticed. Returns what the layer qkv_proj adds to its output,
    and what down_proj does, for fixed inputs."""
    slot = slot_of(worker)
    matrices = random_matrices(worker, 1)
    dtype = worker.case.dtype
    shapes = {name: [dtype, list(matrix.shape)] for name, matrix in matrices.items()}
    slot.check_names(shapes)
    for wrong, message in (
        ({"model.layers.0.mlp.up.lora_A.weight": [dtype, [RANK, 64]]}, "has no place for 1 matr"),
        ({next(iter(shapes)): ["float16", [RANK, 64]]}, "matrices of ['float16'] for buffers"),
    ):
        with pytest.raises(SyncError) as refused:
            slot.check_names(wrong)
        assert message in str(refused.value)

    for seed in (2, 1):  # the second takes the place of the first
        slot.clear()
        receive(slot, random_matrices(worker, seed))
        slot.activate()
        slot.verify()
    names = ("self_attn.qkv_proj", "mlp.down_proj")
    added = [layer_output(slot, name, worker).numpy() for name in names]

    place = slot.places["model.layers.1.mlp.gate_proj", False]
    flip_a_bit(place.buffer)
    assert "1 buffers of vLLM's LoRA do not hold" in refusal_of(slot)
    assert "model.layers.1.mlp.gate_proj B" in refusal_of(slot)
    flip_a_bit(place.buffer)
    slot.verify()
    untrained = slot.places["model.layers.0.mlp.up_proj", True]
    untrained.buffer[0, 0] = 1.0
    assert "model.layers.0.mlp.up_proj A" in refusal_of(slot), "no matrix was received for it"

    slot.clear()
    receive(slot, matrices)
    flip_a_bit(slot.received["model.layers.0.self_attn.v_proj.lora_B.weight"])
    slot.activate()
    # With tensor parallelism another worker may have the row that was hit.
    slice_is_hit = worker.case.workers == 1 or worker.rank == 1
    if slice_is_hit:
        assert "model.layers.0.self_attn.v_proj B" in refusal_of(slot)

    slot.clear()
    name = "model.layers.0.mlp.down_proj.lora_B.weight"
    with pytest.raises(SyncError, match="does not fit into a buffer of the shape"):
        slot.note_received([(name, matrices[name][:-2])])
    return added


def layer_output(slot: Any, name: str, worker: Worker) -> torch.Tensor:
    """What the adapter adds to the output of a layer in this worker."""
    from one_step_off.engines.vllm.adapter_extension import OneAdapterKernels

    layer = slot.adapters.modules[f"model.layers.0.{name}"]
    inputs = layer.lora_a_stacked[0].shape[-1]
    x = probe(layer.base_layer.input_size)
    if inputs < layer.base_layer.input_size:
        x = x[:, worker.rank * inputs : (worker.rank + 1) * inputs]
    y = torch.zeros(len(x), sum(layer.output_slices))
    kernels = OneAdapterKernels(1, 1, torch.device("cpu"))
    a = tuple(tensor.float() for tensor in layer.lora_a_stacked)
    b = tuple(tensor.float() for tensor in layer.lora_b_stacked)
    kernels.add_lora_linear(y, x, a, b, 1.0, layer.output_slices)
    return y


def probe(width: int) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("workers", "dtype"),
    [
        (1, "bfloat16"),
        pytest.param(1, "float32", marks=pytest.mark.slow),
        pytest.param(2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_buffers_hold_what_was_received_or_the_worker_says_which_do_not(workers, dtype):
    case = Case("qwen3", workers, dtype=dtype, engine=ENGINE)
    added = []
    for outputs in run_workers(case, fill_and_break):
        added.append([torch.from_numpy(output) for output in outputs])
    matrices = random_matrices(Worker(case, 0, None), 1)

    def product(layer: str) -> torch.Tensor:
        a = matrices[f"model.layers.0.{layer}.lora_A.weight"].float()
        b = matrices[f"model.layers.0.{layer}.lora_B.weight"].float()
        return probe(a.shape[1]) @ a.T @ b.T

    # Each worker has its heads of q, k and v side by side.
    q, k, v = (product(f"self_attn.{part}_proj").chunk(workers, 1) for part in "qkv")
    for rank in range(workers):
        expected = torch.cat([q[rank], k[rank], v[rank]], 1)
        torch.testing.assert_close(added[rank][0], expected, atol=1e-4, rtol=1e-5)
    whole = sum(outputs[1] for outputs in added)
    torch.testing.assert_close(whole, product("mlp.down_proj"), atol=1e-4, rtol=1e-5)


def test_the_kernels_for_one_adapter_compute_what_vllms_do():
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from one_step_off.engines.vllm.adapter_extension import OneAdapterKernels

    tokens, inputs, slices = 6, 16, (8, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator)
    a = tuple(torch.randn(1, 1, RANK, inputs, generator=generator) for _ in slices)
    b = tuple(torch.randn(1, 1, size, RANK, generator=generator) for size in slices)
    output = torch.randn(tokens, sum(slices), generator=generator)
    vllms = PunicaWrapperCPU(tokens, tokens, torch.device("cpu"))
    mapping = LoRAMapping((1,) * tokens, (1,) * tokens, is_prefill=True)
    vllms.update_metadata(mapping, [1], 2, 100)
    expected = output.clone()
    vllms.add_lora_linear(expected, x, a, b, 0.5, slices)
    assert (expected - output).abs().max() > 1
    actual = output.clone()
    kernels = OneAdapterKernels(1, 1, torch.device("cpu"))
    kernels.add_lora_linear(actual, x, a, b, 0.5, slices)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
