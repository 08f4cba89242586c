"""The messages between the program and the replica, and the environment of an agent's process."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any
from urllib.parse import urlsplit

MAX_MESSAGE_BYTES = 1 << 28
MAX_RESULT_CHARS = 1 << 20
MAX_ROW_VARIABLE = 100_000  # bytes; Linux refuses a variable of 128 KiB
MAX_ERROR_CHARS = 1000
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_TRACEBACK_CHARS = 10_000


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


def failure(error: BaseException) -> dict[str, Any]:
    """What a message says of an exception of the agent's function."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {
        "error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS],
        "traceback": text[-MAX_TRACEBACK_CHARS:],
    }


def outcome(value: Any) -> dict[str, Any]:
    """What a message says of the value that the agent's function returned."""
    # float: numbers of numpy's types. A NaN is refused where rewards are.
    text = json.dumps(value, default=float)
    if len(text) > MAX_RESULT_CHARS:
        raise ValueError(f"it returned {len(text)} characters; a reward is a number or a dict")
    return {"value": json.loads(text)}


def no_proxy_variables(host: str = "") -> dict[str, str]:
    """The variables by which HTTP clients reach this machine, and `host`, without a proxy: another
    machine's proxy does not know what listens here.

    Both spellings get what either holds, because some clients read one of them alone.
    """
    listed = f"{os.environ.get('no_proxy', '')},{os.environ.get('NO_PROXY', '')}"
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if "*" not in names:
        names += [name for name in (*LOOPBACK_HOSTS, host) if name and name not in names]
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(names))


def agent_environment(base_url: str, api_key: str, row: str) -> dict[str, str]:
    """The variables that an agent's process gets beside those of the run.

    Args:
        base_url: of the endpoint, with "/v1".
        row: as JSON; left out where it is too long for a variable.
    """
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    variables |= no_proxy_variables(urlsplit(base_url).hostname or "")
    if len(row.encode()) <= MAX_ROW_VARIABLE:
        variables["EPISODE_ROW"] = row
    return variables
