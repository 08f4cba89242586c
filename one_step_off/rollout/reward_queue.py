"""The queue of finished trajectories that wait for a reward worker."""

import asyncio
import math
from collections import deque
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from one_step_off.config.user_code import LOG_FOLDER, quote_response
from one_step_off.rewards.reward import RewardError, RewardItem, Score

RESTART_POLL_S = 0.2  # between two questions whether a reward worker is back


class RewardQueue:
    """Spreads trajectories over the reward workers. While all workers are busy, the next calls fill
    up."""

    def __init__(self, scorers: list[Any], first: int = 0) -> None:
        """
        Args:
            scorers: the reward workers, as Ray actors of `Scorer`.
            first: the worker to begin with; another one for each replica, so that they do not all
                begin with the same.
        """
        self.worker_count = len(scorers)
        self.idle_workers: deque[tuple[int, Any]] = deque(enumerate(scorers))
        self.idle_workers.rotate(-first)
        self.waiting: deque[tuple[RewardItem, asyncio.Future]] = deque()
        self.tasks: set[asyncio.Task] = set()  # asyncio itself keeps no task alive

    async def score(self, item: RewardItem) -> Score | RewardError:
        """The answer of `Scorer.score_batch` for one trajectory."""
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((item, future))
        if self.idle_workers:
            number, scorer = self.idle_workers.popleft()
            task = asyncio.create_task(self._drain(number, scorer))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return await future

    def drop_waiting(self) -> None:
        """Score nothing of what waits: its callers have gone."""
        for _, future in self.waiting:
            future.cancel()
        self.waiting.clear()

    async def _drain(self, number: int, scorer: Any) -> None:
        """Let one worker score until nothing waits."""
        while self.waiting:
            # A share of what waits: the other workers come back soon and want their part.
            size = math.ceil(len(self.waiting) / self.worker_count)
            batch = [self.waiting.popleft() for _ in range(size)]
            try:
                scores = await self._score_batch(scorer, [item for item, _ in batch])
            except ActorDiedError:
                self._fail(
                    batch,
                    RuntimeError(f"reward worker {number}: its process died and did not come back"),
                )
            except Exception as e:
                self._fail(batch, e)
            else:
                for score, (_, future) in zip(scores, batch, strict=True):
                    if not future.done():  # else its trajectory was cancelled
                        future.set_result(score)
        self.idle_workers.append((number, scorer))

    @staticmethod
    def _fail(batch: list[tuple[RewardItem, asyncio.Future]], error: Exception) -> None:
        for _, future in batch:
            if not future.done():  # else its trajectory was cancelled
                future.set_exception(error)

    async def _score_batch(
        self, scorer: Any, items: list[RewardItem], killed_before: bool = False
    ) -> list[Score | RewardError]:
        """The scores of these items.

        When the worker's process dies, Ray restarts it, and each item is scored alone. Only an item
        that kills the process twice is to blame: the first time it may have been another replica's.

        Args:
            killed_before: the process has died of this one item alone.
        """
        scores = await self._ask(scorer, items)
        if scores is not None:
            return scores
        # Wait for the new process: the next items would be lost to the same death.
        while await self._ask(scorer, []) is None:
            await asyncio.sleep(RESTART_POLL_S)
        if killed_before:
            return [_killed_twice(items[0])]
        alone = len(items) == 1
        scores = []
        for item in items:
            scores += await self._score_batch(scorer, [item], killed_before=alone)
        return scores

    async def _ask(self, scorer: Any, items: list[RewardItem]) -> list[Score | RewardError] | None:
        """The worker's scores; None: its process has died, and Ray is about to restart it."""
        try:
            return await scorer.score_batch.remote(items)
        except ActorUnavailableError:
            return None


def _killed_twice(item: RewardItem) -> RewardError:
    killed = "killed the process of the reward function, or blocked it in C code, twice"
    output = f"its last output is in {LOG_FOLDER}/ of the run folder"
    return RewardError(f"{item}: {killed}; {output}; {quote_response(item.response)}")
