"""The arguments of vLLM's engine, as vLLM understands them."""

from __future__ import annotations

import pytest
import torch

from one_step_off.config.schema import Config
from one_step_off.engines.vllm.engine_args import RETURN_EXPERTS, TRY_SPECULATION, engine_args
from tests.conftest import tiny_config


def test_engine_arguments_make_the_intended_engine_on_cpus(models, monkeypatch):
    """vLLM has taken every name, and its own checks have changed none of the values."""
    from vllm import AsyncEngineArgs

    from one_step_off.engines.vllm.schedulers import replica_scheduler
    from one_step_off.engines.vllm.worker_extension import SyncWorkerExtension
    from one_step_off.runtime.process_env import ENGINE_ENV

    # As in a replica's process; without these variables the executor is another one.
    for name, value in ENGINE_ENV["cpu"].items():
        monkeypatch.setenv(name, value)
    cfg = tiny_config(
        models(), "", **{"data.max_response_length": 32, "rollout.val_max_response_length": 64}
    )
    cfg.rollout.engine_kwargs = {"max_num_seqs": 7}
    made = AsyncEngineArgs(**engine_args(cfg, "cpu")).create_engine_config()
    model = made.model_config
    longest = 128 + 64  # the longest prompt with the longest response
    assert made.device_config.device_type == "cpu"
    assert model.model == cfg.model.path
    assert model.dtype == torch.float32
    assert model.max_model_len == longest
    assert model.seed == cfg.trainer.seed
    assert model.enforce_eager
    assert model.logprobs_mode == "processed_logprobs"
    scheduler = made.scheduler_config
    assert scheduler.max_num_seqs == 7, "the user's own keys override ours"
    # A prompt split over two steps would kill a CPU engine.
    assert not scheduler.enable_chunked_prefill
    assert scheduler.max_num_batched_tokens >= 7 * longest
    assert scheduler.get_scheduler_cls() is replica_scheduler
    assert not scheduler.async_scheduling, "nothing runs ahead of a CPU"
    assert made.cache_config.kv_cache_memory_bytes == 64 << 20
    assert made.cache_config.block_size == 32
    parallel = made.parallel_config
    assert parallel.tensor_parallel_size == 1
    assert parallel.distributed_executor_backend == "uni"
    extension = f"{SyncWorkerExtension.__module__}.{SyncWorkerExtension.__name__}"
    assert parallel.worker_extension_cls == extension
    assert made.weight_transfer_config.backend == "one_step_off"


@pytest.mark.parametrize(("width", "executor"), [(1, "uni"), (2, "mp")])
@pytest.mark.parametrize("shared", [False, True])
def test_engine_arguments_on_gpus_are_known_to_vllm(models, width, executor, shared):
    """An engine of them needs a GPU; a check that the names exist does not."""
    from vllm import AsyncEngineArgs

    cfg = tiny_config(models(), "", **{"rollout.tensor_parallel_size": width})
    cfg.placement.pools = {"all": [2], "other": [1]}
    cfg.placement.roles = {"rollout": "all", "actor": "all" if shared else "other"}
    made = AsyncEngineArgs(**engine_args(cfg, "cuda"))
    default = AsyncEngineArgs(model=cfg.model.path)
    assert made.gpu_memory_utilization == cfg.rollout.gpu_memory_utilization
    assert made.kv_cache_memory_bytes is None
    assert made.block_size == default.block_size
    assert made.enable_chunked_prefill == default.enable_chunked_prefill
    assert made.enforce_eager == default.enforce_eager, "CUDA graphs"
    assert made.scheduler_cls == "one_step_off.engines.vllm.schedulers.replica_scheduler"
    assert made.enable_sleep_mode == shared, "its memory is another role's while it sleeps"
    assert made.tensor_parallel_size == width
    assert made.distributed_executor_backend == executor


