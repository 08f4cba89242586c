"""Requests that are refused, as errors that the SDKs of OpenAI and Anthropic read.

These SDKs repeat a request after 408, 409, 429 and every status from 500 on. So what no repetition
helps against has another status, or has the header "x-should-retry: false".
"""

from collections.abc import Mapping

from one_step_off.endpoint.answers import Answer, error_answer

NO_RETRY = {"x-should-retry": "false"}
RETRY_SOON = {"Retry-After": "1"}
STATUS_OVER = 410


class Refused(Exception):
    """A request gets an error.

    Attributes:
        answer: the error.
        headers: of the answer.
        close: whether the connection ends with it: the rest of the request is unread.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        path: str = "",
        headers: Mapping[str, str] | None = None,
        close: bool = False,
        reason: str = "",
    ) -> None:
        """
        Args:
            code: its name, for programs.
            message: one line, for people.
            path: of the request; the error has the form of its API.
            reason: of an episode that is over.
        """
        super().__init__(message)
        self.answer: Answer = error_answer(path, status, code, message, reason)
        self.headers = dict(headers or {})
        self.close = close


def unknown_key(path: str, has_key: bool) -> Refused:
    """No key, or one that the run has not given out."""
    problem = "this key is not known" if has_key else "no key"
    message = (
        f"{problem}: send the episode's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    # The body is left unread: a client without a key cannot make the server read one.
    return Refused(401, "unknown_key", message, path, close=True)


def episode_over(path: str, reason: str, message: str) -> Refused:
    """The episode takes no more requests."""
    return Refused(STATUS_OVER, "episode_over", message, path, NO_RETRY, close=True, reason=reason)


def replica_gone(path: str) -> Refused:
    """The process that knew the episode has ended, and the episode with it."""
    message = (
        "this episode is over: its replica was restarted; the run repeats its prompt with another "
        "episode"
    )
    return episode_over(path, "replica", message)
