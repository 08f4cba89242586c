"""The benchmark of throughput: what it makes of flags and of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import lengths
from benchmarks.throughput import __main__ as throughput
from benchmarks.throughput import cases, plots, report
from one_step_off.config.loading import load_config
from one_step_off.runtime.validation import validate

TINY = "config=config/gsm8k_tiny_cpu.yaml"
MACHINE = {"cpu": "X", "cores": [0, 1], "memory_gib": 1, "load_before": [0.0], "torch": "2"}


def rows(step: float, generate: float, train: float, sync: float) -> list[dict[str, Any]]:
    """Three steps of 0.5, 1 and 1.5 times `step` seconds; and a last one, which does not count."""
    row = {
        "time/generate_s": generate,
        "time/train_s": train,
        "time/sync_s": sync,
        "reward/mean": 0.5,
        "time/wait_rollout_s": 0.0,
        "time/wait_trainer_s": 0.0,
        "actor/sync_wait_s": 0.0,
        "samples": 10.0,
        "tokens/response": 200.0,
        "response_length/mean": 20.0,
        "response_length/max": 32.0,
    }
    return [row | {"time/step_s": step * factor} for factor in (0.5, 1.0, 1.5, 99.0)]


@pytest.fixture
def arms() -> dict[str, dict[str, Any]]:
    runs = {
        cases.COLOCATED: [rows(1.8, 0.5, 0.6, 0.1)] * 3,
        cases.DISAGGREGATED: [
            rows(2.0, 0.8, 1.0, 0.1),
            rows(2.2, 0.9, 1.1, 0.1),
            rows(9.0, 5.0, 5.0, 0.1),
        ],
        cases.ONE_STEP_OFF: [rows(1.3, 0.8, 1.0, 0.1)] * 3,
        cases.OVERLAPPED: [rows(1.2, 0.8, 1.0, 0.1)] * 3,
    }
    return {arm: report.summarize(arm_runs, arm) for arm, arm_runs in runs.items()}


def test_summaries_leave_the_last_step_out(arms) -> None:
    step = arms[cases.DISAGGREGATED]["step"]
    assert step == {"median": 2.2, "min": 2.0, "max": 9.0, "runs": [2.0, 2.2, 9.0]}
    overlapped = arms[cases.OVERLAPPED]
    assert overlapped["samples/s"]["median"] == pytest.approx(30 / 3.6)
    assert overlapped["tokens/s"]["median"] == pytest.approx(600 / 3.6)
    assert overlapped["rollout idle"]["median"] == pytest.approx(1 - 0.8 / 1.2)
    assert overlapped["trainer idle"]["median"] == pytest.approx(1 - 1.0 / 1.2)
    colocated = arms[cases.COLOCATED]
    assert colocated["rollout idle"] == colocated["trainer idle"]
    assert colocated["rollout idle"]["median"] == pytest.approx(1 - 1.1 / 1.8)


def test_a_single_run_has_its_steps_range() -> None:
    step = report.summarize([rows(2.0, 0.8, 1.0, 0.1)], cases.DISAGGREGATED)["step"]
    assert (step["median"], step["min"], step["max"]) == (2.0, 1.0, 3.0)


def test_headline(arms) -> None:
    found = report.headline(arms)
    assert found["gen_over_train"] == 0.9 / 1.1
    assert found["limit"] == 1.1
    assert found[f"step_over_limit/{cases.OVERLAPPED}"] == 1.2 / 1.1
    assert found[f"step_over_limit/{cases.ONE_STEP_OFF}"] == 1.3 / 1.1
    assert found[f"speedup/{cases.OVERLAPPED}"] == 2.2 / 1.2
    assert found[f"speedup_over_colocated/{cases.ONE_STEP_OFF}"] == 1.8 / 1.3
    assert found["speedup_at_the_limit"] == 2.2 / 1.1


def test_a_headline_compares_only_arms_that_ran(arms) -> None:
    assert report.headline({cases.COLOCATED: arms[cases.COLOCATED]}) == {}
    found = report.headline({cases.DISAGGREGATED: arms[cases.DISAGGREGATED]})
    assert not [name for name in found if "/" in name]


@pytest.mark.parametrize(
    ("arm", "generation_lag", "sync_wait", "expected"),
    [
        # Synchronous, everything waits for the sync.
        (cases.DISAGGREGATED, 0.0, 0.0, 0.4),
        (cases.ONE_STEP_OFF, -2.0, 0.0, 0.4),
        # The optimizer waited for a canary beside the prompts, and generation ended later.
        (cases.ONE_STEP_OFF, -2.0, 0.3, 0.7),
        (cases.ONE_STEP_OFF, 0.5, 0.3, 0.4),
        # Generation ends last, and would have ended earlier by the whole sync.
        (cases.OVERLAPPED, 1.0, 0.0, 0.4),
        # Without the sync the trainer would have ended last.
        (cases.OVERLAPPED, 0.1, 0.0, 0.1),
        # Hidden behind training.
        (cases.OVERLAPPED, -2.0, 0.0, 0.0),
        # Hidden, but for what the optimizer waited.
        (cases.OVERLAPPED, -2.0, 0.3, 0.3),
        (cases.OVERLAPPED, 0.2, 0.1, 0.3),
    ],
)
def test_what_a_sync_exposes(
    arm: str, generation_lag: float, sync_wait: float, expected: float
) -> None:
    """Against the ends as they would be without the sync."""
    row = {"time/sync_s": 0.4, "actor/sync_wait_s": sync_wait}
    following_row = {
        "time/wait_rollout_s": max(0.0, generation_lag),
        "time/wait_trainer_s": max(0.0, -generation_lag),
    }
    assert report.exposed_sync(row, following_row, arm) == pytest.approx(expected)


def test_tables_and_plots(arms, tmp_path: Path) -> None:
    case = {"name": "tiny", "what": "a model", "arms": arms, "headline": report.headline(arms)}
    one_arm = {cases.DISAGGREGATED: arms[cases.DISAGGREGATED]}
    other = {"name": "y", "what": "z", "arms": one_arm, "headline": report.headline(one_arm)}
    text = report.table({"machine": MACHINE, "cases": [case, other], "runs": 3, "warmup": 2})
    assert f"| {cases.OVERLAPPED} | 1.2 (1.2 to 1.2) |" in text
    assert "| 8.333 (8.333 to 8.333) |" in text
    over_limit = f"**{cases.OVERLAPPED}: step / max(T_gen, T_train) = 1.09**"
    assert f"{over_limit}, 1.83 times as fast as {cases.DISAGGREGATED}." in text
    assert "T_gen / T_train = 0.82" in text
    assert "X, 2 cores" in text
    assert "| 33% (33% to 33%) |" in text
    plots.plot_case(case, tmp_path / "case.png")
    plots.plot_headline([case], tmp_path / "headline.png")
    assert (tmp_path / "case.png").stat().st_size > 5000
    assert (tmp_path / "headline.png").stat().st_size > 5000


def test_the_colocated_arm_has_the_devices_of_all_pools() -> None:
    cfg = load_config([TINY, "placement.pools={rollout: [2], actor: [3]}"])
    keys = cases.arms_of(cfg)[cases.COLOCATED]
    assert keys[:2] == [
        "placement.pools={all: [5]}",
        "placement.roles={rollout: all, actor: all}",
    ]
    cfg.placement.device = "cuda"
    cfg.placement.pools = {"rollout": [2, 2], "actor": [4]}
    assert cases.arms_of(cfg)[cases.COLOCATED][0] == "placement.pools={all: [6, 2]}"
    assert cases.SHARED not in cases.arms_of(cfg), "it would leave seven GPUs unused"


def test_arms_differ_in_staleness_and_overlap_alone() -> None:
    arm_keys = cases.arms_of(load_config([TINY]))
    configs = {arm: load_config([TINY, *keys]) for arm, keys in arm_keys.items()}
    one_step_off = configs[cases.ONE_STEP_OFF]
    overlapped = configs[cases.OVERLAPPED]
    assert one_step_off.pipeline.staleness == overlapped.pipeline.staleness == 1
    assert one_step_off.weight_sync.overlap == "false"
    assert overlapped.weight_sync.overlap == "true"
    assert configs[cases.DISAGGREGATED].pipeline.staleness == 0
    assert configs[cases.COLOCATED].pipeline.staleness == 0
    assert configs[cases.SHARED].placement.pools == {"rollout": [0.5], "trainer": [0.5]}
    assert configs[cases.SHARED].pipeline.staleness == 1
    for arm in (cases.DISAGGREGATED, cases.ONE_STEP_OFF):
        configs[arm].pipeline.staleness = 1
        configs[arm].weight_sync.overlap = "true"
        assert configs[arm] == overlapped


def plan(*words: str) -> list[throughput.PlannedCase]:
    _, args, keys = throughput.arguments(["--out", "x", *words])
    return throughput.plan(args, keys)


def test_flags_make_cases() -> None:
    planned = plan(
        *("--lengths", "short", "longtail:64", "--batches", "8x4", "32"),
        *("trainer.seed=3", "--splits", "2:1"),
    )
    assert [one.case.name for one in planned] == [
        "short 8x4 2:1",
        "short 32 2:1",
        "longtail:64 8x4 2:1",
        "longtail:64 32 2:1",
    ]
    cfg = load_config([TINY, *planned[2].keys])
    assert cfg.data.train_batch_size == 8
    assert cfg.actor.ppo_mini_batch_size == 8
    assert cfg.rollout.n == 4
    assert cfg.placement.pools == {"rollout": [2], "actor": [1]}
    assert cfg.data.max_response_length == 64
    assert cfg.agent.loop == lengths.LOOP
    assert cfg.agent.loop_kwargs[lengths.LOOP]["median"] == 8
    validate(cfg)
    assert [*planned[0].arms] == [
        cases.COLOCATED,
        cases.DISAGGREGATED,
        cases.ONE_STEP_OFF,
        cases.OVERLAPPED,
    ]


def test_one_device_has_two_arms() -> None:
    planned = plan("placement.pools={rollout: [0.4], actor: [0.6]}")
    (arms,) = [one.arms for one in planned]
    assert [*arms] == [cases.COLOCATED, cases.SHARED]
    assert arms[cases.COLOCATED][0] == "placement.pools={all: [1]}"
    with pytest.raises(ValueError, match="'one step off' does not use the same devices"):
        plan("placement.pools={rollout: [0.4], actor: [0.6]}", "--arms", "plain")


def test_flags_choose_arms_and_models() -> None:
    (planned,) = plan("--arms", "overlapped", "--models", "tiny:qwen3", "--lengths", "fixed:20")
    assert [*planned.arms] == [cases.OVERLAPPED]
    assert planned.keys[0] == "model.path=tiny:qwen3"
    assert load_config([TINY, *planned.keys]).rollout.sampling_kwargs == {"ignore_eos": True}


@pytest.mark.parametrize(
    ("batch", "mini_batch"), [("16", 4), ("8", 2), ("6", 3), ("5", 5)], ids=str
)
def test_mini_batches_grow_with_the_batch(batch: str, mini_batch: int) -> None:
    """The config makes four updates a step; where the prompts do not divide by them, fewer."""
    keys = cases.batch_keys(batch, load_config([TINY, "actor.ppo_mini_batch_size=4"]))
    assert keys[1] == f"actor.ppo_mini_batch_size={mini_batch}"
    assert int(batch) % mini_batch == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--lengths", "fixed:0"],
            "--lengths fixed:0: must be short, fixed:TOKENS or longtail:MAX_TOKENS",
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
    flags: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--out", str(out), *flags])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out.exists(), "nothing was begun"


def test_random_models_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoTokenizer

    name = "random:smollm2-135m"
    small = cases.RANDOM_MODELS[name] | {"num_hidden_layers": 1, "vocab_size": 512}
    monkeypatch.setitem(cases.RANDOM_MODELS, name, small)
    monkeypatch.setenv("ONE_STEP_OFF_CACHE", str(tmp_path))
    path = Path(cases.model_path(name))
    config = AutoConfig.from_pretrained(path)
    assert config.model_type == "llama"
    assert config.num_hidden_layers == 1
    assert config.num_attention_heads == 9
    assert len(AutoTokenizer.from_pretrained(path)) <= config.vocab_size
    built = path.stat().st_mtime_ns
    assert cases.model_path(name) == str(path)
    assert path.stat().st_mtime_ns == built
    assert cases.model_path("a/b") == "a/b"
    assert "not the pretrained" in cases.model_in_words(name)
