"""Bad data files, as the whole program meets them."""

from __future__ import annotations

import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input import base, refused, without_privileges, write

GOOD_ROW = '{"question": "1 + 1?", "answer": "so #### 2"}\n'


def rows(*columns: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in columns)


def parquet(columns: dict[str, list]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def message(
    role: str = "user", content: object = "1 + 1?", truth: object = "2", **more: object
) -> dict:
    return {
        "prompt": [{"role": role, "content": content}],
        "reward_model": {"ground_truth": truth},
    } | more


WHOLE = parquet({"question": ["1 + 1?"] * 100, "answer": ["#### 2"] * 100})
NO_ROWS = pa.table({"question": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
WIDE = "b" * 400

# (name, the data file's name, its content, more arguments, parts that the line must hold)
NO_TRUTH = ["'ground_truth' in column 'reward_model' holds", "not a text or a number"]

FILES = [
    ("empty", "a.jsonl", "", [], ["holds no rows"]),
    ("blank lines", "a.jsonl", "\n \n\n", [], ["holds no rows"]),
    ("empty list", "a.json", "[]", [], ["holds no rows"]),
    ("no bytes of parquet", "a.parquet", b"", [], ["cannot be read", "fix the file"]),
    ("parquet cut off", "a.parquet", WHOLE[: len(WHOLE) // 2], [],
     ["cannot be read", "fix the file"]),
    ("parquet without its end", "a.parquet", WHOLE[:-4], [], ["cannot be read", "fix the file"]),
    ("parquet broken within", "a.parquet", WHOLE[:60] + bytes(60) + WHOLE[120:], [],
     ["TMP/a.parquet"]),
    ("text for parquet", "a.parquet", GOOD_ROW, [], ["cannot be read", "fix the file"]),
    ("parquet for text", "a.jsonl", WHOLE, [], ["all", "rows are malformed", "not valid JSON"]),
    ("parquet without rows", "a.parquet", parquet({"question": [], "answer": []}), [],
     ["holds no rows"]),
    ("parquet of other columns", "a.parquet", parquet({"q": ["1"], "a": ["2"]}), [],
     ["found the columns q, a"]),
    ("parquet of bytes", "a.parquet", parquet({"question": [b"1"], "answer": [b"#### 2"]}), [],
     ["rows are malformed"]),
    ("parquet of numbers", "a.parquet", parquet({"question": [1], "answer": [2]}), [],
     ["column 'question'"]),
    ("parquet of nulls", "a.parquet", parquet({"question": [None], "answer": [None]}), [],
     ["column 'question'"]),
    ("no JSON at all", "a.jsonl", "question,answer\n1+1,2\n", [], ["all 2 rows", "not valid JSON"]),
    ("single quotes", "a.jsonl", "{'question': 'x', 'answer': '#### 2'}\n", [], ["not valid JSON"]),
    ("JSON cut off", "a.json", '[{"question": "x", "answer": "#### 2"}, {"que', [],
     ["cannot be read", "fix the file"]),
    ("one object over lines", "a.jsonl",
     json.dumps({"question": "x", "answer": "#### 2"}, indent=1), [], ["not valid JSON"]),
    ("object of rows", "a.json", '{"train": [{"question": "x", "answer": "#### 2"}]}', [],
     ["found the columns train"]),
    ("numbers", "a.jsonl", "1\n2\n", [], ["a JSON int, not an object"]),
    ("lists", "a.jsonl", '["x", "#### 2"]\n', [], ["a JSON list, not an object"]),
    ("nulls", "a.jsonl", "null\n", [], ["a JSON NoneType, not an object"]),
    ("texts in a list", "a.json", '["x"]', [], ["a JSON str, not an object"]),
    ("nested without end", "a.jsonl", "[" * 100000 + "\n", [], ["not valid JSON"]),
    ("UTF-16", "a.jsonl", GOOD_ROW.encode("utf-16"), [], ["not valid JSON"]),
    ("Latin-1", "a.jsonl", '{"question": "Lösung?", "answer": "#### 2"}'.encode("latin-1"), [],
     ["not valid JSON"]),
    ("gzip", "a.jsonl", b"\x1f\x8b\x08\x00" + bytes(40), [], ["not valid JSON"]),
    ("zeros", "a.jsonl", bytes(1000), [], ["not valid JSON"]),
    ("other columns", "a.jsonl", rows({"q": "x", "a": "#### 2"}), [],
     ["found the columns q, a", "rename the columns"]),
    ("one column", "a.jsonl", rows({"question": "x"}), [],
     ["found the columns question", "question+answer"]),
    ("columns of another case", "a.jsonl", rows({"Question": "x", "Answer": "#### 2"}), [],
     ["found the columns Question"]),
    ("no columns", "a.jsonl", "{}\n", [], ["all 1 rows are malformed"]),
    ("question is a number", "a.jsonl", rows({"question": 3, "answer": "#### 2"}), [],
     ["column 'question'"]),
    ("empty question", "a.jsonl", rows({"question": " ", "answer": "#### 2"}), [],
     ["column 'question'"]),
    ("empty answer", "a.jsonl", rows({"question": "x", "answer": ""}), [], ["column 'answer'"]),
    ("answer without its mark", "a.jsonl", rows({"question": "x", "answer": "two"}), [], ["####"]),
    ("answer in words", "a.jsonl", rows({"question": "x", "answer": "#### two and a half"}), [],
     ["not a number"]),
    ("half a character", "a.jsonl", '{"question": "\\ud800", "answer": "#### 2"}\n', [],
     ["not valid Unicode"]),
    ("prompt is a text", "a.jsonl", rows({"prompt": "x", "reward_model": {"ground_truth": "2"}}),
     [], ["column 'prompt'"]),
    ("no messages", "a.jsonl", rows({"prompt": [], "reward_model": {"ground_truth": "2"}}), [],
     ["column 'prompt'"]),
    ("message is a text", "a.jsonl", rows({"prompt": ["x"], "reward_model": {}}), [],
     ["message 0 of 'prompt'"]),
    ("content is a list", "a.jsonl", rows(message(content=[{"text": "x"}])), [],
     ["message 0 of 'prompt'"]),
    ("content is null", "a.jsonl", rows(message(content=None)), [], ["message 0 of 'prompt'"]),
    ("content is empty", "a.jsonl", rows(message(content=" ")), [],
     ["all messages of 'prompt' are empty"]),
    ("no truth", "a.jsonl", rows(message() | {"reward_model": {}}), [], NO_TRUTH),
    ("truth is null", "a.jsonl", rows(message(truth=None)), [], NO_TRUTH),
    ("truth is a list", "a.jsonl", rows(message(truth=["2"])), [], NO_TRUTH),
    ("truth is true", "a.jsonl", rows(message(truth=True)), [], NO_TRUTH),
    ("loop is a number", "a.jsonl", rows(message(agent_loop=3)), [], ["column 'agent_loop'"]),
    ("unknown loop", "a.jsonl", rows(message(agent_loop="tol")), [],
     ["TMP/a.jsonl:1", "agent_loop", "tol"]),
    ("loop of no module", "a.jsonl", rows(message(agent_loop="nowhere:Loop")), [],
     ["agent_loop", "nowhere"]),
    ("one bad row", "a.jsonl", GOOD_ROW + "{\n", ["data.bad_rows=fail"],
     ["TMP/a.jsonl:2", "data.bad_rows=skip"]),
    ("one long row", "a.jsonl", GOOD_ROW + rows({"question": WIDE, "answer": "#### 2"}),
     ["data.overlong_prompts=fail"], ["TMP/a.jsonl:2", "data.max_prompt_length=128", "raise"]),
    ("all rows too long", "a.jsonl", rows({"question": WIDE, "answer": "#### 2"}), [],
     ["no prompt is left", "data.max_prompt_length"]),
    ("template that is not there", "a.jsonl", GOOD_ROW, ["data.max_prompt_length=1"],
     ["no prompt is left"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "argv", "parts"), [f[1:] for f in FILES], ids=[f[0] for f in FILES]
)
def test_data_files(name, content, argv, parts, models, tmp_path, capsys):
    write(tmp_path, {name: content})
    where = [] if any("agent_loop" in p or "TMP" in p for p in parts) else [f"TMP/{name}"]
    arguments = [*base(tmp_path, models()), f"data.train_files={tmp_path}/{name}", *argv]
    refused(arguments, [*where, *parts], tmp_path, capsys)


# (name, files, arguments, parts)
SETS = [
    ("missing", {}, ["data.train_files=TMP/a.jsonl"],
     ["data.train_files=TMP/a.jsonl", "no such file", "check"]),
    ("missing beside another", {"a.jsonl": GOOD_ROW}, ["data.train_files=TMP/a.jsonl,TMP/b.jsonl"],
     ["TMP/b.jsonl", "no such file"]),
    ("a folder", {"d/": ""}, ["data.train_files=TMP/d"],
     ["data.train_files=TMP/d", "must be a .jsonl"]),
    ("a folder with the ending", {"d.jsonl/": ""}, ["data.train_files=TMP/d.jsonl"],
     ["TMP/d.jsonl", "no such file"]),
    ("a folder of parquet", {"d.parquet/": ""}, ["data.train_files=TMP/d.parquet"],
     ["TMP/d.parquet", "no such file"]),
    ("csv", {"a.csv": "question,answer\n"}, ["data.train_files=TMP/a.csv"],
     ["TMP/a.csv", "must be a .jsonl"]),
    ("compressed", {"a.jsonl.gz": b"\x1f\x8b"}, ["data.train_files=TMP/a.jsonl.gz"],
     ["TMP/a.jsonl.gz", "must be a .jsonl"]),
    ("no ending", {"a": GOOD_ROW}, ["data.train_files=TMP/a"], ["TMP/a", "must be a .jsonl"]),
    ("a glob", {"a.jsonl": GOOD_ROW}, ["data.train_files=TMP/*.jsonl"],
     ["TMP/*.jsonl", "no such file"]),
    ("a list", {}, ["data.train_files=[TMP/a,b.jsonl]"], ["train_files=TMP/a", "no such file"]),
    ("a list of lists", {}, ["data.train_files=[[a.jsonl]]"],
     ["train_files=[[a.jsonl]]", "must be text"]),
    ("a source with a loop that lacks tools", {},
     ["data.train_files=[{files: 'generator:addition', agent_loop: tool}]",
       "model.path=tiny:qwen2"],
     ["data.train_files, addition: agent_loop=tool", "agent.tools is empty; set it"]),
    ("a source with a loop of no module", {},
     ["data.train_files=[{files: 'generator:addition', agent_loop: 'nowhere:Loop'}]"],
     ["data.train_files[0].agent_loop=nowhere:Loop", "no such name"]),
    ("a source with a reward of no module", {},
     ["data.train_files=[{files: 'generator:addition', reward: 'nowhere:score'}]"],
     ["data.train_files[0].reward=nowhere:score", "must be gsm8k"]),
    ("a source with a bad row", {"a.jsonl": GOOD_ROW, "b.jsonl": GOOD_ROW + "{\n"},
     ["data.train_files=[{files: TMP/a.jsonl}, {files: TMP/b.jsonl}]", "data.bad_rows=fail"],
     ["TMP/b.jsonl:2", "data.bad_rows=skip"]),
    ("unknown generator", {}, ["data.train_files=generator:sums"],
     ["generator:sums", "use generator:word_problems"]),
    ("only commas", {}, ["data.train_files=,,"], ["data.train_files", "not set"]),
    ("hub set while offline", {}, ["data.train_files=some/set"],
     ["data source some/set[train]", "check the id and the network"]),
    ("hub set with a part", {}, ["data.train_files=some/set:main"],
     ["data source some/set:main[train]", "check the id"]),
    ("held-out file missing", {}, ["data.val_files=TMP/v.jsonl"],
     ["data.val_files=TMP/v.jsonl", "no such file"]),
    ("held-out file empty", {"v.jsonl": ""}, ["data.val_files=TMP/v.jsonl"],
     ["TMP/v.jsonl", "holds no rows"]),
    ("held-out rows all bad", {"v.jsonl": "{}\n"}, ["data.val_files=TMP/v.jsonl"],
     ["TMP/v.jsonl", "all 1 rows"]),
    ("held-out rows too long", {"v.jsonl": rows({"question": WIDE, "answer": "#### 2"})},
     ["data.val_files=TMP/v.jsonl"],
     ["held-out data", "no prompt is left", "data.max_prompt_length"]),
    ("first held-out row bad", {"v.jsonl": "{}\n" + GOOD_ROW},
     ["data.val_files=TMP/v.jsonl", "data.val_size=1"], ["TMP/v.jsonl", "all 1 rows"]),
    ("second held-out set missing", {}, ["data.val_sets={hard: TMP/h.jsonl}"],
     ["data.val_sets.hard=TMP/h.jsonl", "no such file"]),
    ("second held-out set empty", {"h.jsonl": ""}, ["data.val_sets={hard: TMP/h.jsonl}"],
     ["TMP/h.jsonl", "holds no rows"]),
    ("held-out set without a name", {}, ["data.val_sets={'': TMP/h.jsonl}"],
     ["data.val_sets.", "must have a name"]),
    ("held-out set named val", {}, ["data.val_sets={val: generator:word_problems}"],
     ["data.val_sets.val", "must have a name"]),
    ("held-out set named reward", {}, ["data.val_sets={reward: generator:word_problems}"],
     ["data.val_sets.reward", "must have a name"]),
    ("held-out set with a slash", {}, ["data.val_sets={a/b: generator:word_problems}"],
     ["data.val_sets.a/b", "must have a name"]),
    ("held-out set without files", {}, ["data.val_sets={hard: ''}"],
     ["data.val_sets.hard=", "must have a name"]),
    ("nothing to evaluate", {}, ["trainer.val_only=true"],
     ["trainer.val_only=true", "set data.val_files"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "argv", "parts"), [s[1:] for s in SETS], ids=[s[0] for s in SETS]
)
def test_sets(files, argv, parts, models, tmp_path, capsys):
    write(tmp_path, files)
    argv = [a.replace("TMP", str(tmp_path)) for a in argv]
    refused([*base(tmp_path, models()), *argv], parts, tmp_path, capsys)


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_files_that_may_not_be_read(key, models, tmp_path, capsys):
    write(tmp_path, {"a.jsonl": GOOD_ROW})
    (tmp_path / "a.jsonl").chmod(0)
    arguments = [*base(tmp_path, models()), f"{key}={tmp_path}/a.jsonl"]
    with without_privileges():
        refused(arguments, ["TMP/a.jsonl", "Permission denied"], tmp_path, capsys)


@pytest.mark.parametrize("target", ["nowhere.jsonl", "a.jsonl"], ids=["dangling", "of itself"])
def test_links_to_nothing(target, models, tmp_path, capsys):
    os.symlink(tmp_path / target, tmp_path / "a.jsonl")
    arguments = [*base(tmp_path, models()), f"data.train_files={tmp_path}/a.jsonl"]
    refused(arguments, ["data.train_files=TMP/a.jsonl", "no such file"], tmp_path, capsys)
