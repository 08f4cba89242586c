"""The FLOPs of a step, and their share of the hardware's peak (MFU). Pure functions, no torch.

Model FLOPs are counted as in PaLM (appendix B, arXiv:2204.02311): 6N per trained token, a third of
it per token of a forward pass, and the attention of a sequence of T tokens on top, 12 * layers *
(heads * head size) * T per trained token. What is computed twice (activation checkpointing) counts
once: this is utilization of the model's FLOPs. With LoRA the weights have no gradients, so a
trained token counts as two forward passes instead of three.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.config.device_shares import devices_of_pool
from one_step_off.config.schema import Config
from one_step_off.data.episodes import segment_index
from one_step_off.data.samples import Batch

Metrics = dict[str, float | None]

# Dense bf16 TFLOP/s by the vendors' data sheets. A row matches a device whose name has all its
# words; the first match counts, so the rows of special models come first.
PEAK_TFLOPS = (
    ({"B200"}, 2250),
    ({"H100", "PCIE"}, 756),
    ({"H100", "NVL"}, 835),
    ({"GH200"}, 989),
    ({"H200"}, 989),
    ({"H100"}, 989),
    ({"H800"}, 989),
    ({"A100"}, 312),
    ({"A800"}, 312),
    ({"L40S"}, 362),
    ({"L40"}, 181),
    ({"L4"}, 121),
    ({"A40"}, 149.7),
    ({"A30"}, 165),
    ({"A10"}, 125),
)
# Config names of models with experts, of which each token passes only some.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one GPU by its name as CUDA reports it; None if it is not known."""
    words = set(device_name.upper().replace("-", " ").split())
    for required_words, tflops in PEAK_TFLOPS:
        if required_words <= words:
            return float(tflops) * 1e12
    return None


