"""Tokenizers and rows for the tests of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from one_step_off.config.schema import Config, DataConfig
from one_step_off.data.rows import DataReport, load_rows
from one_step_off.data.samples import Prompt
from one_step_off.data.tokenization import tokenize_rows

TEMPLATE = (
    "{% if with_bos %}{{ bos_token }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS = 256
EOS = 257


def make_tokenizer(template: str | None = None, adds_special: bool = False) -> Any:
    """A byte-level tokenizer: one token per byte, then <s> and </s>. Optionally it writes both
    around plain text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    if adds_special:
        inner.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


PLAIN = make_tokenizer()
GOOD = {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"}


def write_jsonl(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines; text stays as it is. Returns the path."""
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def chat_row(**changes: Any) -> dict[str, Any]:
    """A row in the RL field's format."""
    row = {
        "data_source": "my/set",
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
        ],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 7},
    }
    return {**row, **changes}


def prompts_of(
    tmp_path: Path, rows: list[Any], tokenizer: Any, report: DataReport | None = None, **cfg: Any
) -> list[Prompt]:
    """Write, load and encode rows."""
    config = DataConfig(**cfg)
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    report = report or DataReport("data")
    return tokenize_rows(load_rows(path, "train", config, 0, report), tokenizer, config, 0, report)


def run_config(train: str | list[dict[str, Any]], val: str = "", **data: Any) -> Config:
    """A config with these sets."""
    cfg = Config()
    cfg.data = DataConfig(train_files=train, val_files=val, **data)
    cfg.trainer.total_epochs = 1
    return cfg
