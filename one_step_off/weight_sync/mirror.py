"""A copy of the model in host memory, to which deltas are applied."""

import torch

from one_step_off.weight_sync import delta
from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts


class Mirror:
    """What a receiver got from each sender last, bucket by bucket, in the checkpoint's layout: a copy of the model in
    host memory. What changed is applied here, where no engine has packed or fused anything."""

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        # A block for each bucket, not each part: large ones go back to the system when they are given up.
        self.flats = [torch.zeros(sum(b.nbytes), dtype=torch.uint8) for b in plan.buckets]

    def pin(self) -> None:
        """Make it faster to read for a GPU. Not at once: pinned memory would not be given back where a mirror turns out not
        to be needed."""
        for i, flat in enumerate(self.flats) if self.device.type == "cuda" else ():
            self.flats[i] = flat.pin_memory()

    def held(self, i: int) -> Parts:
        """Each sender's part of bucket `i` as it was sent last, to be changed."""
        return self.plan.buckets[i].parts(self.flats[i])

    def update(self, i: int, messages: Parts) -> Parts:
        """Each sender's part of bucket `i` after its message: uint8, on the receiver's device."""
        parts = self.held(i)
        for sender, message in messages.items():
            if len(message) == len(parts[sender]):  # a payload is shorter
                parts[sender].copy_(message)
            else:
                delta.apply(message.to(parts[sender].device), parts[sender])
        return {sender: part.to(self.device, non_blocking=True) for sender, part in parts.items()}
