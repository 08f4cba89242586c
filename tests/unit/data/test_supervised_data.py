"""Rows with answers: which tokens are trained, for each kind of chat template, and which rows are
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.supervised import supervised_config
from one_step_off.data.supervised_data import SupervisedRow, load_supervised_data
from tests.unit.data.data_helpers import GOOD, make_tokenizer, prompts_of, write_jsonl

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "<|im_start|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|header|>\n\n{% endif %}"
)
# The essence of Mistral's: no special token before an answer, and </s> after it.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# The essence of Qwen3's: thoughts stay in the last answer alone.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As THINKING, but it says itself where the answers are.
MARKED_THINKING = THINKING.replace(
    "{{ m.content }}<|im_end|>\n{% endfor %}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
)

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    SYSTEM,
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2 + 2?\nQuick!"},
    {"role": "assistant", "content": "4, höchstens.\nSure."},
]


def tokenizer_with(template: str | None, end: str = "<|im_end|>", merged: tuple = ()) -> Any:
    """A byte-level tokenizer with the tokens of these templates. `merged`: byte pairs that are one
    token."""
    from tokenizers import Tokenizer

    tokenizer = make_tokenizer(template)
    inner = tokenizer.backend_tokenizer
    if merged:
        import json

        state = json.loads(inner.to_str())
        for pair in merged:
            state["model"]["vocab"]["".join(pair)] = 300 + len(state["model"]["merges"])
            state["model"]["merges"].append(list(pair))
        state["pre_tokenizer"]["use_regex"] = False
        from transformers import PreTrainedTokenizerFast

        inner = Tokenizer.from_str(json.dumps(state))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=template
        )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|header|>"]}
    )
    tokenizer.eos_token = end
    return tokenizer


def config(files: str, **changes: Any) -> Config:
    """A supervised config; changes as sft__overlong="cut"."""
    cfg = Config()
    cfg.data.train_files = files
    cfg.data.train_batch_size = 4
    cfg.trainer.total_steps = 3
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return supervised_config(cfg)


def load(tmp_path: Path, rows: list[Any], tokenizer: Any, **changes: Any) -> Any:
    """The `RunData` of some rows."""
    files = write_jsonl(tmp_path / "rows.jsonl", rows)
    stop_ids = frozenset({tokenizer.eos_token_id})
    return load_supervised_data(config(files, **changes), tokenizer, stop_ids)


def rows_of(tmp_path: Path, rows: list[Any], tokenizer: Any, **changes: Any) -> list[SupervisedRow]:
    return load(tmp_path, rows, tokenizer, **changes).stream.prompts


def answers(row: SupervisedRow, tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.is_answer.astype(int), [0]])))
    return [tokenizer.decode(row.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize(
    ("template", "end", "expected"),
    [
        (CHATML, "<|im_end|>", ["It is 2.<|im_end|>", "4, höchstens.\nSure.<|im_end|>"]),
        (LLAMA, "<|im_end|>", ["It is 2.<|im_end|>", "4, höchstens.\nSure.<|im_end|>"]),
        (MARKED, "<|im_end|>", ["It is 2.<|im_end|>", "4, höchstens.\nSure.<|im_end|>"]),
        (MARKED_THINKING, "<|im_end|>", ["It is 2.<|im_end|>", "4, höchstens.\nSure.<|im_end|>"]),
        (INSTRUCT, "</s>", [" It is 2.</s>", " 4, höchstens.\nSure.</s>"]),
    ],
    ids=["chatml", "llama", "marked", "marked_thinking", "instruct"],
)
def test_every_answer_of_a_chat_and_nothing_else_is_trained(tmp_path, template, end, expected):
    tokenizer = tokenizer_with(template, end)
    turns = TURNS[1:] if template == INSTRUCT else TURNS
    data = load(tmp_path, [{"messages": turns}], tokenizer)
    (row,) = data.stream.prompts
    assert answers(row, tokenizer) == expected
    assert row.text.startswith(tokenizer.decode(row.ids)), "only what follows the answer is left"
    assert row.ids[-1] == tokenizer.convert_tokens_to_ids(end)
    assert not any("warning" in line for line in data.lines())
    sample = row.sample((2, 7))
    assert np.array_equal(np.concatenate([sample.prompt_ids, sample.response_ids]), row.ids)
    assert sample.loss_mask[0] and sample.loss_mask.sum() == row.is_answer.sum()
    assert set(sample.versions) == {7} and sample.attempt == 2


def test_the_thoughts_that_a_template_adds_are_part_of_a_single_answer(tmp_path):
    tokenizer = tokenizer_with(THINKING)
    (row,) = rows_of(tmp_path, [{"messages": TURNS[:3]}], tokenizer)
    assert answers(row, tokenizer) == ["<think>\n\n</think>\n\nIt is 2.<|im_end|>"]


def test_a_chat_whose_template_rewrites_earlier_turns_is_refused(tmp_path):
    tokenizer = tokenizer_with(THINKING)
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}]
    data = load(tmp_path, rows, tokenizer)
    assert [row.id for row in data.stream.prompts] == [(0, 1)]
    (bad,) = data.reports[0].bad
    assert "message 2: the chat template of model.path writes the turns before it" in bad[1]
    assert "{% generation %}" in bad[1]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: message 2: .*one answer per row"):
        load(tmp_path, rows, tokenizer, data__bad_rows="fail")
    with pytest.raises(ConfigError, match=r"no row is left; .*message 2"):
        load(tmp_path, rows[:1], tokenizer)


def test_a_token_across_the_border_of_an_answer_is_refused(tmp_path):
    """ "\\n" of the generation prompt and "\\n" of the answer are one token together."""
    tokenizer = tokenizer_with(CHATML, merged=(("Ċ", "Ċ"),))
    question = {"role": "user", "content": "Hi"}
    good = {"messages": [question, {"role": "assistant", "content": "Yes\n\nNo"}]}
    bad = {"messages": [question, {"role": "assistant", "content": "\nYes"}]}
    data = load(tmp_path, [good, bad], tokenizer)
    (row,) = data.stream.prompts
    assert answers(row, tokenizer) == ["Yes\n\nNo<|im_end|>"]
    assert "a token lies across the border" in data.reports[0].bad[0][1]


def test_questions_have_the_prompts_of_rl(tmp_path):
    """So that what is learned is what rollouts ask for."""
    rows = [GOOD, {"question": "What is 3 + 4?", "answer": "7"}]
    tokenizer = tokenizer_with(CHATML)
    instruction = "Think."
    prompts = prompts_of(tmp_path, [GOOD], tokenizer, instruction=instruction)
    row, second = rows_of(tmp_path, rows, tokenizer, data__instruction=instruction)
    assert np.array_equal(row.sample((0, 0)).prompt_ids, prompts[0].ids)
    assert answers(row, tokenizer) == ["1 + 1 = 2\n#### 2<|im_end|>"]
    assert answers(second, tokenizer) == ["7<|im_end|>"], "an answer need not hold a number line"


@pytest.mark.parametrize("template", [None, CHATML])
def test_without_a_template_a_blank_separates_question_and_answer(tmp_path, template):
    tokenizer = tokenizer_with(template)
    (row,) = rows_of(
        tmp_path, [GOOD], tokenizer, data__chat_template="never" if template else "auto"
    )
    (prompt,) = prompts_of(tmp_path, [GOOD], tokenizer, chat_template="never")
    assert np.array_equal(row.sample((0, 0)).prompt_ids, prompt.ids)
    assert answers(row, tokenizer) == [" 1 + 1 = 2\n#### 2<|im_end|>"]


def test_several_answers_need_a_template(tmp_path):
    with pytest.raises(ConfigError, match="several answers, .*needs a chat template"):
        load(tmp_path, [{"messages": TURNS}], tokenizer_with(None))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What is 1 + 1?", "completion": "It is 2."},
        {"prompt": TURNS[1:2], "completion": TURNS[2:3]},
        {"prompt": TURNS[1:2], "completion": "It is 2."},
        {"messages": [{**TURNS[1], "tool_calls": None}, {**TURNS[2], "name": None}]},
    ],
)
def test_formats(tmp_path, row):
    tokenizer = tokenizer_with(CHATML)
    (loaded,) = rows_of(tmp_path, [row], tokenizer)
    assert loaded.text.startswith("<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n")
    assert answers(loaded, tokenizer) == ["It is 2.<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"text": "Hello"},
            "found the columns text, not messages, prompt\\+completion, question",
        ),
        (
            {"prompt": TURNS[1:2], "reward_model": {"ground_truth": "2"}},
            "found the columns prompt, r",
        ),
        ({"question": "?", "answer": " "}, "column 'answer' holds ' ', not a text"),
        ({"messages": []}, "column 'messages' holds \\[\\], not a list"),
        ({"messages": "Hello"}, "column 'messages' holds 'Hello', not a list"),
        ({"messages": ["Hello"]}, "message 0 of 'messages' is not an object"),
        ({"messages": [{"role": "user"}]}, "message 0 of 'messages' has no text 'content'"),
        ({"messages": TURNS[:2]}, "there is no answer to learn"),
        (
            {"messages": [*TURNS[:2], {"role": "assistant", "content": "\n "}]},
            "message 2, an answer of the assistant, is empty",
        ),
        ({"question": "?", "answer": "\ud800"}, "not valid Unicode"),
        ([1], "a JSON list, not an object"),
        ("{broken", "not valid JSON"),
    ],
)
def test_bad_rows_are_counted_or_refused(tmp_path, row, reason):
    tokenizer = tokenizer_with(CHATML)
    data = load(tmp_path, [row, GOOD], tokenizer)
    assert len(data.stream) == 1
    assert "training data: 2 rows, 1 used, 1 malformed skipped" in data.lines()
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path, [row, GOOD], tokenizer, data__bad_rows="fail")
    with pytest.raises(ConfigError, match=f"no row is left; fix the rows; .*{reason}"):
        load(tmp_path, [row], tokenizer)


def test_a_row_that_begins_with_an_answer_is_refused(tmp_path):
    rows = [{"messages": TURNS[2:]}]
    with pytest.raises(ConfigError, match=r"its first message is an answer: nothing stands bef"):
        load(tmp_path, rows, tokenizer_with(CHATML))
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"its first token belongs to an answer: nothing stand"):
        load(tmp_path, rows, tokenizer_with(marked))


def long_rows() -> list[dict[str, Any]]:
    """Rows of 10 and 60 characters more than their templates'."""
    return [
        {"question": "Q", "answer": "a" * 9},
        {"question": "Q", "answer": "a" * 59},
        {"question": "Q" * 200, "answer": "a"},
    ]


