"""From a YAML file and `key=value` arguments to a `Config` of the right types.

Like the schema, this imports neither torch nor Ray nor vLLM. Every fault is a `ConfigError` of one
line that names the key (or file), the value, and how to fix it. pydantic would replace `_convert`
and `_check_bounds` alone, and each of its messages would have to be translated into such a line.
"""

import contextlib
import copy
import dataclasses
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from one_step_off.config.errors import (
    ConfigError,
    UnknownKey,
    UnknownKeys,
    located_config_error,
)
from one_step_off.config.schema import Config
from one_step_off.config.sections.data import join_files, split_files
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.unknown_keys import PAGES, REMOVED_KEYS, hint, leaves
from one_step_off.config.yaml_io import (
    MERGE_TAG,
    YAML_ERRORS,
    item_type,
    parse_yaml,
    retag,
    retag_key,
    takes_text,
    text_retagger,
    yaml_error_text,
)

CONFIG_FOLDER = Path(__file__).parents[1] / "shipped_configs"
"""The configs that come with the package: `config=NAME` finds them from any folder."""

FLAGS = ("--dry-run", "--check", "--help", "-h", "--config", "--replay", "--profile")
"""Of the commands that take a config."""

# The types of the schema in words, as they complete "must be ...".
_TYPE_TEXTS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[float]: "a list of numbers, such as [0.9, 0.999]",
    int | float: "a number",
    list[int | float]: "a list of numbers, such as [4, 4] or [0.5]",
    dict[
        str, list[int | float]
    ]: "a mapping of lists of numbers, such as {rollout: [1], actor: [1]}",
    dict[str, str]: "a mapping of names, such as {name: value}",
    dict[str, Any]: "a mapping, such as {name: value}",
    list[str]: "a list of names, such as [a, b]",
    str | list[dict[str, Any]]: "text, or a list such as [{files: a.jsonl, weight: 0.7}]",
}


ALL_KEYS = " (all keys: --help)"
MAX_UNKNOWN_KEYS = 60  # that one message lists


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema.

    Attributes:
        dotted: section.name.
        type: the Python type; without Optional, which a default of None implies.
        metadata: help, choices and bounds, see `keys.config_key`.
    """

    dotted: str
    section: str
    name: str
    type: Any
    default: Any
    metadata: Any

    @property
    def type_text(self) -> str:
        """The type or the choices in words, as they complete "must be ..."."""
        if self.metadata["choices"]:
            text = f"one of {', '.join(self.metadata['choices'])}"
        else:
            text = _TYPE_TEXTS[self.type]
        if self.default is None:
            text += " or null"
        return text


def _keys_of(prefix: str, schema: Any, section: str) -> Iterator[ConfigKey]:
    """The keys of a dataclass, each named PREFIX.NAME."""
    defaults = schema()
    for field in dataclasses.fields(schema):
        default = getattr(defaults, field.name)
        value_type = get_args(field.type)[0] if default is None else field.type
        dotted = f"{prefix}.{field.name}"
        yield ConfigKey(dotted, section, field.name, value_type, default, field.metadata)


KEYS: dict[str, ConfigKey] = {
    key.dotted: key
    for section in dataclasses.fields(Config)
    for key in _keys_of(section.name, section.type, section.name)
}
SECTIONS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Config))


def find_key(dotted: str, value: Any = None) -> ConfigKey:
    """The key of that name.

    Raises ConfigError: there is no such key. The message suggests what to write, for a key of
    another trainer (verl, TRL) too; `value` helps to choose the suggestion.
    """
    if dotted in KEYS:
        return KEYS[dotted]
    section, _, name = dotted.partition(".")
    if section in SECTIONS and not name:
        raise ConfigError(
            f"{format_value(dotted)}: a section, not a key; "
            f"write {section}.KEY=VALUE (all keys: --help)"
        )
    if dotted in REMOVED_KEYS:
        raise UnknownKey(f"{dotted}: is no key any more; {REMOVED_KEYS[dotted]}")
    shown, suggestion = hint(dotted, value, KEYS, SECTIONS)
    raise UnknownKey(f"{format_value(shown)}: unknown key; {suggestion}{ALL_KEYS}")


# --- from the file and the arguments to assignments ---


def shipped_names() -> list[str]:
    """The names of the configs that come with the package, sorted."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))


