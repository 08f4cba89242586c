"""The headline of the throughput benchmark: how close a step comes to its longer phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.throughput import __main__ as throughput
from benchmarks.throughput import cases, headline
from one_step_off.config.loading import load_config

Row = dict[str, Any]


def row(step_s: float, generate_s: float, train_s: float, overlapped: float, **more: float) -> Row:
    """A step with a sync of 0.5 s, 0.2 s of it the canary."""
    return {
        "time/step_s": step_s,
        "time/generate_s": generate_s,
        "time/train_s": train_s,
        "time/sync_s": 0.5,
        "time/canary_s": 0.2,
        "time/wait_rollout_s": 0.0,
        "time/wait_trainer_s": 0.0,
        "actor/sync_wait_s": 0.0,
        "sync/overlapped": overlapped,
    } | more


def generation_longer(extra_s: float = 0.1) -> list[Row]:
    """Without overlap: the sync, then 10 s of generation, and `extra_s` of something else."""
    return [row(10.5 + extra_s, 10.0, 6.0, 0.0)] * 4


def training_longer() -> list[Row]:
    """With overlap: 10 s of training hide 6 s of generation and the sync."""
    return [row(10.1, 6.0, 10.0, 1.0, **{"time/wait_trainer_s": 3.5})] * 4


def test_a_step_is_its_longer_phase_and_the_exposed_sync_and_the_rest() -> None:
    found = headline.figures(generation_longer(), cases.AUTO)
    assert found["step / longer phase"] == pytest.approx(1.06)
    assert found["exposed sync"] == pytest.approx(0.5)
    assert found["canary"] == pytest.approx(0.2)
    assert found["rest"] == pytest.approx(0.1)
    assert found["overlapped"] == 0.0

    found = headline.figures(training_longer(), cases.AUTO)
    assert found["step / longer phase"] == pytest.approx(1.01)
    assert found["exposed sync"] == found["canary"] == 0.0
    assert found["rest"] == pytest.approx(0.1)
    assert found["overlapped"] == 1.0


def test_generation_is_that_which_ran_beside_the_training_of_a_step() -> None:
    """The samples of step N+1 are generated during step N."""
    rows = [row(9.0, generate_s, 5.0, 0.0) for generate_s in (1.0, 8.0, 8.0)]
    assert headline.figures(rows, cases.AUTO)["T_gen"] == 8.0


def test_a_step_goes_from_the_arrival_of_its_samples_to_the_next() -> None:
    """The sync, generation, and training until the generation of the next samples ends: the times
    of a run. The generations of 17.6, 17.5 and 19.3 s follow on syncs of 1.1, 1.4 and 1.5 s."""
    rows = []
    for step_s, wait_s, generate_s, train_s, sync_s in [
        (13.8, 2.3, 19.6, 10.2, 1.3),
        (16.9, 7.4, 17.6, 8.4, 1.1),
        (19.4, 9.0, 17.5, 8.9, 1.5),
        (20.0, 10.4, 19.3, 8.1, 1.5),
    ]:
        more = {"time/wait_rollout_s": wait_s, "time/sync_s": sync_s}
        rows.append(row(step_s, generate_s, train_s, 0.0, **more))
    found = headline.figures(rows, cases.AUTO)
    assert found["step"] == pytest.approx(18.9)
    assert abs(found["rest"]) < 0.05


def test_the_table_has_the_median_and_the_range_of_the_runs() -> None:
    runs = [generation_longer(extra_s) for extra_s in (0.0, 0.3, 0.1)]
    arms = headline.summarize({cases.AUTO: runs})
    assert arms[cases.AUTO]["step"]["runs"] == [10.5, 10.8, 10.6]
    assert "step / phases alone" not in arms[cases.AUTO]
    result = {
        "machine": {"cpu": "test", "cores": [0], "memory_gib": 1, "load_before": [0.0]},
        "runs": 3,
        "regimes": [{"name": "long", "what": "one", "arms": arms}],
    }
    text = headline.table(result)
    assert (
        f"| long | one | {cases.AUTO} | 1.67 (1.67 to 1.67) | 1.060 (1.050 to 1.080) | no |" in text
    )
    arms = headline.summarize({cases.AUTO: [generation_longer(-0.1)]})
    result["regimes"] = [{"name": "long", "what": "one", "arms": arms}]
    assert "| 1.040 (1.040 to 1.040) | yes |" in headline.table(result)


def test_the_synchronous_arm_has_the_phases_alone() -> None:
    alone = [row(15.0, 8.0, 6.0, 0.0)] * 4
    arms = headline.summarize({cases.AUTO: [generation_longer()], cases.DISAGGREGATED: [alone]})
    assert arms[cases.AUTO]["step / phases alone"]["median"] == pytest.approx(10.6 / 8.0)


def plan(*words: str) -> list[headline.PlannedRegime]:
    _, args, keys = throughput.arguments(["--out", "x", "--headline", "tiny:qwen2", *words])
    return headline.plan(args, keys)


def test_the_regimes_have_their_models_and_enough_steps_for_auto() -> None:
    planned = plan("actor.lr=1e-5")
    assert [entry.regime.name for entry in planned] == [entry.name for entry in headline.REGIMES]
    for entry in planned:
        assert list(entry.arms) == [cases.AUTO]
        cfg = load_config([f"config={entry.config}", *entry.keys, *entry.arms[cases.AUTO]])
        assert cfg.actor.lr == 1e-5
        assert cfg.weight_sync.overlap == "auto"
        assert cfg.trainer.total_steps - entry.warmup >= 4
        if "1.8" not in entry.regime.name:  # there auto never changes
            assert entry.warmup >= 4, "steps 1 to 3 decide for step 4"
    assert "model.path=tiny:qwen2" in planned[0].keys
    assert "model.path=tiny:qwen2" not in planned[-1].keys, "the tiny model is the config's"


def test_steps_and_warmup_of_the_command_line_hold_for_all() -> None:
    planned = plan("--steps", "5", "--warmup", "1", "--arms", "disaggregated", "auto")
    for entry in planned:
        assert "trainer.total_steps=5" in entry.keys
        assert entry.warmup == 1
        assert list(entry.arms) == [cases.DISAGGREGATED, cases.AUTO]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "fixed:8"], "--headline: its cases are fixed"),
        (["--models", "tiny:qwen2"], "--headline: its cases are fixed"),
        (["--steps", "2"], "--warmup 3 of 2 steps leaves none"),
        (["rollout.nn=3"], "rollout.nn"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        throughput.main(["--out", str(tmp_path / "out"), "--headline", "tiny:qwen2", *flags])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists(), "nothing was begun"


def test_each_repeat_begins_with_another_regime(tmp_path, monkeypatch) -> None:
    begun = []

    def run_arm(config, keys, folder, overrides):
        begun.append(folder.name)
        return generation_longer() * 12

    monkeypatch.setattr(headline, "run_arm", run_arm)
    flags = ["--out", str(tmp_path / "out"), "--headline", "tiny:qwen2", "--runs", "2"]
    assert throughput.main(flags) == 0
    folders = [regime.folder for regime in headline.REGIMES]
    assert [name.partition("_one_step")[0] for name in begun] == [
        *folders,
        *folders[1:],
        folders[0],
    ]
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["runs"] == 2
    assert len(result["regimes"]) == len(headline.REGIMES)
    assert "1.060" in (tmp_path / "out/result.md").read_text()


def test_other_batches_of_the_pretrained_model() -> None:
    regimes = [one.regime for one in plan("--regimes", "1x3:240", "1x2:480")]
    assert [regime.folder for regime in regimes] == ["smollm2_1x3_240", "smollm2_1x2_480", "tiny"]
    planned = plan("--regimes", "1x3:240")[0]
    cfg = load_config([f"config={planned.config}", *planned.keys])
    assert (cfg.data.train_batch_size, cfg.rollout.n) == (1, 3)
    assert cfg.data.max_response_length == 240
    with pytest.raises(ValueError, match=r"--regimes 3x4: must be PROMPTSxSAMPLES:TOKENS"):
        plan("--regimes", "3x4")


@pytest.mark.parametrize(
    ("gpus", "arms"),
    [
        (1, {cases.COLOCATED, cases.SHARED}),
        (2, {cases.COLOCATED, cases.DISAGGREGATED, cases.ONE_STEP_OFF, cases.OVERLAPPED}),
    ],
)
def test_on_gpus_every_arrangement_runs_with_three_lengths(
    gpus: int, arms: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("one_step_off.config.hardware.count_gpus", lambda: gpus)
    planned = plan()
    lengths = []
    for entry in planned:
        assert set(entry.arms) == arms
        cfg = load_config([f"config={entry.config}", *entry.keys])
        assert cfg.placement.device == "cuda"
        lengths.append(cfg.data.max_response_length)
    assert lengths == [128, 512, 1024]
    (own,) = plan("--regimes", "8x4:64")
    cfg = load_config([f"config={own.config}", *own.keys])
    assert (cfg.data.train_batch_size, cfg.rollout.n, cfg.data.max_response_length) == (8, 4, 64)


def test_an_arm_that_the_devices_cannot_have_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("one_step_off.config.hardware.count_gpus", lambda: 1)
    with pytest.raises(ValueError, match="--arms: these devices cannot have .*; give of"):
        plan("--arms", "auto")
