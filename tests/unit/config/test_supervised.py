"""The config of supervised steps, and what is refused in it."""

from __future__ import annotations

import contextlib
import copy

import pytest

from one_step_off import main_sft
from one_step_off.config import packages
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.placement import placement_text, process_cores
from one_step_off.config.supervised import supervised_config, warm_up_config
from one_step_off.runtime import launch
from one_step_off.runtime.validation import validate, validate_supervised

RUN = (
    "model.path=tiny:qwen2",
    "model.dtype=float32",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=4",
    "placement.device=cpu",
)


def supervised(*overrides: str):
    return validate_supervised(load_config([*RUN, *overrides]), 0)


def test_a_config_of_rl_trains_its_actor_alone():
    cfg = load_config(
        [
            *RUN,
            "placement.pools={gen: [3], train: [2]}",
            "placement.roles={rollout: gen, actor: train, ref: train, critic: train}",
            "placement.roles.teacher=train",
            "teacher.path=tiny:teacher",
            "algorithm.kl_coef=0.1",
            "rollout.temperature=0.7",
            "data.val_files=generator:word_problems",
        ]
    )
    made = validate_supervised(copy.deepcopy(cfg), 0)
    assert made.placement.pools == {"train": [2]}
    assert made.placement.roles == {"actor": "train"}
    assert made.algorithm.kl_coef == 0
    assert made.teacher.path == "", "no model is built that has no use"
    assert made.data.train_batch_size == made.actor.ppo_mini_batch_size == 64
    assert made.sft.train_files == made.sft.val_files == "generator:word_problems"
    assert supervised_config(made) == made, "the run's own config.yaml gives the same run"
    assert "actor x 2" in placement_text(made) and "rollout" not in placement_text(made)
    assert process_cores(made, "cpu", [0, 1, 2, 3]) == {"train": [[0, 1], [2, 3]]}
    with pytest.raises(ConfigError):
        validate(made, 0)


def test_the_section_overrides_those_of_rl():
    made = supervised(
        "sft.batch_size=12",
        "sft.lr=0.5",
        "sft.lr_schedule=cosine",
        "sft.warmup_steps=3",
        "sft.train_files=generator:products",
        "actor.ppo_epochs=4",
        "data.val_files=generator:word_problems",
    )
    assert made.data.train_batch_size == made.actor.ppo_mini_batch_size == 12
    assert made.actor.ppo_epochs == 1
    assert (made.actor.lr, made.actor.lr_schedule, made.actor.warmup_steps) == (0.5, "cosine", 3)
    assert made.sft.train_files == "generator:products"
    assert made.sft.val_files == "", "held-out prompts of RL need no answers"


@pytest.mark.parametrize(
    ("overrides", "lr"),
    [
        ([], 2e-5),
        (["actor.lr=0.25"], 2e-5),
        (["model.lora_rank=4"], 2e-4),
        (["model.lora_rank=4", "sft.lr=1e-3"], 1e-3),
        (["sft.lr=1e-6"], 1e-6),
    ],
)
def test_supervised_steps_have_a_learning_rate_of_their_own(overrides, lr):
    """That of RL is far too small for them."""
    made = supervised(*overrides)
    assert made.actor.lr == made.sft.lr == lr
    assert supervised_config(made) == made
    cfg = load_config([*RUN, "trainer.sft_steps=2", *overrides])
    rate_of_rl = cfg.actor.lr
    assert warm_up_config(cfg).actor.lr == lr
    assert cfg.actor.lr == rate_of_rl, "RL keeps its own"


@pytest.mark.parametrize(
    ("name", "lr", "schedule", "warmup_steps"),
    [("sft_tiny_cpu", 1e-3, "linear", 5), ("sft_qwen_gsm8k", 1e-5, "cosine", 10)],
)
def test_shipped_configs_name_their_learning_rate(name, lr, schedule, warmup_steps):
    actor = supervised_config(load_config([f"config=config/{name}.yaml"])).actor
    assert (actor.lr, actor.lr_schedule, actor.warmup_steps) == (lr, schedule, warmup_steps)


