"""The config: what is accepted, and that every fault is one line that names the key, the value and the fix."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from one_step_off.config import data_checks, engine_checks, hardware, packages
from one_step_off.config.errors import ConfigError
from one_step_off.config.help import help_text
from one_step_off.config.loading import KEYS, load_config
from one_step_off.config.placement import placement_text, process_cores
from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.data import word_problems
from one_step_off.runtime.validation import validate

# A warning would be a second line on the user's screen.
pytestmark = pytest.mark.filterwarnings("error")
ROOT = Path(__file__).parents[3]
GOOD = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=2",
    "placement.device=cpu",
    "model.dtype=float32",
)


def good(*overrides: str) -> Config:
    """A valid config with these changes."""
    return load_config([*GOOD, *overrides])


def fault(*argv: str, num_gpus: int = 0, base: tuple[str, ...] = GOOD) -> str:
    """The one line that these arguments are refused with."""
    with pytest.raises(ConfigError) as caught:
        validate(load_config([*base, *argv]), num_gpus)
    line = str(caught.value)
    assert line and len(line.splitlines()) == 1 and len(line) < 400, line
    return line


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --- faults of arguments: (arguments, parts that the line must hold) ---------------------------------------------

SHARED = "placement.pools={all: [2]}", "placement.roles={rollout: all, actor: all}"
BAD = [
    # unknown keys
    (["actor.lrr=1"], ["actor.lrr", "did you mean actor.lr?"]),
    (["actr.lr=1"], ["actr.lr", "did you mean actor.lr?"]),
    (["lr=1"], ["lr", "did you mean actor.lr?"]),
    (["rollout.staleness=0"], ["rollout.staleness", "did you mean pipeline.staleness?"]),
    (["zzz=1"], ["zzz", "use model, data"]),
    (["actor=1"], ["actor", "a section", "actor.KEY=VALUE"]),
    (["actor.=1"], ["actor.", "section"]),
    (["actor.lr.x=1"], ["actor.lr.x", "did you mean actor.lr?"]),
    (["placement.pools..x=1"], ["placement.pools.={x: 1}", "list of whole numbers"]),
    (["actor.lr.\x1e=1"], ["actor.lr.\\x1e", "unknown key"]),
    (["\x1e=:"], ["\\x1e=:", "not valid YAML"]),
    # no key=value
    (["actor.lr"], ["actor.lr", "section.key=value"]),
    (["=3"], ["=3", "section.key=value"]),
    # types
    (["actor.lr=fast"], ["actor.lr=fast", "must be a number"]),
    (["actor.lr=[1]"], ["actor.lr=[1]", "must be a number"]),
    (["actor.lr=null"], ["actor.lr=null", "must be a number"]),
    (["actor.lr=true"], ["actor.lr=true", "must be a number"]),
    (["actor.lr=.nan"], ["actor.lr=nan", "above 0"]),
    (["actor.lr=1e999"], ["actor.lr=inf", "at most"]),
    (["actor.lr=1" + "0" * 400], ["actor.lr=inf", "at most"]),
    (["actor.lr=[1"], ["actor.lr=[1", "not valid YAML", "quote"]),
    (["rollout.n=2.5"], ["rollout.n=2.5", "must be a whole number"]),
    (["rollout.n=many"], ["rollout.n=many", "must be a whole number"]),
    (["rollout.n={a: 1}"], ["rollout.n=", "must be a whole number"]),
    (["rollout.n=99999999999999"], ["rollout.n=99999999999999", "at most 2147483647"]),
    (["trainer.total_steps=soon"], ["trainer.total_steps=soon", "whole number or null"]),
    (["model.trust_remote_code=perhaps"], ["model.trust_remote_code=perhaps", "true or false"]),
    (["model.trust_remote_code=3"], ["model.trust_remote_code=3", "true or false"]),
    (["model.path=null"], ["model.path", "not set"]),
    (["model.dtype=null"], ["model.dtype=null", "one of bfloat16, float32"]),
    (["actor.betas=0.9"], ["actor.betas=0.9", "list of numbers"]),
    (["actor.betas=[a, b]"], ["actor.betas[0]=a", "must be a number"]),
    (["placement.pools=3"], ["placement.pools=3", "mapping of lists"]),
    (["placement.pools={rollout: 1}"], ["placement.pools.rollout=1", "a list of whole numbers"]),
    (["placement.pools.rollout=[a]"], ["placement.pools.rollout[0]=a", "a whole number"]),
    (["placement.roles=rollout"], ["placement.roles=rollout", "mapping of names"]),
    (["placement.roles={rollout: [1]}"], ["placement.roles.rollout=[1]", "must be text"]),
    (["model.path=${nowhere}"], ["model.path", "nowhere", "write the value itself"]),
    (["model.path=${oc.env:NOWHERE}"], ["model.path", "NOWHERE", "write the value itself"]),
    (["rollout.n=${model.dtype}"], ["rollout.n=float32", "a whole number"]),
    # ranges and choices
    (["rollout.n=0"], ["rollout.n=0", "at least 1"]),
    (["actor.lr=0"], ["actor.lr=0", "above 0"]),
    (["actor.lr=-1e-6"], ["actor.lr=-1e-06", "above 0"]),
    (["actor.min_lr_ratio=2"], ["actor.min_lr_ratio=2", "at most 1"]),
    (["rollout.gpu_memory_utilization=1.5"], ["rollout.gpu_memory_utilization=1.5", "at most 1"]),
    (
        ["rollout.heartbeat_s=60"],
        ["rollout.heartbeat_timeout_s=60", "must be above rollout.heartbeat_s=60"],
    ),
    (
        ["rollout.heartbeat_timeout_s=3"],
        ["rollout.heartbeat_timeout_s=3", "must be above rollout.heartbeat_s=5"],
    ),
    (["rollout.temperature=0"], ["rollout.temperature=0", "above 0"]),
    (
        ["rollout.top_p=0.9"],
        ["rollout.top_p=0.9: must be at least 1", "other values change the log-probs"],
    ),
    (
        ["rollout.top_k=50"],
        ["rollout.top_k=50: must be at most -1", "other values change the log-probs"],
    ),
    (["pipeline.staleness=2"], ["pipeline.staleness=2", "at most 1"]),
    (["model.dtype=bfloat61"], ["model.dtype=bfloat61", "one of bfloat16, float32"]),
    (["algorithm.adv_estimator=gae2"], ["algorithm.adv_estimator=gae2", "did you mean gae?"]),
    (["algorithm.adv_estimator=gae"], ["algorithm.adv_estimator=gae", "critic"]),
    (
        ["algorithm.adv_estimator=gdpo"],
        ["algorithm.adv_estimator=gdpo", "rewards in parts", "{name: number}"],
    ),
    (
        [
            "algorithm.adv_estimator=gdpo",
            "reward_model.url=http://h:1/s",
            "reward.overlong_buffer=4",
        ],
        ["algorithm.adv_estimator=gdpo", "reward.overlong_buffer would do nothing"],
    ),
    (["algorithm.adv_estimator=no_such_module:f"], ["no_such_module:f", "module:function"]),
    (["algorithm.adv_kwargs.pass_k=2"], ["adv_kwargs.pass_k=2", "no such setting of grpo"]),
    (
        ["algorithm.adv_estimator=grpo_passk", "algorithm.adv_kwargs.pass_k=99"],
        ["pass_k=99", "from 2 to rollout.n"],
    ),
    (["algorithm.policy_loss=gsp"], ["algorithm.policy_loss=gsp", "did you mean gspo?"]),
    (
        ["algorithm.policy_loss=sapo", "algorithm.policy_loss_kwargs.tau=1"],
        ["kwargs.tau=1", "did you mean tau_"],
    ),
    (
        ["algorithm.policy_loss=sapo", "algorithm.policy_loss_kwargs.tau_neg=x"],
        ["tau_neg=x", "must be a number"],
    ),
    (["algorithm.policy_loss=gspo", "algorithm.clip_ratio_c=3"], ["clip_ratio_c=3", "gspo"]),
    (["algorithm.kl_in_reward=true"], ["kl_in_reward=true", "raise kl_coef"]),
    (["algorithm.kl_target=6"], ["kl_target=6", "kl_in_reward=true"]),
    (["reward.overlong_buffer=100000"], ["overlong_buffer=100000", "max_response_length"]),
    (["actor.betas=[0.9]"], ["actor.betas=[0.9]", "two numbers"]),
    (["actor.betas=[0.9, 1.0]"], ["actor.betas=[0.9, 1.0]", "below 1"]),
    (["actor.fsdp_size=0"], ["actor.fsdp_size=0", "-1"]),
    (["data.val_size=0"], ["data.val_size=0", "-1"]),
    (["trainer.test_freq=0"], ["trainer.test_freq=0", "-1"]),
    (["trainer.save_freq=0"], ["trainer.save_freq=0", "at least 1", "-1"]),
    # what does not go together
    (["trainer.test_freq=5"], ["trainer.test_freq=5", "data.val_files"]),
    (["trainer.total_epochs=1"], ["trainer.total_steps=2", "trainer.total_epochs=1", "null"]),
    (
        ["trainer.total_steps=null"],
        ["trainer.total_steps", "trainer.total_epochs", "one must be set"],
    ),
    (
        ["data.train_batch_size=10", "actor.ppo_mini_batch_size=4"],
        ["ppo_mini_batch_size=4", "=10", "use 2"],
    ),
    (
        ["data.train_batch_size=64", "actor.ppo_mini_batch_size=128"],
        ["ppo_mini_batch_size=128", "use 64"],
    ),
    (
        ["placement.pools.actor=[8]", "actor.ppo_mini_batch_size=1", "rollout.n=4"],
        ["ppo_mini_batch_size=1", "8 actor ranks", "at least 2"],
    ),
    (
        ["placement.pools.rollout=[3]", "rollout.tensor_parallel_size=2"],
        ["tensor_parallel_size=2", "use 1"],
    ),
    (
        ["placement.pools.rollout=[3, 1]", "rollout.tensor_parallel_size=2"],
        ["tensor_parallel_size=2", "node 0"],
    ),
    (["placement.pools.actor=[4]", "actor.fsdp_size=3"], ["actor.fsdp_size=3", "4 ranks", "use 2"]),
    (
        ["placement.pools={}"],
        ["placement.roles.rollout=rollout", "placement.pools, which has none"],
    ),
    (["placement.pools.actor=[0]"], ["placement.pools.actor=[0]", "from 1"]),
    (["placement.pools.actor=[]"], ["placement.pools.actor=[]", "from 1"]),
    (["placement.pools.actor=[1000000]"], ["placement.pools.actor=[1000000]", "1024"]),
    (["placement.roles.actor=nowhere"], ["placement.roles.actor=nowhere", "rollout, actor"]),
    (["placement.roles.judge=actor"], ["placement.roles.judge=actor", "unknown role", "ref"]),
    (["placement.pools.spare=[1]"], ["placement.pools.spare=[1]", "remove it"]),
    (["placement.roles={rollout: rollout}"], ["placement.roles", "actor", "add"]),
    (["placement.roles={actor: actor}"], ["placement.roles", "rollout", "add"]),
    ([*SHARED], ["actor and rollout share the pool all", "one step off", "pipeline.staleness=0"]),
    (
        [*SHARED, "pipeline.staleness=0", "rollout.tensor_parallel_size=2"],
        ["share the pool all", "rollout.tensor_parallel_size=1"],
    ),
    (
        ["actor.tensor_parallel_size=2"],
        ["actor.tensor_parallel_size=2", "only Megatron has it", "actor.backend=megatron"],
    ),
    (["actor.sequence_parallel=true"], ["actor.sequence_parallel=true", "tensor_parallel_size=1"]),
    (
        ["actor.virtual_pipeline_parallel_size=2"],
        ["virtual_pipeline_parallel_size=2", "needs stages"],
    ),
    (["rollout.n=1"], ["rollout.n=1", "at least 2"]),
    (["weight_sync.sender=gather"], ["weight_sync.sender=gather", "weight_sync.overlap=false"]),
    (
        ["weight_sync.sender=gather", "weight_sync.overlap=false", "weight_sync.mode=delta"],
        ["weight_sync.mode=delta", "weight_sync.sender=sharded"],
    ),
    (["algorithm.kl_coef=0.1"], ["algorithm.kl_coef=0.1", "placement.roles.ref=actor"]),
    (["placement.roles.ref=actor"], ["placement.roles.ref", "algorithm.kl_coef"]),
    (
        ["algorithm.kl_coef=0.1", "placement.roles.ref=actor", "algorithm.kl_estimator=k1"],
        ["algorithm.kl_estimator=k1", "gradient has mean zero", "use k2 or k3"],
    ),
    (["trainer.critic_warmup=1"], ["trainer.critic_warmup=1", "placement.roles.critic"]),
    (
        ["placement.roles.critic=actor", "algorithm.adv_estimator=gae", "trainer.critic_warmup=2"],
        ["trainer.critic_warmup=2", "trainer.total_steps=2", "smaller"],
    ),
    (
        [
            "algorithm.kl_coef=0.1",
            "placement.roles.ref=actor",
            "algorithm.kl_in_reward=true",
            "algorithm.kl_target=6",
        ]
        + ["algorithm.kl_horizon=3"],
        ["algorithm.kl_horizon=3", "shorter than one step"],
    ),
    (["reward.weight=5"], ["reward.weight=5", "reward_model.path or reward_model.url"]),
    (
        ["reward_model.url=http://h:1/s", "algorithm.max_gen_batches=2"],
        ["max_gen_batches=2", "before a reward model has scored"],
    ),
    (
        [
            "algorithm.adv_estimator=gdpo",
            "reward_model.url=http://h:1/s",
            "algorithm.adv_kwargs={weights: 3}",
        ],
        ["adv_kwargs.weights=3", "numbers by name"],
    ),
    (
        ["algorithm.policy_loss=kl_cov", "algorithm.policy_loss_kwargs={share: 5}"],
        ["kwargs.share=5", "at most 1"],
    ),
    (["algorithm.rollout_correction=tis"], ["rollout_correction=tis", "twice", "recompute"]),
    (["actor.param_offload=true"], ["actor.param_offload=true", "CPU", "false"]),
    (["actor.optimizer_offload=true"], ["actor.optimizer_offload=true", "CPU", "false"]),
    (["model.attn_implementation=flash_attention_2"], ["flash_attention_2", "CPU", "sdpa"]),
    (
        ["model.attn_implementation=flash_attention_2", "placement.device=cuda"],
        ["flash_attention_2", "in float32", "model.dtype=bfloat16", "sdpa"],
    ),
    # what goes to vLLM
    (
        ["rollout.sampling_kwargs.temperature=0.5"],
        ["sampling_kwargs.temperature=0.5", "use rollout.temperature"],
    ),
    (
        ["rollout.sampling_kwargs.max_tokens=5"],
        ["sampling_kwargs.max_tokens=5", "data.max_response_length"],
    ),
    (["rollout.sampling_kwargs.top_p=0.5"], ["sampling_kwargs.top_p=0.5", "use rollout.top_p"]),
    (
        ["rollout.sampling_kwargs.logprobs=5"],
        ["sampling_kwargs.logprobs=5", "log-probs", "remove it"],
    ),
    (
        ["rollout.sampling_kwargs={min_p: 0.1}"],
        ["sampling_kwargs.min_p=0.1", "log-probs", "remove it"],
    ),
    (["rollout.sampling_kwargs.repetition_penalty=1.1"], ["repetition_penalty=1.1", "log-probs"]),
    (
        ["rollout.sampling_kwargs.min_tokens=3"],
        ["sampling_kwargs.min_tokens=3", "log-probs", "remove it"],
    ),
    (
        ["rollout.sampling_kwargs.stop_tokens_ids=[1]"],
        ["sampling_kwargs.stop_tokens_ids=[1]", "mean stop_token_ids?"],
    ),
    (
        ["rollout.sampling_kwargs.zzz=1"],
        ["sampling_kwargs.zzz=1", "allowed are stop, stop_token_ids"],
    ),
    (["rollout.sampling_kwargs.stop_token_ids=1"], ["stop_token_ids=1", "a list of whole numbers"]),
    (["rollout.sampling_kwargs.stop=[a, 1]"], ["stop=[a, 1]", "a list of texts"]),
    (["rollout.sampling_kwargs.stop=''"], ["sampling_kwargs.stop=", "a text or a list of texts"]),
    (["rollout.sampling_kwargs.ignore_eos=1"], ["ignore_eos=1", "true or false"]),
    (["rollout.engine_kwargs.model=x"], ["engine_kwargs.model=x", "use model.path"]),
    (
        ["rollout.engine_kwargs.logits_processors=[a:B]"],
        ["logits_processors=[a:B]", "log-probs", "remove it"],
    ),
    (
        ["rollout.engine_kwargs.kv_cache_dtype=fp8"],
        ["kv_cache_dtype=fp8", "log-probs", "remove it"],
    ),
    (["rollout.engine_kwargs.quantization=fp8"], ["quantization=fp8", "weight sync", "remove it"]),
    (
        ["rollout.engine_kwargs.speculative_config={method: ngram}"],
        ["speculative_config=", "would miss a part", "remove it"],
    ),
    (
        ["rollout.engine_kwargs.hf_overrides={rope_theta: 1}"],
        ["hf_overrides=", "not be the policy's", "remove it"],
    ),
    (["rollout.engine_kwargs.enable_lora=true"], ["enable_lora=true", "weight sync", "remove it"]),
    (["rollout.engine_kwargs.cpu_offload_gb=4"], ["cpu_offload_gb=4", "weight sync", "remove it"]),
    (
        ["rollout.engine_kwargs.kv_offloading_size=4"],
        ["kv_offloading_size=4", "weight sync", "remove it"],
    ),
    (
        ["rollout.engine_kwargs.data_parallel_size_local=2"],
        ["data_parallel_size_local=2", "placement.pools"],
    ),
    (
        ["rollout.engine_kwargs.enable_chunked_prefill=true"],
        ["enable_chunked_prefill=true", "CPU engine", "remove it"],
    ),
    (
        ["rollout.engine_kwargs.max_num_batched_tokens=64"],
        ["max_num_batched_tokens=64", "at least 1536"],
    ),
    (
        ["rollout.engine_kwargs.logprobs_mode=raw_logprobs"],
        ["logprobs_mode=raw_logprobs", "remove it"],
    ),
    (["rollout.engine_kwargs.max_model_len=64"], ["max_model_len=64", "1536"]),
    # model, data, reward, folder
    (["model.path="], ["model.path", "not set"]),
    (["model.path=tiny:qwen4"], ["model.path=tiny:qwen4", "tiny:qwen2"]),
    (["model.path=no-such-model"], ["model.path=no-such-model", "hub id"]),
    (["model.path=/nowhere/model"], ["model.path=/nowhere/model", "no such directory"]),
    (["data.train_files="], ["data.train_files", "not set"]),
    (["data.train_files= , "], ["data.train_files", "not set"]),
    (["data.train_files=/nowhere/a.jsonl"], ["data.train_files=/nowhere/a.jsonl", "no such file"]),
    (
        ["data.val_files=generator:wordproblems"],
        ["data.val_files=generator:wordproblems", "word_problems"],
    ),
    (["data.train_files=/tmp"], ["data.train_files=/tmp", ".jsonl"]),
    (["data.train_files=a/b/c"], ["data.train_files=a/b/c", "hub id"]),
    (["reward.function=gsm9k"], ["reward.function=gsm9k", "module:function"]),
    (
        ["reward.function=no_such_mod:f"],
        ["reward.function=no_such_mod:f", "no_such_mod", "PYTHONPATH"],
    ),
    (["trainer.output_dir="], ["trainer.output_dir", "outputs/run"]),
    ([f"trainer.output_dir={__file__}"], ["trainer.output_dir", "not a folder"]),
    ([f"trainer.output_dir={__file__}/run"], ["trainer.output_dir", "not a folder"]),
    (["trainer.resume=nevr"], ["trainer.resume=nevr", "did you mean never?"]),
    (
        ["trainer.resume=/nowhere/step_000001"],
        ["trainer.resume=/nowhere/step_000001", "no checkpoint there", "auto"],
    ),
    (["trainer.resume=/tmp"], ["trainer.resume=/tmp", "state.json is missing", "step_000050"]),
    (["trainer.resume="], ["trainer.resume=", "use auto"]),
    # the machine (num_gpus is 0 here)
    (["placement.device=cuda"], ["2 GPUs", "this machine has 0", "use placement.device=cpu"]),
    (
        ["placement.pools.actor=[2, 2]"],
        ["placement.pools.actor=[2, 2]", "2 nodes", "use [4]", "RAY_ADDRESS"],
    ),
    # the file
    (["config="], ["config=", "No such file"]),
    (["config=a.yaml", "config=b.yaml"], ["config=b.yaml", "give one file"]),
    (["config=/nowhere/x.yaml"], ["config=/nowhere/x.yaml", "No such file", "check the path"]),
    (["config=/tmp"], ["config=/tmp", "directory"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD, ids=[" ".join(a)[:70] or "none" for a, _ in BAD])
def test_fault_is_one_clear_line(argv: list[str], parts: list[str]) -> None:
    line = fault(*argv)
    for part in parts:
        assert part in line, line


BAD_FILES = [
    ("", ["must hold a mapping"]),
    ("- 1\n- 2\n", ["must hold a mapping"]),
    ("model: {path: x\ndata: 1", ["not valid YAML", "line 2"]),
    ("model:\n  path: 'x\n", ["not valid YAML", "line"]),
    ("model:\n\tpath: x\n", ["not valid YAML", "line 2"]),
    ("model: {path: x}\nmodle: {}\n", ["x.yaml:2:", "modle", "did you mean model?"]),
    ("model: tiny:qwen2\n", ["x.yaml:1:", "model=tiny:qwen2", "mapping"]),
    ("model:\n  path: x\nactor:\n  lrr: 1\n", ["x.yaml:4:", "actor.lrr", "did you mean actor.lr?"]),
    ("actor:\n  lr: fast\n", ["x.yaml:2:", "actor.lr=fast", "must be a number"]),
    ("actor:\n  eps: 1\n  lr: -1\n", ["x.yaml:3:", "actor.lr=-1.0", "above 0"]),
    ("algorithm:\n  loss_agg: sum\n", ["x.yaml:2:", "algorithm.loss_agg=sum", "one of"]),
    ("trainer:\n  output_dir: ${nowhere}\n", ["x.yaml:2:", "trainer.output_dir", "nowhere"]),
    ("actor:\n  lr: 1\n  lr: 2\n", ["line 3", "duplicate key lr"]),
    ("actor: {1: 2}\n", ["actor.1", "unknown key"]),
    ("actor: {betas.x: 2}\n", ["actor.betas.x", "unknown key"]),
    ("actor: {? [a] : 2}\n", ["x.yaml"]),
    ("model: {path: !!python/object:os.system x}\n", ["not valid YAML"]),
    ("actor: {lr: *nothing}\n", ["not valid YAML", "line 1"]),
    ("a: 1\n---\nb: 2\n", ["not valid YAML"]),
    ("model: {path: \x00}\n", ["not valid YAML"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD_FILES, ids=[repr(t)[:40] for t, _ in BAD_FILES])
def test_fault_in_the_file_names_file_and_line(text: str, parts: list[str], tmp_path: Path) -> None:
    line = fault(f"config={write(tmp_path / 'x.yaml', text)}")
    for part in ["x.yaml", *parts]:
        assert part in line, line


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00model")
    assert "utf-8" in fault(f"config={tmp_path / 'x.yaml'}")
    assert "2 times" in fault("config=a", "config=b")


# --- models, data and folders on disk ----------------------------------------------------------------------------


def test_model_directory_must_be_whole(tmp_path: Path) -> None:
    missing = []
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        missing.append(fault(f"model.path={tmp_path}"))
        (tmp_path / name).write_text("{}")
    for line, what in zip(missing, ("config.json", "tokenizer.json", ".safetensors"), strict=True):
        assert f"the directory has no {what}" in line
    validate(good(f"model.path={tmp_path}"), 0)


def test_resume_from_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "step_000002").mkdir()
    assert "state.json is missing" in fault("trainer.resume=~/step_000002")
    (tmp_path / "step_000002" / "state.json").write_text("{}")
    cfg = good("trainer.resume=~/step_000002")
    validate(cfg, 0)
    assert cfg.trainer.resume == f"{tmp_path}/step_000002"


def test_engine_names_that_vllm_does_not_know() -> None:
    names = ("max_num_seqs", "enforce_eager", "_api_process_rank")
    engine_checks.check_engine_names(
        good("rollout.engine_kwargs={max_num_seqs: 8, enforce_eager: true}"), names
    )
    for name, fix in (
        ("max_num_seq", "did you mean max_num_seqs?"),
        ("_api_process_rank", "remove it"),
    ):
        with pytest.raises(
            ConfigError,
            match=f"rollout.engine_kwargs.{name}=1: the installed vLLM has no such field",
        ):
            engine_checks.check_engine_names(good(f"rollout.engine_kwargs.{name}=1"), names)
        with pytest.raises(ConfigError, match=fix.replace("?", r"\?")):
            engine_checks.check_engine_names(good(f"rollout.engine_kwargs.{name}=1"), names)


def test_streams_in_one_queue_are_refused_beside_an_overlapped_sync(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cfg = Config()
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=1: a waiting send"):
        engine_checks.check_weight_sync(cfg, "cuda")
    cfg.weight_sync.overlap = False
    engine_checks.check_weight_sync(cfg, "cuda")


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B-Instruct", "tiny:qwen3"])
def test_hub_and_tiny_models_pass(path: str) -> None:
    validate(good(f"model.path={path}"), 0)


def test_data_files(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    one.write_text('{"question": "1+1", "answer": "#### 2"}\n')
    validate(good(f"data.train_files={one}, {one}", "data.val_files=openai/gsm8k:main"), 0)
    assert "b.parquet: no such file" in fault(f"data.train_files={one},{two}")


def test_paths_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = good(
        "model.path=~/m", "data.train_files=~/a.jsonl,openai/gsm8k", "trainer.output_dir=~/out"
    )
    assert cfg.model.path == f"{tmp_path}/m" and cfg.trainer.output_dir == f"{tmp_path}/out"
    assert cfg.data.train_files == f"{tmp_path}/a.jsonl,openai/gsm8k"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_dir_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written" in fault(f"trainer.output_dir={tmp_path}/run")


def test_user_reward_is_found_without_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward_module.py").write_text("raise SystemExit('imported')")
    validate(good("reward.function=my_reward_module:score", "reward.kwargs.a=1"), 0)


# --- what is accepted --------------------------------------------------------------------------------------------


def test_values_are_read_as_meant(tmp_path: Path) -> None:
    text = "actor: {lr: 1e-6, eps: 1E-8, grad_clip: 1}\nrollout: {seed_samples: on}\ntrainer: {total_steps: null, output_dir: 2026-01-01}\n"
    cfg = load_config(
        [f"config={write(tmp_path / 'x.yaml', text)}", "actor.weight_decay=1e-2", "rollout.n=4.0"]
    )
    assert (cfg.actor.lr, cfg.actor.eps, cfg.actor.weight_decay) == (1e-6, 1e-8, 0.01)
    assert (
        isinstance(cfg.actor.grad_clip, float)
        and cfg.rollout.n == 4
        and cfg.rollout.seed_samples == "on"
    )
    assert cfg.trainer.total_steps is None and cfg.trainer.output_dir == "2026-01-01"
    assert (
        good("data.instruction=Think: end with #### number").data.instruction
        == "Think: end with #### number"
    )
    assert good("data.val_files=null").data.val_files == ""
    assert good("data.instruction='  a'").data.instruction == "  a"
    assert good("rollout.seed_samples=off").rollout.seed_samples == "off"
    assert good("trainer.output_dir=2026-01-01").trainer.output_dir == "2026-01-01"


def test_arguments_go_over_the_file_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "actor: {lr: 1.0, eps: 2.0}\n")
    cfg = load_config(["actor.lr=3", f"config={path}"])
    assert (cfg.actor.lr, cfg.actor.eps) == (3.0, 2.0)


def test_mappings_replace_and_dots_add(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.yaml",
        "placement: {pools: {gen: [2], train: [1]}, roles: {rollout: gen, actor: train}}\n",
    )
    cfg = load_config(
        [
            f"config={path}",
            "placement.pools.gen=[4]",
            "rollout.engine_kwargs.foo=bar",
            "rollout.engine_kwargs.a.b=1",
        ]
    )
    assert cfg.placement.pools == {"gen": [4], "train": [1]}
    assert cfg.placement.roles == {"rollout": "gen", "actor": "train"}
    assert cfg.rollout.engine_kwargs == {"foo": "bar", "a": {"b": 1}}
    assert load_config(["placement.pools={x: [1]}"]).placement.pools == {"x": [1]}
    assert load_config([]).placement.pools == {"rollout": [1], "actor": [1]}, (
        "the defaults must not be shared"
    )


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.setenv("RATE", "1e-5")
    assert good("actor.lr=${oc.env:RATE}").actor.lr == 1e-5
    assert good("trainer.output_dir=${oc.env:WHERE}/run").trainer.output_dir == "/data/run"


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config([f"config={path}"])
    if any(len(shape) > 1 for shape in cfg.placement.pools.values()):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # several nodes need a cluster
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    validate(cfg, num_gpus=8)
    assert load_text(resolved_yaml(cfg)) == cfg


def load_text(text: str, folder: Path = Path("/tmp")) -> Config:
    path = folder / f"one_step_off_test_{os.getpid()}.yaml"
    try:
        return load_config([f"config={write(path, text)}"])
    finally:
        path.unlink()


def test_valid_combinations() -> None:
    validate(good("algorithm.kl_coef=0.1", "placement.roles.ref=actor"), 0)
    validate(good("algorithm.old_log_probs=recompute", "algorithm.rollout_correction=tis"), 0)
    validate(good("rollout.sampling_kwargs={stop: [x], stop_token_ids: [1], ignore_eos: true}"), 0)
    validate(good("rollout.sampling_kwargs={stop: x, skip_special_tokens: false}"), 0)
    validate(
        good("rollout.engine_kwargs={tokenizer: x, max_num_seqs: 8}", "pipeline.staleness=0"), 0
    )
    validate(
        good(
            "rollout.engine_kwargs={kv_cache_dtype: auto, quantization: null, enable_lora: false}"
        ),
        0,
    )
    split = "rollout.engine_kwargs={enable_chunked_prefill: true, max_num_batched_tokens: 512}"
    validate(good(split, "placement.device=cuda"), 2)
    validate(good("algorithm.kl_estimator=k1"), 0)
    validate(
        good(
            "placement.pools={rollout: [4], actor: [4]}",
            "actor.fsdp_size=2",
            "rollout.tensor_parallel_size=2",
        ),
        0,
    )
    validate(good("actor.param_offload=true", "placement.device=auto"), 2)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpu, eight = "placement.device=cuda", "placement.pools={rollout: [2], actor: [6]}"
    line = fault(gpu, eight, num_gpus=4)
    assert "{rollout: [2], actor: [6]}" in line and "8 GPUs" in line and "has 4" in line
    validate(good(gpu, eight), 8)
    nodes = "placement.pools={rollout: [2], actor: [8, 8]}"
    for device in (gpu, "placement.device=cpu"):
        line = fault(device, nodes, num_gpus=18)
        assert "placement.pools.actor=[8, 8]: 2 nodes" in line and "RAY_ADDRESS" in line
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    validate(good(gpu, eight), 0)
    validate(good(gpu, nodes), 0)
    validate(good(nodes), 0)


def test_cpu_runs_count_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("counted")

    monkeypatch.setattr(hardware, "count_gpus", refuse)
    validate(good())


# --- fuzz --------------------------------------------------------------------------------------------------------

_values = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        "null true on ~ ??? ${a} ${actor.lr} ${model} {} [] {a:1} [1] {a:[1]} {1:2} !!set{a} tiny:qwen2 &a[*a] /".split()
    ),
    st.recursive(
        st.integers(-3, 3) | st.sampled_from(["a", "1e-6", "x: y"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "rollout"]), inner, max_size=2)
        ),
        max_leaves=4,
    ).map(str),
)
_names = (
    st.sampled_from(sorted(KEYS))
    | st.text(max_size=8)
    | st.tuples(st.sampled_from(sorted(KEYS)), st.text(max_size=3)).map(".".join)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_names, _values), max_size=3))
def test_any_override_gives_a_config_or_one_line(pairs: list[tuple[str, str]]) -> None:
    argv = [f"{name}={value}" for name, value in pairs if name != "config"]
    try:
        cfg = good(*argv)
        assert load_text(resolved_yaml(cfg)) == cfg
        validate(cfg, 0)
        placement_text(cfg, [0, 1])
    except ConfigError as e:
        assert str(e) and len(str(e).splitlines()) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.sampled_from("model:path{}[]&*!|>-? \n'\"#,1.\t%@x"), max_size=60)
    | st.text(max_size=40)
)
def test_any_file_gives_a_config_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        load_config([f"config={path}"])
    except ConfigError as e:
        assert str(e) and len(str(e).splitlines()) == 1


# --- text, placement, cores --------------------------------------------------------------------------------------


def test_every_key_has_help() -> None:
    text = help_text()
    for key in KEYS.values():
        assert key.metadata["help"].strip() and f"  {key.dotted}  (" in text


def test_the_checks_know_the_same_names_as_their_owners() -> None:
    rewards = pytest.importorskip("one_step_off.rewards.scoring")
    assert set(data_checks.BUILT_IN_REWARDS) == set(rewards.REWARD_FUNCTIONS)
    assert set(data_checks.GENERATORS) == set(word_problems.GENERATORS)


def test_what_goes_to_vllm_has_vllms_names() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("needs vLLM")
    fields: dict[str, set[str]] = {}
    # Read, not imported: that takes many seconds.
    for file in ("engine/arg_utils.py", "sampling_params.py"):
        for node in ast.parse(Path(vllm.submodule_search_locations[0], file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields[node.name] = {f.target.id for f in node.body if isinstance(f, ast.AnnAssign)}
    sampling_fields = fields["SamplingParams"]
    engine_fields = fields["EngineArgs"]
    assert set(engine_checks.ALLOWED_SAMPLING_FIELDS) <= sampling_fields
    assert set(engine_checks.KEYS_OF_VLLM_FIELDS) <= sampling_fields | engine_fields
    assert set(engine_checks.ENGINE_FIELDS_SET_BY_US) <= engine_fields
    assert set(engine_checks.UNSAFE_ENGINE_FIELDS) <= engine_fields
    assert set(engine_checks.UNSAFE_ENGINE_FIELDS_ON_CPU) <= engine_fields


def test_config_and_data_packages_import_neither_torch_nor_ray() -> None:
    modules = "config.loading config.validation data.samples algorithms.validation".split()
    imports = "; ".join(f"import one_step_off.{module}" for module in modules)
    code = (
        f"import sys; {imports}; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_resolved_yaml_keeps_awkward_texts() -> None:
    for text in (
        "a: b # c",
        "${x}",
        "\\${x}",
        "two\nlines",
        "on",
        "1e-6",
        " x ",
        "null",
        "é\u2028\x85b",
        "[1",
    ):
        cfg = dataclasses.replace(good())
        cfg.data.instruction = text
        assert load_text(resolved_yaml(cfg)).data.instruction == text


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = good("placement.pools={rollout: [4], actor: [2]}", "rollout.tensor_parallel_size=2")
    assert process_cores(cfg, "cpu", [0, 1, 2, 3]) == {"rollout": [[0], [1]], "actor": [[2], [3]]}
    assert placement_text(cfg, [0, 1, 2, 3]).splitlines() == [
        "rollout [4] on cpu: rollout x 2 (TP 2); cores 0 1",
        "actor [2] on cpu: actor x 2; cores 2 3",
    ]
    assert process_cores(good("placement.pin_cores=false"), "cpu") == {
        "rollout": [[]],
        "actor": [[]],
    }
    with monkeypatch.context() as cluster:  # whose machines may have fewer cores than this one
        cluster.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert process_cores(good(), "cpu", [0, 1]) == {"rollout": [[]], "actor": [[]]}
    colocated = good(*SHARED, "pipeline.staleness=0")
    assert process_cores(colocated, "cpu", [0, 1, 2, 3]) == {"all": [[0, 1], [2, 3]]}, (
        "all cores, in both phases"
    )
    assert placement_text(colocated, [0, 1]) == "all [2] on cpu: rollout x 2, actor x 2; cores 0 1"
    gpu = good("placement.device=cuda", "placement.pools={rollout: [4, 4], actor: [8, 8]}")
    text = placement_text(gpu, [0, 1])
    assert "rollout [4, 4] on cuda: rollout x 8" in text and "cores" not in text
