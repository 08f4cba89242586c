"""Helpers of the trainers' tests: tiny models, batches, one-rank workers, and the loss by hand on a
plain model."""

import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.training.fsdp_workers import PolicyWorker

VOCAB = 67  # odd, so the rows of embedding and head do not divide evenly
MODELS = {
    "tied": lambda **kw: transformers.Qwen2Config(
        **SIZES, num_key_value_heads=1, tie_word_embeddings=True, **kw
    ),
    "untied": lambda **kw: transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, **kw
    ),
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}


class Recorder(PolicyWorker):
    """Keeps whole gradients as they are before each optimiser step."""

    def _optimizer_step(self, stats):
        named: Any = self.model.named_parameters()
        self.gradients = {n: p.grad.full_tensor().cpu().numpy().copy() for n, p in named}
        return super()._optimizer_step(stats)


def write_model(hf_config, folder):
    """Write a random model, and a tokenizer of its vocabulary, into a folder."""
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(hf_config).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder):
    """Write a tokenizer with a word for every token id."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1")
    fast.save_pretrained(folder)


def config(path, **changes):
    """A config in fp32; changes as actor__lr=1.0."""
    cfg = Config()
    cfg.model.path, cfg.model.dtype = path, "float32"
    cfg.rollout.temperature = 0.7
    cfg.actor.ppo_mini_batch_size, cfg.data.train_batch_size = 4, 4
    cfg.actor.grad_clip = 1e9
    cfg.trainer.step_timeout_s = 60.0
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return cfg


def hf_model(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def hf_log_probs(model, sample, temperature):
    """Of the response tokens, by the model's own forward on one sequence without padding."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    logits = model(ids[None], use_cache=False).logits[0].float() / temperature
    p = len(sample.prompt_ids)
    return logits[p - 1 : -1].log_softmax(-1).gather(1, ids[p:, None])[:, 0]


def make_batch(path, prompts=4, n=3, seed=0, version=3):
    """Samples of many lengths with masked tokens, mu near the model's own policy, so that some
    tokens are clipped."""
    rng, model = np.random.default_rng(seed), hf_model(path)
    samples = []
    for prompt in range(prompts):
        prompt_ids = rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32)
        for index in range(n):
            r = int(rng.integers(1, 14))
            response = rng.integers(0, VOCAB, r).astype(np.int32)
            mask = rng.random(r) < 0.8
            versions = np.full(r, version, dtype=np.int32)
            s = Sample(
                (0, prompt), index, prompt_ids, response, np.zeros(r, np.float32), mask, versions
            )
            with torch.no_grad():
                s.log_probs = hf_log_probs(model, s, 0.7).numpy() + rng.normal(0, 0.3, r).astype(
                    np.float32
                )
            samples.append(s)
    values = rng.normal(0, 1, len(samples))
    batch = Batch(step=4, samples=samples, expected_stamp=(0, version))
    batch.advantages = [
        np.where(s.loss_mask, v, 0.0).astype(np.float32)
        for v, s in zip(values, samples, strict=True)
    ]
    batch.ref_log_probs = [
        s.log_probs + rng.normal(0, 0.2, len(s.log_probs)).astype(np.float32) for s in samples
    ]
    batch.old_log_probs = [
        s.log_probs + rng.normal(0, 0.3, len(s.log_probs)).astype(np.float32) for s in samples
    ]
    return batch


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(cfg, role="actor", rank=0, world=1, port=None, packed=None, cls=Recorder):
    worker = cls(cfg, role, rank, world, "cpu", total_steps=10)
    worker.setup("127.0.0.1", port or free_port())
    worker.packed = worker.packed if packed is None else packed
    return worker