def find_config_file(config: str) -> str:
    """The file that `config` means: that file, or the package's config of that name.

    A file in the working directory comes first. A name that is neither is returned as it is.
    """
    shipped = CONFIG_FOLDER / f"{config}.yaml"
    if Path(config).exists() or config not in shipped_names():
        return config
    return str(shipped)


@dataclass(frozen=True)
class _Assignment:
    """A key that the file or an argument sets. `location`: "file:line: " for messages, or empty."""

    dotted: str
    value: Any
    location: str = ""


def _assignments_of(path: str, content: dict, lines: dict[str, int]) -> Iterator[_Assignment]:
    """The keys that the content of a file sets. Those of an unknown section are found to be unknown
    one by one."""
    for section, keys in content.items():
        if section not in SECTIONS:
            for dotted, value in _unknown_entries(str(section), keys):
                yield _Assignment(dotted, value, f"{path}:{_line_of(dotted, lines)}: ")
            continue
        if not isinstance(keys, dict | None):
            raise ConfigError(
                f"{path}:{lines.get(section, 1)}: {section}={format_value(keys)}: "
                "must be a mapping of keys, such as {key: value}"
            )
        for name, value in (keys or {}).items():
            dotted = f"{section}.{name}"
            yield _Assignment(dotted, value, f"{path}:{lines.get(dotted, 1)}: ")


def _parse_file(path: str) -> tuple[dict, yaml.MappingNode]:
    """The mapping that a file holds, and its node tree. Raises ConfigError."""
    try:
        with open(find_config_file(path), encoding="utf-8") as file:
            content, root = parse_yaml(file.read(), lambda root: _retag_file(path, root))
    except OSError as error:
        raise ConfigError(
            f"config={path}: {error.strerror} (working directory {os.getcwd()}); check the path, "
            f"or name a config of the package: {', '.join(shipped_names())}"
        ) from None
    except YAML_ERRORS as error:
        raise ConfigError(f"config={path}: {yaml_error_text(error)}; fix the file") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"config={path}: must contain a mapping of sections, such as model: {{path: ...}}"
        )
    return content, root


def _retag_file(path: str, root: yaml.Node) -> None:
    """Make texts of the keys of a file and of what its keys take as text. Raises ConfigError."""
    if not isinstance(root, yaml.MappingNode):
        return
    for section, body in root.value:
        retag_key(section)
        _retag_section(path, section.value, body)


def _retag_section(path: str, section: str, body: yaml.Node) -> None:
    if isinstance(body, yaml.SequenceNode):  # several mappings whose keys are merged
        for merged in body.value:
            _retag_section(path, section, merged)
    if not isinstance(body, yaml.MappingNode):
        return
    for name, value in body.value:
        retag_key(name)
        key = KEYS.get(f"{section}.{name.value}")
        if name.tag == MERGE_TAG:  # the keys of a mapping elsewhere
            _retag_section(path, section, value)
        elif key is not None:
            with located_config_error(f"{path}:{name.start_mark.line + 1}: "):
                retag(value, key.type, key.dotted, _entry_types(key))


def _entry_types(key: ConfigKey) -> dict[str, Any] | None:
    """The types of the entries of a key's mappings; None: they are free."""
    return {entry.name: entry.type for entry in entry_keys(key)} or None


