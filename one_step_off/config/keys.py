"""How the schema declares one config key: its default, help text, choices and bounds."""

from copy import deepcopy
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any, Optional


def config_key(default: Any, help: str, *, choices: str = "", **metadata: Any) -> Any:
    """A dataclass field for one config key.

    Args:
        default: its value where the config sets none.
        help: one line for --help and the reference.
        choices: the allowed values, separated by blanks; empty: any value of the type.
        metadata: further facts, each optional.
            low, high: inclusive bounds.
            above: an exclusive lower bound.
            also: one more allowed value outside the bounds.
            path: True where the value is one path, so that ~ means the home directory.
            files: the same where it is a list of files, see `sections.data.split_files`.
            entries: a dataclass of such keys: those of a mapping, or of each mapping in a list.
            shared: True where other roles take the actor's value unless they set their own.
    """
    metadata = metadata | {"help": help, "choices": tuple(choices.split())}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


path_key = partial(config_key, path=True)
files_key = partial(config_key, files=True)
shared_key = partial(config_key, shared=True)


def with_actor_defaults(base: type) -> Any:
    """A subclass of `base` whose shared keys default to null, which means "the actor's value".

    `role_settings` in roles.py fills them in.
    """
    optional_keys = []
    for base_field in fields(base):
        if "shared" in base_field.metadata:
            optional_type = Optional[base_field.type]  # ty: ignore[invalid-type-form]  (made at run time)
            help_text = f"{base_field.metadata['help']}; null: the actor's value"
            own = field(default=None, metadata=base_field.metadata | {"help": help_text})
            optional_keys.append((base_field.name, optional_type, own))
    return make_dataclass(f"{base.__name__}WithActorDefaults", optional_keys, bases=(base,))
