"""Full PPO with real Ray, vLLM, FSDP2 and gloo. Roles in different pools run at the same time, and
roles in one pool one after another."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.config.schema import Config
from tests.conftest import tiny_config
from tests.e2e.commands import REFERENCE_ENGINE
from tests.e2e.rewards import LETTER_SHARE
from tests.e2e.run_folder import (
    CLOCK_PREFIXES,
    assert_same_weights,
    read_rows,
    timeline_events,
    without_prefixes,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TRAINED_ROLES = ("actor", "critic", "ref", "reward_model")
APART = {
    "placement.pools": {"rollout": [1], **{role: [1] for role in TRAINED_ROLES}},
    "placement.roles": {"rollout": "rollout", **{role: role for role in TRAINED_ROLES}},
}
TOGETHER = {
    "placement.pools": {"rollout": [1], "train": [1]},
    "placement.roles": {"rollout": "rollout", **dict.fromkeys(TRAINED_ROLES, "train")},
}
COLOCATED = {
    "placement.pools": {"all": [1]},
    "placement.roles": dict.fromkeys(("rollout", *TRAINED_ROLES), "all"),
    # One thread each, as in the other placements: the order of sums depends on the thread count.
    "placement.pin_cores": False,
}


@pytest.fixture(scope="module")
def judge(models, tmp_path_factory) -> str:
    """The path of a reward model of another architecture than the policy. Its random head gives
    samples different scores."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    path = models("qwen3", True)
    folder = str(tmp_path_factory.mktemp("judge"))
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return folder


def ppo_config(model: str, judge: str, folder: Path, changes: dict[str, Any]) -> Config:
    """Four steps of PPO with a critic, a reference model and a reward model."""
    settings = {
        "reward.function": LETTER_SHARE,
        "algorithm.adv_estimator": "gae",
        "algorithm.lam": 0.95,
        "algorithm.kl_coef": 0.05,
        "algorithm.kl_in_reward": True,
        "algorithm.kl_target": 0.5,
        "reward_model.path": judge,
        "reward_model.weight": 0.5,
        "critic.lr": 1e-3,
        "trainer.critic_warmup": 1,
        "trainer.total_steps": 4,
        "trainer.val_before_train": False,
    }
    settings.update(changes)
    return tiny_config(model, str(folder), **settings)


