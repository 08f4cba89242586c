"""The config section sft: supervised fine-tuning: `main_sft`, and `trainer.sft_steps`."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.keys import config_key, files_key


@dataclass
class SftConfig:
    """Supervised fine-tuning: python -m one_step_off.main_sft, or trainer.sft_steps before RL."""

    train_files: str = files_key(
        "",
        "rows with answers (messages, question + answer, prompt + completion): files, hub id or "
        "generator:NAME; empty: data.train_files",
    )
    val_files: str = files_key(
        "",
        "held-out rows with answers; empty: data.val_files, where train_files is empty too",
    )
    batch_size: Optional[int] = config_key(
        None, "rows per optimizer step; null: data.train_batch_size", low=1
    )
    max_length: Optional[int] = config_key(
        None,
        "longest row, in tokens; null: data.max_prompt_length + data.max_response_length",
        low=2,
    )
    overlong: str = config_key(
        "skip",
        "what to do with longer rows (they are counted); cut: drop the tokens beyond max_length, "
        "so that the answer has no end",
        choices="skip cut fail",
    )
    lr: Optional[float] = config_key(
        None, "peak learning rate; null: 2e-5, and 2e-4 with adapters (model.lora_rank)", above=0.0
    )
    lr_schedule: Optional[str] = config_key(
        None,
        "learning rate after the warm-up; null: actor.lr_schedule",
        choices="constant cosine linear",
    )
    warmup_steps: Optional[int] = config_key(
        None, "optimizer steps of linear warm-up; null: actor.warmup_steps", low=0
    )
