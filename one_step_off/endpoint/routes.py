"""The paths of the endpoint, and what they need. The gateway and the replicas' servers share them,
so that what one of them refuses never reaches the other."""

import re
from dataclasses import dataclass

from aiohttp import web

from one_step_off.endpoint.refusals import Refused

POLICY_PATHS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/inference/v1/generate",
    }
)
"""Answered by `Serving.answer`."""

MODELS = "/v1/models"
NEXT = "/v1/episodes/next"
INTERNAL = ("return", "lost")
"""Names of the routes that only the gateway may use."""

GATEWAY = "x-ose-gateway"
"""Header of the gateway's requests: the fleet key."""

ANSWER = "x-ose-answer"
"""Header of the answers that the gateway gets: the number of a kept answer."""

_EPISODE_PATH = re.compile(r"/v1/episodes/([A-Za-z0-9_-]{1,80})(?:/(reward|end|return|lost))?")
_EPISODE_METHODS = {"": "GET", "reward": "POST", "end": "POST", "return": "POST", "lost": "POST"}
KEY_CHARS = 200


@dataclass(frozen=True)
class Route:
    """What a request asks for.

    Attributes:
        name: one of "policy", "models", "next", "state", "reward", "end", "return",
            "lost".
        path: without the query.
        key: of the episode, or of the fleet; "": none was sent.
    """

    name: str
    path: str
    key: str


def route_of(request: web.BaseRequest) -> Route:
    """The route of a request.

    Raises:
        Refused: 404: there is no such path. 405: not with this method.
    """
    # The path is compared as it was sent: with no decoding there is nothing to traverse.
    path = request.raw_path.partition("?")[0]
    if path in POLICY_PATHS:
        name, method, key = "policy", "POST", sent_key(request)
    elif path in (MODELS, NEXT):
        name, method, key = path.rpartition("/")[2], "GET", sent_key(request)
    else:
        match = _EPISODE_PATH.fullmatch(path)
        if match is None:
            message = f"{path[:100]!r}: there is no such path"
            if path.startswith("/v1/v1/"):
                message += "; the base URL has /v1 already, and Anthropic's has none"
            raise Refused(404, "not_found", message, path)
        key, action = match[1], match[2] or ""
        name, method = action or "state", _EPISODE_METHODS[action]
    if request.method != method:
        message = f"{request.method[:20]} {path[:40]}: this path takes {method}"
        raise Refused(405, "method_not_allowed", message, path, headers={"Allow": method})
    return Route(name, path, key)


def sent_key(request: web.BaseRequest) -> str:
    """The key in "Authorization: Bearer KEY", or in "x-api-key"; "": there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()[:KEY_CHARS]
    return request.headers.get("x-api-key", "").strip()[:KEY_CHARS]