def metrics_without_clocks(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, evaluations included, without what a clock or a memory gauge measures."""
    return [without_prefixes(row, CLOCK_PREFIXES) for row in read_rows(folder, "metrics.jsonl")]


def phases_overlap(row: dict[str, Any], one: str, other: str) -> bool:
    """Whether two phases of a step ran at the same time for a while."""
    one_begins_in_time = row[f"time/{one}_begin_s"] < row[f"time/{other}_end_s"]
    other_begins_in_time = row[f"time/{other}_begin_s"] < row[f"time/{one}_end_s"]
    return one_begins_in_time and other_begins_in_time


def count_overlaps(folder: Path, one: str, other: str) -> int:
    """The number of steps in which two phases overlap."""
    rows = read_rows(folder, "metrics.jsonl")
    return sum(phases_overlap(row, one, other) for row in rows)


def total_seconds(folder: Path, phase: str) -> float:
    """The seconds of a phase in all steps together. It need not be part of each step."""
    rows = read_rows(folder, "metrics.jsonl")
    return sum(row.get(f"time/{phase}_s", 0.0) for row in rows)


def updates_overlap_in_total(folder: Path) -> bool:
    """Whether the update phase took less than the actor's and the critic's updates together."""
    actor_s = total_seconds(folder, "actor_update")
    critic_s = total_seconds(folder, "critic_update")
    return total_seconds(folder, "update") < actor_s + critic_s


def median_update_s(folder: Path) -> float:
    """The median seconds of the update phase, without the first step."""
    rows = read_rows(folder, "metrics.jsonl")
    return float(np.median([row["time/update_s"] for row in rows[1:]]))


@pytest.mark.slow
def test_roles_apart_work_at_once_and_learn_the_same(models, judge, tmp_path):
    """At staleness 0, with all roles in one pool, with rollout apart, and with a pool for each
    role: the same numbers in different times."""
    from one_step_off.runtime import launch

    together = tmp_path / "together"
    apart = tmp_path / "apart"
    colocated = tmp_path / "colocated"
    for folder, placement in ((together, TOGETHER), (apart, APART), (colocated, COLOCATED)):
        changes = {**placement, "pipeline.staleness": 0}
        assert launch.run(ppo_config(models(), judge, folder, changes)) == 0
    assert metrics_without_clocks(together) == metrics_without_clocks(apart)
    assert metrics_without_clocks(together) == metrics_without_clocks(colocated)
    for one, other in (
        ("actor_update", "critic_update"),
        ("ref_log_prob", "critic_values"),
        ("critic_values", "reward_model_score_sequences"),
    ):
        assert count_overlaps(together, one, other) == 0, f"{one} and {other} share a pool"
        assert count_overlaps(apart, one, other) >= 2, f"{one} and {other} have their own pools"
    assert not updates_overlap_in_total(together), "one after another takes more than the sum"
    assert updates_overlap_in_total(apart), "at the same time takes less than the sum"
    assert median_update_s(apart) < median_update_s(together), "a core each makes updates faster"


def assert_lanes_of_two_replicas(events: list[dict[str, Any]]) -> None:
    """Rollout and evaluation have a lane each in the timeline, and so has each replica."""
    lanes = set()
    for event in events:
        if event.get("cat", "").startswith(("rollout", "eval")):
            work = event["name"].split()[0]
            lanes.add((event["cat"], work))
    assert lanes == {
        ("rollout", "generate"),
        ("evaluation", "evaluate"),
        ("rollout 0", "generate"),
        ("rollout 1", "generate"),
        ("rollout 0 evaluation", "evaluate"),
        ("rollout 1 evaluation", "evaluate"),
    }


def assert_one_after_another(events: list[dict[str, Any]]) -> None:
    """Generation, evaluation and updates never overlap: they share one pool."""
    spans = []
    for event in events:
        if event.get("cat") in ("rollout", "evaluation", "actor"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
    spans.sort()
    for (_, end), (next_begin, _) in itertools.pairwise(spans):
        assert end <= next_begin


@pytest.mark.slow
@pytest.mark.ci
def test_colocated_replicas_read_every_ranks_shards_out_of_shared_memory(models, tmp_path, capfd):
    """Two bundles, each with a replica and an FSDP rank. The evaluations of each version wait until
    the pool is free."""
    from one_step_off.runtime import launch

    folder = tmp_path / "run"
    settings = REFERENCE_ENGINE | {
        "reward.function": LETTER_SHARE,
        "trainer.val_before_train": True,
        "placement.pools": {"all": [2]},
        "placement.roles": {"rollout": "all", "actor": "all"},
        "pipeline.staleness": 0,
        "trainer.test_freq": 1,
        "trainer.total_steps": 3,
    }
    assert launch.run(tiny_config(models(), str(folder), **settings)) == 0
    rows = read_rows(folder, "metrics.jsonl")
    assert [row["weight_version"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["staleness/max"] == 0
        assert 0 < row["canary/logprob_diff_max"] < 1e-4, "both replicas hold the trainer's weights"
    events = timeline_events(folder)
    assert_lanes_of_two_replicas(events)
    assert_one_after_another(events)
    output = capfd.readouterr().out
    assert re.search(r"created pool all \[2\] on [0-9.]+: rollout, actor\n", output), output


def assert_critic_warms_up_alone(folder: Path) -> None:
    """The first step trains the critic alone. The others train both, one step off, and adapt the KL
    coefficient."""
    first, *others = read_rows(folder, "metrics.jsonl")
    assert "actor/loss" not in first
    assert first["critic/loss"] > 0
    for row in others:
        assert row["actor/grad_norm"] > 0
        assert row["critic/grad_norm"] > 0
    assert len({row["kl/coef"] for row in others}) == 3, "the coefficient adapts"
    assert [row["staleness/max"] for row in others] == [1, 1, 1]


def assert_timeline_has_all_roles(folder: Path) -> None:
    """The timeline has generation, weight sync, and the updates of actor and critic."""
    works = {(event.get("cat"), event["name"].split()[0]) for event in timeline_events(folder)}
    expected = {
        ("rollout", "generate"),
        ("sync", "weights"),
        ("actor", "update"),
        ("critic", "update"),
    }
    assert expected <= works


@pytest.mark.slow  # test_resume.py has a shorter one
def test_full_ppo_one_step_off_resumes_exactly(models, judge, tmp_path):
    """Actor, critic and the adapted KL coefficient are restored."""
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    changes = {**TOGETHER, "trainer.save_freq": 2}
    assert launch.run(ppo_config(models(), judge, whole, changes)) == 0
    assert_critic_warms_up_alone(whole)
    assert read_rows(whole, "samples/step_000003.jsonl")[0]["reward"] is not None
    assert_timeline_has_all_roles(whole)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    assert launch.run(ppo_config(models(), judge, resumed, changes)) == 0
    assert metrics_without_clocks(whole) == metrics_without_clocks(resumed)
    assert_same_weights(whole, resumed)


@pytest.mark.slow  # test_save_before_first_step.py has the workers alone
def test_a_checkpoint_in_the_critics_warm_up_changes_nothing(models, judge, tmp_path):
    """The weights after the actor's first step are those of a run without the checkpoint, and of a
    run resumed from it."""
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    saving = tmp_path / "saving"
    resumed = tmp_path / "resumed"
    changes = {**TOGETHER, "trainer.critic_warmup": 2, "trainer.total_steps": 3}
    saving_changes = {**changes, "trainer.save_freq": 1}
    assert launch.run(ppo_config(models(), judge, whole, changes)) == 0
    assert launch.run(ppo_config(models(), judge, saving, saving_changes)) == 0
    shutil.copytree(saving, resumed)
    for later_checkpoint in ("step_000002", "step_000003"):
        shutil.rmtree(resumed / "checkpoints" / later_checkpoint)
    assert launch.run(ppo_config(models(), judge, resumed, saving_changes)) == 0
    for folder in (saving, resumed):
        assert_same_weights(whole, folder)
        assert metrics_without_clocks(whole) == metrics_without_clocks(folder)
