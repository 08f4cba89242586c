"""Advice of the form `use X`, `did you mean X?` and `set X` is followed to the letter, and the
config then loads and is valid."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.runtime.validation import validate, validate_supervised

MODULE = "def score(**kwargs):\n    return 0.0\n\n\nclass Loop:\n    pass\n"
GOOD = [
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "placement.device=cuda",
    "trainer.total_steps=2",
]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def refusal_of(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as error:
        validate(load_config(argv), num_gpus=64)
    return str(error.value)


@pytest.mark.parametrize(
    ("wrong", "advised"),
    [
        ("data.train_batch_size=25 actor.ppo_mini_batch_size=6", "5"),
        ("data.train_batch_size=25 actor.ppo_mini_batch_size=4", "5"),
        ("data.train_batch_size=5 actor.ppo_mini_batch_size=4", "5"),
        ("data.train_batch_size=64 actor.ppo_mini_batch_size=128", "64"),
        ("data.train_batch_size=60 rollout.n=1 algorithm.adv_estimator=reinforce_plus_plus "
         "rollout[1] actor[16] actor.ppo_mini_batch_size=7", "20"),
        ("data.train_batch_size=9 rollout.n=2 rollout[1] actor[8] "
         "actor.ppo_mini_batch_size=3", "9"),
        ("rollout[8] actor[1] rollout.tensor_parallel_size=3", "2"),
        ("rollout[8] actor[1] rollout.tensor_parallel_size=7", "8"),
        ("rollout[12,8] actor[1] rollout.tensor_parallel_size=3", "2"),
        ("rollout[1] actor[8] actor.fsdp_size=5", "4"),
    ],
)  # fmt: skip
def test_a_size_that_does_not_divide(wrong: str, advised: str) -> None:
    wrong = re.sub(r"\b(rollout|actor)\[", r"placement.pools.\1=[", wrong)
    argv = [*GOOD, *wrong.split()]
    line = refusal_of(argv)
    found = re.search(r"use (\d+)", line)
    assert found and found[1] == advised, line
    key = argv[-1].partition("=")[0]
    validate(load_config([*argv, f"{key}={found[1]}"]), machine=False)


def test_no_mini_batch_fits_the_ranks() -> None:
    argv = [*GOOD, "data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2",
            "placement.pools.rollout=[1]", "placement.pools.actor=[8]"]  # fmt: skip
    line = refusal_of(argv)
    assert "raise data.train_batch_size to 4" in line
    more = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=4"]
    validate(load_config([*argv, *more]), num_gpus=64)


def test_the_nearest_divisor() -> None:
    assert [nearest_divisor(24, given) for given in (1, 5, 7, 9, 10, 100)] == [1, 4, 6, 8, 8, 24]
    assert nearest_divisor(24, 1, least=5) == 6


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("reward.function=gsm8", "gsm8k"),
        ("reward.function=my_reward:score", "my_rewards:score"),
        ("algorithm.adv_estimator=grop", "grpo"),
        ("algorithm.adv_estimator=my_reward:score", "my_rewards:score"),
        ("algorithm.policy_loss=vanila", "vanilla"),
        ("algorithm.loss_agg=token_mean", "token-mean"),
        ("actor.optimizer=adam_w", "adamw"),
        ("agent.loop=single_turns", "single_turn"),
        ("agent.tools=calculater", "calculator"),
        ("data.train_files=generator:word_problem", "generator:word_problems"),
        ("model.path=tiny:qwn2", "tiny:qwen2"),
        ("model.dtype=bfloat", "bfloat16"),
        ("placement.roles.actor=acter", "actor"),
    ],
)
def test_a_misspelt_name(wrong: str, meant: str) -> None:
    line = refusal_of([*GOOD, wrong])
    assert f"did you mean {meant}?" in line, line
    key = wrong.partition("=")[0]
    validate(load_config([*GOOD, f"{key}={meant}"]), num_gpus=64)


def test_a_misspelt_attribute() -> None:
    """Found when the module is imported."""
    from one_step_off.rewards.functions import RewardFunctions

    cfg = load_config([*GOOD, "reward.function=my_rewards:scroe"])
    with pytest.raises(ConfigError, match=r"did you mean my_rewards:score\?"):
        RewardFunctions(cfg.reward)


def test_held_out_data_is_asked_for_by_its_key(tmp_path: Path) -> None:
    argv = [*GOOD, "trainer.test_freq=2", "data.val_files="]
    line = refusal_of(argv)
    assert "trainer.test_freq=2" in line and line.endswith("set data.val_files")
    validate(load_config([*argv, "data.val_files=generator:word_problems"]), num_gpus=64)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    own = [*argv, f"sft.train_files={rows}"]
    with pytest.raises(ConfigError, match=r"set sft\.val_files$"):
        validate_supervised(load_config(own), num_gpus=64)
    validate_supervised(load_config([*own, f"sft.val_files={rows}"]), num_gpus=64)


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "gsm8k_tiny_cpu"],
        ["--config=gsm8k_tiny_cpu"],
        ["-c", "gsm8k_tiny_cpu", "actor.lr=1"],
        ["actor.lr=1", "--config", "gsm8k_tiny_cpu"],
    ],
)
def test_config_as_a_flag(argv: list[str]) -> None:
    cfg = load_config(argv)
    assert cfg.model.path == "tiny:qwen2"
    assert cfg.actor.lr == (1 if "actor.lr=1" in argv else 2e-4)


@pytest.mark.parametrize(
    ("argv", "written"),
    [
        (["--config"], "config=FILE"),
        (["gsm8k_tiny_cpu"], "config=gsm8k_tiny_cpu"),
        (["--actor.lr=1"], "actor.lr=1"),
        (["--actor.lr", "1"], "actor.lr=VALUE"),
    ],
)
def test_other_forms_are_answered(argv: list[str], written: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"write {written}") + "$"):
        load_config(argv)
