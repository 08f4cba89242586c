"""Scripts of verl and TRL as configs: what they say is translated, what has no counterpart is
listed with a reason, and what is printed loads."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.config.unknown_keys import rows
from one_step_off.main_ppo import main
from one_step_off.tools.convert.convert import convert

VERL = r"""#!/usr/bin/env bash
set -xeuo pipefail
# don't count the quote of a comment
project_name='sums'
prompt_tokens=$((1024 * 2))
response_tokens=$(((prompt_tokens + 1024) * 2))  # with brackets
NNODES=${NNODES:-2}
HOME_OF_DATA=${HOME_OF_DATA:-"${HOME}/data"}
DATA=(
    data.train_files="$HOME_OF_DATA/train.parquet"
    data.val_files="['$HOME_OF_DATA/a.parquet','$HOME_OF_DATA/b.parquet']"
)

python3 -m verl.trainer.main_ppo \
    --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=grpo "${DATA[@]}" \
    data.max_prompt_length=${prompt_tokens} \
    data.max_response_length=$response_tokens \
    # data.shuffle=False \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.enforce_eager=True \
    actor_rollout_ref.rollout.n=5 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.x=1 \
    trainer.logger=['console','wandb'] \
    trainer.project_name="${project_name}" \
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.total_training_steps=100 $@ 2>&1 | tee log.txt
"""
TRL_PYTHON = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

LR = 5e-6
data = load_dataset("openai/gsm8k", "main", split="train").map(str)

def short(completions, **kwargs):
    return [0.0]

args = GRPOConfig(
    "runs/short", learning_rate=LR * 2, per_device_train_batch_size=4,
    gradient_accumulation_steps=4, steps_per_generation=8, num_generations=8, beta=0.04,
    loss_type="dr_grpo", scale_rewards=False, max_steps=250, report_to=["wandb"], bf16=True,
    lr_scheduler_type="cosine", warmup_steps=10, adam_beta2=0.99, vllm_mode="colocate",
    top_entropy_quantile=0.2, no_such_argument=1, save_steps=50, seed=make_seed(),
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[short], args=args, train_dataset=data,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
)
"""
TRL_COMMAND = r"""accelerate launch --num_processes 2 --config_file zero2.yaml \
    grpo.py --model_name_or_path=Qwen/Qwen2.5-0.5B --learning_rate 1e-5 --bf16 \
    --dataset-name openai/gsm8k --num_generations 4 --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 --use_peft --lora_target_modules q_proj v_proj \
    --report_to none  > log.txt 2>&1
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B
learning_rate: 1.0e-06
max_completion_length: 512
per_device_train_batch_size: 8
beta: 0.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/user")


def converted(name: str, text: str, capsys: pytest.CaptureFixture) -> tuple[Config, str]:
    """The config that the printed text holds, and its comments."""
    Path(name).write_text(text)
    assert main(["convert", name]) == 0
    printed = capsys.readouterr().out
    Path("converted.yaml").write_text(printed)
    comments = "\n".join(line for line in printed.splitlines() if line.startswith("#"))
    return load_config(["config=converted.yaml"]), comments


def test_a_script_of_verl(capsys):
    cfg, comments = converted("run.sh", VERL, capsys)
    assert cfg.model.path == "Qwen/Qwen2.5-7B"
    assert cfg.data.train_files == "/home/user/data/train.parquet"
    assert cfg.data.val_files == "/home/user/data/a.parquet,/home/user/data/b.parquet"
    assert (cfg.data.max_prompt_length, cfg.data.max_response_length) == (2048, 6144)
    assert cfg.data.overlong_prompts == "skip"
    assert cfg.data.shuffle  # the argument was a comment
    # What verl does by default and this program does not.
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size) == (1024, 256)
    assert cfg.algorithm.clip_ratio_c == 3.0
    assert cfg.actor.lr == 2e-6
    assert cfg.actor.warmup_steps == 5 * 4  # of the run there, of the optimizer here
    assert cfg.actor.micro_batch_tokens == 2 * (2048 + 6144)
    assert cfg.actor.activation_checkpointing
    assert (cfg.algorithm.adv_estimator, cfg.algorithm.loss_agg) == ("grpo", "sequence-mean")
    assert (cfg.algorithm.kl_coef, cfg.algorithm.kl_estimator) == (0.01, "k2")
    assert cfg.rollout.n == 5
    assert cfg.rollout.tensor_parallel_size == 2
    assert cfg.rollout.engine_kwargs == {"enforce_eager": True}
    assert cfg.placement.pools == {"rollout": [8], "actor": [8]}
    assert cfg.placement.roles == {"rollout": "rollout", "actor": "actor", "ref": "actor"}
    assert (cfg.trainer.total_steps, cfg.trainer.total_epochs) == (100, None)
    assert (cfg.logging.wandb, cfg.logging.wandb_project) == (True, "sums")
    assert "override_transformer_config.x=1: no such setting here" in comments
    assert "verl counts 5 steps of the run" in comments
    assert "data.train_files=/home/user/data/train.parquet: no such file" in comments


def test_verls_hybrid_engine_on_one_node(capsys):
    text = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b \\\n" + " ".join(
        ["data.train_files=a/b", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
         "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4",
         "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"]
    )  # fmt: skip
    cfg, comments = converted("run.sh", text, capsys)
    assert cfg.actor.sequence_parallel_size == 4
    assert cfg.placement.pools == {"all": [8]}
    assert cfg.pipeline.staleness == 0
    assert "for one step off give rollout and actor pools of their own" in comments
    assert "to do before" not in comments, comments


def test_a_python_script_of_trl(capsys):
    cfg, comments = converted("train.py", TRL_PYTHON, capsys)
    assert cfg.model.path == "Qwen/Qwen2-0.5B-Instruct"
    assert (cfg.model.lora_rank, cfg.model.lora_target_modules) == (8, "q_proj,v_proj")
    assert cfg.data.train_files == "openai/gsm8k:main"
    assert cfg.actor.lr == 1e-5
    # 4 x 8 samples are generated for 8 optimizer steps of 4 x 4, in groups of 8.
    assert (cfg.data.train_batch_size, cfg.actor.ppo_mini_batch_size) == (4, 2)
    # TRL counts optimizer steps, of which there are two in each of ours.
    assert (cfg.trainer.total_steps, cfg.trainer.save_freq) == (125, 25)
    assert cfg.actor.warmup_steps == 10
    assert cfg.actor.lr_schedule == "cosine"
    assert cfg.actor.betas == [0.9, 0.99]
    assert cfg.actor.weight_decay == 0.0  # TRL's default
    assert cfg.algorithm.kl_coef == 0.04 and cfg.placement.roles["ref"] == "all"
    assert cfg.algorithm.loss_agg == "seq-sum-norm"
    assert not cfg.algorithm.norm_adv_by_std
    assert cfg.trainer.output_dir == "runs/short"
    assert cfg.pipeline.staleness == 0
    assert cfg.logging.wandb and not cfg.logging.tensorboard
    assert "reward_funcs=[short]: TRL's functions take lists" in comments
    assert "top_entropy_quantile=0.2: not supported" in comments
    assert "no_such_argument=1: no such setting here" in comments
    assert "seed=make_seed(): the value is not in the script" in comments


def test_a_command_of_accelerate(capsys):
    cfg, _ = converted("run.sh", TRL_COMMAND, capsys)
    assert cfg.model.path == "Qwen/Qwen2.5-0.5B"
    assert (cfg.model.lora_rank, cfg.model.lora_target_modules) == (16, "q_proj,v_proj")
    assert cfg.data.train_files == "openai/gsm8k"
    assert cfg.actor.lr == 1e-5
    assert (cfg.data.train_batch_size, cfg.rollout.n) == (4, 4)  # 4 x 2 x 2 samples in groups of 4
    assert cfg.placement.pools == {"rollout": [1], "actor": [2]}
    assert cfg.trainer.seed == 42


def test_a_yaml_file_of_trl_and_of_verl(capsys):
    cfg, comments = converted("trl.yaml", TRL_YAML, capsys)
    assert (cfg.model.path, cfg.data.max_response_length) == ("Qwen/Qwen2.5-0.5B", 512)
    assert "data.train_files: the script does not say; put yours in place of" in comments
    text = "actor_rollout_ref: {model: {path: a/b}, rollout: {n: 3}}\ndata: {train_files: c/d}\n"
    cfg, _ = converted("verl.yaml", text, capsys)
    assert (cfg.model.path, cfg.rollout.n, cfg.data.train_files) == ("a/b", 3, "c/d")


def test_a_variable_without_a_value_is_the_environments(capsys, monkeypatch):
    text = (
        "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODELS/a "
        "data.train_files=b/c actor_rollout_ref.rollout.n=$SAMPLES algorithm.adv_estimator=grpo"
    )
    text += " data.train_batch_size=$((NNODES*128)) actor_rollout_ref.actor.ppo_epochs=$((2**1))"
    Path("run.sh").write_text(text)
    assert main(["convert", "run.sh"]) == 0
    assert (
        "#   MODELS: no value in the script; set it in the environment" in capsys.readouterr().out
    )
    monkeypatch.setenv("MODELS", "/models")
    cfg, comments = converted("run.sh", text, capsys)
    assert cfg.model.path == "/models/a"
    assert (
        "rollout.n=${oc.env:SAMPLES}: SAMPLES has no value in the script; set rollout.n" in comments
    )
    assert (
        "data.train_batch_size=$((NNODES*128)): NNODES has no value in the script; "
        "set data.train_batch_size" in comments
    )
    assert "ppo_epochs=$((2**1)): this is not worked out; set actor.ppo_epochs" in comments


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("run.sh", "echo nothing\n", "holds no settings of verl or TRL"),
        ("train.py", "GRPOConfig(learning_rate=", "not valid Python"),
        ("train.py", "print()\n", "holds no settings"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.yaml", "- 1\n", "must be a mapping"),
        ("sft.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a optim.lr=1 a.b=c",
         "is supervised fine-tuning"),
    ],
)  # fmt: skip
def test_a_script_that_holds_none(name, text, part):
    Path(name).write_text(text)
    with pytest.raises(ConfigError, match=part):
        convert(name)


def test_no_script(capsys):
    assert main(["convert"]) == 2
    assert "usage: one-step-off convert SCRIPT" in capsys.readouterr().err
    assert main(["convert", "nowhere.sh"]) == 2
    assert "nowhere.sh: No such file" in capsys.readouterr().err


def settings_of_the_tables(trainer: str, seed: int) -> list[tuple[str, str]]:
    """Each key of the tables with a value of its row or one at random, and unknown ones."""
    draw = random.Random(seed)
    drawn = ["1", "2", "16", "true", "false", "0.5", "some_name", "null", "$NOWHERE", "$((NO*2))"]
    found: dict[str, str] = {}
    for row in rows():
        if row.trainer not in (trainer, "common"):
            continue
        for key, value in row.keys:
            if re.fullmatch(r"[\w.]+", key) and key != "resource_pool_spec":
                found[key] = value if value is not None else draw.choice(drawn)
    dot = "." if trainer == "verl" else "_"
    for _ in range(20):
        found[f"unknown{dot}{draw.getrandbits(40):x}{dot}key"] = draw.choice(drawn)
    if trainer == "verl":
        return [(key, value) for key, value in found.items() if "." in key]
    return [(key, value) for key, value in found.items() if "." not in key and key != "config"]


@pytest.mark.parametrize("trainer", ["verl", "TRL"])
@pytest.mark.parametrize("seed", range(3))
def test_each_setting_ends_in_one_place(trainer, seed, capsys):
    settings = settings_of_the_tables(trainer, seed)
    if trainer == "verl":
        words = [f"{key}={value}" for key, value in settings]
        text = "python -m verl.trainer.main_ppo --config-name=base --config-path=x foo " + " ".join(
            words
        )
        wanted = [key for key, _ in settings] + ["--config-name", "--config-path", "foo"]
    else:
        words = [f"--{key} {value}" for key, value in settings]
        text = "accelerate launch grpo.py " + " ".join(words)
        wanted = [key for key, _ in settings]
    Path("run.sh").write_text(text)
    conversion = convert("run.sh")
    assert set(wanted) == set(conversion.given)
    assert main(["convert", "run.sh"]) == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed)
    title = "# so here by default, or without effect on training:\n#   "
    same = printed.partition(title)[2].partition("\n")[0].split(", ")
    notes = printed.partition("# look at:")[2]
    left = re.findall(r"^#   ([^\s=]+)=", printed.partition("# look at:")[0], re.M)
    for key in wanted:
        places = [key in left, key in same]
        targets = [dotted for dotted, theirs in conversion.sources.items() if key in theirs]
        in_yaml = [dotted for dotted in targets if is_in(config, dotted.split("."))]
        places.append(bool(in_yaml) and key not in left)
        outcome = conversion.outcome_of(key)
        if outcome == "noted":
            assert any(target in notes for target in targets), key
        else:
            assert sum(places) == 1, (key, outcome, places, targets)


def is_in(config: dict, names: list[str]) -> bool:
    """Whether a nested mapping has an entry of this path; the last names may be one with dots."""
    if len(names) <= 2:
        return names[1] in config.get(names[0], {})
    return ".".join(names[2:]) in config.get(names[0], {}).get(names[1], {})


def test_what_a_script_of_verl_does_not_say(capsys):
    rest = "actor_rollout_ref.model.path=a/b data.train_files=c/d actor_rollout_ref.rollout.n=4 "
    rest += "algorithm.adv_estimator=grpo"
    cfg, _ = converted("run.sh", f"python -m verl.trainer.main_ppo {rest}", capsys)
    assert cfg.algorithm.old_log_probs == "recompute"
    assert cfg.actor.activation_checkpointing
    # The configs of these recipes set bypass_mode: true.
    for recipe in ("one_step_off_policy.main_ppo", "fully_async_policy.fully_async_main"):
        text = f"python -m verl.experimental.{recipe} {rest}"
        cfg, _ = converted("run.sh", text, capsys)
        assert cfg.algorithm.old_log_probs == "rollout"
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    cfg, _ = converted("run.sh", f"python -m verl.trainer.main_ppo {rest} {bypass}", capsys)
    assert cfg.algorithm.old_log_probs == "rollout"
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing=False"
    cfg, _ = converted("run.sh", f"python -m verl.trainer.main_ppo {rest} {checkpointing}", capsys)
    assert not cfg.actor.activation_checkpointing


MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 "
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 "
    "critic.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"
)


def test_micro_batches_of_each_role(capsys):
    text = f"python -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b {MICRO_BATCHES} "
    cfg, comments = converted("run.sh", text, capsys)
    assert cfg.actor.micro_batch_tokens == 8 * 1024
    assert cfg.ref.micro_batch_tokens == 16 * 1024
    assert cfg.critic.micro_batch_tokens == 4 * 1024
    assert "log_prob_micro_batch_size_per_gpu=40: log-probs come in the actor's" in comments
    assert "set actor.warmup_steps to 0.1 times the steps of the run times 4" in comments
    cfg, _ = converted("run.sh", text + "trainer.total_training_steps=50", capsys)
    assert cfg.actor.warmup_steps == 5 * 4


def test_the_base_config_of_a_command(capsys):
    command = "python -m verl.trainer.main_ppo --config-path=x --config-name=base data.val_size=3 "
    _, comments = converted("run.sh", command + "algorithm.lam=0.9", capsys)
    for option in ("--config-name=base", "--config-path=x"):
        assert f"{option}: the settings of that config are not here" in comments
    Path("x").mkdir()
    base = "algorithm: {gamma: 0.5, lam: 0.7}\nactor_rollout_ref: {model: {path: a/b}}\n"
    Path("x/base.yaml").write_text(base)
    cfg, comments = converted("run.sh", command + "algorithm.lam=0.9", capsys)
    assert (cfg.model.path, cfg.algorithm.gamma, cfg.algorithm.lam) == ("a/b", 0.5, 0.9)
    assert "the settings of x/base.yaml are read" in comments
    own = "python -m verl.trainer.main_ppo --config-name ppo_megatron_trainer.yaml data.seed=3"
    cfg, comments = converted("run.sh", own, capsys)
    assert cfg.actor.backend == "megatron"


def test_what_a_script_of_trl_does_not_say(capsys):
    command = "accelerate launch --num_processes 8 grpo.py --model_name_or_path a/b "
    cfg, comments = converted("run.sh", command + "--use_vllm true", capsys)
    assert cfg.actor.activation_checkpointing
    algorithm = cfg.algorithm
    assert (algorithm.old_log_probs, algorithm.rollout_correction) == ("recompute", "seq-mis")
    assert algorithm.rollout_correction_cap == 3.0
    assert "9 GPUs, 1 more than the script's processes" in comments
    assert "reward.function=gsm8k is the default here, and what this config trains on" in comments
    mode = "--use_vllm true --vllm_importance_sampling_mode token_truncate"
    cfg, _ = converted("run.sh", f"{command} {mode} --vllm_importance_sampling_cap 5", capsys)
    assert (cfg.algorithm.rollout_correction, cfg.algorithm.rollout_correction_cap) == ("tis", 5.0)
    off = "--use_vllm true --vllm_importance_sampling_correction false"
    for words in (off, "--learning_rate 1e-6"):
        cfg, _ = converted("run.sh", command + words, capsys)
        assert cfg.algorithm.rollout_correction == "none"


def test_warm_up_as_a_share_of_a_run_of_trl(capsys):
    command = "accelerate launch grpo.py --model_name_or_path a/b --warmup_ratio 0.1"
    _, comments = converted("run.sh", command, capsys)
    assert "set actor.warmup_steps to 0.1 times the optimizer steps of the run" in comments
    cfg, _ = converted("run.sh", command + " --max_steps 200", capsys)
    assert cfg.actor.warmup_steps == 20
