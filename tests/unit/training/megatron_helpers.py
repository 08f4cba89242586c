"""Helpers of the Megatron back end's tests: tiny models of every family, layouts, and whole tensors
out of pieces.

They need megatron-core: import them after `pytest.importorskip("megatron.core")`.
"""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads

from one_step_off.training.megatron import megatron_model, megatron_weights
from one_step_off.training.megatron.megatron_workers import WORKERS
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.training.fsdp_helpers import OBJECTIVES, make_batch, write_tokenizer

SIZES = {
    "vocab_size": 67,  # odd, so the vocabulary is padded
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3["original_max_position_embeddings"] = 8192
configs: Any = transformers  # its dataclasses take more than they declare
MODELS = {
    "qwen2": lambda: configs.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=5e3),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "moe": lambda: configs.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    # The weights of the chosen experts do not add up to 1, and two layers have none.
    "mixed": lambda: configs.Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        head_dim=16,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        decoder_sparse_step=2,
    ),
}
DECAY = 0.3
"""So much weight decay that after three steps it shows what decays and what does not."""

EVERYTHING = {
    **OBJECTIVES["everything"],
    "actor__lr": 1e-3,
    "actor__micro_batch_tokens": 60,
    "actor__grad_clip": 1.0,
    "actor__weight_decay": DECAY,
}

TP = {"tensor_parallel_size": 2}
PP = {"pipeline_parallel_size": 2}
EP = {"expert_parallel_size": 2}
CP = {"context_parallel_size": 2}
PACKED = {"packing": "on"}
SP = {"sequence_parallel": True}
VPP = {"virtual_pipeline_parallel_size": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on so many ranks in a layout.

    A name that ends in plain: without the recorder of gradients, so that they are reduced as in a
    run.
    """

    name: str
    model: str
    world: int
    changes: dict[str, Any]


def case(name, model, world, **layout) -> Case:
    """A case; `layout`: keys of the actor."""
    changes = {**EVERYTHING, "actor__backend": "megatron"}
    for key, value in layout.items():
        changes[f"actor__{key}"] = value
    changes["model__dtype"] = "bfloat16" if "bf16" in name else "float32"
    return Case(name, model, world, changes)


class Recorder(WORKERS["actor"]):
    """Keeps the whole gradient's parts as they are before each optimizer step. Its memory is full
    of NaN at first."""

    def _build_model(self):
        build = megatron_model.build

        def build_on_nan(*args):
            chunks = build(*args)
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(torch.nan)
            return chunks

        with mock.patch.object(megatron_model, "build", build_on_nan):
            super()._build_model()

    def _build_optimizer(self):
        super()._build_optimizer()
        for chunk in self.models:
            # All ranks are to hold whole sums; the distributed optimizer needs only its part of
            # them.
            chunk.config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(
                chunks, force_all_reduce=True
            )

    def _grad_norm(self):
        weights = [(p, p.data) for chunk in self.models for p in chunk.parameters()]
        for parameter, _ in weights:
            parameter.data = parameter.main_grad
        parts = megatron_weights.parts(self.models, self.hf_config, "float32")
        self.gradients = [
            (dataclasses.astuple(piece), view.clone().reshape(piece.block_shape).numpy())
            for piece, view in megatron_weights.share_of(parts)
        ]
        for parameter, data in weights:
            parameter.data = data
        return super()._grad_norm()


def _copies(weights) -> list[tuple[tuple, np.ndarray]]:
    """Pieces, as tuples that can be saved, and copies of their data."""
    return [
        (
            dataclasses.astuple(piece),
            tensor.detach().float().cpu().clone().reshape(piece.block_shape).numpy(),
        )
        for piece, tensor in weights
    ]


def sent_by(worker):
    """What this rank streams."""
    return _copies(zip(worker.weight_plan(), worker.weight_tensors(), strict=True))


def held_by(worker):
    """As `sent_by`, also of a role that streams nothing."""
    parts = megatron_weights.parts(worker.models, worker.hf_config, "float32")
    return _copies(megatron_weights.share_of(parts))


def end():
    """Leave the process groups, so that the next worker can form them."""
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def write_models(root):
    """Write every model of `MODELS` into a folder of its name; returns `root`."""
    for name, make_config in MODELS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(make_config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms of 1 and biases of 0 would hide a swap
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(root / name)
        write_tokenizer(root / name)
    return root


def assembled(ranks, key):
    """Whole tensors by name from the pieces of all ranks, by the plan of the stream, which refuses
    gaps and doubles."""
    pieces = []
    data = {}
    for rank in ranks:
        own_pieces = [WeightPiece(*piece) for piece, _ in rank[key]]
        pieces.append(own_pieces)
        for piece, (_, block) in zip(own_pieces, rank[key], strict=True):
            data[piece] = block
    whole = {}
    for bucket in BucketPlan.build(pieces, 1 << 12).buckets:
        for slot in bucket.slots:
            block = data[slot.source]
            if slot.piece.name not in whole:
                whole[slot.piece.name] = np.empty(slot.piece.shape, block.dtype)
            target = torch.from_numpy(whole[slot.piece.name])
            source = slot.piece.slice_of(torch.from_numpy(block), slot.source.start)
            slot.piece.slice_of(target).copy_(source)
    return whole


def assert_close(got, want, rtol):
    """All tensors within rtol, in their norm; no single one further off than fp32 sums in another
    order are."""
    assert got.keys() == want.keys()
    error = {name: np.linalg.norm(got[name].astype(np.float64) - want[name]) for name in want}
    norm = {name: np.linalg.norm(want[name].astype(np.float64)) for name in want}
    assert np.linalg.norm(list(error.values())) <= rtol * np.linalg.norm(list(norm.values()))
    for name in want:
        assert error[name] <= 4 * rtol * max(norm[name], 1e-2), (name, error[name], norm[name])


def with_values(path):
    """A batch with the columns of a critic."""
    batch = make_batch(path)
    rng = np.random.default_rng(1)
    batch.values = [rng.normal(0, 1, len(s.loss_mask)) for s in batch.samples]
    batch.returns = [rng.normal(0, 1, len(s.loss_mask)) for s in batch.samples]
    return batch