def test_long_rows_are_skipped_and_counted(tmp_path):
    data = load(tmp_path, long_rows(), tokenizer_with(CHATML), sft__max_length=60)
    assert [row.id for row in data.stream.prompts] == [(0, 0)]
    lines = data.lines()
    assert lines[0] == "training data: 3 rows, 1 used, 2 over sft.max_length skipped"
    assert lines[1].startswith("  skipped ") and lines[1].endswith("tokens")


def test_long_rows_are_cut_and_counted(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    data = load(tmp_path, long_rows(), tokenizer, sft__max_length=60, sft__overlong="cut")
    whole, cut = data.stream.prompts
    assert answers(whole, tokenizer) == ["a" * 9 + "<|im_end|>"]
    assert len(cut.ids) == len(cut.is_answer) == 60
    (rest,) = answers(cut, tokenizer)
    assert set(rest) == {"a"} and len(rest) < 59, "its end is not there, and is not trained"
    lines = data.lines()
    assert lines[0] == "training data: 3 rows, 2 used, 1 over sft.max_length skipped"
    assert lines[-1] == "  1 of 2 rows are cut at sft.max_length=60 tokens (sft.overlong=cut)"


def test_long_rows_end_the_run_if_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: \d+ tokens, more than sft.max_length=60"):
        load(
            tmp_path, long_rows(), tokenizer_with(CHATML), sft__max_length=60, sft__overlong="fail"
        )


def test_the_longest_row_is_by_default_that_of_rl(tmp_path):
    lengths = {"data__max_prompt_length": 40, "data__max_response_length": 20}
    assert len(load(tmp_path, long_rows(), tokenizer_with(CHATML), **lengths).stream) == 1


def test_an_end_at_which_generation_does_not_stop_is_named(tmp_path):
    """As with the chat template and the eos_token of a base model."""
    data = load(tmp_path, [GOOD], tokenizer_with(CHATML, end="</s>"))
    (warning,) = [line for line in data.lines() if "warning" in line]
    assert "1 of 1 rows do not end with a token at which generation ends (</s>)" in warning
    assert "'<|im_end|>'" in warning


def test_held_out_rows(tmp_path):
    tokenizer = tokenizer_with(CHATML)
    val_files = write_jsonl(tmp_path / "val.jsonl", [GOOD, GOOD, GOOD])
    data = load(tmp_path, [GOOD], tokenizer, data__val_files=val_files, data__val_size=2)
    assert [row.id for row in data.val] == [(-1, 0), (-1, 1)]
    assert data.val_names == ["val"]
    assert load(tmp_path, [GOOD], tokenizer).val is None
    only_training = load(
        tmp_path, [GOOD], tokenizer, data__val_files=val_files, sft__train_files=val_files
    )
    assert only_training.val is None, "prompts of RL need no answers"


def test_the_generator_of_word_problems_and_the_tiny_model(models):
    """Question, the cue, and an answer with its end: what the tiny model's warm start taught."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models())
    cfg = config("generator:word_problems", data__generator_size=50)
    data: Any = load_supervised_data(cfg, tokenizer, frozenset({tokenizer.eos_token_id}))
    assert len(data.stream) == 50
    for row in data.stream.prompts:
        (answer,) = answers(row, tokenizer)
        assert answer == f" {row.messages[1]['content']}<|im_end|>"
        assert tokenizer.decode(row.sample((0, 0)).prompt_ids).endswith("\nAnswer:")


def test_other_rows_are_another_stream(tmp_path):
    """A checkpoint is not resumed with other data."""
    tokenizer = tokenizer_with(CHATML)
    saved = load(tmp_path, [GOOD], tokenizer).stream.state_dict()
    other = load(tmp_path, [{**GOOD, "answer": "3"}], tokenizer).stream
    with pytest.raises(ConfigError, match="other prompts"):
        other.load_state_dict(saved)
