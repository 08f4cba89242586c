"""The names of vLLM's LoRA that weight_sync.lora=adapter uses, by vLLM's sources."""

from __future__ import annotations

import pytest

from one_step_off.config.lora_checks import ENGINE_RANKS
from one_step_off.engines.vllm.engine_args import adapter_args
from tests.conftest import tiny_config
from tests.unit.project.library_sources import (
    assigned_attributes,
    definition,
    fields,
    literal_values,
    parameters,
)

LORA = "vllm.lora"
MANAGER = f"{LORA}.model_manager"

CALLS = [
    # module, function or method, the arguments that are given, in order where they are positional
    ("vllm.v1.engine.async_llm", "AsyncLLM.generate", ("prompt", "sampling_params", "request_id")),
    (MANAGER, "LoRAModelManager.remove_adapter", ("adapter_id",)),
    (MANAGER, "LRUCacheLoRAModelManager.add_adapter", ("lora",)),
    (MANAGER, "LRUCacheLoRAModelManager.activate_adapter", ("lora_id",)),
    (f"{LORA}.utils", "parse_fine_tuned_lora_name", ("name", "weights_mapper")),
    (f"{LORA}.layers.base", "BaseLayerWithLoRA.set_mapping", ("punica_wrapper",)),
    (f"{LORA}.layers.base", "BaseLayerWithLoRA.slice_lora_a", ("lora_a",)),
    (f"{LORA}.layers.base", "BaseLayerWithLoRA.slice_lora_b", ("lora_b",)),
    (
        f"{LORA}.lora_model",
        "LoRAModel.from_lora_tensors",
        ("lora_model_id", "tensors", "peft_helper", "device", "dtype"),
    ),
    (
        f"{LORA}.punica_wrapper.punica_cpu",
        "PunicaWrapperCPU.add_lora_linear",
        ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
    ),
    (
        "vllm.model_executor.model_loader.default_loader",
        "DefaultModelLoader.get_all_weights",
        ("model_config", "model"),
    ),
]


@pytest.mark.parametrize(("module", "name", "given"), CALLS, ids=lambda part: str(part))
def test_a_function_takes_these_arguments(module: str, name: str, given: tuple) -> None:
    taken = [
        parameter for parameter in parameters(module, name) if parameter not in ("self", "cls")
    ]
    assert taken[: len(given)] == list(given)


def test_further_arguments_by_name() -> None:
    assert "lora_request" in parameters("vllm.v1.engine.async_llm", "AsyncLLM.generate")
    assert "weights_mapper" in parameters(f"{LORA}.lora_model", "LoRAModel.from_lora_tensors")
    assert {"lora_name", "lora_int_id", "lora_path"} <= fields(f"{LORA}.request", "LoRARequest")
    assert {"r", "lora_alpha", "target_modules"} <= fields(f"{LORA}.peft_helper", "PEFTHelper")


def test_the_ranks_are_vllms() -> None:
    assert set(ENGINE_RANKS) == literal_values("vllm.config.lora", "MaxLoRARanks")


def test_what_the_slot_finds_in_the_manager_and_in_its_layers() -> None:
    manager = assigned_attributes(MANAGER, "LoRAModelManager")
    assert {"modules", "packed_modules", "model", "punica_wrapper_mapping", "device"} <= manager
    worker = assigned_attributes(f"{LORA}.worker_manager", "WorkerLoRAManager")
    assert {"_adapter_manager", "lora_config"} <= worker
    layer = assigned_attributes(f"{LORA}.layers.base_linear", "BaseLinearLayerWithLoRA")
    assert {"lora_a_stacked", "lora_b_stacked", "n_slices", "tp_size", "base_layer"} <= layer
    mixin = "vllm.v1.worker.lora_model_runner_mixin"
    assert definition(mixin, "LoRAModelRunnerMixin.load_lora_model")
    assert "lora_manager" in assigned_attributes(mixin, "LoRAModelRunnerMixin")


def test_engine_arguments_exist(models) -> None:
    cfg = tiny_config(models(), "", **{"weight_sync.lora": "adapter", "model.lora_rank": 4})
    known = fields("vllm.engine.arg_utils", "EngineArgs")
    assert set(adapter_args(cfg)) - known == set()
