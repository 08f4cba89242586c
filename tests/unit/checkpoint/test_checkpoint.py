"""What a checkpoint holds, and which one a run resumes from; whole runs are in
test_e2e_resume.py."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from one_step_off import checkpoint
from one_step_off.checkpoint import files, finding
from one_step_off.config.errors import ConfigError
from one_step_off.data.samples import Sample
from tests.unit.checkpoint.checkpoint_helpers import run_config, save

lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=8)


def random_sample(rng: np.random.Generator, index: int, prompt: int, response: int) -> Sample:
    """A sample of so many tokens; `index` is also its prompt's row."""
    return Sample(
        prompt_id=(int(rng.integers(-1, 5)), index),
        index=index,
        prompt_ids=rng.integers(0, 99, prompt).astype(np.int32),
        response_ids=rng.integers(0, 99, response).astype(np.int32),
        log_probs=rng.normal(size=response).astype(np.float32),
        loss_mask=rng.random(response) > 0.5,
        versions=rng.integers(0, 9, response).astype(np.int32),
        attempt=2,
        reward=float(rng.normal()),
        finish_reason="stop",
        response='a\n"ü',
        extra={"k": 1},
    )


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(0, 2**31))
def test_samples_come_back_bit_for_bit(tmp_path_factory, shapes, seed):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("samples")
    samples = [random_sample(rng, i, p, r) for i, (p, r) in enumerate(shapes)]
    checkpoint.write_samples(samples, folder)
    for a, b in zip(samples, checkpoint.read_samples(folder), strict=True):
        for name in files.ARRAY_TYPES:
            x = getattr(a, name)
            y = getattr(b, name)
            assert x.dtype == y.dtype
            assert np.array_equal(x, y), name
        assert all(getattr(a, name) == getattr(b, name) for name in files.JSON_FIELDS)


@given(lengths, st.integers(0, 2**31))
def test_experts_come_back_and_those_of_a_prompt_lie_there_once(tmp_path_factory, shapes, seed):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("samples")
    samples = [random_sample(rng, i, p, max(r, 1)) for i, (p, r) in enumerate(shapes)]
    for sample in samples:
        if rng.random() < 0.7:
            rows = (len(sample.prompt_ids), len(sample.response_ids) - 1)
            sample.prompt_experts, sample.response_experts = (
                rng.integers(0, 300, (count, 3, 2)).astype(np.uint16) for count in rows
            )
    if len(samples) > 1 and samples[0].experts is not None:
        samples[1].prompt_ids = samples[0].prompt_ids
        samples[1].prompt_experts = samples[0].prompt_experts
        samples[1].response_experts = samples[1].response_ids[1:, None, None] * np.ones(
            (1, 3, 2), np.uint16
        )
        samples[1].response_experts = samples[1].response_experts.astype(np.uint16)
    checkpoint.write_samples(samples, folder)
    result = checkpoint.read_samples(folder)
    for before, after in zip(samples, result, strict=True):
        if before.experts is None:
            assert after.experts is None
        else:
            assert after.experts.dtype == np.uint16
            assert np.array_equal(before.prompt_experts, after.prompt_experts)
            assert np.array_equal(before.response_experts, after.response_experts)
    if len(samples) > 1 and samples[0].experts is not None:
        assert result[1].prompt_experts is result[0].prompt_experts


def test_the_names_in_a_file_of_samples_stay(tmp_path):
    """A checkpoint outlives the names of the code."""
    sample = random_sample(np.random.default_rng(0), 0, 3, 4)
    checkpoint.write_samples([sample], tmp_path)
    row = json.loads((tmp_path / "samples.jsonl").read_text())
    assert sorted(row) == [
        "extra",
        "finish_reason",
        "incarnation",
        "index",
        "prompt_id",
        "response",
        "reward",
        "seconds",
    ]


def test_the_last_k_stay_and_auto_finds_the_newest(tmp_path):
    cfg = run_config(tmp_path, keep_checkpoints=2)
    assert checkpoint.find(cfg) is None
    for step in (5, 10, 15):
        save(cfg, step)
    assert [p.name for p in checkpoint.finished(checkpoint.folder_of(cfg))] == [
        "step_000010",
        "step_000015",
    ]
    assert checkpoint.find(cfg).name == "step_000015"
    cfg.trainer.resume = "never"
    assert checkpoint.find(cfg) is None
    cfg.trainer.resume = str(tmp_path / "checkpoints" / "step_000010")
    assert checkpoint.find(cfg).name == "step_000010"


def test_a_save_that_fails_leaves_the_older_one(tmp_path):
    cfg = run_config(tmp_path)
    save(cfg, 5)
    with pytest.raises(OSError, match="disk full"):
        save(cfg, 10, fail=True)
    assert checkpoint.find(cfg).name == "step_000005"
    save(cfg, 10)
    assert checkpoint.find(cfg).name == "step_000010"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c: setattr(c.pipeline, "staleness", 0),
            "pipeline.staleness=0: checkpoint .* was written with 1",
        ),
        (lambda c: setattr(c.rollout, "n", 3), "rollout.n=3"),
        (lambda c: setattr(c.trainer, "seed", 3), "trainer.seed=3"),
        (
            lambda c: setattr(c.agent, "loop", "tool"),
            "agent.loop=tool: checkpoint .* was written with single_turn",
        ),
        (
            lambda c: setattr(c.actor, "backend", "megatron"),
            "actor.backend=megatron: .* was written with fsdp; resume with",
        ),
        (
            lambda c: setattr(c.actor, "optimizer", "muon"),
            "actor.optimizer=muon: checkpoint .* was written with adamw; resume with",
        ),
        (
            lambda c: setattr(c.trainer, "resume", "/nowhere/step_000001"),
            "step_000001: manifest.json: FileNotFoundError: .*name an intact one, or",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, words):
    cfg = run_config(tmp_path)
    save(cfg, 5)
    change(cfg)
    with pytest.raises(ConfigError, match=words):
        checkpoint.find(cfg)


