"""What vLLM's CPU build lacks: for models of hybrid layers (Qwen3.5, Qwen3-Next), and for
speculation.

- Hybrid models' modules import torchvision for images, which the CPU build does not bring along.
- The core of gated delta nets asserts bfloat16. In float32 a plain loop computes it.
- Prefix caching of their states needs chunked prefill, which `CPU_ENGINE_ARGS` turns off.
- Speculation samples with temperatures that are never set.

vLLM imports a model's class in three kinds of processes: the one that starts the engine, one that
only looks at the class, and the worker. `prepare` is called in the first and in the worker. It
registers each model in a form that pickles by this module's name, so the second has it too.
"""

import contextlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from importlib import machinery, util
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm import AsyncEngineArgs
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.interfaces import is_hybrid
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

MISSING = "torchvision"
MAX_IMPORTS = 5
"""Modules of a model that may need `MISSING`. Qwen3.5's need it in one."""


def prepare() -> None:
    """Let vLLM's registry import models as `CpuModel`, if it runs on a CPU. May be repeated."""
    if not current_platform.is_cpu():
        return
    for name, model in ModelRegistry.models.items():
        if type(model) is _LazyRegisteredModel:
            ModelRegistry.models[name] = CpuModel(model.module_name, model.class_name)


def engine_config(arguments: dict[str, Any]) -> Any:
    """vLLM's `VllmConfig` of the fields of `AsyncEngineArgs`."""
    prepare()
    args = AsyncEngineArgs(**arguments)
    has_choice = args.enable_prefix_caching is None and args.enable_chunked_prefill is False
    if has_choice and args.create_model_config().is_hybrid:
        args.enable_prefix_caching = False
    return args.create_engine_config()


class CpuModel(_LazyRegisteredModel):
    """A model that vLLM has code for, and has not imported yet."""

    def load_model_cls(self) -> type[nn.Module]:
        """Import the model's class. Raises ImportError, and whatever its module raises."""
        model_class = getattr(_imported(self.module_name), self.class_name)
        if is_hybrid(model_class):
            _compute_float32()
        return model_class


# --- torchvision -----------------------------------------------------------------------------


def _imported(name: str) -> ModuleType:
    """The module. Those that need `MISSING` are imported beside empty stand-ins of it: text needs
    nothing of it, and images fail with an AttributeError."""
    for _ in range(MAX_IMPORTS):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != MISSING:
                raise
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            needy = [f.f_globals["__name__"] for f in frames if f.f_code.co_name == "<module>"]
        with _stand_ins():
            importlib.import_module(needy[-1])
    return importlib.import_module(name)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """While this lasts, any module of the missing package can be imported, and is empty."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # it keeps its answer, which must not be given by a stand-in
    finder = _StandInFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == MISSING]:
            del sys.modules[name]


class _StandInFinder:
    """Finds, makes and fills the modules of a package that is not there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != MISSING:
            return None
        return util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


# --- gated delta nets in float32 -------------------------------------------------------------


