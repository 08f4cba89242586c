"""What a run says before and after, and that its config and last command really work."""

from __future__ import annotations

import shlex
import subprocess
import sys
from types import SimpleNamespace

import numpy as np

from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.samples import Prompt
from one_step_off.monitoring.facts import (
    end_facts,
    python_command,
    short_count,
    start_facts,
    train_further_command,
)
from tests.conftest import tiny_config

SUMMARY = {
    "steps": 40,
    "seconds": 74.2,
    "reward/first": 0.3,
    "reward/last": 0.95,
    "reward/averaged_steps": 5,
    "val/first": 0.0,
    "val/last": 0.99,
    "val/versions": [0, 40],
    "median/time/step_s": 1.17,
    "median/time/generate_s": 0.5,
    "median/time/train_s": 0.54,
    "median/time/sync_s": 0.042,
    "idle_share/rollout": 0.51,
    "idle_share/trainer": 0.53,
    "samples_per_s": 214.2,
    "tokens_per_s/rollout": 9000.4,
    "tokens_per_s/trainer": 18000.0,
    "mfu/rollout": None,
    "mfu/trainer": None,
    "device": "cpu",
    "memory/rollout_peak_bytes": 2**30,
    "memory/trainer_peak_bytes": 2**29,
}


def data_of(train: int, held_out: int, steps: int) -> SimpleNamespace:
    """Of so many prompts."""
    stream = PromptStream(
        [Prompt((0, row), np.arange(2), "", "") for row in range(train)], 1, False, 0, steps
    )
    return SimpleNamespace(stream=stream, val=[None] * held_out or None)


def test_the_banner():
    cfg = load_config(["config=config/gsm8k_tiny_cpu.yaml"])
    cfg.model.path = "/cache/tiny-qwen2-abc"
    facts = start_facts(cfg, "tiny:qwen2", 345_000, data_of(4096, 128, 40), [("wandb", "offline")])
    text = "\n".join(f"{k}: {v}" for k, v in facts)
    for part in (
        "model: tiny:qwen2, 345k parameters, float32",
        "data: 4096 prompts of generator:word_problems",
        "held out: 128 prompts of generator:word_problems",
        "placement: rollout [1] on cpu: rollout x 1",
        ": actor [1] on cpu: actor x 1",
        "staleness: 1 (one step off",
        "steps: 40, each 16 prompts x 16 samples",
        "output: outputs/gsm8k_tiny_cpu",
        "wandb: offline",
    ):
        assert part in text
    assert "held out: none" in "\n".join(
        f"{k}: {v}" for k, v in start_facts(cfg, "m", None, data_of(5, 0, 1), [])
    )


def test_counts():
    assert [short_count(n) for n in (5, 345_000, 999_999, 494_032_768, 1_543_714_304)] == [
        "5",
        "345k",
        "1M",
        "494M",
        "1.54B",
    ]


