"""Bad model directories, checkpoints and functions of the user's own, as the whole program meets
them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.bad_input import base, refused, write

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


def cut(name: str, to: float):
    """Keep this share of a file's bytes."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * to)])

    return change


def keys(name: str = "config.json", **changes):
    """Other keys in a JSON file; None removes one."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def text(name: str, content: str | bytes):
    return lambda folder: write(folder, {name: content})


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def tensors(change_them):
    """The weights, changed by a function of {name: tensor}."""

    def change(folder: Path) -> None:
        result = load_file(folder / WEIGHTS)
        change_them(result)
        save_file(result, folder / WEIGHTS, {"format": "pt"})

    return change


def sharded(names: dict[str, str]):
    """The weights' file under another name, and an index of which file holds what."""

    def change(folder: Path) -> None:
        result = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
        index = dict.fromkeys(result, "model-00001-of-00002.safetensors") | names
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return change


def shorter(result: dict) -> None:
    result[NORM] = result[NORM][:-1].clone()


# (name, what is done to a good model's directory, parts that the line must hold beside
# model.path=...)
MODELS = [
    ("empty", lambda folder: [path.unlink() for path in folder.iterdir()],
     ["has no config.json", "save_pretrained"]),
    ("no config", without("config.json"), ["its config cannot be loaded", "config.json"]),
    ("no weights", without(WEIGHTS), ["has no .safetensors or .bin"]),
    ("no tokenizer", without("tokenizer.json", "tokenizer_config.json"), ["has no tokenizer.json"]),
    ("only an adapter", lambda f: (f / WEIGHTS).rename(f / "adapter_model.safetensors"),
     ["has no weights"]),
    ("GGUF", lambda f: (f / WEIGHTS).rename(f / "model.gguf"), ["has no .safetensors or .bin"]),
    ("config of no bytes", text("config.json", ""), ["its config cannot be loaded", "config.json"]),
    ("config cut off", cut("config.json", 0.5), ["its config cannot be loaded", "config.json"]),
    ("config is a list", text("config.json", "[]"), ["its config cannot be loaded"]),
    ("config is a text", text("config.json", '"qwen2"'), ["its config cannot be loaded"]),
    ("config is empty", text("config.json", "{}"), ["its config cannot be loaded"]),
    ("config is no text", text("config.json", b"\xff\xfe\x00"), ["its config cannot be loaded"]),
    ("unknown kind", keys(model_type="qwen99"),
     ["its config cannot be loaded", "needs a newer one"]),
    ("no kind", keys(model_type=None), ["its config cannot be loaded"]),
    ("encoder", keys(model_type="bert", architectures=["BertForMaskedLM"]),
     ["BertForMaskedLM", "not a causal"]),
    ("encoder and decoder", keys(model_type="t5", architectures=["T5ForConditionalGeneration"]),
     ["not a causal"]),
    ("pictures", keys(model_type="vit", architectures=["ViTModel"]),
     ["not a causal language model"]),
    ("classifier", keys(architectures=["Qwen2ForSequenceClassification"]),
     ["Qwen2ForSequenceClassification", "not a causal"]),
    ("backbone alone", keys(architectures=["Qwen2Model"]), ["Qwen2Model", "not a causal"]),
    ("quantized", keys(quantization_config={"quant_method": "awq", "bits": 4}),
     ["quantized (awq)", "give the original model"]),
    ("layers in words", keys(num_hidden_layers="two"),
     ["its config cannot be loaded", "num_hidden_layers"]),
    ("no layers", keys(num_hidden_layers=0), ["num_hidden_layers"]),
    ("heads that do not divide", keys(num_attention_heads=3), ["lacks", "of the expected shapes"]),
    ("too short a context", keys(max_position_embeddings=100), ["supports 100 tokens", "lower"]),
    ("code of its own", keys(model_type="mine", auto_map={"AutoConfig": "mine.C"}),
     ["trust_remote_code"]),
    ("weights of no bytes", text(WEIGHTS, b""), ["deserializing header", "give a complete model"]),
    ("weights cut off", cut(WEIGHTS, 0.5), ["deserializing header", "give a complete model"]),
    ("weights' header cut off", cut(WEIGHTS, 0.0005),
     ["deserializing header", "give a complete model"]),
    ("weights are text",
     text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
     ["deserializing header", "give a complete model"]),
    ("weights' header too long", text(WEIGHTS, b"\xff" * 8 + b"{}"),
     ["deserializing header", "give a complete model"]),
    ("weights without tensors", tensors(lambda result: result.clear()), ["lacks 2"]),
    ("a tensor missing", tensors(lambda result: result.pop(NORM)), ["lacks", NORM, "give"]),
    ("a layer missing", keys(num_hidden_layers=9), ["num_hidden_layers", "give"]),
    ("a tensor of another shape", tensors(shorter), [NORM, "of the expected shapes"]),
    ("all of another shape", keys(hidden_size=128), ["give"]),
    ("another vocabulary", keys(vocab_size=100), ["give"]),
    ("index cut off", lambda f: (sharded({})(f), cut(INDEX, 0.5)(f)),
     ["that can be loaded", "give a complete model"]),
    ("index is a list", lambda f: (sharded({})(f), text(INDEX, "[]")(f)),
     ["that can be loaded", "give a complete model"]),
    ("index without a map", lambda f: (sharded({})(f), text(INDEX, "{}")(f)),
     ["that can be loaded", "give a complete model"]),
    ("shard missing", sharded({NORM: "model-00002-of-00002.safetensors"}),
     ["model-00002-of-00002.safetensors", "give"]),
    ("tokenizer of no bytes", text("tokenizer.json", ""), ["its tokenizer cannot be loaded"]),
    ("tokenizer cut off", cut("tokenizer.json", 0.5), ["its tokenizer cannot be loaded"]),
    ("tokenizer is empty", text("tokenizer.json", "{}"), ["its tokenizer cannot be loaded"]),
    ("tokenizer's config cut off", cut("tokenizer_config.json", 0.5),
     ["its tokenizer cannot be loaded"]),
    ("template that is none", text("chat_template.jinja", "{% for m in messages %}"),
     ["chat template", "fix"]),
    ("template that raises", text("chat_template.jinja", "{{ raise_exception('no users') }}"),
     ["chat template", "no users"]),
]  # fmt: skip


@pytest.mark.parametrize(("change", "parts"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_model_directories(change, parts, models, tmp_path, capsys):
    shutil.copytree(models(), tmp_path / "model")
    change(tmp_path / "model")
    where = "model.path" if "chat template" in parts else "TMP/model"
    refused(base(tmp_path, f"{tmp_path}/model"), [where, *parts], tmp_path, capsys)
