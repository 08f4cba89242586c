"""The episodes of one replica: their keys, which ones are open, and their newest answers.

An episode's key is "ose-REPLICA-RANDOM". Its last characters are a signature. So the gateway
refuses a forged key without asking a replica, and a replica that was restarted can answer a key of
its predecessor otherwise than a forged one. The signature opens nothing: a request needs the key of
an open episode. A second kind of key, the service key, is for agents that ask for work.
"""

import asyncio
import base64
import hashlib
import hmac
import itertools
import re
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_loop.episode import Episode
from agent_loop.trajectory import Generate, Generated, Limits
from one_step_off.data.samples import Prompt
from one_step_off.endpoint.http_messages import Answer, episode_over, replica_gone, unknown_key

SERVICE_PREFIX = "ose-fleet-"
RANDOM_BYTES = 18
SIGNATURE_BYTES = 6
_EPISODE_KEY = re.compile(r"ose-(0|[1-9][0-9]{0,5})-([A-Za-z0-9_-]{24})([A-Za-z0-9_-]{8})")
MAX_CACHED = 8

MAX_CACHED_BYTES = 1 << 18
"""Bytes of an episode's delivered answers, without the newest."""

MAX_REFUSED = 1024
"""Refused requests of an episode that are remembered."""

MAX_DIGITS = 9  # of a number of retries; Python refuses to read very long ones
COUNTED_RETRIES = "x-stainless-retry-count"

MAX_CLOSED = 1 << 14
"""Closed episodes whose reason is remembered."""

REASONS = {
    "turns": "agent.max_turns is reached",
    "time": "agent.timeout_s is over",
    "engine": "the engine failed",
    "attempt": "the run has returned to its last checkpoint",
    "ended": "it has ended",
}


def make_service_key() -> str:
    """A new key for `GET /v1/episodes/next`."""
    return SERVICE_PREFIX + secrets.token_urlsafe(24)


class EpisodeKeys:
    """Makes and checks the keys of a run's episodes. What it signs with comes from the service key,
    so that a restarted process, or attempt, knows the keys of its predecessor."""

    def __init__(self, service_key: str) -> None:
        self.service_key = service_key
        self._secret = hashlib.sha256(b"episode keys of " + service_key.encode()).digest()

    def make(self, replica_index: int) -> str:
        """A new key of an episode on that replica."""
        random = secrets.token_urlsafe(RANDOM_BYTES)
        return f"ose-{replica_index}-{random}{self._signature(str(replica_index), random)}"

    def replica_index(self, key: str) -> int | None:
        """The replica of a key that `make` made; None: it is another text."""
        match = _EPISODE_KEY.fullmatch(key)
        if match is None:
            return None
        index, random, signature = match.groups()
        if not hmac.compare_digest(signature, self._signature(index, random)):
            return None
        return int(index)

    def is_service_key(self, key: str) -> bool:
        """Whether this is the service key of the run."""
        return hmac.compare_digest(key.encode(errors="replace"), self.service_key.encode())

    def _signature(self, index: str, random: str) -> str:
        digest = hmac.digest(self._secret, f"{index}-{random}".encode(), "sha256")
        return base64.urlsafe_b64encode(digest[:SIGNATURE_BYTES]).decode()


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
class CachedAnswer:
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
    """The newest answers of one episode, oldest first, for clients that repeat a request.

    A client that repeats a request because it has not received the answer gets the answer that was
    made for it. So nothing is sampled twice, and the policy is trained on what the agent has seen.
    A client that asks the same again gets another answer, and so does one that repeats a request
    that was refused: no answer was made for it, and those of equal requests belong to others.
    """

    def __init__(self) -> None:
        self._answers: list[CachedAnswer] = []
        self._refused: deque[tuple[bytes, int]] = deque(maxlen=MAX_REFUSED)

    def take(self, attempt: Attempt) -> CachedAnswer | None:
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

    def find(self, number: str) -> CachedAnswer | None:
        """The delivered answer of this number; None: it is cached no longer."""
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

    def add(self, answer: CachedAnswer) -> None:
        """Keep one more. What is finished and has no client goes, oldest first, where there are too
        many, or delivered ones are too large together."""
        for old in self._answers[: 1 - MAX_CACHED]:
            if old.idle:
                self._answers.remove(old)
        delivered = [old for old in self._answers if old.delivered and old.idle]
        size = sum(old.size for old in delivered)
        for old in delivered[:-1]:
            if size > MAX_CACHED_BYTES:
                size -= old.size
                self._answers.remove(old)
        self._answers.append(answer)

    @property
    def in_progress(self) -> list[CachedAnswer]:
        """Those that are being made."""
        return [answer for answer in self._answers if not answer.making.done()]

    @property
    def unfinished(self) -> list[CachedAnswer]:
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


