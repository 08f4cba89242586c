"""What a receiver got of a sync before the model may change."""

from dataclasses import dataclass

import torch

from one_step_off.weight_sync.bucket_plan import Parts


@dataclass
class ReceivedAhead:
    """The first buckets of a sync, in memory of their own."""

    version: int
    has_deltas: bool
    messages_of_bucket: list[Parts]


class SpareMemory:
    """The memory for it, which stays allocated from one sync to the next."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is allocated yet."""
        self.flat = torch.zeros(0, dtype=torch.uint8, device=device)

    def take(self, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        """Memory of these sizes, uint8 [size] each, side by side."""
        total = sum(sizes)
        if len(self.flat) < total:
            device = self.flat.device
            self.flat = torch.zeros(0, dtype=torch.uint8)  # freed before more is taken
            self.flat = torch.zeros(total, dtype=torch.uint8, device=device)
        return self.flat[:total].split(sizes)


def in_own_memory(messages: Parts, sizes: dict[int, int], own: torch.Tensor) -> Parts:
    """The messages of a bucket, copied into `own` where they are not there yet: those of senders on
    this device lie in the sender's buffer.

    Args:
        messages: stream -> message.
        sizes: stream -> bytes of its full message.
        own: uint8 [sum of sizes].
    """
    owned = {}
    for (stream, message), place in zip(
        messages.items(), own.split(list(sizes.values())), strict=True
    ):
        target = place[: len(message)]
        if message.data_ptr() != target.data_ptr():
            target.copy_(message)
        owned[stream] = target
    return owned
