"""The newest answers of an episode, for clients that repeat a request.

A client that repeats a request because it has not received the answer gets the answer that was made
for it. So nothing is sampled twice, and the policy is trained on what the agent has seen. A client
that asks the same again gets another answer, and so does one that repeats a request that was
refused: no answer was made for it, and those of equal requests belong to others.
"""

import asyncio
import hashlib
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent_loop.episode import Episode
from one_step_off.endpoint.answers import Answer

MAX_KEPT = 8
MAX_KEPT_BYTES = 1 << 18
"""Bytes of an episode's delivered answers, without the newest."""

MAX_REFUSED = 1024
"""Refused requests of an episode that are remembered."""

MAX_DIGITS = 9  # of a number of retries; Python refuses to read very long ones

COUNTED_RETRIES = "x-stainless-retry-count"


@dataclass(frozen=True)
class Attempt:
    """What the headers of a request declare.

    Attributes:
        digest: what identical requests have in common.
        retries: how often the client has sent this request before, as it counts.
        named: whether the client has named the request, so that all with this name are one.
    """

    digest: bytes
    retries: int = 0
    named: bool = False

    @classmethod
    def of(cls, path: str, body: bytes, headers: Mapping[str, str]) -> "Attempt":
        """The SDKs of OpenAI and Anthropic count their retries, and others name each request."""
        counted = headers.get(COUNTED_RETRIES, "").strip() or "0"
        is_number = counted.isascii() and counted.isdigit() and len(counted) <= MAX_DIGITS
        retries = int(counted) if is_number else 1
        return cls(request_digest(path, body, headers), retries, "Idempotency-Key" in headers)

    @property
    def repeats(self) -> bool:
        """Whether it is the same request as an earlier one, and not only equal to it."""
        return self.named or self.retries > 0


@dataclass(eq=False)
class KeptAnswer:
    """An answer that is being made, or was made.

    Attributes:
        digest: of the request; see `Attempt`.
        making: the task that makes it. It continues when the client disconnects.
        clients: that wait for it, or are being sent it.
        delivered: whether a client has taken all of it.
        number: its name between the gateway and the replica.
        retries: the highest count of retries among the requests that it was given to.
    """

    digest: bytes
    making: asyncio.Task[Answer]
    clients: int = 0
    delivered: bool = False
    retries: int = 0
    number: int = field(default_factory=itertools.count(1).__next__)

    def lose(self, episode: Episode) -> None:
        """The client has not taken it after all, but the gateway alone. What another turn was built
        on was taken."""
        self.delivered = False
        built_on = {turn.parent for turn in episode.turns_done}
        for turn in self.making.result().turns:
            turn.delivered = turn in built_on

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


class IdempotencyCache:
    """The answers of one episode, oldest first."""

    def __init__(self) -> None:
        self._answers: list[KeptAnswer] = []
        self._refused: deque[tuple[bytes, int]] = deque(maxlen=MAX_REFUSED)

    def take(self, attempt: Attempt) -> KeptAnswer | None:
        """The answer that a request should get; None: a new one."""
        same = [answer for answer in self._answers if answer.digest == attempt.digest]
        same = [answer for answer in same if not answer.refused]
        # One that a client waits for is not given to another one, which may ask for a second
        # opinion: only to one that repeats.
        abandoned = [answer for answer in same if not answer.delivered and not answer.clients]
        if abandoned:
            return abandoned[0]
        if not attempt.repeats or self._was_refused(attempt) or not same:
            return None
        # Of several clients that repeat equal requests each gets another answer.
        others = [answer for answer in same if answer.retries < attempt.retries] or same
        undelivered = [answer for answer in others if not answer.delivered]
        taken = (undelivered or others)[-1]
        taken.retries = max(taken.retries, attempt.retries)
        return taken

    def find(self, number: str) -> KeptAnswer | None:
        """The delivered answer of this number; None: it is kept no longer."""
        found = [one for one in self._answers if str(one.number) == number and one.delivered]
        return found[0] if found else None

    def refuse(self, attempt: Attempt) -> None:
        """No answer is made for a request: its next retry is not to get that of an equal one."""
        if not attempt.named:
            self._refused.append((attempt.digest, attempt.retries))

    def _was_refused(self, attempt: Attempt) -> bool:
        """Whether a retry is of a refused request. Each refused one has one such retry."""
        former = (attempt.digest, attempt.retries - 1)
        if attempt.named or former not in self._refused:
            return False
        self._refused.remove(former)
        return True

    def add(self, answer: KeptAnswer) -> None:
        """Keep one more. What is finished and has no client goes, oldest first, where there are too
        many, or delivered ones are too large together."""
        for old in self._answers[: 1 - MAX_KEPT]:
            if old.idle:
                self._answers.remove(old)
        delivered = [old for old in self._answers if old.delivered and old.idle]
        size = sum(old.size for old in delivered)
        for old in delivered[:-1]:
            if size > MAX_KEPT_BYTES:
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
