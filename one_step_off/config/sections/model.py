"""The config section model."""

from dataclasses import dataclass

from one_step_off.config.keys import config_key, path_key


@dataclass
class ModelConfig:
    """The policy."""

    path: str = path_key(
        "",
        "HF model directory or hub id; tiny:qwen2, tiny:qwen3, tiny:tools: a small model that is "
        "built on this machine and briefly pretrained (tiny:qwen2-1: with one layer)",
    )
    dtype: str = config_key(
        "bfloat16",
        "dtype of trainer and engine (the trainer's master weights are fp32)",
        choices="bfloat16 float32",
    )
    trust_remote_code: bool = config_key(
        False, "run Python code that comes with the model (only if you trust its author)"
    )
    attn_implementation: str = config_key(
        "auto",
        "attention of the trainer; auto: flash_attn or torch's own for packed batches, else SDPA",
        choices="auto sdpa flash_attention_2 eager",
    )
    lora_rank: int = config_key(
        0, "rank of the actor's LoRA adapters (the base weights are frozen); 0: no LoRA", low=0
    )
    lora_alpha: int = config_key(32, "LoRA scaling is lora_alpha / lora_rank", low=1)
    lora_target_modules: str = config_key(
        "all-linear",
        "names of the linear layers that get adapters; all-linear: all but the language model head",
    )
