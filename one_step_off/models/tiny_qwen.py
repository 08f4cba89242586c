"""`model.path: tiny:qwen2` or `tiny:qwen3`: a small real model, built on demand, that RL visibly
improves.

Every part of the program treats it like any Hugging Face model. Nothing is downloaded: the
tokenizer is trained on the word problems of `word_problems.py`, and the weights are warm-started on
demonstrations generated from their train split. Most of these lack or misformat the last line
(`#### N`), so the model knows the sums but seldom writes them in the form that earns the reward:
that gap is what RL closes. `tiny:tools` is a Qwen2 that was shown products: it knows how to call a
calculator, and mostly guesses instead. `tiny:teacher` is a Qwen2 whose demonstrations all end as
they should, and `tiny:qwen2-1` has one layer in place of two: a teacher and a student.
"""

import fcntl
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from tokenizers.pre_tokenizers import Digits, Sequence
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from one_step_off.data import word_problems

Progress = Callable[[str, float], None]
"""Receives what is being done and the fraction of it that is done, 0 to 1."""

PAD = "<|endoftext|>"
EOS = "<|im_end|>"
IGNORED_LABEL = -100
"""The label of a token that the loss leaves out, torch's default."""

# One user turn becomes "Question: ...\nAnswer:". The response starts with a space, so that the
# prompt's last token is the same whether or not the response follows it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}Answer: {{ message['content'] }}" + EOS + "\n"
    "{% else %}{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)

ENDINGS = {"\n#### {n}": 0.3, "": 0.55, "\n{n}": 0.05, "\n# {n}": 0.05, "\nAnswer: {n}": 0.05}
"""The last line of a demonstration, with its probability.

All demonstrations have the right sum; only the first ending earns the reward. Stopping after the
sum has more than half, so that greedy decoding, which decides token by token, starts without
reward."""

CALL = (
    ' <tool_call>{{"name": "calculator", "arguments": '
    '{{"expression": "{expression}"}}}}</tool_call>'
)
CALL_SHARE = 0.25
"""The share of tiny:tools' demonstrations that call the calculator; the others guess."""

TEACHER_ENDINGS = {"\n#### {n}": 1.0}
"""The same of tiny:teacher, which always earns the reward if its sum is right."""

QWEN2_KINDS = ("tools", "teacher")

STEPS = {"tools": 140}
"""Warm-start steps of a kind that needs other than the recipe's: copying numbers takes longer to
learn than adding digits."""


@dataclass(frozen=True)
class Recipe:
    """The constants of the warm start. A change of any of them makes another cached model.

    Attributes:
        corpus_rows: word problems that the tokenizer is trained on.
        rows: word problems that demonstrations are made from.
        decay: the share of the steps, at the end, in which the learning rates fall to 0.
        matrix_lr: Muon's learning rate, for matrices; other_lr: AdamW's, for the rest.
    """

    vocab_size: int = 384
    corpus_rows: int = 2000
    rows: int = 4096
    data_seed: int = 1234
    initializer_range: float = 0.05
    steps: int = 170
    warmup_steps: int = 10
    decay: float = 0.6
    batch_size: int = 64
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    weight_decay: float = 0.01
    grad_clip: float = 1.0


RECIPE = Recipe()


# ---- the cache ----------------------------------------------------------------------------------


def ignore_progress(what: str, done: float) -> None:
    pass


def ensure(kind: str, seed: int = 0, progress: Progress = ignore_progress) -> str:
    """A local directory with the warm-started model, built once, later found in the cache.

    Args:
        kind: `qwen2`, `qwen3`, `tools` or `teacher`, with or without the prefix `tiny:`; `qwen2-1`
            has one layer in place of two.
        seed: of weights and warm start, not of a run: all runs start from one model.
    """
    name = kind.removeprefix("tiny:")
    family, layers = kind_and_layers(name)
    return cached(
        f"tiny-{name}-{recipe_hash(name, seed)}",
        lambda folder: build(family, folder, seed, progress=progress, **layers),
    )


