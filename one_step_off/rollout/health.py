"""Which replicas may be used: one state machine per replica, in pure code.

    STALE ----> HEALTHY <----> SUSPECT
      ^  \\         |              |
      |   \\        v              |
    DEAD <-+--------+<------------+
      ^
      |
      v
    LEFT

A weight sync takes a healthy replica back to STALE until its new weights are verified too. A dead
replica never becomes healthy directly: a new process starts as STALE, and only verified weights
make it HEALTHY. A place that a replica has
left may be taken by one that joins, which begins as DEAD until its process has started.

A replica on the trainer's devices (`placement.lend`) is ASLEEP, STALE while it wakes up, and
HEALTHY while it generates; then it sleeps again. Where it fails it is LEFT.
"""

from enum import Enum, auto


class ReplicaState(Enum):
    """What may be asked of a replica."""

    STALE = auto()
    """It runs, but holds no verified weights: it takes part in syncs, and gets no prompts."""
    HEALTHY = auto()
    """It gets prompts: its weights have passed the canary."""
    SUSPECT = auto()
    """It did not answer its last heartbeat: no new prompts."""
    DEAD = auto()
    """Its process died or hangs: it must be restarted."""
    LEFT = auto()
    """It was removed, and nothing is asked of it: the run has one replica less."""
    ASLEEP = auto()
    """The trainer has its device: it takes part in nothing until it is woken up."""


ALLOWED_TRANSITIONS: dict[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.STALE: frozenset(ReplicaState) - {ReplicaState.SUSPECT, ReplicaState.LEFT},
    ReplicaState.HEALTHY: frozenset(ReplicaState) - {ReplicaState.LEFT},
    ReplicaState.SUSPECT: frozenset(ReplicaState) - {ReplicaState.SUSPECT, ReplicaState.LEFT},
    ReplicaState.DEAD: frozenset({ReplicaState.STALE, ReplicaState.DEAD, ReplicaState.LEFT}),
    ReplicaState.LEFT: frozenset({ReplicaState.DEAD}),
    ReplicaState.ASLEEP: frozenset({ReplicaState.STALE, ReplicaState.DEAD}),
}


class ReplicaHealth:
    """The state of one replica over all its restarts, and the times by which it is judged. All
    times are seconds of one clock.

    Attributes:
        failed_syncs: weight syncs of all replicas that it failed in a row.
    """

    def __init__(self, heartbeat_timeout_s: float, progress_timeout_s: float) -> None:
        """
        Args:
            heartbeat_timeout_s: a replica without a heartbeat for longer than this has failed.
            progress_timeout_s: a replica that has requests and finishes none for longer than this
                has failed.
        """
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.progress_timeout_s = progress_timeout_s
        self.state = ReplicaState.STALE
        self.last_heartbeat_s = 0.0
        self.last_progress_s = 0.0
        self.finished_requests = -1
        self.failed_syncs = 0

    def transition_to(self, state: ReplicaState) -> None:
        """Change the state. Raises ValueError: `ALLOWED_TRANSITIONS` has no such transition."""
        if state not in ALLOWED_TRANSITIONS[self.state]:
            raise ValueError(f"a {self.state.name} replica never becomes {state.name}")
        self.state = state

    def heartbeat(self, now_s: float, finished_requests: int, running_requests: int) -> None:
        """Record an answer, with the numbers of requests that the replica has finished and is
        working on."""
        idle = running_requests == 0
        if idle or finished_requests != self.finished_requests:
            self.last_progress_s = now_s
        self.last_heartbeat_s = now_s
        self.finished_requests = finished_requests
        if self.state is ReplicaState.SUSPECT:
            self.transition_to(ReplicaState.HEALTHY)

    def heartbeat_missed(self) -> None:
        """Record that the replica did not answer in time."""
        if self.state is ReplicaState.HEALTHY:
            self.transition_to(ReplicaState.SUSPECT)

    def reset_timeouts(self, now_s: float) -> None:
        """Count both timeouts from now on."""
        self.last_heartbeat_s = now_s
        self.last_progress_s = now_s

    def failure_reason(self, now_s: float) -> str:
        """Why the replica must be given up; "" if it is well."""
        if now_s - self.last_heartbeat_s > self.heartbeat_timeout_s:
            return f"no heartbeat in {self.heartbeat_timeout_s:g} s"
        if now_s - self.last_progress_s > self.progress_timeout_s:
            return f"it has requests, and finished none in {self.progress_timeout_s:g} s"
        return ""
