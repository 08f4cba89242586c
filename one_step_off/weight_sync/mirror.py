"""A copy of the model in host memory, to which deltas are applied."""

import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts


class Mirror:
    """What a receiver got from each sender last, bucket by bucket, in the checkpoint's layout.

    Deltas are applied here, where no engine has packed or fused anything.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        """`device`: the receiver's, on which `update` returns the buckets."""
        self.plan = plan
        self.device = device
        # One block per bucket and not per part: large blocks go back to the system when they are
        # freed.
        self.buckets = [torch.zeros(bucket.nbytes, dtype=torch.uint8) for bucket in plan.buckets]

    def pin(self) -> None:
        """Pin the memory, so that a GPU reads it faster.

        Not in the constructor: pinned memory would not go back to the system if the mirror turns
        out not to be needed.
        """
        if self.device.type == "cuda" and not all(bucket.is_pinned() for bucket in self.buckets):
            self.buckets = [bucket.pin_memory() for bucket in self.buckets]

    def parts(self, index: int) -> Parts:
        """Each sender's part of bucket `index` as it was sent last; the caller may change it."""
        return self.plan.buckets[index].split_parts(self.buckets[index])

    def update(self, index: int, messages: Parts) -> Parts:
        """Apply the messages to bucket `index`.

        Args:
            index: of the bucket.
            messages: sender -> its whole part, or a delta payload, which is always shorter; uint8.

        Returns:
            Sender -> its whole new part: uint8, on the receiver's device.
        """
        parts = self.parts(index)
        for sender, message in messages.items():
            part = parts[sender]
            if len(message) == len(part):
                part.copy_(message)
            else:
                delta.apply(message.to(part.device), part)
        return {sender: part.to(self.device, non_blocking=True) for sender, part in parts.items()}
