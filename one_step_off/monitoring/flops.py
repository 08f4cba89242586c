"""The FLOPs of a step, and their share of the hardware's peak (MFU). Pure functions, no torch.

Model FLOPs are counted as in PaLM (appendix B, arXiv:2204.02311): 6N per trained token, a third of
it per token of a forward pass, and the attention of a sequence of T tokens on top, 12 * layers *
(heads * head size) * T per trained token. Every pair of tokens counts, also those that a causal
mask or a window hides. A token that is computed once for several sequences with the same prefix
counts once, but its pairs and its part of tokens/s for each of them. The head counts where logits
are computed: at the trained tokens, and at the generated ones. Experts count with the share that a
token passes. What is computed twice (activation checkpointing) and padding do not count: this is
utilization of the model's FLOPs. With LoRA the weights have no gradients, so they count as two
forward passes instead of three, and the adapters' own come on top.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from one_step_off.config.placement import devices_of_pool
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch
from one_step_off.data.token_work import TokenWork, generation_work, pass_work, replaced_work
from one_step_off.models.adapted_layers import EXPERTS
from one_step_off.models.experts import expert_share

Metrics = dict[str, float | None]

# Dense bf16 TFLOP/s (without sparsity) by NVIDIA's data sheets. Of a GPU in several kinds the SXM
# column, where the row names no other. A row matches a device whose name has all its words; the
# first match counts, so the rows of special models come first.
PEAK_TFLOPS = (
    ({"B200"}, 2250),
    ({"H100", "PCIE"}, 756),
    ({"H100", "NVL"}, 835),
    ({"GH200"}, 989),
    ({"H200"}, 989),
    ({"H100"}, 989),
    ({"H800"}, 989),
    ({"H20"}, 148),  # listed by its sellers; NVIDIA publishes no data sheet
    ({"A100"}, 312),
    ({"A800"}, 312),
    ({"L40S"}, 362),
    ({"L40"}, 181),
    ({"L4"}, 121),
    ({"A40"}, 149.7),
    ({"A30"}, 165),
    ({"A10"}, 125),
)
FIRST_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""The layers that read the embedding. Under adapters no gradient passes back through them."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one GPU by its name as CUDA reports it; None if it is not known."""
    words = set(device_name.upper().replace("-", " ").split())
    for required_words, tflops in PEAK_TFLOPS:
        if required_words <= words:
            return float(tflops) * 1e12
    return None


@dataclass(frozen=True)
class ModelShape:
    """What the count needs of a decoder.

    Attributes:
        matmul_params: the parameters that every token is multiplied with (N), the head's too. An
            embedding is only looked up. Of experts those that one token passes.
        layers: number of layers with attention.
        attention_width: heads * head size.
        head_params: the part of N that is the head's.
        adapter_params: those of LoRA, which N does not have.
        first_params: with LoRA: those of N through which no gradient passes back.
    """

    matmul_params: float
    layers: int
    attention_width: float
    head_params: int = 0
    adapter_params: int = 0
    first_params: int = 0

    def forward_flops(self, work: TokenWork) -> float:
        """2 for each parameter and token, and 4 * layers * width for each pair of tokens."""
        layer_params = self.matmul_params - self.head_params
        head_flops = 2 * self.head_params * work.head_tokens
        return 2 * layer_params * work.tokens + head_flops + self._attention_flops(work)

    def _attention_flops(self, work: TokenWork) -> float:
        return 4 * self.layers * self.attention_width * work.pairs

    def train_flops(self, work: TokenWork, has_adapters: bool = False) -> float:
        """A forward and a backward pass. The latter costs as much for the activations' gradients,
        and once more for those of the weights that are trained. Attention, which has no weights,
        has the gradients of two activations."""
        if not has_adapters:
            return 3 * self.forward_flops(work)
        adapter_flops = (6 * self.adapter_params - 2 * self.first_params) * work.tokens
        return 2 * self.forward_flops(work) + self._attention_flops(work) + adapter_flops


