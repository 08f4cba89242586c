"""Rows: what is read, and that every row that is left out is counted and listed."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import DataConfig
from one_step_off.data.plain_numbers import number_text
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.rows import DataReport, final_number, load_rows
from one_step_off.data.run_data import load_run_data
from one_step_off.data.tokenization import tokenize_rows
from tests.unit.data.data_helpers import (
    GOOD,
    PLAIN,
    TEMPLATE,
    chat_row,
    make_tokenizer,
    run_config,
    write_jsonl,
)


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
        ("#### $72$", "72"),
        ("#### 1,234,567.5", "1234567.5"),
        ("#### 1e-5", "1e-5"),
        ("#### 37.0", "37.0"),
    ],
)
def test_final_number(answer: str, number: str) -> None:
    assert final_number(answer) == number


BAD_GSM8K = [
    ('{"question": "a", ', "not valid JSON"),
    ("[1, 2]", "a JSON list"),
    ({"question": "a"}, "found the columns question, not prompt+ground_truth, question+answer"),
    ({"answer": "#### 1"}, "found the columns answer, not prompt+ground_truth, question+answer"),
    ({"question": None, "answer": "#### 1"}, "'question' holds None, not a text"),
    ({"question": 5, "answer": "#### 1"}, "'question' holds 5, not a text"),
    ({"question": " \n", "answer": "#### 1"}, r"'question' holds ' \n', not a text"),
    ({"question": "\ud800", "answer": "#### 1"}, "not valid Unicode"),
    ({"question": "a", "answer": ""}, "'answer' holds '', not a text"),
    ({"question": "a", "answer": "it is 2"}, "name its column ground_truth"),
    ({"prompt": " ", "ground_truth": "2"}, "column 'prompt' holds ' ', not a text"),
    ({"prompt": "a", "ground_truth": None}, "column 'ground_truth' holds None, not a text or a"),
    ({"prompt": '[{"role": "user", "content": "1 + 1?"}]', "ground_truth": "2"}, "as JSON text"),
    ({"prompt": [{"role": "user"}], "ground_truth": "2"}, "message 0 of 'prompt' has no text"),
    ({"problem": "a", "solution": "it is 2"}, "the solution has no \\boxed{ANSWER}"),
    ({"problem": "a", "answer": []}, "column 'answer' holds [], not a text or a number"),
    ({"question": "a", "answer": "#### two"}, "comes 'two', not a number"),
    ({"question": "a", "answer": "####"}, "comes '', not a number"),
    ({"question": "a", "answer": "#### 12,5"}, "comes '12,5', not a number"),
    ({"question": "a", "answer": "#### 1,23,456"}, "comes '1,23,456', not a number"),
    ({"question": "a", "answer": "#### 0,123"}, "comes '0,123', not a number"),
    ({"question": "a", "answer": "#### 1$2"}, "comes '1$2', not a number"),
    ({"question": "a", "answer": "#### 0x1A"}, "comes '0x1A', not a number"),
    ({"question": "a", "answer": "#### nan"}, "comes 'nan', not a number"),
]


@pytest.mark.parametrize(
    ("row", "content", "truth"),
    [
        ({"prompt": "1 + 1?", "ground_truth": "2"}, "1 + 1?", "2"),
        ({"prompt": "1 + 1?", "ground_truth": 2}, "1 + 1?", "2"),
        ({"prompt": [{"role": "user", "content": "1 + 1?"}], "ground_truth": "2"}, "1 + 1?", "2"),
        ({"question": "1 + 1?", "ground_truth": "two"}, "1 + 1? Think.", "two"),
        ({"question": "1 + 1?", "answer": "2"}, "1 + 1? Think.", "2"),
        ({"question": "1 + 1?", "answer": 2}, "1 + 1? Think.", "2"),
        ({"question": "1 + 1?", "answer": "It is\n#### 2"}, "1 + 1? Think.", "2"),
        ({"problem": "1 + 1?", "answer": "\\frac{4}{2}"}, "1 + 1? Think.", "\\frac{4}{2}"),
        ({"problem": "1 + 1?", "solution": "So \\boxed{x_{2}}."}, "1 + 1? Think.", "x_{2}"),
        # The answer says more than its derivation, and the chat more than a text beside it.
        ({"problem": "1 + 1?", "solution": "\\boxed{3}", "answer": "2"}, "1 + 1? Think.", "2"),
        (
            {
                "prompt": [{"role": "user", "content": "1 + 1?"}],
                "reward_model": {"ground_truth": "2"},
                "ground_truth": "3",
            },
            "1 + 1?",
            "2",
        ),
    ],
)
def test_plain_rows(tmp_path: Path, row: dict[str, Any], content: str, truth: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [row | {"level": 4}])
    (loaded,) = load_rows(path, "train", DataConfig(instruction="Think."), 0, DataReport("data"))
    assert [message["content"] for message in loaded.messages] == [content]
    assert loaded.ground_truth == truth
    assert loaded.extra["level"] == 4


@pytest.mark.parametrize(("row", "reason"), BAD_GSM8K)
def test_bad_rows_are_named_and_counted(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD, "", row, GOOD])
    report = DataReport("data")
    rows = load_rows(path, "train", DataConfig(), 0, report)
    assert [r.id[1] for r in rows] == [0, 2]
    assert rows[1].where == f"{path}:4"
    ((where, why),) = report.bad
    assert where == f"{path}:3"
    assert reason in why
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
    ({"reward_model": {"ground_truth": float("nan")}}, "holds nan, which no answer can equal"),
    ({"reward_model": {"ground_truth": float("-inf")}}, "holds -inf, which no answer can equal"),
    ({"reward_model": {"ground_truth": " NaN"}}, "which no answer can equal"),
    ({"agent_loop": 5}, "column 'agent_loop' holds 5, not a text"),
    ({"agent_loop": ["tool"]}, "column 'agent_loop' holds ['tool']"),
]


@pytest.mark.parametrize(("changes", "reason"), BAD_CHAT)
def test_bad_chat_rows(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [chat_row(), chat_row(**changes)])
    report = DataReport("data")
    assert len(load_rows(path, "train", DataConfig(), 0, report)) == 1
    assert report.bad[0][0] == f"{path}:2"
    assert reason in report.bad[0][1]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (
            pa.array([1e-5, 1e16, 37.0, 0.1 + 0.2, -0.0]),
            ["0.00001", "1" + 16 * "0", "37", "0.3", "0"],
        ),
        (pa.array([0.1, 3.14, 2.5], pa.float32()), ["0.1", "3.14", "2.5"]),
        (pa.array([2**53 + 1, 5]), ["9007199254740993", "5"]),
        (pa.array([Decimal("1.50"), Decimal("1000")]), ["1.5", "1000"]),
        (pa.array(["37.0", " 1,5"]), ["37.0", " 1,5"]),
    ],
)
def test_numeric_ground_truths_are_written_as_people_write_them(
    tmp_path: Path, values: pa.Array, texts: list[str]
) -> None:
    reward_model = pa.StructArray.from_arrays([values], ["ground_truth"])
    prompt = pa.array([[{"role": "user", "content": "?"}]] * len(values))
    path = str(tmp_path / "d.parquet")
    pq.write_table(pa.table({"prompt": prompt, "reward_model": reward_model}), path)
    rows = load_rows(path, "train", DataConfig(), 0, DataReport("data"))
    assert [row.ground_truth for row in rows] == texts


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_keeps_its_value_as_text(value: float) -> None:
    assert float(number_text(value)) == pytest.approx(value, rel=2e-7)
    assert "e" not in number_text(value)


@given(st.integers(-(10**14), 10**14), st.integers(0, 14))
def test_a_float_is_written_with_the_digits_that_were_typed(digits: int, decimals: int) -> None:
    typed = Decimal(digits).scaleb(-decimals)
    assert Decimal(number_text(float(typed))) == typed


def test_labels_that_gsm8k_cannot_read_are_malformed_rows(tmp_path: Path) -> None:
    """`math` and the user's functions may compare such texts."""
    labels = ["18", "1,8", "12,5", "1_000", "1,234", "\\frac{1}{2}", "Paris"]
    rows = [chat_row(reward_model={"ground_truth": label}) for label in labels]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    cfg = run_config(path, train_batch_size=1)
    data = load_run_data(cfg, make_tokenizer(TEMPLATE))
    assert [p.ground_truth for p in data.stream.prompts] == ["18", *labels[-3:]]
    assert [where.rpartition(":")[2] for where, _ in data.reports[0].bad] == ["2", "3", "4"]
    assert "holds '1,8', not a number that gsm8k reads" in data.reports[0].bad[0][1]
    cfg.reward.function = "math"
    assert len(load_run_data(cfg, make_tokenizer(TEMPLATE)).stream.prompts) == len(labels)


