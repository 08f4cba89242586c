"""Data: every row is used or named, prompts are tokenised as the model expects, and no prompt is lost or repeated."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config, DataConfig
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.rows import DataReport, final_number, load_rows
from one_step_off.data.run_data import load_run_data
from one_step_off.data.samples import Prompt
from one_step_off.data.tokenization import tokenize_rows

TEMPLATE = (
    "{% if with_bos %}{{ bos_token }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS, EOS = 256, 257


def make_tokenizer(template: str | None = None, adds_special: bool = False) -> Any:
    """A byte-level tokenizer: one token per byte, then <s> and </s>. Optionally it writes both around plain text."""
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


# --- reading ---


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### 72", "72"),
        ("a\n#### 1,234", "1234"),
        ("#### $7.50", "7.50"),
        ("#### -3.", "-3"),
        ("#### 5\n#### 6", "6"),
        ("####8", "8"),
        ("#### 1/2", "1/2"),
    ],
)
def test_final_number(answer: str, number: str) -> None:
    assert final_number(answer) == number


BAD_GSM8K = [
    ('{"question": "a", ', "not valid JSON"),
    ("[1, 2]", "a JSON list"),
    ({"question": "a"}, "found the columns question, not question+answer"),
    ({"answer": "#### 1"}, "found the columns answer, not question+answer"),
    ({"question": None, "answer": "#### 1"}, "'question' holds None, not a text"),
    ({"question": 5, "answer": "#### 1"}, "'question' holds 5, not a text"),
    ({"question": " \n", "answer": "#### 1"}, r"'question' holds ' \n', not a text"),
    ({"question": "\ud800", "answer": "#### 1"}, "not valid Unicode"),
    ({"question": "a", "answer": ""}, "'answer' holds '', not a text"),
    ({"question": "a", "answer": "2"}, "no '#### NUMBER'"),
    ({"question": "a", "answer": "#### two"}, "stands 'two', not a number"),
    ({"question": "a", "answer": "####"}, "stands '', not a number"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_GSM8K)
def test_bad_rows_are_named_and_counted(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD, "", row, GOOD])
    report = DataReport("data")
    rows = load_rows(path, "train", DataConfig(), 0, report)
    assert [r.id[1] for r in rows] == [0, 2]
    assert rows[1].where == f"{path}:4"
    ((where, why),) = report.bad
    assert where == f"{path}:3" and reason in why
    assert "3 rows, 2 used" in report.lines()[0]
    assert f"skipped {path}:3" in report.lines()[1]
    with pytest.raises(ConfigError, match=rf"{path}:3: .*bad_rows=skip"):
        load_rows(path, "train", DataConfig(bad_rows="fail"), 0, DataReport("data"))


BAD_CHAT = [
    ({"prompt": None}, "'prompt' holds None, not a list"),
    ({"prompt": []}, "'prompt' holds [], not a list"),
    ({"prompt": "text"}, "holds 'text', not a list"),
    ({"prompt": ["text"]}, "message 0"),
    ({"prompt": [{"role": "user"}]}, "message 0"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0"),
    ({"prompt": [{"role": "user", "content": " "}]}, "are empty"),
    ({"prompt": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
    ({"reward_model": None}, "'ground_truth'"),
    ({"reward_model": "2"}, "'ground_truth'"),
    ({"reward_model": {"ground_truth": ""}}, "'ground_truth'"),
    ({"reward_model": {"ground_truth": [1]}}, "'ground_truth'"),
    ({"reward_model": {"ground_truth": True}}, "'ground_truth'"),
    ({"agent_loop": 5}, "column 'agent_loop' holds 5, not a text"),
    ({"agent_loop": ["tool"]}, "column 'agent_loop' holds ['tool']"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_CHAT)
def test_bad_chat_rows(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [chat_row(), chat_row(**changes)])
    report = DataReport("data")
    assert len(load_rows(path, "train", DataConfig(), 0, report)) == 1
    assert report.bad[0][0] == f"{path}:2" and reason in report.bad[0][1]


def test_the_other_columns_of_a_row(tmp_path: Path) -> None:
    """Entries of extra_info and all columns that have no argument of their own; extra_info wins; a text stays a column."""
    rows: list[Any] = [
        chat_row(level=3, index=9, tests=["a"]),
        chat_row(level=4, extra_info='{"level": 5}'),
        chat_row(extra_info=None),
        {
            "question": "1 + 1?",
            "answer": "two\n#### 2",
            "level": 1,
            "data_source": "sums",
            "prompt": "x",
        },
    ]
    found = load_rows(
        write_jsonl(tmp_path / "d.jsonl", rows), "train", DataConfig(), 0, DataReport("data")
    )
    assert [row.extra for row in found] == [
        {"level": 3, "index": 7, "tests": ["a"]},
        {"level": 4, "extra_info": '{"level": 5}'},
        {},
        {"question": "1 + 1?", "answer": "two\n#### 2", "level": 1, "prompt": "x"},
    ]
    assert [row.where.rpartition(":")[2] for row in found] == ["1", "2", "3", "4"]


def test_a_rows_own_agent_loop(tmp_path: Path) -> None:
    """Whatever else stands in extra_info; a name that is no loop's is told with its row."""
    rows = [
        chat_row(agent_loop=" tool ", extra_info={"agent_loop": {"a": 1}}),
        chat_row(agent_loop=None),
    ]
    found = load_rows(
        write_jsonl(tmp_path / "d.jsonl", rows), "train", DataConfig(), 0, DataReport("data")
    )
    assert [row.agent_loop for row in found] == ["tool", ""] and found[0].extra == {
        "agent_loop": {"a": 1}
    }

    def tools_of(name: str) -> None:
        if name:
            raise ConfigError("agent.loop='tool': unknown")

    with pytest.raises(
        ConfigError,
        match=r"data row .*d.jsonl:1, column agent_loop='tool': agent.loop='tool': unkn",
    ):
        tokenize_rows(
            found, PLAIN, DataConfig(chat_template="never"), 0, DataReport("data"), tools_of
        )
    plain, own = (
        tokenize_rows([row], PLAIN, DataConfig(chat_template="never"), 0, DataReport("data"))
        for row in found[::-1]
    )
    assert own[0].agent_loop == "tool"
    own[0] = dataclasses.replace(own[0], id=plain[0].id)
    digests = {PromptStream(p, 1, False, 0, 1).state_dict()["digest"] for p in (own, plain)}
    assert len(digests) == 2, "a run is not gone on from with other loops"


