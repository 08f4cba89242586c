"""Which weights are where: one table, which the pipeline and the weight sync read and write."""

from dataclasses import dataclass, field

from one_step_off.data.samples import PolicyVersion
from one_step_off.weight_sync.sync_calls import LogProbs


@dataclass
class VersionTable:
    """The versions of one attempt of the trainer. A version counts trainer steps.

    Checked at each change, once a pipeline has begun:

        synced <= sent <= trained   nothing is sent that the trainer has not made
        none of them gets smaller   within an attempt a version names one state of the weights

    Which replicas hold `sent` is not repeated here: a replica is HEALTHY only while it does
    (`one_step_off/rollout/health.py`). Each token carries its version and attempt by itself.

    Attributes:
        attempt: of the trainer. It tells apart equal versions of several attempts.
        trained: the trainer's version; None: no pipeline counts its steps, as in a check that syncs
            by itself.
        sent: (attempt, version) that the replicas must hold: it was sent last, or is being sent.
            None: nothing yet.
        canary: the trainer's log-probs of the canary at `sent`.
        synced: the version of the last sync of all replicas that ended well; -1: there was none.
    """

    attempt: int = 0
    trained: int | None = None
    sent: PolicyVersion | None = None
    canary: LogProbs = field(default_factory=list)
    synced: int = -1

    def begin(self, attempt: int, trained: int) -> None:
        """A pipeline begins, with a trainer at this version. Nothing was sent in this attempt."""
        self.attempt = attempt
        self.trained = trained
        self.sent = None
        self.synced = -1

    def step_ended(self, step: int) -> None:
        """The trainer has made the version after `step`."""
        if step != self.trained:
            raise AssertionError(f"{self._text()}: step {step} ended")
        self.trained = step + 1

    def send(self, stamp: PolicyVersion, canary: LogProbs) -> None:
        """A sync begins that brings `stamp` to the replicas."""
        if self.trained is not None:
            attempt, version = stamp
            last = -1 if self.sent is None else self.sent[1]
            if attempt != self.attempt or not last <= version <= self.trained:
                raise AssertionError(f"{self._text()}: v{version} of attempt {attempt} is sent")
        self.sent = stamp
        self.canary = canary

    def sync_ended(self, version: int) -> None:
        """All active replicas have received `version`."""
        if self.sent is None or version != self.sent[1]:
            raise AssertionError(f"{self._text()}: a sync of v{version} ended")
        self.synced = version

    def _text(self) -> str:
        sent = "nothing" if self.sent is None else f"v{self.sent[1]}"
        return (
            f"attempt {self.attempt}: trained v{self.trained}, sent {sent}, synced v{self.synced}"
        )
