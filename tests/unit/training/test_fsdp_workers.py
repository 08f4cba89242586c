"""The FSDP back end against plain Hugging Face models: the same log-probs, the same gradients, however the work is cut."""

import copy
import dataclasses
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from one_step_off.algorithms import core_algos
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample, StalenessError
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


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a tied and an untied model with a tokenizer, as they would come from the hub."""
    from tokenizers import Tokenizer, models

    folders = {}
    for name, make in MODELS.items():
        folder = tmp_path_factory.mktemp("models") / name
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(make()).save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="w1"
        ).save_pretrained(folder)
        folders[name] = str(folder)
    return folders


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
    """Samples of many lengths with masked tokens, mu near the model's own policy, so that some tokens are clipped."""
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


@pytest.fixture
def single():
    """Starts one-rank workers and ends them."""
    workers = []

    def make(cfg, **kwargs):
        end()
        workers.append(start(cfg, **kwargs))
        return workers[-1]

    yield make
    end()


def whole(worker):
    """All parameters by name, gathered."""
    return {
        n: p.full_tensor().detach().cpu().numpy().copy() for n, p in worker.model.named_parameters()
    }


def assert_gradients_equal(got, want, rtol=1e-6):
    """The whole gradient within rtol, in its norm; no single tensor further off than fp32 sums in another order are."""
    assert got.keys() == want.keys()
    error = {n: np.linalg.norm(got[n].astype(np.float64) - want[n]) for n in want}
    norm = {n: np.linalg.norm(want[n].astype(np.float64)) for n in want}
    assert np.linalg.norm(list(error.values())) <= rtol * np.linalg.norm(list(norm.values()))
    for name in want:
        assert error[name] <= 4 * rtol * max(norm[name], 1e-3), name


# ---- one rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_log_prob_equals_the_models_own_forward(checkpoints, single, name):
    path = checkpoints[name]
    batch, model = make_batch(path), hf_model(path)
    with torch.no_grad():
        want = [hf_log_probs(model, s, 0.7).numpy() for s in batch.samples]
        cold = [hf_log_probs(model, s, 1.0).numpy() for s in batch.samples]
    worker = single(config(path))
    for settings in (
        {},
        {"log_prob_chunk": 5},
        {"micro_batch_tokens": 40},
        {"packed": True, "log_prob_chunk": 7},
    ):
        worker.packed = settings.pop("packed", False)
        worker.cfg = config(path, **{f"actor__{k}": v for k, v in settings.items()})
        worker.own = worker.cfg.actor
        got = worker.log_prob(batch)
        assert sorted(got) == list(range(len(want)))
        for i, w in enumerate(want):
            assert got[i].dtype == np.float32
            np.testing.assert_allclose(got[i], w, atol=1e-5, rtol=0)
    scores = worker.score([np.concatenate([s.prompt_ids, s.response_ids]) for s in batch.samples])
    for s, score, w in zip(batch.samples, scores, cold, strict=True):
        assert len(score) == s.length - 1
        np.testing.assert_allclose(score[len(s.prompt_ids) - 1 :], w, atol=1e-5, rtol=0)


def test_squares_of_the_whole_distribution_beside_the_log_probs(checkpoints, single):
    path = checkpoints["tied"]
    batch, model = make_batch(path), hf_model(path)
    worker = single(config(path, actor__log_prob_chunk=5, actor__micro_batch_tokens=40))
    got, plain = worker.log_prob_and_squares(batch), worker.log_prob(batch)
    for i, s in enumerate(batch.samples):
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
        with torch.no_grad():
            p = (
                model(ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / 0.7
            ).softmax(-1)
        assert got[i].shape == (len(s.response_ids), 2) and got[i].dtype == np.float32
        np.testing.assert_array_equal(got[i][:, 0], plain[i])
        np.testing.assert_allclose(got[i][:, 1], (p**2).sum(-1).numpy(), rtol=1e-5)
        # |one-hot of the token - p|^2, the squared gradient at the logits that the optimal token baseline adds up
        one_hot = torch.nn.functional.one_hot(ids[len(s.prompt_ids) :], VOCAB)
        energy = 1 - 2 * np.exp(got[i][:, 0]) + got[i][:, 1]
        np.testing.assert_allclose(
            energy, (one_hot - p).square().sum(-1).numpy(), rtol=1e-4, atol=1e-6
        )


def by_hand(path, batch, cfg):
    """The loss of the whole batch, token by token from the formulas, and its gradients, on a plain model."""
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_equal_the_formula(checkpoints, single, objective):
    path = checkpoints["untied" if objective in ("plain", "mis") else "tied"]
    cfg, batch = config(path, **OBJECTIVES[objective]), make_batch(path)
    loss, gradients = by_hand(path, batch, cfg)
    worker = single(cfg)
    metrics = worker.update(batch)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)
    assert worker.version == 1 and metrics["actor/tokens"] == sum(
        s.loss_mask.sum() for s in batch.samples
    )
    assert (
        0 < metrics["actor/clip_frac"] < 1
        and metrics["ratio/max"] > 1
        and metrics["actor/skipped_updates"] == 0
    )
    assert metrics["logprob_diff/max"] > metrics["logprob_diff/mean"] > 0
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_every_policy_loss_trains(checkpoints, single):
    path = checkpoints["tied"]
    batch = make_batch(path)
    worker = single(config(path, **CLIP, algorithm__clip_ratio_c=3.0))
    for step, name in enumerate(POLICY_LOSSES):
        worker.cfg.algorithm.policy_loss = name
        metrics = worker.update(batch)
        assert np.isfinite(metrics["actor/loss"]) and metrics["actor/grad_norm"] > 0, name
        assert worker.version == step + 1 and metrics["actor/skipped_updates"] == 0


