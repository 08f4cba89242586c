"""Full PPO with real Ray, vLLM, FSDP2 and gloo: every role in the pool it is given, at once or in
turns."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import tiny_config
from tests.e2e.test_pipeline import VARIED, rows
from tests.e2e.test_resume import TIMES, weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

OTHERS = ("actor", "critic", "ref", "reward_model")
APART = {
    "placement.pools": {"rollout": [1], **{role: [1] for role in OTHERS}},
    "placement.roles": {"rollout": "rollout", **{role: role for role in OTHERS}},
}
TOGETHER = {
    "placement.pools": {"rollout": [1], "train": [1]},
    "placement.roles": {"rollout": "rollout", **dict.fromkeys(OTHERS, "train")},
}
COLOCATED = {
    "placement.pools": {"all": [1]},
    "placement.roles": dict.fromkeys(("rollout", *OTHERS), "all"),
    "placement.pin_cores": False,  # a thread each as in the other arms, so that sums are made in the same order
}


@pytest.fixture(scope="module")
def judge(models, tmp_path_factory) -> str:
    """A reward model of another architecture than the policy, with a head that tells samples
    apart."""
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


def ppo(model: str, judge: str, folder: Path, **changes: object):
    return tiny_config(
        model,
        str(folder),
        **VARIED
        | {
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
        | changes,
    )


def learnt(folder: Path) -> list[dict]:
    """The rows without what a clock or a memory gauge says."""
    return [
        {k: v for k, v in row.items() if not k.startswith(TIMES) and not k.endswith("_s")}
        for row in rows(folder, "metrics.jsonl")
    ]


def span(row: dict, name: str) -> tuple[float, float]:
    return row[f"time/{name}_begin_s"], row[f"time/{name}_end_s"]


def overlap(row: dict, one: str, other: str) -> bool:
    (a, b) = span(row, one)
    (c, d) = span(row, other)
    return a < d and c < b


@pytest.mark.slow
def test_roles_apart_work_at_once_and_learn_the_same(models, judge, tmp_path):
    """At staleness 0, with all in one pool, with rollout apart, and with a pool for each: same
    numbers, other times."""
    from one_step_off.runtime import launch

    for name, where in (("together", TOGETHER), ("apart", APART), ("colocated", COLOCATED)):
        assert (
            launch.run(ppo(models(), judge, tmp_path / name, **where, **{"pipeline.staleness": 0}))
            == 0
        )
    assert (
        learnt(tmp_path / "together")
        == learnt(tmp_path / "apart")
        == learnt(tmp_path / "colocated")
    )
    pairs = [("actor_update", "critic_update"), ("ref_log_prob", "critic_values")]
    pairs += [("critic_values", "reward_model_score_sequences")]
    for one, other in pairs:
        met = {
            name: sum(overlap(row, one, other) for row in rows(tmp_path / name, "metrics.jsonl"))
            for name in ("together", "apart")
        }
        assert met["together"] == 0, f"{one} and {other} share a pool"
        assert met["apart"] >= 2, f"{one} and {other} have pools of their own"
    for name in ("together", "apart"):
        phase, actor, critic = (
            sum(row.get(f"time/{what}_s", 0.0) for row in rows(tmp_path / name, "metrics.jsonl"))
            for what in ("update", "actor_update", "critic_update")
        )
        assert (phase < actor + critic) == (name == "apart"), (
            "side by side it takes less than the sum, in turns more"
        )
    on_one_core, on_two = (
        np.median([row["time/update_s"] for row in rows(tmp_path / name, "metrics.jsonl")[1:]])
        for name in ("together", "apart")
    )
    assert on_two < on_one_core, "a core each is worth something"


def test_colocated_replicas_read_every_ranks_shards_out_of_shared_memory(models, tmp_path, capfd):
    """Two seats, each with a replica and an FSDP rank; evaluations of each version wait for their
    turn."""
    from one_step_off.runtime import launch

    changes = {
        "placement.pools": {"all": [2]},
        "placement.roles": {"rollout": "all", "actor": "all"},
        "pipeline.staleness": 0,
        "trainer.test_freq": 1,
        "trainer.total_steps": 3,
    }
    assert launch.run(tiny_config(models(), str(tmp_path / "run"), **VARIED | changes)) == 0
    found = rows(tmp_path / "run", "metrics.jsonl")
    assert [row["weight_version"] for row in found] == [0, 1, 2]
    assert all(row["staleness/max"] == 0 for row in found)
    assert all(0 < row["canary/logprob_diff_max"] < 1e-4 for row in found), (
        "both replicas hold the trainer's weights"
    )
    events = json.loads((tmp_path / "run" / "timeline.json").read_text().rstrip().rstrip(",") + "]")
    spans = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in ("rollout", "evaluation", "actor")
    )
    lanes = {
        (e["cat"], e["name"].split()[0])
        for e in events
        if e.get("cat", "").startswith(("rollout", "eval"))
    }
    work = ("rollout", "generate"), ("evaluation", "evaluate")
    assert lanes == {
        *work,
        *((f"rollout {i}{' evaluation' * k}", work[k][1]) for i in (0, 1) for k in (0, 1)),
    }
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)), (
        "one pool, in turns"
    )
    said = capfd.readouterr().out
    assert re.search(r"created pool all \[2\] on [0-9.]+: rollout, actor\n", said), said


@pytest.mark.slow  # test_e2e_resume.py has a shorter one
def test_full_ppo_one_step_off_resumes_exactly(models, judge, tmp_path):
    """Actor, critic and the adapted KL coefficient come back; the first step trains the critic
    alone."""
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert launch.run(ppo(models(), judge, whole, **TOGETHER, **{"trainer.save_freq": 2})) == 0
    first, *others = rows(whole, "metrics.jsonl")
    assert "actor/loss" not in first
    assert first["critic/loss"] > 0, "the critic warms up alone"
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in others)
    assert len({row["kl/coef"] for row in others}) == 3, "the coefficient adapts"
    assert [row["staleness/max"] for row in others] == [1, 1, 1]
    sample = rows(whole, "samples/step_000003.jsonl")[0]
    assert sample["reward"] is not None
    events = (whole / "timeline.json").read_text().rstrip().rstrip(",") + "]"
    names = {(e.get("cat"), e["name"].split()[0]) for e in json.loads(events)}
    assert {
        ("rollout", "generate"),
        ("sync", "weights"),
        ("actor", "update"),
        ("critic", "update"),
    } <= names
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_000004")
    assert launch.run(ppo(models(), judge, parts, **TOGETHER, **{"trainer.save_freq": 2})) == 0
    assert learnt(whole) == learnt(parts)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(parts)[name]), name


@pytest.mark.slow  # test_save_before_first_step.py has the workers alone
def test_a_checkpoint_in_the_critics_warm_up_changes_nothing(models, judge, tmp_path):
    """The weights after the actor's first step are those of a run without the checkpoint, and of
    one resumed from it."""
    from one_step_off.runtime import launch

    whole = tmp_path / "whole"
    saving = tmp_path / "saving"
    resumed = tmp_path / "resumed"
    changes = {**TOGETHER, "trainer.critic_warmup": 2, "trainer.total_steps": 3}
    assert launch.run(ppo(models(), judge, whole, **changes)) == 0
    assert launch.run(ppo(models(), judge, saving, **changes, **{"trainer.save_freq": 1})) == 0
    shutil.copytree(saving, resumed)
    for later in ("step_000002", "step_000003"):
        shutil.rmtree(resumed / "checkpoints" / later)
    assert launch.run(ppo(models(), judge, resumed, **changes, **{"trainer.save_freq": 1})) == 0
    for folder in (saving, resumed):
        for name, tensor in weights(whole).items():
            assert torch.equal(tensor, weights(folder)[name]), (folder.name, name)
        assert learnt(whole) == learnt(folder)