def test_the_other_columns_of_a_row(tmp_path: Path) -> None:
    """Entries of extra_info and all columns that have no argument of their own; extra_info wins; a
    text stays a column.
    """
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
    result = load_rows(
        write_jsonl(tmp_path / "d.jsonl", rows), "train", DataConfig(), 0, DataReport("data")
    )
    assert [row.extra for row in result] == [
        {"level": 3, "index": 7, "tests": ["a"]},
        {"level": 4, "extra_info": '{"level": 5}'},
        {},
        {"question": "1 + 1?", "answer": "two\n#### 2", "level": 1, "prompt": "x"},
    ]
    assert [row.where.rpartition(":")[2] for row in result] == ["1", "2", "3", "4"]


def test_a_rows_own_agent_loop(tmp_path: Path) -> None:
    """Whatever else stands in extra_info; a name that is no loop's is told with its row."""
    rows = [
        chat_row(agent_loop=" tool ", extra_info={"agent_loop": {"a": 1}}),
        chat_row(agent_loop=None),
    ]
    result = load_rows(
        write_jsonl(tmp_path / "d.jsonl", rows), "train", DataConfig(), 0, DataReport("data")
    )
    assert [row.agent_loop for row in result] == ["tool", ""]
    assert result[0].extra == {"agent_loop": {"a": 1}}

    def tools_of(name: str) -> None:
        if name:
            raise ConfigError("agent.loop='tool': unknown")

    with pytest.raises(
        ConfigError,
        match=r"data row .*d.jsonl:1, column agent_loop='tool': agent.loop='tool': unkn",
    ):
        tokenize_rows(
            result, PLAIN, DataConfig(chat_template="never"), 0, DataReport("data"), tools_of
        )
    plain, own = (
        tokenize_rows([row], PLAIN, DataConfig(chat_template="never"), 0, DataReport("data"))
        for row in result[::-1]
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
    assert len(rows) == 2
    assert rows[1].ground_truth == "2"
    assert rows[1].id[1] == 1
    if row is GOOD:
        assert rows[0].messages[0]["content"] == GOOD["question"]
        assert rows[0].data_source == str(path)
    else:
        assert rows[0].messages == row["prompt"]
        assert rows[0].data_source == "my/set"
        assert rows[0].extra == {"index": 7}


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
        ('{"question": "a", "answer": "two"}', "all 1 rows are malformed"),
        (
            '{"q": 1, "a": 2}',
            r"found the columns q, a, not prompt\+ground_truth, question\+answer, problem",
        ),
    ],
)
def test_unusable_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as e:
        load_rows(str(path), "train", DataConfig(), 0, DataReport("data"))
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("missing.jsonl", "missing.jsonl: cannot be read: FileNotFoundError: .*; check the path"),
        ("broken.parquet", "broken.parquet: cannot be read: .*fix the file"),
        (
            "broken.json",
            "broken.json: cannot be read: JSONDecodeError: Expecting value: line 1 .*fix the file",
        ),
        (" , ", "names no data"),
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
    assert len(rows) == 50
    assert rows == load_rows("generator:word_problems", "train", cfg, 3, DataReport("data"))
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


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_give_rows_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + b"\n".join(lines))
    report = DataReport("data")
    rows = load_rows(str(path), "train", DataConfig(), 0, report)
    assert len(rows) == 1
    assert report.rows == 1 + len(report.bad)


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
    assert len(data.stream) == 7473
    assert len(data.val) == 1319
    assert not any(report.bad or report.overlong for report in data.reports)
    assert data.stream.total_steps == 117
    for line, prompt in zip(Path(files[1]).read_text().splitlines(), data.val, strict=True):
        assert gsm8k(json.loads(line)["answer"], prompt.ground_truth) == 1.0
    assert seconds < 20