LAYOUTS = {
    "micro-batches": {"actor__micro_batch_tokens": 48},
    "one by one": {"actor__micro_batch_tokens": 1},
    "packed": {"packed": True},
    "chunks": {"actor__log_prob_chunk": 7},
    "checkpointing": {"actor__activation_checkpointing": True},
    "compiled": {"actor__torch_compile": True, "actor__activation_checkpointing": True},
}


@pytest.fixture(scope="module")
def reference(checkpoints):
    """Gradients and metrics of one rank with one padded micro-batch."""
    found = {}
    for name, path in checkpoints.items():
        worker = start(config(path, **OBJECTIVES["everything"]))
        metrics = worker.update(make_batch(path))
        found[name] = (worker.gradients, metrics, whole(worker))
        end()
    return found


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x == "compiled")) for x in LAYOUTS]
)
def test_gradients_do_not_depend_on_the_layout(checkpoints, single, reference, layout):
    changes = dict(LAYOUTS[layout])
    packed = changes.pop("packed", None)
    worker = single(
        config(checkpoints["tied"], **OBJECTIVES["everything"], **changes), packed=packed
    )
    metrics = worker.update(make_batch(checkpoints["tied"]))
    if layout == "compiled":
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert_gradients_equal(worker.gradients, reference["tied"][0])
    for key, value in reference["tied"][1].items():
        if not key.endswith("_s"):
            assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_stale_tokens_change_nothing(checkpoints, single):
    worker = single(config(checkpoints["tied"]))
    before = whole(worker)
    for field, value in (("versions", 2), ("incarnation", 1)):
        batch = make_batch(checkpoints["tied"])
        if field == "versions":
            batch.samples[5].versions[-1] = value
        else:
            batch.samples[5].incarnation = value
        with pytest.raises(StalenessError, match="sample 2"):
            worker.update(batch)
    batch = make_batch(checkpoints["tied"])
    batch.advantages = None
    with pytest.raises(ValueError, match="advantage"):
        worker.update(batch)
    after = whole(worker)
    assert worker.version == 0 and all((after[n] == before[n]).all() for n in before)


def test_a_gradient_that_is_not_finite_skips_one_step(checkpoints, single):
    cfg = config(checkpoints["tied"], actor__ppo_mini_batch_size=2, actor__lr=1e-2)
    worker, batch = single(cfg), make_batch(checkpoints["tied"])
    before = whole(worker)
    for a in batch.advantages:
        a[:] = np.nan
    metrics = worker.update(batch)
    after = whole(worker)
    assert metrics["actor/skipped_updates"] == 2 and np.isnan(metrics["actor/grad_norm"])
    assert all((after[n] == before[n]).all() for n in before)
    assert worker.version == 1 and worker.optimizer_steps == 2
    metrics = worker.update(make_batch(checkpoints["tied"]))
    assert metrics["actor/skipped_updates"] == 0 and np.isfinite(metrics["actor/loss"])
    assert any((a != before[n]).any() for n, a in whole(worker).items())


