"""The names of vLLM that a run uses exist, with the arguments that it gives: sleep levels, wake
tags, pause modes, the worker's update calls, the layerwise reload. By vLLM's sources: what only
GPUs run is not imported here.
"""

from __future__ import annotations

import ast
import re

import pytest

from one_step_off.config.schema import Config
from one_step_off.config.sections import rollout
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.engines.vllm.processes import MEMORY_ERRORS
from tests.unit.project.library_sources import (
    assigned_attributes,
    constants,
    definition,
    fields,
    imported_names,
    is_defined,
    literal_values,
    own_trees,
    parameters,
    source_digest,
    used_attributes,
)

OWN_ENGINE = "one_step_off.engines.vllm.engine"
ENGINE = "vllm.v1.engine.async_llm"
CLIENT = "vllm.v1.engine.core_client"
CORE = "vllm.v1.engine.core"
SCHEDULER = "vllm.v1.core.sched.scheduler"
ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
WORKER = "vllm.v1.worker.gpu_worker"
MANAGER = "vllm.v1.core.kv_cache_manager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
ATTENTION = "vllm.v1.core.single_type_kv_cache_manager"
RELOAD = "vllm.model_executor.model_loader.reload"
TRANSFER = "vllm.distributed.weight_transfer"
EXPERTS = "vllm.distributed.aux_output_connector"
RUNNER = "vllm.v1.worker.gpu_model_runner"

ENGINE_CALLS = {
    # method of AsyncLLM -> the arguments that are given
    "collective_rpc": ("method", "args"),
    "from_vllm_config": ("vllm_config", "enable_log_requests", "disable_log_stats"),
    "generate": ("prompt", "sampling_params", "request_id", "lora_request"),
    "is_sleeping": (),
    "resume_generation": (),
    "shutdown": (),
    "sleep": ("level",),
    "update_weight_version": ("new_version",),
    "wake_up": ("tags",),
}
ENGINE_ATTRIBUTES = {"errored", "vllm_config", "engine_core", "output_processor", "renderer"}

