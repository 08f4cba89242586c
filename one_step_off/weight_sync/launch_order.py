"""In which order the two ends of the weight stream announce, launch and finish their broadcasts.

On a GPU a broadcast is a kernel that spins until it runs at all members. All streams of a process
share a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32). What is launched later into the
same queue waits behind the spinning kernel, also if it belongs to another stream. (torch takes
streams from a pool of 32 in turn, so two groups may even share a stream.) So a broadcast may hold
up a collective of the trainer on one rank, and a collective another broadcast on another rank:
together they wait for ever.

Two rules exclude this, for any number of queues, one included:

1. A sender launches a broadcast only when all receivers have announced that they are ready for it.
2. On a GPU, a receiver announces a broadcast only when it has finished every one before. All
   receivers take the broadcasts in the same order.

So at any time there is at most one broadcast that all receivers have announced and not all have
finished, and only its sender may have a kernel that spins. The receivers of that broadcast have
launched it or are about to, and nothing before it in their queues waits for anybody. If it is
queued behind a collective of its own rank, then that collective waits only for ranks on which
nothing spins. Without the first rule senders spin whose receivers wait for other senders. Without
the second a receiver's broadcast waits in a queue behind the broadcast of another sender.

gloo has no queues. So on CPUs nothing is announced, and the parts of a bucket arrive from all
senders side by side.

Sender and receiver take their steps from here, and so does the model that proves the rules
(tests/unit/weight_sync/test_launch_order.py).
"""

from collections.abc import Iterable, Iterator
from enum import Enum


class Step(Enum):
    """What the host of one member does for one broadcast."""

    ANNOUNCE = "announce"
    """A receiver tells the sender's store that it is ready."""
    AWAIT_RECEIVERS = "await_receivers"
    """The sender waits until all receivers have announced."""
    LAUNCH = "launch"
    """Start the broadcast at this member."""
    FINISH = "finish"
    """Wait until it has completed at this member."""


IS_ORDERED = {"cuda": True, "cpu": False}
"""By device type: whether the rules hold. All members of a group must agree; tests set it for
CPUs."""


def send_steps(is_ordered: bool) -> tuple[Step, ...]:
    """A sender's steps for one message."""
    if is_ordered:
        return (Step.AWAIT_RECEIVERS, Step.LAUNCH, Step.FINISH)
    return (Step.LAUNCH, Step.FINISH)


def receive_steps(senders: Iterable[int], is_ordered: bool) -> Iterator[tuple[Step, int]]:
    """A receiver's steps for the next message of each of these senders: (step, sender).

    Args:
        senders: in an order that is the same at all receivers.
        is_ordered: by the rules; otherwise all are under way side by side.
    """
    if is_ordered:
        for sender in senders:
            yield Step.ANNOUNCE, sender
            yield Step.LAUNCH, sender
            yield Step.FINISH, sender
        return
    together = list(senders)
    for step in (Step.LAUNCH, Step.FINISH):
        for sender in together:
            yield step, sender
