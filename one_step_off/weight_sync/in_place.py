"""In-place updates: where the bytes of Hugging Face tensors lie inside a vLLM model whose
parameters are used as loaded.

A delta applies to Hugging Face tensors. Without this module the receiver would need a mirror of the
model in that layout. With it, the model itself serves as the mirror: a bucket is read from the
parameters, the delta is applied and the checksum compared there, and the bucket is written back.
Only the model's own `load_weights` knows which part goes where (names, fused qkv, stacked experts),
so one call of it is recorded, with its writes held back.

Not every model can do this. Refused, because they need a mirror: layers packed for CPU kernels,
quantized or reordered ones, and tensor parallelism, where a worker holds only its part. After
writing, attention layers that derive something from weights must be processed again, as vLLM's
reload does (`process_weights_after_loading`).
"""

import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from one_step_off.weight_sync.bucket_plan import BucketPlan, Parts, checksum
from one_step_off.weight_sync.mirror import Mirror

NAN_BYTE = 0xFF
"""A floating-point number of these bytes is NaN."""


class NotInPlace(RuntimeError):
    """The model's parameters do not hold the tensors as they were sent. The model is unchanged."""


class InPlaceBucket:
    """The mapping of one bucket into the model: parts of parameters, and the parts of tensors that
    they hold.

    `parameter_parts[i]` and `tensor_parts[i]` are views of the same shape.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        """Find where `tensors` lie in the model, which must hold a completely loaded version and
        stays unchanged.

        The parts hold as many numbers as the tensors, and no two overlap in the parameters. The
        tensors are left as NaN, which no model holds. So after `read` the caller sees by checksum
        whether every number was in a part, and whether parameters were reordered after loading. It
        cannot see that while all numbers of a tensor are equal, as in a fresh norm; the canary can,
        later.

        Args:
            model: a vLLM model.
            tensors: Hugging Face name -> view into the caller's buffer, with the shape and dtype
                that `load_weights` takes; the values do not matter.

        Raises:
            NotInPlace: any of this does not hold.
        """
        _refuse_packed_layers(model)
        recorded = _record_load(model, tensors)
        self.parameter_parts = [parameter_part for parameter_part, _ in recorded]
        self.tensor_parts = [tensor_part for _, tensor_part in recorded]
        self._check_parts(tensors)
        for tensor in tensors.values():
            tensor.view(-1).view(torch.uint8).fill_(NAN_BYTE)

    def read(self) -> None:
        """Copy the parameters into the buffer."""
        torch._foreach_copy_(self.tensor_parts, self.parameter_parts)

    def write(self) -> None:
        """Copy the buffer into the parameters."""
        torch._foreach_copy_(self.parameter_parts, self.tensor_parts)

    def _check_parts(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises NotInPlace: two parts overlap, or they are not all of the tensors."""
        spans = []
        for part in self.parameter_parts:
            spans.append((part.data_ptr(), part.data_ptr() + part.nbytes))
        spans.sort()
        if any(start < end for (_, end), (start, _) in itertools.pairwise(spans)):
            raise NotInPlace("two parts share memory in the parameters")
        numbers_found = sum(part.numel() for part in self.tensor_parts)
        numbers_sent = sum(tensor.numel() for tensor in tensors.values())
        if numbers_found != numbers_sent:
            raise NotInPlace(
                "the parameters hold other amounts of numbers than were sent: only a part, "
                "or some twice"
            )


class InPlaceModel(Mirror):
    """The model's own parameters, used instead of a mirror.

    It needs one buffer as large as the largest bucket, on the model's device, for all buckets.
    """

    def __init__(
        self,
        plan: BucketPlan,
        join_buffer: torch.Tensor,
        checksums: torch.Tensor,
        model: torch.nn.Module,
    ) -> None:
        """Find every bucket in the model.

        Args:
            plan: of both ends.
            join_buffer: uint8 [plan.join_bytes], where tensors with several slots are joined; on
                the model's device.
            checksums: int64 [senders, buckets, 2], of what the model must hold.
            model: a vLLM model.

        Raises:
            NotInPlace: the model does not hold what was sent, as it was sent.
        """
        self.plan = plan
        self.join_buffer = join_buffer
        self.device = join_buffer.device
        bucket_buffer = torch.zeros(
            plan.largest_bucket_bytes, dtype=torch.uint8, device=self.device
        )
        self.buckets = [bucket_buffer] * len(plan.buckets)
        self.mappings: list[InPlaceBucket] = []
        for index, bucket in enumerate(plan.buckets):
            if bucket.completes_tensors:
                self._map_buckets(range(len(self.mappings), index + 1), checksums, model)

    def parts(self, index: int) -> Parts:
        """As `Mirror.parts`, read from the model into the buffer. A tensor in strips is read with
        its first strip."""
        continues_tensor = index > 0 and not self.plan.buckets[index - 1].completes_tensors
        if not continues_tensor:
            self.mappings[index].read()
        parts = super().parts(index)
        self.plan.buckets[index].unjoin(parts, self.join_buffer)
        return parts

    def write(self, index: int) -> None:
        """Write the bucket that `update` has made into the model. A tensor in strips is written
        with its last strip."""
        bucket = self.plan.buckets[index]
        bucket.join(super().parts(index), self.join_buffer)
        if bucket.completes_tensors:
            self.mappings[index].write()

    def _map_buckets(self, indices: range, checksums: torch.Tensor, model: torch.nn.Module) -> None:
        """Find one bucket in the model, or all buckets with the strips of one tensor. Raises
        NotInPlace."""
        last = indices[-1]
        tensors = {}
        for name, tensor, _ in self.plan.buckets[last].tensors(
            super().parts(last), self.join_buffer
        ):
            tensors[name] = tensor
        mapping = InPlaceBucket(model, tensors)
        self.mappings += [mapping] * len(indices)
        for index in indices:
            for sender, part in self.parts(index).items():
                if not torch.equal(checksum(part), checksums[sender, index]):
                    raise NotInPlace("the parameters hold other bytes than were sent")