class OpenEpisode:
    """An episode whose key is valid, and its requests.

    Attributes:
        answers: its newest answers.
        taken: set when an agent that asked for work has received it.
        ended: set when it takes no more requests.
        asked: whether an agent has sent a request for the policy.
        engine_error: what the engine raised.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.answers = IdempotencyCache()
        self.taken = asyncio.Event()
        self.ended = asyncio.Event()
        self.asked = False
        self.engine_error: Exception | None = None
        self._generate = episode.generate
        episode.generate = self._watched_generate

    async def _watched_generate(
        self, ids: np.ndarray, max_tokens: int, stop: Sequence[str] = ()
    ) -> Generated:
        try:
            return await self._generate(ids, max_tokens, tuple(stop))
        except Exception as error:
            self.engine_error = error
            raise

    def end(self, reason: str) -> None:
        """Take no more requests, and cancel those in progress."""
        self.episode.end(reason)
        self.ended.set()
        for answer in self.answers.in_progress:
            answer.making.cancel()


class OpenEpisodes:
    """All episodes of one replica."""

    def __init__(self, keys: EpisodeKeys, replica_index: int) -> None:
        self.keys = keys
        self.replica_index = replica_index
        self._open: dict[str, OpenEpisode] = {}
        self._reasons: dict[str, str] = {}  # key of a closed episode -> why it is over
        self._has_forgotten = False

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, prompt: Prompt, generate: Generate, limits: Limits, max_sequence: int
    ) -> OpenEpisode:
        """A new episode, whose key is valid from now on."""
        key = self.keys.make(self.replica_index)
        episode = OpenEpisode(Episode(key, prompt, generate, limits, max_sequence))
        self._open[key] = episode
        return episode

    def close(self, key: str, reason: str) -> None:
        """End an episode. Its key is refused from now on; the reason is remembered for a while."""
        open_episode = self._open.pop(key, None)
        if open_episode is None:
            return
        open_episode.end(reason)
        self._reasons[key] = open_episode.episode.over
        if len(self._reasons) > MAX_CLOSED:
            del self._reasons[next(iter(self._reasons))]
            self._has_forgotten = True

    def close_all(self, reason: str) -> list[str]:
        """End all episodes, as `close`. Returns their keys."""
        keys = list(self._open)
        for key in keys:
            self.close(key, reason)
        return keys

    def of(self, episode: Episode) -> OpenEpisode:
        """The record of an episode. Raises KeyError: it is closed."""
        return self._open[episode.key]

    def find(self, key: str, path: str) -> OpenEpisode:
        """The open episode of a key.

        Raises:
            Refused: 401: there was none. 410: it is over.
        """
        open_episode = self._open.get(key)
        if open_episode is not None:
            return open_episode
        if key in self._reasons:
            reason = self._reasons[key]
            message = f"this episode is over: {REASONS.get(reason, reason)}"
            raise episode_over(path, reason, message)
        if self.keys.replica_index(key) != self.replica_index:
            raise unknown_key(path, bool(key))
        if self._has_forgotten:
            raise episode_over(path, "ended", "this episode ended long ago")
        raise replica_gone(path)
