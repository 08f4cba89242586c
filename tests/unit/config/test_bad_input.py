"""Bad configs, arguments and surroundings, as the whole program meets them. Data, models and
checkpoints: the files beside.
"""

from __future__ import annotations

import pytest

from tests.bad_input import base, names_a_fix, refused, write
from tests.unit.config.config_helpers import GOOD
from tests.unit.config.test_config_faults import BAD

BOMB = (
    "rollout: {engine_kwargs: {a: &a [1,1,1,1,1,1,1,1,1,1]"
    + "".join(
        f", {n}: &{n} [{','.join([f'*{p}'] * 10)}]"
        for p, n in zip("abcdefgh", "bcdefghi", strict=True)
    )
    + "}}\n"
)

# (name, text of the file x.yaml, parts that the line must hold)
FILES = [
    ("empty", "", ["x.yaml", "mapping of sections"]),
    ("only a comment", "# model: {path: x}\n", ["x.yaml", "mapping of sections"]),
    ("a number", "3\n", ["x.yaml", "mapping of sections"]),
    ("a text", "model\n", ["x.yaml", "mapping of sections"]),
    ("a list", "- model: {path: x}\n", ["x.yaml", "mapping of sections"]),
    ("two documents", "model: {path: x}\n---\ndata: {}\n", ["x.yaml", "not valid YAML"]),
    ("json cut off", '{"model": {"path": "x"', ["x.yaml", "not valid YAML"]),
    ("tabs", "model:\n\tpath: x\n", ["x.yaml", "line 2", "not valid YAML"]),
    (
        "colon in a value",
        "data:\n  instruction: end: here\n",
        ["x.yaml", "line 2", "not valid YAML"],
    ),
    ("open quote", "model:\n  path: 'x\n", ["x.yaml", "not valid YAML"]),
    ("percent", "data:\n  instruction: %d\n", ["x.yaml", "line 2", "not valid YAML"]),
    ("at sign", "model:\n  path: @x\n", ["x.yaml", "line 2", "not valid YAML"]),
    ("duplicate key", "actor: {lr: 1, lr: 2}\n", ["x.yaml", "found duplicate key lr"]),
    (
        "duplicate section",
        "actor: {lr: 1}\nactor: {eps: 1}\n",
        ["x.yaml", "line 2", "found duplicate key actor"],
    ),
    (
        "duplicate in a mapping",
        "rollout: {engine_kwargs: {a: 1, a: 2}}\n",
        ["x.yaml", "found duplicate key a"],
    ),
    ("anchor of itself", "actor: &a {lr: *a}\n", ["x.yaml", "line 1", "recursive aliases"]),
    ("section of itself", "rollout: {engine_kwargs: &a {x: *a}}\n", ["x.yaml", "fix the file"]),
    ("list of itself", "placement: {pools: {rollout: &a [*a]}}\n", ["x.yaml", "recursive aliases"]),
    ("aliases without end", BOMB, ["x.yaml", "node expansion exceeds"]),
    ("unknown anchor", "actor: {lr: *a}\n", ["x.yaml", "found undefined alias"]),
    ("merged from a number", "actor: {<<: 3}\n", ["x.yaml", "not valid YAML"]),
    ("python object", "model: {path: !!python/name:os.system }\n", ["x.yaml", "not valid YAML"]),
    ("own tag", "model: {path: !mine x}\n", ["x.yaml", "not valid YAML"]),
    (
        "a date",
        "model: {path: 2026-01-01}\n",
        ["model.path=2026-01-01", "no such directory", "check the path"],
    ),
    (
        "a time in a mapping",
        "reward: {kwargs: {a: 2026-01-01 00:00:00}}\n",
        ["reward.kwargs", "2026-01-01 00:00:00", "remove them"],
    ),
    ("a set", "reward: {kwargs: {a: !!set {b, c}}}\n", ["x.yaml:1:", "reward.kwargs"]),
    ("bytes", "model: {path: !!binary aGVsbG8=}\n", ["x.yaml:1:", "model.path", "must be text"]),
    ("key that is a list", "actor: {? [a, b] : 1}\n", ["x.yaml", "fix the file"]),
    ("key that is null", "actor: {null: 1}\n", ["x.yaml:1:", "actor.null", "unknown key"]),
    ("section that is null", "null: {a: 1}\n", ["x.yaml:1:", "unknown key"]),
    ("section that is a number", "1: {a: 1}\n", ["x.yaml:1:", "1: unknown key"]),
    ("section that is a list", "actor: [lr]\n", ["x.yaml:1:", "actor=[lr]", "must be a mapping"]),
    ("section that is a text", "actor: lr=1\n", ["x.yaml:1:", "actor=lr=1", "must be a mapping"]),
    (
        "misspelt section",
        "model: {path: x}\ntrainr: {seed: 1}\n",
        ["x.yaml:2:", "trainr", "did you mean trainer?"],
    ),
    (
        "misspelt key",
        "trainer:\n  seed: 1\n  save_frq: 3\n",
        ["x.yaml:3:", "trainer.save_frq", "trainer.save_freq?"],
    ),
    (
        "key of another section",
        "trainer:\n  lr: 1\n",
        ["x.yaml:2:", "trainer.lr", "did you mean actor.lr?"],
    ),
    ("key at the top", "learning_rate: 1\n", ["x.yaml:1:", "learning_rate", "unknown key"]),
    (
        "key of another case",
        "actor: {LR: 1}\n",
        ["x.yaml:1:", "actor.LR", "did you mean actor.lr?"],
    ),
    ("verl's nesting", "actor: {optim: {lr: 1}}\n", ["x.yaml:1:", "actor.optim", "unknown key"]),
    (
        "quoted number with a unit",
        "actor: {lr: '1e-6 per step'}\n",
        ["actor.lr=1e-6 per step", "must be a number"],
    ),
    ("comma for a point", "actor: {lr: '0,001'}\n", ["actor.lr=0,001", "must be a number"]),
    (
        "list for a number",
        "trainer: {total_steps: [3]}\n",
        ["trainer.total_steps=[3]", "a whole number or null"],
    ),
    (
        "a number with 5000 digits",
        f"trainer: {{total_steps: {'9' * 5000}}}\n",
        ["x.yaml:1:", "999...", "must be at most"],
    ),
    (
        "a hex number with 5000 digits",
        f"trainer: {{seed: 0x{'f' * 5000}}}\n",
        ["x.yaml:1:", "trainer.seed=", "...", "must be at most 2147483647"],
    ),
    ("a number beyond all floats", f"actor: {{lr: 1{'0' * 400}}}\n", ["actor.lr=inf", "at most"]),
    (
        "a float of 5000 digits",
        f"actor: {{lr: 0x{'f' * 5000}}}\n",
        ["x.yaml:1:", "actor.lr=inf", "must be at most"],
    ),
    ("not a number", "algorithm: {gamma: .nan}\n", ["algorithm.gamma=nan", "at least 0"]),
    ("infinite", "actor: {grad_clip: .inf}\n", ["actor.grad_clip=inf", "at most"]),
    (
        "half a character",
        'data: {instruction: "\\ud800"}\n',
        ["x.yaml", "invalid Unicode character", "fix"],
    ),
    (
        "half a character within",
        'reward: {kwargs: {a: ["\\udfff"]}}\n',
        ["x.yaml", "invalid Unicode character"],
    ),
    (
        "zero byte in a path",
        'data: {train_files: "a\\0.jsonl"}\n',
        ["data.train_files=a\\x00.jsonl", "no such file"],
    ),
    (
        "zero byte in the model",
        'model: {path: "/m\\0"}\n',
        ["model.path=/m\\x00", "check the path"],
    ),
    (
        "zero byte in the folder",
        'trainer: {output_dir: "/tmp/\\0"}\n',
        ["trainer.output_dir=/tmp/\\x00", "name another"],
    ),
    (
        "a name too long",
        f"trainer: {{output_dir: /tmp/{'x' * 300}}}\n",
        ["/tmp/xxx", "File name too long", "name another"],
    ),
    (
        "nested too deep",
        "reward: {kwargs: {a: " + "[" * 2000 + "]" * 2000 + "}}\n",
        ["x.yaml", "fix the file"],
    ),
    (
        "interpolation of itself",
        "trainer: {output_dir: '${trainer.output_dir}'}\n",
        ["x.yaml:1:", "trainer.output_dir"],
    ),
    (
        "interpolation in a ring",
        "model: {path: '${critic.path}'}\ncritic: {path: '${model.path}'}\n",
        ["x.yaml:", "path"],
    ),
    (
        "interpolation not closed",
        "trainer: {output_dir: '${oc.env:HOME'}\n",
        ["x.yaml:1:", "trainer.output_dir"],
    ),
    (
        "unknown resolver",
        "trainer: {output_dir: '${now:%Y}'}\n",
        ["x.yaml:1:", "trainer.output_dir"],
    ),
]


