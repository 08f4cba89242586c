"""Failures of processes, phases and weight syncs, which end a step, an attempt or the run.

The run begins another attempt after `ProcessDied` and `PhaseTimeout`, and after `RoleError` and
`SyncError` if a process turns out to be gone or to hang (it may have failed before the error was
noticed). Otherwise the error ends the run. This holds from the first start on.
"""


class PhaseTimeout(RuntimeError):
    """A phase took longer than its limit; the message names the phase and the limit.

    Raised by `with_time_limit` and by the weight sync. The caller does not retry the call, since
    the process may still be busy with it: either the attempt ends, or the process is checked with
    `not_alive` and replaced.
    """


class RoleError(RuntimeError):
    """A process of a role raised an exception; the message names the process, the call and the
    cause.

    Raised by `name_failures`. The process itself still answers, so repeating the call would fail
    alike: the caller lets the error end the run, unless it can do without the process (a replica is
    replaced).
    """


class ProcessDied(RoleError):
    """A process is gone, or its node is.

    Raised by `name_failures` for any process, by a process whose engine was killed while it
    started, and by the weight sync and the replica group when a failed replica cannot be replaced.
    A replica's caller restarts the replica and repeats the call; otherwise the attempt ends and
    another one begins from the latest checkpoint.
    """


class TrainerDied(ProcessDied):
    """A process of the trainer is gone or hangs, so the attempt is over.

    Raised by the weight sync. A separate class, because a replica's restart may be what detects it:
    the replica's caller must not take it for the failure of its replica and try again, but pass it
    on.
    """


class SyncError(RuntimeError):
    """A weight sync that is not complete and exact.

    Raised by both endpoints (wrong plan, version or checksum, a broken peer, a time limit), by the
    canary, and by a trainer's update whose weights never reached the replicas. The caller must not
    use the replica that received it; in a sync of all replicas whose processes are all alive, the
    error ends the run, since the same bytes would be sent again.
    """


class CanaryFailed(SyncError):
    """Engine and trainer gave other log-probs for the same tokens after a sync.

    In a sync of all replicas it ends the run, even where a process turns out to be gone: a restart
    could hide wrong weights. A restarted replica that differs is restarted again, then excluded.
    """


GIVEN_UP = "given up, since "
"""In the SyncError of a process that did not fail by itself: what follows is the failure of another
one."""
