"""Models that their files show to be unusable: refused before any engine starts, in one line."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import ray
import transformers
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.models import checkpoint_layout, weight_checks
from one_step_off.models.quantization import quantization_method
from one_step_off.runtime.prepare import prepare
from tests.conftest import tiny_config
from tests.quantized_model import quantized_copy

HALF_ROTATED = {"partial_rotary_factor": 0.5}


def copy_model(model: str, folder: Path, **config_keys: object) -> Path:
    """A copy of a model directory with other config keys."""
    copy = Path(shutil.copytree(model, folder / "model"))
    config = json.loads((copy / "config.json").read_text()) | config_keys
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def assert_refused(cfg: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        prepare(cfg, lambda line: None)
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"model_type": "qwen99"},
            "its config cannot be loaded .*newer than transformers .* needs a newer one",
        ),
        ({"model_type": "vit"}, r"\(model type 'vit'\) is not a causal language model"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM .* is not a causal .*; give",
        ),
        ({"architectures": ["Qwen2Model"]}, "Qwen2Model .* is not a causal language model"),
        (
            {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]},
            "vLLM.* no code for OpenAIGPTLMHeadModel; give",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantized \(gptq\), .*; give the original model",
        ),
        (
            {"num_hidden_layers": "two"},
            r"its config cannot be loaded \(Validation error for field .num_hidden_layers.: \w",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantized \(quantization_config in config.json\)"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 1.0,
                    "alpha": 2.0,
                }
            },
            "alpha=2.0 is read by only one of transformers and vLLM",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **HALF_ROTATED},
            "does not rotate the part of each head that its partial_rotary_factor=0.5 names",
        ),
        (
            {"rope_parameters": {"rope_type": "xpos", "rope_theta": 1e4}},
            "its rope_type=xpos is not one",
        ),
        ({"max_position_embeddings": 100}, "max_response_length = 144: .* supports 100 tokens"),
    ],
)
def test_models_that_do_not_fit(models, tmp_path, keys, words):
    model = copy_model(models(), tmp_path, **keys)
    assert_refused(tiny_config(str(model), str(tmp_path / "out")), words)


def test_a_quantized_reference_is_refused(models, tmp_path):
    reference = copy_model(models(), tmp_path, quantization_config={"quant_method": "fp8"})
    changes = {
        "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        "algorithm.kl_coef": 0.1,
        "ref.path": str(reference),
    }
    cfg = tiny_config(models(), str(tmp_path / "out"), **changes)
    assert_refused(cfg, r"ref.path=.* quantized \(fp8\)")


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}


def test_weights_that_modelopt_quantized_are_refused(models, tmp_path):
    """Their config.json says nothing of it."""
    model = copy_model(models(), tmp_path)
    (model / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    cfg = tiny_config(str(model), str(tmp_path / "out"))
    assert_refused(cfg, r"model.path=.* quantized \(NVFP4 in hf_quant_config.json\)")


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (json.dumps(MODELOPT), "NVFP4 in hf_quant_config.json"),
        ('{"quant_method": "modelopt", "quant_algo": "FP8"}', "modelopt"),
        ('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}', None),
        ("{", "hf_quant_config.json"),
        ("[]", "hf_quant_config.json"),
    ],
)
def test_what_modelopts_file_says(tmp_path, text, method):
    (tmp_path / "hf_quant_config.json").write_text(text)
    assert quantization_method(str(tmp_path), SimpleNamespace()) == method
    own = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert quantization_method(str(tmp_path), own) == "fp8"


TEACHER = {
    "placement.pools": {"rollout": [1], "actor": [1], "teacher": [2]},
    "placement.roles": {"rollout": "rollout", "actor": "actor", "teacher": "teacher"},
}


def test_a_quantized_teacher_is_refused_where_a_trainer_would_load_it(models, tmp_path):
    teacher = quantized_copy(models(), tmp_path)
    changes = TEACHER | {"teacher.path": teacher}
    cfg = tiny_config(models(), str(tmp_path / "out"), **changes)
    fix = "give the original model, or set teacher.backend=vllm, which can serve it"
    assert_refused(cfg, rf"teacher.path=.* quantized \(compressed-tensors\), .*; {fix}$")


def test_a_quantized_teacher_may_be_in_an_engine(models, tmp_path, monkeypatch):
    """Its files are not those of the model. They count with the memory that the engines take."""
    teacher = quantized_copy(models(), tmp_path)
    changes = TEACHER | {"teacher.path": teacher, "teacher.backend": "vllm"}
    cfg = tiny_config(models(), str(tmp_path / "out"), **changes)
    needed = []
    monkeypatch.setattr(weight_checks, "_require_memory", lambda cfg, sizes: needed.append(sizes))
    assert prepare(cfg, lambda line: None).cfg.teacher.path == teacher
    size = (Path(teacher) / "model.safetensors").stat().st_size
    assert needed[0]["teacher default"] == 2 * (size + (cfg.rollout.kv_cache_mb << 20))


def test_a_teacher_that_modelopt_quantized_counts_with_its_files(models, tmp_path, monkeypatch):
    teacher = copy_model(models(), tmp_path)
    (teacher / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    files = (teacher / "model.safetensors").stat().st_size
    (teacher / "model-2.safetensors").write_bytes(b"x" * 1000)  # not of the plain model
    changes = TEACHER | {"teacher.path": str(teacher), "teacher.backend": "vllm"}
    cfg = tiny_config(models(), str(tmp_path / "out"), **changes)
    needed = []
    monkeypatch.setattr(weight_checks, "_require_memory", lambda cfg, sizes: needed.append(sizes))
    prepare(cfg, lambda line: None)
    size = files + 1000 + (cfg.rollout.kv_cache_mb << 20)
    assert needed[0]["teacher default"] == 2 * size


def test_a_quantized_teacher_in_an_engine_must_fit_the_policy(models, tmp_path):
    teacher = quantized_copy(models("qwen3"), tmp_path)
    config = Path(teacher) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 100}))
    changes = TEACHER | {"teacher.path": teacher, "teacher.backend": "vllm"}
    cfg = tiny_config(models(), str(tmp_path / "out"), **changes)
    assert_refused(cfg, "teacher.path=.*: has 100 token ids, and the policy 384")


@pytest.mark.parametrize("others", [[], ["model.Q4_K_M.gguf"], ["adapter_model.safetensors"]])
def test_a_model_without_weights_that_can_be_trained(models, tmp_path, others):
    model = copy_model(models(), tmp_path)
    (model / "model.safetensors").unlink()
    for name in others:
        (model / name).write_text("x")
    cfg = tiny_config(str(model), str(tmp_path / "out"))
    assert_refused(cfg, f"model.path={model}: has no weights .*GGUF.*; give a model")


def refusal_of_the_hub(code: str) -> httpx.Response:
    request = httpx.Request("HEAD", "http://hub/config.json")
    headers = {"X-Error-Code": code, "X-Error-Message": "no"}
    return httpx.Response(403, headers=headers, request=request)


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        (
            GatedRepoError("403\nno", response=refusal_of_the_hub("GatedRepo")),
            "gated: request access .* `hf auth login`",
        ),
        (
            RepositoryNotFoundError("401", response=refusal_of_the_hub("RepoNotFound")),
            "no such model on the hub, .*check the id",
        ),
        (LocalEntryNotFoundError("not there"), "check the network and HF_HUB_OFFLINE"),
    ],
)
def test_hub_models_that_cannot_be_loaded(tmp_path, monkeypatch, cause, fix):
    """The hub's answers, as its client raises them below transformers."""

    def fail(*args: object, **kwargs: object) -> None:
        raise cause

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", fail)
    cfg = tiny_config("some/model", str(tmp_path))
    assert_refused(cfg, f"model.path=some/model: its config .*{fix}")