def test_invalid_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(GOOD).encode()
        + b'\r\n{"question": "\xff", "answer": "#### 1"}\n'
    )
    report = DataReport("data")
    assert len(load_rows(str(path), "train", DataConfig(), 0, report)) == 1
    assert report.bad[0][0].endswith(":2")


def test_line_separators_inside_strings(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({**GOOD, "question": "a\u2028b"}, ensure_ascii=False))
    assert (
        load_rows(str(path), "train", DataConfig(), 0, DataReport("data"))[0].messages[0]["content"]
        == "a\u2028b"
    )


@pytest.mark.parametrize("ending", [".jsonl", ".json", "list.json", ".parquet"])
@pytest.mark.parametrize("row", [GOOD, chat_row()])
def test_file_formats_agree(tmp_path: Path, ending: str, row: dict[str, Any]) -> None:
    path = tmp_path / f"d{ending}"
    if ending == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row, row]), path)
    elif ending == "list.json":
        path.write_text(json.dumps([row, row], indent=1))
    else:
        write_jsonl(path, [row, row])
    rows = load_rows(str(path), "train", DataConfig(), 0, DataReport("data"))
    assert len(rows) == 2 and rows[1].ground_truth == "2" and rows[1].id[1] == 1
    if row is GOOD:
        assert rows[0].messages[0]["content"] == GOOD["question"] and rows[0].data_source == str(
            path
        )
    else:
        assert (
            rows[0].messages == row["prompt"]
            and rows[0].data_source == "my/set"
            and rows[0].extra == {"index": 7}
        )


