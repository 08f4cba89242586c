"""YAML in and out: reading what a person typed, and writing a config that reads back equal.

YAML 1.1, which PyYAML reads, takes 010 for 8, 1:30 for 90 and a mapping's key `no` for False. Here
010 is 10, 1:30 is text, and keys are text. Which unquoted scalars are text, the keys of a
config decide: `data.val_sets: {no: 010}` names a set `no` and a file `010`; to `trainer.seed` 010
is the number 10.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import yaml
from omegaconf._yaml import get_yaml_loader

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.text import format_value, mask_secrets

_TAG = "tag:yaml.org,2002:"
TEXT_TAG = _TAG + "str"
BOOLEAN_TAG = _TAG + "bool"
PLAIN_TAGS = [_TAG + name for name in ("int", "float", "bool", "null", "value")]
"""What an unquoted scalar may be resolved to beside text."""
_INT = re.compile(
    r"[-+]?(?:[0-9]+(?:_[0-9]+)*|0b[01]+(?:_[01]+)*|0o[0-7]+(?:_[0-7]+)*"
    r"|0x[0-9a-fA-F]+(?:_[0-9a-fA-F]+)*)$"
)
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*(?:_[0-9]+)*)?|\.[0-9]+(?:_[0-9]+)*)(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)

# OmegaConf's loader refuses duplicate keys.
_OmegaConfLoader = get_yaml_loader()


class _Loader(_OmegaConfLoader):  # type: ignore[misc,valid-type]
    """Reads numbers as people write them."""

    yaml_implicit_resolvers = {
        letter: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.removeprefix(_TAG) not in ("int", "float", "value")
        ]
        for letter, resolvers in _OmegaConfLoader.yaml_implicit_resolvers.items()
    }


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    digits = text.lstrip("+-")
    base = 0 if digits[:1] == "0" and digits[1:2].isalpha() else 10
    return int(text, base)


_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor(_TAG + "int", _construct_int)
# Without a limit, or a number of 5,000 digits could not be shown in the error message about it.
sys.set_int_max_str_digits(0)

YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, TypeError)
"""What `parse_yaml` raises where the text is not valid."""


def parse_yaml(text: str, prepare: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
    """The content of a YAML text, and its node tree.

    Args:
        prepare: changes the tags of the tree before the content is made of it.

    Raises one of YAML_ERRORS, or what `prepare` raises.
    """
    yaml.load(text, _Loader)  # refuses aliases of themselves and without end
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None
        if prepare is not None:
            prepare(root)
        return loader.construct_document(root), root
    finally:
        loader.dispose()


def yaml_error_text(error: Exception) -> str:
    """ "not valid YAML: ..." with line and column where they are known."""
    mark = getattr(error, "problem_mark", None)
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or error
    return "not valid YAML: " + position + " ".join(str(problem).split())


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, and escapes ${ in texts, so that it is not read as an
    interpolation.
    """


def _escape_interpolation(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)


def _represent_list(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
    escaped = map(_escape_interpolation, items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", escaped, flow_style=True)


def _represent_dict(dumper: yaml.SafeDumper, mapping: dict) -> yaml.Node:
    # Keys are written as they are: OmegaConf interpolates values only.
    escaped = {key: _escape_interpolation(value) for key, value in mapping.items()}
    return dumper.represent_dict(escaped)


# The loaders' resolvers, so that texts that these or another YAML reader would read as numbers are
# quoted.
_Dumper.yaml_implicit_resolvers = {
    letter: resolvers + _Loader.yaml_implicit_resolvers.get(letter, [])
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for letter, resolvers in _Loader.yaml_implicit_resolvers.items():
    _Dumper.yaml_implicit_resolvers.setdefault(letter, resolvers)
_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(dict, _represent_dict)


def resolved_yaml(cfg: Config) -> str:
    """The whole config as YAML, with secrets masked. `load_config` reads it back as an equal
    config.
    """
    tree = dataclasses.asdict(cfg)
    # PyYAML does not escape Unicode's own line breaks, and reads them back as blanks.
    has_unicode_breaks = re.search(r"\\x85|\\u202[89]", repr(tree))
    text = yaml.dump(
        tree, None, _Dumper, allow_unicode=not has_unicode_breaks, sort_keys=False, width=10**6
    )
    return mask_secrets(text)


EntryTypes = Mapping[str, Any]
"""The types of a mapping's known keys."""

MERGE_TAG = "tag:yaml.org,2002:merge"
NULLS = ("null", "Null", "NULL", "~", "")
# What YAML takes for true and false, and people also for words.
AMBIGUOUS_WORDS = ("yes", "no", "on", "off")


def takes_text(value_type: Any) -> bool:
    """Whether a value of this type may be a text."""
    return value_type is str or str in get_args(value_type) and get_origin(value_type) is not dict


def item_type(value_type: Any, entries: EntryTypes | None = None, name: str = "") -> Any:
    """The type of the items of a list, or of the entry `name` of a mapping; Any: it is free;
    object: the key is unknown, and what it holds does not matter.

    Args:
        entries: of the mappings that the value holds.
    """
    if entries is not None and name:
        return entries.get(name, Any)
    if get_origin(value_type) in (list, dict):
        return get_args(value_type)[-1]
    return object if value_type is object else Any


def text_retagger(value_type: Any, name: str, entries: EntryTypes | None = None) -> Callable:
    """A function of a YAML node that makes texts of what is to be text; see `retag`."""
    return lambda node: retag(node, value_type, name, entries)


def retag(
    node: yaml.Node,
    value_type: Any,
    name: str,
    entries: EntryTypes | None = None,
    visited: set[int] | None = None,
) -> None:
    """Change the tags of a value's nodes: keys are texts, and so is what the type takes as text.

    Args:
        value_type: of the schema.
        name: of the value, for messages.
        entries: of the mappings that it holds; None: their entries are free.
        visited: the nodes that were changed: an alias is a node that comes again.

    Raises:
        ConfigError: a word where the key takes anything may be a truth value or text.
    """
    visited = visited if visited is not None else set()
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        _retag_scalar(node, value_type, name)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            retag(item, item_type(value_type), f"{name}[{i}]", entries, visited)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == MERGE_TAG:  # the entries of one mapping, or of each of a list
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for mapping in merged:
                    retag(mapping, value_type, name, entries, visited)
                continue
            retag_key(key)
            entry_name = str(key.value)
            entry_type = item_type(value_type, entries, entry_name)
            retag(value, entry_type, f"{name}.{entry_name}", None, visited)


def retag_key(node: yaml.Node) -> None:
    """Make a text of a mapping's key."""
    if isinstance(node, yaml.ScalarNode) and node.tag in PLAIN_TAGS:
        node.tag = TEXT_TAG


def _retag_scalar(node: yaml.ScalarNode, value_type: Any, name: str) -> None:
    is_plain = not node.style and node.tag in PLAIN_TAGS
    if not is_plain:
        return
    if takes_text(value_type):
        if node.value not in NULLS:
            node.tag = TEXT_TAG
    elif value_type is Any and node.tag == BOOLEAN_TAG and node.value.lower() in AMBIGUOUS_WORDS:
        word = "true" if node.value.lower() in ("yes", "on") else "false"
        raise ConfigError(
            f"{format_value(name)}={node.value}: may be {word} or a text; write {word}, "
            "or quote the text"
        )
