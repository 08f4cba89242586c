"""Critic and reward model under FSDP2, against transformers' own classifiers and the formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.training.fsdp.fsdp_workers import CriticWorker, PolicyWorker, RewardModelWorker
from tests.unit.training.fsdp_helpers import (
    RecordingCritic,
    assert_gradients_equal,
    config,
    make_batch,
    whole,
)


def own_values(model, sample):
    """The scalar head at the position before each response token, one sequence at a time."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    return model.score(hidden)[:, 0][len(sample.prompt_ids) - 1 : -1]


def with_returns(path, seed=0):
    batch = make_batch(path)
    rng = np.random.default_rng(seed)
    batch.values = [rng.normal(0, 1, len(s.response_ids)).astype(np.float32) for s in batch.samples]
    batch.returns = [
        rng.normal(0, 1, len(s.response_ids)).astype(np.float32) for s in batch.samples
    ]
    return batch


def classifier(path):
    auto_class = transformers.AutoModelForSequenceClassification
    model = auto_class.from_pretrained(path, dtype=torch.float32).eval()
    # The padding token is in sequences too, and is no padding there.
    model.get_input_embeddings().padding_idx = None
    return model


@pytest.mark.parametrize("budget", [16384, 40])
def test_values_are_the_heads_before_each_token(model_folders, judge, start_single, budget):
    batch = make_batch(model_folders["tied"])
    model = classifier(judge)
    worker = start_single(
        config(model_folders["tied"], critic__path=judge, critic__micro_batch_tokens=budget),
        role="critic",
        cls=CriticWorker,
    )
    got = worker.values(batch)
    assert sorted(got) == list(range(len(batch.samples)))
    for i, s in enumerate(batch.samples):
        with torch.no_grad():
            np.testing.assert_allclose(got[i], own_values(model, s).numpy(), atol=1e-5, rtol=0)


def value_loss_by_hand(model, batch, clip, aggregation):
    """max((V - R)^2, (V clipped around V_old - R)^2) / 2 over the trained tokens: their mean, or
    the mean over sequences of their means. Returns the loss, and how many tokens are clipped."""
    trained_tokens = [int(s.loss_mask.sum()) for s in batch.samples]
    sequences = sum(count > 0 for count in trained_tokens)
    loss = torch.zeros(())
    clipped_tokens = 0
    for i, sample in enumerate(batch.samples):
        values = own_values(model, sample)
        count = sum(trained_tokens)
        if aggregation == "sequence-mean":
            count = sequences * trained_tokens[i]
        for t in np.flatnonzero(sample.loss_mask):
            old = float(batch.values[i][t])
            target = float(batch.returns[i][t])
            free = (values[t] - target) ** 2
            clipped = (values[t].clamp(old - clip, old + clip) - target) ** 2
            loss = loss + torch.maximum(free, clipped) / 2 / count
            clipped_tokens += int(clipped > free)
    return loss, clipped_tokens


@pytest.mark.parametrize("aggregation", [None, "sequence-mean"])
def test_value_loss_and_gradients_equal_the_formula(
    model_folders, judge, start_single, aggregation
):
    """Whatever the actor's aggregation is."""
    batch = with_returns(model_folders["tied"])
    model = classifier(judge)
    loss, clipped_tokens = value_loss_by_hand(model, batch, 0.4, aggregation)
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    cfg = config(
        model_folders["tied"],
        critic__path=judge,
        critic__clip_range_value=0.4,
        critic__grad_clip=1e9,
        algorithm__loss_agg="seq-sum-norm",
    )
    if aggregation:
        cfg.critic.loss_agg = aggregation
    worker = start_single(cfg, role="critic", cls=RecordingCritic)
    metrics = worker.update(batch)
    tokens = sum(int(s.loss_mask.sum()) for s in batch.samples)
    assert 0 < clipped_tokens < tokens
    assert metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic/clip_frac"] == pytest.approx(clipped_tokens / tokens)
    assert_gradients_equal(worker.gradients, gradients, rtol=1e-5)
    is_trained = np.concatenate([s.loss_mask for s in batch.samples])
    returns = np.concatenate(batch.returns)[is_trained].astype(np.float64)
    values = np.concatenate(batch.values)[is_trained].astype(np.float64)
    explained = 1 - (returns - values).var() / returns.var()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-6)