def test_mini_batches_epochs_clip_and_schedule(checkpoints, single):
    """Against AdamW on a plain model: 2 epochs x 2 mini-batches, clipped, with warm-up and cosine decay."""
    path = checkpoints["untied"]
    cfg = config(path, **CLIP, actor__ppo_mini_batch_size=2, actor__ppo_epochs=2, actor__lr=1e-3)
    cfg.actor.grad_clip, cfg.actor.warmup_steps, cfg.actor.lr_schedule = 0.05, 2, "cosine"
    batch, worker = make_batch(path), single(cfg)
    metrics = worker.update(batch)
    model = hf_model(path)
    groups = [
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in model.parameters() if p.ndim == 1],
    ]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
    )
    for step in range(4):
        half = copy.copy(batch)
        part = slice(6 * (step % 2), 6 * (step % 2) + 6)
        for f in ("samples", "advantages", "old_log_probs", "ref_log_probs"):
            setattr(half, f, getattr(batch, f)[part])
        folder = str(Path(path).parent / f"step{step}")
        model.save_pretrained(folder)
        _, gradients = by_hand(folder, half, cfg)
        for n, p in model.named_parameters():
            p.grad = torch.from_numpy(gradients[n])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for g in optimizer.param_groups:
            g["lr"] = core_algos.learning_rate(step, 40, 1e-3, "cosine", 2)
        optimizer.step()
    assert metrics["actor/lr"] == core_algos.learning_rate(3, 40, 1e-3, "cosine", 2)
    trained = whole(worker)
    for n, p in model.named_parameters():
        np.testing.assert_allclose(trained[n], p.detach().numpy(), atol=1e-5)


def test_ref_is_frozen_and_scores(checkpoints, single):
    worker = single(config(checkpoints["tied"]), role="ref")
    assert worker.optimizer is None and not any(p.requires_grad for p in worker.model.parameters())
    old = worker.log_prob(make_batch(checkpoints["tied"]))
    worker.model.model.embed_tokens.weight.to_local().mul_(0.5)
    new = worker.log_prob(make_batch(checkpoints["tied"]))
    assert len(new) == 12 and all((new[i] != old[i]).any() for i in old), (
        "scored with stale gathered weights"
    )
    assert worker.peak_memory_bytes() > 1 << 20


