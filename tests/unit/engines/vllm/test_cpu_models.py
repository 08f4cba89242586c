"""Hybrid models in vLLM's CPU build: what it lacks for them."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.qwen3_5 import modeling_qwen3_5
from vllm import AsyncEngineArgs
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from one_step_off.engines.vllm import cpu_models
from one_step_off.engines.vllm.cpu_models import CpuModel

KEY_HEADS, VALUE_HEADS, WIDTH, TAPS, SLOTS = 2, 4, 8, 4, 5
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH


# --- torchvision -----------------------------------------------------------------------------

needs_no_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@needs_no_torchvision
def test_a_module_for_images_can_be_imported(modules):
    modules(
        model_for_text="import images_of_it\nimport more_images\nclass Model: pass",
        images_of_it="from torchvision.transforms.v2 import functional as tvF",
        more_images="import torchvision\nimport torchvision.io as io",
    )
    model = CpuModel("model_for_text", "Model")
    assert model.load_model_cls() is sys.modules["model_for_text"].Model
    with pytest.raises(AttributeError):
        _ = sys.modules["images_of_it"].tvF.resize
    # No other import sees the stand-ins, and transformers does not believe in them.
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
    assert not transformers.utils.is_torchvision_available()


@needs_no_torchvision
def test_other_missing_packages_are_reported(modules):
    modules(needs_both="import torchvision\nimport a_package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        CpuModel("needs_both", "Model").load_model_cls()
    modules(uses_it="import torchvision\nresize = torchvision.resize")
    with pytest.raises(AttributeError, match="resize"):
        CpuModel("uses_it", "Model").load_model_cls()
    assert "torchvision" not in sys.modules


def test_the_registry_gives_its_models_to_other_processes():
    """vLLM pickles them for the process in which it looks at a class."""
    cpu_models.prepare()
    cpu_models.prepare()
    model = ModelRegistry.models["Qwen3_5ForCausalLM"]
    assert pickle.loads(pickle.dumps(model)) == model
    assert type(model) is CpuModel


# --- prefix caching --------------------------------------------------------------------------


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_states_are_not_cached_by_prefix(is_hybrid, monkeypatch, tmp_path):
    made = []

    def create(self):
        made.append(self.enable_prefix_caching)

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", create)
    model_config = SimpleNamespace(is_hybrid=is_hybrid)
    monkeypatch.setattr(AsyncEngineArgs, "create_model_config", lambda self: model_config)
    whole_prompts = {"model": str(tmp_path), "enable_chunked_prefill": False}
    cpu_models.engine_config(whole_prompts)
    cpu_models.engine_config(whole_prompts | {"enable_prefix_caching": True})
    cpu_models.engine_config({"model": str(tmp_path)})
    assert made == [False if is_hybrid else None, True, None]


# --- gated delta nets ------------------------------------------------------------------------


class Net:
    """What vLLM's layer holds, with empty caches; and the net by transformers' functions."""

    def __init__(self):
        torch.manual_seed(0)
        self.prefix = "layer"
        self.activation = "silu"
        self.conv1d = SimpleNamespace(weight=torch.randn(CHANNELS, 1, TAPS), bias=None)
        self.A_log = torch.rand(VALUE_HEADS)
        self.dt_bias = torch.randn(VALUE_HEADS)
        self.key_dim, self.value_dim, self.tp_size = KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH, 1
        self.head_k_dim = self.head_v_dim = WIDTH
        # Of sequences that used the slots before.
        self.kv_cache = (
            torch.randn(SLOTS, TAPS - 1, CHANNELS),
            torch.randn(SLOTS, VALUE_HEADS, WIDTH, WIDTH),
        )

    rearrange_mixed_qkv = QwenGatedDeltaNetAttention.rearrange_mixed_qkv

    def alone(self, mixed_qkv, b, a):
        """The net over one whole sequence."""
        convolved = F.conv1d(F.pad(mixed_qkv.T, (TAPS - 1, 0)), self.conv1d.weight, groups=CHANNELS)
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        parts = F.silu(convolved).T.split(sizes, 1)
        query, key, value = (part.view(1, len(b), -1, WIDTH) for part in parts)
        out, _ = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            query.repeat_interleave(2, 2),
            key.repeat_interleave(2, 2),
            value,
            g=-self.A_log.exp() * F.softplus(a + self.dt_bias)[None],
            beta=b.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
        )
        return out[0]


def step(net, rows, slots, decodes, monkeypatch):
    """One step of the engine: rows of [mixed_qkv, b, a] of each sequence, one-token rows first."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row[0]))
    metadata = GDNAttentionMetadata(
        num_prefills=len(rows) - decodes,
        num_prefill_tokens=starts[-1] - decodes,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=starts[-1],
        has_initial_state=torch.arange(len(rows)) < decodes,
        non_spec_query_start_loc=torch.tensor(starts, dtype=torch.int32),
        non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32),
    )
    context = SimpleNamespace(no_compile_layers={"layer": net}, attn_metadata={"layer": metadata})
    monkeypatch.setattr(cpu_models, "get_forward_context", lambda: context)
    mixed_qkv, b, a = (torch.cat(parts) for parts in zip(*rows, strict=True))
    out = torch.full((len(b), VALUE_HEADS, WIDTH), torch.nan)
    cpu_models.compute_core(mixed_qkv, b, a, out, "layer")
    return out.split([len(row[0]) for row in rows])