def test_a_user_key_that_vllm_does_not_know_is_refused(models):
    from vllm import AsyncEngineArgs

    cfg = tiny_config(models(), "", **{"rollout.engine_kwargs": {"no_such_key": 1}})
    with pytest.raises(TypeError, match="no_such_key"):
        AsyncEngineArgs(**engine_args(cfg, "cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_with_the_adapters_apart_adapts_only_the_layers_that_are_trained(models, device):
    from vllm import AsyncEngineArgs

    from one_step_off.engines.vllm.adapter_extension import AdapterWorkerExtension

    changes = {"weight_sync.lora": "adapter", "model.lora_rank": 12}
    cfg = tiny_config(models(), "", **changes)
    args = engine_args(cfg, device)
    made = AsyncEngineArgs(**args)
    assert made.enable_lora
    assert (made.max_lora_rank, made.max_loras, made.max_cpu_loras) == (16, 1, 1)
    assert made.lora_target_modules == [
        *("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    ]
    extension = AdapterWorkerExtension
    assert made.worker_extension_cls == f"{extension.__module__}.{extension.__name__}"
    cfg.weight_sync.lora = "merged"
    assert not any("lora" in name for name in engine_args(cfg, device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kept_caches_need_a_scheduler_that_keeps_versions_apart(models, device):
    from vllm.config.scheduler import SchedulerConfig

    from one_step_off.engines.vllm.schedulers import prefixes_per_version

    cfg = tiny_config(models(), "", **{"weight_sync.in_flight": "keep"})
    name = engine_args(cfg, device)["scheduler_cls"]
    made = SchedulerConfig.default_factory(scheduler_cls=name).get_scheduler_cls()
    # A function may stand for vLLM's class, which is only called.
    assert made is prefixes_per_version


def test_experts_are_asked_for_by_vllms_argument_or_on_cpus_by_ours():
    cfg = Config()
    assert "additional_config" not in engine_args(cfg, "cpu")
    assert "enable_return_routed_experts" not in engine_args(cfg, "cuda")
    cfg.rollout.replay_routing = True
    assert engine_args(cfg, "cuda")["enable_return_routed_experts"] is True
    cfg.rollout.engine_kwargs = {"additional_config": {"mine": 1}}
    assert engine_args(cfg, "cpu")["additional_config"] == {"mine": 1, RETURN_EXPERTS: True}
    assert engine_args(cfg, "cuda")["additional_config"] == {"mine": 1}


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_speculates(models, method, seeded, device):
    """Seeded samples depend on nothing but themselves. Others are made as it pays."""
    from vllm import AsyncEngineArgs

    settings = {"rollout.speculation": method, "rollout.speculation_tokens": 5}
    settings["rollout.seed_samples"] = "on" if seeded else "off"
    cfg = tiny_config(models(), "", **settings)
    cfg.rollout.engine_kwargs = {"max_num_seqs": 7, "additional_config": {"a": 1}}
    args = engine_args(cfg, device)
    AsyncEngineArgs(**args)
    made = args["speculative_config"]
    names = {"ngram": {"cpu": "ngram", "cuda": "ngram_gpu"}}
    assert made["method"] == names.get(method, {}).get(device, method)
    assert made["num_speculative_tokens"] == 5
    assert (TRY_SPECULATION in args["additional_config"]) == (not seeded)
    assert args["additional_config"]["a"] == 1, "the user's own"
    widths = {tokens for _, _, tokens in made.get("num_speculative_tokens_per_batch_size", ())}
    widths_where_it_pays = {"ngram": {0, 5}, "suffix": set()}
    assert widths == ({5} if seeded else widths_where_it_pays[method])
    assert made.get("suffix_decoding_max_cached_requests") == (0 if seeded else None)


def test_vllm_proposes_as_many_tokens_as_the_schedule_says(models, monkeypatch):
    """Both widths are in it, for which vLLM's second runner captures CUDA graphs."""
    from vllm import AsyncEngineArgs
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from one_step_off.runtime.process_env import ENGINE_ENV

    for name, value in ENGINE_ENV["cpu"].items():
        monkeypatch.setenv(name, value)
    cfg = tiny_config(
        models(), "", **{"rollout.speculation": "ngram", "rollout.seed_samples": "off"}
    )
    made = AsyncEngineArgs(**engine_args(cfg, "cpu")).create_engine_config()
    schedule = made.speculative_config.num_speculative_tokens_per_batch_size
    lookup = build_dynamic_sd_schedule_lookup(schedule, 256, made.num_speculative_tokens)
    assert lookup[1:] == [4] * 255 + [0]
    assert made.observability_config.per_request_spec_decode_metrics == "summary"
    plain = AsyncEngineArgs(**engine_args(tiny_config(models(), ""), "cpu")).create_engine_config()
    assert plain.speculative_config is None
