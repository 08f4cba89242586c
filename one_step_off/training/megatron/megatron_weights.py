"""Hugging Face checkpoints and Megatron's shards: what every local parameter is, by checkpoint
name.

A shard is cut, by one table, into `Part`s: blocks of one HF tensor, contiguous along one dimension,
each a view of the local parameter. So the same parts serve to load (written) and to stream and
export (read), and no rank ever needs more than its own shard and one HF tensor.
"""

import enum
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import snapshot_download
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.roles import role_model_path
from one_step_off.config.schema import Config
from one_step_off.weight_sync.weight_piece import WeightPiece


class Cut(enum.Enum):
    """How tensor parallelism cuts a parameter, and with it which HF tensors it holds."""

    WHOLE = "every rank holds all of it"
    ROWS = "each HF tensor's rows; a rank has its rows of the first above those of the second"
    COLUMNS = "columns"
    VOCABULARY = "rows, padded at the end so that they divide"
    QKV = "groups of heads: per group its queries, one key, one value"


@dataclass(frozen=True)
class Entry:
    """A parameter of Megatron's: how it is cut, and the HF names in it.

    `{kind}` in a name is the group that the regular expression matched: weight or bias, q or k, the
    expert's number.
    """

    cut: Cut
    hf_names: tuple[str, ...]


_EXPERTS = r"mlp\.experts\.(?:local_experts\.(\d+)\.{layer}\.weight|{layer}\.weight(\d+))"
_INPUT_NORM = r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight"
_MLP_NORM = r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight"
_QKV_NAMES = ("self_attn.q_proj.{kind}", "self_attn.k_proj.{kind}", "self_attn.v_proj.{kind}")
_EXPERT_UP_NAMES = ("mlp.experts.{kind}.gate_proj.weight", "mlp.experts.{kind}.up_proj.weight")