def _line_numbers(root: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    """The line of each section, of each "section.key" and of the keys in it, from 1."""
    lines = {}
    for key, body in root.value:
        dotted = f"{prefix}{key.value}"
        lines[dotted] = key.start_mark.line + 1
        if isinstance(body, yaml.MappingNode):
            lines |= _line_numbers(body, f"{dotted}.")
    return lines


def _line_of(dotted: str, lines: dict[str, int]) -> int:
    """The line of a key, or of the nearest one that holds it."""
    while dotted not in lines and "." in dotted:
        dotted = dotted.rpartition(".")[0]
    return lines.get(dotted, 1)


def _read_argument(argument: str) -> _Assignment:
    """The key that an argument `section.key=value` sets."""
    dotted, _, text = argument.partition("=")
    value_type, entries = _type_of(dotted)
    is_text_key = takes_text(value_type)
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    is_null = text in ("null", "~")
    if is_text_key and not is_quoted and not is_null:
        # Not read as YAML, which would cut "... end with #### number" at its comment sign.
        return _Assignment(dotted, text)
    try:
        value, _ = parse_yaml(text, text_retagger(value_type, dotted, entries))
    except YAML_ERRORS as error:
        raise ConfigError(
            f"{format_value(dotted)}={format_value(text)}: {yaml_error_text(error)}; "
            "quote the value"
        ) from None
    return _Assignment(dotted, value)


def _type_of(dotted: str) -> tuple[Any, dict[str, Any] | None]:
    """The type of a key, or of an entry of its mapping, and the types of its entries; see
    `item_type`."""
    parts = dotted.split(".")
    key = KEYS.get(".".join(parts[:2]))
    if key is None:
        return object, None
    value_type = key.type
    entries = _entry_types(key)
    for entry_name in parts[2:]:
        value_type = item_type(value_type, entries, entry_name)
        entries = None
    return value_type, entries


def _assign(tree: dict, dotted: str, value: Any) -> str:
    """Set one key of a nested dict, replacing its value.

    `section.key.a.b` sets one entry inside a mapping. Returns "section.key". Raises ConfigError:
    there is no such key.
    """
    *parents, last = dotted.split(".")
    section_and_key = ".".join([*parents, last][:2])
    key = find_key(section_and_key if section_and_key in KEYS else dotted, value)
    if len(parents) > 1 and get_origin(key.type) is not dict:
        find_key(dotted, value)  # raises: only a mapping has entries
    node = tree
    for parent in parents:
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    node[last] = value
    return key.dotted


# --- values of the right type and within bounds ---


def _is_whole_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and value.is_integer())


# Scalar type -> (whether a value fits, how it is converted). A whole number beyond all floats
# becomes infinite by way of its text, and its bound refuses it.
_SCALARS: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], Any]]] = {
    Any: (lambda value: True, lambda value: value),
    str: (lambda value: type(value) in (str, int, float), str),
    bool: (lambda value: value in (0, 1), bool),
    float: (lambda value: type(value) in (int, float), lambda value: float(str(value))),
    int: (_is_whole_number, int),
    int | float: (
        lambda value: type(value) in (int, float),
        lambda value: int(value) if _is_whole_number(value) else float(value),
    ),
}


def _convert(location: str, target_type: Any, value: Any, type_text: str | None = None) -> Any:
    """The value as the target type. Raises ConfigError: it is of another type."""
    given = value
    if isinstance(value, str) and target_type not in (str, Any):
        # Environment variables arrive as text.
        with contextlib.suppress(*YAML_ERRORS):
            value, _ = parse_yaml(value, text_retagger(target_type, location))
    origin = get_origin(target_type)
    if origin is list and isinstance(value, list):
        (item_type,) = get_args(target_type)
        return [_convert(f"{location}[{i}]", item_type, item) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        _, item_type = get_args(target_type)
        converted = {}
        for name, item in value.items():
            converted[str(name)] = _convert(f"{location}.{format_value(name)}", item_type, item)
        return converted
    if target_type in _SCALARS:
        fits, convert = _SCALARS[target_type]
        if fits(value):
            return convert(value)
    raise ConfigError(
        f"{location}={format_value(given)}: must be {type_text or _TYPE_TEXTS[target_type]}"
    )


# No number of a config means anything beyond it, and the C code of the libraries takes 32 bits.
_MAX_NUMBER = 2**31 - 1
_BOUNDS = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
}


def checked_value(key: ConfigKey, value: Any) -> Any:
    """The value of a key, converted to its type and within its bounds. Raises ConfigError."""
    if value is None and key.default in (None, ""):
        return key.default
    value_type = key.type
    if "files" in key.metadata:
        value = _file_names(key, value)
    if "entries" in key.metadata:
        value = _checked_entries(key, value)
        if not isinstance(value, str):
            return value
        value_type = str
    choices = key.metadata["choices"]
    if choices and value not in choices:
        value = _choice_of_boolean(value, choices)
    value = _convert(key.dotted, value_type, value, key.type_text)
    if choices and value not in choices:
        similar = did_you_mean(str(value), choices, "")
        suggestion = f"; {similar}" if similar else ""
        raise ConfigError(
            f"{key.dotted}={format_value(value)}: must be {key.type_text}{suggestion}"
        )
    if type(value) in (int, float):
        _check_bounds(key, value)
    return _expanded(key, value)