def test_a_hub_model_that_is_not_in_the_cache(tmp_path):
    cfg = tiny_config("some/model", str(tmp_path))
    assert_refused(cfg, "model.path=some/model: .*; check the network")


def test_attention_heads_must_split_over_the_ranks(models, tmp_path):
    cfg = tiny_config(models(), str(tmp_path), **{"rollout.tensor_parallel_size": 3})
    assert_refused(cfg, "tensor_parallel_size=3: does not divide the 4 attention heads")


def test_a_missing_tokenizer_is_named(models, tmp_path):
    model = copy_model(models(), tmp_path)
    for file in model.glob("*token*"):
        file.unlink()
    cfg = tiny_config(str(model), str(tmp_path / "out"))
    assert_refused(cfg, "its tokenizer cannot be loaded")


# --- models of other roles -----------------------------------------------------------------------


@pytest.fixture
def model_with_other_tokens(models, tmp_path) -> str:
    """The policy's model with one more token."""
    model = copy_model(models(), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["a_word_of_its_own"])
    tokenizer.save_pretrained(model)
    return str(model)


ROLE_SETTINGS = {"ref": {"algorithm.kl_coef": 0.1}, "critic": {"algorithm.adv_estimator": "gae"}}


def config_with_role(model: str, folder: Path, role: str, path: str) -> Config:
    roles = {"rollout": "rollout", "actor": "actor", role: "actor"}
    changes = {"placement.roles": roles, f"{role}.path": path} | ROLE_SETTINGS.get(role, {})
    return tiny_config(model, str(folder), **changes)


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_critic_and_reference_must_read_the_policys_tokens(
    role, models, model_with_other_tokens, tmp_path
):
    path = model_with_other_tokens
    cfg = config_with_role(models(), tmp_path, role, path)
    assert_refused(cfg, f"{role}.path={path}: its token ids do not match those of")


