"""What the endpoint answers: one HTTP response, whole, before its first byte is sent.

So an agent never holds half of a turn, a weight sync in mid-turn only makes it wait, and a request
that a client repeats gets the answer that was made for it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from agent_loop.episode import Turn


@dataclass
class Answer:
    """One HTTP response.

    Attributes:
        status: of HTTP.
        content_type: "application/json" or "text/event-stream".
        chunks: the body, in the pieces in which it is sent.
        turns: of the policy, that it holds. The server marks them as delivered once the client has
            received the whole body.
    """

    status: int
    content_type: str
    chunks: list[bytes]
    turns: list[Turn] = field(default_factory=list)


def json_answer(status: int, content: Any) -> Answer:
    """An answer in JSON."""
    return Answer(status, "application/json", [json.dumps(content).encode()])


def error_answer(path: str, status: int, code: str, message: str, reason: str = "") -> Answer:
    """An error in the form of the API that `path` belongs to.

    Args:
        code: its name, for programs: as "episode_over".
        message: one line, for people.
        reason: which of several causes it has, as "turns"; "": it has one.
    """
    if path.startswith("/v1/messages"):
        error: dict[str, Any] = {"type": code, "message": message}
        if reason:
            error["code"] = reason
        return json_answer(status, {"type": "error", "error": error})
    error = {"message": message, "type": code, "param": None, "code": reason or code}
    return json_answer(status, {"error": error})
