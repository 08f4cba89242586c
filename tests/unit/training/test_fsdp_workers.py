"""The FSDP back end against plain Hugging Face models: the same log-probs, the same gradients,
however the work is cut."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from one_step_off.algorithms import schedule
from one_step_off.algorithms.policy_losses import POLICY_LOSSES
from one_step_off.data.staleness import StalenessError
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import (
    CLIP,
    MODELS,
    OBJECTIVES,
    VOCAB,
    assert_gradients_equal,
    config,
    hf_log_probs,
    hf_model,
    make_batch,
    whole,
)
from tests.unit.training.objective_by_hand import by_hand


@pytest.mark.parametrize("name", MODELS)
def test_log_prob_equals_the_models_own_forward(model_folders, start_single, name):
    path = model_folders[name]
    batch = make_batch(path)
    model = hf_model(path)
    with torch.no_grad():
        want = [hf_log_probs(model, s, 0.7).numpy() for s in batch.samples]
        cold = [hf_log_probs(model, s, 1.0).numpy() for s in batch.samples]
    worker = start_single(config(path))
    for settings in ({}, {"log_prob_chunk": 5}, {"micro_batch_tokens": 40}):
        worker.cfg = config(path, **{f"actor__{k}": v for k, v in settings.items()})
        worker.role_config = worker.cfg.actor
        got = worker.log_prob(batch)
        assert sorted(got) == list(range(len(want)))
        for i, w in enumerate(want):
            assert got[i].dtype == np.float32
            np.testing.assert_allclose(got[i], w, atol=1e-5, rtol=0)
    scores = worker.score([np.concatenate([s.prompt_ids, s.response_ids]) for s in batch.samples])
    for s, score, w in zip(batch.samples, scores, cold, strict=True):
        assert len(score) == s.length - 1
        np.testing.assert_allclose(score[len(s.prompt_ids) - 1 :], w, atol=1e-5, rtol=0)


def test_squares_of_the_whole_distribution_beside_the_log_probs(model_folders, start_single):
    path = model_folders["tied"]
    batch = make_batch(path)
    model = hf_model(path)
    worker = start_single(config(path, actor__log_prob_chunk=5, actor__micro_batch_tokens=40))
    got = worker.log_prob_and_squares(batch)
    plain = worker.log_prob(batch)
    for i, s in enumerate(batch.samples):
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
        with torch.no_grad():
            p = (
                model(ids[None], use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / 0.7
            ).softmax(-1)
        assert got[i].shape == (len(s.response_ids), 2)
        assert got[i].dtype == np.float32
        np.testing.assert_array_equal(got[i][:, 0], plain[i])
        np.testing.assert_allclose(got[i][:, 1], (p**2).sum(-1).numpy(), rtol=1e-5)
        # |one-hot of the token - p|^2, the squared gradient at the logits that the optimal token
        # baseline adds up
        one_hot = torch.nn.functional.one_hot(ids[len(s.prompt_ids) :], VOCAB)
        energy = 1 - 2 * np.exp(got[i][:, 0]) + got[i][:, 1]
        np.testing.assert_allclose(
            energy, (one_hot - p).square().sum(-1).numpy(), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradients_equal_the_formula(model_folders, start_single, objective):
    path = model_folders["untied" if objective in ("plain", "mis") else "tied"]
    cfg = config(path, **OBJECTIVES[objective])
    batch = make_batch(path)
    loss, gradients = by_hand(path, batch, cfg)
    worker = start_single(cfg)
    metrics = worker.update(batch)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)
    assert worker.version == 1
    assert metrics["actor/tokens"] == sum(s.loss_mask.sum() for s in batch.samples)
    assert 0 < metrics["actor/clip_frac"] < 1
    assert metrics["ratio/max"] > 1
    assert metrics["actor/skipped_updates"] == 0
    assert metrics["logprob_diff/max"] > metrics["logprob_diff/mean"] > 0
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_every_policy_loss_trains(model_folders, start_single):
    path = model_folders["tied"]
    batch = make_batch(path)
    worker = start_single(config(path, **CLIP, algorithm__clip_ratio_c=3.0))
    for step, name in enumerate(POLICY_LOSSES):
        worker.cfg.algorithm.policy_loss = name
        metrics = worker.update(batch)
        assert np.isfinite(metrics["actor/loss"])
        assert metrics["actor/grad_norm"] > 0, name
        assert worker.version == step + 1
        assert metrics["actor/skipped_updates"] == 0


LAYOUTS = {
    "micro-batches": {"actor__micro_batch_tokens": 48},
    "one by one": {"actor__micro_batch_tokens": 1},
    "packed": {"actor__packing": "on", "actor__micro_batch_tokens": 48},
    "packed and checkpointing": {"actor__packing": "on", "actor__activation_checkpointing": True},
    "chunks": {"actor__log_prob_chunk": 7},
    "checkpointing": {"actor__activation_checkpointing": True},
    "compiled": {"actor__torch_compile": True, "actor__activation_checkpointing": True},
}


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x == "compiled")) for x in LAYOUTS]
)
def test_gradients_do_not_depend_on_the_layout(
    model_folders, start_single, one_rank_update, layout
):
    worker = start_single(
        config(model_folders["tied"], **OBJECTIVES["everything"], **LAYOUTS[layout])
    )
    metrics = worker.update(make_batch(model_folders["tied"]))
    if layout == "compiled":
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert_gradients_equal(worker.gradients, one_rank_update["tied"][0])
    for key, value in one_rank_update["tied"][1].items():
        if not key.endswith("_s"):
            assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_stale_tokens_change_nothing(model_folders, start_single):
    worker = start_single(config(model_folders["tied"]))
    before = whole(worker)
    for field, value in (("versions", 2), ("attempt", 1)):
        batch = make_batch(model_folders["tied"])
        if field == "versions":
            batch.samples[5].versions[-1] = value
        else:
            batch.samples[5].attempt = value
        with pytest.raises(StalenessError, match="sample 2"):
            worker.update(batch)
    batch = make_batch(model_folders["tied"])
    batch.advantages = None
    with pytest.raises(ValueError, match="advantage"):
        worker.update(batch)
    after = whole(worker)
    assert worker.version == 0
    assert all((after[n] == before[n]).all() for n in before)


def test_a_gradient_that_is_not_finite_skips_one_step(model_folders, start_single):
    cfg = config(model_folders["tied"], actor__ppo_mini_batch_size=2, actor__lr=1e-2)
    worker = start_single(cfg)
    batch = make_batch(model_folders["tied"])
    before = whole(worker)
    for a in batch.advantages:
        a[:] = np.nan
    metrics = worker.update(batch)
    after = whole(worker)
    assert metrics["actor/skipped_updates"] == 2
    assert np.isnan(metrics["actor/grad_norm"])
    assert all((after[n] == before[n]).all() for n in before)
    assert worker.version == 1
    assert worker.optimizer_steps == 2
    metrics = worker.update(make_batch(model_folders["tied"]))
    assert metrics["actor/skipped_updates"] == 0
    assert np.isfinite(metrics["actor/loss"])
    assert any((a != before[n]).any() for n, a in whole(worker).items())


def test_mini_batches_epochs_clip_and_schedule(model_folders, start_single):
    """Against AdamW on a plain model: 2 epochs x 2 mini-batches, clipped, with warm-up and cosine
    decay."""
    path = model_folders["untied"]
    cfg = config(path, **CLIP, actor__ppo_mini_batch_size=2, actor__ppo_epochs=2, actor__lr=1e-3)
    cfg.actor.grad_clip = 0.05
    cfg.actor.warmup_steps = 2
    cfg.actor.lr_schedule = "cosine"
    batch = make_batch(path)
    worker = start_single(cfg)
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
            g["lr"] = schedule.learning_rate(step, 40, 1e-3, "cosine", 2)
        optimizer.step()
    assert metrics["actor/lr"] == schedule.learning_rate(3, 40, 1e-3, "cosine", 2)
    trained = whole(worker)
    for n, p in model.named_parameters():
        np.testing.assert_allclose(trained[n], p.detach().numpy(), atol=1e-5)


def test_ref_is_frozen_and_scores(model_folders, start_single):
    worker = start_single(config(model_folders["tied"]), role="ref")
    assert worker.optimizer is None
    assert not any(p.requires_grad for p in worker.model.parameters())
    old = worker.log_prob(make_batch(model_folders["tied"]))
    worker.model.model.embed_tokens.weight.to_local().mul_(0.5)
    new = worker.log_prob(make_batch(model_folders["tied"]))
    assert len(new) == 12
    assert all((new[i] != old[i]).any() for i in old), "scored with stale gathered weights"
    assert worker.peak_memory_bytes() > 1 << 20


def test_bfloat16_wire_and_save(model_folders, start_single, tmp_path):
    path = model_folders["tied"]
    worker = start_single(config(path, model__dtype="bfloat16"))
    want = {n: p.to(torch.bfloat16) for n, p in hf_model(path).named_parameters()}
    plan = worker.weight_plan()
    assert [p.name for p in plan] == list(want)
    assert "lm_head.weight" not in want
    for piece, tensor in zip(plan, worker.weight_tensors(), strict=True):
        assert piece.dtype == "bfloat16"
        assert (piece.start, piece.stop) == (0, piece.shape[0])
        assert torch.equal(tensor.to(torch.bfloat16), want[piece.name])
    assert all(p.dtype == torch.float32 for p in worker.model.parameters())
    metrics = worker.update(make_batch(path))
    assert np.isfinite(metrics["actor/loss"])
    worker.save_hf(str(tmp_path / "hf"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert saved.dtype == torch.bfloat16
    assert saved.config.architectures == ["Qwen2ForCausalLM"]
    for n, p in saved.named_parameters():
        assert torch.equal(p, torch.from_numpy(whole(worker)[n]).bfloat16())
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "w1"


def test_live_rows_are_one_list_until_a_storage_moves(model_folders, start_single):
    worker = start_single(config(model_folders["untied"]))
    rows = worker.weight_tensors()
    assert worker.weight_tensors() is rows
    _, parameter = worker._weights[3]
    rows[3].fill_(7.0)
    assert (parameter.to_local() == 7.0).all(), "it is the parameter itself"
    parameter._local_tensor.data = parameter._local_tensor.clone()
    moved = worker.weight_tensors()
    assert moved is not rows
    assert worker.weight_tensors() is moved
    rows[3].fill_(8.0)
    assert (moved[3] == 7.0).all()


def test_weights_can_be_read_while_a_forward_pass_runs(model_folders, start_single):
    """The stream of v(N) overlaps the first passes of step N, when modules hold gathered
    parameters."""
    seen = []

    class Reader(PolicyWorker):
        def _micro_batch_loss(self, *args, **kwargs):
            loss = super()._micro_batch_loss(*args, **kwargs)
            seen.append([t.clone() for t in self.weight_tensors()])
            return loss

    worker = start_single(config(model_folders["untied"], actor__lr=1e-2), cls=Reader)
    before = whole(worker)
    worker.update(make_batch(model_folders["untied"]))
    after = whole(worker)
    for piece, during, now in zip(
        worker.weight_plan(), seen[0], worker.weight_tensors(), strict=True
    ):
        np.testing.assert_array_equal(during.numpy(), before[piece.name])
        np.testing.assert_array_equal(now.numpy(), after[piece.name])
    assert any((before[n] != after[n]).any() for n in before)


def test_save_replaces_whole_and_reports_failures(model_folders, start_single, tmp_path):
    worker = start_single(config(model_folders["untied"]))
    target = tmp_path / "hf"
    target.mkdir()
    (target / "stale.txt").write_text("old")
    worker.save_hf(str(target))
    assert not (target / "stale.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match="could not write"):
        worker.save_hf(str(tmp_path / "file" / "hf"))