@pytest.mark.parametrize("role", ["ref", "critic"])
def test_a_model_of_another_role_that_is_not_there(role, models, tmp_path):
    cfg = config_with_role(models(), tmp_path, role, "no/model")
    assert_refused(cfg, f"{role}.path=no/model: its config cannot be loaded")


def test_a_reward_model_may_have_tokens_of_its_own(models, model_with_other_tokens, tmp_path):
    path = model_with_other_tokens
    classifier = transformers.AutoModelForSequenceClassification
    classifier.from_pretrained(path, num_labels=1).save_pretrained(path)
    prepare(config_with_role(models(), tmp_path, "reward_model", path), lambda line: None)


def teacher_config(model: str, folder: Path, path: str, by_source: dict[str, str]) -> Config:
    changes = {
        "placement.roles": {"rollout": "rollout", "actor": "actor", "teacher": "actor"},
        "teacher.path": path,
        "teacher.by_source": by_source,
    }
    return tiny_config(model, str(folder), **changes)


def test_every_teacher_must_read_the_policys_tokens(models, model_with_other_tokens, tmp_path):
    path = model_with_other_tokens
    cfg = teacher_config(models(), tmp_path, path, {})
    assert_refused(cfg, f"teacher.path={path}: its token ids do not match those of")
    cfg = teacher_config(models(), tmp_path, models(), {"math": path})
    assert_refused(cfg, f"teacher.by_source.math={path}: its token ids do not match those of")


def test_a_teacher_must_have_logits_for_all_of_the_policys_tokens(models, tmp_path):
    cfg = teacher_config(models(), tmp_path, models(), {})
    cfg.teacher.top_k = 384
    assert_refused(cfg, "teacher.top_k=384: the policy has 384 token ids; use fewer")
    small = copy_model(models(), tmp_path, vocab_size=380)
    cfg = teacher_config(models(), tmp_path, str(small), {})
    assert_refused(cfg, f"teacher.path={small}: has 380 token ids, and the policy 384")


def gpt_oss_model(folder: Path) -> str:
    """The folder of a small random model."""
    from one_step_off.models import tiny_qwen

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rope_scaling": None}
    return tiny_qwen.build("gpt_oss", str(folder), tie_word_embeddings=False, **sizes)


def test_a_family_whose_experts_stay_stale_in_vllm_is_refused(tmp_path):
    model = gpt_oss_model(tmp_path / "model")
    cfg = tiny_config(model, str(tmp_path / "run"))
    assert_refused(cfg, "vLLM cannot take new weights of this family .*rollout.engine=transformers")


def test_vllms_loader_of_gpt_oss_still_copies_past_the_hooks_of_a_reload():
    """Once it calls the parameters' weight loaders, `STALE_IN_VLLM` can go."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    (folder,) = package.submodule_search_locations
    source = (Path(folder) / "model_executor/models/gpt_oss.py").read_text()
    begin = source.index("def _load_weights_other(")
    loader = source[begin : source.index("\n    def ", begin + 1)]
    assert "w13_weight" in loader
    assert "param.copy_(narrow_weight)" in loader


def test_a_checkpoint_with_tensors_that_the_model_has_not_is_refused(models, tmp_path):
    copy = copy_model(models(), tmp_path)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.7.up_proj.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    cfg = tiny_config(str(copy), str(tmp_path / "run"))
    words = r"has 1 tensors that the model has not, such as .*\.7\.up_proj\.weight"
    assert_refused(cfg, words)


def test_files_with_other_names_than_the_conversion_gives_are_refused(
    models, tmp_path, monkeypatch
):
    """A conversion that transformers forgot on the way back: what is streamed would have names
    that no engine knows."""
    monkeypatch.setattr(
        checkpoint_layout,
        "revert_weight_conversion",
        lambda _, state: {name.replace("mlp", "ffn"): tensor for name, tensor in state.items()},
    )
    cfg = tiny_config(models(), str(tmp_path / "run"))
    assert_refused(cfg, r"6 of its tensors have other names in the files .*, such as .*\.ffn\.")
