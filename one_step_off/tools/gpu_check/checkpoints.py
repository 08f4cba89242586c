"""Random models in the shapes of known ones: no hub is needed."""

import fcntl
import shutil
from pathlib import Path
from typing import Any

from one_step_off.tools.gpu_check.check import Context

Shape = dict[str, Any]

QWEN_0_5B: Shape = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
"""Qwen2.5-0.5B."""

QWEN_7B: Shape = QWEN_0_5B | {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Qwen2.5-7B."""

TINY: Shape = {
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""About 400,000 parameters. As in Qwen2.5 the embedding has more rows than the tokenizer has
tokens. Two key-value heads, which tensor parallelism can divide."""


def shape_for(context: Context) -> Shape:
    """The 0.5B shape on GPUs, the tiny one on CPUs."""
    return QWEN_0_5B if context.is_cuda else TINY


def random_checkpoint(context: Context, seed: int = 0, dtype: str = "") -> str:
    """A Hugging Face model directory: --model, or a random model of `shape_for` with the project's
    tiny tokenizer, built once per seed.

    Args:
        seed: of the weights; other than 0: always a random model.
        dtype: of the saved weights; empty: `dtype_of`.
    """
    from one_step_off.models import tiny_qwen

    if context.model and seed == 0:
        return context.model
    dtype = dtype or dtype_of(context)
    target = context.shared_folder / "models" / f"random-{context.device}-{dtype}-{seed}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several peers of a check may want it at once
        if not target.is_dir():
            unfinished = Path(f"{target}.part")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a check that was killed
            unfinished.mkdir()
            tiny_qwen.build("qwen2", str(unfinished), seed, dtype, **shape_for(context))
            unfinished.rename(target)
    return str(target)


def dtype_of(context: Context) -> str:
    """bfloat16 on GPUs, float32 on CPUs."""
    return "bfloat16" if context.is_cuda else "float32"
