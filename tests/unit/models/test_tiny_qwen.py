"""The tiny models: their tokenizer, their files, their cache, and (slow) what the warm start
teaches."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from one_step_off.data import word_problems
from one_step_off.models import tiny_qwen

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_qwen.build_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built into the test's own folder."""
    monkeypatch.setenv("ONE_STEP_OFF_CACHE", str(tmp_path))


@pytest.fixture
def fake_build(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the warm start by a file; the list has one entry per build."""
    built: list[str] = []

    def build(kind: str, path: str, seed: int, progress: tiny_qwen.Progress) -> None:
        time.sleep(0.05)
        built.append(f"{kind} {seed}")
        (Path(path) / "config.json").write_text("{}")

    monkeypatch.setattr(tiny_qwen, "build", build)
    return built


@pytest.mark.parametrize(
    "text",
    ["Anna has 17 apples.", " 27 + 2 = 29\n#### 29", "naïve 漢字 🙂\t\n  x", "", "1234567890"],
)
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_each_digit_is_a_token_and_the_vocabulary_is_full(tokenizer) -> None:
    assert len(tokenizer) == tiny_qwen.RECIPE.vocab_size
    assert not [t for t in tokenizer.get_vocab() if re.search(r"\d.", t) or re.search(r".\d", t)]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_tokenizer_is_deterministic(tokenizer) -> None:
    assert tokenizer.get_vocab() == tiny_qwen.build_tokenizer().get_vocab()


def test_warm_start_sees_what_training_will_see(tokenizer) -> None:
    row = word_problems.make("train", 1, 0)[0]
    turns = [{"role": "user", "content": row["question"]}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == f"Question: {row['question']}\nAnswer:"
    prompt = tiny_qwen.prompt_ids(tokenizer, row["question"])
    response = tiny_qwen.response_ids(tokenizer, row["answer"])
    assert prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
    # One text tokenized whole gives the same ids as its two halves: no token straddles the
    # boundary.
    whole = f"{text} {row['answer']}{tiny_qwen.EOS}"
    assert prompt + response == tokenizer.encode(whole, add_special_tokens=False)
    answered = [*turns, {"role": "assistant", "content": row["answer"]}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == whole + "\n"


def test_prompts_and_answers_are_short(tokenizer) -> None:
    for split in ("train", "test"):
        for row in word_problems.make(split, 300, 1):
            assert len(tiny_qwen.prompt_ids(tokenizer, row["question"])) <= 60
            assert len(tiny_qwen.response_ids(tokenizer, row["answer"])) <= 24


def test_demonstrations_have_the_sum_but_seldom_in_the_rewarded_form(tokenizer) -> None:
    rng = random.Random(0)
    answer = "27 + 2 = 29\n#### 29"
    counts: Counter[str] = Counter()
    for _ in range(2000):
        (turn,) = tiny_qwen.demonstration("qwen2", tokenizer, answer, rng)
        text = tokenizer.decode(turn, skip_special_tokens=True)
        counts[text.removeprefix(" ")] += 1
    assert len(counts) == len(tiny_qwen.ENDINGS)
    assert all(text.startswith("27 + 2 = 29") for text in counts)
    assert 0.25 < counts[answer] / 2000 < 0.35
    assert counts["27 + 2 = 29"] > 1000  # greedy decoding stops there


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_build_makes_a_model_that_transformers_reads(kind: str, tied: bool, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    heads = {"tie_word_embeddings": tied, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = tiny_qwen.build(kind, str(tmp_path / "m"), dtype="bfloat16", **heads)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert model.config.model_type == kind
    assert model.config.num_key_value_heads == 2
    head_dims = {"llama": 64, "qwen2": 64, "qwen3": 32}
    assert model.config.head_dim == head_dims[kind]
    shares_memory = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shares_memory == tied
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == tiny_qwen.CHAT_TEMPLATE
    logits = model(torch.tensor([tiny_qwen.prompt_ids(tokenizer, "1 + 2?")])).logits
    assert logits.shape[-1] == len(tokenizer)
    assert logits.isfinite().all()


def test_a_random_model_depends_on_the_seed_alone(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(5)
    state = torch.get_rng_state()
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        path = tiny_qwen.build("qwen2", str(tmp_path / name), seed=seed)
        files.append((Path(path) / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]
    assert torch.equal(state, torch.get_rng_state())


def test_second_call_finds_the_cache(
    fake_build: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONE_STEP_OFF_CACHE", str(tmp_path / "cache"))
    path = tiny_qwen.ensure("tiny:qwen2")
    assert Path(path).parent == tmp_path / "cache"
    assert Path(path, "config.json").is_file()
    assert tiny_qwen.ensure("qwen2") == path
    assert fake_build == ["qwen2 0"]
    assert len({path, tiny_qwen.ensure("qwen2", seed=1), tiny_qwen.ensure("qwen3")}) == 3


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONE_STEP_OFF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert tiny_qwen.cache_dir() == Path("/x/one_step_off")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tiny_qwen.cache_dir() == Path.home() / ".cache" / "one_step_off"


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (tiny_qwen, "steps: int = 170", "steps: int = 1"),
        (tiny_qwen, "Answer:{", "{"),
        (word_problems, '"Eva"', '"Zoe"'),
    ],
)
def test_another_recipe_is_another_model(
    module: Any, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tiny_qwen.recipe_hash("qwen2", 0)
    source = Path(module.__file__).read_text()
    changed = source.replace(old, new)
    assert changed != source
    (tmp_path / "module.py").write_text(changed)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "module.py"))
    assert tiny_qwen.recipe_hash("qwen2", 0) != before


def test_a_failed_build_is_no_model_and_the_next_one_succeeds(
    fake_build: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_qwen.build

    def half(kind: str, path: str, seed: int, progress: tiny_qwen.Progress) -> None:
        (Path(path) / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(tiny_qwen, "build", half)
    with pytest.raises(RuntimeError, match="disk full"):
        tiny_qwen.ensure("qwen2")
    monkeypatch.setattr(tiny_qwen, "build", whole)
    path = tiny_qwen.ensure("qwen2")
    assert fake_build == ["qwen2 0"]
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == [Path(path)]


def test_concurrent_builders_build_once(fake_build: list[str], tmp_path: Path) -> None:
    paths: list[str] = []
    builders = [
        threading.Thread(target=lambda: paths.append(tiny_qwen.ensure("qwen2"))) for _ in range(4)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert fake_build == ["qwen2 0"]


def test_warm_start_reports_progress_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(tiny_qwen.RECIPE, steps=3, batch_size=4, rows=16)
    monkeypatch.setattr(tiny_qwen, "RECIPE", small)
    fractions: list[float] = []
    path = tiny_qwen.ensure("qwen3", progress=lambda what, done: fractions.append(done))
    assert fractions == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert Path(path, "model.safetensors").stat().st_size > 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "tools"])
def test_warm_model_knows_the_sums_but_seldom_formats_them(kind: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_qwen.ensure(kind)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = "left"
    rows = word_problems.make("test", 128, 0)
    prompts = [f"Question: {r['question']}\nAnswer:" for r in rows]
    batch = tokenizer(
        prompts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=False,
        return_token_type_ids=False,
    )

    def answers(**sampling) -> list[tuple[str, dict[str, str]]]:
        prompt_length = batch["input_ids"].shape[1]
        sequences = model.generate(**batch, max_new_tokens=32, **sampling)
        texts = tokenizer.batch_decode(sequences[:, prompt_length:], skip_special_tokens=True)
        n = sampling.get("num_return_sequences", 1)
        return [(text.strip(), rows[i // n]) for i, text in enumerate(texts)]

    torch.manual_seed(0)
    sampled = answers(do_sample=True, temperature=1.0, top_k=0, num_return_sequences=8)
    rewarded = [
        text.rpartition("#### ")[2] == row["answer"].rpartition("#### ")[2] for text, row in sampled
    ]
    right_sum = [text.split("\n")[0] == row["answer"].split("\n")[0] for text, row in sampled]
    assert 0.15 < sum(rewarded) / len(rewarded) < 0.45
    assert sum(right_sum) / len(right_sum) > 0.8
    assert sum(text == row["answer"] for text, row in answers(do_sample=False)) / len(rows) < 0.2