def _refuse_packed_layers(model: torch.nn.Module) -> None:
    """Raises NotInPlace: a linear layer works on a packed copy of its weight.

    Such a kernel is a closure over the copy; a CPU kernel that works on the parameter itself closes
    over nothing.
    """
    for name, module in model.named_modules():
        kernel = getattr(module, "cpu_linear", None)
        if getattr(kernel, "__closure__", None):
            raise NotInPlace(f"{name} is packed for its CPU kernel")


def _record_load(
    model: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The copies (parameter part, tensor part) that `model.load_weights(tensors)` would make.
    Raises NotInPlace."""
    recorder = _LoadRecorder(model, tensors)
    addresses_before = _addresses(model)
    try:
        with recorder:
            model.load_weights(list(tensors.items()))
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise NotInPlace(f"the model does not load as it is: {cause}") from error
    if _addresses(model) != addresses_before:
        raise RuntimeError("load_weights replaced parameters; the model cannot be used any more")
    return recorder.copies


def _stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers that hold any number, by name."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if tensor.numel()}


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _stored_tensors(model).items()}


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _LoadRecorder(TorchDispatchMode):
    """Holds back all writes to the model's parameters, and records those that copy from
    `tensors`."""

    def __init__(self, model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.parameter_names: dict[int, str] = {}  # by the address of their storage
        for name, tensor in _stored_tensors(model).items():
            self.parameter_names[_storage_address(tensor)] = name
        self.source_addresses = {_storage_address(tensor) for tensor in tensors.values()}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written_tensors(func, args, kwargs)
        written_names = []
        for tensor in written:
            if _storage_address(tensor) in self.parameter_names:
                written_names.append(self.parameter_names[_storage_address(tensor)])
        if not written_names:
            return func(*args, **kwargs)
        name = written_names[0]
        target = written[0]
        if self._is_copy_from_source(func, args):
            self._record(name, target, args[1])
        elif not _changes_nothing(func, args, target):
            raise NotInPlace(
                f"loading {name} writes something else than a part of what was sent ({func})"
            )
        return target

    def _is_copy_from_source(self, func: Any, args: tuple) -> bool:
        if func is not torch.ops.aten.copy_.default:
            return False
        return _storage_address(args[1]) in self.source_addresses

    def _record(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy into parameter `name`. Raises NotInPlace: the parameter cannot give back what
        was copied."""
        if target.shape != source.shape or not target.is_contiguous():
            raise NotInPlace(f"{name} does not hold a part of what was sent in one piece")
        keeps_values = torch.promote_types(target.dtype, source.dtype) == target.dtype
        if target.device != source.device or not keeps_values:
            raise NotInPlace(
                f"{name} holds {target.dtype} on {target.device}, "
                f"and {source.dtype} on {source.device} is sent"
            )
        self.copies.append((target.detach(), source.detach()))


def _written_tensors(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that an operation of torch writes, by its schema."""
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    values |= kwargs
    written_values = []
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written_values.append(values.get(argument.name))
    leaves = tree_leaves(written_values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel()]


def _changes_nothing(func: Any, args: tuple, target: torch.Tensor) -> bool:
    """Whether an operation fills `target` with the number that it already holds, as padding is
    filled again."""
    if func is torch.ops.aten.fill_.Scalar:
        number = args[1]
    elif func is torch.ops.aten.zero_.default:
        number = 0
    else:
        return False
    return not bool((target != number).any())
