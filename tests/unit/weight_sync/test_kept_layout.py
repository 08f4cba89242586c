"""Boxes of tensors, and what a layout learns from a model's own loader, proves, and refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.engines.vllm.load_recording import NotInPlace, any_overlap, block_of_view
from one_step_off.engines.vllm.shard_layout import ShardLayout
from one_step_off.weight_sync.shard_blocks import Block, plain_shards, shards_from_plain

Load = Callable[[torch.Tensor, torch.Tensor], object]


def copy_all(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


class Model(torch.nn.Module):
    """q and k in one parameter, o in its own, and one number. `load` is how q comes in."""

    def __init__(self, load: Load = copy_all, q_rows: int = 4) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        for name, shape in {"qk": (8, 4), "o": (3, 4), "scale": (1,)}.items():
            zeros = torch.zeros(shape)
            self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
        self.load = load
        self.q_rows = q_rows
        record_metadata_for_reloading(self)

    def load_weights(self, weights) -> None:
        targets = {"k": self.qk.data[4:], "o": self.o.data, "scale": self.scale.data.reshape(())}
        for name, tensor in weights:
            if name == "q":
                self.load(self.qk.data[: self.q_rows], tensor)
            elif name in targets:
                targets[name].copy_(tensor)


def random_tensors() -> dict[str, torch.Tensor]:
    rows = {"q": 4, "k": 4, "o": 3, "expert_of_another": 2}
    tensors = {name: torch.randn(count, 4) for name, count in rows.items()}
    return tensors | {"scale": torch.randn(())}


def learn(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> ShardLayout:
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return ShardLayout.learn(model, shapes)


def load_and_note(model: Model, layout: ShardLayout, tensors: dict[str, torch.Tensor]) -> None:
    layout.note_loaded(list(tensors.items()))
    model.load_weights(tensors.items())


def test_learning_takes_no_number_and_changes_none():
    model = Model()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    layout = learn(model, random_tensors())
    for name, (parameter, numbers) in before.items():
        assert getattr(model, name) is parameter
        assert torch.equal(parameter, numbers)
    assert layout.kept["q"] == (Block((0, 0), (4, 4)),)
    assert layout.kept["scale"] == (Block((), ()),)
    assert layout.kept["expert_of_another"] == ()
    assert shards_from_plain(plain_shards(layout.kept)) == layout.kept


def test_a_model_too_large_for_any_memory_is_learned():
    class Large(torch.nn.Module):
        def __init__(self) -> None:
            from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

            super().__init__()
            rows = torch.empty(1 << 20, 1 << 22, device="meta")  # 16 TiB
            self.weight = torch.nn.Parameter(rows, requires_grad=False)
            record_metadata_for_reloading(self)

        def load_weights(self, weights) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor.narrow(0, 1 << 20, 1 << 20).to("cpu"))

    layout = ShardLayout.learn(Large(), {"w": ("float32", (1 << 21, 1 << 22))})
    assert layout.kept["w"] == (Block((1 << 20, 0), (1 << 21, 1 << 22)),)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda target, tensor: target.copy_(tensor * 2), "writes something else"),
        (lambda target, tensor: target.copy_(tensor.t()), "something else than a box"),
        (lambda target, tensor: target.t().copy_(tensor), "no box of it"),
        (lambda target, tensor: target[:2].copy_(tensor[::2]), "something else than a box"),
        (lambda target, tensor: target.copy_(tensor[0]), "in another shape"),
        (lambda target, tensor: target.add_(tensor), "writes something else"),
        (lambda target, tensor: target[:3].copy_(tensor[:3]), "not all of qk is loaded"),
        (lambda target, tensor: None, "not all of qk is loaded"),
        (lambda target, tensor: (target.copy_(tensor), target.copy_(tensor)), "qk overlap"),
        (lambda target, tensor: (target.copy_(tensor), target.fill_(1)), "qk overlap"),
        (lambda target, tensor: tensor.reshape(5, 5), "does not load as it is: RuntimeError"),
        (
            lambda target, tensor: (target[:2].copy_(tensor[:2]), target[2:].copy_(tensor[1:3])),
            "overlapping boxes of q",
        ),
    ],
)
def test_what_is_no_box_is_refused_and_leaves_the_model_as_it_was(load, message):
    model = Model(load)
    before = dict(model.named_parameters())
    with pytest.raises(NotInPlace, match=message):
        learn(model, random_tensors())
    assert all(getattr(model, name) is parameter for name, parameter in before.items())


def test_a_narrower_parameter_is_refused_and_a_wider_one_proved():
    wide = {name: tensor.double() for name, tensor in random_tensors().items()}
    with pytest.raises(NotInPlace, match=r"holds torch.float32, and torch.float64 is sent"):
        learn(Model(), wide)
    narrow = {name: tensor.bfloat16() for name, tensor in random_tensors().items()}
    model = Model()
    layout = learn(model, narrow)
    load_and_note(model, layout, narrow)
    layout.prove()


def swap_q_and_k(layout: ShardLayout) -> None:
    q, k = layout.copies["q"][0], layout.copies["k"][0]
    layout.copies["q"][0] = dataclasses.replace(q, destination=k.destination)
    layout.copies["k"][0] = dataclasses.replace(k, destination=q.destination)


def shift_box(layout: ShardLayout) -> None:
    copy = layout.copies["q"][0]
    shifted = dataclasses.replace(copy.destination, block=Block((1, 0), (5, 4)))
    layout.copies["q"][0] = dataclasses.replace(copy, destination=shifted)


def reorder_parameter(layout: ShardLayout) -> None:
    layout.model.qk.data.copy_(layout.model.qk.flip(0))


def change_one_bit(layout: ShardLayout) -> None:
    layout.model.qk.data.view(torch.int32)[5, 3] ^= 1


@pytest.mark.parametrize("damage", [swap_q_and_k, shift_box, reorder_parameter, change_one_bit])
def test_the_proof_finds_what_is_wrong(damage):
    model, tensors = Model(), random_tensors()
    layout = learn(model, tensors)
    load_and_note(model, layout, tensors)
    layout.prove()
    load_and_note(model, layout, tensors)
    damage(layout)
    with pytest.raises(NotInPlace, match=r"qk does not hold the bytes of [qk]"):
        layout.prove()


def test_the_proof_needs_every_tensor():
    model, tensors = Model(), random_tensors()
    layout = learn(model, tensors)
    load_and_note(model, layout, tensors)
    del layout.proof.noted["k"]
    with pytest.raises(NotInPlace, match="k was not loaded"):
        layout.prove()


def test_a_cell_beyond_what_is_kept_is_refused():
    def load_half(target, tensor):
        target.copy_(tensor[4:])

    tensors = random_tensors() | {"q": torch.randn(8, 4)}
    layout = learn(Model(load_half), tensors)
    assert layout.kept["q"] == (Block((4, 0), (8, 4)),)
    for block in (Block((3, 0), (5, 4)), Block((0, 0), (4, 4))):
        with pytest.raises(NotInPlace, match="is not kept here"):
            layout.bind([("q", block, torch.zeros(block.shape))])
    layout.bind([("q", Block((5, 1), (6, 3)), torch.zeros(1, 2))])


# ----- boxes


boxes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 5)), max_size=4)


@given(boxes)
def test_a_box_is_found_from_its_view_alone(dims):
    shape = tuple(max(size, start + length) for size, start, length in dims)
    block = Block(
        tuple(start for _, start, _ in dims), tuple(start + length for _, start, length in dims)
    )
    tensor = torch.arange(Block.whole(shape).numel).view(shape)
    found = block_of_view(block.slice_of(tensor), shape)
    assert torch.equal(found.slice_of(tensor), block.slice_of(tensor))
    assert found == block
    squeezed = block_of_view(block.slice_of(tensor).squeeze(), shape)
    assert squeezed == block


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t.view(-1),
        lambda t: t.view(-1)[3:9],
        lambda t: t[::2],
        lambda t: t.diagonal(),
        lambda t: t[:1].expand(4, 6),
    ],
)
def test_views_that_are_no_boxes_are_told_apart(view):
    assert block_of_view(view(torch.zeros(4, 6)), (4, 6)) is None


def test_common_parts_and_overlaps():
    left, right = Block((0, 0), (4, 3)), Block((2, 2), (6, 6))
    assert left.intersect(right) == Block((2, 2), (4, 3))
    assert left.intersect(Block((4, 0), (5, 3))) is None
    assert left.contains(Block((1, 1), (2, 2)))
    assert not left.contains(right)
    assert any_overlap([left, Block((4, 0), (5, 3)), right])
    assert not any_overlap([Block((2, 3), (6, 6)), left, Block((4, 0), (5, 3))])
    assert any_overlap([Block((), ())] * 2)
