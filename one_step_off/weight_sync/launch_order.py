"""In which order the two ends of the weight stream announce, launch and finish their broadcasts.

On a GPU a broadcast is a kernel that spins until it runs at all members. All streams of a process
share a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32). What is launched later into the
same queue waits behind the spinning kernel, also if it belongs to another stream. So a broadcast
may hold up a collective of the trainer on one rank, and a collective another broadcast on another
rank: together they wait for ever.

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

gloo has no queues, so on CPUs the parts of a bucket arrive from all senders side by side.

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


SEND_STEPS = (Step.AWAIT_RECEIVERS, Step.LAUNCH, Step.FINISH)
"""A sender's steps for one message."""

RECEIVE_STEPS = (Step.ANNOUNCE, Step.LAUNCH, Step.FINISH)
"""A receiver's steps for one message of one sender."""

ONE_AT_A_TIME = {"cuda": True, "cpu": False}
"""By device type: whether a receiver finishes one sender's broadcast before it announces the
next."""


def receive_steps(senders: Iterable[int], one_at_a_time: bool) -> Iterator[tuple[Step, int]]:
    """The steps of a receiver for the next message of each of these senders: (step, sender).

    Args:
        senders: in an order that is the same at all receivers.
        one_at_a_time: finish each before the next; otherwise all are under way side by side.
    """
    rounds = [[sender] for sender in senders] if one_at_a_time else [list(senders)]
    for senders_of_round in rounds:
        for step in RECEIVE_STEPS:
            for sender in senders_of_round:
                yield step, sender
