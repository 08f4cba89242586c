"""Real senders and receivers of the weight stream over gloo or shared memory, each on a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.sender import WeightSender
from one_step_off.weight_sync.transports.collective import Collective
from one_step_off.weight_sync.transports.transport import Transport
from one_step_off.weight_sync.weight_piece import WeightPiece

CPU = torch.device("cpu")
HOST = "127.0.0.1"
JOIN_TIMEOUT_S = 30.0
SHAPES = {"embed": (13, 3), "scalar": (), "w": (4, 4, 2), "tiny": (1,), "last": (5,)}

Weights = dict[str, torch.Tensor]
Job = Callable[[], Any]


def row_pieces(
    shapes: dict[str, tuple], senders: int, dtype: str = "float32"
) -> list[list[WeightPiece]]:
    """Rows of each tensor cut into contiguous shares, as FSDP does: the last ones may be empty."""
    pieces: list[list[WeightPiece]] = [[] for _ in range(senders)]
    for name, shape in shapes.items():
        rows = shape[0] if shape else 1
        rows_per_sender = -(-rows // senders)
        for sender in range(senders):
            start = min(rows, sender * rows_per_sender)
            stop = min(rows, start + rows_per_sender)
            if stop > start:
                pieces[sender].append(WeightPiece(name, dtype, shape, start, stop))
    return pieces


def random_weights(shapes: dict[str, tuple], dtype: str = "float32") -> Weights:
    torch_dtype = getattr(torch, dtype)
    return {name: torch.randn(shape).to(torch_dtype) for name, shape in shapes.items()}


def perturb(weights: Weights, share: float = 0.02) -> None:
    """Move a share of bf16 weights to a neighboring value, as an optimizer step does."""
    for tensor in weights.values():
        words = tensor.view(torch.int16)
        step = torch.randint(-2, 3, words.shape, dtype=torch.int16)
        words += torch.where(torch.rand(words.shape) < share, step, torch.zeros_like(step))


def assert_received(received: list[Weights], sent: Weights) -> None:
    """Every receiver has the same tensors, bit by bit."""
    for weights in received:
        assert weights.keys() == sent.keys()
        for name, tensor in sent.items():
            assert torch.equal(weights[name], tensor), name


def assert_no_errors(results: list[Any]) -> None:
    assert not [result for result in results if isinstance(result, Exception)]


def run_together(jobs: list[Job]) -> list[Any]:
    """What the jobs return or raise, each on a thread of its own; None: it has not ended."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int, job: Job) -> None:
        try:
            results[index] = job()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index, job), daemon=True)
        for index, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
    return results


class WeightStream:
    """Senders with a share of the rows each, and receivers, connected."""

    def __init__(
        self,
        shapes: dict[str, tuple],
        senders: int,
        receivers: int,
        bucket_bytes: int = 64,
        timeout_s: float = 10.0,
        dtype: str = "float32",
        same_device: list[list[int]] | None = None,
        new_transport: Callable[[], Transport] = Collective,
    ) -> None:
        self.timeout_s = timeout_s
        self.new_transport = new_transport
        self.pieces = row_pieces(shapes, senders, dtype)
        self.plan = BucketPlan.build(self.pieces, bucket_bytes)
        self.senders = [
            WeightSender(self.plan, index, CPU, HOST, timeout_s, new_transport())
            for index in range(senders)
        ]
        self.receivers = [self.new_receiver(index) for index in range(receivers)]
        self.connect(1, same_device)

    def new_receiver(self, index: int) -> WeightReceiver:
        return WeightReceiver(self.plan, index, CPU, HOST, self.timeout_s, self.new_transport())

    def connect(self, epoch: int, same_device: list[list[int]] | None = None) -> None:
        """Create the groups of an epoch."""
        results = run_together(self.connect_jobs(epoch, same_device))
        assert results == [None] * len(results), results

    def connect_jobs(self, epoch: int, same_device: list[list[int]] | None = None) -> list[Job]:
        """One call per sender, then one per receiver."""
        count = len(self.receivers)
        neighbors = same_device or [[] for _ in self.senders]
        addresses = [sender.address for sender in self.senders]
        jobs: list[Job] = []
        for sender, near_receivers in zip(self.senders, neighbors, strict=True):
            jobs.append(lambda s=sender, n=near_receivers: s.connect(epoch, count, n))
        for receiver in self.receivers:
            jobs.append(lambda r=receiver: r.connect(epoch, addresses, count, neighbors))
        return jobs

    def sync(
        self,
        weights: Weights,
        version: int,
        expected_version: int | None = None,
        change_jobs: Callable[[list[Job]], Any] | None = None,
        wants_full: bool = False,
    ) -> tuple[list[Any], list[Weights]]:
        """One sync: what senders and then receivers return or raise, and what each received.

        Args:
            weights: of the model.
            version: that is sent.
            expected_version: by the receivers; None: the same.
            change_jobs: changes the list of calls, of the senders and then of the receivers.
            wants_full: as `WeightSender.send`.
        """
        if expected_version is None:
            expected_version = version
        received: list[Weights] = [{} for _ in self.receivers]
        jobs: list[Job] = []
        for index, sender in enumerate(self.senders):
            rows = self.rows(weights, index)
            jobs.append(lambda s=sender, r=rows: s.send(r, version, wants_full=wants_full))
        for receiver, target in zip(self.receivers, received, strict=True):
            load = copy_into(target)
            jobs.append(lambda r=receiver, load=load: r.receive(load, expected_version))
        if change_jobs:
            change_jobs(jobs)
        return run_together(jobs), received

    def rows(self, weights: Weights, sender: int) -> Iterator[torch.Tensor]:
        """The data of a sender's pieces."""
        for piece in self.pieces[sender]:
            tensor = weights[piece.name]
            yield tensor[piece.start : piece.stop] if piece.shape else tensor


def copy_into(target: Weights) -> Callable[[list[tuple[str, torch.Tensor]]], None]:
    """A `load` that keeps copies."""

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            target[name] = tensor.clone()

    return load
