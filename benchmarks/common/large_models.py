"""Tensors of large models, the rows that FSDP ranks own of them, and the blocks that vLLM's workers
keep under tensor and expert parallelism: for simulations, without any weights.

The blocks follow vLLM's column-parallel (rows), row-parallel (columns), vocabulary-parallel and
expert-parallel layers. Key and value heads that are fewer than the workers are held by several of
them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from one_step_off.weight_sync.bucket_plan import Pieces
from one_step_off.weight_sync.shard_blocks import Block, ShardBlocks
from one_step_off.weight_sync.weight_piece import WeightPiece

Shapes = dict[str, tuple[int, ...]]

ROWS = (
    "embed_tokens",
    "lm_head",
    "q_proj",
    "gate_proj",
    "up_proj",
)
"""Each worker keeps its share of the rows (of the bias, where there is one)."""
COLUMNS = ("o_proj", "down_proj")
"""Each worker keeps its share of the columns."""
HEADS = ("k_proj", "v_proj")
"""As ROWS, but whole heads: at least one for each worker."""


@dataclass(frozen=True)
class LargeModel:
    """A decoder of one shape.

    Attributes:
        attention: of a layer, name -> shape.
        kv_heads: key and value heads.
        mlp: rows of a dense layer's MLP; 0: there is no dense layer.
        dense_layers: how many layers are dense.
        experts: of each other layer.
        expert_mlp: rows of an expert's MLP.
    """

    layers: int
    hidden: int
    vocabulary: int
    attention: tuple[tuple[str, tuple[int, ...]], ...]
    kv_heads: int
    mlp: int = 0
    dense_layers: int = 0
    experts: int = 0
    expert_mlp: int = 0

    def shapes(self) -> Shapes:
        """Name -> shape of each tensor, in the order of a checkpoint."""
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, shape in self.attention:
                shapes[f"{prefix}self_attn.{name}"] = shape
            shapes |= dict(self._mlp_shapes(layer, prefix + "mlp."))
            shapes[f"{prefix}input_layernorm.weight"] = (self.hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes | {"lm_head.weight": (self.vocabulary, self.hidden)}

    def _mlp_shapes(self, layer: int, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        if layer < self.dense_layers:
            yield from _gated_mlp(prefix, self.mlp, self.hidden)
            return
        yield prefix + "gate.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            yield from _gated_mlp(f"{prefix}experts.{expert}.", self.expert_mlp, self.hidden)


def _gated_mlp(prefix: str, rows: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (rows, hidden)
    yield prefix + "up_proj.weight", (rows, hidden)
    yield prefix + "down_proj.weight", (hidden, rows)


def _grouped_query(
    hidden: int, heads: int, kv_heads: int, norms: bool = False, biases: bool = False
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Attention with heads of 128 numbers. `norms`: of queries and keys."""
    queries, keys = heads * 128, kv_heads * 128
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes.append((f"{name}_proj.weight", (rows, hidden)))
        if biases:
            shapes.append((f"{name}_proj.bias", (rows,)))
    shapes.append(("o_proj.weight", (hidden, queries)))
    if norms:
        shapes += [("q_norm.weight", (128,)), ("k_norm.weight", (128,))]
    return tuple(shapes)


QWEN25_7B = LargeModel(
    28, 3584, 152064, _grouped_query(3584, 28, 4, biases=True), 4, mlp=18944, dense_layers=28
)
QWEN3_235B = LargeModel(
    94, 4096, 151936, _grouped_query(4096, 64, 4, norms=True), 4, experts=128, expert_mlp=1536
)


def fsdp_pieces(shapes: Shapes, ranks: int) -> Pieces:
    """Per rank its rows of each tensor, as FSDP2 cuts them."""
    pieces: Pieces = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        rows_per_rank = -(-shape[0] // ranks)
        for rank, start in enumerate(range(0, shape[0], rows_per_rank)):
            stop = min(shape[0], start + rows_per_rank)
            pieces[rank].append(WeightPiece(name, "bfloat16", shape, start, stop))
    return pieces


def kept_by_worker(
    model: LargeModel, worker: int, workers: int, expert_parallel: bool
) -> ShardBlocks:
    """What one worker of a replica keeps.

    Args:
        model: whose tensors.
        worker: its number in the replica.
        workers: tensor-parallel ranks of the replica.
        expert_parallel: it keeps whole experts, its share of them; otherwise a share of each.
    """
    kept: ShardBlocks = {}
    for name, shape in model.shapes().items():
        parts = name.split(".")
        if expert_parallel and "experts" in parts:
            expert = int(parts[parts.index("experts") + 1])
            is_own = expert * workers // model.experts == worker
            kept[name] = (Block.whole(shape),) if is_own else ()
        else:
            kept[name] = (_share(parts[-2], shape, worker, workers, model.kv_heads),)
    return kept


def _share(kind: str, shape: tuple[int, ...], worker: int, workers: int, kv_heads: int) -> Block:
    """A worker's block of a tensor of this kind."""
    dim, shares = 0, workers
    if kind in COLUMNS:
        dim = 1
    elif kind in HEADS:
        shares = min(workers, kv_heads)
    elif kind not in ROWS:
        return Block.whole(shape)
    share = worker * shares // workers
    start = [0] * len(shape)
    stop = list(shape)
    start[dim] = shape[dim] * share // shares
    stop[dim] = shape[dim] * (share + 1) // shares
    return Block(tuple(start), tuple(stop))
