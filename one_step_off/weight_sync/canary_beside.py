"""The canary beside the first prompts of a new version (`weight_sync.canary_overlap`).

After the transfer the replicas generate at once, and score the canary beside that. Nothing that
they return is used before their canary was accepted: the driver holds it back (see
`ReplicaSupervisor.wait_until_verified`). The canary is asked for before any prompt is sent, so it
is the first request of each engine, but for those that a sync has paused.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from one_step_off.cluster.remote_calls import name_failures, not_alive, observed
from one_step_off.config.schema import Config
from one_step_off.data.samples import PolicyVersion
from one_step_off.weight_sync.participants import LogProbs
from one_step_off.weight_sync.sync_calls import SyncCall


@dataclass
class CanaryBeside:
    """The canary of one sync, under way at the replicas.

    Attributes:
        stamp: of the sync.
        trainer_log_probs: what the replicas must agree with.
        calls: by replica number; already started.
        begin: by `time.perf_counter`.
    """

    stamp: PolicyVersion
    trainer_log_probs: LogProbs
    calls: dict[int, SyncCall]
    begin: float = field(default_factory=time.perf_counter)

    @property
    def actors(self) -> dict[int, Any]:
        """The Ray actors, by replica number."""
        return {number: call.actor for number, call in self.calls.items()}

    async def answers(
        self, what: str, limit_s: float
    ) -> tuple[dict[int, LogProbs], dict[int, str]]:
        """Wait for all replicas. One that is gone or hangs breaks nothing for the others: the
        transfer was complete, and each replica is judged by its own canary.

        Args:
            what: names the canary in errors.
            limit_s: for all of them together.

        Returns:
            Replica number -> log-probs; and number -> reason of those that are gone or hang.

        Raises:
            RoleError: a replica failed, and its process lives.
        """
        tasks: dict[int, asyncio.Future[LogProbs]] = {}
        for number, call in self.calls.items():
            answer = name_failures(f"{what}, {call.who}", call.answer)
            tasks[number] = observed(answer)
        try:
            await asyncio.wait(tasks.values(), timeout=limit_s)
            scores: dict[int, LogProbs] = {}
            errors: dict[int, BaseException] = {}
            reasons: dict[int, str] = {}
            for number, task in tasks.items():
                error = task.exception() if task.done() else None
                if not task.done():
                    reasons[number] = f"{what}: no answer in {limit_s:g} s"
                elif error is not None:
                    errors[number] = error
                else:
                    scores[number] = task.result()
            return scores, reasons | await self._reasons_of_dead(errors)
        finally:
            for task in tasks.values():
                task.cancel()

    async def _reasons_of_dead(self, errors: dict[int, BaseException]) -> dict[int, str]:
        """Number -> reason of the replicas whose processes are gone, of number -> its error. Raises
        the error of one whose process lives."""
        failed = {self.calls[number].who: number for number in errors}
        dead = await not_alive({who: self.calls[number].actor for who, number in failed.items()})
        for who, number in failed.items():
            if who not in dead:
                raise errors[number]
        return {failed[who]: reason for who, reason in dead.items()}


def canary_limit_s(cfg: Config) -> float:
    """Seconds for the replicas to score the canary.

    Requests that continue across a sync stand before it in the engine's queue: a full engine
    scores it when enough of them have ended. So there it has the time in which a busy replica must
    complete a request; after `weight_sync.timeout_s` a replica that is well would be restarted.
    """
    if cfg.weight_sync.in_flight == "wait":
        return cfg.weight_sync.timeout_s
    return max(cfg.weight_sync.timeout_s, cfg.rollout.progress_timeout_s)


def canary_name(stamp: PolicyVersion) -> str:
    """Names the canary of a sync in errors."""
    _, version = stamp
    return f"canary after the sync of version {version}"