def end():
    """Leave the process group, so that the next worker can form one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def whole(worker):
    """All parameters by name, gathered."""
    return {
        n: p.full_tensor().detach().cpu().numpy().copy() for n, p in worker.model.named_parameters()
    }


def assert_gradients_equal(got, want, rtol=1e-6):
    """The whole gradient within rtol, in its norm; no single tensor further off than fp32 sums in
    another order are."""
    assert got.keys() == want.keys()
    error = {n: np.linalg.norm(got[n].astype(np.float64) - want[n]) for n in want}
    norm = {n: np.linalg.norm(want[n].astype(np.float64)) for n in want}
    assert np.linalg.norm(list(error.values())) <= rtol * np.linalg.norm(list(norm.values()))
    for name in want:
        assert error[name] <= 4 * rtol * max(norm[name], 1e-3), name


def by_hand(path, batch, cfg):
    """The loss of the whole batch, token by token from the formulas, and its gradients, on a plain
    model."""
    model, a = hf_model(path), cfg.algorithm
    alive = [i for i, s in enumerate(batch.samples) if s.loss_mask.any()]
    tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    loss = torch.zeros(())
    for i in alive:
        s = batch.samples[i]
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
        p = len(s.prompt_ids)
        all_log_p = (model(ids[None], use_cache=False).logits[0] / 0.7)[p - 1 : -1].log_softmax(-1)
        at = torch.from_numpy(np.flatnonzero(s.loss_mask))
        gaps = (batch.old_log_probs[i] - s.log_probs)[s.loss_mask]
        for t in np.flatnonzero(s.loss_mask):
            log_p, mu = all_log_p[t, ids[p + t]], float(s.log_probs[t])
            old = float(batch.old_log_probs[i][t]) if a.old_log_probs == "recompute" else mu
            adv, r = float(batch.advantages[i][t]), torch.exp(log_p - old)
            if a.policy_loss == "gspo":
                r = torch.exp(
                    (
                        all_log_p[at, ids[p + at]] - torch.from_numpy(batch.old_log_probs[i])[at]
                    ).mean()
                )
            term = -torch.minimum(
                r * adv, torch.clamp(r, 1 - a.clip_ratio_low, 1 + a.clip_ratio_high) * adv
            )
            if a.rollout_correction == "tis":
                term = term * min(np.exp(old - mu), a.rollout_correction_cap)
            if a.rollout_correction == "mis":
                w = np.exp(old - mu)
                term = term * (w if w <= a.rollout_correction_cap else 0.0)
            if a.rollout_correction == "geo-mask":
                w = np.exp(gaps.mean())
                term = term * (
                    1.0 if 1 / a.rollout_correction_cap <= w <= a.rollout_correction_cap else 0.0
                )
            gap = float(batch.ref_log_probs[i][t]) - log_p
            term = term + a.kl_coef * (torch.exp(gap) - 1 - gap)
            term = term + a.entropy_coef * (all_log_p[t].exp() * all_log_p[t]).sum()
            longest = (
                cfg.data.max_response_length
                if a.loss_agg == "seq-sum-norm"
                else int(s.loss_mask.sum())
            )
            denominator = tokens if a.loss_agg == "token-mean" else longest * len(alive)
            loss = loss + term / denominator
    loss.backward()
    return loss.item(), {n: p.grad.numpy() for n, p in model.named_parameters()}


CLIP = {"algorithm__clip_ratio_low": 0.15, "algorithm__clip_ratio_high": 0.25}
DECOUPLED = {
    **CLIP,
    "algorithm__old_log_probs": "recompute",
    "algorithm__rollout_correction_cap": 1.1,
}
OBJECTIVES = {
    "plain": CLIP,
    "everything": {**CLIP, "algorithm__kl_coef": 0.3, "algorithm__entropy_coef": 0.2},
    "sequence-mean": {**CLIP, "algorithm__loss_agg": "sequence-mean"},
    "tis": {**DECOUPLED, "algorithm__rollout_correction": "tis"},
    "mis": {**DECOUPLED, "algorithm__rollout_correction": "mis"},
    "sequences": {
        **DECOUPLED,
        "algorithm__policy_loss": "gspo",
        "algorithm__rollout_correction": "geo-mask",
        "algorithm__loss_agg": "seq-sum-norm",
    },
}
