"""Attention over packed sequences: within each sequence what the model computes for it alone, by
every kernel, and for which models."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from one_step_off.algorithms import batching
from one_step_off.config.errors import ConfigError
from one_step_off.training import packed_attention, prefix_sharing
from one_step_off.training.packed_attention import (
    CAUSAL,
    FLASH_ATTN,
    PACKED,
    PER_SEQUENCE,
    TORCH_VARLEN,
    AttentionChoice,
    boundary_arguments,
)
from one_step_off.training.token_outputs import gathered_rows
from tests.unit.training.fsdp_helpers import (
    MODELS,
    SIZES,
    VOCAB,
    assert_gradients_equal,
    config,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": 5}
FAMILIES = {
    "qwen2": MODELS["tied"](),
    "qwen3": MODELS["untied"](),
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, num_key_value_heads=1, **EXPERTS),
    "window": transformers.MistralConfig(**SIZES, num_key_value_heads=1, **WINDOW),
    "one layer with a window": transformers.Qwen2Config(
        **SIZES, num_key_value_heads=1, use_sliding_window=True, max_window_layers=1, **WINDOW
    ),
}
REFUSED = {
    "uses softcap": transformers.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=16),
    "does not support other attention": transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_head=2, n_layer=1
    ),
}


def packed_row(lengths, seed=0):
    """Sequences of these lengths, and their packed micro-batch, of which no token is wanted."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, VOCAB, length) for length in lengths]
    nothing = [np.zeros(0, np.int64) for _ in sequences]
    return sequences, batching.collate(sequences, nothing, packed=True)


def hidden_states(model, layout):
    cu_seqlens = torch.from_numpy(layout.cu_seqlens)
    return model.base_model(
        input_ids=torch.from_numpy(layout.input_ids),
        position_ids=torch.from_numpy(layout.position_ids),
        use_cache=False,
        **boundary_arguments(layout, cu_seqlens, PER_SEQUENCE),
    ).last_hidden_state[0]


def random_model(family, attention):
    torch.manual_seed(3)
    packed_attention.register()
    auto_class = transformers.AutoModelForCausalLM
    hf_config = copy.deepcopy(FAMILIES[family])  # the model would write its attention into it
    return auto_class.from_config(hf_config, attn_implementation=attention).eval()


def gradients_of(model):
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_its_sequences_one_by_one(family):
    """Outputs and gradients, where the reference is the plain model on one sequence at a time."""
    sequences, layout = packed_row([7, 1, 12, 2, 9])
    packed_model = random_model(family, PACKED)
    plain_model = random_model(family, "eager")
    packed = hidden_states(packed_model, layout)
    plain = torch.cat(
        [
            plain_model.base_model(torch.from_numpy(s)[None], use_cache=False).last_hidden_state[0]
            for s in sequences
        ]
    )
    # Values of about 1 in fp32. A longer matrix product sums in another order on some CPUs; what
    # crosses a boundary differs a thousand times as much (see the next test).
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)
    factors = torch.randn(packed.shape, generator=torch.Generator().manual_seed(5))
    (packed * factors).sum().backward()
    (plain * factors).sum().backward()
    assert_gradients_equal(gradients_of(packed_model), gradients_of(plain_model))


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_boundaries_are_seen(family, shift):
    """What the comparison above would miss if attention crossed the boundaries."""
    _, layout = packed_row([7, 4, 12, 3, 9])
    model = random_model(family, PACKED)
    with torch.no_grad():
        right = hidden_states(model, layout)
        layout.cu_seqlens[1:-1] += shift
        wrong = hidden_states(model, layout)
    # Also where the window of five tokens hides most of the other sequence.
    assert (wrong - right).abs().max() > 1e-2


def test_a_sequence_does_not_see_the_others():
    sequences, layout = packed_row([7, 4, 12])
    model = random_model("qwen3", PACKED)
    sequences[1][:] = (sequences[1] + 1) % VOCAB
    other = batching.collate(sequences, [np.zeros(0, np.int64)] * 3, packed=True)
    with torch.no_grad():
        before = hidden_states(model, layout)
        after = hidden_states(model, other)
    torch.testing.assert_close(before[:7], after[:7], atol=0, rtol=0)
    torch.testing.assert_close(before[11:], after[11:], atol=0, rtol=0)
    assert (before[7:11] != after[7:11]).any(-1).all()


