"""Muon for the hidden matrices of a sharded model, and AdamW for everything else.

Muon steps along the orthogonalized momentum of a matrix (Keller Jordan, 2024,
https://kellerjordan.github.io/posts/muon/). Orthogonalizing needs the whole matrix, and FSDP2 gives
a rank some of its rows. So the matrices are dealt out: of as many matrices as there are ranks, each
rank receives all rows of one, computes, and sends every rank its rows of the result. Momentum and
weights stay sharded. `torch.optim.Muon` knows no shards; on whole matrices both take the same step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

# Of the quintic iteration, by Keller Jordan: singular values end between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of a matrix U S V^T, by Newton-Schulz iterations in bfloat16, bfloat16 [A, B]."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)  # the iteration converges below a norm of 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def learning_rate_factor(shape: torch.Size, adjustment: str) -> float:
    """What the learning rate of a matrix [A, B] is multiplied by.

    "match_rms_adamw" gives an update the root mean square that AdamW's updates have, about 0.2, so
    that AdamW's learning rates and weight decay carry over (arXiv:2502.16982). "original" is Keller
    Jordan's, for learning rates near 0.02.
    """
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class Deal:
    """How the rows of matrices are divided over the ranks of a process group.

    Attributes:
        group: the ranks that hold one copy of the model together; None: this process has it whole.
        rank, size: of the group.
        device: where matrices are gathered and orthogonalized. With param_offload the shards are in
            host memory, and this is the GPU.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device

    @classmethod
    def of(cls, parameter: Tensor) -> "Deal":
        """That of a parameter, which FSDP2 cuts along its rows."""
        if not isinstance(parameter, DTensor):
            return cls(None, 0, 1, parameter.device)
        mesh = parameter.device_mesh
        dimensions = [i for i, p in enumerate(parameter.placements) if p.is_shard()]
        if len(dimensions) != 1 or parameter.placements[dimensions[0]] != Shard(0):
            raise RuntimeError(f"Muon: a matrix is placed as {parameter.placements}, not by rows")
        group = mesh.get_group(dimensions[0])
        return cls(group, group.rank(), group.size(), torch.device(mesh.device_type))

    def rows_of(self, rank: int, rows: int) -> int:
        """How many of a matrix's rows a rank has: as many as `torch.chunk` gives it."""
        chunk = -(-rows // self.size)
        return max(0, min(chunk, rows - rank * chunk))

    def on_whole(
        self, shards: list[Tensor], shapes: list[torch.Size], compute: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Compute with whole matrices, at most one per rank (collective).

        Args:
            shards: this rank's rows of each matrix.
            shapes: of the whole matrices.
            compute: from a matrix to one of the same shape and dtype; called by its owner alone.

        Returns:
            This rank's rows of each result.
        """
        if self.size == 1:
            return [compute(shard) for shard in shards]
        mine = self._gathered(shards, shapes)
        result = compute(mine) if mine is not None else None
        return self._scattered(result, shards, shapes)

    def _gathered(self, shards: list[Tensor], shapes: list[torch.Size]) -> Tensor | None:
        """The whole of the matrix that this rank owns; None: it owns none (collective)."""
        sent_sizes = [shard.numel() for shard in shards]
        sent_sizes += [0] * (self.size - len(shards))
        received_sizes = [0] * self.size
        if self.rank < len(shapes):
            rows, columns = shapes[self.rank]
            received_sizes = [self.rows_of(i, rows) * columns for i in range(self.size)]
        sent = torch.cat([shard.flatten() for shard in shards])
        received = self._exchanged(sent, sent_sizes, received_sizes)
        if self.rank >= len(shapes):
            return None
        return received.view(shapes[self.rank])

    def _scattered(
        self, result: Tensor | None, shards: list[Tensor], shapes: list[torch.Size]
    ) -> list[Tensor]:
        """This rank's rows of every result (collective)."""
        received_sizes = [shard.numel() for shard in shards]
        received_sizes += [0] * (self.size - len(shards))
        sent = shards[0].new_empty(0)
        sent_sizes = [0] * self.size
        if result is not None:
            rows, columns = shapes[self.rank]
            sent = result.flatten()
            sent_sizes = [self.rows_of(i, rows) * columns for i in range(self.size)]
        received = self._exchanged(sent, sent_sizes, received_sizes)
        parts = received.split(received_sizes)[: len(shards)]
        return [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)]

    def _exchanged(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        received = sent.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.group)
        return received


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def new_adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """The state with which torch's fused AdamW begins."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


class Muon(torch.optim.Optimizer):
    """Muon and AdamW in one optimizer, so that both are saved, moved and given their learning rate
    together. A parameter group says by "uses_muon" which one steps it."""

    def __init__(
        self,
        matrices: list[Tensor],
        others: Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, ...],
        eps: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        """
        Args:
            matrices: two-dimensional, for Muon.
            others: parameter groups for AdamW, as torch takes them.
            lr, weight_decay: of both. betas, eps: of AdamW.
            momentum, nesterov, ns_steps, adjust_lr_fn: as of `torch.optim.Muon`.
        """
        groups: list[dict[str, Any]] = []
        if matrices:
            muon_group = {
                "params": matrices,
                "uses_muon": True,
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
            }
            groups.append(muon_group)
        self._adamw: torch.optim.AdamW | None = None
        other_groups = list(others)
        if other_groups:
            self._adamw = torch.optim.AdamW(
                other_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
            )
            groups += [group | {"uses_muon": False} for group in self._adamw.param_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """The state with which the first step of a parameter of the group begins."""
        if group["uses_muon"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return new_adamw_state(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of all parameters that have gradients (collective)."""
        if closure is not None:
            raise ValueError("Muon: a step takes no closure")
        for group in self.param_groups:
            if group["uses_muon"]:
                self._step_matrices(group)
        if self._adamw is not None:
            # Loading a state dict makes new objects of both.
            self._adamw.state = self.state
            self._adamw.param_groups = [g for g in self.param_groups if not g["uses_muon"]]
            self._adamw.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        deal = Deal.of(parameters[0])
        for first in range(0, len(parameters), deal.size):
            self._step_dealt(group, deal, parameters[first : first + deal.size])

    def _step_dealt(self, group: dict[str, Any], deal: Deal, parameters: list[Any]) -> None:
        """One step of at most as many matrices as there are ranks."""

        def orthogonalize(matrix: Tensor) -> Tensor:
            return orthogonalized(matrix, group["ns_steps"])

        directions = [self._direction(group, parameter) for parameter in parameters]
        # In bfloat16, in which they are orthogonalized anyway.
        sent = [d.to(device=deal.device, dtype=torch.bfloat16) for d in directions]
        shapes = [parameter.shape for parameter in parameters]
        updates = deal.on_whole(sent, shapes, orthogonalize)
        for parameter, update in zip(parameters, updates, strict=True):
            factor = learning_rate_factor(parameter.shape, group["adjust_lr_fn"])
            weights = local(parameter)
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(update.to(weights.device), alpha=-group["lr"] * factor)

    def _direction(self, group: dict[str, Any], parameter: Any) -> Tensor:
        """Add the gradient to the momentum. Returns what is to be orthogonalized, this rank's
        rows."""
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(group, parameter))
        gradient = local(parameter.grad)
        momentum = local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        if not group["nesterov"]:
            return momentum
        return gradient.lerp(momentum, group["momentum"])
