"""The episodes of one replica by their keys: the open ones, and why the closed ones are closed."""

import asyncio
from collections.abc import Sequence

import numpy as np

from agent_loop.episode import Episode
from agent_loop.trajectory import Generate, Generated, Limits
from one_step_off.data.samples import Prompt
from one_step_off.endpoint.idempotency_cache import IdempotencyCache
from one_step_off.endpoint.keys import EpisodeKeys
from one_step_off.endpoint.refusals import episode_over, replica_gone, unknown_key

MAX_CLOSED = 1 << 14
"""Closed episodes whose reason is remembered."""

REASONS = {
    "turns": "agent.max_turns is reached",
    "time": "agent.timeout_s is over",
    "engine": "the engine failed",
    "attempt": "the run has returned to its last checkpoint",
    "ended": "it has ended",
}


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