@dataclass(frozen=True)
class ModelShape:
    """What the count needs of a dense decoder.

    Attributes:
        matmul_params: the parameters that every token is multiplied with (N). An input embedding
            that is not the output head as well is only looked up and does not count.
        layers: number of layers.
        attention_width: heads * head size.
    """

    matmul_params: int
    layers: int
    attention_width: int

    def forward_flops(self, lengths: Sequence[int] | np.ndarray) -> float:
        """One forward pass over whole sequences of `lengths` tokens: 2N + 4 * layers * width * T
        for each token of a sequence of T tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        matmul_flops = 2 * self.matmul_params * tokens
        attention_flops = 4 * self.layers * self.attention_width * tokens * tokens
        return float((matmul_flops + attention_flops).sum())

    def generate_flops(
        self,
        prompt_lengths: Sequence[int],
        context_lengths: Sequence[int] | np.ndarray,
        generated_lengths: Sequence[int] | np.ndarray,
    ) -> float:
        """A forward pass over each prompt, then each sample's tokens one by one: 2N for each, and
        attention to all tokens before it.

        Args:
            prompt_lengths: tokens of each prompt.
            context_lengths: of each sample the tokens before the generated ones.
            generated_lengths: of each sample the generated tokens.
        """
        context = np.asarray(context_lengths, dtype=np.float64)
        generated = np.asarray(generated_lengths, dtype=np.float64)
        attended = generated * context + generated * (generated - 1) / 2
        matmul_flops = 2 * self.matmul_params * generated
        attention_flops = 4 * self.layers * self.attention_width * attended
        decode_flops = float((matmul_flops + attention_flops).sum())
        return self.forward_flops(prompt_lengths) + decode_flops


def shape_of(hf_config: Any, params: int) -> ModelShape | None:
    """The shape by a Hugging Face config and the number of parameters (tied ones once). None where
    the count would be wrong or cannot be made: mixtures of experts, and configs without the usual
    names."""
    text_config = hf_config.get_text_config()
    has_experts = any(getattr(text_config, name, None) for name in EXPERT_COUNTS)
    layers = getattr(text_config, "num_hidden_layers", None)
    heads = getattr(text_config, "num_attention_heads", None)
    hidden_size = getattr(text_config, "hidden_size", None)
    vocab_size = getattr(text_config, "vocab_size", None)
    if has_experts or not all((layers, heads, hidden_size, vocab_size)):
        return None
    head_size = getattr(text_config, "head_dim", None) or hidden_size // heads
    is_tied = any(
        getattr(config, "tie_word_embeddings", False) for config in (text_config, hf_config)
    )
    matmul_params = params if is_tied else params - vocab_size * hidden_size
    return ModelShape(matmul_params, layers, heads * head_size)


@dataclass
class Meter:
    """Tokens/s, FLOP/s and MFU of rollout and trainer, step by step.

    Attributes:
        shape: None: only tokens/s are known.
        device_name: set when the workers have started. Until then, and for unknown devices, the MFU
            is None.
    """

    cfg: Config
    shape: ModelShape | None
    device_name: str = ""

    def step(
        self,
        batch: Batch,
        generated: np.ndarray,
        generate_s: float,
        update_s: float,
        step_s: float,
    ) -> Metrics:
        """The metrics of one step. Each group's rates are over the time in which it worked;
        `mfu/..._of_step` over the whole step. While the critic warms up alone the actor's update
        counts nothing.

        Args:
            generated: the generated tokens of each response, int [B].
            generate_s, update_s, step_s: seconds of the generation, of the actor's update and of
                the step.
        """
        lengths = np.array([len(s.prompt_ids) + len(s.response_ids) for s in batch.samples])
        trains_actor = batch.step >= self.cfg.trainer.critic_warmup
        epochs = self.cfg.actor.ppo_epochs if trains_actor else 0
        metrics: Metrics = {
            "tokens_per_s/rollout": _rate(generated.sum(), generate_s),
            "tokens_per_s/trainer": _rate(lengths.sum() * epochs, update_s),
        }
        if self.shape is None:
            return metrics
        # The samples of a prompt share it; a later segment of an episode has a context of its own.
        prompt_lengths = {}
        for sample in batch.samples:
            segment = segment_index(sample)
            name = (*sample.prompt_id, sample.index, segment) if segment else sample.prompt_id
            prompt_lengths[name] = len(sample.prompt_ids)
        # The output of tools is context: it counts like a part of the prompt.
        rollout_flops = self.shape.generate_flops(
            list(prompt_lengths.values()), lengths - generated, generated
        )
        trainer_flops = self._passes * epochs * self.shape.forward_flops(lengths)
        metrics |= self._utilization("rollout", "rollout", rollout_flops, generate_s, step_s)
        metrics |= self._utilization("trainer", "actor", trainer_flops, update_s, step_s)
        return metrics

    def training_step(self, lengths: np.ndarray, update_s: float, step_s: float) -> Metrics:
        """The metrics of a step that generates nothing.

        Args:
            lengths: tokens of each sequence.
            update_s, step_s: seconds of the update and of the step.
        """
        metrics: Metrics = {"tokens_per_s/trainer": _rate(lengths.sum(), update_s)}
        if self.shape is None:
            return metrics
        flops = self._passes * self.shape.forward_flops(lengths)
        return metrics | self._utilization("trainer", "actor", flops, update_s, step_s)

    @property
    def _passes(self) -> int:
        """The cost of training on a token, in forward passes: a backward pass costs two, or one
        where the weights have no gradients (LoRA)."""
        return 2 if self.cfg.model.lora_rank else 3

    def _utilization(
        self, group: str, role: str, flops: float, seconds: float, step_s: float
    ) -> Metrics:
        """FLOP/s and MFU of a group that worked `seconds` of a step."""
        # The table of peaks is for bf16.
        is_bf16 = self.cfg.model.dtype == "bfloat16"
        peak = peak_flops(self.device_name) if is_bf16 else None
        num_devices = devices_of_pool(self.cfg, self.cfg.placement.roles[role])
        pool_peak = num_devices * (peak or 0)
        return {
            f"flops_per_s/{group}": _rate(flops, seconds),
            f"mfu/{group}": _rate(flops, seconds * pool_peak),
            f"mfu/{group}_of_step": _rate(flops, step_s * pool_peak),
        }


def _rate(amount: float, per: float) -> float | None:
    """None where the rate is not known: by a time or a peak of 0."""
    return float(amount / per) if per > 0 else None
