"""Hugging Face checkpoints and Megatron's shards: what every local parameter is, by checkpoint name.

A shard is cut, by one table, into `Part`s: blocks of one HF tensor, contiguous along one dimension, each a view of the
local parameter. So the same parts serve to load (written) and to stream and export (read), and no rank ever needs more
than its own shard and one HF tensor.
"""

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

from one_step_off.config.schema import Config, ConfigError, as_config_error, role_model_path
from one_step_off.weight_sync.weight_piece import WeightPiece

_EXPERTS = r"mlp\.experts\.(?:local_experts\.(\d+)\.{layer}\.weight|{layer}\.weight(\d+))"
# Megatron's name within the model or the layer (Transformer Engine's variants too) -> how it is cut, HF names therein.
TABLE = {
    r"embedding\.word_embeddings\.weight": ("vocabulary", "model.embed_tokens.weight"),
    r"output_layer\.weight": ("vocabulary", "lm_head.weight"),
    r"scalar_head": ("whole", "score.weight"),
    r"decoder\.final_layernorm\.weight": ("whole", "model.norm.weight"),
    r"input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight": (
        "whole",
        "input_layernorm.weight",
    ),
    r"pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight": (
        "whole",
        "post_attention_layernorm.weight",
    ),
    r"self_attention\.linear_qkv\.(weight|bias)": (
        "qkv",
        *(f"self_attn.{p}_proj.{{kind}}" for p in "qkv"),
    ),
    r"self_attention\.linear_proj\.weight": ("columns", "self_attn.o_proj.weight"),
    r"self_attention\.([qk])_layernorm\.weight": ("whole", "self_attn.{kind}_norm.weight"),
    r"mlp\.router\.weight": ("whole", "mlp.gate.weight"),
    r"mlp\.linear_fc1\.weight": ("rows", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    r"mlp\.linear_fc2\.weight": ("columns", "mlp.down_proj.weight"),
    _EXPERTS.format(layer="linear_fc1"): (
        "rows",
        *(f"mlp.experts.{{kind}}.{p}_proj.weight" for p in ("gate", "up")),
    ),
    _EXPERTS.format(layer="linear_fc2"): ("columns", "mlp.experts.{kind}.down_proj.weight"),
}


@dataclass
class Part:
    """A piece of an HF tensor; `view` shows it in the local parameter. `mine`: this tensor-parallel rank sends it; of
    what all ranks hold alike, only the first is asked to."""

    piece: WeightPiece
    view: Tensor
    mine: bool
    expert: bool


def parts(chunks: list[nn.Module], hf_config: Any, dtype: str) -> list[Part]:
    """All parts that this rank holds, in a fixed order, in `dtype` on the wire; a tied head on the last stage is a second copy, not `mine`."""
    found = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            local, within = name, ""
            if cut := re.match(r"decoder\.layers\.(\d+)\.(.+)", name):
                within, local = (
                    f"model.layers.{chunk.decoder.layers[int(cut[1])].layer_number - 1}.",
                    cut[2],
                )
            if name == "output_layer.weight" and isinstance(chunk.output_layer, nn.Linear):
                local = "scalar_head"  # Megatron's checkpoints want it under the name of the language model's
            matched = [
                (m, entry) for regex, entry in TABLE.items() if (m := re.fullmatch(regex, local))
            ]
            if len(matched) != 1:
                raise RuntimeError(
                    f"Megatron's parameter {name} has no name in a Hugging Face checkpoint"
                )
            (match, (how, *names)) = matched[0]
            kind = next((g for g in match.groups() if g is not None), "")
            expert = ".experts." in local
            if expert:
                local_experts = hf_config.num_experts // mpu.get_expert_model_parallel_world_size()
                kind = int(kind) + mpu.get_expert_model_parallel_rank() * local_experts
            # Only where the embedding is another stage's: else its head has no weight.
            tied_copy = local == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            names = (
                ["model.embed_tokens.weight"]
                if tied_copy
                else [within + n.format(kind=kind) for n in names]
            )
            found += _cut(how, names, parameter, hf_config, dtype, expert)
            found[-1].mine &= not tied_copy
    return found


def _cut(
    how: str, names: list[str], parameter: Tensor, hf_config: Any, dtype: str, expert: bool
) -> Iterator[Part]:
    """The parts of one local parameter."""
    rank, ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    first = rank == 0
    if expert or how == "whole":
        rank, ranks = 0, 1
    data = parameter.detach()
    views, dim = [data], int(how == "columns")
    if how == "rows":  # gate above up, each of this rank
        views = data.chunk(len(names))
    elif how == "qkv":  # per group of heads: its queries, one key, one value
        heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
        per_group, per_head = heads // groups, head_dim(hf_config)
        grouped = data.view(groups // ranks, per_group + 2, per_head, *data.shape[1:])
        views = [
            grouped[:, :per_group],
            grouped[:, per_group : per_group + 1],
            grouped[:, per_group + 1 :],
        ]
    for name, view in zip(names, views, strict=True):
        shape = list(view.shape) if how != "qkv" else [math.prod(view.shape[:3]), *view.shape[3:]]
        start, stop = rank * shape[dim], (rank + 1) * shape[dim]
        shape[dim] *= ranks
        if how == "vocabulary":  # padded at the end, so that it divides
            shape[0] = hf_config.vocab_size
            start, stop = min(start, shape[0]), min(stop, shape[0])
            view = view[: stop - start]
        mine = start < stop and (first or how != "whole")
        yield Part(WeightPiece(name, dtype, tuple(shape), start, stop, dim), view, mine, expert)


def head_dim(hf_config: Any) -> int:
    """Of the attention, which older configs leave to be computed."""
    return (
        getattr(hf_config, "head_dim", None)
        or hf_config.hidden_size // hf_config.num_attention_heads
    )


class CheckpointReader:
    """Blocks of tensors from the safetensors files of a folder or hub id; nothing else of them is read."""

    def __init__(self, key: str, path: str) -> None:
        """`key`: the config's key, for messages. Raises ConfigError: they cannot be had."""
        self.key, self.path = key, path
        # Not from its subfolders, which may hold other models.
        files = {"allow_patterns": ["*.safetensors", "*.json"], "ignore_patterns": "*/*"}
        with as_config_error(
            f"{key}: {path!r} cannot be had from the hub", "give its name, or a folder"
        ):
            folder = path if os.path.isdir(path) else snapshot_download(path, **files)
        opened = [
            safetensors.safe_open(file, "pt") for file in sorted(Path(folder).glob("*.safetensors"))
        ]
        self.files = {name: file for file in opened for name in file.keys()}

    def read(self, piece: WeightPiece) -> Tensor:
        """The block of a piece. Raises ConfigError: not in the checkpoint, or in another shape."""
        if piece.name not in self.files:
            raise ConfigError(
                f"{self.key}: the checkpoint {self.path!r} lacks the weight {piece.name}"
            )
        whole = self.files[piece.name].get_slice(piece.name)
        if (shape := tuple(whole.get_shape())) != piece.shape:
            what = f"{self.key}: {piece.name} of {self.path!r}"
            raise ConfigError(f"{what} is {shape}, but its config.json says {piece.shape}")
        return whole[(*(slice(None),) * piece.dim, slice(piece.start, piece.stop))]


@torch.no_grad()
def load(cfg: Config, role: str, chunks: list[nn.Module], hf_config: Any) -> None:
    """Fill the local parameters; a critic's head that the checkpoint lacks begins random, the same on every rank. Raises
    ConfigError: as `CheckpointReader`."""
    path = role_model_path(cfg, role)
    reader = CheckpointReader("model.path" if path == cfg.model.path else f"{role}.path", path)
    # What pads the vocabulary is multiplied by gradients of 0, and memory may hold NaN.
    torch._foreach_zero_([p for chunk in chunks for p in chunk.parameters()])
    for part in parts(chunks, hf_config, cfg.model.dtype):
        if role == "critic" and part.piece.name == "score.weight" not in reader.files:
            generator = torch.Generator().manual_seed(cfg.trainer.seed)
            value = torch.randn(part.piece.shape, generator=generator) * hf_config.initializer_range
        else:
            value = reader.read(part.piece)
        part.view.copy_(value.reshape(part.view.shape))


def share_of(found: list[Part]) -> list[tuple[WeightPiece, Tensor]]:
    """What this rank sends, layer by layer: what only it and its data-parallel replicas hold, dealt out among these by
    size."""
    sent, loads = [], {}
    for part in found:
        group = (
            mpu.get_expert_data_parallel_group()
            if part.expert
            else mpu.get_data_parallel_group(True)
        )
        load = loads.setdefault(part.expert, [0] * group.size())
        replica = load.index(min(load))
        # Counted by the whole tensor, which all tensor-parallel ranks know alike: they must agree on the replica.
        load[replica] += torch.Size(part.piece.shape).numel()
        if part.mine and replica == group.rank():
            sent.append((part.piece, part.view))
    return sent