def test_the_end(tmp_path):
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path / "my run")
    for folder in ("samples", "tensorboard", "hf_model"):
        (tmp_path / "my run" / folder).mkdir(parents=True)
    for file in (
        "samples/step_000000.jsonl",
        "tensorboard/events",
        "metrics.jsonl",
        "summary.json",
    ):
        (tmp_path / "my run" / file).touch()
    facts = dict(end_facts(SUMMARY, cfg))
    sampled = "sampled at temperature 1"
    averaged = "means of the first and last 5 steps"
    assert facts["train reward"] == f"0.300 -> 0.950 ({sampled}; {averaged})"
    assert facts["held out"] == "0.000 -> 0.990 (greedy)"
    assert facts["median step"] == "1.17 s: generate 0.50 s, train 0.54 s, sync 0.042 s"
    assert facts["idle"] == "rollout 51%, trainer 53%"
    assert facts["tokens/s"] == "rollout 9,000, trainer 18,000 while they work"
    assert "MFU" not in facts
    assert facts["peak memory"] == "rollout 1.00 GiB, trainer 0.50 GiB"
    assert facts["whole run"] == "40 steps in 74 s"
    assert facts["metrics"] == f"{tmp_path}/my run/metrics.jsonl, {tmp_path}/my run/summary.json"
    assert facts["model"] == f"{tmp_path}/my run/hf_model"
    assert "next run" in facts
    assert facts["longer run"].startswith("no checkpoint; set trainer.save_freq")
    (tmp_path / "my run/checkpoints/step_000040").mkdir(parents=True)
    cfg.trainer.total_steps = 40
    assert dict(end_facts(SUMMARY, cfg))["longer run"] == (
        "the same command with a larger trainer.total_steps continues from "
        f"{tmp_path}/my run/checkpoints/step_000040"
    )
    distilled = SUMMARY | {"distill/kl/first": 0.5, "distill/kl/last": 0.25}
    assert dict(end_facts(distilled, cfg))["distill/kl"].startswith("0.5000 -> 0.2500 nats")
    assert "samples" in facts
    assert (
        facts["tensorboard"]
        == f"{python_command()} -m tensorboard.main --logdir '{tmp_path}/my run/tensorboard'"
    )
    on_gpus = dict(
        end_facts(SUMMARY | {"mfu/rollout": 0.05, "mfu/trainer": 0.4, "device": "NVIDIA H100"}, cfg)
    )
    assert on_gpus["MFU"] == "rollout 5.0%, trainer 40.0% of NVIDIA H100 in bf16"


def test_a_run_without_steps_or_evaluation_still_ends_in_words(tmp_path):
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    assert end_facts({"steps": 0, "seconds": 1.0}, cfg) == [("whole run", "0 steps in 1 s")], (
        "nothing that is not there"
    )


def test_few_steps_one_evaluation_and_what_came_before():
    def facts(**changes: object) -> dict[str, str]:
        return dict(end_facts(SUMMARY | changes, Config()))

    few = {"reward/averaged_steps": 1, "steps": 3, "val/versions": [0], "val/last": 0.0}
    sampled = "sampled at temperature 1"
    assert facts(**few)["train reward"] == f"0.300 -> 0.950 ({sampled}; first and last step)"
    assert facts(**few)["held out"] == "0.000 (greedy)"
    assert facts(**few | {"steps": 1})["train reward"] == f"0.950 ({sampled})"
    assert facts(steps_before=30)["this run"] == "10 steps in 74 s"
    assert "whole run" not in facts(steps_before=30)


def test_a_run_that_only_evaluates_names_no_model(tmp_path):
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.trainer.val_only = True
    (tmp_path / "hf_model").mkdir()  # an earlier run's
    assert (
        dict(start_facts(cfg, "m", None, data_of(5, 0, 1), []))["steps"]
        == "none: the held-out set is evaluated"
    )
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "val_v000040.jsonl").write_text("{}\n")
    facts = dict(end_facts(SUMMARY, cfg))
    assert not {"model", "next run"} & set(facts)
    assert facts["samples"].endswith(f"view {tmp_path} --val 40")


def test_the_command_to_go_on_reloads_the_config(models, tmp_path):
    cfg = tiny_config(
        models(),
        str(tmp_path / "a run"),
        **{"data.instruction": 'a ${x} "b" #### c', "logging.wandb": False},
    )
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "config.yaml").write_text(resolved_yaml(cfg))
    python, option, module, *arguments = shlex.split(train_further_command(cfg))
    assert (option, module) == ("-m", "one_step_off.main_ppo")
    # It works where it is printed, with no environment activated.
    done = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, env={}
    )
    assert done.stdout.strip() == sys.prefix
    again = load_config(arguments)
    assert again.model.path == str(tmp_path / "a run" / "hf_model")
    assert again.trainer.output_dir == str(tmp_path / "a run_next")
    again.model.path = cfg.model.path
    again.trainer.output_dir = cfg.trainer.output_dir
    assert again == cfg
