"""`TrainGroup`: the ranks of one role as a few awaitable methods, each with a time limit."""

import asyncio
import operator
import os
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from one_step_off.cluster.remote_calls import OnSpan, call_all, now
from one_step_off.config.schema import Config
from one_step_off.data.samples import NOT_STORED, TRAINER_FIELDS, Batch, PackedArrays, PackedSamples

T = TypeVar("T")


class TrainGroup:
    """All ranks of one role. Their methods are collective: every call goes to every rank. Roles in one pool share
    `turn`, so that they take turns on its devices; in different pools they run at once."""

    def __init__(
        self, role: str, ranks: list[Any], cfg: Config, turn: Any = None, host: str = ""
    ) -> None:
        """`host`: the address at which the ranks meet; empty: rank 0's address on the network."""
        self.role, self.ranks, self.cfg, self.host = role, ranks, cfg, host
        self.turn = turn or asyncio.Lock()
        self.limit = cfg.trainer.step_timeout_s
        self.colocated: Any = None  # the replicas in the same pool
        self.on_span: OnSpan = lambda *_: None

    async def setup(self) -> None:
        """Form the role's process group and load the model on every rank."""
        limit = self.cfg.trainer.start_timeout_s
        (address,) = await call_all(limit, self.role, self.ranks[:1], "free_address", self.host)
        await call_all(limit, self.role, self.ranks, "setup", *address)

    async def _in_turn(self, step: int, method: str, *args: Any) -> list[Any]:
        """Every rank's answer, once it is this role's turn; when it began and ended is told to `on_span`."""
        async with self.turn:
            if self.colocated is not None:
                await self.colocated.sleep()
            begin = now()
            answers = await call_all(
                self.limit, f"step {step}, {self.role}", self.ranks, method, *args
            )
            self.on_span(self.role, method, step, begin, now())
        return answers

    async def update(self, batch: Batch, learn: bool = True) -> dict[str, float]:
        """One training step on all ranks; returns its metrics. Without `learn` it counts and nothing changes."""
        own = self.cfg.trainer  # the workers may stand in another directory
        profile = (
            os.path.abspath(f"{own.output_dir}/profile") if batch.step == own.profile_step else ""
        )
        return (await self._in_turn(batch.step, "update", put_batch(batch), learn, profile))[0]

    async def log_prob(self, batch: Batch) -> list[np.ndarray]:
        """Log-probs (nats) of all response tokens at the current weights: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "log_prob", put_batch(batch)))

    async def log_prob_and_squares(self, batch: Batch) -> list[np.ndarray]:
        """As `log_prob`, float32 [R, 2]: beside each log-prob the sum of all the vocabulary's squared probabilities."""
        return merged(await self._in_turn(batch.step, "log_prob_and_squares", put_batch(batch)))

    async def values(self, batch: Batch) -> list[np.ndarray]:
        """The critic's values of the states before all response tokens: one float32 [R] per sample."""
        return merged(await self._in_turn(batch.step, "values", put_batch(batch)))

    def score(self, sequences: list[np.ndarray]) -> Awaitable[list[np.ndarray]]:
        """The trainer's half of the canary: log-probs of every token but the first, at temperature 1, by the weights as
        they are now, whatever is called before this is awaited."""
        answers = call_all(self.limit, f"canary, {self.role}", self.ranks, "score", sequences)

        async def whole() -> list[np.ndarray]:
            return next(filter(None, await answers))

        return asyncio.ensure_future(whole())

    async def save_state(self, folder: str) -> Awaitable[Any]:
        """Let all ranks copy their part of a checkpoint; when the answer has been awaited it is written."""
        await call_all(self.limit, f"checkpoint, {self.role}", self.ranks, "save_state", folder)
        return call_all(self.limit, f"checkpoint, {self.role}", self.ranks, "saved")

    async def load_state(self, folder: str) -> None:
        """Go to a checkpoint's state; after `setup`."""
        await call_all(self.limit, f"checkpoint, {self.role}", self.ranks, "load_state", folder)

    async def save_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint."""
        await call_all(self.limit, self.role, self.ranks, "save_hf", path)


def merged(parts: list[dict[int, T]]) -> list[T]:
    """The ranks' shares, put back in order."""
    merged = {i: answer for part in parts for i, answer in part.items()}
    return [merged[i] for i in range(len(merged))]


def put_batch(batch: Batch) -> Any:
    """Into Ray's object store once, however many roles and ranks read it; without what none of them reads."""
    import ray

    now, (before, stored) = (
        [batch.samples, *(getattr(batch, name) for name in TRAINER_FIELDS)],
        batch.stored,
    )
    if not all(map(operator.is_, now, before)):
        columns = {
            name: v and PackedArrays(v) for name, v in zip(TRAINER_FIELDS, now[1:], strict=True)
        }
        samples = PackedSamples(batch.samples)
        samples.leave = "response", "extra"
        stored = ray.put(
            replace(
                batch, samples=samples, prob_squares=None, dropped=[], stored=NOT_STORED, **columns
            )
        )
        batch.stored = now, stored
    return stored