def test_several_files_number_their_rows_on(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [GOOD, "broken"])
    second = write_jsonl(tmp_path / "b.jsonl", [GOOD])
    rows = load_rows(f"{first}, {second}", "train", DataConfig(), 0, DataReport("data"))
    assert [(r.id[1], r.where) for r in rows] == [(0, f"{first}:1"), (2, f"{second}:1")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no rows; give another"),
        ("\n\n", "holds no rows"),
        ("nonsense\nmore", "all 2 rows are malformed; fix .*:1: not valid JSON"),
        ('{"question": "a", "answer": "2"}', "all 1 rows are malformed"),
        (
            '{"q": 1, "a": 2}',
            r"found the columns q, a, not question\+answer or prompt\+reward_model",
        ),
    ],
)
def test_unusable_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as e:
        load_rows(str(path), "train", DataConfig(), 0, DataReport("data"))
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.jsonl", "missing.jsonl: cannot be read: FileNotFoundError: .*; check the path"),
        ("broken.parquet", "broken.parquet: cannot be read: .*fix the file"),
        (
            "broken.json",
            "broken.json: cannot be read: JSONDecodeError: Expecting value: line 1 .*fix the file",
        ),
        (" , ", "names nothing"),
    ],
)
def test_unusable_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.parquet").write_text("x")
    Path("broken.json").write_text("[1, ")
    with pytest.raises(ConfigError, match=message):
        load_rows(spec, "train", DataConfig(), 0, DataReport("data"))


def test_hub_failure_names_the_id_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def fail(*args: Any, **kwargs: Any) -> None:
        asked.append((args, kwargs))
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        ConfigError,
        match=r"openai/gsm8k\[test\].*ConnectionError: no route; .*network.*local .jsonl",
    ):
        load_rows("openai/gsm8k", "test", DataConfig(), 0, DataReport("data"))
    with pytest.raises(ConfigError):
        load_rows("some/set:part", "train", DataConfig(), 0, DataReport("data"))
    assert asked == [
        (("openai/gsm8k", "main"), {"split": "test"}),
        (("some/set", "part"), {"split": "train"}),
    ]


def test_hub_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_list([GOOD, GOOD])
    )
    rows = load_rows("openai/gsm8k", "train", DataConfig(), 0, DataReport("data"))
    assert [r.where for r in rows] == ["openai/gsm8k[train]:1", "openai/gsm8k[train]:2"]
    assert rows[0].data_source == "openai/gsm8k"


def test_generator() -> None:
    cfg = DataConfig(generator_size=50)
    rows = load_rows("generator:word_problems", "train", cfg, 3, DataReport("data"))
    assert len(rows) == 50 and rows == load_rows(
        "generator:word_problems", "train", cfg, 3, DataReport("data")
    )
    held_out = load_rows(
        "generator:word_problems", "test", DataConfig(val_size=20), 0, DataReport("data")
    )
    assert len(held_out) == 20
    with pytest.raises(
        ConfigError, match=r"holds \d+ problems; ask for fewer; change data.val_size=10000000"
    ):
        load_rows(
            "generator:word_problems",
            "test",
            DataConfig(val_size=10_000_000),
            0,
            DataReport("data"),
        )


# --- tokenising ---


def prompts_of(
    tmp_path: Path, rows: list[Any], tokenizer: Any, report: DataReport | None = None, **cfg: Any
) -> list[Prompt]:
    """Write, load and encode rows."""
    config = DataConfig(**cfg)
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    report = report or DataReport("data")
    return tokenize_rows(load_rows(path, "train", config, 0, report), tokenizer, config, 0, report)


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
    assert prompt.ids.dtype == np.int32 and prompt.ids.shape == (len(text),)
    assert prompt.id == (0, 0) and prompt.ground_truth == "2"


