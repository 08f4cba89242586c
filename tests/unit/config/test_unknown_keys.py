"""What the program says of keys that it does not have: ours for those of other trainers, the one
that was meant, or nothing.
"""

from __future__ import annotations

import dataclasses
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from one_step_off.config import unknown_keys
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import KEYS, find_key, load_config
from one_step_off.main_ppo import main

# Every key that examples/grpo_trainer/run_qwen2-7b.sh of verl sets.
RUN_QWEN2_7B = """algorithm.adv_estimator data.train_files data.val_files
    data.train_batch_size data.max_prompt_length data.max_response_length
    data.filter_overlong_prompts data.truncation actor_rollout_ref.model.path
    actor_rollout_ref.actor.optim.lr actor_rollout_ref.model.use_remove_padding
    actor_rollout_ref.actor.ppo_mini_batch_size
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef
    actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.entropy_coeff
    actor_rollout_ref.model.enable_gradient_checkpointing
    actor_rollout_ref.actor.fsdp_config.param_offload
    actor_rollout_ref.actor.fsdp_config.optimizer_offload
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.name
    actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.n
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
    actor_rollout_ref.ref.fsdp_config.param_offload algorithm.use_kl_in_reward
    trainer.critic_warmup trainer.logger trainer.project_name trainer.experiment_name
    trainer.n_gpus_per_node trainer.nnodes trainer.save_freq trainer.test_freq
    trainer.total_epochs""".split()
RUN_QWEN2_7B_UNKNOWN = [key for key in RUN_QWEN2_7B if key not in KEYS]


def refusal_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(list(argv))
    return str(error.value)


@pytest.mark.parametrize("key", unknown_keys.REMOVED_KEYS)
def test_a_key_of_an_earlier_version_is_refused_with_what_replaces_it(key: str, tmp_path) -> None:
    assert key not in KEYS
    for value in ("true", "null"):
        expected = f"{key}: is no key any more; {unknown_keys.REMOVED_KEYS[key]}"
        assert refusal_of(f"{key}={value}") == expected
    section, name = key.split(".")
    path = tmp_path / "old.yaml"
    path.write_text(f"# of an earlier version\n{section}:\n  {name}: 2\n")
    assert refusal_of(f"config={path}") == f"{path}:3: {expected}"


