"""Faults of keys and values: each is one line that names the key, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.config_helpers import SHARED, fault, write

# A warning would be a second line on the console.
pytestmark = pytest.mark.filterwarnings("error")

FP8 = "rollout.quantization=fp8_per_channel"
BF16 = "model.dtype=bfloat16"

BAD = [
    # keys that were removed
    (
        ["weight_sync.receive_ahead=true"],
        ["weight_sync.receive_ahead", "is no key any more; remove it"],
    ),
    (["weight_sync.sender=gather"], ["weight_sync.sender", "each rank sends its own shard"]),
    (["weight_sync.canary_overlap=true"], ["weight_sync.canary_overlap", "is no key any more"]),
    # the weight sync
    (["weight_sync.transport=shared_fodler"], ["transport='shared_fodler'", "shared_folder"]),
    (["weight_sync.transport=nowhere:Class"], ["weight_sync.transport=", "cannot be imported"]),
    (
        ["weight_sync.transport=shared_folder", "weight_sync.mode=delta"],
        ["weight_sync.mode=delta", "shared_folder sends all weights; use mode=full"],
    ),
    # unknown keys
    (["actor.lrr=1"], ["actor.lrr", "did you mean actor.lr?"]),
    (["actr.lr=1"], ["actr.lr", "did you mean actor.lr?"]),
    (["lr=1"], ["lr", "did you mean actor.lr?"]),
    (["rollout.staleness=0"], ["rollout.staleness", "did you mean pipeline.staleness?"]),
    (["zzz=1"], ["zzz", "use model, data"]),
    (["actor=1"], ["actor", "a section", "actor.KEY=VALUE"]),
    (["actor.=1"], ["actor.", "section"]),
    (["actor.lr.x=1"], ["actor.lr.x", "did you mean actor.lr?"]),
    (["placement.pools..x=1"], ["placement.pools.={x: 1}", "list of numbers"]),
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
    (["placement.pools={rollout: 1}"], ["placement.pools.rollout=1", "a list of numbers"]),
    (["placement.pools.rollout=[a]"], ["placement.pools.rollout[0]=a", "a number"]),
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
    (["pipeline.staleness=17"], ["pipeline.staleness=17", "at most 16"]),
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
        ["ppo_mini_batch_size=4", "=10", "use 5"],
    ),
    (
        ["data.train_batch_size=64", "actor.ppo_mini_batch_size=128"],
        ["ppo_mini_batch_size=128", "use 64"],
    ),
    (
        ["placement.pools.actor=[8]", "actor.ppo_mini_batch_size=1", "rollout.n=4"],
        ["ppo_mini_batch_size=1", "8 actor ranks", "use 2"],
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
        ["placement.pools.actor=[4]", "actor.expert_parallel_size=3"],
        ["actor.expert_parallel_size=3", "does not divide the 4 ranks", "use 2"],
    ),
    (
        ["placement.pools.actor=[4]", "actor.expert_parallel_size=2", "actor.fsdp_size=2"],
        ["actor.expert_parallel_size=2", "actor.fsdp_size=2 has copies", "set that to -1"],
    ),
    (
        ["placement.pools.actor=[4]", "actor.sequence_parallel_size=3"],
        ["actor.sequence_parallel_size=3", "does not divide the 4 ranks", "use 2"],
    ),
    (
        ["placement.pools.actor=[2]", "actor.sequence_parallel_size=2", "actor.packing=off"],
        ["actor.sequence_parallel_size=2", "divides packed rows", "actor.packing=auto"],
    ),
    (
        [
            "placement.pools.actor=[2]",
            "actor.sequence_parallel_size=2",
            "model.attn_implementation=eager",
        ],
        ["actor.sequence_parallel_size=2", "attn_implementation=eager", "auto"],
    ),
    (["actor.router_bias_update_rate=-0.1"], ["actor.router_bias_update_rate=-0.1", "0"]),
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
        [
            "actor.tensor_parallel_size=2",
            "only the megatron back end supports it",
            "actor.backend=megatron",
        ],
    ),
    (["actor.sequence_parallel=true"], ["actor.sequence_parallel=true", "tensor_parallel_size=1"]),
    (
        ["actor.virtual_pipeline_parallel_size=2"],
        ["virtual_pipeline_parallel_size=2", "needs pipeline stages"],
    ),
    (["rollout.n=1"], ["rollout.n=1", "at least 2"]),
    (["weight_sync.overlap=often"], ["weight_sync.overlap=often", "auto, true, false"]),
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
        ["actor.packing=on", "model.attn_implementation=eager"],
        ["actor.packing=on", "attn_implementation=eager", "auto or off"],
    ),
    (["actor.packing=maybe"], ["actor.packing=maybe", "auto, on, off"]),
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
        ["rollout.engine_kwargs={scheduler_cls: null}", "weight_sync.in_flight=keep"],
        ["engine_kwargs.scheduler_cls=null", "older weights", "remove it, or use in_flight=reco"],
    ),
    (
        ["rollout.engine_kwargs.logits_processors=[a:B]"],
        ["logits_processors=[a:B]", "log-probs", "remove it"],
    ),
    (
        ["rollout.engine_kwargs.kv_cache_memory_bytes=1000000"],
        ["kv_cache_memory_bytes=1000000", "use rollout.kv_cache_mb"],
    ),
    (
        ["rollout.engine_kwargs.kv_cache_dtype=fp8"],
        ["engine_kwargs.kv_cache_dtype=fp8", "use rollout.kv_cache_dtype"],
    ),
    (
        ["rollout.engine_kwargs.quantization=fp8"],
        ["engine_kwargs.quantization=fp8", "use rollout.quantization"],
    ),
    (
        ["rollout.engine_kwargs.quantization_config={linear: mxfp8}"],
        ["quantization_config=", "log-probs", "remove it"],
    ),
    (
        ["rollout.quantization=fp8_per_tensor"],
        ["rollout.quantization=fp8_per_tensor", "CPU build", "fp8_per_channel alone"],
    ),
    (
        ["rollout.kv_cache_dtype=fp8_per_token_head"],
        ["rollout.kv_cache_dtype=fp8_per_token_head", "CPU build computes fp8 alone"],
    ),
    ([FP8, "model.dtype=float32"], [FP8, "model.dtype=float32", "use model.dtype=bfloat16"]),
    ([FP8, BF16, "weight_sync.mode=delta"], [FP8, "weight_sync.mode=delta", "mode=full"]),
    (
        [FP8, BF16, "model.lora_rank=4", "weight_sync.lora=adapter"],
        [FP8, "weight_sync.lora=adapter", "use weight_sync.lora=merged"],
    ),
    (
        [FP8, "rollout.kv_cache_dtype=fp8", "algorithm.old_log_probs=recompute"],
        [FP8, "kv_cache_dtype=fp8", "rollout_correction=none", "set rollout_correction=tis, or"],
    ),
    (
        ["rollout.engine_kwargs.speculative_config={method: ngram}"],
        ["speculative_config=", "use rollout.speculation", "no draft model"],
    ),
    (
        ["rollout.engine_kwargs.spec_model=a/model"],
        ["spec_model=a/model", "use rollout.speculation", "behind the policy"],
    ),
    (["rollout.engine_kwargs.spec_tokens=3"], ["use rollout.speculation_tokens"]),
    (["rollout.speculation=draft"], ["rollout.speculation=draft", "none, ngram, suffix"]),
    (["rollout.speculation_tokens=32"], ["rollout.speculation_tokens=32"]),
    (
        ["rollout.speculation=ngram", "rollout.replay_routing=true"],
        ["rollout.speculation=ngram", "set it to none"],
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
    (["model.path=tiny:qwen4"], ["model.path=tiny:qwen4", "did you mean tiny:qwen"]),
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
    (["reward.function=gsm9k"], ["reward.function=gsm9k", "did you mean gsm8k?"]),
    (["reward.function=nothing"], ["reward.function=nothing", "module:function"]),
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
    ("", ["must contain a mapping"]),
    ("- 1\n- 2\n", ["must contain a mapping"]),
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
