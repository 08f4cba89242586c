"""How much arithmetic a step needs, and what share of the hardware's peak that is. Pure functions, no torch.

Model FLOPs are counted as in PaLM (appendix B, arXiv:2204.02311): 6N per trained token, a third of it per token of a
forward pass, and the attention of a sequence of T tokens on top, 12 * layers * (heads * head size) * T per trained
token. What is computed twice (activation checkpointing) counts once: this is utilisation of the model's FLOPs. With LoRA the
weights have no gradients, so that a trained token counts as two forward passes in place of three.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch

Figures = dict[str, float | None]

# Dense bf16 TFLOP/s by the makers' data sheets. All words must stand in the device's name; the first match counts.
PEAKS = """B200 2250, H100 PCIE 756, H100 NVL 835, GH200 989, H200 989, H100 989, H800 989, A100 312, A800 312,
    L40S 362, L40 181, L4 121, A40 149.7, A30 165, A10 125"""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one GPU by its name as CUDA tells it; None if it is not known."""
    words = set(device_name.upper().replace("-", " ").split())
    rows = (row.split() for row in PEAKS.split(","))
    return next((float(tera) * 1e12 for *name, tera in rows if words.issuperset(name)), None)


@dataclass(frozen=True)
class ModelShape:
    """What the count needs of a dense decoder. `matmul_params` (N): parameters that every token is multiplied with; an
    input embedding that is not the head as well is only looked up. `attention_width`: heads * head size."""

    matmul_params: int
    layers: int
    attention_width: int

    def forward_flops(self, lengths: Sequence[int] | np.ndarray) -> float:
        """One forward pass over whole sequences: 2N + 4 * layers * width * T for each of their T tokens."""
        n = np.asarray(lengths, dtype=np.float64)
        return float(
            (2 * self.matmul_params * n + 4 * self.layers * self.attention_width * n * n).sum()
        )

    def generate_flops(
        self, prompts: Sequence[int], before: Sequence[int], made: Sequence[int]
    ) -> float:
        """Each of `prompts` (tokens) once, then, for samples with `before` tokens of prompt, `made` tokens one by one:
        2N each, and attention to what stands before it."""
        p, r = np.asarray(before, dtype=np.float64), np.asarray(made, dtype=np.float64)
        seen = r * p + r * (r - 1) / 2
        own = 2 * self.matmul_params * r + 4 * self.layers * self.attention_width * seen
        return self.forward_flops(prompts) + float(own.sum())


def shape_of(hf_config: Any, params: int) -> ModelShape | None:
    """The shape by a Hugging Face config and the number of parameters (tied ones once). None where the count would be
    wrong or cannot be made: mixtures of experts, and configs without the usual names."""
    text = hf_config.get_text_config()
    experts = any(
        getattr(text, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    names = "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"
    layers, heads, hidden, vocabulary = (getattr(text, name, None) for name in names)
    if experts or not all((layers, heads, hidden, vocabulary)):
        return None
    width = heads * (getattr(text, "head_dim", None) or hidden // heads)
    tied = getattr(text, "tie_word_embeddings", False) or getattr(
        hf_config, "tie_word_embeddings", False
    )
    return ModelShape(params if tied else params - vocabulary * hidden, layers, width)


@dataclass
class Meter:
    """Tokens/s, FLOP/s and MFU of both groups, step by step.
    `device_name` is learnt when the workers have started; until then, and for unknown devices, the MFU is None."""

    cfg: Config
    shape: ModelShape | None
    device_name: str = ""

    def step(
        self, batch: Batch, made: np.ndarray, generate_s: float, update_s: float, step_s: float
    ) -> Figures:
        """The figures of one step: of generation, of which `made` are the tokens of each response, int [B], and of the
        actor's update, in which nothing is done while the critic warms up alone. Each group's rates are over the time it
        worked; `mfu/..._of_step` over all of it."""
        lengths = np.array([len(s.prompt_ids) + len(s.response_ids) for s in batch.samples])
        epochs = self.cfg.actor.ppo_epochs * (batch.step >= self.cfg.trainer.critic_warmup)
        found = {"tokens_per_s/rollout": _rate(made.sum(), generate_s)}
        found["tokens_per_s/trainer"] = _rate(lengths.sum() * epochs, update_s)
        if self.shape is None:
            return found
        prompts = {s.prompt_id: len(s.prompt_ids) for s in batch.samples}
        # What tools said is context: it counts as if it stood before all that was made.
        whole = self.shape.generate_flops(list(prompts.values()), lengths - made, made)
        # The table is for bf16; fp32 runs have another peak.
        peak = peak_flops(self.device_name) if self.cfg.model.dtype == "bfloat16" else None
        # Backward costs as much as two forward passes; as one where the weights have no gradients (LoRA).
        trained = (
            (2 if self.cfg.model.lora_rank else 3) * epochs * self.shape.forward_flops(lengths)
        )
        work = ("rollout", "rollout", whole, generate_s), ("trainer", "actor", trained, update_s)
        for group, role, flops, seconds in work:
            devices = sum(
                self.cfg.placement.pools[self.cfg.placement.roles[role]]
            )  # GPUs; on CPUs processes
            found[f"flops_per_s/{group}"] = _rate(flops, seconds)
            found[f"mfu/{group}"] = _rate(flops, seconds * devices * (peak or 0))
            found[f"mfu/{group}_of_step"] = _rate(flops, step_s * devices * (peak or 0))
        return found


def _rate(amount: float, per: float) -> float | None:
    return float(amount / per) if per > 0 else None
