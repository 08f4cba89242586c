"""Whatever is written into a config: a Config whose resolved text means the same, or one line;
never another end.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from one_step_off.config import hardware
from one_step_off.config.errors import ConfigError, UnknownKeys
from one_step_off.config.loading import KEYS, SECTIONS, load_config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.runtime.validation import validate

ROOT = Path(__file__).parents[3]
SHIPPED = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "config").glob("*.yaml"))]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# Of all kinds that YAML has, and some that it has not: halves of characters, control characters,
# numbers beyond all floats.
texts = st.text(max_size=8) | st.text(
    st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=3
)
texts |= st.sampled_from(
    [
        "${actor.lr}",
        "${x",
        "\\${",
        "???",
        "1e999",
        "0x" + "f" * 4000,
        "1:2:3",
        "~",
        "=",
        "<<",
        "\0",
        "\x85",
        "{a: &a [*a]}",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.floats()
    | texts
    | st.integers()
    | st.integers(-(10**400), 10**400)
)
scalars |= st.dates() | st.datetimes() | st.binary(max_size=3)
names = st.sampled_from([key.name for key in KEYS.values()]) | st.sampled_from(SECTIONS) | texts
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | scalars, inner, max_size=3),
    max_leaves=8,
)
dotted = (
    st.sampled_from(sorted(KEYS))
    | st.tuples(st.sampled_from(sorted(KEYS)), names).map(".".join)
    | texts
)


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def settle(argv: list[str], folder: Path) -> None:
    """Load and check; what comes of it must be a config that its own text means again, or one
    line.
    """
    try:
        cfg = load_config(argv)
        text = resolved_yaml(cfg)
        (folder / "again.yaml").write_text(text)
        assert resolved_yaml(load_config([f"config={folder}/again.yaml"])) == text
        validate(cfg)
    except ConfigError as e:
        line = str(e)
        assert line, repr(line)
        expected = e.lines if isinstance(e, UnknownKeys) else [line]  # a line for each key
        assert line.splitlines() == expected, repr(line)
        line.encode()  # it can be shown


@QUICK
@given(st.lists(st.tuples(dotted, texts | trees.map(str) | scalars.map(str)), max_size=4))
@example([("rollout.engine_kwargs", "{a: &a [*a]}")])
@example([("reward.kwargs", "[" * 3000)])
@example([("actor.lr", "0x" + "f" * 5000)])
@example([("data.instruction", "\ud800")])
@example([("trainer.output_dir", "\0"), ("model.path", "tiny:qwen2")])
@example([("trainer.output_dir", "/tmp/" + "x" * 300)])
def test_any_arguments(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    settle(
        [f"{key}={value}" for key, value in pairs if key != "config"],
        tmp_path_factory.getbasetemp(),
    )


def written(tree: object, folder: Path) -> list[str]:
    path = folder / "fuzz.yaml"
    path.write_bytes(yaml.dump(tree, allow_unicode=False).encode("utf-8", "surrogatepass"))
    return [f"config={path}"]


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(SECTIONS), st.dictionaries(names, trees, max_size=3), max_size=3
    )
    | trees
)
def test_any_values(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    folder = tmp_path_factory.getbasetemp()
    settle(written(tree, folder), folder)


@QUICK
@given(st.lists(st.tuples(st.sampled_from(sorted(KEYS)), trees), min_size=1, max_size=2))
def test_any_values_of_real_keys(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, object]]
) -> None:
    tree: dict[str, dict] = {}
    for key, value in pairs:
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    folder = tmp_path_factory.getbasetemp()
    settle(written(tree, folder), folder)


@QUICK
@given(st.data())
def test_shipped_configs_with_something_changed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    tree = yaml.safe_load(yaml.safe_dump(data.draw(st.sampled_from(SHIPPED))))
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(sorted(tree)))
        how = data.draw(st.sampled_from(["drop", "rename", "value", "key", "section"]))
        if how == "drop" or not isinstance(tree[section], dict) or not tree[section]:
            del tree[section]
        elif how == "section":
            tree[section] = data.draw(trees)
        elif how == "rename":
            tree[data.draw(names)] = tree.pop(section)
        elif how == "key":
            tree[section][data.draw(names)] = data.draw(trees)
        else:
            tree[section][data.draw(st.sampled_from(sorted(tree[section], key=str)))] = data.draw(
                trees
            )
        if not tree:
            break
        tree = {name if isinstance(name, str) else str(name): body for name, body in tree.items()}
    folder = tmp_path_factory.getbasetemp()
    settle(written(tree, folder), folder)


@QUICK
@given(st.data())
def test_shipped_configs_with_bytes_changed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted((ROOT / "config").glob("*.yaml"))))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2)
            | st.sampled_from([b"&a ", b"*a", b"\t", b"- ", b"? ", b"!!", b"{", b"'"])
        )
    folder = tmp_path_factory.getbasetemp()
    (folder / "bytes.yaml").write_bytes(content)
    settle([f"config={folder}/bytes.yaml"], folder)
