"""`BatchShare`: which part of a batch a rank computes. Without torch, for the driver."""

from dataclasses import dataclass


@dataclass
class BatchShare:
    """The part of a batch that a rank computes, and how it is cut into micro-batches.

    Attributes:
        index: which share, 0 .. count - 1. Ranks that hold one model together have the same share.
        count: into how many shares a batch is divided: the data-parallel size.
        reports: whether this rank returns the results of its share; one of the ranks with the same
            share does.
        width_multiple: the width of a padded micro-batch is a multiple of it, in tokens.
        micro_batch_multiple: the number of micro-batches of a share is a multiple of it.
    """

    index: int
    count: int
    reports: bool = True
    width_multiple: int = 1
    micro_batch_multiple: int = 1
