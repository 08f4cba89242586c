"""Which replicas may be used: a state machine for each, in pure code.

    STALE ----> HEALTHY <----> SUSPECT          STALE: it runs, and holds no weights that were verified
      ^  \\         |              |             HEALTHY: its weights have passed the canary; it may be given work
      |   \\        v              |             SUSPECT: it has not said for a while that it is there; no new work
    DEAD <-+--------+<------------+             DEAD: it died, or hangs; only a new process leads on, by way of STALE

A sync takes a healthy replica back to STALE until its new weights are verified too.
"""

from enum import Enum

ReplicaState = Enum("ReplicaState", "STALE HEALTHY SUSPECT DEAD")


class ReplicaHealth:
    """One replica's. All times are seconds of one clock."""

    def __init__(self, silent_s: float, stuck_s: float) -> None:
        """`silent_s`: without a heartbeat for so long it is dead; `stuck_s`: so long it may work and finish nothing."""
        self.silent_s, self.stuck_s = silent_s, stuck_s
        self.state, self.heard, self.moved, self.done = ReplicaState.STALE, 0.0, 0.0, -1

    def transition_to(self, state: ReplicaState) -> None:
        """Go to another state. Raises ValueError: there is no such way, as from DEAD to HEALTHY."""
        revived = self.state is ReplicaState.DEAD and state is ReplicaState.HEALTHY
        if revived or (state is ReplicaState.SUSPECT and self.state is not ReplicaState.HEALTHY):
            raise ValueError(f"a {self.state.name} replica never becomes {state.name}")
        self.state = state

    def heartbeat(self, now: float, done: int, under_way: int) -> None:
        """It answered: so many requests has it finished, and so many does it work on."""
        if done != self.done or not under_way:
            self.moved = now
        self.heard, self.done = now, done
        if self.state is ReplicaState.SUSPECT:
            self.transition_to(ReplicaState.HEALTHY)

    def begin(self, now: float) -> None:
        """From here on its silence counts."""
        self.heard = self.moved = now

    def missed(self) -> None:
        """It did not answer when it was asked."""
        if self.state is ReplicaState.HEALTHY:
            self.transition_to(ReplicaState.SUSPECT)

    def fault(self, now: float) -> str:
        """Why it must be given up; "" if it need not."""
        if now - self.heard > self.silent_s:
            return f"no heartbeat in {self.silent_s:g} s"
        if now - self.moved > self.stuck_s:
            return f"it works, and has finished nothing in {self.stuck_s:g} s"
        return ""