def block_diagonal(query, key, value, lengths, scaling, window):
    """The attention by its definition, over [1, heads, T, width]."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    distance = position[:, None] - position[None]
    mask = (sequence[:, None] == sequence[None]) & (distance >= 0)
    if window is not None:
        mask &= distance < window
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3)) * scaling
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    groups=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 1, 2, 4, 50]),
    scaling=st.sampled_from([0.1, 1.0]),
    kernel=st.sampled_from([PER_SEQUENCE, TORCH_VARLEN, FLASH_ATTN]),
)
def test_every_kernel_is_the_definition(lengths, groups, window, scaling, kernel):
    """The kernels of GPUs by stand-ins that take their arguments as their documentation says."""
    total = sum(lengths)
    torch.manual_seed(total)
    query = torch.randn(1, 2 * groups, total, 8, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 1, 2, total, 8, dtype=torch.float64).unbind()
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, scale, window_size, causal):
        assert q.shape == (total, 2 * groups, 8)
        assert k.shape == v.shape == (total, 2, 8)
        assert cu_q is cu_k is cu_seqlens
        assert max_q == max_k == max(lengths)
        assert window_size[1] == 0
        assert causal
        left = None if window_size[0] == -1 else window_size[0] + 1
        rows = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
        return block_diagonal(*rows, cu_q.diff().tolist(), scale, left)[0]

    def torch_varlen(*args, scale, window_size, enable_gqa):
        return varlen(*args, scale, window_size, enable_gqa)

    def flash_varlen(*args, softmax_scale, causal, window_size):
        return varlen(*args, softmax_scale, window_size, causal)

    flash_attn = types.SimpleNamespace(flash_attn_varlen_func=flash_varlen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", torch_varlen)
        patch.setitem(sys.modules, "flash_attn", flash_attn)
        output, _ = packed_attention.packed_attention(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            scaling=scaling,
            sliding_window=window,
            cu_seq_lens_q=cu_seqlens,
            max_length_q=max(lengths),
            sequence_lengths=np.array(lengths),
            packed_kernel=kernel,
        )
    wanted = block_diagonal(query, key, value, lengths, scaling, window)
    torch.testing.assert_close(output, wanted, atol=1e-12, rtol=0)
    (gradient,) = torch.autograd.grad(output.square().sum(), query)
    (wanted_gradient,) = torch.autograd.grad(wanted.square().sum(), query)
    torch.testing.assert_close(gradient, wanted_gradient, atol=1e-10, rtol=0)


def shared_row(parts, seed=0):
    """Sequences, and a packed micro-batch of them. Each part is a sequence's: how many tokens it
    has in common with the one before it, at most, and how many of its own."""
    rng = np.random.default_rng(seed)
    sequences = [np.zeros(0, np.int64)]
    common = []
    for most, own in parts:
        common.append(min(most, len(sequences[-1])))
        sequences.append(np.concatenate([sequences[-1][: common[-1]], rng.integers(0, VOCAB, own)]))
    del sequences[0]
    rows = np.column_stack([np.arange(len(parts)), common])
    nothing = [np.zeros(0, np.int64) for _ in sequences]
    return sequences, batching.collate(sequences, nothing, packed=True, rows=rows)


def visible_keys(layout, window):
    """bool [T, T]: which key each query sees, by a walk through its sequence's tokens."""
    seen = torch.zeros(layout.input_ids.size, layout.input_ids.size, dtype=torch.bool)
    sequence: list[int] = []
    bounds = itertools.pairwise(layout.cu_seqlens.tolist())
    for (begin, end), common in zip(bounds, layout.common, strict=True):
        sequence = sequence[:common]
        for token in range(begin, end):
            sequence.append(token)
            seen[token, sequence[-window:] if window else sequence] = True
    return seen


