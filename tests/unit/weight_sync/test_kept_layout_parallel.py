"""What a worker keeps of real vLLM models under tensor and expert parallelism, and writing it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from one_step_off.weight_sync.shard_blocks import (
    Block,
    ShardBlocks,
    plain_shards,
    shards_from_plain,
)
from tests.unit.weight_sync.parallel_models import Case, Worker, run_workers

Weights = dict[str, torch.Tensor]
PLAIN, PACKED = False, True


def shapes_of(tensors: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def random_cells(kept: ShardBlocks, rng: random.Random) -> list[tuple[str, Block]]:
    """All that is kept, cut at random borders."""
    cells = []
    for name, blocks in kept.items():
        for block in blocks:
            borders = []
            for start, stop in zip(block.start, block.stop, strict=True):
                inner = {rng.randint(start, stop) for _ in range(rng.randint(0, 2))}
                borders.append(itertools.pairwise(sorted({start, stop, *inner})))
            for spans in itertools.product(*map(list, borders)):
                start, stop = zip(*spans, strict=True) if spans else ((), ())
                cells.append((name, Block(start, stop)))
    rng.shuffle(cells)
    return cells


def messages_of(cells: list[tuple[str, Block]], tensors: Weights) -> list:
    """The cells with their numbers, each in a part of one flat buffer."""
    filled = []
    for name, block in cells:
        flat = torch.zeros(block.numel, dtype=tensors[name].dtype)
        view = flat.view(block.shape)
        view.copy_(block.slice_of(tensors[name]))
        filled.append((name, block, view))
    return filled


def write_in_buckets(layout, tensors: Weights, rng: random.Random) -> None:
    """One sync: all that is kept, in several messages."""
    cells = random_cells(layout.kept, rng)
    layout.start()
    for first in range(0, len(cells), 40):
        messages = messages_of(cells[first : first + 40], tensors)
        layout.bind(messages).write()
        for _, _, view in messages:
            view.zero_()  # the buffers are used again
    layout.finish(torch.bfloat16)


def assert_same_model(model: torch.nn.Module, expected: torch.nn.Module) -> int:
    """The same bits in all parameters, and out of all packed kernels. Returns how many there
    are."""
    parameters = dict(expected.named_parameters())
    assert len(parameters) > 10
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
    packed = 0
    for (name, layer), (_, other) in zip(
        model.named_modules(), expected.named_modules(), strict=True
    ):
        if not getattr(layer, "cpu_linear", None):
            continue
        packed += 1
        weight = layer.weight
        width = (
            layer.embedding_dim
            if weight.numel()
            else getattr(layer, "input_size_per_partition", layer.input_size)
        )
        probe = torch.randn(5, width, generator=torch.Generator().manual_seed(3)).to(weight.dtype)
        outputs = [one.cpu_linear(probe, one.weight, None) for one in (layer, other)]
        assert outputs[0].abs().max() > 0
        assert torch.equal(*outputs), name
    return packed


def input_width(layer: torch.nn.Module) -> int:
    """Of a linear layer; a router is not split."""
    return getattr(layer, "input_size_per_partition", layer.input_size)


def learn_prove_and_write(worker: Worker, packed: bool) -> dict[str, list]:
    """The whole life of a layout in one rank. Returns what is kept, as it crosses borders."""
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    first, second, third = (worker.case.tensors(seed) for seed in range(3))
    model = worker.model(first, packed)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    layout = ShardLayout.learn(model, shapes_of(first))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), f"learning has changed {name}"
    if packed:
        worker.reload(model, second, layout.note_loaded)
    else:
        layout.note_loaded(list(second.items()))
        model.load_weights(list(second.items()))
    layout.prove()
    assert bool(layout.packed) == packed
    for seed, newer in enumerate((third, first)):
        write_in_buckets(layout, newer, random.Random(seed))
        packed_kernels = assert_same_model(model, worker.model(newer, packed))
        assert bool(packed_kernels) == packed
    if not packed:
        assert_reads_back(layout, first)
    return plain_shards(layout.kept)


def assert_reads_back(layout, tensors: Weights) -> None:
    cells = messages_of(random_cells(layout.kept, random.Random(5)), tensors)
    for _, _, view in cells:
        view.zero_()
    layout.bind(cells).read()
    for name, block, view in cells:
        assert torch.equal(view, block.slice_of(tensors[name])), name


def assert_damage_is_found(worker: Worker) -> int:
    """Wrong layouts of packed layers, which nothing but the proof can find. Returns how many."""
    from one_step_off.engines.vllm.load_recording import NotInPlace
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    tensors = worker.case.tensors(0)
    model = worker.model(tensors, PACKED)
    attention = "model.layers.1.self_attn.{}_proj.weight"
    expert = "model.layers.1.mlp.experts.2.{}_proj.weight"
    pairs = [
        [attention.format("k"), attention.format("v")],
        [expert.format("gate"), expert.format("up")],
        ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"],
        ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"],
    ]
    for one, other in pairs:
        layout = ShardLayout.learn(model, shapes_of(tensors))
        copies = layout.copies
        swapped = copies[one][0].destination, copies[other][0].destination
        for name, destination in zip((other, one), swapped, strict=True):
            copies[name][0] = dataclasses.replace(copies[name][0], destination=destination)
        worker.reload(model, tensors, layout.note_loaded)
        with pytest.raises(NotInPlace, match="does not hold the bytes"):
            layout.prove()
    layout = ShardLayout.learn(model, shapes_of(tensors))
    worker.reload(model, tensors, layout.note_loaded)
    layout.prove()
    return len(pairs)


def test_the_proof_finds_wrong_layouts_of_packed_layers():
    assert run_workers(Case("qwen3_moe", 1), assert_damage_is_found) == [4]


def leave_a_layer_unfinished(worker: Worker) -> str:
    """A sync that breaks off in a packed layer, and the next one. Returns the error."""
    from one_step_off.engines.vllm.load_recording import NotInPlace
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    first, second = worker.case.tensors(0), worker.case.tensors(1)
    model = worker.model(first, PACKED)
    layout = ShardLayout.learn(model, shapes_of(first))
    cells = random_cells(layout.kept, random.Random(1))
    with pytest.raises(RuntimeError, match="outside of a sync"):
        layout.bind(messages_of(cells[::2], second)).write()
    layout.start()
    layout.bind(messages_of(cells[::2], second)).write()
    with pytest.raises(NotInPlace) as caught:
        layout.finish(torch.bfloat16)
    write_in_buckets(layout, second, random.Random(2))
    assert_same_model(model, worker.model(second, PACKED))
    with pytest.raises(NotInPlace, match="cannot be read"):
        layout.bind(messages_of(cells, second)).read()

    layout = ShardLayout.learn(model, shapes_of(first), keep_plain=True)
    worker.reload(model, first, layout.note_loaded)
    layout.prove()
    assert_reads_back(layout, first)
    write_in_buckets(layout, second, random.Random(3))
    assert_reads_back(layout, second)
    assert_same_model(model, worker.model(second, PACKED))
    return str(caught.value)


def test_broken_off_syncs_and_plain_copies_of_packed_layers():
    (error,) = run_workers(Case("qwen2", 1, tied=True), leave_a_layer_unfinished)
    assert "is packed, and only a part of it has come" in error


def pack_the_head_early(worker: Worker) -> list[bool]:
    """Whether a tied head computes with the new weights: after half of them, after all of them and
    before the sync ends, and after a sync that brought only half."""
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    first, second = worker.case.tensors(0), worker.case.tensors(1)
    model = worker.model(first, PACKED)
    layout = ShardLayout.learn(model, shapes_of(first))
    worker.reload(model, first, layout.note_loaded)
    layout.prove()
    head = model.lm_head
    expected = worker.model(second, PACKED).lm_head
    probe = torch.randn(5, head.embedding_dim).to(head.weight.dtype)

    def is_new() -> bool:
        outputs = [one.cpu_linear(probe, one.weight, None) for one in (head, expected)]
        return torch.equal(*outputs)

    name = "model.embed_tokens.weight"
    rows = second[name].shape[0]
    upper = Block((0, 0), (rows // 2, second[name].shape[1]))
    lower = Block((rows // 2, 0), tuple(second[name].shape))

    def write(block: Block) -> None:
        layout.bind([(name, block, block.slice_of(second[name]).clone())]).write()

    layout.start()
    write(upper)
    seen = [is_new()]
    write(lower)
    seen.append(is_new())
    layout.start()  # the sync before broke off; this one brings a part
    write(lower)
    head.cpu_linear = None
    for packed_copy in layout.packed_copies:
        packed_copy.finish()
    return [*seen, is_new()]


def test_a_tied_head_is_packed_as_soon_as_its_weight_has_come():
    (seen,) = run_workers(Case("qwen2", 1, tied=True), pack_the_head_early)
    assert seen == [False, True, True]


def halves(block: Block) -> list[Block]:
    """Its upper and its lower rows."""
    middle = (block.start[0] + block.stop[0]) // 2
    return [
        Block(block.start, (middle, *block.stop[1:])),
        Block((middle, *block.start[1:]), block.stop),
    ]


def count_packing_of_the_head(worker: Worker, keep_plain: bool) -> None:
    """Two syncs, in each of which the head is packed once: with the last box of its weight."""
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    model = worker.model(worker.case.tensors(0), PACKED)
    layout = ShardLayout.learn(model, shapes_of(worker.case.tensors(0)), keep_plain)
    worker.reload(model, worker.case.tensors(0), layout.note_loaded)
    layout.prove()
    pack = model.lm_head.quant_method.process_weights_after_loading
    packed = []

    def pack_and_count(layer: torch.nn.Module) -> None:
        packed.append(layer)
        pack(layer)

    model.lm_head.quant_method.process_weights_after_loading = pack_and_count
    name = "model.embed_tokens.weight" if worker.case.tied else "lm_head.weight"
    others = [
        (key, block) for key, blocks in layout.kept.items() for block in blocks if key != name
    ]
    pairs = [halves(block) for block in layout.kept[name]]
    for seed in (1, 2):
        tensors = worker.case.tensors(seed)
        packed.clear()
        layout.start()
        layout.bind(messages_of(others, tensors)).write()
        layout.bind(messages_of([(name, upper) for upper, _ in pairs], tensors)).write()
        assert not packed
        layout.bind(messages_of([(name, lower) for _, lower in pairs], tensors)).write()
        assert packed == [model.lm_head]
        layout.finish(torch.bfloat16)
        assert packed == [model.lm_head], "packed a second time"
        assert_same_model(model, worker.model(tensors, PACKED))
        if keep_plain:
            assert_reads_back(layout, tensors)


@pytest.mark.parametrize(
    ("case", "keep_plain"),
    [
        pytest.param(Case("qwen2", 1, tied=True), True, id="tied, deltas"),
        pytest.param(Case("qwen2", 1), False, id="untied"),
        # 200 rows, padded: the second worker has fewer than the first.
        pytest.param(Case("qwen2", 2, tied=True), False, id="tied, TP 2"),
        pytest.param(Case("qwen2", 2), True, id="untied, TP 2, deltas"),
    ],
)
def test_a_head_is_packed_once_in_each_sync(case, keep_plain):
    run_workers(case, count_packing_of_the_head, keep_plain)


def fail_to_pack(worker: Worker, layer_name: str) -> str:
    """A sync in which vLLM cannot pack a layer, and the next one. Returns the error."""
    from one_step_off.cluster.errors import SyncError
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    first, second = worker.case.tensors(0), worker.case.tensors(1)
    model = worker.model(first, PACKED)
    layout = ShardLayout.learn(model, shapes_of(first))
    worker.reload(model, first, layout.note_loaded)
    layout.prove()
    method = model.get_submodule(layer_name).quant_method

    def fail(layer: torch.nn.Module) -> None:
        raise MemoryError("no memory\nfor a packed weight")

    whole = [(name, block) for name, blocks in layout.kept.items() for block in blocks]
    messages = messages_of(whole, second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(method, "process_weights_after_loading", fail)
        layout.start()
        with pytest.raises(SyncError) as caught:
            layout.bind(messages).write()
    if layer_name == "lm_head":  # learned again, the layout still packs it
        again = ShardLayout.learn(model, shapes_of(first)).packed_copies
        assert len(again) == len(layout.packed_copies)
    write_in_buckets(layout, second, random.Random(2))
    assert_same_model(model, worker.model(second, PACKED))
    free = [
        tensor for tensors in layout.packed_layers[0].memory.free.values() for tensor in tensors
    ]
    assert not {tensor.data_ptr() for tensor in free} & {view.data_ptr() for *_, view in messages}
    return str(caught.value)


@pytest.mark.parametrize("layer_name", ["lm_head", "model.layers.1.self_attn.o_proj"])
def test_a_layer_that_cannot_be_packed_fails_the_sync_and_not_the_next_one(layer_name):
    (error,) = run_workers(Case("qwen2", 1, tied=True), fail_to_pack, layer_name)
    assert error == f"{layer_name} could not be packed for its CPU kernel: MemoryError: no memory"


def assert_union_is_whole(workers: list[ShardBlocks], tensors: Weights) -> None:
    for name, tensor in tensors.items():
        seen = torch.zeros(tensor.shape, dtype=torch.bool)
        for kept in workers:
            for block in kept[name]:
                block.slice_of(seen).fill_(True)
        assert seen.all(), name


def run_case(case: Case, packed: bool) -> None:
    kept = [shards_from_plain(plain) for plain in run_workers(case, learn_prove_and_write, packed)]
    assert_union_is_whole(kept, case.tensors(0))


EVEN = {"vocab_size": 256}
"""Rows of the vocabulary that two or four workers share evenly."""


@pytest.mark.parametrize(
    ("case", "packed"),
    [
        pytest.param(Case("qwen2", 2, tied=True), PACKED, id="qwen2 tied, TP 2, packed"),
        pytest.param(
            Case("qwen3_moe", 2, experts_are_whole=True), PACKED, id="experts, EP 2, packed"
        ),
    ],
)
def test_workers_write_what_vllm_would_load(case, packed):
    run_case(case, packed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "case",
    [
        Case(kind, workers, tied=tied, experts_are_whole=whole, dtype=dtype)
        for kind, workers, tied, whole, dtype in (
            ("llama", 1, False, False, "bfloat16"),
            ("llama", 2, False, False, "float32"),
            ("llama", 4, True, False, "bfloat16"),
            ("qwen2", 4, False, False, "bfloat16"),
            ("qwen3", 1, False, False, "bfloat16"),
            ("qwen3", 2, True, False, "float32"),
            ("qwen3_moe", 1, False, False, "bfloat16"),
            ("qwen3_moe", 2, False, False, "bfloat16"),
            ("qwen3_moe", 2, False, True, "bfloat16"),
            ("qwen3_moe", 4, True, True, "bfloat16"),
        )
    ],
    ids=str,
)
def test_every_architecture_and_split(case, packed):
    run_case(case, packed)


@pytest.mark.parametrize(
    ("case", "replicated"),
    [
        # Two KV heads for four workers: each is kept twice.
        pytest.param(
            Case("qwen3", 4, changes=EVEN), ("norm", "k_proj", "v_proj"), id="qwen3, TP 4"
        ),
        pytest.param(
            Case("llama", 2, changes=EVEN), ("norm",), id="llama, TP 2", marks=pytest.mark.slow
        ),
        pytest.param(
            Case("qwen3_moe", 2, experts_are_whole=True, changes=EVEN),
            ("norm", "gate.weight"),
            id="experts, EP 2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_worker_keeps_its_share_of_the_bytes(case, replicated):
    tensors = case.tensors(0)
    for kept in run_workers(case, learn_only):
        for name, tensor in tensors.items():
            numbers = sum(block.numel for block in shards_from_plain(kept)[name])
            if "experts." in name:
                assert numbers in (0, tensor.numel())  # a whole expert, or nothing of it
            elif not any(part in name for part in replicated):
                assert numbers * case.workers == tensor.numel(), name
            elif "_proj" in name:
                assert numbers * 2 == tensor.numel(), name
            else:
                assert numbers == tensor.numel(), name
        of_experts = sum(1 for name, boxes in kept.items() if "experts." in name and boxes)
        all_experts = sum(1 for name in tensors if "experts." in name)
        assert of_experts * case.workers == all_experts


def learn_only(worker: Worker) -> dict[str, list]:
    from one_step_off.engines.vllm.shard_layout import ShardLayout

    first = worker.case.tensors(0)
    return plain_shards(ShardLayout.learn(worker.model(first, PLAIN), shapes_of(first)).kept)