@pytest.mark.parametrize(("text", "parts"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_config_files(text, parts, models, tmp_path, capsys):
    write(tmp_path, {"x.yaml": text})
    arguments = [a for a in base(tmp_path, models()) if a.split("=")[0] not in text_keys(text)]
    refused([f"config={tmp_path}/x.yaml", *arguments], parts, tmp_path, capsys)


def text_keys(text: str) -> set[str]:
    """Keys of the base that a file means to set itself."""
    named = ("model.path", "data.train_files", "trainer.total_steps", "trainer.output_dir")
    return {
        key for key in named if key.split(".")[0] + ":" in text and key.split(".")[1] + ":" in text
    }


def test_a_folder_called_run_is_no_fix():
    """Or every line that names the run's folder would have one."""
    assert not names_a_fix("error: /tmp/x/run: Permission denied")
    assert not names_a_fix("error: trainer.output_dir=/tmp/x/run/use: it is broken (in ./name/it)")
    assert names_a_fix("error: /tmp/x/run: Permission denied; name another folder")


RAW = [
    ("UTF-16", "model: {path: x}\n".encode("utf-16"), ["utf-8", "fix the file"]),
    ("Latin-1", "data: {instruction: Lösung}\n".encode("latin-1"), ["utf-8", "fix the file"]),
    ("zeros", bytes(4096), ["not valid YAML"]),
    ("gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcbOOU", ["utf-8", "fix the file"]),
    ("control characters", b"model: {path: \x1b[31mx}\n", ["not valid YAML"]),
]


@pytest.mark.parametrize(("content", "parts"), [r[1:] for r in RAW], ids=[r[0] for r in RAW])
def test_config_files_that_are_no_text(content, parts, models, tmp_path, capsys):
    write(tmp_path, {"x.yaml": content})
    refused(
        [f"config={tmp_path}/x.yaml", *base(tmp_path, models())],
        ["TMP/x.yaml", *parts],
        tmp_path,
        capsys,
    )


@pytest.mark.parametrize(("argv", "parts"), BAD, ids=[" ".join(a)[:60] or "none" for a, _ in BAD])
def test_faults_of_the_config_as_the_program_tells_them(
    argv, parts, models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("one_step_off.config.hardware.count_gpus", lambda: 0)
    refused([*GOOD, *argv], parts, tmp_path, capsys)
