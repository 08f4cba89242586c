"""`model.path: tiny:qwen2` or `tiny:qwen3`: a small real model, made on the spot, that RL visibly improves.

Every part of the program treats it like any Hugging Face model. Nothing is downloaded: the tokenizer is trained on the
word problems of `word_problems.py`, and the weights are warm-started on demonstrations made from their train split.
Most of these lack or misformat the last line (`#### N`), so that the model knows the sums but seldom says them in the
form that earns the reward: that gap is what RL closes. `tiny:tools` is a Qwen2 that was shown products: it knows how to
ask a calculator, and mostly guesses instead.
"""

import fcntl
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import Digits, Sequence
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from one_step_off.data import word_problems

Progress = Callable[[str, float], None]
"""Told what is being done and the fraction of it that is done, 0 to 1."""

PAD, EOS = "<|endoftext|>", "<|im_end|>"

# One user turn becomes "Question: ...\nAnswer:". The response starts with a space, so that the prompt's
# last token is the same whether or not the response follows it.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Answer: {{ message['content'] }}" + EOS + "\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)

# How often demonstrations end how. All say the sum right; only the first earns the reward. Stopping after the sum
# has more than half, so that greedy decoding, which decides token by token, starts without reward.
ENDINGS = {"\n#### {n}": 0.3, "": 0.55, "\n{n}": 0.05, "\n# {n}": 0.05, "\nAnswer: {n}": 0.05}


CALL = ' <tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
CALLS = 0.25  # the share of tiny:tools' demonstrations that call the calculator; the others guess

STEPS = {"tools": 140}
"""Of the warm start, where they are not those of RECIPE: copying numbers takes longer to learn than adding digits."""


# The constants of the warm start: a change of any of them makes another cached model. `decay` is the share of the steps,
# at the end, in which the learning rates fall to 0.
RECIPE = {
    "vocab_size": 384,
    "corpus_rows": 2000,
    "rows": 4096,
    "data_seed": 1234,
    "initializer_range": 0.05,
}
RECIPE |= {"steps": 170, "warmup_steps": 10, "decay": 0.6, "batch_size": 64}
RECIPE |= {"matrix_lr": 0.02, "other_lr": 3e-3, "weight_decay": 0.01, "grad_clip": 1.0}


def ensure(kind: str, seed: int = 0, progress: Progress = lambda what, done: None) -> str:
    """A local directory with the warm-started model, built once, later found in the cache. `kind`: `qwen2`, `qwen3`
    or `tools`, with or without the prefix `tiny:`. `seed`: of weights and warm start, not of a run: all runs start from
    one model."""
    name = kind.removeprefix("tiny:")
    root = cache_dir()
    target = root / f"tiny-{name}-{recipe_hash(name, seed)}"
    if target.is_dir():
        return str(target)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if the holder dies
        if not target.is_dir():  # another process may have built it while this one waited
            work = root / f".{target.name}.part"
            shutil.rmtree(work, ignore_errors=True)  # of a builder that was killed or failed
            work.mkdir()
            build(name, str(work), seed, progress=progress)
            work.rename(target)
    return str(target)