def shape_of(
    model: Any, lora_rank: int = 0, lora_layers: tuple[str, ...] = ()
) -> ModelShape | None:
    """The shape of a Hugging Face model, which may be empty. None where the count cannot be made:
    layers with a state, and configs without the usual names.

    Args:
        lora_rank, lora_layers: of its adapters, which the model need not have.
    """
    text_config = model.config.get_text_config()
    width = _attention_width(text_config)
    layer_types = getattr(text_config, "layer_types", None) or ()
    has_state = any("attention" not in kind or "linear" in kind for kind in layer_types)
    share_of_experts = expert_share(text_config)
    if width is None or has_state or share_of_experts is None:
        return None
    modules = dict(model.named_modules())
    head = model.get_output_embeddings() or getattr(model, "score", None)
    head_params = head.weight.numel() if head is not None else 0
    params: float = head_params
    for name, parameter in model.named_parameters():
        module_name, _, _ = name.rpartition(".")
        module = modules[module_name]
        is_embedding = type(module).__name__.endswith("Embedding")
        if is_embedding or module is head or parameter.ndim < 2:
            continue
        is_expert = EXPERTS in name.split(".")
        params += parameter.numel() * (share_of_experts if is_expert else 1)
    adapter_params, first_params = 0, 0
    first_layer = next((name for name in modules if name.endswith(".0")), "")
    for name in lora_layers:
        out_features, in_features = modules[name].weight.shape
        adapter_params += lora_rank * (out_features + in_features)
    if adapter_params:
        for name, module in modules.items():
            if name.startswith(f"{first_layer}.") and name.endswith(FIRST_PROJECTIONS):
                first_params += module.weight.numel()
                if name in lora_layers:
                    first_params += lora_rank * module.weight.shape[1]
    return ModelShape(
        params, text_config.num_hidden_layers, width, head_params, adapter_params, first_params
    )


def _attention_width(text_config: Any) -> float | None:
    """heads * head size; of multi-head latent attention the mean of keys' and values' sizes."""
    heads = getattr(text_config, "num_attention_heads", None)
    hidden_size = getattr(text_config, "hidden_size", None)
    if not heads or not hidden_size or not getattr(text_config, "num_hidden_layers", None):
        return None
    key_size = getattr(text_config, "qk_head_dim", None)
    value_size = getattr(text_config, "v_head_dim", None)
    if key_size and value_size:
        return heads * (key_size + value_size) / 2
    return heads * (getattr(text_config, "head_dim", None) or hidden_size // heads)


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
    replicas: int | None = None
    """That serve now; None: those of the config."""

    def step(
        self,
        batch: Batch,
        generate_s: float,
        update_s: float,
        step_s: float,
        shared: float = 0.0,
    ) -> Metrics:
        """The metrics of one step. Each group's rates are over the time in which it worked;
        `mfu/..._of_step` over the whole step. While the critic warms up alone the actor's update
        counts nothing. What was generated in vain counts too: the seconds have it.

        Args:
            generate_s, update_s, step_s: seconds of the generation, of the actor's update and of
                the step.
            shared: the share of the trainer's tokens that were not computed, because others have
                the same prefix.
        """
        trains_actor = batch.step >= self.cfg.trainer.critic_warmup
        epochs = self.cfg.actor.ppo_epochs if trains_actor else 0
        others = batch.dropped + batch.greedy
        work = generation_work(batch.samples + others)
        work = work.plus(replaced_work(batch.samples + others))
        metrics: Metrics = {"tokens_per_s/rollout": _rate(work.head_tokens, generate_s)}
        metrics |= self._trainer_metrics(batch, epochs, update_s, step_s, shared)
        if self.shape is not None:
            flops = self.shape.forward_flops(work)
            metrics |= self._utilization("rollout", "rollout", flops, generate_s, step_s)
        return metrics

    def training_step(self, batch: Batch, update_s: float, step_s: float) -> Metrics:
        """The metrics of a step that generates nothing. `update_s`, `step_s`: seconds of the update
        and of the step."""
        return self._trainer_metrics(batch, 1, update_s, step_s)

    def _trainer_metrics(
        self, batch: Batch, epochs: int, update_s: float, step_s: float, shared: float = 0.0
    ) -> Metrics:
        lengths = [sample.length for sample in batch.samples]
        metrics: Metrics = {"tokens_per_s/trainer": _rate(sum(lengths) * epochs, update_s)}
        if self.shape is None:
            return metrics
        trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in batch.samples)
        has_adapters = bool(self.cfg.model.lora_rank)
        work = pass_work(lengths, trained)
        work = work._replace(tokens=work.tokens * (1 - shared))
        flops = epochs * self.shape.train_flops(work, has_adapters)
        return metrics | self._utilization("trainer", "actor", flops, update_s, step_s)

    def _utilization(
        self, group: str, role: str, flops: float, seconds: float, step_s: float
    ) -> Metrics:
        """FLOP/s and MFU of a group that worked `seconds` of a step."""
        # The table of peaks is for bf16.
        is_bf16 = self.cfg.model.dtype == "bfloat16"
        peak = peak_flops(self.device_name) if is_bf16 else None
        num_devices = devices_of_pool(self.cfg, self.cfg.placement.roles[role])
        if role == "rollout" and self.replicas is not None:
            num_devices = self.replicas * self.cfg.rollout.tensor_parallel_size
        pool_peak = num_devices * (peak or 0)
        return {
            f"flops_per_s/{group}": _rate(flops, seconds),
            f"mfu/{group}": _rate(flops, seconds * pool_peak),
            f"mfu/{group}_of_step": _rate(flops, step_s * pool_peak),
        }


def _rate(amount: float, per: float) -> float | None:
    """None where the rate is not known: by a time or a peak of 0."""
    return float(amount / per) if per > 0 else None
