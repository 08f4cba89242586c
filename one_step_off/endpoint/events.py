"""Server-sent events, as far as the server makes them itself: errors after a late start."""

import json


def is_streamed(body: bytes) -> bool:
    """Whether a request asks for its answer as events."""
    if b'"stream"' not in body:
        return False
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("stream") is True


def error_event(path: str, error: bytes) -> bytes:
    """An error as an event of the API of `path`.

    Args:
        error: the body that it would have had as an answer, in one line of JSON.
    """
    if path.startswith("/v1/messages") or path == "/v1/responses":
        return b"event: error\ndata: " + error + b"\n\n"
    return b"data: " + error + b"\n\n"