def test_the_core_is_the_net_over_whole_sequences(monkeypatch):
    """Two prompts of which one has two chunks, then one token each beside a third prompt."""
    net = Net()
    lengths = (72, 9, 2)
    whole = [
        [torch.randn(n, CHANNELS), torch.randn(n, VALUE_HEADS), torch.randn(n, VALUE_HEADS)]
        for n in lengths
    ]

    def cut(i, first, stop):
        return [tensor[first:stop] for tensor in whole[i]]

    found = [[], [], []]
    for i, out in enumerate(step(net, [cut(0, 0, 70), cut(1, 0, 7)], [3, 1], 0, monkeypatch)):
        found[i].append(out)
    rows = [cut(0, 70, 71), cut(1, 7, 8), cut(2, 0, 2)]
    for i, out in enumerate(step(net, rows, [3, 1, 4], 2, monkeypatch)):
        found[i].append(out)
    for i, out in enumerate(step(net, [cut(1, 8, 9), cut(0, 71, 72)], [1, 3], 2, monkeypatch)):
        found[1 - i].append(out)
    for i in range(3):
        torch.testing.assert_close(torch.cat(found[i]), net.alone(*whole[i]), atol=1e-5, rtol=1e-5)


def test_speculation_is_refused(monkeypatch):
    net = Net()
    net.kv_cache = (torch.zeros(SLOTS, TAPS, CHANNELS), net.kv_cache[1])
    row = [torch.randn(3, CHANNELS), torch.randn(3, VALUE_HEADS), torch.randn(3, VALUE_HEADS)]
    with pytest.raises(RuntimeError, match="speculative decoding .* needs bfloat16"):
        step(net, [row], [0], 0, monkeypatch)


def test_bfloat16_stays_with_vllm(monkeypatch):
    called = []

    def own(*arguments):
        called.append(arguments)

    monkeypatch.setattr(gdn_attention, "cpu_gdn_attention_core", own)
    monkeypatch.setattr(cpu_models, "compute_core", lambda *arguments: called.append("loop"))
    cpu_models._compute_float32()
    cpu_models._compute_float32()
    rows = torch.zeros(1, 1, dtype=torch.bfloat16)
    gdn_attention.cpu_gdn_attention_core(rows, rows, rows, rows, "layer")
    assert [len(arguments) for arguments in called] == [5]
    rows = rows.float()
    gdn_attention.cpu_gdn_attention_core(rows, rows, rows, rows, "layer")
    assert called[1:] == ["loop"]
