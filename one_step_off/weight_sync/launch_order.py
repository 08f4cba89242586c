"""In which order the two ends of the weight stream announce, launch and finish their broadcasts.

On a GPU a broadcast is a kernel that spins until it runs at all members. All streams of a process
share a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32). What is launched later into the
same queue waits behind the spinning kernel, also if it belongs to another stream. (torch takes
streams from a pool of 32 in turn, so two groups may even share a stream.) So a broadcast may hold
up a collective of the trainer on one rank, and a collective another broadcast on another rank:
together they wait for ever.

Two rules exclude this, for any number of queues, one included:

1. A sender launches a broadcast only when all receivers have announced that they are ready for it.
2. On a GPU, a receiver announces a broadcast only when it has finished every one before.

3. Senders and receivers take the broadcasts of a bucket by turns (`Routes.turn`). In one turn no
   two broadcasts share a sender or a receiver, so all of them may be under way at once.

So the receivers of a broadcast that spins have launched it or are about to, and nothing before it
in their queues waits for anybody. It ends, unless it is queued behind a collective of its own rank.
That collective waits for other ranks, where it may be queued behind other broadcasts that spin, and
these are in the same position: the one that no collective is queued before ends, and so on. Without
the first rule senders spin whose receivers wait for other senders. Without the second a receiver's
broadcast waits in a queue behind the broadcast of another sender. Without the third a sender waits
for a receiver that waits for another sender, and so on in a circle.

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


def send_steps(streams: Iterable[int], is_ordered: bool) -> Iterator[tuple[Step, int]]:
    """A sender's steps for the next message of each of these streams: (step, stream).

    Args:
        streams: to sets of receivers, in the order of turns.
        is_ordered: by the rules; otherwise all are under way side by side.
    """
    return _steps(Step.AWAIT_RECEIVERS, streams, is_ordered)


def receive_steps(streams: Iterable[int], is_ordered: bool) -> Iterator[tuple[Step, int]]:
    """A receiver's steps, as `send_steps`. `streams`: of several senders."""
    return _steps(Step.ANNOUNCE, streams, is_ordered)


def _steps(get_ready: Step, streams: Iterable[int], is_ordered: bool) -> Iterator[tuple[Step, int]]:
    if is_ordered:
        for stream in streams:
            yield get_ready, stream
            yield Step.LAUNCH, stream
            yield Step.FINISH, stream
        return
    together = list(streams)
    for step in (Step.LAUNCH, Step.FINISH):
        for stream in together:
            yield step, stream
