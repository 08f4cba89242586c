"""Text for error messages: values on one line, secrets masked, suggestions for misspelled names."""

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any

MAX_VALUE_CHARS = 120
MAX_LINE_CHARS = 1000
_MIN_SECRET_CHARS = 8
_SECRET_VARIABLE = re.compile("(TOKEN|API_?KEY|SECRET|PASSWORD)$")
# The user part of a URL, and query parameters whose names say that they hold a secret.
_SECRET = re.compile(
    r"(://)[^/@\s]+@|([?&][\w.-]*(?:token|key|secret|password|sig)[\w.-]*=)[^&#\s'\"]+", re.I
)


def format_value(value: Any) -> str:
    """A config value on one line, as the user would write it, cut off where it is long."""
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, (dict, list)):
        text = str(value).replace("'", "")
    else:
        text = str(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(text) > MAX_VALUE_CHARS:
        return text[: MAX_VALUE_CHARS - 3] + "..."
    return text


def mask_secrets(text: str) -> str:
    """Replace secrets in a text by ***.

    Secrets are the values of environment variables named like ..._TOKEN or ..._PASSWORD, the part
    of a URL before an @, and query parameters such as ?token=... .
    """
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_CHARS and _SECRET_VARIABLE.search(name):
            text = text.replace(value, "***")
    return _SECRET.sub(_masked_match, text)


def one_line(text: str) -> str:
    """A message as samples keep it: one line, without secrets, cut off where it is long."""
    return " ".join(mask_secrets(text[: 2 * MAX_LINE_CHARS])[:MAX_LINE_CHARS].split())


def _masked_match(match: re.Match) -> str:
    if match[1]:
        return f"{match[1]}***@"
    return f"{match[2]}***"


def did_you_mean(word: str, names: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """ "did you mean NAME?" with the most similar name, or `otherwise` where none is similar."""
    matches = difflib.get_close_matches(word, list(names), n=1, cutoff=cutoff)
    if not matches:
        return otherwise
    return f"did you mean {matches[0]}?"