def _file_names(key: ConfigKey, value: Any) -> Any:
    """The value of a key with `files`, with each list of names as one text."""
    if isinstance(value, dict):
        return {name: _file_names(key, files) for name, files in value.items()}
    if isinstance(value, str) and re.fullmatch(r"\s*\[.*\]\s*", value, re.S):
        value = _parsed_text(key, value)
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return join_files(value)
    return value


def _expanded(key: ConfigKey, value: Any) -> Any:
    """The value with the home directory for ~, which the libraries that open files do not know."""
    if "path" in key.metadata:
        return os.path.expanduser(value)
    if "files" not in key.metadata:
        return value
    if isinstance(value, dict):
        return {name: _expanded_files(files) for name, files in value.items()}
    return _expanded_files(value)


def _expanded_files(text: str) -> str:
    """A text of files with the home directory for ~. A file whose name has commas is one file."""
    whole = os.path.expanduser(text.strip())
    names = [whole] if os.path.isfile(whole) else split_files(text)
    return join_files([os.path.expanduser(name) for name in names])


def _choice_of_boolean(value: Any, choices: tuple[str, ...]) -> Any:
    """The choice that a truth value means: `yes` is "on" or "true", whichever there is."""
    words = {"true": ("true", "on"), "false": ("false", "off")}
    word = str(value).lower()
    meaning = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(word, word)
    for choice in words.get(meaning, ()):
        if choice in choices:
            return choice
    return value


def _checked_entries(key: ConfigKey, value: Any) -> Any:
    """The value of a key with `entries`: a mapping, or a list of mappings, whose own keys are
    checked as those of a section are. Text stays as it is. Raises ConfigError.
    """
    takes_list = get_origin(key.type) is not dict
    if isinstance(value, str) and re.fullmatch(r"\s*[\[{].*[]}]\s*", value, re.S):
        value = _parsed_text(key, value)
    if isinstance(value, str) and takes_list:
        return value
    mappings = value if takes_list else [value]
    is_right = isinstance(mappings, list) and all(isinstance(m, dict) for m in mappings)
    if not is_right or not mappings:
        raise ConfigError(f"{key.dotted}={format_value(value)}: must be {key.type_text}")
    checked = []
    for i, mapping in enumerate(mappings):
        prefix = f"{key.dotted}[{i}]" if takes_list else key.dotted
        checked.append(_checked_mapping(prefix, key, mapping))
    return checked if takes_list else checked[0]


def _parsed_text(key: ConfigKey, text: str) -> Any:
    try:
        value, _ = parse_yaml(text, text_retagger(key.type, key.dotted, _entry_types(key)))
    except YAML_ERRORS as error:
        problem = f"{yaml_error_text(error)}; quote names with a colon or a comma"
        raise ConfigError(f"{key.dotted}={format_value(text)}: {problem}") from None
    return value


def entry_keys(key: ConfigKey, prefix: str = "") -> list[ConfigKey]:
    """The keys that the mapping of a key, or each mapping of its list, may hold; [] where its
    entries are free. `prefix`: in front of their names.
    """
    if "entries" not in key.metadata:
        return []
    return list(_keys_of(prefix, key.metadata["entries"], key.section))


def _checked_mapping(prefix: str, key: ConfigKey, mapping: dict) -> dict[str, Any]:
    """The entries that a mapping sets, each converted and within its bounds. Raises ConfigError."""
    known = {entry.name: entry for entry in entry_keys(key, prefix)}
    checked = {}
    for name, value in mapping.items():
        if name not in known:
            fix = did_you_mean(str(name), known, f"use {', '.join(known)}")
            raise ConfigError(f"{prefix}.{format_value(name)}: unknown key; {fix}")
        checked[name] = checked_value(known[name], value)
    return checked


