"""Packed sequences, and packed ones with shared prompts, against padded ones, in the trainer's own
worker: log-probs, loss, gradient."""

import time
from dataclasses import replace
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

LAYOUTS = ("off", "on", "shared")
"""actor.packing: padded, then packed, then packed with every prompt once."""

LIMITS = {"float32": (1e-4, 1e-5, 1e-3), "bfloat16": (1.0, 0.05, 0.05)}
"""By dtype: largest and mean difference of a log-prob in nats, and of the gradient's norm as a
share. bfloat16 rounds each layout differently; a wrong boundary moves the mean by far more."""


def packing(context: Context) -> Figures:
    """The same batch through three workers: padded, packed, and packed with shared prompts."""
    jobs = [(_work, (context, layout)) for layout in LAYOUTS]
    names = ["the padding trainer", "the packing trainer", "the sharing trainer"]
    padded, packed, shared = all_results(run_peers(jobs, context.limit_s - 5.0), names)
    figures: Figures = {
        "loss, padded, packed, shared": " ".join(
            f"{result['loss']:.6g}" for result in (padded, packed, shared)
        ),
        "update, s, padded, packed, shared": " ".join(
            f"{result['seconds']:.2f}" for result in (padded, packed, shared)
        ),
        "tokens shared": shared["tokens_shared"],
        "attention": packed["attention"],
    }
    limits = LIMITS[dtype_of(context)]
    is_alike = [
        _compare(padded, packed, "", limits, figures),
        _compare(padded, shared, "shared: ", limits, figures),
    ]
    if not all(is_alike):
        raise CheckFailed("packed and padded sequences give other results", figures)
    if not shared["tokens_shared"]:
        raise CheckFailed("no prompt was shared: the trial of the kernel has failed", figures)
    return figures


def _compare(
    padded: dict[str, Any],
    other: dict[str, Any],
    prefix: str,
    limits: tuple[float, float, float],
    figures: Figures,
) -> bool:
    """Whether two workers give the same within the limits; adds the differences to the figures,
    under names with a prefix."""
    apart = np.abs(np.concatenate(padded["log_probs"]) - np.concatenate(other["log_probs"]))
    norm_apart = abs(padded["grad_norm"] - other["grad_norm"]) / padded["grad_norm"]
    figures[f"{prefix}log-probs, largest"] = float(apart.max())
    figures[f"{prefix}mean"] = float(apart.mean())
    figures[f"{prefix}gradient norm, share"] = norm_apart
    largest, mean, share = limits
    return bool(apart.max() <= largest and apart.mean() <= mean and norm_apart <= share)


def _work(context: Context, layout: str) -> dict[str, Any]:
    """One worker: log-probs of the batch, then two updates, of which the second is timed."""
    cfg = _config(context)
    cfg.actor.packing = "off" if layout == "off" else "on"
    worker = policy_worker(cfg, context.device)
    set_up(worker)
    rule = worker.batch_share.sharing  # None: the kernel's trial has failed, and the log says so
    worker.batch_share.sharing = None
    if rule is not None and layout == "shared":
        worker.batch_share.sharing = replace(rule, least_saving=-np.inf, least_gain=-1.0)
    batch = _batch(cfg)
    shares = worker.log_prob(batch)
    metrics = worker.update(batch)
    begin = time.perf_counter()
    worker.update(batch)
    return {
        "log_probs": [shares[index] for index in range(len(batch.samples))],
        "grad_norm": metrics["actor/grad_norm"],
        "loss": metrics["actor/pg_loss"],
        "tokens_shared": metrics.get("actor/shared_prefix_share", 0.0),
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
    longest = LONGEST[context.device]
    cfg.actor.micro_batch_tokens = 4 * longest
    # The start, too, has rows of several sequences then.
    cfg.data.max_prompt_length = cfg.data.max_response_length = longest
    cfg.trainer.step_timeout_s = context.limit_s
    return cfg


def _batch(cfg: Config) -> Batch:
    """Random samples of many lengths, their log-probs about those of a random model. Every second
    one continues a part of the response before it."""
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    words = AutoConfig.from_pretrained(cfg.model.path, trust_remote_code=trust).vocab_size
    longest = cfg.actor.micro_batch_tokens // 4
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(PROMPTS):
        prompt_ids = rng.integers(0, words, rng.integers(1, longest)).astype(np.int32)
        for index in range(SAMPLES_PER_PROMPT):
            sample = _sample(rng, words, longest, (0, prompt), index, prompt_ids)
            if index % 2:
                before = samples[-1].response_ids
                common = min(len(before), len(sample.response_ids)) // 2
                sample.response_ids[:common] = before[:common]
            samples.append(sample)
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
