"""Where the bytes of Hugging Face tensors lie inside a vLLM model whose parameters are used as they were loaded.

A delta applies to HF tensors. Without this the receiver would have to mirror the model in HF layout; with it, the mirror is
the model itself: `read` gathers a bucket out of the parameters, the delta is applied and the checksum compared there, and
`write` puts it back. Which part goes where only the model's own `load_weights` knows (names, fused qkv, stacked experts), so
that is watched once, with its writes held back.

Not every model can do this: layers packed for CPU kernels, quantised or reordered ones, and tensor parallelism, where a
worker holds only its part, are refused; what they need is a mirror. After writing, attention layers that derive
something from weights must be processed again, as vLLM's reload does (`process_weights_after_loading`).
"""

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts, checksum
from one_step_off.weight_sync.mirror import Mirror


class NotInPlace(RuntimeError):
    """The model's parameters do not hold these tensors as they were sent. The model is as it was."""


class InPlaceBucket:
    """One bucket's way into the model, by parts of parameters (`live`) and of HF tensors (`held`) of one shape each."""

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        """Find where `tensors` live: HF name -> view into the caller's buffer, of the shape and dtype that `load_weights`
        takes; its bytes do not matter. The model must hold a completely loaded version, and stays as it is.

        The parts are as many numbers as the tensors, and no two overlap in the parameters. The tensors are left as NaN,
        which no model holds: after a `read` the caller sees, by bytes or checksum, whether every number was in a part,
        and whether parameters were reordered after loading. It cannot see that while all of a tensor's numbers are equal,
        as a fresh norm's; the canary can, later.

        Raises:
            NotInPlace: anything of this does not hold.
        """
        # A CPU kernel that works on the parameter itself closes over nothing.
        kernels = (
            (name, getattr(module, "cpu_linear", None)) for name, module in model.named_modules()
        )
        if packed := next(
            (name for name, kernel in kernels if getattr(kernel, "__closure__", None)), None
        ):
            raise NotInPlace(f"{packed} is packed for its CPU kernel")
        watch = _Watch(model, tensors)
        before = {name: tensor.data_ptr() for name, tensor in _parameters(model).items()}
        try:
            with watch:
                model.load_weights(list(tensors.items()))
        except Exception as e:
            raise NotInPlace(f"the model does not load as it is: {type(e).__name__}: {e}") from e
        if before != {name: tensor.data_ptr() for name, tensor in _parameters(model).items()}:
            raise RuntimeError(
                "load_weights replaced parameters; the model cannot be used any more"
            )
        self.live, self.held = [live for live, _ in watch.pairs], [held for _, held in watch.pairs]
        spans = sorted((live.data_ptr(), live.data_ptr() + live.nbytes) for live in self.live)
        if any(start < end for (_, end), (start, _) in itertools.pairwise(spans)):
            raise NotInPlace("two parts share memory in the parameters")
        if sum(held.numel() for held in self.held) != sum(
            tensor.numel() for tensor in tensors.values()
        ):
            raise NotInPlace(
                "the parameters hold other amounts of numbers than were sent: only a part, or some twice"
            )
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)

    def read(self) -> None:
        """Parameters -> buffer."""
        torch._foreach_copy_(self.held, self.live)

    def write(self) -> None:
        """Buffer -> parameters."""
        torch._foreach_copy_(self.live, self.held)


class InPlaceModel(Mirror):
    """The model's own parameters in place of a mirror: what `distributed_util.Receiver` keeps as `live`. It needs a
    buffer as large as the largest bucket, on the model's device."""

    def __init__(
        self, plan: BucketPlan, room: torch.Tensor, sums: torch.Tensor, model: torch.nn.Module
    ) -> None:
        """`room` (uint8 [plan.room]): where tensors of several slots are joined. `sums` (int64 [senders, buckets, 2]): the
        checksums of what the `model` must hold. Raises NotInPlace."""
        self.plan, self.room, self.device = plan, room, room.device
        self.flats = [torch.zeros(plan.largest, dtype=torch.uint8, device=room.device)] * len(
            plan.buckets
        )
        self.live: list[InPlaceBucket] = []
        for i, bucket in enumerate(plan.buckets):
            if bucket.ends:  # with the strips before it
                strips = range(len(self.live), i + 1)
                tensors = {name: tensor for name, tensor, _ in bucket.whole(super().held(i), room)}
                self.live += [InPlaceBucket(model, tensors)] * len(strips)
                if not all(
                    torch.equal(checksum(p), sums[s, k])
                    for k in strips
                    for s, p in self.held(k).items()
                ):
                    raise NotInPlace("the parameters hold other bytes than were sent")

    def held(self, i: int) -> Parts:
        """As `Mirror.held`, in the buffer, out of the model; a tensor in strips is read with its first one."""
        if not i or self.plan.buckets[i - 1].ends:
            self.live[i].read()
        parts = super().held(i)
        self.plan.buckets[i].split(parts, self.room)
        return parts

    def write(self, i: int) -> None:
        """The bucket that `update` has made, into the model; a tensor in strips goes with its last one."""
        self.plan.buckets[i].join(super().held(i), self.room)
        if self.plan.buckets[i].ends:
            self.live[i].write()


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers that hold anything, by name."""
    return {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel()
    }


def _home(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Watch(TorchDispatchMode):
    """Holds back all writes to the model's parameters, and notes in `pairs` those that copy out of `tensors`."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.homes = {_home(tensor): name for name, tensor in _parameters(model).items()}
        self.sources = {_home(tensor) for tensor in tensors.values()}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {
            **{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)},
            **kwargs,
        }
        names = [
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        written = [
            x
            for x in tree_leaves([given.get(n) for n in names])
            if isinstance(x, torch.Tensor) and x.numel()
        ]
        hit = next((self.homes[_home(x)] for x in written if _home(x) in self.homes), None)
        if hit is None:
            return func(*args, **kwargs)
        live, fills = (
            written[0],
            func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default),
        )
        if func is torch.ops.aten.copy_.default and _home(args[1]) in self.sources:
            self._note(hit, live, args[1])
        elif not fills or bool((live != [*args, 0][1]).any()):
            raise NotInPlace(
                f"loading {hit} writes something else than a part of what was sent ({func})"
            )
        return live

    def _note(self, name: str, live: torch.Tensor, held: torch.Tensor) -> None:
        if live.shape != held.shape or not live.is_contiguous():
            raise NotInPlace(f"{name} does not hold a part of what was sent in one piece")
        if live.device != held.device or torch.promote_types(live.dtype, held.dtype) != live.dtype:
            raise NotInPlace(
                f"{name} holds {live.dtype} on {live.device}, and {held.dtype} on {held.device} is sent"
            )
        self.pairs.append((live.detach(), held.detach()))
