"""The newest answers of an episode, for clients that repeat a request.

A client that repeats a request because it has not received the answer gets the answer that was made
for it. So nothing is sampled twice, and the policy is trained on what the agent has seen. A client
that asks the same again gets another answer.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from one_step_off.endpoint.answers import Answer

MOST_KEPT = 8
MOST_KEPT_BYTES = 1 << 18
"""Bytes of an episode's delivered answers, without the newest."""


@dataclass(eq=False)
class KeptAnswer:
    """An answer that is being made, or was made.

    Attributes:
        digest: of the request.
        making: the task that makes it. It goes on when the client has gone.
        clients: that wait for it, or are being sent it.
        delivered: whether a client has taken all of it.
    """

    digest: bytes
    making: asyncio.Task[Answer]
    clients: int = 0
    delivered: bool = False

    @property
    def idle(self) -> bool:
        """Whether it is neither being made nor sent."""
        return self.making.done() and not self.clients

    @property
    def finished(self) -> bool:
        """Whether a client has taken it, or none is there to take it."""
        return self.making.done() and (self.delivered or not self.clients)

    @property
    def size(self) -> int:
        """Bytes; 0: it is not made yet, or was canceled."""
        if not self.making.done() or self.making.cancelled() or self.making.exception():
            return 0
        return sum(map(len, self.making.result().chunks))

    @property
    def refused(self) -> bool:
        """Whether it was made, and is an error."""
        if not self.making.done():
            return False
        if self.making.cancelled() or self.making.exception() is not None:
            return True
        return self.making.result().status >= 400


class KeptAnswers:
    """The answers of one episode, oldest first."""

    def __init__(self) -> None:
        self._answers: list[KeptAnswer] = []

    def find(self, digest: bytes, repeated: bool) -> KeptAnswer | None:
        """The answer that a request should get; None: a new one.

        Args:
            repeated: whether the client says that it sent this request before.
        """
        same = [answer for answer in self._answers if answer.digest == digest]
        same = [answer for answer in same if not answer.refused]
        # One that a client waits for is not given to another one, which may ask for a second
        # opinion: only to one that says that it repeats.
        abandoned = [answer for answer in same if not answer.delivered and not answer.clients]
        if abandoned:
            return abandoned[0]
        if repeated and same:
            undelivered = [answer for answer in same if not answer.delivered]
            return (undelivered or same)[-1]
        return None

    def add(self, answer: KeptAnswer) -> None:
        """Keep one more. What is finished and has no client goes, oldest first, where there are too
        many, or delivered ones are too large together."""
        for old in self._answers[: 1 - MOST_KEPT]:
            if old.idle:
                self._answers.remove(old)
        delivered = [old for old in self._answers if old.delivered and old.idle]
        size = sum(old.size for old in delivered)
        for old in delivered[:-1]:
            if size > MOST_KEPT_BYTES:
                size -= old.size
                self._answers.remove(old)
        self._answers.append(answer)

    @property
    def in_progress(self) -> list[KeptAnswer]:
        """Those that are being made."""
        return [answer for answer in self._answers if not answer.making.done()]

    @property
    def unfinished(self) -> list[KeptAnswer]:
        """Those that are being made, or sent for the first time."""
        return [answer for answer in self._answers if not answer.finished]

    @property
    def busy(self) -> bool:
        """Whether an answer is being made or sent."""
        return not all(answer.idle for answer in self._answers)


def request_digest(path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """What identical requests have in common."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (path.encode(), headers.get("Idempotency-Key", "").encode(errors="replace")):
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    digest.update(body)
    return digest.digest()


def says_repeated(headers: Mapping[str, str]) -> bool:
    """Whether a request says that it is the same as an earlier one with the same content: the SDKs
    of OpenAI and Anthropic count their retries, and others name each request."""
    retries = headers.get("x-stainless-retry-count", "0")
    return "Idempotency-Key" in headers or retries.strip() not in ("", "0")
