"""The proof that vLLM's reload has brought new weights into a quantized model: real models, with
and without tensor parallelism, and reloads that leave something at the version before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.weight_sync.parallel_models import Case, Worker, run_workers

FP8 = {"quantization": "fp8_per_channel"}
TIED = Case("qwen2", 1, tied=True, engine=FP8)
LAYER = "model.layers.1.self_attn.o_proj"
Weights = dict[str, torch.Tensor]


def quantized_model(worker: Worker, tensors: Weights) -> torch.nn.Module:
    """As vLLM's loader makes it."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_processing
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = worker.model(tensors, packed=False)
    finalize_layerwise_processing(model, worker.vllm_config.model_config)
    cpu = torch.device("cpu")
    process_weights_after_loading(model, worker.vllm_config.model_config, cpu)
    return model


def learned(model: torch.nn.Module, tensors: Weights) -> Any:
    from one_step_off.engines.vllm.reload_proof import ReloadProof

    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return ReloadProof.learn(model, shapes)


def bits(model: torch.nn.Module) -> dict[str, bytes]:
    found = {}
    for name, parameter in model.named_parameters():
        flat = parameter.data.contiguous().view(-1).view(torch.uint8)
        found[name] = flat.numpy().tobytes()
    return found


def reload_twice(worker: Worker, versions: list[Weights]) -> list[bool]:
    """Two proved reloads into one model; whether it then has the bits of a model that was loaded
    with these weights, in the storage that it had at first."""
    first, *others = versions
    model = quantized_model(worker, first)
    storage = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    proof = learned(model, first)
    equal = []
    for tensors in others:
        proof.start()
        worker.reload(model, tensors, proof.note_loaded)
        proof.check()
        assert {n: p.data_ptr() for n, p in model.named_parameters()} == storage
        found = bits(model)
        equal.append(found == bits(quantized_model(worker, tensors)))
    return equal


@pytest.mark.parametrize(
    "case",
    [TIED, Case("qwen3", 2, engine=FP8)],
    ids=["tied head", "two workers"],
)
def test_a_reload_is_proved_and_equals_a_first_load(case):
    """With two workers the scales of a row-parallel layer come from both."""
    versions = [case.tensors(seed) for seed in range(3)]
    for equal in run_workers(case, reload_twice, versions):
        assert equal == [True, True]


FAULTS = {
    "none": "no fault",
    "passed over": f"vLLM has not loaded {LAYER} again",
    "other numbers": f"{LAYER}.weight does not hold the bytes of {LAYER}.weight",
    "half": "qkv_proj.weight does not hold the bytes of model.layers.1.self_attn.v_proj",
    "norm": "model.norm.weight does not hold the bytes",
    "storage": f"{LAYER}.weight does not hold what vLLM has made of the new weights",
    "scale": f"{LAYER}.weight_scale does not hold what vLLM has made",
    "head": "packed copy of lm_head.weight is of the version before",
}
"""Fault of a reload -> what the proof says."""


class FaultyLoad:
    """`load_weights` of a model, with one fault."""

    def __init__(self, model: torch.nn.Module, fault: str, first: Weights) -> None:
        self.real_load = model.load_weights
        self.fault = fault
        self.first = first

    def __call__(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        (name, tensor) = tensors[0]
        passed_over = {
            "passed over": f"{LAYER}.weight",
            "half": "model.layers.1.self_attn.v_proj.weight",
            "norm": "model.norm.weight",
        }
        if name == passed_over.get(self.fault):
            return set()
        if self.fault == "other numbers" and name == f"{LAYER}.weight":
            tensor = self.first[name]
        return self.real_load([(name, tensor)])


def spoil(model: torch.nn.Module, fault: str, first: Weights) -> None:
    """What is wrong after the reload."""
    parameters = dict(model.named_parameters())
    if fault == "storage":
        parameters[f"{LAYER}.weight"].data[0, 0] = 1.0
    if fault == "scale":
        parameters[f"{LAYER}.weight_scale"].data.mul_(2)
    if fault == "head":  # as without `_pack_tied_head`
        embedding = parameters["model.embed_tokens.weight"].data
        new = embedding.clone()
        embedding[: len(first["model.embed_tokens.weight"])] = first["model.embed_tokens.weight"]
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        embedding.copy_(new)


def faulty_reloads(worker: Worker, first: Weights, second: Weights) -> dict[str, str]:
    """Fault -> what the proof says of a reload with it."""
    from one_step_off.cluster.errors import SyncError

    found = {}
    for fault in FAULTS:
        model = quantized_model(worker, first)
        proof = learned(model, first)
        proof.start()
        model.load_weights = FaultyLoad(model, fault, first)
        worker.reload(model, second, proof.note_loaded)
        spoil(model, fault, first)
        found[fault] = "no fault"
        try:
            proof.check()
        except SyncError as error:
            found[fault] = str(error)
    return found


def test_what_stays_at_the_version_before_is_named():
    (found,) = run_workers(TIED, faulty_reloads, TIED.tensors(0), TIED.tensors(1))
    for fault, message in FAULTS.items():
        assert message in found[fault], fault


class Plain(torch.nn.Module):
    """Two parameters without a `quant_method`; `load_weights` loads the named ones."""

    def __init__(self, loaded: str) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        for name in ("a", "b"):
            zeros = torch.zeros(4, 4)
            self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
        self.loaded = loaded
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name in self.loaded:
                getattr(self, name).data.copy_(tensor)


def test_what_cannot_be_proved_is_refused():
    from one_step_off.engines.vllm.load_recording import NotInPlace

    tensors = {name: torch.randn(4, 4) for name in ("a", "b")}
    assert learned(Plain("ab"), tensors).loaded_names == {"a", "b"}
    with pytest.raises(NotInPlace, match="nothing is loaded into b"):
        learned(Plain("a"), tensors)
    model = Plain("ab")
    model.b.data = model.b.data.to(torch.float8_e4m3fn)
    with pytest.raises(NotInPlace, match="has no method that converts it"):
        learned(model, tensors)
