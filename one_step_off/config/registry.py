"""What a config names: a registered name, or the user's own as `module:function`. No torch here."""

import difflib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from one_step_off.config.errors import ConfigError, first_line
from one_step_off.config.text import did_you_mean
from one_step_off.config.user_code import find_user_line, format_traceback, similar_spec

ENGINES = {
    "vllm": "one_step_off.engines.vllm.engine:VllmEngine",
    "transformers": "one_step_off.engines.transformers.engine:TransformersEngine",
}
"""The value of `rollout.engine` -> what creates the engine. The driver imports it too, for `check`,
so its module imports what is large only in `start`."""

BACK_ENDS = {
    "fsdp": "one_step_off.training.fsdp.fsdp_workers:WORKERS",
    "megatron": "one_step_off.training.megatron.megatron_workers:WORKERS",
}
"""The value of `actor.backend` and its likes -> its table of workers. Megatron is an extra."""

TRANSPORTS = {
    "auto": "one_step_off.weight_sync.transports.collective:Collective",
    "collective": "one_step_off.weight_sync.transports.collective:Collective",
    "shared_folder": "one_step_off.weight_sync.transports.shared_folder:SharedFolder",
}
"""The value of `weight_sync.transport` -> its class. With auto, receivers on the sender's own
device use same_device.py in place of the transport."""


def check_name(key: str, spec: str, names: Iterable[str], user_form: str = "module:Class") -> None:
    """Refuse a name that is neither one of `names` nor the user's own, without importing anything.

    Args:
        key: the config key that holds `spec`.
        user_form: how users name their own.

    Raises:
        ConfigError: there is no such name.
    """
    if spec not in names and ":" not in spec:
        otherwise = f"use {user_form} or one of {', '.join(names)}"
        raise ConfigError(f"{key}={spec!r}: unknown; {did_you_mean(spec, names, otherwise)}")


def import_object(key: str, spec: str) -> Any:
    """The object that `module:attribute` names.

    `key` is the config key that holds `spec`. Raises ConfigError: there is no such module or
    attribute, or the import failed.
    """
    if not {"", os.getcwd()} & set(sys.path):
        # `python -m` finds modules beside the user's config, and so must a worker process.
        sys.path.append(os.getcwd())
    try:
        return pkgutil.resolve_name(spec)
    except (Exception, SystemExit) as error:  # the imported module may raise anything
        place = find_user_line(format_traceback(error))
        location = f" ({place})" if place else ""
        problem = f"cannot be imported: {type(error).__name__}: {first_line(error)}{location}"
        otherwise = "check the name, fix the module, or start in its folder, or set PYTHONPATH"
        fix = _similar_attribute(spec) or similar_spec(spec)
        fix = f"did you mean {fix}?" if fix else otherwise
        raise ConfigError(f"{key}={spec!r}: {problem}; {fix}") from error


def _similar_attribute(spec: str) -> str:
    """`module:attribute` with the most similar attribute of a module that could be imported; ""
    where there is none."""
    module, _, attribute = spec.partition(":")
    public = [name for name in vars(sys.modules.get(module, object)) if not name.startswith("_")]
    matches = difflib.get_close_matches(attribute, public, n=1)
    return f"{module}:{matches[0]}" if matches and attribute not in public else ""


@dataclass(frozen=True)
class Entry:
    """A registered function and what its use requires.

    Attributes:
        needs: fields of `advantages.Trajectories` that must be present.
        grouped: it compares the samples of one prompt, so `rollout.n` must be at least 2.
        whitens: as published, its advantages are whitened over the batch's trained tokens.
        per_segment: it sees each segment of an episode as a trajectory of its own, not the episode
            as one.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    grouped: bool = False
    whitens: bool = False
    per_segment: bool = False

    def settings(self) -> dict[str, Any]:
        """The function's own settings: its keyword-only arguments and their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    @property
    def takes_any_setting(self) -> bool:
        """Whether the function has **kwargs."""
        parameters = inspect.signature(self.function).parameters.values()
        return any(p.kind is p.VAR_KEYWORD for p in parameters)


class Registry(dict[str, Entry]):
    """Entries by name."""

    def __init__(self, key: str, user_form: str = "module:function") -> None:
        """`key`: the config key that holds a name. `user_form`: how users name their own
        objects.
        """
        self.key = key
        self.user_form = user_form

    def register(self, name: str, **entry_fields: Any) -> Callable[[Any], Any]:
        """A decorator that registers a function by `name`, with fields of `Entry`."""

        def add(function: Any) -> Any:
            if name in self:
                raise ValueError(f"{self.key}: {name!r} exists already")
            self[name] = Entry(function, **entry_fields)
            return function

        return add

    def find(self, spec: str, key: str = "") -> Entry:
        """The entry of a registered name, or of the user's own `module:function`.

        The fields of `Entry` are read from attributes of the user's function.

        Args:
            spec: the name, or `module:function`.
            key: the config key that holds `spec`; empty: that of the registry.

        Raises:
            ConfigError: there is no such name, module or attribute, or it is not callable.
        """
        key = key or self.key
        if spec in self:
            return self[spec]
        check_name(key, spec, self, self.user_form)
        function = import_object(key, spec)
        if not callable(function):
            raise ConfigError(
                f"{key}={spec!r}: is a {type(function).__name__}, not callable; name a function"
            )
        entry_fields = {}
        for name in ("needs", "grouped", "whitens", "per_segment"):
            if hasattr(function, name):
                entry_fields[name] = getattr(function, name)
        return Entry(function, **entry_fields)