def _check_bounds(key: ConfigKey, value: float) -> None:
    """Raises ConfigError: the number is out of the key's bounds."""
    metadata = key.metadata
    if value == metadata.get("also"):
        return
    bounds = {"high": _MAX_NUMBER} | metadata
    for name, (words, is_within) in _BOUNDS.items():
        bound = bounds.get(name)
        if bound is None or is_within(value, bound):
            continue
        also = f", or {metadata['also']}" if "also" in metadata else ""
        raise ConfigError(
            f"{key.dotted}={format_value(value)}: "
            f"must be {words} {bound:.10g}{also} ({metadata['help']})"
        )


# --- the whole config ---


def load_config(argv: list[str]) -> Config:
    """The config of `config=FILE section.key=value ...`.

    The file overrides the defaults, the arguments override the file. `config=` may be omitted in
    front of a name that ends in .yaml or .yml, and `--config FILE` means the same. A mapping in the
    file or in an argument replaces the default; `section.key.name=value` changes one entry of it.

    Raises ConfigError: an argument or a key that cannot be understood, or a value of a wrong type
    or out of bounds. What must fit together is checked by `runtime.validation.validate`.
    """
    return _config_of(_assignments(argv))


def load_config_text(text: str) -> Config:
    """The config that a YAML text holds. Raises ConfigError, as `load_config` does."""
    content, root = parse_yaml(text)
    return _config_of(_assignments_of("config", content, _line_numbers(root)))


def _config_of(assignments: Iterable[_Assignment]) -> Config:
    tree = dataclasses.asdict(Config())
    locations: dict[str, str] = {}
    unknown: list[UnknownKey] = []
    for assignment in assignments:
        for dotted, value in _entries(assignment):
            try:
                with located_config_error(assignment.location):
                    key = _assign(tree, dotted, value)
                    locations[key] = assignment.location
            except UnknownKey as error:
                unknown.append(error)
    _raise_unknown(unknown)
    tree = _resolve_interpolations(tree, locations)
    cfg = Config()
    for key in KEYS.values():
        with located_config_error(locations.get(key.dotted, "")):
            value = checked_value(key, tree[key.section][key.name])
        setattr(getattr(cfg, key.section), key.name, value)
    return cfg


def _entries(assignment: _Assignment) -> Iterator[tuple[str, Any]]:
    """The assignment, or those of its entries where its key does not exist."""
    section_and_key = ".".join(assignment.dotted.split(".")[:2])
    if section_and_key in KEYS or assignment.dotted in SECTIONS:
        yield assignment.dotted, assignment.value
    else:
        yield from _unknown_entries(assignment.dotted, assignment.value)


def _unknown_entries(dotted: str, value: Any) -> Iterator[tuple[str, Any]]:
    """An unknown key; the entries of its mapping where these are keys of another trainer."""
    shown, _ = hint(dotted, value, KEYS, SECTIONS)
    if shown == dotted:
        yield dotted, value
    else:
        yield from leaves(dotted, value)


def _raise_unknown(unknown: list[UnknownKey]) -> None:
    """Raises UnknownKey or UnknownKeys, if there are any."""
    if not unknown:
        return
    messages = list(dict.fromkeys(map(str, unknown)))
    if len(messages) == 1:
        raise unknown[0]
    lines = [message.replace(ALL_KEYS, "") for message in messages[:MAX_UNKNOWN_KEYS]]
    if len(messages) > MAX_UNKNOWN_KEYS:
        lines.append(f"... and {len(messages) - MAX_UNKNOWN_KEYS} more")
    head = f"{len(messages)} unknown keys{ALL_KEYS}"
    if any(page in line for line in lines for page in PAGES.values()):
        head += "; one-step-off convert SCRIPT translates a script of verl or TRL"
    raise UnknownKeys([f"{head}:", *lines])


def _assignments(argv: list[str]) -> Iterator[_Assignment]:
    """What the config file sets, then what the arguments set. Raises ConfigError."""
    arguments = [_with_config_prefix(argument) for argument in _without_config_flag(argv)]
    for argument in arguments:
        _check_argument_form(argument)
    files = [arg.removeprefix("config=") for arg in arguments if arg.startswith("config=")]
    if len(files) > 1:
        raise ConfigError(
            f"config={format_value(files[1])}: config is given {len(files)} times; give one file"
        )
    for path in files:
        content, root = _parse_file(path)
        yield from _assignments_of(path, content, _line_numbers(root))
    for argument in arguments:
        if not argument.startswith("config="):
            yield _read_argument(argument)


