"""Layers with a state in packed rows: each sequence is what it is alone, or the model is padded."""

from __future__ import annotations

import inspect
import logging
import sys

import numpy as np
import pytest
import torch
import transformers

from one_step_off.algorithms import batching
from one_step_off.config.errors import ConfigError
from one_step_off.training import packed_attention, recurrent_layers
from one_step_off.training.packed_attention import (
    CAUSAL,
    PACKED,
    PER_SEQUENCE,
    AttentionChoice,
    boundary_arguments,
)
from tests.unit.models.families import CONFIGS, SIZES
from tests.unit.training.fsdp_helpers import (
    Recorder,
    assert_gradients_equal,
    config,
    make_batch,
    write_model,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
FAMILIES = {
    "qwen3_5_text": CONFIGS["qwen3_5_text"],
    "qwen3_5_moe_text": CONFIGS["qwen3_5_moe_text"],
    "qwen3_next": CONFIGS["qwen3_next"],
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **SIZES | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1},
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
}
LEAKS = {
    "minimax": lambda: transformers.MiniMaxConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"]
    ),
    "granite with mamba": lambda: transformers.GraniteMoeHybridConfig(
        **SIZES, mamba_n_heads=8, layer_types=["mamba", "attention"]
    ),
}
STATE_RUNS_ON = "layers whose state runs on from one packed sequence into the next"
FUNCTIONS = {
    "causal_conv1d_fn": ["hidden_states", "weight", "bias", "activation"],
    "torch_chunk_gated_delta_rule": ["query", "key", "value", "g", "beta"],
}