def test_a_rate_that_supervised_steps_do_not_read_is_named(monkeypatch, capsys):
    monkeypatch.setattr(launch, "run_supervised", lambda cfg: 0)
    monkeypatch.setattr(main_sft, "locked", lambda cfg: contextlib.nullcontext())
    assert main_sft.main([*RUN, "actor.lr=0.25"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: actor.lr=0.25: is the learning rate of RL")
    assert "use 2e-05 unless sft.lr is set" in line
    for arguments in ([], ["sft.lr=0.5", "actor.lr=0.25"], ["actor.lr=0.25", "--dry-run"]):
        assert main_sft.main([*RUN, *arguments]) == 0
        assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.sft_steps=5"], r"trainer.sft_steps=5: .*set it to 0"),
        (["trainer.keep_best=val/reward"], "trainer.keep_best=val/reward: .*set it to null"),
        (["data.val_sets={a: generator:products}"], "data.val_sets=a: .*sft.val_files"),
        (["sft.train_files=/no/such.jsonl"], "sft.train_files=/no/such.jsonl: no such file"),
        (["data.train_files=/no/such.jsonl"], "data.train_files=/no/such.jsonl: no such file"),
        (["sft.val_files=generator:x"], "sft.val_files=generator:x: no such generator"),
        (["data.train_files=[{files: generator:addition}]"], "is a list of sources, .*sft.train"),
        (["data.train_files="], "data.train_files=: not set"),
        (
            ["trainer.test_freq=2"],
            "trainer.test_freq=2: there is no held-out data .*; set sft.val_files",
        ),
        (["trainer.total_steps=null"], "one must be set"),
        (["placement.roles={rollout: rollout}"], "the role actor has no pool"),
        (["placement.roles={actor: x}"], "the role actor has no pool"),
        (["sft.batch_size=1", "placement.pools={rollout: [1], actor: [2]}"], "too few for 2 actor"),
        (["sft.overlong=drop"], "sft.overlong=drop: must be one of skip, cut, fail"),
        (["sft.lr_schedule=steep"], "must be one of constant, cosine, linear or null"),
        (["sft.lr=0"], "sft.lr=0.0: must be above 0"),
        (["sft.max_length=1"], "sft.max_length=1: must be at least 2"),
        (["sft.batchsize=3"], "did you mean sft.batch_size"),
        (["model.lora_rank=4", "actor.backend=megatron"], "only the fsdp back end"),
        (["actor.fsdp_size=3"], "does not divide"),
        (["actor.optimizer=muno"], "actor.optimizer=muno: .*did you mean muon"),
        (["actor.optimizer=muon", "actor.optimizer_kwargs.momentun=0.9"], "did you mean momentum"),
        (["actor.optimizer_kwargs.momentum=0.9"], "no such setting of adamw; remove it"),
    ],
)
def test_bad_input_is_refused_in_one_line(overrides, words):
    with pytest.raises(ConfigError, match=words) as refused:
        supervised(*overrides)
    assert "\n" not in str(refused.value)


def test_megatron_would_step_by_adamw_whatever_the_config_names(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    with pytest.raises(ConfigError, match="actor.optimizer=muon: .* has adamw alone"):
        supervised("actor.backend=megatron", "actor.optimizer=muon")


def test_the_program_refuses_before_it_starts_anything(capsys):
    assert main_sft.main([*RUN, "sft.train_files=/no/such.jsonl"]) == 2
    assert main_sft.main([*RUN, "--replay", "x"]) == 2
    assert main_sft.main([]) == 2
    captured = capsys.readouterr()
    errors = captured.err.splitlines()
    assert errors[0].startswith("error: sft.train_files=/no/such.jsonl: no such file")
    assert errors[1].startswith("error: --replay: ")
    assert errors[2].startswith("usage: python -m one_step_off.main_sft")


def test_help_and_dry_run(capsys):
    assert main_sft.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "sft.train_files" in text and "trainer.total_steps" in text
    assert "  rollout.n  (" not in text and "  weight_sync." not in text
    assert "  teacher." not in text
    assert main_sft.main([*RUN, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# actor [1] on cpu: actor x 1" in out
    assert load_config([*RUN]).sft.train_files == "", "the config itself is not changed"


def test_the_config_of_a_warm_up():
    cfg = load_config(
        [
            *RUN,
            "trainer.sft_steps=7",
            "trainer.output_dir=outputs/x",
            "trainer.resume=never",
            "trainer.test_freq=2",
            "data.val_files=generator:word_problems",
            "sft.lr=0.5",
        ]
    )
    validate(cfg, 0)
    made = warm_up_config(cfg)
    assert made.trainer.total_steps == 7 and made.trainer.sft_steps == 0
    assert made.trainer.output_dir == "outputs/x/sft"
    assert made.trainer.resume == "never"
    assert made.trainer.test_freq == 2
    assert made.actor.lr == 0.5 and cfg.actor.lr != 0.5
    cfg.sft.train_files = "generator:products"
    assert warm_up_config(cfg).trainer.test_freq == -1, "no held-out answers"
    cfg.trainer.resume = "outputs/y/checkpoints/step_000002"
    assert warm_up_config(cfg).trainer.resume == "auto"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.sft_steps=-1"], "must be at least 0"),
        (["trainer.sft_steps=2", "sft.train_files=/no.jsonl"], "sft.train_files=/no.jsonl: no su"),
        (
            ["trainer.sft_steps=2", "data.train_files=[{files: generator:addition}]"],
            "is a list of sources",
        ),
    ],
)
def test_a_warm_up_is_checked_with_the_run(overrides, words):
    with pytest.raises(ConfigError, match=words):
        validate(load_config([*RUN, *overrides]), 0)