TABLE = {
    r"embedding\.word_embeddings\.weight": Entry(Cut.VOCABULARY, ("model.embed_tokens.weight",)),
    r"output_layer\.weight": Entry(Cut.VOCABULARY, ("lm_head.weight",)),
    r"scalar_head": Entry(Cut.WHOLE, ("score.weight",)),
    r"decoder\.final_layernorm\.weight": Entry(Cut.WHOLE, ("model.norm.weight",)),
    _INPUT_NORM: Entry(Cut.WHOLE, ("input_layernorm.weight",)),
    _MLP_NORM: Entry(Cut.WHOLE, ("post_attention_layernorm.weight",)),
    r"self_attention\.linear_qkv\.(weight|bias)": Entry(Cut.QKV, _QKV_NAMES),
    r"self_attention\.linear_proj\.weight": Entry(Cut.COLUMNS, ("self_attn.o_proj.weight",)),
    r"self_attention\.([qk])_layernorm\.weight": Entry(
        Cut.WHOLE, ("self_attn.{kind}_norm.weight",)
    ),
    r"mlp\.router\.weight": Entry(Cut.WHOLE, ("mlp.gate.weight",)),
    r"mlp\.linear_fc1\.weight": Entry(Cut.ROWS, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    r"mlp\.linear_fc2\.weight": Entry(Cut.COLUMNS, ("mlp.down_proj.weight",)),
    _EXPERTS.format(layer="linear_fc1"): Entry(Cut.ROWS, _EXPERT_UP_NAMES),
    _EXPERTS.format(layer="linear_fc2"): Entry(
        Cut.COLUMNS, ("mlp.experts.{kind}.down_proj.weight",)
    ),
}
"""Megatron's name within the model or the layer (Transformer Engine's variants too), as a regular
expression."""


@dataclass
class Part:
    """A block of one HF tensor in a local parameter.

    Attributes:
        piece: the block, by the checkpoint's name.
        view: shows the block in the local parameter.
        sent_from_here: whether this tensor-parallel rank may send it; what all ranks hold alike,
            the first sends.
        expert: whether it belongs to an expert, which has other replicas than the rest of the
            model.
    """

    piece: WeightPiece
    view: Tensor
    sent_from_here: bool
    expert: bool


def parts(chunks: list[nn.Module], hf_config: Any, dtype: str) -> list[Part]:
    """All parts that this rank holds, in a fixed order.

    A tied head on the last stage is a second copy of the embedding, and not sent from there.

    Args:
        dtype: of the pieces on the wire.
    """
    result: list[Part] = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            result += _parts_of(chunk, name, parameter, hf_config, dtype)
    return result


def _parts_of(
    chunk: nn.Module, name: str, parameter: Tensor, hf_config: Any, dtype: str
) -> list[Part]:
    local_name, prefix = _within_layer(chunk, name)
    entry, kind = _find_entry(name, local_name)
    is_expert = ".experts." in local_name
    if is_expert:
        local_experts = hf_config.num_experts // mpu.get_expert_model_parallel_world_size()
        first_expert = mpu.get_expert_model_parallel_rank() * local_experts
        kind = str(first_expert + int(kind))
    # Only where the embedding is another stage's: else its head has no weight.
    is_tied_copy = local_name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
    hf_names = [prefix + hf_name.format(kind=kind) for hf_name in entry.hf_names]
    if is_tied_copy:
        hf_names = ["model.embed_tokens.weight"]
    cut_parts = list(_cut(entry.cut, hf_names, parameter, hf_config, dtype, is_expert))
    if is_tied_copy:
        cut_parts[0].sent_from_here = False
    return cut_parts


def _within_layer(chunk: nn.Module, name: str) -> tuple[str, str]:
    """A parameter's name within its layer, and the HF prefix of that layer; outside of layers its
    name, and ""."""
    if name == "output_layer.weight" and isinstance(chunk.output_layer, nn.Linear):
        # Megatron's checkpoints want the scalar head under the name of the language model's.
        return "scalar_head", ""
    in_layer = re.match(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not in_layer:
        return name, ""
    layer_number = chunk.decoder.layers[int(in_layer[1])].layer_number  # from 1
    return in_layer[2], f"model.layers.{layer_number - 1}."


def _find_entry(name: str, local_name: str) -> tuple[Entry, str]:
    """The entry of `TABLE`, and what its expression's group matched."""
    matches = []
    for expression, entry in TABLE.items():
        match = re.fullmatch(expression, local_name)
        if match:
            kind = next((group for group in match.groups() if group is not None), "")
            matches.append((entry, kind))
    if len(matches) != 1:
        raise RuntimeError(f"Megatron's parameter {name} has no name in a Hugging Face checkpoint")
    return matches[0]


def _cut(
    cut: Cut, hf_names: list[str], parameter: Tensor, hf_config: Any, dtype: str, is_expert: bool
) -> Iterator[Part]:
    """The parts of one local parameter, one per HF name."""
    rank = mpu.get_tensor_model_parallel_rank()
    ranks = mpu.get_tensor_model_parallel_world_size()
    sent_from_here = rank == 0 or cut is not Cut.WHOLE
    if is_expert or cut is Cut.WHOLE:
        rank = 0
        ranks = 1
    dim = 1 if cut is Cut.COLUMNS else 0
    views = _views(cut, parameter.detach(), len(hf_names), hf_config, ranks)
    for hf_name, view in zip(hf_names, views, strict=True):
        shape = list(view.shape)
        if cut is Cut.QKV:  # [groups, heads of the group, head_dim, ...]
            shape = [math.prod(view.shape[:3]), *view.shape[3:]]
        start = rank * shape[dim]
        stop = start + shape[dim]
        shape[dim] *= ranks
        if cut is Cut.VOCABULARY:
            shape[0] = hf_config.vocab_size
            start = min(start, shape[0])
            stop = min(stop, shape[0])
            view = view[: stop - start]
        piece = WeightPiece(hf_name, dtype, tuple(shape), start, stop, dim)
        yield Part(piece, view, start < stop and sent_from_here, is_expert)


def _views(
    cut: Cut, data: Tensor, count: int, hf_config: Any, ranks: int
) -> list[Tensor] | tuple[Tensor, ...]:
    """The `count` HF tensors' blocks in a local parameter."""
    if cut is Cut.ROWS:
        return data.chunk(count)
    if cut is Cut.QKV:
        groups = hf_config.num_key_value_heads
        queries = hf_config.num_attention_heads // groups
        by_group = data.view(groups // ranks, queries + 2, head_dim(hf_config), *data.shape[1:])
        query = by_group[:, :queries]
        key = by_group[:, queries : queries + 1]
        value = by_group[:, queries + 1 :]
        return [query, key, value]
    return [data]


def head_dim(hf_config: Any) -> int:
    """Width of an attention head; older configs leave it to be computed."""
    given = getattr(hf_config, "head_dim", None)
    return given or hf_config.hidden_size // hf_config.num_attention_heads


class CheckpointReader:
    """Blocks of tensors from the safetensors files of a folder or hub id; nothing else of them is
    read."""

    def __init__(self, key: str, path: str) -> None:
        """Open the files. `key`: the config's key, for messages. Raises ConfigError: they cannot be
        had."""
        self.key = key
        self.path = path
        problem = f"{key}: {path!r} cannot be downloaded from the hub"
        with as_config_error(problem, "give its name, or a folder"):
            folder = Path(path) if os.path.isdir(path) else _download(path)
        self.files: dict[str, Any] = {}
        """Name of a tensor -> the open file that holds it."""
        for file in sorted(folder.glob("*.safetensors")):
            opened = safetensors.safe_open(file, "pt")
            for name in opened.keys():
                self.files[name] = opened

    def read(self, piece: WeightPiece) -> Tensor:
        """The block of a piece. Raises ConfigError: not in the checkpoint, or in another shape."""
        if piece.name not in self.files:
            raise ConfigError(
                f"{self.key}: the checkpoint {self.path!r} lacks the weight {piece.name}; "
                "give a whole model"
            )
        stored = self.files[piece.name].get_slice(piece.name)
        shape = tuple(stored.get_shape())
        if shape != piece.shape:
            raise ConfigError(
                f"{self.key}: {piece.name} of {self.path!r} is {shape}, "
                f"but its config.json says {piece.shape}; give a model whose files match"
            )
        before = (slice(None),) * piece.dim
        return stored[(*before, slice(piece.start, piece.stop))]


def _download(hub_id: str) -> Path:
    # Not from its subfolders, which may hold other models.
    folder = snapshot_download(
        hub_id, allow_patterns=["*.safetensors", "*.json"], ignore_patterns="*/*"
    )
    return Path(folder)


@torch.no_grad()
def load(cfg: Config, role: str, chunks: list[nn.Module], hf_config: Any) -> None:
    """Fill the local parameters; a critic's head that the checkpoint lacks begins random, the same
    on every rank. Raises ConfigError: as `CheckpointReader`."""
    path = role_model_path(cfg, role)
    reader = CheckpointReader("model.path" if path == cfg.model.path else f"{role}.path", path)
    # What pads the vocabulary is multiplied by gradients of 0, and memory may hold NaN.
    torch._foreach_zero_([p for chunk in chunks for p in chunk.parameters()])
    for part in parts(chunks, hf_config, cfg.model.dtype):
        is_head = part.piece.name == "score.weight"
        if role == "critic" and is_head and part.piece.name not in reader.files:
            generator = torch.Generator().manual_seed(cfg.trainer.seed)
            random = torch.randn(part.piece.shape, generator=generator)
            value = random * hf_config.initializer_range
        else:
            value = reader.read(part.piece)
        part.view.copy_(value.reshape(part.view.shape))


def share_of(held: list[Part]) -> list[tuple[WeightPiece, Tensor]]:
    """What this rank sends of the parts that it holds, layer by layer.

    Its data-parallel replicas hold the same parts: each part is sent by the replica that has been
    given the fewest elements so far.
    """
    sent = []
    loads: dict[bool, list[int]] = {}
    """Elements given to each replica: of experts (True), and of the rest (False)."""
    for part in held:
        if part.expert:
            group = mpu.get_expert_data_parallel_group()
        else:
            group = mpu.get_data_parallel_group(with_context_parallel=True)
        load = loads.setdefault(part.expert, [0] * group.size())
        replica = load.index(min(load))
        # Counted by the whole tensor, which all tensor-parallel ranks know alike: they must agree
        # on the replica.
        load[replica] += math.prod(part.piece.shape)
        if part.sent_from_here and replica == group.rank():
            sent.append((part.piece, part.view))
    return sent
