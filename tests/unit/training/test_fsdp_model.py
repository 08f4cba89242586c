"""What the FSDP back end makes of odd models: refused in one line, or trained like others."""

from __future__ import annotations

import pytest
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.models.hf_model import check_head, logits_of
from tests.unit.training.fsdp_helpers import (
    SIZES,
    assert_gradients_equal,
    config,
    hf_model,
    make_batch,
)


def test_errors_name_the_key(start_single, tmp_path):
    with pytest.raises(ConfigError, match="model.path: .*nowhere"):
        start_single(config(str(tmp_path / "nowhere")))
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model.path"):
        start_single(config(str(tmp_path)))


def test_a_checkpoint_with_missing_weights_is_refused(model_folders, start_single, tmp_path):
    model = hf_model(model_folders["untied"])
    state = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(
        ConfigError, match="lacks 1 weights .*, such as model.layers.1.mlp.up_proj.weight"
    ):
        start_single(config(str(tmp_path)))


def test_logits_are_the_model_s_own_with_what_its_family_does_after_the_head():
    sizes = dict(SIZES, num_key_value_heads=1)
    del sizes["max_position_embeddings"]
    makers = {
        "Cohere": transformers.CohereConfig(**sizes, logit_scale=0.25, pad_token_id=0),
        "Granite": transformers.GraniteConfig(**sizes, logits_scaling=4.0),
        "Gemma2": transformers.Gemma2Config(**sizes, final_logit_softcapping=15.0, head_dim=16),
        "Qwen3Moe": transformers.Qwen3MoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
    }
    for hf_config in makers.values():
        model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
        check_head(model, "x")
        ids = torch.tensor([[5, 3, 7, 9]])
        with torch.no_grad():
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(logits_of(model, hidden[0]), model(input_ids=ids).logits[0])
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration.*cannot be checked"):
        t5 = transformers.T5Config(vocab_size=50, d_model=64, d_ff=32, num_layers=1, num_heads=2)
        check_head(transformers.T5ForConditionalGeneration(t5), "some/model")
    with pytest.raises(ConfigError, match="OPTForCausalLM.*a way this trainer does not know"):
        opt = transformers.OPTConfig(
            vocab_size=50, hidden_size=64, num_attention_heads=2, num_hidden_layers=1
        )
        check_head(transformers.OPTForCausalLM(opt).eval(), "some/model")


def test_the_padding_token_learns_where_it_is_no_padding(model_folders, start_single, tmp_path):
    model = hf_model(model_folders["untied"])
    model.config.pad_token_id = 5
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(model_folders["untied"]).save_pretrained(tmp_path)
    found = []
    for path in (model_folders["untied"], str(tmp_path)):
        worker = start_single(config(path))
        worker.update(make_batch(model_folders["untied"]))
        found.append(worker.gradients)
    assert_gradients_equal(*found)
    assert (found[0]["model.embed_tokens.weight"][5] != 0).any()