CALLS = [
    # module, function or method, the arguments that are given, in order where they are positional
    (CLIENT, "AsyncMPClient.pause_scheduler_async", ("mode", "clear_cache")),
    (
        SCHEDULER,
        "Scheduler.update_from_output",
        ("scheduler_output", "model_runner_output"),
    ),
    (SCHEDULER, "Scheduler.add_request", ("request",)),
    (SCHEDULER, "Scheduler.schedule", ("throttle_prefills",)),
    (SCHEDULER, "Scheduler._preempt_request", ("request", "timestamp", "drop_stale_output")),
    (SCHEDULER, "Scheduler.reset_prefix_cache", ("reset_running_requests",)),
    (SCHEDULER, "Scheduler.get_request_counts", ()),
    (
        "vllm.v1.engine.output_processor",
        "OutputProcessor.update_scheduler_stats",
        ("scheduler_stats",),
    ),
    (
        MANAGER,
        "KVCacheManager.allocate_slots",
        ("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"),
    ),
    (MANAGER, "KVCacheManager.cache_blocks", ("request", "num_computed_tokens")),
    (SCHEDULER, "Scheduler.set_pause_state", ("pause_state",)),
    ("vllm.v1.engine.output_processor", "OutputProcessor.has_unfinished_requests", ()),
    (CORE, "EngineCore.sleep", ("level", "mode")),
    (CORE, "EngineCore.wake_up", ("tags",)),
    (WORKER, "Worker.sleep", ("level",)),
    (WORKER, "Worker.wake_up", ("tags",)),
    (WORKER, "Worker.start_weight_update", ()),
    (WORKER, "Worker.update_weights", ("update_info",)),
    (WORKER, "Worker.finish_weight_update", ()),
    (f"{RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    (f"{RELOAD}.layerwise", "_place_kernel_tensors", ("layer", "info")),
    (f"{RELOAD}.layerwise", "get_layerwise_info", ("layer",)),
    (f"{RELOAD}.layerwise", "_get_original_loader", ("tensor",)),
    (f"{RELOAD}.meta", "restore_layer_on_meta", ("layer", "info")),
    (f"{RELOAD}.utils", "get_layer_params_buffers", ("layer",)),
    (
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        ("layer",),
    ),
    (f"{TRANSFER}.base", "WeightTransferEngine.init_transfer_engine", ("init_info",)),
    (f"{TRANSFER}.base", "WeightTransferEngine.start_weight_update", ()),
    (f"{TRANSFER}.base", "WeightTransferEngine.receive_weights", ("update_info",)),
    (f"{TRANSFER}.base", "WeightTransferEngine.update_weights", ("update_info",)),
    (f"{TRANSFER}.base", "WeightTransferEngine.finish_weight_update", ()),
    (f"{TRANSFER}.base", "WeightTransferEngine.shutdown", ()),
    ("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", ()),
    (RUNNER, "GPUModelRunner.execute_model", ("scheduler_output",)),
    (RUNNER, "GPUModelRunner.sample_tokens", ("grammar_output",)),
    (
        f"{EXPERTS}.worker",
        "get_aux_output_connector",
        ("model", "vllm_config", "kv_cache_config"),
    ),
    (f"{EXPERTS}.worker", "AuxOutputWorkerConnector.begin_step", ("metadata",)),
    (f"{EXPERTS}.worker", "AuxOutputWorkerConnector.prepare_output", ("input_batch",)),
    (
        f"{EXPERTS}.worker",
        "PendingAuxOutput.enqueue_cpu_copy",
        ("num_sampled", "num_rejected"),
    ),
    (f"{EXPERTS}.worker", "PendingAuxOutput.process_output", ()),
    (f"{EXPERTS}.connector", "AuxOutputSchedulerConnector.take_output", ("request", "output")),
    ("vllm.config.model", "ModelConfig.get_total_num_hidden_layers", ()),
    ("vllm.config.model", "ModelConfig.get_num_experts", ()),
    ("vllm.config.model", "ModelConfig.get_num_experts_per_tok", ()),
]

PAUSE_MODES = {"keep", "wait"}
WAKE_TAGS = {"weights", "kv_cache"}
SLEEP_LEVEL = 2


@pytest.mark.parametrize("name", sorted(ENGINE_CALLS))
def test_a_method_of_the_engine(name: str) -> None:
    assert set(ENGINE_CALLS[name]) <= set(parameters(ENGINE, f"AsyncLLM.{name}"))


def test_the_table_has_every_call_of_the_engine() -> None:
    used = used_attributes("self.llm") | used_attributes("AsyncLLM")
    assert used == ENGINE_CALLS.keys() | ENGINE_ATTRIBUTES
    assert used_attributes("self.llm.engine_core") == {"pause_scheduler_async"}
    assert used_attributes("self.llm.output_processor") == {"has_unfinished_requests"}
    assert "output_processor" in assigned_attributes(ENGINE, "AsyncLLM")


@pytest.mark.parametrize(("module", "name", "given"), CALLS, ids=lambda part: str(part))
def test_a_function_takes_these_arguments(module: str, name: str, given: tuple) -> None:
    assert parameters(module, name)[: len(given)] == list(given)


@pytest.mark.parametrize(("module", "name"), sorted(imported_names("vllm")))
def test_an_imported_name_exists(module: str, name: str) -> None:
    assert is_defined(module, name), f"{module} has no {name}"


def test_a_report_of_the_scheduler_reaches_the_client() -> None:
    """`engine_stats` relies on it, though vLLM's statistics are off."""
    update = ast.unparse(definition(SCHEDULER, "Scheduler.update_from_output"))
    assert "self.make_stats(" in update and "eco.scheduler_stats = stats" in update
    handler = ast.unparse(definition(ENGINE, "AsyncLLM._run_output_handler"))
    assert "output_processor.update_scheduler_stats(outputs.scheduler_stats)" in handler
    stats = "vllm.v1.metrics.stats"
    told = {"num_running_reqs", "num_waiting_reqs", "kv_cache_usage", "prefix_cache_stats"}
    assert told <= set(fields(stats, "SchedulerStats"))
    assert "preempted_requests" in fields(stats, "PrefixCacheStats")


def test_the_frame_that_waits_for_an_engine_has_its_processes() -> None:
    """With their exit codes: see `processes.killed_engine_raises_process_died`."""
    utils = "vllm.v1.engine.utils"
    assert "launch" in parameters(utils, "wait_for_engine_startup")
    assert "launch.engine_manager" in ast.unparse(definition(utils, "wait_for_engine_startup"))
    assert "engine_manager" in fields(utils, "CoreEngineLaunch")
    assert "processes" in assigned_attributes(utils, "CoreEngineProcManager")


@pytest.mark.parametrize("said", [said for said in MEMORY_ERRORS if "CUDA" not in said])
def test_what_vllm_says_of_a_lack_of_memory(said: str) -> None:
    """The words by which `processes.start_failure` recognizes it."""
    modules = (
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.worker.utils",
        "vllm.v1.worker.gpu_worker",
    )
    strings = [text for module in modules for text in constants(module) if isinstance(text, str)]
    assert any(said in text for text in strings)


def test_a_given_cache_size_is_not_measured() -> None:
    """`kv_cache.apply_plan` and `kv_cache.measuring_turn` rely on it."""
    source = ast.unparse(definition(WORKER, "Worker.determine_available_memory"))
    given, _, measured = source.partition("memory_profiling(")
    assert "self.cache_config.kv_cache_memory_bytes" in given
    assert "return reserve_mm_ipc_gpu_memory" in given
    assert "profile_cudagraph_memory" in measured
    assert "profile_cudagraph_memory" not in given


# ---- sleep, wake, pause --------------------------------------------------------------------------


def test_pause_modes() -> None:
    assert PAUSE_MODES <= literal_values("vllm.v1.engine", "PauseMode")
    assert PAUSE_MODES <= constants(OWN_ENGINE, "VllmEngine.pause"), "the modes that we give"


def test_a_salt_is_hashed_into_the_first_block_of_a_prompt() -> None:
    """With kept KV caches it keeps requests of different versions apart. That the hashes follow
    it is shown in tests/unit/engines/vllm/test_prefix_scheduler.py."""
    assert {"cache_salt"} <= constants("vllm.v1.core.kv_cache_utils")


def test_wake_tags() -> None:
    """The tags under which the worker allocates are those that we wake."""
    assert WAKE_TAGS <= constants(WORKER)
    assert WAKE_TAGS <= constants("one_step_off.rollout.replica", "RolloutReplica.sync")


def test_the_sleep_level_discards_the_weights_and_keeps_the_buffers() -> None:
    assert SLEEP_LEVEL in constants(OWN_ENGINE, "VllmEngine.sleep")
    assert SLEEP_LEVEL in constants(WORKER, "Worker.sleep"), "the level at which buffers are saved"
    assert "_sleep_saved_buffers" in assigned_attributes(WORKER, "Worker")


def test_sleep_uses_the_memory_pool_by_default() -> None:
    assert "enable_sleep_mode" in fields("vllm.config.model", "ModelConfig")
    assert definition("vllm.device_allocator.cumem", "CuMemAllocator.sleep")
    assert definition("vllm.device_allocator.cumem", "CuMemAllocator.wake_up")


# ---- the scheduler ----------------------------------------------------------------------------

# What `schedulers.BlockEdges` does without, for a token at which no block begins or ends. When vLLM
# changes one of them, read it: for such a token it must still do nothing.
SKIPPED = {
    (MANAGER, "KVCacheManager.allocate_slots"): "15f09c5e5779",
    (MANAGER, "KVCacheManager.cache_blocks"): "25692defb11b",
    (COORDINATOR, "KVCacheCoordinator.remove_skipped_blocks"): "9428d0a96889",
    (COORDINATOR, "KVCacheCoordinator.get_num_blocks_to_allocate"): "4012e4838e83",
    (COORDINATOR, "KVCacheCoordinator.allocate_new_blocks"): "fce1c6fbf01a",
    (COORDINATOR, "KVCacheCoordinator.cache_blocks"): "6fd81209bcc4",
    (ATTENTION, "SingleTypeKVCacheManager.remove_skipped_blocks"): "6aad4c8e7e31",
    (ATTENTION, "SingleTypeKVCacheManager.get_num_skipped_tokens"): "9096099ccdd6",
    (ATTENTION, "SingleTypeKVCacheManager.get_num_blocks_to_allocate"): "48b45b715971",
    (ATTENTION, "SingleTypeKVCacheManager.allocate_new_blocks"): "4382ba4d4df3",
    (ATTENTION, "SingleTypeKVCacheManager.cache_blocks"): "d8cf536188d0",
    (ATTENTION, "FullAttentionManager.cache_blocks"): "b641d1fea366",
}


# What `schedulers.ReplicaScheduler` does in its own words for a row with one more token, or leaves
# out because it does nothing there. When vLLM changes one of them, compare the two.
DONE_FOR_PLAIN_ROWS = {
    (SCHEDULER, "Scheduler.schedule"): "6f1a84553147",
    (SCHEDULER, "Scheduler._make_cached_request_data"): "d742d733b5d0",
    (SCHEDULER, "Scheduler._update_after_schedule"): "917d8aaa7a50",
    (ASYNC_SCHEDULER, "AsyncScheduler._update_after_schedule"): "55a1a4fcc2a9",
    (SCHEDULER, "Scheduler.update_from_output"): "f5816e874229",
    (SCHEDULER, "Scheduler._update_request_with_output"): "5fcc186beb15",
    (ASYNC_SCHEDULER, "AsyncScheduler._update_request_with_output"): "4f69dcd48d9a",
    ("vllm.v1.core.sched.utils", "check_stop"): "487ce995a3d5",
    ("vllm.v1.request", "Request.append_output_token_ids"): "31d66eb8ef8f",
    ("vllm.v1.request", "Request.update_block_hashes"): "941ef2500a60",
}


@pytest.mark.parametrize(("module", "name"), DONE_FOR_PLAIN_ROWS)
def test_what_is_done_for_plain_rows_is_what_was_read(module: str, name: str) -> None:
    assert source_digest(module, name) == DONE_FOR_PLAIN_ROWS[module, name]


@pytest.mark.parametrize(("module", "name"), SKIPPED)
def test_what_is_skipped_for_most_tokens_is_what_was_read(module: str, name: str) -> None:
    assert source_digest(module, name) == SKIPPED[module, name]


def test_full_attention_adds_nothing_to_what_is_skipped() -> None:
    manager = definition(ATTENTION, "FullAttentionManager")
    assert isinstance(manager, ast.ClassDef)
    methods = {node.name for node in manager.body if isinstance(node, ast.FunctionDef)}
    assert methods == {"find_longest_cache_hit", "cache_blocks", "_cache_partial_tail_block"}


def test_how_the_scheduler_calls_its_manager() -> None:
    """For a running request without computed blocks, whose absence is how it is known."""
    source = ast.unparse(definition(SCHEDULER, "Scheduler.schedule"))
    calls = re.findall(r"allocate_slots\(([^()]*(?:\([^()]*\)[^()]*)*)\)", source)
    running, waiting = calls
    assert running == "request, num_new_tokens, num_lookahead_tokens=self.num_lookahead_tokens"
    assert "new_computed_blocks=" in waiting


def test_how_the_scheduler_hands_out_log_probs() -> None:
    """`schedulers.LogProbColumns` takes the same rows: those of the tokens that are left."""
    source = ast.unparse(definition(SCHEDULER, "Scheduler.update_from_output"))
    assert "logprobs = model_runner_output.logprobs" in source
    assert "new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))" in source
    assert "req_index = model_runner_output.req_id_to_index[req_id]" in source
    lists = "vllm.v1.outputs"
    assert {"logprobs", "cu_num_generated_tokens"} <= fields(lists, "LogprobsLists")
    assert "kv_transfer_params" in fields("vllm.v1.engine", "EngineCoreOutput")
    assert "kv_transfer_params" in parameters("vllm.outputs", "RequestOutput.__init__")
    assert "extra_args" in fields("vllm.sampling_params", "SamplingParams")


# ---- the experts of tokens -----------------------------------------------------------------------


def test_what_the_connector_reads_of_a_batch() -> None:
    """`routed_experts.RoutingRunner` gives it these, out of another kind of batch."""
    source = ast.unparse(definition(f"{EXPERTS}.worker", "AuxOutputWorkerConnector.prepare_output"))
    read = set(re.findall(r"input_batch\.(\w+)", source))
    assert read == {"req_ids", "query_start_loc_np", "num_computed_tokens_np"}


def test_what_the_first_runner_knows_of_a_step() -> None:
    attributes = assigned_attributes(RUNNER, "GPUModelRunner")
    assert {
        "execute_model_state",
        "query_start_loc",
        "input_batch",
        "kv_cache_config",
    } <= attributes
    batch = assigned_attributes("vllm.v1.worker.gpu_input_batch", "InputBatch")
    assert "num_computed_tokens_cpu" in batch
    assert definition("vllm.v1.worker.gpu_input_batch", "InputBatch.req_ids")


def test_how_the_second_runner_uses_the_connector() -> None:
    """`RoutingRunner` does the same: register the step, run, take the choice, give it out."""
    second = "vllm.v1.worker.gpu.model_runner"
    executes = ast.unparse(definition(second, "GPUModelRunner.execute_model"))
    samples = ast.unparse(definition(second, "GPUModelRunner.sample_tokens"))
    assert "begin_step(scheduler_output.aux_output_connector_metadata)" in executes
    assert "prepare_output(input_batch)" in samples
    output = ast.unparse(definition("vllm.v1.worker.gpu.async_utils", "AsyncOutput.get_output"))
    assert "aux_output_connector_output = self.pending_aux_output.process_output()" in output


def test_where_the_scheduler_asks_for_experts() -> None:
    """`schedulers.ReplicaScheduler` sets its connector on CPUs, and has no plain rows with one."""
    assert "aux_output_connector" in assigned_attributes(SCHEDULER, "Scheduler")
    source = ast.unparse(definition(SCHEDULER, "Scheduler.__init__"))
    assert "AuxOutputSchedulerConnector() if vllm_config.aux_output_config.enabled" in source
    metadata = fields("vllm.v1.core.sched.output", "SchedulerOutput")
    assert "aux_output_connector_metadata" in metadata
    assert "aux_output_connector_output" in fields("vllm.v1.outputs", "ModelRunnerOutput")
    assert "routed_experts" in fields("vllm.outputs", "CompletionOutput")
    assert "additional_config" in fields("vllm.config.vllm", "VllmConfig")


# ---- the worker ----------------------------------------------------------------------------------


def test_what_the_extension_finds_in_the_worker() -> None:
    attributes = assigned_attributes(WORKER, "Worker")
    assert {"_weight_update_active", "weight_transfer_engine", "device"} <= attributes
    assert "available_kv_cache_memory_bytes" in attributes, "of an engine beside a trainer"
    assert definition(WORKER, "Worker.start_weight_update")


def test_what_the_transfer_engine_finds_in_its_base() -> None:
    attributes = assigned_attributes(f"{TRANSFER}.base", "WeightTransferEngine")
    assert {"model", "device", "model_config"} <= attributes


def test_an_engine_is_registered_by_name_and_class() -> None:
    factory = f"{TRANSFER}.factory"
    assert parameters(factory, "WeightTransferEngineFactory.register_engine")[:2] == [
        "name",
        "module_path_or_cls",
    ]


def test_what_the_reload_keeps_of_a_layer() -> None:
    info = "vllm.model_executor.model_loader.reload.types"
    assert {"loaded_weights", "kernel_tensors"} <= fields(info, "LayerReloadingInfo")
    for method in ("can_load", "reset"):
        assert definition(info, f"LayerReloadingInfo.{method}")


# ---- models on CPUs ------------------------------------------------------------------------------

GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
GDN_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
REGISTRY = "vllm.model_executor.models.registry"

# What `cpu_models` replaces or does in its own words. When vLLM changes one of them, read it: its
# own may suffice by now.
REPLACED_ON_CPUS = {
    (GDN, "cpu_gdn_attention_core"): "ac94c706bf17",
    (GDN, "_cpu_gdn_attention_nonspec"): "c57898df99d3",
    (GDN, "register_cpu_gdn_attention_ops"): "657d513f8f40",
    (GDN_LAYER, "QwenGatedDeltaNetAttention.forward_cpu"): "e19a2b7f955d",
    (REGISTRY, "_LazyRegisteredModel.inspect_model_cls"): "64e938a320ad",
    (REGISTRY, "_LazyRegisteredModel.load_model_cls"): "d0ba3e03217a",
    (REGISTRY, "_run_in_subprocess"): "619e129d7860",
}


@pytest.mark.parametrize(("module", "name"), REPLACED_ON_CPUS)
def test_what_is_replaced_on_cpus_is_what_was_read(module: str, name: str) -> None:
    assert source_digest(module, name) == REPLACED_ON_CPUS[module, name]


def test_vllms_core_of_gated_delta_nets_refuses_float32() -> None:
    assert "CPU GDN attention requires BF16." in constants(GDN, "cpu_gdn_attention_core")


def test_prefix_caching_of_states_needs_chunked_prefill() -> None:
    name = "MambaModelConfig.verify_and_update_config"
    asserted = "Chunked prefill is required for mamba cache mode 'align'."
    assert asserted in constants("vllm.model_executor.models.config", name)


def test_the_registry_has_modules_and_classes_by_name() -> None:
    assert {"module_name", "class_name"} <= fields(REGISTRY, "_LazyRegisteredModel")
    assert "models" in fields(REGISTRY, "_ModelRegistry")


# ---- arguments of the engine ---------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("colocated", [False, True])
def test_engine_arguments_exist(device: str, colocated: bool) -> None:
    cfg = Config()
    cfg.rollout.replay_routing = True
    if colocated:
        cfg.placement.pools = {"all": [1]}
        cfg.placement.roles = {"rollout": "all", "actor": "all"}
    known = fields("vllm.engine.arg_utils", "EngineArgs")
    known |= fields("vllm.engine.arg_utils", "AsyncEngineArgs")
    assert set(engine_args(cfg, device)) - known == set()


def test_values_of_engine_arguments() -> None:
    args = engine_args(Config(), "cuda")
    assert args["logprobs_mode"] in literal_values("vllm.config.model", "LogprobsMode")
    backends = literal_values("vllm.config.parallel", "DistributedExecutorBackend")
    assert {"mp", "uni"} <= backends
    assert "backend" in fields("vllm.config.weight_transfer", "WeightTransferConfig")


def test_engine_arguments_that_are_refused_exist() -> None:
    known = fields("vllm.engine.arg_utils", "EngineArgs")
    known |= fields("vllm.engine.arg_utils", "AsyncEngineArgs")
    refused = {*rollout.ENGINE_FIELDS_SET_BY_US, *rollout.UNSAFE_ENGINE_FIELDS}
    assert refused - known == set()


def test_sampling_fields_that_are_allowed_exist() -> None:
    known = fields("vllm.sampling_params", "SamplingParams")
    assert rollout.ALLOWED_SAMPLING_FIELDS.keys() - known == set()


def test_the_search_reads_this_tree() -> None:
    assert len(own_trees()) > 100 and ("vllm", "SamplingParams") in imported_names("vllm")


def test_vllm_is_imported_below_its_folder_alone() -> None:
    """A run with another engine needs no vLLM."""
    found = set()
    for path, tree in own_trees().items():
        for node in ast.walk(tree):
            imported = [getattr(node, "module", None)] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            if any((name or "").split(".")[0] == "vllm" for name in imported):
                found.add(path)
    elsewhere = {path for path in found if not path.startswith("one_step_off/engines/vllm/")}
    assert len(found) > 5
    assert elsewhere == set()
