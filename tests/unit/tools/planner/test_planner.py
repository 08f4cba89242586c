"""The planner: constants out of runs, the right best, and one line for bad input."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from one_step_off.config.command_line import exit_code
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.tools.planner import calibration, measured_sync, planner

GPUS = [
    "model.path=a/b",
    "data.train_files=c/d",
    "trainer.total_steps=1",
    "placement.device=cuda",
    "rollout.n=4",
]
GPUS += [
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "placement.pools={rollout: [2], actor: [6]}",
]
main = partial(exit_code, planner.main)


def rows_of(out: str) -> dict[tuple[str, str], float]:
    """(split, arrangement) -> seconds a step, of the printed table."""
    found = {}
    for line in out.splitlines():
        words = line[44:].split()
        if len(words) == 4 and (words[1].endswith("%") or words[1] == "-"):
            found[line[:20].strip(), line[20:44].strip()] = float(words[0])
    return found


@pytest.mark.parametrize(
    "times, best, step",
    [
        # The longest response is all of generation: one replica is as good as eight.
        ("60,70,0,60", "one step off, 1 + 7", 60.0),
        ("60,140,0,60", "one step off, 1 + 7", 120.0),
        # All of it scales: the sum on all devices is what the best split has at most.
        ("60,10,0", "colocated, synchronous, 8", 60 * 2 / 8 + 10 * 6 / 8),
        # A sync that is hidden, but exposed in a synchronous step.
        ("20,10,30,20", "one step off, 1 + 7", 50.0),
    ],
)
def test_given_times_name_the_best(capsys, times: str, best: str, step: float) -> None:
    assert main([*GPUS, "--times", times]) == 0
    out = capsys.readouterr().out
    assert f"best: {best}: " in out
    found = rows_of(out)
    assert len(found) == 1 + 2 * 7
    assert min(found.values()) == pytest.approx(step, rel=0.02)
    split = tuple(reversed(best.rsplit(", ", 1)))
    assert found[split] == min(found.values())


@pytest.mark.parametrize(
    ("times", "line"),
    [
        # All of it scales: all GPUs in turn are as good.
        ("60,10,0", "would bring nothing"),
        # A fixed part of training keeps the trainer's GPUs from it for long; the rest is shared.
        ("60,10,0,30", "% at most: "),
    ],
)
def test_a_plan_bounds_what_idle_trainer_gpus_would_bring(capsys, times: str, line: str) -> None:
    assert main([*GPUS, "--times", times]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("placement.lend=true, trainer GPUs that generate while the trainer ")
    assert line in last


@pytest.mark.parametrize(
    "key",
    ["rollout.tensor_parallel_size=2", "weight_sync.keep_sent=false", "rollout.routing=static"],
)
def test_a_plan_proposes_no_lending_where_the_config_forbids_it(capsys, key: str) -> None:
    assert main([*GPUS, "--times", "60,10,0,30", key]) == 0
    assert "placement.lend" not in capsys.readouterr().out


def test_the_split_of_the_config_takes_as_long_as_it_was_given(capsys) -> None:
    assert main([*GPUS, "--times", "60,70,5,30", "--gpus", "8"]) == 0
    assert rows_of(capsys.readouterr().out)["2 + 6", "synchronous"] == pytest.approx(
        135.0, rel=0.02
    )


def test_given_times_say_where_they_were_measured(capsys) -> None:
    """And parts of no time are not printed."""
    assert main([*GPUS, "--times", "60,70,0", "--gpus", "16"]) == 0
    out = capsys.readouterr().out
    assert "--times 60,70,0: seconds measured on 2 + 6 GPUs (rollout + trainer)" in out
    assumed = out.split("rollout + trainer   arrangement")[0]
    assert "on any number of them" not in assumed
    assert "check" not in assumed


def test_gpus_that_do_both_have_no_idle_share(capsys) -> None:
    assert main([*GPUS, "--times", "60,70,5,30"]) == 0
    out = capsys.readouterr().out
    (colocated,) = [line for line in out.splitlines() if line.startswith("8  ")]
    assert colocated.split()[4:6] == ["-", "-"]
    assert "-: all GPUs generate and train" in out


def test_gpus_that_do_not_divide_get_the_next_number_that_does() -> None:
    cfg = load_config([*GPUS, "rollout.tensor_parallel_size=2", "actor.tensor_parallel_size=2"])
    with pytest.raises(ConfigError, match="--gpus 7: cannot be divided .*; give 8"):
        planner.arrangements(cfg, 7)
    assert planner.arrangements(cfg, 8)
    with pytest.raises(ConfigError, match="--gpus 3: at least 4 are needed, 2 for a replica"):
        planner.arrangements(cfg, 3)


def test_fewer_gpus_than_a_split_needs_are_colocated() -> None:
    cfg = load_config(GPUS)
    with pytest.raises(ConfigError, match="at least 4 are needed, .*; or 3, colocated"):
        planner.arrangements(cfg, 2, min_ranks=3)
    (alone,) = planner.arrangements(cfg, 3, min_ranks=3)
    assert (alone.name, alone.ranks) == (planner.COLOCATED, 3)
    with pytest.raises(
        ConfigError, match="actor.ppo_mini_batch_size=8: its 32 samples are too few"
    ):
        planner.arrangements(cfg, 32, min_ranks=33)


def test_one_gpu_is_shared_or_colocated(capsys) -> None:
    keys = [*GPUS, "placement.pools={rollout: [0.4], actor: [0.6]}", "--times", "10,10,2"]
    assert main(keys) == 0
    out = capsys.readouterr().out
    found = rows_of(out)
    assert list(found) == [("1", "colocated, synchronous"), ("1", "one step off, shared")]
    assert found["1", "colocated, synchronous"] == pytest.approx(22, rel=0.02)
    # The device is never idle, and the sync is hidden.
    assert found["1", "one step off, shared"] == pytest.approx(20, rel=0.02)
    assert "at half speed while both work" in out


def test_replicas_of_several_gpus_and_many_splits(capsys) -> None:
    keys = [*GPUS, "rollout.tensor_parallel_size=2", "placement.pools={rollout: [4], actor: [4]}"]
    assert main([*keys, "--times", "60,70,1"]) == 0
    found = rows_of(capsys.readouterr().out)
    assert {split for split, _ in found} == {"2 + 6", "4 + 4", "6 + 2"}, (
        "and no colocated arrangement"
    )
    assert main([*keys, "--times", "60,70,1", "--gpus", "200"]) == 0
    found = rows_of(capsys.readouterr().out)
    assert {int(split.split(" + ")[1]) for split, _ in found} == set(range(2, 33, 2)), (
        "a sample for each rank"
    )
    assert main([*keys, "data.train_batch_size=32", "--times", "60,70,1", "--gpus", "66"]) == 0
    assert len(rows_of(capsys.readouterr().out)) == 2 * 16
    assert (
        main(
            [
                *keys,
                "data.train_batch_size=32",
                "actor.ppo_mini_batch_size=32",
                "--times",
                "60,70,1",
                "--gpus",
                "66",
            ]
        )
        == 0
    )
    assert len(rows_of(capsys.readouterr().out)) == 2 * planner.MAX_SPLITS


SYNC_PARTS = {
    "sync/full_bytes": 1e9,
    "sync/in_place": 1.0,
    "sync/wait_s": 0.8,
    "sync/load_s": 0.2,
    "sync/prepare_s": 0.0,
    "sync/apply_s": 0.0,
    "sync/verify_s": 0.0,
    "sync/finish_s": 0.0,
}


def write_run(folder: Path, prompts: int, *keys: str) -> None:
    """A synchronous run of 6 steps, as long as constants say: all responses of 50 tokens, prompts
    of 30. A sync of 2 s, of which the wire takes 0.8 and the canary 0.5."""
    folder.mkdir(parents=True)
    cfg = load_config(
        [*GPUS, f"data.train_batch_size={prompts}", f"actor.ppo_mini_batch_size={prompts}", *keys]
    )
    cfg.pipeline.staleness = 0 if "pipeline.staleness=1" not in keys else 1
    (folder / "config.yaml").write_text(resolved_yaml(cfg))
    samples = 4 * prompts
    times = {
        "time/wait_rollout_s": 50 * (0.02 + 1e-3 * samples / 2),
        "time/train_s": 3 + 1e-3 * samples * 80 / 6,
    }
    row = {
        "samples": float(samples),
        "tokens/response": 50.0 * samples,
        "response_length/max": 50.0,
    }
    row |= times | {"actor/tokens_total": 80.0 * samples, "time/sync_s": 2.0, "time/canary_s": 0.5}
    row |= SYNC_PARTS
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i} | row) + "\n" for i in range(6))
    )
    (folder / "samples").mkdir()
    lines = "".join(json.dumps({"length": 50}) + "\n" for _ in range(samples))
    (folder / "samples" / "step_000000.jsonl").write_text(lines)


def test_two_runs_tell_the_constants(tmp_path) -> None:
    write_run(tmp_path / "whole", 8)
    write_run(tmp_path / "quarter", 2)
    work = calibration.by_runs([str(tmp_path / "whole"), str(tmp_path / "quarter")])
    found = (
        work.decode_s,
        work.sequence_s,
        work.train_fixed_s,
        work.train_token_s,
        work.sync_s,
        work.canary_s,
        work.replica_canary_s,
    )
    assert found == pytest.approx((0.02, 1e-3, 3.0, 1e-3, 2.0, 0.25, 0.25))
    assert (work.prompts, work.lengths.shape, work.prompt_tokens) == (
        8,
        (8, 4),
        pytest.approx(30.0),
    )


def test_one_run_is_met_and_has_next_to_no_fixed_parts(tmp_path, capsys) -> None:
    write_run(tmp_path / "whole", 8)
    work = calibration.by_runs([str(tmp_path / "whole")])
    assert work.train_fixed_s < 0.01
    assert work.decode_s < 0.01 * 16 * work.sequence_s
    assert main([*GPUS, "--from", str(tmp_path / "whole")]) == 0
    assert rows_of(capsys.readouterr().out)["2 + 6", "synchronous"] == pytest.approx(
        50 * 0.036 + 3 + 2.56 / 6 + 2, rel=1e-3
    )


def test_without_either_it_runs_the_config_twice_synchronously(monkeypatch, capsys) -> None:
    asked = []

    def run(command, **_):
        asked.append(load_config(command[3:]))
        write_run(Path(asked[-1].trainer.output_dir), asked[-1].data.train_batch_size)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(planner, "validate", lambda *_: None)
    assert main([*GPUS, "trainer.test_freq=5", "data.val_files=x/y"]) == 0
    assert (
        [cfg.data.train_batch_size for cfg in asked]
        == [cfg.actor.ppo_mini_batch_size for cfg in asked]
        == [8, 2]
    )
    for cfg in asked:
        own = cfg.trainer
        assert cfg.pipeline.staleness == 0
        assert own.total_steps == calibration.STEPS
        assert own.resume == "never"
        assert (own.test_freq, own.save_freq, own.save_hf_model, cfg.data.val_files) == (
            -1,
            -1,
            False,
            "",
        )
        assert not Path(own.output_dir).exists(), "the folder was temporary"
    assert len(rows_of(capsys.readouterr().out)) == 15


def test_a_calibration_that_fails_says_why(monkeypatch) -> None:
    monkeypatch.setattr(planner, "validate", lambda *_: None)
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="error: no engine")
    )
    with pytest.raises(SystemExit, match="ended with 1: error: no engine"):
        main(GPUS)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--times", "1,2"], "--times 1,2: must be GEN,TRAIN,SYNC"),
        (["--times", "1,2,3,4,5"], "--times 1,2,3,4,5: must be"),
        (["--times", "1,x,3"], "--times 1,x,3: must be"),
        (["--times", "0,2,3"], "must be"),
        (["--times", "nan,2,3"], "must be"),
        (["--times", "1,inf,3"], "must be"),
        (["--times", "1,2,-3"], "must be"),
        (["--times", "10,2,3,11"], "TAIL at most GEN"),
        (["--times", "1,2,3", "--from", "x"], "not allowed with"),
        (["--times"], "expected one argument"),
        (["--times", "1,2,3", "--gpus", "0"], "--gpus 0: must be a whole number from 1"),
        (["--times", "1,2,3", "--gpus", "many"], "invalid int value: 'many'"),
        (["--times", "1,2,3", "--gpus", "99999999"], "--gpus 99999999: must be"),
        (
            [
                "--times",
                "1,2,3",
                "--gpus",
                "3",
                "rollout.tensor_parallel_size=4",
                "placement.pools.rollout=[4]",
            ],
            "--gpus 3: at least 5 are needed, 4 for a replica and 1 for the trainer",
        ),
        (
            ["--times", "1,2,3", "rollout.engine_kwargs={max_num_seqs: none}"],
            "max_num_seqs=none: must be a whole number",
        ),
        (
            ["--from", "nowhere"],
            "--from nowhere: is not the trainer.output_dir of a synchronous run",
        ),
        (["--frm", "x"], "unrecognized arguments: --frm"),
        (["--times", "1,2,3", "rollout.nn=1"], "rollout.nn: unknown key; did you mean"),
        (["--times", "1,2,3", "placement.pools={rollout: [2]}"], "no such pool"),
        (["--times", "1,2,3", "model.path="], "model.path=: not set"),
        (["oops"], "argument oops: must be"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(monkeypatch, capsys, arguments, said) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    assert main([*GPUS, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_critic_elsewhere_is_not_planned(capsys) -> None:
    roles = [
        "placement.pools={rollout: [2], actor: [3], critic: [3]}",
        "algorithm.adv_estimator=gae",
    ]
    roles += ["placement.roles={rollout: rollout, actor: actor, critic: critic}"]
    assert main([*GPUS, *roles, "--times", "1,2,3"]) == 2
    assert (
        "placement.roles.critic=critic: the planner supports only two pools"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("broken", ["staleness", "steps", "json", "samples", "n"])
def test_a_run_that_tells_nothing_is_named(tmp_path, capsys, broken: str) -> None:
    folder = tmp_path / "run"
    write_run(folder, 8, *["pipeline.staleness=1"] * (broken == "staleness"))
    metrics = folder / "metrics.jsonl"
    if broken == "steps":
        metrics.write_text("\n".join(metrics.read_text().splitlines()[:3]))
    elif broken == "json":
        metrics.write_text("{\n" * 6)
    elif broken == "samples":
        (folder / "samples" / "step_000000.jsonl").unlink()
    elif broken == "n":
        metrics.write_text(metrics.read_text().replace("samples", "sample"))
    assert main([*GPUS, "--from", str(folder)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --from {folder}: ")
    assert err.count("\n") == 1


def test_the_staleness_of_the_config_is_a_row_of_its_own(capsys) -> None:
    keys = ["pipeline.staleness=2", "weight_sync.in_flight=recompute"]
    assert main([*GPUS, *keys, "--times", "60,70,5,30"]) == 0
    found = rows_of(capsys.readouterr().out)
    assert len(found) == 1 + 3 * 7
    assert found["1 + 7", "staleness 2, recompute"] < found["1 + 7", "one step off"]


def steps_of_plan(capsys, folder: Path, *keys: str) -> tuple[dict[tuple[str, str], float], str]:
    """Seconds a step of each arrangement, and what was printed."""
    assert main([*GPUS, *keys, "--from", str(folder)]) == 0
    out = capsys.readouterr().out
    return rows_of(out), out


def test_adapters_alone_are_planned_from_a_run_that_sent_the_model(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(measured_sync, "sent_bytes", lambda cfg: int(1e7))
    write_run(tmp_path / "merged", 8, "model.lora_rank=8")
    merged, _ = steps_of_plan(capsys, tmp_path / "merged", "model.lora_rank=8")
    keys = ["model.lora_rank=8", "weight_sync.lora=adapter"]
    alone, out = steps_of_plan(capsys, tmp_path / "merged", *keys)
    assert "10 MB are sent, 1,000 MB in the run" in out
    saved_s = merged["2 + 6", "synchronous"] - alone["2 + 6", "synchronous"]
    assert saved_s == pytest.approx(0.99, abs=0.01)
