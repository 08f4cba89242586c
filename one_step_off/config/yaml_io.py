"""YAML in and out: reading with the rules of OmegaConf, and writing a config that reads back
equal.
"""

import dataclasses
import re
import sys
from typing import Any

import yaml
from omegaconf._yaml import get_yaml_loader

from one_step_off.config.schema import Config
from one_step_off.config.text import mask_secrets

# OmegaConf's loader reads 1e-6 as a number and refuses duplicate keys.
_Loader = get_yaml_loader()
# Without a limit, or a number of 5,000 digits could not be shown in the error message about it.
sys.set_int_max_str_digits(0)

YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, TypeError)
"""What `parse_yaml` raises where the text is not valid."""


def parse_yaml(text: str) -> tuple[Any, Any]:
    """The content of a YAML text, and its node tree. Raises one of YAML_ERRORS."""
    return yaml.load(text, _Loader), yaml.compose(text, _Loader)


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


# The loader's resolvers, so that texts that it would read as numbers are quoted.
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
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