def test_what_replaces_a_key_of_an_earlier_version_exists() -> None:
    for sentence in unknown_keys.REMOVED_KEYS.values():
        for key in re.findall(r"[a-z_]+\.[a-z_]+", sentence):
            assert key in KEYS, sentence


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("actor.learning_rate=1", "use actor.lr (TRL's learning_rate: docs/reference/from_trl.md)"),
        ("learning_rate=1", "use actor.lr (TRL's learning_rate: docs/reference/from_trl.md)"),
        ("num_generations=4", "use rollout.n (TRL's num_generations: docs/reference/from_trl.md)"),
        ("rollout.num_generations=4", "use rollout.n (TRL's"),
        ("rollout.n_samples=4", "use rollout.n "),
        ("trainer.n_gpus_per_node=8", "use placement.pools, which divides the GPUs of a node"),
        ("actor_rollout_ref.actor.optim.lr=1e-6",
         "use actor.lr (verl's actor_rollout_ref.actor.optim.lr: docs/reference/from_verl.md)"),
        ("+actor_rollout_ref.actor.optim.lr=1e-6", "use actor.lr (verl's"),
        ("actor.optim.lr=1e-6", "use actor.lr (verl's actor_rollout_ref.actor.optim.lr"),
        ("rollout.tensor_model_parallel_size=2", "use rollout.tensor_parallel_size (verl's"),
        ("actor_rollout_ref.rollout.name=vllm", "remove it: always vLLM (verl's"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
         "use algorithm.loss_agg=sequence-mean (verl's"),
        ("actor_rollout_ref.actor.loss_agg_mode=my",
         "use algorithm.loss_agg=token-mean; or algorithm.loss_agg=sequence-mean; or"),
        ("algorithm.rollout_correction.bypass_mode=False",
         "use algorithm.old_log_probs=recompute (verl's"),
        ("loss_type=dr_grpo", "use algorithm.loss_agg=seq-sum-norm (TRL's"),
        ("gradient_accumulation_steps=2", "docs/reference/from_trl.md#batch-sizes (TRL's"),
        ("resource_pool_spec={}", "placement.roles: docs/concepts/placement.md (verl's"),
        # what was meant
        ("actor.lrr=1", "did you mean actor.lr?"),
        ("actor.total_step=1", "did you mean trainer.total_steps?"),
        ("trainer.total_stpes=1", "did you mean trainer.total_steps?"),
        ("trainr.seed=1", "did you mean trainer.seed?"),
        ("actor.beta=[1, 2]", "did you mean actor.betas?"),
        ("rollout.sead=1", "did you mean trainer.seed?"),
    ],
)  # fmt: skip
def test_the_answer(argument: str, answer: str) -> None:
    assert answer in refusal_of(argument), refusal_of(argument)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.tensor_parallel", "did you mean rollout.tensor_parallel_size?"),
        ("rollout.gpu_memory", "did you mean rollout.gpu_memory_utilization?"),
        ("rollout.temp", "did you mean rollout.temperature or rollout.val_temperature?"),
        ("trainer.output", "did you mean trainer.output_dir?"),
        ("data.batch_size", "use data.train_batch_size"),
        ("trainer.steps", "use trainer.total_steps"),
        ("trainer.eval_freq", "use trainer.test_freq"),
        ("reward.fn", "remove it"),  # and not rollout.n, which has one letter less
    ],
)
def test_a_part_of_a_name_has_the_whole_one_as_its_answer(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: unknown key; {re.escape(meant)}"):
        find_key(key)


@pytest.mark.parametrize(
    "key",
    ["actor.momentum", "rollout.frequency", "trainer.priority", "rollout.k", "data.x", "zebra"],
)
def test_nothing_close_has_no_suggestion(key: str) -> None:
    line = refusal_of(f"{key}=1")
    assert "did you mean" not in line
    assert "(all keys: --help)" in line
    assert not [name for name in KEYS if name in line], line


def test_every_key_of_verls_script_is_answered() -> None:
    for key in RUN_QWEN2_7B:
        if key not in KEYS:
            assert f"(verl's {key}: docs/reference/from_verl.md)" in refusal_of(f"{key}=1")


def test_the_value_of_an_unknown_key_does_not_matter() -> None:
    with pytest.raises(ConfigError, match="trainer.sed: unknown key; did you mean trainer.seed"):
        load_config(["trainer.sed=no"])
    with pytest.raises(ConfigError, match="^2 unknown keys"):
        load_config(["tranier.seed={a: [off]}", "\x85=NO"])


def test_all_unknown_keys_are_answered_at_once(tmp_path: Path, capsys) -> None:
    """Each with its line of the file and what to write; a script has dozens of them."""
    path = tmp_path / "verl.yaml"
    path.write_text(
        "data: {train_batch_size: 8}\n"
        "actor_rollout_ref:\n  nobody: 1\n  actor: {optim: {lr: 1e-6}}\n"
    )
    assert main([f"config={path}", "rollout.enforce_eager=True", "actor.lrr=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: 4 unknown keys (all keys: --help); one-step-off convert")
    assert lines[1].startswith(f"  {path}:3: actor_rollout_ref.nobody: unknown key; ")
    assert lines[2].startswith(
        f"  {path}:4: actor_rollout_ref.actor.optim.lr: unknown key; use actor.lr (verl's"
    )
    assert "rollout.enforce_eager: unknown key; use rollout.engine_kwargs.enforce" in lines[3]
    assert lines[4:] == ["  actor.lrr: unknown key; did you mean actor.lr?"]
    everything = [f"{key}=1" for key in RUN_QWEN2_7B if key not in KEYS]
    assert main(everything) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + len(everything) > 20
    for line, key in zip(lines[1:], RUN_QWEN2_7B_UNKNOWN, strict=True):
        assert f"(verl's {key}: docs/reference/from_verl.md)" in line


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("rollout.enforce_eager=True", "use rollout.engine_kwargs.enforce_eager=true (vLLM's)"),
        ("rollout.max_num_seqs=64", "use rollout.engine_kwargs.max_num_seqs"),
        ("vllm.max_num_batched_tokens=64", "use rollout.engine_kwargs.max_num_batched_tokens=64"),
        ("enable_prefix_caching=false", "use rollout.engine_kwargs.enable_prefix_caching=false"),
        ("vllm_enable_prefix_caching=false", "use rollout.engine_kwargs.enable_prefix_caching"),
        ("--enforce-eager=true", "use rollout.engine_kwargs.enforce_eager=true"),
        ("teacher.enforce_eager=true", "use teacher.engine_kwargs.enforce_eager=true"),
        ("vllm.gpu_memory_utilization=0.5", "did you mean rollout.gpu_memory_utilization?"),
        ("rollout.dtype=float32", "did you mean model.dtype?"),
    ],
)
def test_arguments_of_the_engine_have_a_place(argument: str, answer: str) -> None:
    assert answer in refusal_of(argument), refusal_of(argument)


def test_the_arguments_of_the_engine_are_vllms() -> None:
    from vllm import AsyncEngineArgs

    fields = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    known = unknown_keys._content()[unknown_keys.ENGINE_ARGUMENTS].split()
    assert known == [name for name in fields if not name.startswith("_")]


def test_what_is_recommended_exists() -> None:
    """`use X` names a key, with a value of its type where it names one."""
    for row in unknown_keys.rows():
        if row.here.startswith("`"):
            ours, equals, value = row.here.split("`")[1].partition("=")
            find_key(".".join(ours.split(".")[:2]))
            if equals:
                load_config([f"{ours}={value}"])


def test_names_of_other_lengths_are_not_compared(monkeypatch) -> None:
    """A key of 5,000 letters was compared with every key, which took minutes."""
    compared: list[str] = []
    monkeypatch.setattr(unknown_keys, "distance", lambda a, b: compared.append(a) or 9)
    assert not unknown_keys.is_typo("x" * 5000, "total_steps")
    assert not unknown_keys.is_typo("l", "learning_rate")
    assert compared == []
    assert not unknown_keys.is_typo("total_stops", "total_steps")
    assert compared == ["total_stops"]


@given(
    st.text(string.ascii_lowercase + "_.", max_size=20),
    st.text(string.ascii_lowercase + "_.", max_size=20),
)
def test_the_distance_of_two_names(a: str, b: str) -> None:
    """Symmetric, zero for equals only, and 1 for one slip of each kind."""
    result = unknown_keys.distance(a, b)
    assert result == unknown_keys.distance(b, a)
    assert (result == 0) == (a == b)
    assert abs(len(a) - len(b)) <= result <= max(len(a), len(b))
    assert unknown_keys.distance(a + "x" + b, a + b) == 1
    assert unknown_keys.distance(a + "x" + b, a + "%" + b) == 1
    assert unknown_keys.distance(a + "x%" + b, a + "%x" + b) == 1


def test_the_data_is_installed() -> None:
    assert "*.yaml" in (Path(__file__).parents[3] / "setup.cfg").read_text()