def varlen_stand_in(aligned="right"):
    """As the kernels of GPUs are documented: the last query sees the last key. aligned="left": the
    first one sees the first, as in old versions; "window": so does its window alone."""

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert max_q == cu_q.diff().max()
        assert max_k == cu_k.diff().max()
        assert window_size[1] == 0
        groups = q.shape[1] // k.shape[1]
        outputs = []
        for own_q, own_k, own_v in zip(
            q.split(cu_q.diff().tolist()),
            k.split(cu_k.diff().tolist()),
            v.split(cu_k.diff().tolist()),
            strict=True,
        ):
            shift = len(own_k) - len(own_q) if aligned != "left" else 0
            seen = torch.ones(len(own_q), len(own_k), dtype=torch.bool).tril(shift)
            if window_size[0] >= 0:
                seen = seen.triu((shift if aligned == "right" else 0) - window_size[0])
            keys = own_k.repeat_interleave(groups, 1).transpose(0, 1)
            values = own_v.repeat_interleave(groups, 1).transpose(0, 1)
            scores = (own_q.transpose(0, 1) @ keys.transpose(1, 2)) * (scale or q.shape[2] ** -0.5)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outputs.append((weights @ values).transpose(0, 1))
        return torch.cat(outputs)

    return varlen


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=2, max_size=8),
    window=st.sampled_from([None, 1, 3, 50]),
    kernel=st.sampled_from([PER_SEQUENCE, TORCH_VARLEN, FLASH_ATTN]),
)
def test_every_kernel_shares_prefixes_by_the_definition(parts, window, kernel):
    _, layout = shared_row([(0, 3), (1, 2), *parts])
    total = layout.input_ids.size
    torch.manual_seed(total)
    shapes = [(1, heads, total, 8) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    varlen = varlen_stand_in()

    def flash_varlen(*args, softmax_scale, causal, window_size):
        assert causal
        return varlen(*args, scale=softmax_scale, window_size=window_size, enable_gqa=True)

    flash_attn = types.SimpleNamespace(flash_attn_varlen_func=flash_varlen)
    arguments = boundary_arguments(layout, torch.from_numpy(layout.cu_seqlens), kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
        patch.setitem(sys.modules, "flash_attn", flash_attn)
        output, _ = packed_attention.packed_attention(
            torch.nn.Identity(), *inputs, None, sliding_window=window, **arguments
        )
    query, key, value = inputs
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5
    scores = scores.masked_fill(~visible_keys(layout, window), -torch.inf)
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(output, wanted, atol=1e-12, rtol=0)
    slope = torch.randn(output.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(output, inputs, slope)
    wanted_gradients = torch.autograd.grad(wanted, inputs, slope)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention", [PACKED, CAUSAL])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
def test_a_row_with_shared_prefixes_is_its_sequences_one_by_one(family, attention):
    sequences, layout = shared_row([(0, 10), (7, 1), (8, 5), (12, 3), (7, 6), (0, 9), (4, 2)])
    shared_model = random_model(family, attention)
    plain_model = random_model(family, "eager")
    shared = hidden_states(shared_model, layout)
    for sequence, own in zip(sequences, layout.keys(), strict=True):
        ids = torch.from_numpy(sequence)[None]
        plain = plain_model.base_model(ids, use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(shared[own], plain, atol=1e-5, rtol=0)


def test_the_gradient_of_a_shared_key_is_summed_in_float32():
    rows = torch.randn(2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1000, dtype=torch.int64)
    gathered_rows(rows, index).backward(torch.full((1000, 1, 4), 1.0, dtype=torch.bfloat16))
    assert rows.grad[0].tolist() == [[1000.0] * 4]  # in bfloat16 the sum would stay at 256
    assert not rows.grad[1].any()


@pytest.mark.parametrize(
    ("aligned", "works"),
    [("right", True), ("left", False), ("window", False), ("missing", False)],
)
def test_a_kernel_that_aligns_otherwise_computes_every_prompt_again(
    aligned, works, monkeypatch, caplog
):
    """The trial before a kernel of GPUs is used, with a stand-in."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_stand_in(aligned))
    if aligned == "missing":
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    choice = AttentionChoice(PACKED, TORCH_VARLEN)
    own = transformers.MistralConfig(
        num_attention_heads=4, num_key_value_heads=2, hidden_size=64, sliding_window=2048
    )
    with caplog.at_level(logging.WARNING, logger=prefix_sharing.__name__):
        assert prefix_sharing.works("actor", CPU, choice, own) == works
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (not works)
    assert all("actor: prompts are computed once per sample" in text for text in messages)
    assert prefix_sharing.works("actor", CPU, AttentionChoice(CAUSAL), own)


def test_torch_takes_the_arguments():
    """The call of the kernel that needs a GPU fits the installed torch."""
    from torch.nn.attention.varlen import varlen_attn

    signature = inspect.signature(varlen_attn)
    bound = signature.bind(*"qkvcc", 7, 7, scale=0.1, window_size=(-1, 0), enable_gqa=True)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(bound.arguments)[:7] == names
    assert "Use (-1, -1) for full attention (default), (-1, 0) for causal" in varlen_attn.__doc__
    assert "(W, 0) for causal attention with sliding window of size W" in varlen_attn.__doc__


def test_what_no_kernel_computes_is_refused():
    row = torch.randn(3, 1, 2, 4, 8)
    right = {
        "attention_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 4], dtype=torch.int32),
        "sequence_lengths": np.array([4]),
        "packed_kernel": PER_SEQUENCE,
    }
    attend = packed_attention.packed_attention
    attend(torch.nn.Identity(), *row, **right)
    for name, value in {
        "cu_seq_lens_q": None,
        "packed_kernel": "",
        "attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "dropout": 0.1,
        "is_causal": False,
        "softcap": 30.0,
    }.items():
        with pytest.raises(RuntimeError, match="packed attention"):
            attend(torch.nn.Identity(), *row, **(right | {name: value}))
    two_rows = torch.randn(3, 2, 2, 4, 8)
    with pytest.raises(RuntimeError, match="one row"):
        attend(torch.nn.Identity(), *two_rows, **right)
    with pytest.raises(RuntimeError, match="sliding window"):
        packed_attention.causal_attention(torch.nn.Identity(), *row, None, sliding_window=3)


def test_transformers_makes_no_mask_for_these_functions():
    """And so asks the device nothing. With the attention sdpa it does."""
    packed_attention.register()
    registered = ALL_MASK_ATTENTION_FUNCTIONS.valid_keys()
    assert "sdpa" in registered
    assert not {PACKED, CAUSAL} & set(registered)


@pytest.fixture
def saved(tmp_path):
    """Saves a configuration; returns its folder."""

    def save(hf_config):
        hf_config.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_packs_on_gpus_and_pads_on_cpus(family, saved, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    path = saved(FAMILIES[family])
    cfg = config(path, model__dtype="bfloat16")
    padded = AttentionChoice("sdpa" if "window" in family else CAUSAL)
    assert packed_attention.choose(cfg, "ref", GPU) == AttentionChoice(PACKED, TORCH_VARLEN)
    assert packed_attention.choose(cfg, "ref", CPU) == padded
    cfg.actor.packing = "on"
    assert packed_attention.choose(cfg, "ref", CPU) == AttentionChoice(PACKED, PER_SEQUENCE)
    cfg.ref.packing = "off"
    assert packed_attention.choose(cfg, "ref", GPU) == padded


def test_the_kernel_fits_the_gpu_the_dtype_and_the_model(saved, monkeypatch):
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    path = saved(FAMILIES["qwen3"])
    cfg = config(path, model__dtype="bfloat16")
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    assert packed_attention.choose(cfg, "actor", GPU).kernel == FLASH_ATTN
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: False)
    assert packed_attention.choose(cfg, "actor", GPU).kernel == TORCH_VARLEN
    in_fp32 = config(path)
    assert packed_attention.choose(in_fp32, "actor", GPU) == AttentionChoice(CAUSAL)
    in_fp32.actor.packing = "on"
    assert packed_attention.choose(in_fp32, "actor", GPU).kernel == PER_SEQUENCE
    cfg.model.attn_implementation = "sdpa"
    assert packed_attention.choose(cfg, "actor", GPU) == AttentionChoice(CAUSAL)
    cfg.model.attn_implementation = "eager"
    assert packed_attention.choose(cfg, "actor", GPU) == AttentionChoice("eager")
    cfg.model.attn_implementation = "auto"
    capability[0] = (7, 5)
    assert packed_attention.choose(cfg, "actor", GPU) == AttentionChoice(CAUSAL)
    capability[0] = (9, 0)
    odd_head = config(
        saved(transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=20)),
        model__dtype="bfloat16",
    )
    assert packed_attention.choose(odd_head, "actor", GPU) == AttentionChoice(CAUSAL)


@pytest.mark.parametrize("obstacle", REFUSED)
def test_a_model_that_cannot_be_packed_is_padded_and_named(obstacle, saved, caplog):
    cfg = config(saved(REFUSED[obstacle]), model__dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        assert packed_attention.choose(cfg, "actor", CPU) == AttentionChoice("sdpa")
        assert not caplog.records, "on a CPU batches are padded anyway"
        assert packed_attention.choose(cfg, "actor", GPU) == AttentionChoice("sdpa")
    (record,) = caplog.records
    assert record.getMessage().startswith("actor: batches are padded: ")
    assert obstacle in record.getMessage()
    cfg.actor.packing = "on"
    with pytest.raises(ConfigError, match=f"actor.packing=on: .* {obstacle}.*; use auto or off"):
        packed_attention.choose(cfg, "actor", CPU)
