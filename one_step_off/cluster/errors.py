"""Failures of processes, phases and weight syncs, which end a step, an attempt or the run."""


class PhaseTimeout(RuntimeError):
    """A phase took longer than its limit."""


class RoleError(RuntimeError):
    """A process of a role failed; says which, in what, and why."""


class ProcessDied(RoleError):
    """It is gone."""


class TrainerDied(ProcessDied):
    """It was a trainer's: the attempt is over, whoever has noticed."""


class SyncError(RuntimeError):
    """A weight sync that is not complete and exact. The replica that received it must not be used as it is."""


GIVEN_UP = "given up, since "  # in the error of a process that did not fail by itself
