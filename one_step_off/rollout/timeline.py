"""When the replicas worked: spans for the run's timeline, and when they last finished."""

import time
from collections import defaultdict

from one_step_off.cluster.remote_calls import now
from one_step_off.cluster.run_events import RunEvents, Span


class ReplicaTimeline:
    """When each replica worked on each generation call."""

    def __init__(self) -> None:
        # Purpose of a call -> replica -> when its work began and ended.
        self.working: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
        self.drawn_until: dict[tuple[int, str], float] = {}  # by replica and kind of work

    def record(self, purpose: str, replica_index: int, begin: float) -> None:
        """A replica has finished a part of a call, on which it worked from `begin` until now."""
        earlier_begin, _ = self.working[purpose].get(replica_index, (begin, begin))
        self.working[purpose][replica_index] = (min(begin, earlier_begin), time.time())

    def finish(self, purpose: str, evaluation: bool) -> list[Span]:
        """The spans of a call that has ended. Where several calls ran at once, each is drawn from
        the end of the one before, because spans of one lane must not overlap."""
        kind = "evaluate" if evaluation else "generate"
        lane_suffix = " evaluation" if evaluation else ""
        spans = []
        for i, (begin, end) in self.working.pop(purpose, {}).items():
            begin = max(begin, self.drawn_until.get((i, kind), 0.0))
            if begin < end:
                self.drawn_until[i, kind] = end
                spans.append((f"rollout {i}{lane_suffix}", kind, step_in(purpose), begin, end))
        return spans


def step_in(purpose: str) -> str:
    """The step or version that a call is for: "step 3, instead of 2 prompts" -> "3", "evaluation of
    v4" -> "4"."""
    last_word = purpose.partition(",")[0].split()[-1]
    return last_word.strip("v")


class RolloutActivity:
    """When all replicas together last finished something, for the driver's timeline and its idle
    times."""

    def __init__(self, events: RunEvents) -> None:
        self.events = events
        self.idle_since_s = 0.0  # in seconds of `now`; 0: nothing was finished yet
        self.drawn_until: dict[str, float] = {}  # by kind of work

    def prompt_finished(self) -> None:
        """The samples of a prompt are complete."""
        self.idle_since_s = now()

    def call_finished(self, kind: str, step: int, seconds: float) -> float:
        """A call has ended that took `seconds`, without its wait for the devices. Where several
        calls ran at once, each is drawn from the end of the one before. Returns the seconds that
        are drawn."""
        end = now()
        begin = max(end - seconds, self.drawn_until.get(kind, 0.0))
        self.idle_since_s = end
        self.drawn_until[kind] = end
        self.events.span("rollout", kind, step, begin, end)
        return end - begin

    def sync_ended(self) -> None:
        """What was idle before the sync is counted. Where nothing begins after it, the next sync
        must not count the same seconds again."""
        if self.idle_since_s:
            self.idle_since_s = now()

    def idle_seconds(self) -> float:
        """Seconds since the last end, or since the last sync if that is later; 0 where nothing was
        finished yet."""
        return now() - self.idle_since_s if self.idle_since_s else 0.0