def _compute_float32() -> None:
    """Replace the function that vLLM 0.32 registers as its CPU operator when it builds the first
    layer of gated delta nets."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    own_core = gdn_attention.cpu_gdn_attention_core
    if getattr(own_core, "takes_float32", False):
        return

    def core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            own_core(mixed_qkv, b, a, core_attn_out, layer_name)
        else:
            compute_core(mixed_qkv, b, a, core_attn_out, layer_name)

    core.takes_float32 = True  # ty: ignore[missing-attribute]
    gdn_attention.cpu_gdn_attention_core = core


def compute_core(
    mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
) -> None:
    """The causal convolution and the gated delta rule of one layer, for the sequences of a step:
    first those that get one more token, then the prompts.

    Args:
        mixed_qkv: [T, channels], before the convolution.
        b, a: [T, heads], before they become the rate and the decay of the state.
        core_attn_out: [T, heads, width]; the result goes here.
        layer_name: of vLLM's layer, which holds the caches.
    """
    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a trial run: there are no caches yet
        return
    metadata = context.attn_metadata[layer.prefix]
    slots = metadata.non_spec_state_indices_tensor.long()
    starts = metadata.non_spec_query_start_loc.tolist()
    sequences = metadata.num_decodes + metadata.num_prefills
    decodes = metadata.num_decodes
    if decodes:
        begins_anew = torch.zeros(decodes, dtype=torch.bool)
        rows = slice(0, decodes)
        out = _advance(
            layer, mixed_qkv[rows, None], b[rows, None], a[rows, None], slots[:decodes], begins_anew
        )
        core_attn_out[rows] = out[:, 0]
    for i in range(decodes, sequences):
        rows = slice(starts[i], starts[i + 1])
        begins_anew = ~metadata.has_initial_state[i : i + 1]
        out = _advance(
            layer,
            mixed_qkv[None, rows],
            b[None, rows],
            a[None, rows],
            slots[i : i + 1],
            begins_anew,
        )
        core_attn_out[rows] = out[0]


def _advance(
    layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, slots: Tensor, begins_anew: Tensor
) -> Tensor:
    """Advance the states of sequences that get equally many tokens.

    Args:
        mixed_qkv: [sequences, tokens, channels]; b, a: [sequences, tokens, heads].
        slots: [sequences], of the states in the caches.
        begins_anew: bool [sequences]; the slot has the state of another sequence.

    Returns:
        [sequences, tokens, heads, width].
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    inputs, states = layer.kv_cache[:2]
    if not is_conv_state_dim_first():
        inputs = inputs.transpose(1, 2)  # [slots, channels, taps - 1]
    slot_count, heads, value_width, key_width = states.shape
    states = states.view(slot_count, heads, key_width, value_width)  # as vLLM's own kernels do

    weight = layer.conv1d.weight
    if inputs.shape[-1] != weight.shape[-1] - 1:
        raise RuntimeError(
            "speculative decoding of gated delta nets needs bfloat16 on CPUs: set "
            "model.dtype=bfloat16, or rollout.speculation=none"
        )
    before = inputs[slots].masked_fill(begins_anew[:, None, None], 0)
    window = torch.cat([before, mixed_qkv.transpose(1, 2)], -1)
    inputs[slots] = window[..., -before.shape[-1] :]
    convolved = F.conv1d(window, weight, layer.conv1d.bias, groups=len(weight))
    if layer.activation == "silu":
        convolved = F.silu(convolved)

    count, tokens = mixed_qkv.shape[:2]
    flat = convolved.transpose(1, 2).flatten(0, 1)
    query, key, value = (
        part.view(count, tokens, *part.shape[2:]) for part in layer.rearrange_mixed_qkv(flat)
    )
    repeats = value.shape[2] // key.shape[2]
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    if tokens == 1:
        rule = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    # transformers' torch functions, also where the package of the kernels is installed.
    out, after = inspect.unwrap(rule)(
        query.repeat_interleave(repeats, 2),
        key.repeat_interleave(repeats, 2),
        value,
        g=-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float()),
        beta=b.sigmoid(),
        initial_state=states[slots].masked_fill(begins_anew[:, None, None, None], 0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states[slots] = after.to(states.dtype)
    return out


# --- speculation -----------------------------------------------------------------------------


def set_temperatures() -> None:
    """In a worker on a CPU: replace the function of vLLM 0.32 that gives each draft token the
    temperature of its sequence.

    vLLM's writes them into a copy of whole numbers, and drops it: the log-probs of drafts are then
    0 or NaN, and tokens come from another distribution than the policy's.
    """
    if not current_platform.is_cpu():
        return
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> Tensor:
    """The value of each token's sequence.

    Args:
        x: [sequences], of any dtype.
        cu_num_tokens: [sequences], tokens of a sequence and of those before it.
        num_tokens: of all sequences.
        replace_from, replace_to: the value that is replaced, and by which.

    Returns:
        [num_tokens], of the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def let_drafts_reach_the_end(runner: Any) -> None:
    """Let vLLM 0.32's first model runner propose drafts up to the end of the longest sequence.

    It has the limit of a draft model also where there is none: as soon as one sequence comes near
    the end, every sequence gets the token 0 as its drafts. Random numbers of a seeded sample
    would depend on its neighbours in the batch.

    Args:
        runner: of a worker; the second one has no such limit.
    """
    if hasattr(runner, "effective_drafter_max_model_len"):
        runner.effective_drafter_max_model_len = sys.maxsize
