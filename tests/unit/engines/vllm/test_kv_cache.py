"""The bounded KV cache of an engine on a GPU: room for all its sequences, and little more."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from one_step_off.config.schema import Config
from one_step_off.engines.vllm import kv_cache
from one_step_off.engines.vllm.engine_args import MAX_SEQUENCES, engine_args
from one_step_off.engines.vllm.kv_cache import (
    GIB,
    apply_plan,
    count_parameters,
    has_plain_cache,
    plan_kv_cache,
    sequences_bytes,
    token_bytes,
)
from tests.conftest import tiny_config

GPU_BYTES = 80 * GIB


def engine_config(cfg: Config) -> Any:
    """vLLM's config of an engine on a GPU, as far as it can be made without one."""
    from vllm import AsyncEngineArgs

    arguments = engine_args(cfg, "cuda") | {"block_size": 32, "enforce_eager": True}
    return AsyncEngineArgs(**arguments).create_engine_config()


@pytest.fixture
def tiny(models: Any) -> Config:
    return tiny_config(models(), "", **{"placement.device": "cpu"})


def test_all_sequences_fit_whole_and_the_tiny_model_has_thousands_of_blocks(tiny: Config) -> None:
    """By the bytes of a block that vLLM's own specification of a layer has."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    made = engine_config(tiny)
    plan = plan_kv_cache(tiny, made, GPU_BYTES)
    assert plan is not None
    assert plan.is_bounded
    assert (plan.sequences, plan.longest) == (
        MAX_SEQUENCES["cuda"],
        made.model_config.max_model_len,
    )
    apply_plan(plan, made, GPU_BYTES)
    assert made.cache_config.kv_cache_memory_bytes == plan.needed
    model = made.model_config
    for block_tokens in (16, 32, 64):
        layer = FullAttentionSpec(
            block_size=block_tokens,
            num_kv_heads=model.get_num_kv_heads(made.parallel_config),
            head_size=model.get_head_size(),
            dtype=torch.float32,
        )
        block_bytes = layer.page_size_bytes * model.get_num_layers(made.parallel_config)
        assert plan.needed is not None
        blocks = plan.needed // block_bytes
        of_sequence = layer.max_memory_usage_bytes(made) // layer.page_size_bytes
        assert of_sequence == math.ceil(plan.longest / block_tokens)
        assert blocks - 1 >= plan.sequences * of_sequence, "vLLM keeps a block for itself"
        assert blocks < 20_000, "a pause walks through all of them"


def test_quantized_layers_have_a_byte_for_each_parameter(tiny: Config) -> None:
    tiny.model.dtype = "bfloat16"
    plain = plan_kv_cache(tiny, engine_config(tiny), GPU_BYTES)
    made = engine_config(tiny)
    tiny.rollout.quantization = "fp8_per_channel"  # of which vLLM's CPU build makes no GPU's config
    quantized = plan_kv_cache(tiny, made, GPU_BYTES)
    parameters, in_tables = count_parameters(tiny)
    assert plain is not None and quantized is not None
    assert plain.weights == 2 * parameters
    assert quantized.weights == parameters + in_tables
    assert 0 < in_tables < parameters


def test_the_engine_asks_for_no_more_memory_at_its_start_than_it_needs(tiny: Config) -> None:
    made = engine_config(tiny)
    plan = plan_kv_cache(tiny, made, GPU_BYTES)
    assert plan is not None
    apply_plan(plan, made, GPU_BYTES)
    share = made.cache_config.gpu_memory_utilization
    assert share == pytest.approx(plan.engine_bytes / GPU_BYTES)
    assert share < tiny.rollout.gpu_memory_utilization
    assert "= 512 sequences x" in str(plan)
    assert str(plan).endswith("GiB available")


def test_vllm_measures_where_a_bound_is_not_safe(tiny: Config) -> None:
    made = engine_config(tiny)

    def unbounded(cfg: Config, gpu_bytes: int = GPU_BYTES) -> Any:
        plan = plan_kv_cache(cfg, made, gpu_bytes)
        assert plan is not None
        assert not plan.is_bounded
        apply_plan(plan, made, gpu_bytes)
        assert made.cache_config.kv_cache_memory_bytes is None
        return plan

    assert "for" in str(unbounded(tiny, GIB)), "the share is too small"
    tools = dataclasses.replace(tiny, agent=dataclasses.replace(tiny.agent, loop="tool"))
    assert unbounded(tools).needed is None
    own_code = dataclasses.replace(
        tiny, model=dataclasses.replace(tiny.model, trust_remote_code=True)
    )
    assert unbounded(own_code).needed is None
    for other in ("sliding_attention", "linear_attention"):
        made.model_config.hf_text_config.layer_types = ["full_attention", other]
        assert unbounded(tiny).needed is None


@pytest.mark.parametrize("name", kv_cache.OTHER_CACHES)
def test_a_model_with_other_caches_is_not_plain(tiny: Config, name: str) -> None:
    made = engine_config(tiny)
    assert has_plain_cache(made)
    setattr(made.model_config.hf_text_config, name, 4)
    assert not has_plain_cache(made)


@pytest.mark.parametrize("key", kv_cache.SIZE_KEYS)
def test_the_user_may_choose_the_size(key: str) -> None:
    cfg = Config()
    cfg.rollout.engine_kwargs = {key: 1 << 30}
    assert plan_kv_cache(cfg, None, GPU_BYTES) is None


def test_the_bytes_of_a_0_5b_model() -> None:
    """24 layers with two heads of 64 in bf16: 12 KiB a token."""
    per_token = token_bytes(24, 2, 64, 2)
    assert per_token == 12 << 10
    size = sequences_bytes(per_token, 512, 1536)
    assert size % (64 << 20) == 0
    assert 512 * 1536 * per_token < size < 1.06 * 512 * 1536 * per_token


def test_vllms_client_knows_how_many_of_the_longest_sequences_have_room() -> None:
    """The engine's limit of requests begins with it."""
    import inspect

    from vllm.config.cache import CacheConfig
    from vllm.v1.engine import core_client

    assert CacheConfig().kv_cache_max_concurrency is None, "before the start"
    client = inspect.getsource(core_client)
    assert "cache_config.kv_cache_max_concurrency = (" in client
    assert "else response.kv_cache_max_concurrency" in client
