"""One run of TRL's GRPOTrainer on the prompts, the model and the reward function of a config.

It is an arm of `benchmarks.trl_comparison`, which starts it:

    python -m benchmarks.trl_comparison.trl_arm config=FILE [section.key=value ...]
        trainer.output_dir=DIR [--vllm] [--threads N]

Writes metrics.jsonl (a row per step: seconds, samples, reward, response length) and settings.json
into DIR.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config


def _check_comparable(cfg: Config) -> None:
    """Raise ValueError if the config has a setting that this comparison cannot give to TRL."""
    required = {
        "algorithm.adv_estimator": (cfg.algorithm.adv_estimator, "grpo"),
        "algorithm.policy_loss": (cfg.algorithm.policy_loss, "vanilla"),
        "algorithm.loss_agg": (cfg.algorithm.loss_agg, "token-mean"),
        "algorithm.kl_coef": (cfg.algorithm.kl_coef, 0.0),
        "actor.ppo_mini_batch_size": (cfg.actor.ppo_mini_batch_size, cfg.data.train_batch_size),
        "actor.ppo_epochs": (cfg.actor.ppo_epochs, 1),
        "actor.lr_schedule": (cfg.actor.lr_schedule, "constant"),
        "model.dtype": (cfg.model.dtype, "float32"),
        "rollout.sampling_kwargs": (cfg.rollout.sampling_kwargs, {}),
    }
    for name, (value, needed) in required.items():
        if value != needed:
            raise ValueError(f"{name}={value}: this comparison needs {needed}")
    if not cfg.trainer.total_steps:
        raise ValueError(
            f"trainer.total_steps={cfg.trainer.total_steps}: this comparison needs 1 or more"
        )


def _sampling_settings(cfg: Config) -> dict[str, Any]:
    """Batches, generation and the loss."""
    algorithm = cfg.algorithm
    samples = cfg.data.train_batch_size * cfg.rollout.n
    return {
        "max_steps": cfg.trainer.total_steps,
        "per_device_train_batch_size": samples,
        "generation_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "num_generations": cfg.rollout.n,
        "num_iterations": 1,
        "max_completion_length": cfg.data.max_response_length,
        "temperature": cfg.rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "epsilon": algorithm.clip_ratio_low or algorithm.clip_ratio,
        "epsilon_high": algorithm.clip_ratio_high or algorithm.clip_ratio,
        "loss_type": "dapo",
        "scale_rewards": "group" if algorithm.norm_adv_by_std else "none",
    }


def _training_settings(cfg: Config) -> dict[str, Any]:
    """The optimizer and the process."""
    actor = cfg.actor
    return {
        "learning_rate": actor.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": actor.warmup_steps,
        "optim": "adamw_torch_fused",
        "adam_beta1": actor.betas[0],
        "adam_beta2": actor.betas[1],
        "adam_epsilon": actor.eps,
        "weight_decay": actor.weight_decay,
        "max_grad_norm": actor.grad_clip,
        "gradient_checkpointing": actor.activation_checkpointing,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "seed": cfg.trainer.seed,
    }


def grpo_config_fields(cfg: Config, vllm: bool = False) -> dict[str, Any]:
    """The fields of TRL's GRPOConfig that mean the same as the config.

    Args:
        cfg: the config of our run.
        vllm: TRL generates with vLLM in its own process.

    Raises:
        ValueError: the config has a setting for which there is no such field.
    """
    _check_comparable(cfg)
    settings = _sampling_settings(cfg) | _training_settings(cfg) | {"use_vllm": vllm}
    if vllm:
        settings["vllm_mode"] = "colocate"
        settings["vllm_max_model_length"] = (
            cfg.data.max_prompt_length + cfg.data.max_response_length
        )
    return settings


def prompts_of(cfg: Config, tokenizer: Any) -> list[dict[str, str]]:
    """The prompts of all steps, in the order in which a run of the config takes them.

    TRL takes text, and its tokens must be the same as ours.

    Raises:
        ValueError: the text of a prompt becomes other tokens.
    """
    from one_step_off.runtime.prepare import prepare

    stream = prepare(cfg, lambda line: None).data.stream
    rows = []
    for _ in range(cfg.trainer.total_steps):
        for prompt in stream.next_batch():
            text = tokenizer.decode(prompt.ids)
            if tokenizer(text)["input_ids"] != prompt.ids.tolist():
                raise ValueError(f"prompt {prompt.id}: its text becomes other tokens")
            rows.append({"prompt": text, "ground_truth": prompt.ground_truth})
    return rows


def reward_function(cfg: Config) -> Callable[..., list[float]]:
    """The config's reward function in the form that TRL calls: all samples at once."""
    from one_step_off.rewards.verifiers import REWARD_FUNCTIONS

    function = REWARD_FUNCTIONS.find(cfg.reward.function).function

    def rewards(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        return [
            function(completion, ground_truth=truth, **cfg.reward.kwargs)
            for completion, truth in zip(completions, ground_truth, strict=True)
        ]

    return rewards


def train(cfg: Config, settings: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Train with TRL.

    Returns:
        A row per step. A step lasts from the end of the step before to its own end, and generation
        is part of it.
    """
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from one_step_off.models import tiny_qwen

    path = cfg.model.path
    if path.startswith("tiny:"):
        path = tiny_qwen.ensure(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    step_ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            step_ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(time.perf_counter())

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype="float32"),
        reward_funcs=reward_function(cfg),
        args=GRPOConfig(
            output_dir=str(folder),
            **settings,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(prompts_of(cfg, tokenizer)),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    return _rows(step_ends, logs, float(settings["per_device_train_batch_size"]))


def _rows(
    step_ends: list[float], logs: list[dict[str, Any]], samples: float
) -> list[dict[str, float]]:
    """The steps with the names of our metrics."""
    rows = []
    for (begin, end), log in zip(itertools.pairwise(step_ends), logs, strict=False):
        row = {
            "time/step_s": end - begin,
            "samples": samples,
            "reward/mean": log["reward"],
            "response_length/mean": log["completions/mean_length"],
        }
        rows.append(row)
    return rows


def main() -> None:
    """Train and write the metrics."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--vllm", action="store_true", help="generate by vLLM in TRL's process, not by transformers"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of torch; 0: torch's default"
    )
    args, keys = parser.parse()
    cfg = load_config(keys)
    folder = Path(cfg.trainer.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    settings = grpo_config_fields(cfg, args.vllm)
    rows = train(cfg, settings, folder)
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    settings["torch threads"] = torch.get_num_threads()
    (folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
