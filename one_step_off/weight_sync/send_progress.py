"""How far a sender has come with one sync."""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import torch

from one_step_off.weight_sync.routes import Message, Routes

Messages = dict[int, torch.Tensor]
"""Set of receivers -> what goes to it."""


class SendKind(Enum):
    """What one sync sends."""

    FULL = "full"
    """All bytes of the model."""
    DELTA = "delta"
    """What changed since the last sync of the same epoch."""
    RESEND = "resend"
    """All bytes of the version that was sent last, from the sender's copy in host memory."""


@dataclass
class BucketOnWire:
    """A bucket that the wire's thread is sending."""

    index: int
    seconds: Future[float]
    """The time on the wire, when it has reached every receiver."""


@dataclass
class SendProgress:
    """One sync of one sender."""

    version: int
    kind: SendKind
    routes: Routes
    sharded_only: bool
    tensors: Iterator[torch.Tensor]
    """The data of the pieces that are still to be packed."""
    messages_of_bucket: list[list[Message]]
    buffers: "itertools.cycle[tuple[torch.Tensor, torch.Tensor]]"
    """For a part and for what is cut out of it."""
    checksums: Messages
    """Of each set of receivers int64 [buckets, 2]."""
