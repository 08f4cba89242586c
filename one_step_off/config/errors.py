"""Errors in the user's input: `ConfigError`, and how other exceptions become one."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

from one_step_off.config.text import format_value


class ConfigError(Exception):
    """Bad input from the user. Its message is one line: the key or file, the value, and how to fix
    it.

    The program ends with exit code 2.
    """


class UnknownKey(ConfigError):
    """A key that does not exist. Its message names the key and what to write."""


class UnknownKeys(ConfigError):
    """Several keys that do not exist. The message has a line for each.

    Attributes:
        lines: the first says how many they are.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


_missing_here: ContextVar[list[str] | None] = ContextVar("missing_here", default=None)


@contextmanager
def noting_what_is_missing() -> Iterator[list[str]]:
    """In the block `refuse_here` notes what this machine lacks in the list, in place of raising."""
    missing: list[str] = []
    token = _missing_here.set(missing)
    try:
        yield missing
    finally:
        _missing_here.reset(token)


def refuse_here(error: ConfigError) -> None:
    """Raise an error of which this machine is the cause: another one may have the file, the folder
    or the package. In a block of `noting_what_is_missing` it is noted instead."""
    missing = _missing_here.get()
    if missing is None:
        raise error
    missing.append(str(error))


@contextmanager
def as_config_error(subject: str, fix: str, error_types: Any = Exception) -> Iterator[None]:
    """Turn exceptions of the block into a ConfigError: "SUBJECT: TYPE: FIRST LINE; FIX".

    Args:
        subject: the key or file, with its value.
        fix: what the user can do.
        error_types: the exception class, or a tuple of classes, to convert.
    """
    try:
        yield
    except error_types as error:
        cause = first_cause(error)
        message = f"{subject}: {type(cause).__name__}: {first_line(cause)}; {fix}"
        raise ConfigError(message) from cause


@contextmanager
def located_config_error(location: str) -> Iterator[None]:
    """Put a location, such as "file.yaml:3: ", in front of the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{location}{error}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the second where the first only announces it."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    count = 2 if lines[0].endswith(":") else 1
    return " ".join(line.strip() for line in lines[:count])


def key_error(cfg: Any, keys: str, problem: str) -> ConfigError:
    """The error for config keys, with their values: "actor.lr=3: PROBLEM".

    `keys`: one dotted key, or several separated by blanks. `problem`: what is wrong, and how to fix
    it.
    """
    shown = [f"{key}={format_value(attrgetter(key)(cfg))}" for key in keys.split()]
    return ConfigError(f"{' and '.join(shown)}: {problem}")


def value_error(key: str, value: Any, problem: str) -> ConfigError:
    """As `key_error`, for one key and its value."""
    return ConfigError(f"{key}={format_value(value)}: {problem}")


def first_cause(error: BaseException) -> BaseException:
    """The failure that came first, out of the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