def cached(name: str, make: Callable[[str], Any]) -> str:
    """The folder `name` of built models. Where it is missing, `make` fills another folder, which
    becomes it."""
    root = cache_dir()
    target = root / name
    if target.is_dir():
        return str(target)
    root.mkdir(parents=True, exist_ok=True)
    with open(root / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it if the holder dies
        if not target.is_dir():  # another process may have built it while this one waited
            unfinished = root / f".{target.name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a builder that was killed or failed
            unfinished.mkdir()
            make(str(unfinished))
            unfinished.rename(target)
    return str(target)


def kind_and_layers(name: str) -> tuple[str, dict[str, int]]:
    """The kind in a name such as `qwen2-1`, and its number of layers as an override of the HF
    config; none where the name has no number."""
    kind, _, layers = name.partition("-")
    return kind, {"num_hidden_layers": int(layers)} if layers else {}


def cache_dir() -> Path:
    """The folder of built models: `$ONE_STEP_OFF_CACHE`, else `$XDG_CACHE_HOME/one_step_off`."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "one_step_off"
    return Path(os.environ.get("ONE_STEP_OFF_CACHE") or default).expanduser()


def recipe_hash(kind: str, seed: int) -> str:
    """Twelve hex digits of all that the built model depends on, including the code that makes it
    and its data."""
    sources = [Path(module).read_text() for module in (__file__, word_problems.__file__)]
    text = "".join([kind, str(seed), *sources])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- tokenizer and model ------------------------------------------------------------------------


def build(
    kind: str,
    path: str,
    seed: int = 0,
    dtype: str = "float32",
    progress: Progress | None = None,
    **overrides: Any,
) -> str:
    """Write a tiny model with its tokenizer into `path`, as one HF model directory.

    Args:
        kind: as of `ensure`, or the `model_type` of another causal language model, such as `llama`.
        dtype: of the saved weights.
        progress: receives the progress of the warm start; None: the weights stay random.
        overrides: of the HF config.

    Returns:
        `path`.
    """
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


def _make_rows(count: int, kind: str) -> list[word_problems.QuestionRow]:
    make = word_problems.make_products if kind == "tools" else word_problems.make
    return make("train", count, RECIPE.data_seed)


def _expression_of(row: word_problems.QuestionRow) -> str:
    """The product in a row of tiny:tools, such as "12 * 13"."""
    return row["answer"].partition(" = ")[0]


def build_tokenizer(kind: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the fixed corpus. Each digit is a token of its own; any text
    round-trips."""
    core = ByteLevelBPETokenizer()
    core.pre_tokenizer = Sequence([Digits(individual_digits=True), core.pre_tokenizer])
    rows = _make_rows(RECIPE.corpus_rows, kind)
    corpus = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    if kind == "tools":
        corpus += [CALL.format(expression=_expression_of(row)) for row in rows]
    core.train_from_iterator(
        corpus, RECIPE.vocab_size, 0, show_progress=False, special_tokens=[PAD, EOS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer,
        clean_up_tokenization_spaces=False,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    kind: str, tokenizer: PreTrainedTokenizerFast, seed: int, **overrides: Any
) -> PreTrainedModel:
    """A randomly initialized fp32 model of `kind`, 345k parameters unless overridden."""
    settings: dict[str, Any] = {
        "vocab_size": RECIPE.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
        "initializer_range": RECIPE.initializer_range,
    }
    if kind == "qwen3":  # two key-value heads, which tensor parallelism can divide
        settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model_type = "qwen2" if kind in QWEN2_KINDS else kind
    config = AutoConfig.for_model(model_type, **settings | overrides)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# ---- demonstrations -----------------------------------------------------------------------------


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """A question as the model sees it: one user turn through the chat template, then the cue to
    answer."""
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def response_ids(tokenizer: PreTrainedTokenizerFast, answer: str) -> list[int]:
    """An answer as the model generates it, end token included."""
    return tokenizer.encode(" " + answer, add_special_tokens=False) + [tokenizer.eos_token_id]


def demonstration(
    kind: str, tokenizer: PreTrainedTokenizerFast, answer: str, rng: random.Random
) -> list[list[int]]:
    """The turns after the prompt, as token ids: `answer` with its last line as one of `ENDINGS`, or
    of `TEACHER_ENDINGS`.

    For tiny:tools the model's and the calculator's turns alternate, or there is one turn with a
    guess.
    """
    if kind == "tools":
        return _tool_demonstration(tokenizer, answer, rng)
    body, _, number = answer.rpartition("\n#### ")
    endings = TEACHER_ENDINGS if kind == "teacher" else ENDINGS
    ending = rng.choices(list(endings), list(endings.values()))[0]
    return [response_ids(tokenizer, body + ending.format(n=number))]


def _tool_demonstration(
    tokenizer: PreTrainedTokenizerFast, answer: str, rng: random.Random
) -> list[list[int]]:
    first_line = answer.partition("\n")[0]
    expression, _, number = first_line.partition(" = ")
    if rng.random() >= CALL_SHARE:
        guess = rng.randrange(100, 9802)
        return [response_ids(tokenizer, f"#### {guess}")]
    call = tokenizer.encode(CALL.format(expression=expression), add_special_tokens=False)
    call.append(tokenizer.eos_token_id)
    result = tokenizer.encode(f"\n{number}\nAnswer:", add_special_tokens=False)
    return [call, result, response_ids(tokenizer, f"#### {number}")]


# ---- the warm start -----------------------------------------------------------------------------


def warm_start(
    model: PreTrainedModel, tokenizer: Any, seed: int, progress: Progress, kind: str
) -> None:
    """Supervised fine-tuning on demonstrations from the train split, in place. The loss is on the
    model's turns only."""
    rng = random.Random(seed)
    steps = STEPS.get(kind, RECIPE.steps)
    rows = _make_rows(RECIPE.rows, kind)
    prompts = [prompt_ids(tokenizer, row["question"]) for row in rows]
    optimizers = optimizers_of(model)
    schedules = [schedule_of(optimizer, steps) for optimizer in optimizers]
    threads = torch.get_num_threads()
    # So small a model gains little by more threads, and on a busy machine they wait for each other.
    torch.set_num_threads(1)
    for step in range(steps):
        chosen = [rng.randrange(len(rows)) for _ in range(RECIPE.batch_size)]
        dialogs = []
        for i in chosen:
            turns = demonstration(kind, tokenizer, rows[i]["answer"], rng)
            dialogs.append([prompts[i], *turns])
        loss = _supervised_loss(model, dialogs, tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE.grad_clip)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        model.zero_grad()
        progress(f"building tiny:{kind} (once, then cached)", (step + 1) / steps)
    torch.set_num_threads(threads)


def optimizers_of(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices and AdamW for the rest: so it learns the sums in a third of AdamW's
    steps."""
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=RECIPE.matrix_lr, momentum=0.95, weight_decay=RECIPE.weight_decay
    )
    adamw = torch.optim.AdamW(
        others, lr=RECIPE.other_lr, betas=(0.9, 0.95), weight_decay=RECIPE.weight_decay
    )
    return [muon, adamw]


def schedule_of(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Warm-up, plateau, then a straight fall to 0."""
    fall_steps = steps * RECIPE.decay

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / RECIPE.warmup_steps, (steps - step) / fall_steps)

    return LambdaLR(optimizer, factor)


def _supervised_loss(
    model: PreTrainedModel, dialogs: list[list[list[int]]], pad_token_id: int
) -> Tensor:
    """Mean cross-entropy of the model's turns.

    Args:
        dialogs: token ids of the turns of each; the model's are those at odd positions.
    """
    rows = []
    label_rows = []
    for turns in dialogs:
        ids: list[int] = []
        labels: list[int] = []
        for position, turn in enumerate(turns):
            is_model_turn = position % 2 == 1
            ids += turn
            labels += turn if is_model_turn else [IGNORED_LABEL] * len(turn)
        rows.append(torch.tensor(ids))
        label_rows.append(torch.tensor(labels))
    # Padding is on the right and attention is causal: no real token sees it, so no mask is needed.
    input_ids = pad_sequence(rows, True, pad_token_id)
    padded_labels = pad_sequence(label_rows, True, IGNORED_LABEL)
    logits = model(input_ids=input_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), padded_labels[:, 1:].flatten()
    )
