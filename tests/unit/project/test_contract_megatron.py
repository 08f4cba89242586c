"""The names of Megatron-core that only GPUs use exist: Transformer Engine's layers, the names of
their parameters, packed sequences. By its sources: without Transformer Engine they are not defined.
"""

from __future__ import annotations

import ast
import re

import pytest

from one_step_off.config import packages
from tests.unit.project.library_sources import (
    constants,
    definition,
    fields,
    imported_names,
    is_defined,
    own_trees,
    parameters,
    path_of,
)

pytestmark = pytest.mark.skipif(
    not packages.is_installed("megatron.core"), reason="megatron-core is not installed"
)

LAYERS = "megatron.core.extensions.transformer_engine"
PROVIDER = "megatron.core.extensions.transformer_engine_spec_provider"
SPECS = "megatron.core.models.gpt.gpt_layer_specs"
MODEL = "one_step_off/training/megatron/megatron_model.py"
TABLE = "one_step_off/training/megatron/megatron_weights.py"

LAYER_CLASSES = (
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TENorm",
    "TERowParallelLinear",
    "TEColumnParallelGroupedLinear",
    "TERowParallelGroupedLinear",
)


@pytest.mark.parametrize(("module", "name"), sorted(imported_names("megatron")))
def test_an_imported_name_exists(module: str, name: str) -> None:
    assert is_defined(module, name), f"{module} has no {name}"


@pytest.mark.parametrize("name", LAYER_CLASSES)
def test_a_layer_of_transformer_engine(name: str) -> None:
    assert definition(LAYERS, name)
    assert name in path_of(PROVIDER).read_text(), "the specification of a GPT layer uses it"


def test_the_specification_chooses_transformer_engine() -> None:
    names = parameters(SPECS, "get_gpt_decoder_block_spec")
    assert names[:2] == ["config", "use_transformer_engine"] and "vp_stage" in names


def test_names_of_parameters_that_only_transformer_engine_has() -> None:
    """The norm is a part of the linear layer behind it; experts are numbered weights of one
    layer."""
    table = own_trees()[TABLE]
    text = ast.unparse(table)
    assert "linear_qkv" in text and "linear_fc1" in text
    source = path_of(LAYERS).read_text()
    assert re.search(r"\.layer_norm_weight\b", source)
    assert re.search(r"weight\{\w+\}", source), "the weights of a grouped layer are numbered"
    assert "layer_norm_weight" in text and "weight(" in text


def test_settings_of_the_model_exist() -> None:
    known = fields("megatron.core.transformer.transformer_config", "TransformerConfig")
    known |= fields("megatron.core.transformer.transformer_config", "MLATransformerConfig")
    known |= fields("megatron.core.model_parallel_config", "ModelParallelConfig")
    assert settings_of_the_model() - known == set()


def settings_of_the_model() -> set[str]:
    """The keys of the settings in `_transformer_config`, and those of the experts."""
    names: set[str] = set()
    for function in ast.walk(own_trees()[MODEL]):
        if getattr(function, "name", "") not in ("_transformer_config", "_expert_settings"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Dict):
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    assert len(names) > 25, "the search finds them"
    return names


def test_packed_sequences() -> None:
    known = fields("megatron.core.packed_seq_params", "PackedSeqParams")
    wanted = {"qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
    assert wanted <= known
    assert "packed_seq_params" in parameters(
        "megatron.core.models.gpt.gpt_model", "GPTModel.forward"
    )
    assert "thd" in constants(LAYERS), "the format of packed sequences"
