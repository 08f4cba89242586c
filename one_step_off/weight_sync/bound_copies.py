"""Copies between views that are found once and used in every sync.

Finding a view costs tens of microseconds of Python, a copy of it on a GPU less than one.
"""

from collections.abc import Iterable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A target, and a source of the same shape."""


class BoundCopies:
    """Pairs of views, copied by one call of torch for all that are alike."""

    def __init__(self, pairs: Iterable[Pair], paddings: Iterable[torch.Tensor] = ()) -> None:
        """
        Args:
            pairs: dtypes may differ. No target overlaps another one.
            paddings: views that `write` fills with zeros.
        """
        # One kernel copies many pairs only if they have the same dtypes and no gaps.
        alike: dict[tuple, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in pairs:
            if target.numel():
                is_dense = target.is_contiguous() and source.is_contiguous()
                kind = (target.dtype, source.dtype, source.device, is_dense)
                targets, sources = alike.setdefault(kind, ([], []))
                targets.append(target)
                sources.append(source)
        self.alike = list(alike.values())
        self.paddings = [padding for padding in paddings if padding.numel()]

    @torch.no_grad()
    def write(self) -> None:
        """Sources to targets, and zeros into the paddings."""
        for targets, sources in self.alike:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if self.paddings:
            torch._foreach_zero_(self.paddings)

    @torch.no_grad()
    def read(self) -> None:
        """Targets back to sources."""
        for targets, sources in self.alike:
            torch._foreach_copy_(sources, targets, non_blocking=True)
