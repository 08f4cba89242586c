"""What the benchmarks make of flags and of measurements; that the commands run is seen when they are run."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.base import Generated, Limits, Loops
from benchmarks import update_phase
from benchmarks.common import command_line, lengths
from benchmarks.learning import __main__ as learning
from benchmarks.learning import comparison as learning_arms
from benchmarks.throughput import __main__ as throughput
from benchmarks.throughput import cases, report
from benchmarks.trl_comparison import __main__ as trl_comparison
from benchmarks.trl_comparison.trl_arm import role_settings
from one_step_off.config.loading import load_config
from one_step_off.config.schema import ConfigError
from one_step_off.data.samples import Prompt
from one_step_off.runtime.validation import validate

TINY = "config=config/gsm8k_tiny_cpu.yaml"
MACHINE = {"cpu": "X", "cores": [0, 1], "memory_gib": 1, "load_before": [0.0], "torch": "2"}


def rows(step: float, gen: float, train: float, sync: float, **more: float) -> list[dict[str, Any]]:
    """Three steps of an arm, half as long, as long, and one and a half times as long as said; and a last one."""
    phases = {
        "time/generate_s": gen,
        "time/train_s": train,
        "time/sync_s": sync,
        "reward/mean": 0.5,
    }
    waits = {"time/wait_rollout_s": 0.0, "time/wait_trainer_s": 0.0, "actor/sync_wait_s": 0.0}
    counts = {
        "samples": 10.0,
        "tokens/response": 200.0,
        "response_length/mean": 20.0,
        "response_length/max": 32.0,
    }
    return [
        {"time/step_s": step * k} | phases | waits | counts | more for k in (0.5, 1.0, 1.5, 99.0)
    ]


@pytest.fixture
def arms() -> dict[str, dict[str, Any]]:
    apart = [rows(2.0, 0.8, 1.0, 0.1), rows(2.2, 0.9, 1.1, 0.1), rows(9.0, 5.0, 5.0, 0.1)]
    return {
        cases.COLOCATED: report.summarise([rows(1.8, 0.5, 0.6, 0.1)] * 3, cases.COLOCATED),
        cases.APART: report.summarise(apart, cases.APART),
        cases.PLAIN: report.summarise([rows(1.3, 0.8, 1.0, 0.1)] * 3, cases.PLAIN),
        cases.AHEAD: report.summarise([rows(1.2, 0.8, 1.0, 0.1)] * 3, cases.AHEAD),
    }


def test_summaries_leave_the_last_step_out(arms):
    assert arms[cases.APART]["step"] == {
        "median": 2.2,
        "min": 2.0,
        "max": 9.0,
        "runs": [2.0, 2.2, 9.0],
    }
    ahead = arms[cases.AHEAD]
    assert ahead["samples/s"]["median"] == pytest.approx(30 / 3.6)
    assert ahead["tokens/s"]["median"] == pytest.approx(600 / 3.6)
    assert ahead["rollout idle"]["median"] == pytest.approx(1 - 0.8 / 1.2)
    assert ahead["trainer idle"]["median"] == pytest.approx(1 - 1.0 / 1.2)
    colocated = arms[cases.COLOCATED]
    assert colocated["rollout idle"] == colocated["trainer idle"]
    assert colocated["rollout idle"]["median"] == pytest.approx(1 - 1.1 / 1.8)


def test_a_single_run_has_its_steps_range():
    one = report.summarise([rows(2.0, 0.8, 1.0, 0.1)], cases.APART)["step"]
    assert (one["median"], one["min"], one["max"]) == (2.0, 1.0, 3.0)


def test_headline(arms):
    found = report.headline(arms)
    assert found["gen_over_train"] == 0.9 / 1.1 and found["limit"] == 1.1
    assert found[f"step_over_limit/{cases.AHEAD}"] == 1.2 / 1.1
    assert found[f"step_over_limit/{cases.PLAIN}"] == 1.3 / 1.1
    assert found[f"speedup/{cases.AHEAD}"] == 2.2 / 1.2
    assert found[f"speedup_over_colocated/{cases.PLAIN}"] == 1.8 / 1.3
    assert found["speedup_at_the_limit"] == 2.2 / 1.1
    assert report.headline({cases.COLOCATED: arms[cases.COLOCATED]}) == {}, (
        "nothing to set it against"
    )
    assert not [k for k in report.headline({cases.APART: arms[cases.APART]}) if "/" in k]


@pytest.mark.parametrize(
    ("arm", "lead", "sync_wait", "wanted"),
    [
        (cases.APART, 0.0, 0.0, 0.4),  # in turns all wait for it
        (cases.PLAIN, -2.0, 0.0, 0.4),
        (
            cases.AHEAD,
            1.0,
            0.0,
            0.4,
        ),  # generation ends last, and would have ended earlier by all of it
        (cases.AHEAD, 0.1, 0.0, 0.1),  # then the trainer would have ended last
        (cases.AHEAD, -2.0, 0.0, 0.0),  # hidden behind training
        (cases.AHEAD, -2.0, 0.3, 0.3),  # but for what the optimiser waited
        (cases.AHEAD, 0.2, 0.1, 0.3),
    ],
)
def test_what_a_sync_exposes(arm: str, lead: float, sync_wait: float, wanted: float):
    """Against the ends as they would be without the sync."""
    row = {"time/sync_s": 0.4, "actor/sync_wait_s": sync_wait}
    following = {"time/wait_rollout_s": max(0.0, lead), "time/wait_trainer_s": max(0.0, -lead)}
    assert report.exposed(row, following, arm) == pytest.approx(wanted)


def test_tables_and_plots(arms, tmp_path):
    case = {"name": "tiny", "what": "a model", "arms": arms, "headline": report.headline(arms)}
    partly = {cases.APART: arms[cases.APART]}
    other = {"name": "y", "what": "z", "arms": partly, "headline": report.headline(partly)}
    said = report.table({"machine": MACHINE, "cases": [case, other], "runs": 3, "warmup": 2})
    assert f"| {cases.AHEAD} | 1.2 (1.2 to 1.2) |" in said and "| 8.333 (8.333 to 8.333) |" in said
    assert (
        f"**{cases.AHEAD}: step / max(T_gen, T_train) = 1.09**, 1.83 times as fast as {cases.APART}."
        in said
    )
    assert (
        "T_gen / T_train = 0.82" in said and "X, 2 cores" in said and "| 33% (33% to 33%) |" in said
    )
    report.plot_case(case, tmp_path / "x.png")
    report.plot_headline([case], tmp_path / "y.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in "xy")


def test_a_failing_arm_says_why(tmp_path):
    with pytest.raises(command_line.RunFailed, match=r"(?s)ended with 2:.*rollout.nn") as failed:
        command_line.run_arm("config/gsm8k_tiny_cpu.yaml", [], tmp_path, ["rollout.nn=1"])
    assert failed.value.code == 2


def test_a_run_may_use_the_cores_it_is_given():
    import os
    import sys

    one = min(os.sched_getaffinity(0))
    ask = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0)); import benchmarks"]
    assert command_line.run_process(ask, {one}) == f"{{{one}}}\n"
    assert command_line.run_process(ask) == f"{os.sched_getaffinity(0)}\n"


def test_the_colocated_arm_has_the_devices_of_all_pools():
    cfg = load_config([TINY, "placement.pools={rollout: [2], actor: [3]}"])
    keys = cases.arms_of(cfg)[cases.COLOCATED]
    assert keys[:2] == ["placement.pools={all: [5]}", "placement.roles={rollout: all, actor: all}"]
    cfg.placement.device, cfg.placement.pools = "cuda", {"rollout": [2, 2], "actor": [4]}
    assert cases.arms_of(cfg)[cases.COLOCATED][0] == "placement.pools={all: [6, 2]}"


def test_arms_differ_in_staleness_and_overlap_alone():
    found = {
        arm: load_config([TINY, *keys]) for arm, keys in cases.arms_of(load_config([TINY])).items()
    }
    told = {arm: (cfg.pipeline.staleness, cfg.weight_sync.overlap) for arm, cfg in found.items()}
    assert told[cases.PLAIN] == (1, False) and told[cases.AHEAD] == (1, True)
    assert told[cases.APART][0] == told[cases.COLOCATED][0] == 0
    for arm in (cases.APART, cases.PLAIN):
        found[arm].pipeline.staleness, found[arm].weight_sync.overlap = told[cases.AHEAD]
        assert found[arm] == found[cases.AHEAD]


def plan(*words: str) -> list[tuple[cases.Case, list[str], dict[str, list[str]]]]:
    _, args, keys = throughput.arguments(["--out", "x", *words])
    return throughput.plan(args, keys)


def test_flags_make_cases():
    found = plan(
        "--lengths",
        "short",
        "longtail:64",
        "--batches",
        "8x4",
        "32",
        "trainer.seed=3",
        "--splits",
        "2:1",
    )
    assert [case.name for case, _, _ in found] == [
        *("short 8x4 2:1", "short 32 2:1"),
        *("longtail:64 8x4 2:1", "longtail:64 32 2:1"),
    ]
    cfg = load_config([TINY, *found[2][1]])
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size, cfg.rollout.n) == (8, 8, 4)
    assert (
        cfg.placement.pools == {"rollout": [2], "actor": [1]} and cfg.data.max_response_length == 64
    )
    assert cfg.agent.loop == lengths.LOOP and cfg.agent.loop_kwargs[lengths.LOOP]["median"] == 8
    validate(cfg)
    assert [*found[0][2]] == [cases.COLOCATED, cases.APART, cases.PLAIN, cases.AHEAD]
    (only,) = plan("--arms", "overlapped", "--models", "tiny:qwen3", "--lengths", "fixed:20")
    assert [*only[2]] == [cases.AHEAD] and only[1][0] == "model.path=tiny:qwen3"
    assert load_config([TINY, *only[1]]).rollout.sampling_kwargs == {"ignore_eos": True}


@pytest.mark.parametrize(("batch", "mini"), [("16", 4), ("8", 2), ("6", 3), ("5", 5)], ids=str)
def test_mini_batches_grow_with_the_batch(batch: str, mini: int):
    """The config makes four updates a step; where the prompts do not divide by them, fewer."""
    keys = cases.batch_keys(batch, load_config([TINY, "actor.ppo_mini_batch_size=4"]))
    assert keys[1] == f"actor.ppo_mini_batch_size={mini}" and int(batch) % mini == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--lengths", "fixed:0"],
            "--lengths fixed:0: must be short, fixed:TOKENS or longtail:MOST_TOKENS",
        ),
        (["--lengths", "longtail:9"], "a long tail needs 16 tokens or more"),
        (["--lengths", "medium"], "--lengths medium: must be"),
        (["--batches", "8x"], "--batches 8x: must be prompts"),
        (["--batches", "0"], "--batches 0: must be prompts"),
        (["--splits", "2"], "--splits 2: must be"),
        (
            ["--splits", "1:1", "--config", "config/colocated.yaml"],
            "in one pool; give each its own",
        ),
        (["--models", "random:7b"], "--models random:7b: there are random:smollm2-135m"),
        (["--arms", "both"], "invalid choice: 'both'"),
        (["--runs", "0"], "--runs 0 --warmup 3: at least 1 run"),
        (["--steps", "4"], "--warmup 3 of 4 steps leaves none to measure"),
        (["--fast"], "unrecognized argument --fast"),
        (["rollout.nn=3"], "rollout.nn"),
        (["--config", "nowhere.yaml"], "config=nowhere.yaml"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture, tmp_path: Path
):
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--out", str(tmp_path / "out"), *flags])
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2 and said in err and err.startswith("error: ") and err.count("\n") == 1
    )
    assert not (tmp_path / "out").exists(), "nothing was begun"


def test_random_models_are_built_once(tmp_path, monkeypatch):
    from transformers import AutoConfig, AutoTokenizer

    small = cases.RANDOM["random:smollm2-135m"] | {"num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(cases.RANDOM, "random:smollm2-135m", small)
    monkeypatch.setenv("ONE_STEP_OFF_CACHE", str(tmp_path))
    path = Path(cases.model_path("random:smollm2-135m"))
    config = AutoConfig.from_pretrained(path)
    assert (config.model_type, config.num_hidden_layers, config.num_attention_heads) == (
        "llama",
        1,
        9,
    )
    assert len(AutoTokenizer.from_pretrained(path)) <= config.vocab_size
    changed = path.stat().st_mtime_ns
    assert (
        cases.model_path("random:smollm2-135m") == str(path) and path.stat().st_mtime_ns == changed
    )
    assert cases.model_path("a/b") == "a/b" and "not the pretrained" in cases.what_model(
        "random:smollm2-135m"
    )


def test_long_tailed_lengths_are_what_they_say():
    drawn = [lengths.draw(0, (0, row), i, 16.0, 1.0, 128) for row in range(500) for i in range(8)]
    assert 15 <= np.median(drawn) <= 17 and min(drawn) >= 1 and max(drawn) == 128
    # A log-normal's: P(X > 8 medians) = P(Z > ln 8) = 0.0188.
    assert sum(n == 128 for n in drawn) / len(drawn) == pytest.approx(0.0188, abs=0.008)
    assert drawn == [
        lengths.draw(0, (0, row), i, 16.0, 1.0, 128) for row in range(500) for i in range(8)
    ]
    assert drawn[:80] != [
        lengths.draw(1, (0, row), i, 16.0, 1.0, 128) for row in range(10) for i in range(8)
    ]


def test_the_long_tail_asks_for_its_lengths():
    keys, told = lengths.keys_of("longtail:64")
    cfg, asked = load_config([TINY, *keys]), []
    loop = Loops(cfg, None).get()

    async def generate(ids: np.ndarray, tokens: int) -> Generated:
        asked.append(tokens)
        return Generated(np.ones(tokens, np.int32), *np.zeros((2, tokens), np.float32), 0, "length")

    async def three(row: int) -> list[int]:
        prompt = Prompt((0, row), np.array([5], np.int32), "q", "1")
        talks = [await loop.run(prompt, generate, None, Limits(64)) for _ in range(3)]
        return [talk.length for talk in talks]

    got = asyncio.run(three(0)) + asyncio.run(three(1))
    assert (
        got
        == asked
        == [lengths.draw(0, (0, row), i, 8.0, 1.0, 64) for row in (0, 1) for i in range(3)]
    )
    assert "median 8" in told
    with pytest.raises(ConfigError, match="ignore_eos"):
        Loops(load_config([TINY, *keys, "rollout.sampling_kwargs={}"]), None).get()


def test_the_update_phase_against_the_arithmetic():
    def row(actor: float, critic: float, phase: float) -> dict:
        return {
            "time/actor_update_s": actor,
            "time/critic_update_s": critic,
            "time/update_s": phase,
            "time/train_s": phase + 0.1,
        }

    arms = {
        "one core": update_phase.summarise([row(3.0, 1.0, 4.0)] * 3 + [row(9.0, 9.0, 18.0)] * 2),
        "split": update_phase.summarise([row(3.0, 1.0, 3.2)] * 3),
    }
    found = update_phase.headline(arms)
    assert found == {"speedup": 4.0 / 3.2, "best": 4.0 / 3.0}
    said = update_phase.table({"arms": arms, "steps": 3, "headline": found})
    assert (
        "| split | 3 | 1 | 3.2 | 3.3 |" in said
        and "1.25 times as fast; the arithmetic allows 1.33" in said
    )


def learnt(*reward: float, end: float = 0.9) -> dict[str, Any]:
    evaluations = [
        {"val/version": 0.0, "val/reward": 0.0},
        {"val/version": float(len(reward)), "val/reward": end},
    ]
    return learning.summarise([{"reward/mean": r} for r in reward], evaluations)


def test_curves_of_seeds(tmp_path):
    run = learnt(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
    assert learning.table({3: run}).splitlines()[-1] == "| 3 | 0.300 | 0.500 | 0.000 | 0.900 |"
    learning.plot({3: run}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_learning_in_turns_against_one_step_off(tmp_path):
    sync = {0: learnt(0.1, 0.5), 1: learnt(0.2, 0.6), 2: learnt(0.3, 0.7)}
    near = {0: learnt(0.1, 0.5), 1: learnt(0.1, 0.6), 2: learnt(0.4, 0.7)}
    found = learning_arms.compare({"sync": sync, "async": near})["reward, all samples"]
    assert found["differences"] == pytest.approx([0.0, -0.05, 0.05]) and found[
        "mean"
    ] == pytest.approx(0.0)
    half = (
        4.303 * 0.05 / math.sqrt(3)
    )  # Student's t with two degrees of freedom times the standard error
    assert found["interval"] == pytest.approx([-half, half])
    same = learning_arms.compare({"sync": sync, "async": near})["reward, equal versions"]
    assert same["differences"] == pytest.approx([0.5 - 0.1, 0.6 - 0.2, 0.7 - 0.3]), (
        "async's second step by v0 as sync's first"
    )
    said = learning_arms.verdict("reward", found)
    assert f"no difference is shown; a loss of more than {half:.3f} is excluded" in said
    text = learning_arms.table({"sync": sync, "async": near}, 512)
    assert (
        "| reward, all samples | async | 0.400 | 0.300 to 0.550 |" in text
        and "on 512 samples" in text
    )
    learning_arms.plot({"sync": sync, "async": near}, 256, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


@pytest.mark.parametrize(("shift", "said"), [(-0.2, "async is worse"), (0.2, "async is better")])
def test_the_verdict_follows_the_data(shift: float, said: str):
    sync = {seed: learnt(0.4 + seed / 100) for seed in range(3)}
    other = {seed: learnt(0.4 + shift + seed / 90) for seed in range(3)}
    found = learning_arms.compare({"sync": sync, "async": other})["reward, all samples"]
    assert said in learning_arms.verdict("reward", found)
    same = learning_arms.compare({"sync": sync, "async": sync})["reward, all samples"]
    assert learning_arms.verdict("reward", same) == "reward: the same with each of 3 seeds."
    alone = learning_arms.compare({"sync": {0: sync[0]}, "async": {0: other[0]}})[
        "reward, all samples"
    ]
    assert alone["interval"] is None and "tells nothing of chance" in learning_arms.verdict(
        "reward", alone
    )


def test_students_t():
    """Against tables: beyond the module's own, by its series."""
    assert learning_arms.quantile(10) == pytest.approx(2.228, abs=3e-3)
    assert learning_arms.quantile(30) == pytest.approx(2.042, abs=1e-3)


