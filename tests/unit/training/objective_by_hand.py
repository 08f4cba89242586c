"""The actor's loss token by token from the papers' formulas, and its gradients, without a
worker.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tests.unit.training.fsdp_helpers import hf_model, token_ids

TEMPERATURE = 0.7


@dataclass
class Token:
    """One trained token: log-probs of the policies, and its advantage. `log_p` has a gradient."""

    log_p: torch.Tensor
    mu: float
    old: float
    ref: float
    advantage: float


def by_hand(path, batch, cfg):
    """The loss of the whole batch, and its gradients by the parameters' names."""
    model = hf_model(path)
    trained = [i for i, sample in enumerate(batch.samples) if sample.loss_mask.any()]
    loss = torch.zeros(())
    for i in trained:
        for term in sequence_terms(model, batch, i, cfg):
            loss = loss + term / denominator(batch, i, len(trained), cfg)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return loss.item(), gradients


def denominator(batch, i, sequences, cfg):
    """What the terms of sample `i` are divided by, see `core_algos.token_weights`."""
    aggregation = cfg.algorithm.loss_agg
    if aggregation == "token-mean":
        return sum(int(sample.loss_mask.sum()) for sample in batch.samples)
    if aggregation == "seq-sum-norm":
        return cfg.data.max_response_length * sequences
    return int(batch.samples[i].loss_mask.sum()) * sequences


def sequence_terms(model, batch, i, cfg):
    """The loss of each trained token of sample `i`: policy loss, KL and entropy."""
    algorithm = cfg.algorithm
    sample = batch.samples[i]
    ids = token_ids(sample)
    first = len(sample.prompt_ids)
    logits = model(ids[None], use_cache=False).logits[0] / TEMPERATURE
    log_p = logits[first - 1 : -1].log_softmax(-1)  # [R, vocabulary]
    sequence_ratio = ratio_of_sequence(log_p, ids[first:], batch, i)
    for t in np.flatnonzero(sample.loss_mask):
        token = token_at(log_p, ids[first:], batch, i, t, algorithm)
        ratio = torch.exp(token.log_p - token.old)
        if algorithm.policy_loss == "gspo":
            ratio = sequence_ratio
        term = clipped_surrogate(ratio, token.advantage, algorithm)
        term = term * correction(token, batch, i, algorithm)
        gap = token.ref - token.log_p
        k3 = torch.exp(gap) - 1 - gap
        negative_entropy = (log_p[t].exp() * log_p[t]).sum()
        yield term + algorithm.kl_coef * k3 + algorithm.entropy_coef * negative_entropy


def token_at(log_p, response, batch, i, t, algorithm) -> Token:
    mu = float(batch.samples[i].log_probs[t])
    old = mu
    if algorithm.old_log_probs == "recompute":
        old = float(batch.old_log_probs[i][t])
    return Token(
        log_p=log_p[t, response[t]],
        mu=mu,
        old=old,
        ref=float(batch.ref_log_probs[i][t]),
        advantage=float(batch.advantages[i][t]),
    )


def ratio_of_sequence(log_p, response, batch, i):
    """GSPO: the geometric mean of the ratios of a sequence's trained tokens."""
    positions = torch.from_numpy(np.flatnonzero(batch.samples[i].loss_mask))
    old = torch.from_numpy(batch.old_log_probs[i])
    return torch.exp((log_p[positions, response[positions]] - old[positions]).mean())


def clipped_surrogate(ratio, advantage, algorithm):
    """PPO: -min(r A, clip(r) A)."""
    clipped = torch.clamp(ratio, 1 - algorithm.clip_ratio_low, 1 + algorithm.clip_ratio_high)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def correction(token, batch, i, algorithm) -> float:
    """The importance weight proximal / mu of the rollout correction."""
    mode = algorithm.rollout_correction
    cap = algorithm.rollout_correction_cap
    weight = np.exp(token.old - token.mu)
    if mode == "tis":
        return min(weight, cap)
    if mode == "mis":
        return weight if weight <= cap else 0.0
    if mode == "geo-mask":
        sample = batch.samples[i]
        gaps = (batch.old_log_probs[i] - sample.log_probs)[sample.loss_mask]
        mean_weight = np.exp(gaps.mean())
        return 1.0 if 1 / cap <= mean_weight <= cap else 0.0
    return 1.0