def _without_config_flag(argv: list[str]) -> Iterator[str]:
    """The arguments, with config=FILE in place of --config FILE, --config=FILE and -c FILE."""
    remaining = iter(argv)
    for argument in remaining:
        flag, equals, path = argument.partition("=")
        if flag not in ("--config", "-c"):
            yield argument
            continue
        if not equals:
            path = next(remaining, "")
        if not path:
            raise ConfigError(f"argument {flag}: names no file; write config=FILE")
        yield f"config={path}"


def _with_config_prefix(argument: str) -> str:
    if re.fullmatch(r"[^=-][^=]*\.ya?ml", argument):
        return f"config={argument}"
    return argument


def _check_argument_form(argument: str) -> None:
    """Raises ConfigError: not NAME=VALUE, or not valid Unicode."""
    has_name_and_equals = not argument.startswith("=") and "=" in argument
    has_surrogates = any("\ud7ff" < c < "\ue000" for c in argument)
    is_flag_of_key = argument.startswith("--") and argument[2:].partition("=")[0] in KEYS
    if is_flag_of_key and not has_surrogates:
        _, equals, value = argument.partition("=")
        written = f"{argument[2:].partition('=')[0]}={value if equals else 'VALUE'}"
        raise ConfigError(
            f"argument {format_value(argument)}: keys have no dashes; write {written}"
        )
    if argument in shipped_names():
        raise ConfigError(
            f"argument {argument}: is a config of the package; write config={argument}"
        )
    if not has_name_and_equals or has_surrogates:
        if argument.startswith("--") and not has_surrogates:
            fix = did_you_mean(argument, FLAGS, f"use one of {', '.join(FLAGS)}")
            raise ConfigError(f"argument {format_value(argument)}: unknown; {fix}")
        forms = "config=FILE, section.key=value, --check, --dry-run or --help, in valid Unicode"
        raise ConfigError(f"argument {format_value(argument)}: must be {forms}")


def _resolve_interpolations(tree: dict, locations: dict[str, str]) -> dict:
    """The tree with every ${...} replaced. Raises ConfigError."""
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[return-value]
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        name = getattr(error, "full_key", None) or "config"
        reason = " ".join(str(error).split("full_key")[0].split())
        location = locations.get(".".join(name.split(".")[:2]), "")
        form = r"within double quotes \\${" if location else "within single quotes of the shell"
        raise ConfigError(
            f"{location}{format_value(name)}: cannot be resolved: {reason}; "
            rf"write the value itself, or \${{ ({form}) for a text with ${{"
        ) from None


# --- a config that was built in Python ---


def checked_copy(cfg: Config) -> Config:
    """A copy of a config whose values have the types of the schema, as "0.5" becomes 0.5 for a
    number.

    Raises:
        ConfigError: a value of a wrong type or out of bounds, or an attribute that is no key. Names
            the key, the value and what it must be.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(
            f"config of type {type(cfg).__name__}: must be a Config, for example from load_config"
        )
    checked = copy.deepcopy(cfg)
    _refuse_unknown_attributes(checked)
    for key in KEYS.values():
        section = getattr(checked, key.section)
        value = checked_value(key, getattr(section, key.name))
        setattr(section, key.name, value)
    return checked


def _refuse_unknown_attributes(cfg: Config) -> None:
    """Raises ConfigError: a section is no section of the schema, or has an attribute that the
    schema lacks.
    """
    sections = {field.name: field.type for field in dataclasses.fields(Config)}
    for name in vars(cfg):
        if name not in sections:
            raise ConfigError(f"{name}: unknown section; the sections are {', '.join(sections)}")
    for name, section_type in sections.items():
        section = getattr(cfg, name)
        if not isinstance(section, section_type):
            shown = format_value(section)
            raise ConfigError(f"{name}={shown}: must be an instance of {section_type.__name__}")
        for attribute, value in vars(section).items():
            find_key(f"{name}.{attribute}", value)
