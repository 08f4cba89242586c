"""Functions that a config names: a registered name, or the user's own as `module:function`. Imports no torch."""

import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from one_step_off.config.schema import ConfigError, first_line
from one_step_off.config.user_code import find_user_line, format_traceback


def import_object(key: str, spec: str) -> Any:
    """What `module:attribute` names; `key` is the config key that holds it. Raises ConfigError: no such module or
    attribute, or the import failed."""
    if not {"", os.getcwd()} & set(sys.path):
        # `python -m` finds modules beside the user's config, and so must a worker process.
        sys.path.append(os.getcwd())
    mend = "check the name, mend it, or start in its folder, or set PYTHONPATH"
    try:
        return pkgutil.resolve_name(spec)
    except (Exception, SystemExit) as e:  # the module's too
        place = find_user_line(format_traceback(e))
        where = f" ({place})" if place else ""
        what = f"{key}={spec!r}: cannot be imported"
        raise ConfigError(f"{what}: {type(e).__name__}: {first_line(e)}{where}; {mend}") from e


@dataclass(frozen=True)
class Entry:
    """A registered function and what one must know to use it.

    Attributes:
        needs: fields of `advantages.Trajectories` that must be there.
        grouped: compares the samples of one prompt, so `rollout.n` must be at least 2.
        whitens: as published, its advantages are whitened over the batch's trained tokens.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...] = ()
    grouped: bool = False
    whitens: bool = False

    def settings(self) -> dict[str, Any]:
        """Its own settings: keyword-only arguments and their defaults."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


class Registry(dict[str, Entry]):
    """Entries by name."""

    def __init__(self, key: str, own: str = "module:function") -> None:
        """`key`: of the config, whose values they are. `own`: how users name theirs."""
        self.key, self.own = key, own

    def register(self, name: str, **facts: Any) -> Callable[[Any], Any]:
        """Make a function known by `name`; `facts` are fields of `Entry`."""

        def add(function: Any) -> Any:
            if name in self:
                raise ValueError(f"{self.key}: {name!r} exists already")
            self[name] = Entry(function, **facts)
            return function

        return add

    def find(self, spec: str, key: str = "") -> Entry:
        """The entry of a name, or of the user's own function; its attributes named as the fields of `Entry` are read.
        `key`: the config key that holds it; empty: the registry's. Raises ConfigError: no such name, module or attribute,
        or not callable."""
        key = key or self.key
        if spec in self:
            return self[spec]
        if ":" not in spec:
            raise ConfigError(
                f"{key}={spec!r}: unknown; use {self.own} or one of {', '.join(self)}"
            )
        function = import_object(key, spec)
        if not callable(function):
            raise ConfigError(
                f"{key}={spec!r}: is a {type(function).__name__}, not callable; name a function"
            )
        facts = {
            f: getattr(function, f) for f in ("needs", "grouped", "whitens") if hasattr(function, f)
        }
        return Entry(function, **facts)