def test_a_broken_state_file_is_named(tmp_path):
    cfg = run_config(tmp_path)
    (save(cfg, 5) / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"step_000005: state.json: its bytes: 1, but"):
        checkpoint.find(cfg)


@pytest.mark.parametrize(("freq", "due"), [(-1, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_when_it_is_due(tmp_path, freq, due):
    saver = checkpoint.Checkpointer(run_config(tmp_path, save_freq=freq), None)
    assert [s for s in range(7) if saver.is_due(s)] == due


def test_state_json_is_plain(tmp_path):
    state = json.loads((save(run_config(tmp_path), 5) / "state.json").read_text())
    assert state["step"] == 5
    assert state["has_samples"] is False
    assert set(state["fixed"]) == {
        *finding.FIXED_KEYS,
        "actor.backend",
        "actor.optimizer",
    }


def test_a_checkpoint_from_before_optimizers_had_names_is_adamws(tmp_path, monkeypatch):
    cfg = run_config(tmp_path)
    fixed = {k: v for k, v in checkpoint.fixed_keys(cfg).items() if k != "actor.optimizer"}
    monkeypatch.setattr(finding, "read_state", lambda path: {"fixed": fixed})
    finding._check_fixed_keys(cfg, tmp_path)
    cfg.actor.optimizer = "muon"
    with pytest.raises(ConfigError, match="was written with adamw"):
        finding._check_fixed_keys(cfg, tmp_path)


def test_a_checkpoint_knows_whether_it_began_with_a_warm_up(tmp_path, monkeypatch):
    """Without the warm-up's model, adapters and reference would be those of another one."""
    cfg = run_config(tmp_path)
    cfg.trainer.sft_steps = 20
    fixed = checkpoint.fixed_keys(cfg)
    monkeypatch.setattr(finding, "read_state", lambda path: {"fixed": fixed})
    finding._check_fixed_keys(cfg, tmp_path)
    cfg.trainer.sft_steps = 0
    with pytest.raises(ConfigError, match=r"trainer.sft_steps=0: .* was written with 20"):
        finding._check_fixed_keys(cfg, tmp_path)
    del fixed["trainer.sft_steps"]  # from before there were any
    finding._check_fixed_keys(cfg, tmp_path)


OTHERS = {
    "model.freeze": ["embed_tokens"],
    "pipeline.staleness": 3,
    "pipeline.batch_source": "my_batches:LongestFirst",
    "weight_sync.in_flight": "keep",
    "rollout.n": 99,
    "trainer.seed": 99,
    "data.train_batch_size": 99,
    "agent.loop": "tool",
    "model.dtype": "float32",
    "model.lora_rank": 99,
    "model.lora_alpha": 99,
    "model.lora_target_modules": "q_proj",
    "trainer.sft_steps": 99,
    "actor.optimizer": "muon",
}


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("key", [*finding.FIXED_KEYS, "actor.optimizer"])
def test_an_evaluation_alone_needs_the_same_model_and_nothing_of_the_training(tmp_path, key, rank):
    cfg = run_config(tmp_path)
    cfg.model.lora_rank = rank
    path = save(cfg, 5)
    section, name = key.split(".")
    assert getattr(getattr(cfg, section), name) != OTHERS[key]
    setattr(getattr(cfg, section), name, OTHERS[key])
    shown = re.escape(f"{key}={OTHERS[key]}")
    with pytest.raises(ConfigError, match=rf"^{shown}: .*; resume with it, or"):
        checkpoint.find(cfg)
    cfg.trainer.val_only = True
    # The frozen weights beneath adapters are those of the supervised steps.
    is_of_model = section == "model" or (key == "trainer.sft_steps" and rank)
    if is_of_model or key == "actor.optimizer":
        with pytest.raises(ConfigError, match=rf"^{shown}: .*; evaluate with it$"):
            checkpoint.find(cfg)
    else:
        assert checkpoint.find(cfg) == path


def test_blocks_of_another_size_are_refused(tmp_path, monkeypatch):
    cfg = run_config(tmp_path)
    cfg.actor.optimizer = "adamw_8bit"
    fixed = checkpoint.fixed_keys(cfg)
    monkeypatch.setattr(finding, "read_state", lambda path: {"fixed": fixed})
    cfg.actor.optimizer_kwargs = {"block_size": 256}  # torchao's own
    finding._check_fixed_keys(cfg, tmp_path)
    cfg.actor.optimizer_kwargs = {"block_size": 128}
    with pytest.raises(ConfigError, match=r"block_size=128: .* was written with 256"):
        finding._check_fixed_keys(cfg, tmp_path)
