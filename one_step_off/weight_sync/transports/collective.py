"""Broadcasts in process groups of their own: NCCL on GPUs, gloo on CPUs."""

from one_step_off.distributed_util import DedicatedGroup
from one_step_off.weight_sync.transports.transport import Stream, Transport


class Collective(Transport):
    """One process group per stream; the sender is rank 0."""

    def open_sender(self, stream: Stream) -> DedicatedGroup:
        """See `Transport.open_sender`."""
        return _join(stream, 0)

    def open_receiver(self, stream: Stream, receiver: int) -> DedicatedGroup:
        """See `Transport.open_receiver`."""
        return _join(stream, 1 + stream.receivers.index(receiver))


def _join(stream: Stream, rank: int) -> DedicatedGroup:
    return DedicatedGroup(
        stream.store,
        rank,
        len(stream.receivers) + 1,
        stream.device,
        stream.host,
        stream.timeout_s,
        stream.connect_timeout_s,
        stream.name,
    )
