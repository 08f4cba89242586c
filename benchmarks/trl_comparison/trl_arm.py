"""One run of TRL's GRPOTrainer on the prompts, the model and the reward function of a config: an arm of
`benchmarks.trl_comparison`, which starts it.

    python -m benchmarks.trl_comparison.trl_arm config=FILE [section.key=value ...] trainer.output_dir=DIR [--vllm] [--threads N]

Writes metrics.jsonl (a row per step: seconds, samples, reward, response length) and settings.json into DIR.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.command_line import Parser
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config


def role_settings(cfg: Config, vllm: bool = False) -> dict[str, Any]:
    """The fields of TRL's GRPOConfig that say what the config says. Raises ValueError: it says what they cannot."""
    a, algorithm, n, steps = cfg.actor, cfg.algorithm, cfg.rollout.n, cfg.trainer.total_steps
    same = {
        "algorithm.adv_estimator": (algorithm.adv_estimator, "grpo"),
        "algorithm.policy_loss": (algorithm.policy_loss, "vanilla"),
        "algorithm.loss_agg": (algorithm.loss_agg, "token-mean"),
        "algorithm.kl_coef": (algorithm.kl_coef, 0.0),
        "actor.ppo_mini_batch_size": (a.ppo_mini_batch_size, cfg.data.train_batch_size),
        "actor.ppo_epochs": (a.ppo_epochs, 1),
        "actor.lr_schedule": (a.lr_schedule, "constant"),
        "model.dtype": (cfg.model.dtype, "float32"),
        "rollout.sampling_kwargs": (cfg.rollout.sampling_kwargs, {}),
        "trainer.total_steps": (bool(steps), True),
    }
    for name, (value, wanted) in same.items():
        if value != wanted:
            raise ValueError(f"{name}={value}: this comparison needs {wanted}")
    samples = cfg.data.train_batch_size * n
    found = {
        "max_steps": steps,
        "per_device_train_batch_size": samples,
        "generation_batch_size": samples,
        "gradient_accumulation_steps": 1,
        "num_generations": n,
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
        "learning_rate": a.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": a.warmup_steps,
        "optim": "adamw_torch_fused",
        "adam_beta1": a.betas[0],
        "adam_beta2": a.betas[1],
        "adam_epsilon": a.eps,
        "weight_decay": a.weight_decay,
        "max_grad_norm": a.grad_clip,
        "gradient_checkpointing": a.activation_checkpointing,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "seed": cfg.trainer.seed,
        "use_vllm": vllm,
    }
    if vllm:
        longest = cfg.data.max_prompt_length + cfg.data.max_response_length
        found |= {"vllm_mode": "colocate", "vllm_max_model_length": longest}
    return found


def prompts_of(cfg: Config, tokenizer: Any) -> list[dict[str, str]]:
    """The prompts of all steps, in the order in which a run of the config takes them; as text, that becomes the same
    tokens again. Raises ValueError: it does not."""
    from one_step_off.runtime.launch import prepare

    stream = prepare(cfg, lambda line: None).data.stream
    rows = []
    for prompt in (
        prompt for _ in range(cfg.trainer.total_steps) for prompt in stream.next_batch()
    ):
        text = tokenizer.decode(prompt.ids)
        if tokenizer(text)["input_ids"] != prompt.ids.tolist():
            raise ValueError(f"prompt {prompt.id}: its text becomes other tokens")
        rows.append({"prompt": text, "ground_truth": prompt.ground_truth})
    return rows


def reward_function(cfg: Config) -> Callable[..., list[float]]:
    """The config's, as TRL calls it: of all samples at once."""
    from one_step_off.rewards.scoring import REWARD_FUNCTIONS

    function = REWARD_FUNCTIONS.find(cfg.reward.function).function

    def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        return [
            function(c, ground_truth=g, **cfg.reward.kwargs)
            for c, g in zip(completions, ground_truth, strict=True)
        ]

    return reward


def train(cfg: Config, settings: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Train; returns a row per step. A step reaches from the end of the one before to its own end, generation within."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from one_step_off.models import tiny_qwen

    path = cfg.model.path
    path = tiny_qwen.ensure(path) if path.startswith("tiny:") else path
    tokenizer = AutoTokenizer.from_pretrained(path)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

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
    samples = float(settings["per_device_train_batch_size"])
    return [
        {
            "time/step_s": after - before,
            "samples": samples,
            "reward/mean": log["reward"],
            "response_length/mean": log["completions/mean_length"],
        }
        for before, after, log in zip(ends, ends[1:], logs, strict=False)
    ]


def main() -> None:
    """Train, write."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--vllm", action="store_true", help="generate by vLLM in TRL's process, not by transformers"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="of torch; 0: as many as torch takes"
    )
    args, keys = parser.parse()
    cfg = load_config(keys)
    folder = Path(cfg.trainer.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    settings = role_settings(cfg, args.vllm)
    rows = train(cfg, settings, folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings |= {"torch threads": torch.get_num_threads()}
    (folder / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main()
