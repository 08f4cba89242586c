"""The schemes of `rollout.quantization`, as vLLM knows them, and where they are refused."""

from __future__ import annotations

from typing import Any

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import KEYS
from one_step_off.engines.vllm import checks
from one_step_off.engines.vllm.engine_args import engine_args
from tests.conftest import tiny_config

SCHEMES = [name for name in KEYS["rollout.quantization"].metadata["choices"] if name != "none"]
CACHES = KEYS["rollout.kv_cache_dtype"].metadata["choices"]


def quantized(models: Any, scheme: str, kind: str = "qwen2", **changes: object) -> Any:
    settings = {"model.dtype": "bfloat16", "rollout.quantization": scheme, **changes}
    return tiny_config(models(kind), "", **settings)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_vllm_quantizes_a_plain_checkpoint_while_it_loads(models, scheme):
    """Linear layers and experts, by the names that are offered."""
    from vllm import AsyncEngineArgs
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    shorthand = _ONLINE_SHORTHANDS[scheme]
    assert shorthand.linear is not None
    assert shorthand.moe is not None
    made = AsyncEngineArgs(**engine_args(quantized(models, scheme), "cpu")).create_engine_config()
    assert type(made.quant_config) is OnlineQuantizationConfig
    assert made.quant_config.args.linear == shorthand.linear
    assert made.model_config.quantization is not None, "by it the worker knows that it must prove"


def test_the_dtypes_of_the_cache_are_vllms():
    from typing import get_args

    from vllm.config.cache import CacheDType

    assert set(CACHES) <= set(get_args(CacheDType))


def test_experts_are_refused_on_cpus(models):
    checks.check_policy(quantized(models, "fp8_per_channel"))
    message = r"rollout.quantization=fp8_per_channel: .* has experts, which vLLM's CPU build"
    with pytest.raises(ConfigError, match=message):
        checks.check_policy(quantized(models, "fp8_per_channel", "qwen3_moe"))


@pytest.mark.parametrize(
    ("key", "scheme", "capability", "refused"),
    [
        ("quantization", "fp8_per_channel", (8, 6), "needs compute capability 8.9, and this GPU"),
        ("quantization", "fp8_per_block", (7, 5), "needs compute capability 8.0, and this GPU"),
        ("quantization", "fp8_per_channel", (8, 9), ""),
        ("quantization", "mxfp8", (9, 0), ""),
        ("quantization", "fp8_per_tensor", None, ""),  # the driver's machine has no GPU
        ("kv_cache_dtype", "fp8", (7, 5), "needs compute capability 8.0, and this GPU has 7.5"),
        ("kv_cache_dtype", "fp8", (8, 0), ""),
        ("kv_cache_dtype", "fp8_per_token_head", (8, 6), "needs compute capability 8.9"),
        ("kv_cache_dtype", "fp8_per_token_head", (9, 0), ""),
        ("kv_cache_dtype", "auto", (7, 5), ""),
    ],
)
def test_old_gpus_are_refused(models, monkeypatch, key, scheme, capability, refused):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *a: capability)
    settings = {"model.dtype": "bfloat16", "placement.device": "cuda", f"rollout.{key}": scheme}
    cfg = tiny_config(models("qwen2"), "", **settings)
    if not refused:
        checks.check_policy(cfg)
        return
    with pytest.raises(ConfigError, match=f"rollout.{key}={scheme}: {refused}"):
        checks.check_policy(cfg)


def test_the_capabilities_of_a_quantized_cache_are_those_of_vllms_attention():
    """FlashInfer, which is not installed here, reads `fp8` from 8.0 on. Only Triton, which wants
    8.9, stores `fp8_per_token_head`."""
    from pathlib import Path

    from vllm.v1.attention.backends import flash_attn, flex_attention, triton_attn

    triton = triton_attn.TritonAttentionBackend.supported_kv_cache_dtypes
    flash = flash_attn.FlashAttentionBackend.supported_kv_cache_dtypes
    flex = flex_attention.FlexAttentionBackend.supported_kv_cache_dtypes
    assert set(CACHES) <= set(triton)
    assert "fp8_per_token_head" not in {*flash, *flex}
    sources = Path(triton_attn.__file__)
    refusal = (
        'startswith("fp8") and not (\n                current_platform.has_device_capability(89)'
    )
    assert refusal in sources.read_text()
    flashinfer = sources.with_name("flashinfer.py").read_text()
    assert "capability >= DeviceCapability(8, 0) and" in flashinfer
    assert '        "fp8",\n' in flashinfer
    assert "per_token_head" not in flashinfer
