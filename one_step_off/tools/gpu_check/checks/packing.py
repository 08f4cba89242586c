"""Packed sequences against padded ones, in the trainer's own worker: log-probs, loss, gradient."""

import time
from typing import Any

import numpy as np

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.tools.gpu_check.check import CheckFailed, Context, Figures
from one_step_off.tools.gpu_check.checkpoints import dtype_of, random_checkpoint
from one_step_off.tools.gpu_check.peers import all_results, policy_worker, run_peers, set_up

PROMPTS = 4
SAMPLES_PER_PROMPT = 4
LONGEST = {"cpu": 40, "cuda": 400}
"""Tokens of the longest prompt, and of the longest response."""

LAYOUTS = ("off", "on")
"""actor.packing: padded, then packed."""

LIMITS = {"float32": (1e-4, 1e-5, 1e-3), "bfloat16": (1.0, 0.05, 0.05)}
"""By dtype: largest and mean difference of a log-prob in nats, and of the gradient's norm as a
share. bfloat16 rounds each layout differently; a wrong boundary moves the mean by far more."""


def packing(context: Context) -> Figures:
    """The same batch through two workers, padded and packed."""
    jobs = [(_work, (context, packed)) for packed in LAYOUTS]
    padded, packed = all_results(
        run_peers(jobs, context.limit_s - 5.0), ["the padding trainer", "the packing trainer"]
    )
    dtype = dtype_of(context)
    apart = np.abs(np.concatenate(padded["log_probs"]) - np.concatenate(packed["log_probs"]))
    norms = padded["grad_norm"], packed["grad_norm"]
    norm_apart = abs(norms[0] - norms[1]) / norms[0]
    figures: Figures = {
        "log-probs, largest": float(apart.max()),
        "mean": float(apart.mean()),
        "gradient norm, share": norm_apart,
        "loss, padded and packed": f"{padded['loss']:.6g} {packed['loss']:.6g}",
        "update, s, padded and packed": f"{padded['seconds']:.2f} {packed['seconds']:.2f}",
        "attention": packed["attention"],
    }
    largest, mean, share = LIMITS[dtype]
    if not (apart.max() <= largest and apart.mean() <= mean and norm_apart <= share):
        raise CheckFailed("packed and padded sequences give other results", figures)
    return figures


def _work(context: Context, packed: str) -> dict[str, Any]:
    """One worker: log-probs of the batch, then two updates, of which the second is timed."""
    cfg = _config(context)
    cfg.actor.packing = packed
    worker = policy_worker(cfg, context.device)
    set_up(worker)
    batch = _batch(cfg)
    shares = worker.log_prob(batch)
    metrics = worker.update(batch)
    begin = time.perf_counter()
    worker.update(batch)
    return {
        "log_probs": [shares[index] for index in range(len(batch.samples))],
        "grad_norm": metrics["actor/grad_norm"],
        "loss": metrics["actor/pg_loss"],
        "seconds": time.perf_counter() - begin,
        "attention": str(worker.model.config._attn_implementation),
    }


def _config(context: Context) -> Config:
    cfg = Config()
    cfg.model.path = random_checkpoint(context)
    cfg.model.dtype = dtype_of(context)
    cfg.data.train_batch_size = PROMPTS
    cfg.rollout.n = SAMPLES_PER_PROMPT
    cfg.actor.ppo_mini_batch_size = PROMPTS
    cfg.actor.micro_batch_tokens = 4 * LONGEST[context.device]
    cfg.trainer.step_timeout_s = context.limit_s
    return cfg


def _batch(cfg: Config) -> Batch:
    """Random samples of many lengths, their log-probs about those of a random model."""
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    words = AutoConfig.from_pretrained(cfg.model.path, trust_remote_code=trust).vocab_size
    longest = cfg.actor.micro_batch_tokens // 4
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(PROMPTS):
        prompt_ids = rng.integers(0, words, rng.integers(1, longest)).astype(np.int32)
        for index in range(SAMPLES_PER_PROMPT):
            samples.append(_sample(rng, words, longest, (0, prompt), index, prompt_ids))
    batch = Batch(0, samples, (0, 0))
    batch.advantages = [
        np.full(len(sample.response_ids), rng.normal(), np.float32) for sample in samples
    ]
    return batch


def _sample(
    rng: np.random.Generator,
    words: int,
    longest: int,
    prompt_id: tuple[int, int],
    index: int,
    prompt_ids: np.ndarray,
) -> Sample:
    length = int(rng.integers(1, longest))
    return Sample(
        prompt_id=prompt_id,
        index=index,
        prompt_ids=prompt_ids,
        response_ids=rng.integers(0, words, length).astype(np.int32),
        log_probs=np.full(length, -np.log(words), np.float32),
        loss_mask=np.ones(length, bool),
        versions=np.zeros(length, np.int32),
    )