def test_a_critic_learns_what_returns_depend_on(model_folders, start_single):
    """From a language model's checkpoint, whose head is new: the loss falls to a fraction."""
    cfg = config(model_folders["untied"], critic__lr=3e-3, critic__clip_range_value=1e9)
    worker = start_single(cfg, role="critic", cls=CriticWorker)
    batch = with_returns(model_folders["untied"])
    batch.returns = [
        np.full(len(s.response_ids), s.prompt_id[1], np.float32) for s in batch.samples
    ]
    losses = []
    for _ in range(40):
        batch.values = [worker.values(batch)[i] for i in range(len(batch.samples))]
        losses.append(worker.update(batch)["critic/loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_a_new_head_depends_on_the_seed_alone(model_folders, start_single):
    heads = []
    for seed in (0, 0, 1):
        cfg = config(model_folders["tied"], trainer__seed=seed)
        worker = start_single(cfg, role="critic", cls=CriticWorker)
        heads.append(whole(worker)["score.weight"])
    assert np.array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])
    assert heads[0].any()


def test_a_critic_resumes_from_its_checkpoint(model_folders, judge, start_single, tmp_path):
    cfg = config(model_folders["tied"], critic__path=judge, critic__lr=1e-2)
    batch = with_returns(model_folders["tied"])
    worker = start_single(cfg, role="critic", cls=CriticWorker)
    worker.update(batch)
    worker.save_state(str(tmp_path))
    worker.saved()
    worker.update(batch)
    want = whole(worker)
    again = start_single(cfg, role="critic", cls=CriticWorker)
    again.load_state(str(tmp_path))
    again.update(batch)
    assert again.version == 2
    assert all(np.array_equal(v, want[n]) for n, v in whole(again).items())


@pytest.mark.parametrize("budget", [16384, 30])
def test_scores_are_the_classifiers_own(model_folders, judge, start_single, budget):
    batch = make_batch(model_folders["tied"])
    model = classifier(judge)
    sequences = [np.concatenate([s.prompt_ids, s.response_ids]) for s in batch.samples]
    cfg = config(
        model_folders["tied"], reward_model__path=judge, reward_model__micro_batch_tokens=budget
    )
    worker = start_single(cfg, role="reward_model", cls=RewardModelWorker)
    got = worker.score_sequences(sequences)
    for i, ids in enumerate(sequences):
        with torch.no_grad():
            want = model(input_ids=torch.from_numpy(ids).long()[None]).logits[0, 0].item()
        assert got[i] == pytest.approx(want, abs=1e-5)
    assert len(set(got.values())) > len(got) // 2
    assert not any(p.requires_grad for p in worker.model.parameters())


def test_a_reward_model_without_its_head_is_refused(model_folders, start_single):
    path = model_folders["tied"]
    cfg = config(model_folders["untied"], reward_model__path=path)
    with pytest.raises(
        ConfigError, match=r"reward_model.path: .* lacks 1 weights .*, such as score.weight"
    ):
        start_single(cfg, role="reward_model", cls=RewardModelWorker)


def test_an_actor_that_waits_counts_its_steps(model_folders, start_single):
    worker = start_single(config(model_folders["tied"], actor__lr=1e-2), cls=PolicyWorker)
    before = whole(worker)
    assert worker.update(make_batch(model_folders["tied"]), False) == {}
    assert worker.version == 1
    assert all(np.array_equal(v, before[n]) for n, v in whole(worker).items())
