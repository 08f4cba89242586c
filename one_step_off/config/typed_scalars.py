"""Which unquoted scalars of a config are text: YAML decides by their look, a config by its keys.

`data.val_sets: {no: 010}` names a set `no` and a file `010`; to `trainer.seed` 010 is the number
10.
"""

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import yaml

from one_step_off.config.errors import ConfigError
from one_step_off.config.text import format_value
from one_step_off.config.yaml_io import BOOLEAN_TAG, PLAIN_TAGS, TEXT_TAG

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