def random_model(family, attention):
    packed_attention.register()
    torch.manual_seed(3)
    auto_class = transformers.AutoModelForCausalLM
    model = auto_class.from_config(FAMILIES[family](), attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


def gradients_of(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_its_sequences_one_by_one(family):
    """Outputs and gradients; shorter than the convolution, and longer than a chunk."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, SIZES["vocab_size"], length) for length in (7, 1, 70, 2, 9)]
    nothing = [np.zeros(0, np.int64) for _ in sequences]
    layout = batching.collate(sequences, nothing, packed=True)
    packed_model = random_model(family, PACKED)
    recurrent_layers.keep_sequences_apart(packed_model)
    packed = packed_model.base_model(
        input_ids=torch.from_numpy(layout.input_ids),
        position_ids=torch.from_numpy(layout.position_ids),
        use_cache=False,
        **boundary_arguments(layout, torch.from_numpy(layout.cu_seqlens), PER_SEQUENCE, True),
    ).last_hidden_state[0]
    plain_model = random_model(family, "eager")
    alone = [
        plain_model.base_model(torch.from_numpy(s)[None], use_cache=False).last_hidden_state[0]
        for s in sequences
    ]
    plain = torch.cat(alone)
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)
    factors = torch.randn(packed.shape, generator=torch.Generator().manual_seed(5))
    (packed * factors).sum().backward()
    (plain * factors).sum().backward()
    assert_gradients_equal(gradients_of(packed_model), gradients_of(plain_model), rtol=1e-5)


@pytest.fixture
def saved(tmp_path):
    """Saves the configuration of a family; returns a config of the trainer for it."""

    def save(make):
        make().save_pretrained(tmp_path)
        return config(str(tmp_path))

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_proved_is_packed(family, saved):
    cfg = saved(FAMILIES[family])
    assert packed_attention.choose(cfg, "actor", CPU) == AttentionChoice(CAUSAL)
    cfg.actor.packing = "on"
    packed = AttentionChoice(PACKED, PER_SEQUENCE, has_states=True)
    for dtype in ("float32", "bfloat16"):
        cfg.model.dtype = dtype
        assert packed_attention.choose(cfg, "actor", CPU) == packed


@pytest.mark.parametrize("family", LEAKS)
def test_what_leaks_is_padded(family, saved):
    cfg = saved(LEAKS[family])
    assert not packed_attention.choose(cfg, "actor", CPU).kernel
    cfg.actor.packing = "on"
    for dtype in ("float32", "bfloat16"):
        cfg.model.dtype = dtype
        with pytest.raises(ConfigError, match=f"actor.packing=on: .* {STATE_RUNS_ON}"):
            packed_attention.choose(cfg, "actor", CPU)


@pytest.fixture
def transformers_own(monkeypatch):
    """Gives the functions of a family back to transformers."""

    def give_back(family):
        source = sys.modules[type(random_model(family, "eager")).__module__]
        for name in FUNCTIONS:
            function = getattr(source, name)
            if function in recurrent_layers._replacements:
                monkeypatch.setattr(source, name, function.__wrapped__)
        return source

    return give_back


@pytest.mark.parametrize("missing", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_function_that_drops_boundaries_is_noticed(
    missing, dtype, saved, transformers_own, monkeypatch
):
    transformers_own("qwen3_5_text")
    monkeypatch.delitem(recurrent_layers._REPLACE, missing)
    cfg = saved(FAMILIES["qwen3_5_text"])
    cfg.actor.packing = "on"
    cfg.model.dtype = dtype
    with pytest.raises(ConfigError, match=STATE_RUNS_ON):
        packed_attention.choose(cfg, "actor", CPU)


def test_lost_positions_are_noticed(saved, monkeypatch):
    """Nothing leaks, and the packed sequences are not what they are alone."""
    cfg = saved(FAMILIES["lfm2"])
    cfg.actor.packing = "on"
    attend = packed_attention.packed_attention

    def turned(module, query, *args, **kwargs):
        return attend(module, query * 1.5, *args, **kwargs)

    monkeypatch.setattr(packed_attention, "packed_attention", turned)
    for dtype in ("float32", "bfloat16"):
        cfg.model.dtype = dtype
        with pytest.raises(ConfigError, match="computes packed sequences otherwise than alone"):
            packed_attention.choose(cfg, "actor", CPU)


def test_without_kernels_a_gpu_pads_and_says_what_to_install(saved, monkeypatch, caplog):
    small_copy = recurrent_layers.small_copy
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        recurrent_layers, "small_copy", lambda model, _, dtype: small_copy(model, CPU, dtype)
    )
    cfg = saved(FAMILIES["qwen3_5_text"])
    cfg.model.dtype = "bfloat16"
    with caplog.at_level(logging.WARNING, packed_attention.__name__):
        assert packed_attention.choose(cfg, "actor", GPU) == AttentionChoice(CAUSAL)
    (line,) = [r.getMessage() for r in caplog.records if r.name == packed_attention.__name__]
    assert line.startswith("actor: batches are padded: without flash-linear-attention ")


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_transformers_has_the_functions_that_are_replaced(family, transformers_own):
    """Their names, arguments, and the variable that says whether a kernel is used."""
    source = transformers_own(family)
    for name, arguments in FUNCTIONS.items():
        function = getattr(source, name)
        assert list(inspect.signature(function).parameters)[: len(arguments)] == arguments
        is_kernel = inspect.getclosurevars(function).nonlocals["is_new_implementation"]
        assert is_kernel is False
        calls = inspect.getsource(source)
        assert f"= {name}(" in calls
    assert 'cu_seqlens=kwargs.pop("cu_seq_lens_q", None)' in calls


def test_a_kernel_of_a_package_stays():
    def with_kernel(is_new_implementation):
        def function(hidden_states):
            return hidden_states if is_new_implementation else None

        return function

    assert recurrent_layers._is_kernel(with_kernel(True))
    assert not recurrent_layers._is_kernel(with_kernel(False))
    assert not recurrent_layers._is_kernel(torch.nn.Identity())


def test_the_actor_trains_alike(tmp_path, start_single):
    """Metrics and gradients from packed batches are those from padded ones."""
    write_model(FAMILIES["qwen3_5_text"](), tmp_path)
    path = str(tmp_path)
    gradients = {}
    losses = {}
    for packing in ("off", "on"):
        changes = {"actor__packing": packing, "actor__micro_batch_tokens": 60}
        cfg = config(path, **changes)
        worker = start_single(cfg, role="actor", cls=Recorder)
        assert worker.packed == (packing == "on")
        losses[packing] = worker.update(make_batch(path, prompts=5, n=2))["actor/loss"]
        gradients[packing] = worker.gradients
    assert_gradients_equal(gradients["on"], gradients["off"])
    assert losses["on"] == pytest.approx(losses["off"], rel=2e-6, abs=1e-6)
