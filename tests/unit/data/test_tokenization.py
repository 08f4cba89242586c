"""From rows to prompts: chat templates, special tokens, the limit on the length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.data.rows import DataReport
from tests.unit.data.data_helpers import (
    BOS,
    EOS,
    GOOD,
    PLAIN,
    TEMPLATE,
    chat_row,
    make_tokenizer,
    prompts_of,
)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("", "What is 1 + 1?"),
        ("Think.", "What is 1 + 1? Think."),
        ("\nAnswer:", "What is 1 + 1?\nAnswer:"),
    ],
)
def test_plain_prompt(tmp_path: Path, instruction: str, text: str) -> None:
    (prompt,) = prompts_of(tmp_path, [GOOD], PLAIN, instruction=instruction)
    assert prompt.text == text == PLAIN.decode(prompt.ids)
    assert prompt.ids.dtype == np.int32
    assert prompt.ids.shape == (len(text),)
    assert prompt.id == (0, 0)
    assert prompt.ground_truth == "2"


def test_plain_prompt_gets_one_bos_and_no_eos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(adds_special=True)
    rows = [GOOD, {**GOOD, "question": "<s>Already there"}]
    for prompt in prompts_of(tmp_path, rows, tokenizer):
        assert prompt.ids[0] == BOS
        assert Counter(prompt.ids.tolist())[BOS] == 1
        assert EOS not in prompt.ids


@pytest.mark.parametrize("with_bos", [True, False])
def test_chat_template_is_the_only_source_of_special_tokens(tmp_path: Path, with_bos: bool) -> None:
    tokenizer = make_tokenizer(
        "{% set with_bos = " + str(with_bos).lower() + " %}" + TEMPLATE, adds_special=True
    )
    (prompt,) = prompts_of(tmp_path, [GOOD], tokenizer, instruction="Think.")
    assert prompt.text == "<s>" * with_bos + "<user>What is 1 + 1? Think.</s><assistant>"
    assert (prompt.ids == BOS).sum() == with_bos
    assert (prompt.ids == EOS).sum() == 1
    messages = [{"role": "user", "content": "What is 1 + 1? Think."}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.ids.tolist() == list(theirs)


def test_chat_template_modes(tmp_path: Path) -> None:
    chat = make_tokenizer(TEMPLATE)
    assert (
        prompts_of(tmp_path, [chat_row()], chat)[0].text
        == "<system>Be brief.</s><user>1 + 1?</s><assistant>"
    )
    assert (
        prompts_of(tmp_path, [chat_row()], chat, chat_template="never")[0].text
        == "Be brief.\n1 + 1?"
    )
    assert prompts_of(tmp_path, [GOOD], chat, chat_template="never")[0].text == GOOD["question"]
    with pytest.raises(ConfigError, match="data.chat_template=always"):
        prompts_of(tmp_path, [GOOD], PLAIN, chat_template="always")
    with pytest.raises(ConfigError, match="no chat template"):
        prompts_of(tmp_path, [chat_row()], PLAIN)


def test_rows_that_the_template_refuses(tmp_path: Path) -> None:
    bad = chat_row(prompt=[{"role": "tool", "content": "x"}])
    report = DataReport("data")
    chat = make_tokenizer(TEMPLATE)
    (prompt,) = prompts_of(tmp_path, [bad, chat_row()], chat, report)
    assert prompt.id == (0, 1)
    assert "1 used" in report.lines()[0]
    assert "no tools" in report.bad[0][1]
    with pytest.raises(ConfigError, match=":1: the chat template of model.path refuses it"):
        prompts_of(tmp_path, [bad, chat_row()], chat, bad_rows="fail")
    with pytest.raises(ConfigError, match="no prompt is left"):
        prompts_of(tmp_path, [bad], chat)


def test_overlong_prompts(tmp_path: Path) -> None:
    rows = [{**GOOD, "question": "x" * n} for n in (10, 11, 12, 10)]
    report = DataReport("data")
    prompts = prompts_of(tmp_path, rows, PLAIN, report, max_prompt_length=10)
    assert [p.id for p in prompts] == [(0, 0), (0, 3)]
    assert [n for _, n in report.overlong] == [11, 12]
    assert "2 over data.max_prompt_length skipped" in report.lines()[0]
    assert "d.jsonl:2: 11 tokens" in report.lines()[1]
    with pytest.raises(ConfigError, match=r"d.jsonl:2: 11 tokens.*max_prompt_length=10"):
        prompts_of(tmp_path, rows, PLAIN, max_prompt_length=10, overlong_prompts="fail")
    with pytest.raises(ConfigError, match="no prompt is left"):
        prompts_of(tmp_path, rows, PLAIN, max_prompt_length=9)


def test_report_names_a_few_and_counts_all() -> None:
    report = DataReport("data", rows=30, bad=[(f"f:{i}", "why") for i in range(20)])
    assert len(report.lines()) == 7
    assert "10 used, 20 malformed" in report.lines()[0]
    assert "15 more" in report.lines()[-1]