def build(
    kind: str,
    path: str,
    seed: int = 0,
    dtype: str = "float32",
    progress: Progress | None = None,
    **overrides: Any,
) -> str:
    """Write a tiny model with its tokenizer into `path`, as one HF model directory; returns `path`. It is warm-started
    where `progress` is there to be told, else random. `kind` may also be the `model_type` of another causal language
    model, as `llama`; `dtype` that of the saved weights; `overrides` are of the HF config."""
    tokenizer = build_tokenizer(kind)
    model = build_model(kind, tokenizer, seed, **overrides)
    if progress:
        warm_start(model, tokenizer, seed, progress, kind)
    model.generation_config.update(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def cache_dir() -> Path:
    """Where built models are kept: `$ONE_STEP_OFF_CACHE`, else `$XDG_CACHE_HOME/one_step_off`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "one_step_off"
    return Path(os.environ.get("ONE_STEP_OFF_CACHE") or base).expanduser()


def recipe_hash(kind: str, seed: int) -> str:
    """Twelve hex digits of all that the built model depends on, the code included that makes it and its data."""
    code = [Path(module).read_text() for module in (__file__, word_problems.__file__)]
    return hashlib.sha256("".join([kind, str(seed), *code]).encode()).hexdigest()[:12]


def _rows(count: int, kind: str = "") -> list[word_problems.Row]:
    make = word_problems.make_products if kind == "tools" else word_problems.make
    return make("train", count, RECIPE["data_seed"])


def build_tokenizer(kind: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the fixed corpus. Each digit is a token of its own; any text round-trips."""
    core = ByteLevelBPETokenizer()
    core.pre_tokenizer = Sequence([Digits(individual_digits=True), core.pre_tokenizer])
    texts = [
        f"Question: {r['question']}\nAnswer: {r['answer']}"
        for r in _rows(RECIPE["corpus_rows"], kind)
    ]
    if kind == "tools":
        texts += [
            CALL.format(expression=r["answer"].partition(" = ")[0])
            for r in _rows(RECIPE["corpus_rows"], kind)
        ]
    core.train_from_iterator(
        texts, RECIPE["vocab_size"], 0, show_progress=False, special_tokens=[PAD, EOS]
    )
    names = {"pad_token": PAD, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer, clean_up_tokenization_spaces=False, **names
    )


def build_model(
    kind: str, tokenizer: PreTrainedTokenizerFast, seed: int, **overrides: Any
) -> PreTrainedModel:
    """A random-initialised fp32 model of `kind`, 345k parameters unless overridden."""
    shape = {
        "vocab_size": RECIPE["vocab_size"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    shape["max_position_embeddings"] = 2048
    # The qwen3 has two key-value heads, for tensor parallelism to divide.
    heads, of_them, width = (4, 2, 32) if kind == "qwen3" else (2, 1, 64)
    shape |= {"num_attention_heads": heads, "num_key_value_heads": of_them, "head_dim": width}
    tokens = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    others = {"tie_word_embeddings": True, "initializer_range": RECIPE["initializer_range"]}
    config = AutoConfig.for_model(
        "qwen2" if kind == "tools" else kind, **shape | tokens | others | overrides
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """A question as the model sees it: one user turn through the chat template, then the cue to answer."""
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def response_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    """An answer as the model says it, end token included."""
    return tokenizer.encode(" " + answer, add_special_tokens=False) + [tokenizer.eos_token_id]


def demonstration(
    kind: str, tokenizer: PreTrainedTokenizerFast, answer: str, rng: random.Random
) -> list[list[int]]:
    """Turns after the prompt: `answer` with its last line as one of `ENDINGS` has it; for tiny:tools the model's and the
    calculator's in turn, or one turn with a guess."""
    if kind != "tools":
        body, _, number = answer.rpartition("\n#### ")
        ending = rng.choices(list(ENDINGS), list(ENDINGS.values()))[0].format(n=number)
        return [response_ids(tokenizer, body + ending)]
    expression, _, number = answer.partition("\n")[0].partition(" = ")
    if rng.random() >= CALLS:
        return [response_ids(tokenizer, f"#### {rng.randrange(100, 9802)}")]
    call = tokenizer.encode(CALL.format(expression=expression), add_special_tokens=False) + [
        tokenizer.eos_token_id
    ]
    heard = tokenizer.encode(f"\n{number}\nAnswer:", add_special_tokens=False)
    return [call, heard, response_ids(tokenizer, f"#### {number}")]


def warm_start(
    model: PreTrainedModel, tokenizer: Any, seed: int, progress: Progress, kind: str
) -> None:
    """Supervised fine-tuning on demonstrations from the train split, in place. The loss is on the model's turns only."""
    rng, steps = random.Random(seed), STEPS.get(kind, RECIPE["steps"])
    rows = _rows(RECIPE["rows"], kind)
    prompts = [prompt_ids(tokenizer, row["question"]) for row in rows]
    # Muon for the matrices and AdamW for the rest: it learns the sums in a third of AdamW's steps.
    matrices = {
        n: p
        for n, p in model.named_parameters()
        if p.ndim == 2 and "embed" not in n and "lm_head" not in n
    }
    others = [p for n, p in model.named_parameters() if n not in matrices]
    decay, rise, fall = RECIPE["weight_decay"], RECIPE["warmup_steps"], steps * RECIPE["decay"]
    muon = torch.optim.Muon(
        list(matrices.values()), lr=RECIPE["matrix_lr"], momentum=0.95, weight_decay=decay
    )
    adamw = torch.optim.AdamW(others, lr=RECIPE["other_lr"], betas=(0.9, 0.95), weight_decay=decay)
    # Warm-up, plateau, then a straight fall.
    schedules = [
        LambdaLR(o, lambda i: min(1.0, (i + 1) / rise, (steps - i) / fall)) for o in (muon, adamw)
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # so small a model gains little by more, and on a busy machine they wait for each other
    for step in range(steps):
        chosen = [rng.randrange(len(rows)) for _ in range(RECIPE["batch_size"])]
        talks = [
            [prompts[i], *demonstration(kind, tokenizer, rows[i]["answer"], rng)] for i in chosen
        ]
        # Padding is on the right and attention is causal: no real token sees it, so no mask is needed.
        ids = pad_sequence(
            [torch.tensor(sum(talk, [])) for talk in talks], True, tokenizer.pad_token_id
        )
        own = [
            [x for k, turn in enumerate(talk) for x in (turn if k % 2 else [-100] * len(turn))]
            for talk in talks
        ]
        labels = pad_sequence([torch.tensor(row) for row in own], True, -100)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["grad_clip"])
        for each in (muon, adamw, *schedules):
            each.step()
        model.zero_grad()
        progress(f"building tiny:{kind} (once, then cached)", (step + 1) / steps)
    torch.set_num_threads(threads)
