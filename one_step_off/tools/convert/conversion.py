"""A script of another trainer on its way to a config, with the outcome of each of its settings."""

import re
from dataclasses import dataclass, field
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import KEYS, checked_value
from one_step_off.config.text import format_value
from one_step_off.tools.convert.other_scripts import OtherScript

TRANSLATED, SAME, LEFT, NOTED = "translated", "same", "not translated", "noted"
"""Outcomes of a setting: it is in the config; it says what is so here anyway; it has no counterpart
and a reason; it has a note."""
_ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)\}")


class NotTranslated(Exception):
    """Why a setting has no counterpart; the message is for the user."""


@dataclass
class Conversion:
    """A script on its way to a config.

    Attributes:
        given: the settings of the script by their own keys.
        taken: those of them that a step has read.
        ours: our dotted key -> value.
        sources: our dotted key -> their keys that it comes from.
        left: their key -> why it is not translated.
        same: their keys that say what is so here anyway, or that change nothing in training.
        noted: their keys that a note names.
        notes: what to look at, a line each.
    """

    script: OtherScript
    given: dict[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    ours: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    noted: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def take(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that the script sets. All of them count as read; the
        others are left."""
        found = [key for key in keys if self.is_open(key)]
        self.taken.update(found)
        for key in found[1:]:
            self.leave(key, f"{found[0]} counts")
        return self.given[found[0]] if found else default

    def take_whole(self, *keys: str, default: int) -> int:
        """As `take`, for a whole number above 0; any other value is left."""
        value = self.take(*keys, default=default)
        if _is_count(value) or value == default:
            return value
        for key in keys:
            if key in self.given:
                self.leave(
                    key, f"{_without_value(value) or 'no whole number'}; {default} is assumed"
                )
        return default

    def is_open(self, key: str) -> bool:
        """Whether the script sets a key that no step has read yet."""
        return key in self.given and key not in self.taken

    def number(self, key: str, default: int) -> int:
        """The whole number above 0 that the script sets a key to, or the default. It stays
        open."""
        value = self.given.get(key, default)
        return value if _is_count(value) else default

    def set(self, dotted: str, value: Any, *theirs: str) -> None:
        """Set one of our keys from theirs; where it does not take the value they are left."""
        try:
            self.require(dotted, value, *theirs)
        except NotTranslated as error:
            for key in theirs:
                self.leave(key, str(error))
            if not any(key in self.given for key in theirs):
                self.notes.append(f"{dotted}={format_value(value)}: {error}")

    def require(self, dotted: str, value: Any, *theirs: str) -> None:
        """Set one of our keys from theirs. Raises NotTranslated: it does not take the value, or has
        another one by another of their keys."""
        shown = "" if dotted in theirs else f"{dotted}: "
        missing = _without_value(value)
        takes_text = dotted not in KEYS or KEYS[dotted].type_text.startswith("text")
        is_variable = takes_text and "${" not in _ENVIRONMENT.sub("", str(value))
        if missing and not (is_variable and "$((" not in str(value)):
            raise NotTranslated(f"{missing}; set {dotted}")
        try:
            if dotted in KEYS and not missing:
                value = checked_value(KEYS[dotted], value)
        except ConfigError as error:
            raise NotTranslated(shown + str(error).partition(": ")[2]) from None
        before = self.sources.get(dotted)
        if before and self.ours[dotted] != value:
            is_now = format_value(self.ours[dotted])
            raise NotTranslated(f"{dotted} is {is_now} by {before[0]}")
        self.ours[dotted] = value
        self.sources.setdefault(dotted, []).extend(key for key in theirs if key in self.given)

    def leave(self, key: str, reason: str) -> None:
        """Note that a setting of the script is not translated. Others are passed over."""
        if key in self.given:
            self.taken.add(key)
            self.left[key] = reason

    def same_here(self, *keys: str) -> None:
        """Note that settings of the script say what is so here anyway, or change nothing in
        training. Others are passed over."""
        found = [key for key in keys if key in self.given]
        self.taken.update(found)
        self.same.update(found)

    def note(self, text: str, *theirs: str) -> None:
        """A line to look at; it names these settings of the script."""
        self.notes.append(text)
        self.noted.update(theirs)

    def outcome_of(self, key: str) -> str | None:
        """What has become of a setting; None: nothing yet."""
        if key in self.left:
            return LEFT
        targets = [dotted for dotted, theirs in self.sources.items() if key in theirs]
        if any(is_written(dotted, self.ours) for dotted in targets):
            return TRANSLATED
        if key in self.noted:
            return NOTED
        if key in self.same or any(dotted in self.ours for dotted in targets):
            return SAME
        return None

    def settle(self) -> None:
        """Leave each setting that has no outcome, so that none vanishes."""
        for key in self.given:
            if self.outcome_of(key) is None:
                self.leave(key, "has no effect here")


def is_written(dotted: str, ours: dict[str, Any]) -> bool:
    """Whether the YAML of a config names this key: its value is not the default."""
    if dotted not in ours:
        return False
    return dotted not in KEYS or plain(ours[dotted]) != KEYS[dotted].default


def plain(value: Any) -> Any:
    """A value as YAML writes it: text of any kind as text."""
    return str(value) if isinstance(value, str) else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def variables_of(value: Any) -> list[str]:
    """The environment variables that a value has."""
    return _ENVIRONMENT.findall(str(value))


def _without_value(value: Any) -> str:
    """What a text of a script lacks to be a value: its variables, or another key; "": nothing."""
    text = str(value)
    names = variables_of(text)
    for expression in re.findall(r"\$\(\((.*)\)\)", text):
        names += re.findall(r"[A-Za-z_]\w*", _ENVIRONMENT.sub("", expression))
    if names:
        has = "has" if len(set(names)) == 1 else "have"
        return f"{' and '.join(dict.fromkeys(names))} {has} no value in the script"
    if "$((" in text:
        return "this is not worked out"
    return "it refers to another key" if "${" in text else ""


def set_length(c: Conversion, steps: Any, epochs: Any, steps_key: str, epochs_key: str) -> None:
    """One of steps and epochs; steps count where a script has both."""
    if steps is not None:
        c.set("trainer.total_steps", steps, steps_key)
        c.leave(epochs_key, f"{steps_key} counts")
        return
    whole = max(1, round(epochs)) if isinstance(epochs, int | float) else epochs
    c.set("trainer.total_epochs", whole, epochs_key)
    c.same_here(steps_key)


def set_logging(c: Conversion, key: str, default: Any, *project_keys: str) -> None:
    """The loggers of a run, and the project of W&B."""
    loggers = c.take(key, default=default)
    names = loggers if isinstance(loggers, list) else str(loggers).strip("[]'").split(",")
    names = [str(name).strip(" '\"") for name in names]
    c.set("logging.tensorboard", "tensorboard" in names or "all" in names, key)
    c.set("logging.wandb", "wandb" in names or "all" in names, key)
    project = c.take(*project_keys)
    if project:
        c.set("logging.wandb_project", project, *project_keys)
    others = sorted(set(names) - {"console", "tensorboard", "wandb", "none", "all", "", "None"})
    if others:
        c.notes.append(
            f"{key}: {', '.join(others)} is not written to; there are the console, TensorBoard, "
            "W&B and Prometheus"
        )
