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
from one_step_off.training.fsdp.fsdp_workers import CriticWorker, PolicyWorker

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


class RecordingCritic(CriticWorker):
    """Keeps whole gradients as they are before each optimiser step."""

    def _optimizer_step(self, stats):
        named: Any = self.model.named_parameters()
        self.gradients = {n: p.grad.full_tensor().numpy().copy() for n, p in named}
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
    cfg.model.path = path
    cfg.model.dtype = "float32"
    cfg.rollout.temperature = 0.7
    cfg.data.train_batch_size = 4
    cfg.actor.ppo_mini_batch_size = 4
    cfg.actor.grad_clip = 1e9
    cfg.trainer.step_timeout_s = 60.0
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(cfg, section), name, value)
    return cfg


def hf_model(path):
    """The plain model, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def token_ids(sample):
    """Prompt and response, int64 [P + R]."""
    return torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()


def hf_log_probs(model, sample, temperature):
    """Of the response tokens, by the model's own forward on one sequence without padding."""
    ids = token_ids(sample)
    first = len(sample.prompt_ids)
    logits = model(ids[None], use_cache=False).logits[0].float() / temperature
    log_probs = logits[first - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, ids[first:, None])[:, 0]


def make_batch(path, prompts=4, n=3, seed=0, version=3):
    """Samples of many lengths with masked tokens, mu near the model's own policy, so that some
    tokens are clipped."""
    rng = np.random.default_rng(seed)
    model = hf_model(path)
    samples = []
    for prompt in range(prompts):
        prompt_ids = rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32)
        for index in range(n):
            samples.append(_random_sample(rng, model, (0, prompt), index, prompt_ids, version))
    advantages = rng.normal(0, 1, len(samples))
    batch = Batch(step=4, samples=samples, expected_stamp=(0, version))
    batch.advantages = [
        np.where(s.loss_mask, advantage, 0.0).astype(np.float32)
        for s, advantage in zip(samples, advantages, strict=True)
    ]
    batch.ref_log_probs = [_with_noise(rng, s.log_probs, 0.2) for s in samples]
    batch.old_log_probs = [_with_noise(rng, s.log_probs, 0.3) for s in samples]
    return batch


def _random_sample(rng, model, prompt_id, index, prompt_ids, version):
    length = int(rng.integers(1, 14))
    sample = Sample(
        prompt_id=prompt_id,
        index=index,
        prompt_ids=prompt_ids,
        response_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        log_probs=np.zeros(length, np.float32),
        loss_mask=rng.random(length) < 0.8,
        versions=np.full(length, version, dtype=np.int32),
    )
    with torch.no_grad():
        log_probs = hf_log_probs(model, sample, 0.7).numpy()
    sample.log_probs = _with_noise(rng, log_probs, 0.3)
    return sample


def _with_noise(rng, log_probs, deviation):
    return log_probs + rng.normal(0, deviation, len(log_probs)).astype(np.float32)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(cfg, role="actor", rank=0, world=1, port=None, cls=Recorder):
    """A worker that is set up."""
    worker = cls(cfg, role, rank, world, "cpu", total_steps=10)
    worker.setup("127.0.0.1", port or free_port())
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