@pytest.mark.parametrize(
    ("main", "flags"), [(learning.main, ["--seeds", "1", "1"]), (learning.main, ["rollout.nn=1"])]
)
def test_other_benchmarks_bad_flags(
    main: Any, flags: list[str], capsys: pytest.CaptureFixture, tmp_path: Path
):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out"), *flags])
    assert (
        ended.value.code == 2
        and capsys.readouterr().err.count("\n") == 1
        and not (tmp_path / "out").exists()
    )


def test_trl_is_given_what_the_config_says():
    found = role_settings(load_config([TINY, "trainer.total_steps=7"]))
    assert found["generation_batch_size"] == found["per_device_train_batch_size"] == 256
    assert (found["num_generations"], found["max_completion_length"], found["max_steps"]) == (
        16,
        32,
        7,
    )
    assert (found["learning_rate"], found["warmup_steps"], found["loss_type"]) == (2e-4, 5, "dapo")
    assert (
        not found["use_vllm"]
        and role_settings(load_config([TINY]), vllm=True)["vllm_max_model_length"] == 160
    )
    with pytest.raises(ValueError, match="actor.ppo_epochs=2: this comparison needs 1"):
        role_settings(load_config([TINY, "actor.ppo_epochs=2"]))


def test_trl_missing_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(trl_comparison.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        trl_comparison.main(["--out", "x"])
    err = capsys.readouterr().err
    assert (
        ended.value.code == 2
        and err.count("\n") == 1
        and 'pip install --target trl_site --no-deps "trl' in err
    )
    with pytest.raises(SystemExit):
        trl_comparison.main(["--out", "x", "--arms", "ours", "--cores", "4711"])
    assert "--cores [4711]: this process may use" in capsys.readouterr().err


def test_trl_table_and_headline(tmp_path):
    def arm(*steps: float) -> dict[str, Any]:
        row = {"samples": 256.0, "reward/mean": 0.5, "response_length/mean": 13.0}
        return trl_comparison.summarise(
            [trl_comparison.figures([row | {"time/step_s": s}]) for s in steps]
        )

    names = trl_comparison.ARMS
    arms = {
        names["ours"]: arm(0.5, 0.64, 0.8),
        names["trl-1"]: arm(1.0, 1.28, 1.6),
        names["trl-all"]: arm(2.0),
    }
    found = trl_comparison.headline(arms)
    assert found == {"best of TRL": "TRL, 1 thread", "times as many samples/s": 2.0}
    assert trl_comparison.headline({names["ours"]: arm(1.0)}) == {}
    result = {
        "machine": MACHINE,
        "cores": [0, 1],
        "config": "a/b.yaml",
        "keys": ["x.y=1"],
        "runs": 3,
        "warmup": 1,
    }
    result |= {
        "arms": arms,
        "failed": {"TRL, vLLM colocate": "AttributeError: x"},
        "headline": found,
    }
    said = trl_comparison.table(result | {"trl_settings": role_settings(load_config([TINY]))})
    assert "| one_step_off | 0.640 (0.500 to 0.800) | 400 (320 to 512) |" in said
    assert (
        "2.00 times the samples/s of TRL, 1 thread" in said and "failed: AttributeError: x" in said
    )
    assert "| `num_generations` | 16 |" in said and json.dumps(result)
    trl_comparison.plot(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000