def test_plain_prompt_gets_one_bos_and_no_eos(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(adds_special=True)
    rows = [GOOD, {**GOOD, "question": "<s>Already there"}]
    for prompt in prompts_of(tmp_path, rows, tokenizer):
        assert (
            prompt.ids[0] == BOS
            and Counter(prompt.ids.tolist())[BOS] == 1
            and EOS not in prompt.ids
        )


@pytest.mark.parametrize("with_bos", [True, False])
def test_chat_template_is_the_only_source_of_special_tokens(tmp_path: Path, with_bos: bool) -> None:
    tokenizer = make_tokenizer(
        "{% set with_bos = " + str(with_bos).lower() + " %}" + TEMPLATE, adds_special=True
    )
    (prompt,) = prompts_of(tmp_path, [GOOD], tokenizer, instruction="Think.")
    assert prompt.text == "<s>" * with_bos + "<user>What is 1 + 1? Think.</s><assistant>"
    assert (prompt.ids == BOS).sum() == with_bos and (prompt.ids == EOS).sum() == 1
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
    assert prompt.id == (0, 1) and "1 used" in report.lines()[0] and "no tools" in report.bad[0][1]
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
    assert (
        "2 over data.max_prompt_length skipped" in report.lines()[0]
        and "d.jsonl:2: 11 tokens" in report.lines()[1]
    )
    with pytest.raises(ConfigError, match=r"d.jsonl:2: 11 tokens.*max_prompt_length=10"):
        prompts_of(tmp_path, rows, PLAIN, max_prompt_length=10, overlong_prompts="fail")
    with pytest.raises(ConfigError, match="no prompt is left"):
        prompts_of(tmp_path, rows, PLAIN, max_prompt_length=9)


def test_report_names_a_few_and_counts_all() -> None:
    report = DataReport("data", rows=30, bad=[(f"f:{i}", "why") for i in range(20)])
    assert (
        len(report.lines()) == 7
        and "10 used, 20 malformed" in report.lines()[0]
        and "15 more" in report.lines()[-1]
    )


# --- the stream ---


def stream_of(
    rows: int, batch: int, shuffle: bool = True, seed: int = 0, **length: Any
) -> PromptStream:
    """A stream over `rows` prompts whose row numbers are not their positions."""
    prompts = [Prompt((0, 3 * i + 1), np.array([i], np.int32), str(i), str(i)) for i in range(rows)]
    return PromptStream(prompts, batch, shuffle, seed, **(length or {"steps": 10}))


sizes = st.integers(1, 12)


@given(
    rows=sizes,
    batch=st.integers(1, 30),
    steps=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_no_prompt_is_lost_or_repeated(
    rows: int, batch: int, steps: int, shuffle: bool, seed: int
) -> None:
    stream = stream_of(rows, batch, shuffle, seed)
    batches = [stream.next_batch() for _ in range(steps)]
    assert all(len(b) == batch for b in batches)
    ids = [p.id for b in batches for p in b]
    assert len(set(ids)) == len(ids)
    assert [e for e, _ in ids] == sorted(e for e, _ in ids)
    per_epoch = Counter(e for e, _ in ids)
    for epoch in range(max(per_epoch)):
        assert per_epoch[epoch] == rows
    assert {r for _, r in ids} <= {3 * i + 1 for i in range(rows)}
    assert all(p.text == str((p.id[1] - 1) // 3) for b in batches for p in b)


@given(
    rows=sizes,
    first=st.integers(1, 30),
    second=st.integers(1, 30),
    before=st.integers(0, 8),
    after=st.integers(1, 8),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_resume_is_exact(
    rows: int, first: int, second: int, before: int, after: int, shuffle: bool, seed: int
) -> None:
    whole = stream_of(rows, first, shuffle, seed)
    for _ in range(before):
        whole.next_batch()
    saved = json.loads(json.dumps(whole.state_dict()))
    resumed = stream_of(rows, first, shuffle, seed)
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved
    expected = [p.id for _ in range(after) for p in whole.next_batch()]
    assert [p.id for _ in range(after) for p in resumed.next_batch()] == expected
    # Another batch size continues at the same prompt.
    other = stream_of(rows, second, shuffle, seed)
    other.load_state_dict(saved)
    got = [p.id for _ in range(after) for p in other.next_batch()]
    common = min(len(got), len(expected))
    assert got[:common] == expected[:common]


@given(rows=sizes, batch=st.integers(1, 30), epochs=st.integers(1, 5))
def test_total_epochs_sees_every_prompt(rows: int, batch: int, epochs: int) -> None:
    stream = stream_of(rows, batch, epochs=epochs)
    ids = [p.id for _ in range(stream.total_steps) for p in stream.next_batch()]
    assert sum(e < epochs for e, _ in ids) == rows * epochs
    assert 0 <= len(ids) - rows * epochs < batch


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int) -> list[int]:
        stream = stream_of(50, 50, seed=seed)
        return [p.id[1] for _ in range(2) for p in stream.next_batch()]

    assert order(1) == order(1) != order(2)
    assert order(1)[:50] != order(1)[50:]
    assert [p.id[1] for p in stream_of(5, 5, shuffle=False).next_batch()] == [1, 4, 7, 10, 13]


def test_another_stream_does_not_resume() -> None:
    state = stream_of(10, 3).state_dict()
    for other in (stream_of(11, 3), stream_of(10, 3, seed=1), stream_of(10, 3, shuffle=False)):
        with pytest.raises(ConfigError, match="other prompts or another order"):
            other.load_state_dict(state)
        assert other.state_dict()["epoch"] == other.state_dict()["offset"] == 0


# --- build ---


def run_config(train: str, val: str = "", **data: Any) -> Config:
    """A config with these sets."""
    cfg = Config()
    cfg.data = DataConfig(train_files=train, val_files=val, **data)
    cfg.trainer.total_epochs = 1
    return cfg


def test_build(tmp_path: Path) -> None:
    train = write_jsonl(
        tmp_path / "train.jsonl", [{**GOOD, "question": f"q{i}"} for i in range(10)] + ["broken"]
    )
    val = write_jsonl(tmp_path / "val.jsonl", [{**GOOD, "question": f"q{i}"} for i in (3, 77, 78)])
    data = load_run_data(run_config(train, val, train_batch_size=4, val_size=2), PLAIN)
    assert data.stream.total_steps == 3 and len(data.stream) == 10
    assert [p.id for p in data.val] == [(-1, 0), (-1, 1)]
    lines = "\n".join(data.lines())
    assert "training data: 11 rows, 10 used, 1 malformed skipped" in lines
    assert "1 of the 2 held-out prompts are also in the training data" in lines


@pytest.mark.parametrize(("val", "val_size"), [("", -1), ("generator:word_problems", 0)])
def test_build_without_evaluation(val: str, val_size: int) -> None:
    cfg = run_config(
        "generator:word_problems", val, val_size=val_size, generator_size=8, train_batch_size=4
    )
    data = load_run_data(cfg, PLAIN)
    assert data.val is None and data.stream.total_steps == 2


def test_build_with_the_generator() -> None:
    cfg = run_config("generator:word_problems", "generator:word_problems", generator_size=600)
    data = load_run_data(cfg, PLAIN)
    cfg.trainer.seed = 9
    again = load_run_data(cfg, PLAIN)
    assert [p.text for p in data.val] == [p.text for p in again.val]
    assert [p.text for p in data.stream.next_batch()] != [p.text for p in again.stream.next_batch()]
    assert not any("warning" in line for line in data.lines())


def test_build_without_data() -> None:
    with pytest.raises(ConfigError, match="'' names nothing"):
        load_run_data(run_config(""), PLAIN)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_give_rows_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + b"\n".join(lines))
    report = DataReport("data")
    rows = load_rows(str(path), "train", DataConfig(), 0, report)
    assert len(rows) == 1 and report.rows == 1 + len(report.bad)


GSM8K = os.environ.get("ONE_STEP_OFF_GSM8K", "")


@pytest.mark.skipif(
    not Path(GSM8K, "gsm8k_train.jsonl").is_file() or not GSM8K,
    reason="ONE_STEP_OFF_GSM8K does not name a folder with gsm8k_train.jsonl and gsm8k_test.jsonl",
)
def test_real_gsm8k() -> None:
    from one_step_off.rewards.verifiers import gsm8k

    files = [str(Path(GSM8K, f"gsm8k_{split}.jsonl")) for split in ("train", "test")]
    start = time.monotonic()
    data = load_run_data(
        run_config(*files, max_prompt_length=2000, train_batch_size=64), make_tokenizer(TEMPLATE)
    )
    seconds = time.monotonic() - start
    assert len(data.stream) == 7473 and len(data.val) == 1319
    assert not any(report.bad or report.overlong for report in data.reports)
    assert data.stream.total_steps == 117
    for line, prompt in zip(Path(files[1]).read_text().splitlines(), data.val, strict=True):
        assert gsm8k(json.loads(line)["answer"], prompt.ground_truth) == 1.0
    assert seconds < 20