def test_bfloat16_wire_and_save(checkpoints, single, tmp_path):
    path = checkpoints["tied"]
    worker = single(config(path, model__dtype="bfloat16"))
    want = {n: p.to(torch.bfloat16) for n, p in hf_model(path).named_parameters()}
    plan = worker.weight_plan()
    assert [p.name for p in plan] == list(want) and "lm_head.weight" not in want
    for piece, tensor in zip(plan, worker.weight_tensors(), strict=True):
        assert piece.dtype == "bfloat16" and (piece.start, piece.stop) == (0, piece.shape[0])
        assert torch.equal(tensor.to(torch.bfloat16), want[piece.name])
    assert all(p.dtype == torch.float32 for p in worker.model.parameters())
    metrics = worker.update(make_batch(path))
    assert np.isfinite(metrics["actor/loss"])
    worker.save_hf(str(tmp_path / "hf"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert saved.dtype == torch.bfloat16 and saved.config.architectures == ["Qwen2ForCausalLM"]
    for n, p in saved.named_parameters():
        assert torch.equal(p, torch.from_numpy(whole(worker)[n]).bfloat16())
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "w1"


def test_weights_can_be_read_while_a_forward_pass_runs(checkpoints, single):
    """The stream of v(N) overlaps the first passes of step N, when modules hold gathered parameters."""
    seen = []

    class Reader(PolicyWorker):
        def _micro_loss(self, *args, **kwargs):
            loss = super()._micro_loss(*args, **kwargs)
            seen.append([t.clone() for t in self.weight_tensors()])
            return loss

    worker = single(config(checkpoints["untied"], actor__lr=1e-2), cls=Reader)
    before = whole(worker)
    worker.update(make_batch(checkpoints["untied"]))
    after = whole(worker)
    for piece, during, now in zip(
        worker.weight_plan(), seen[0], worker.weight_tensors(), strict=True
    ):
        np.testing.assert_array_equal(during.numpy(), before[piece.name])
        np.testing.assert_array_equal(now.numpy(), after[piece.name])
    assert any((before[n] != after[n]).any() for n in before)


def test_save_replaces_whole_and_reports_failures(checkpoints, single, tmp_path):
    worker, target = single(config(checkpoints["untied"])), tmp_path / "hf"
    target.mkdir()
    (target / "stale.txt").write_text("old")
    worker.save_hf(str(target))
    assert not (target / "stale.txt").exists() and [p.name for p in tmp_path.iterdir()] == ["hf"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match="could not write"):
        worker.save_hf(str(tmp_path / "file" / "hf"))


# ---- several ranks ----------------------------------------------------------------------------------------------


def run_rank(rank, world, cases, out):
    """In a spawned process: for each (name, config, port) everything the test below asks about."""
    torch.set_num_threads(1)
    for name, cfg, port in cases:
        batch = make_batch(cfg.model.path)
        worker = start(cfg, rank=rank, world=world, port=port)
        pieces = [
            (dataclasses.astuple(p), t.clone().numpy())
            for p, t in zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
        ]
        log_probs, squares = worker.log_prob(batch), worker.log_prob_and_squares(batch)
        scores = worker.score([s.response_ids for s in batch.samples])
        metrics = worker.update(batch)
        weights, gradients = whole(worker), worker.gradients
        worker.save_hf(f"{out}/{name}_hf")
        bad = make_batch(cfg.model.path)
        bad.advantages[0][:] = np.nan  # only one rank has this sample; both must skip
        skipped = worker.update(bad)["actor/skipped_updates"]
        same = all((a == weights[n]).all() for n, a in whole(worker).items())
        result = dict(
            pieces=pieces, log_probs=log_probs, squares=squares, scores=scores, metrics=metrics, weights=weights,
            gradients=gradients, skipped=skipped, same=same,
        )  # fmt: skip
        torch.save(result, f"{out}/{name}_{rank}.pt")
        end()


def run_world(world, cases, out):
    cases = [(name, cfg, free_port()) for name, cfg in cases]
    mp.spawn(run_rank, args=(world, cases, str(out)), nprocs=world)
    return {
        n: [torch.load(f"{out}/{n}_{r}.pt", weights_only=False) for r in range(world)]
        for n, _, _ in cases
    }


def check_world(results, path, reference, out, name):
    gradients, metrics, weights = reference
    union = {}
    for r in results:
        assert_gradients_equal(r["gradients"], gradients)
        timeless = {k: v for k, v in r["metrics"].items() if not k.endswith("_s")}
        for key, value in timeless.items():
            assert value == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
        assert r["metrics"] == results[0]["metrics"], "metrics must be equal on every rank"
        assert r["skipped"] >= 1 and r["same"]
        assert not union.keys() & r["log_probs"].keys()
        union |= r["log_probs"]
        assert r["squares"].keys() == r["log_probs"].keys()
        for i, both in r["squares"].items():
            assert (both[:, 0] == r["log_probs"][i]).all() and (
                both[:, 1] > np.exp(2 * both[:, 0])
            ).all()
    batch, model = make_batch(path), hf_model(path)
    assert sorted(union) == list(range(len(batch.samples)))
    with torch.no_grad():
        for i, s in enumerate(batch.samples):
            np.testing.assert_allclose(
                union[i], hf_log_probs(model, s, 0.7).numpy(), atol=1e-5, rtol=0
            )
    for a, b in zip(results[0]["scores"], results[-1]["scores"], strict=True):
        np.testing.assert_array_equal(a, b)
    # the pieces of all ranks make up the checkpoint, bit by bit, each row once
    want = dict(model.named_parameters())
    built = {n: np.full(p.shape, np.nan, np.float32) for n, p in want.items()}
    for r in results:
        for (piece, dtype, shape, begin, stop, _), rows in r["pieces"]:
            assert (
                dtype == "float32"
                and shape == tuple(want[piece].shape)
                and rows.shape[0] == stop - begin > 0
            )
            assert np.isnan(built[piece][begin:stop]).all(), "a row came twice"
            built[piece][begin:stop] = rows
    for n, p in want.items():
        np.testing.assert_array_equal(built[n], p.detach().numpy())
    saved = hf_model(f"{out}/{name}_hf")
    for n, p in saved.named_parameters():
        np.testing.assert_array_equal(p.detach().numpy(), results[0]["weights"][n])
        np.testing.assert_allclose(p.detach().numpy(), weights[n], atol=5e-6)


def test_two_ranks_equal_one(checkpoints, reference, tmp_path):
    cases = [
        ("tied", config(checkpoints["tied"], **OBJECTIVES["everything"])),
        (
            "untied",
            config(checkpoints["untied"], **OBJECTIVES["everything"], actor__micro_batch_tokens=40),
        ),
    ]
    results = run_world(2, cases, tmp_path)
    for name, _ in cases:
        check_world(results[name], checkpoints[name], reference[name], tmp_path, name)


@pytest.mark.slow
def test_four_ranks_and_hsdp_equal_one(checkpoints, reference, tmp_path):
    """Shards with uneven ends, empty micro-batches, and two replicas that share the sending."""
    everything = OBJECTIVES["everything"]
    cases = [
        ("untied", config(checkpoints["untied"], **everything, actor__micro_batch_tokens=40)),
        ("tied", config(checkpoints["tied"], **everything, actor__fsdp_size=2)),
    ]
    results = run_world(4, cases, tmp_path)
    for name, _ in cases:
        check_world(results[name], checkpoints[name], reference[name], tmp_path, name)
    sent = [sum(block.size for _, block in r["pieces"]) for r in results["tied"]]
    first, second = sum(sent[:2]), sum(sent[2:])
    assert min(first, second) > 0.3 * (first + second), "dealt out by size"
    names = [{piece[0] for piece, _ in r["pieces"]} for r in results["tied"]]
    assert not (names[0] | names[1]) & (names[2] | names[3]), (
        "each tensor by the ranks of one replica"
    )
