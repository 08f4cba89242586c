"""The smallest form of each benchmark and of each documented command, and the documented commands
that have none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.docs_commands import Command

RESULTS = "result.json", "result.md"
RUN = "summary.json", "metrics.jsonl", "report.html", "hf_model/config.json"
TWO_STEPS = ("trainer.total_steps=2", "data.generator_size=64", "data.val_size=4")
FEW_SAMPLES = ("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2")
SMALL = (*TWO_STEPS, *FEW_SAMPLES)
CALIBRATING = ("trainer.total_steps=5", *SMALL[1:])  # the planner drops the first three steps
TINY = "config=config/gsm8k_tiny_cpu.yaml"
REFERENCE = "rollout.engine=transformers"  # it starts sooner than vLLM


@dataclass(frozen=True)
class SmokeCase:
    """A command in its smallest form, run in a folder that all cases share.

    Attributes:
        name: of the case.
        program: as `Command.program`.
        arguments: the words after the program; `config/...` is a file of this repository.
        variables: environment variables set before it.
        writes: files that it must leave in `folder`.
        prints: text that its output must have.
        after: the cases whose files it reads.
        needs: a package without which it does not run.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    prints: str = ""
    after: tuple[str, ...] = ()
    needs: str = ""

    @property
    def command(self) -> Command:
        """The command as a page would show it."""
        return Command("", self.program, self.arguments, self.variables)

    @property
    def folder(self) -> str:
        """Where its files go: `--out` or trainer.output_dir."""
        words = self.arguments
        if "--out" in words:
            return words[words.index("--out") + 1]
        return self.command.keys.get("trainer.output_dir", "")


def run(
    name: str, *arguments: str, program: str = "one_step_off.main_ppo", **more: object
) -> SmokeCase:
    """A run of two steps in outputs/NAME, with all that a run leaves."""
    return SmokeCase(
        name, program, (*arguments, f"trainer.output_dir=outputs/{name}"), **{"writes": RUN, **more}
    )


def benchmark(
    name: str, *arguments: str, program: str = "", writes: tuple[str, ...] = RESULTS, **more: object
) -> SmokeCase:
    """A benchmark that writes into outputs/NAME; its program is of the same name unless it says
    another.
    """
    return SmokeCase(
        name,
        f"benchmarks.{program or name}",
        ("--out", f"outputs/{name}", *arguments),
        writes=writes,
        **more,
    )


PROGRAM = [
    SmokeCase("help", "one_step_off.main_ppo", ("--help",), prints="trainer.total_steps"),
    SmokeCase("dry_run", "one_step_off.main_ppo", (TINY, "--dry-run"), prints="# placement"),
    SmokeCase("check", "one_step_off.main_ppo", (TINY, "--check"), prints="all checks passed"),
    SmokeCase("convert", "one_step_off.convert", ("tests/grpo.trl.yaml",), prints="model:"),
    SmokeCase(
        "script_dry_run", "shell/run_qwen_gsm8k.sh", (*SMALL, "--dry-run"), prints="# placement"
    ),
    # With what first_run.md and looking_at_a_run.md add. The next three look at it.
    run(
        "plain",
        *(*SMALL, "actor.lr=1e-4", "trainer.test_freq=1", "trainer.save_freq=1", "--profile", "1"),
        REFERENCE,
        program="shell/run_qwen_gsm8k.sh",
        writes=(*RUN, "profile", "checkpoints", "evaluations.jsonl"),
    ),
    SmokeCase(
        "view",
        "one_step_off.view",
        ("outputs/plain", *"--best 1 --worst 1 --longest 1 --step 1".split()),
        after=("plain",),
    ),
    SmokeCase(
        "view_evaluation",
        "one_step_off.view",
        ("outputs/plain", "--val", "2", "--worst", "1"),
        after=("plain",),
    ),
    SmokeCase(
        "report",
        "one_step_off.report",
        ("outputs/plain",),
        prints="report.html",
        after=("plain",),
    ),
    run(
        "val_only",
        *(TINY, *SMALL, "trainer.val_only=true", "rollout.val_n=4", "rollout.val_temperature=1.0"),
        writes=("val_only",),
    ),
    run("distill_config", "config=config/distill_tiny_cpu.yaml", *SMALL),
    run("vllm_scheduler", TINY, *SMALL, "rollout.engine_kwargs={scheduler_cls: null}"),
    run(
        "kept_caches",
        *(TINY, *SMALL, "pipeline.staleness=4", "weight_sync.in_flight=keep"),
        *("algorithm.old_log_probs=recompute", "algorithm.rollout_correction=tis"),
    ),
    # Each of the next two stands for several commands, for a start takes longer than the two steps.
    run(
        "puzzles_partial",
        *(TINY, *SMALL, "data.train_files=generator:puzzles", "data.val_files=generator:puzzles"),
        *("data.max_prompt_length=512", "data.max_response_length=384", "agent.max_turns=3"),
        *("pipeline.staleness=2", "weight_sync.in_flight=recompute"),
    ),
    run(
        "doubt_synchronous_bfloat16_lora",
        *(
            TINY,
            *SMALL,
            "agent.loop=my_loop:Doubt",
            'agent.loop_kwargs={"my_loop:Doubt": {question: "Really?"}}',
        ),
        *("pipeline.staleness=0", "model.lora_rank=8", "actor.lr=2e-3"),
        *("model.dtype=bfloat16", "rollout.temperature=0.7", REFERENCE),
    ),
    run(
        "script_megatron",
        *(
            *SMALL,
            "actor.tensor_parallel_size=1",
            "actor.sequence_parallel=false",
            "actor.pipeline_parallel_size=2",
        ),
        program="shell/run_qwen_gsm8k.sh",
        variables={"BACKEND": "megatron"},
        needs="megatron.core",
    ),
    run("script_split", *SMALL, REFERENCE, program="shell/run_split_placement.sh"),
    # The next one starts with the model of this one.
    run("sft_tiny_cpu", "config=config/sft_tiny_cpu.yaml", *SMALL, program="one_step_off.main_sft"),
    run(
        "after_sft",
        *(TINY, *SMALL, "model.path=outputs/sft_tiny_cpu/hf_model"),
        after=("sft_tiny_cpu",),
    ),
    run("script_sft", *SMALL, program="shell/run_sft_gsm8k.sh"),
    run(
        "script_tools",
        *SMALL,
        "agent.tools=calculator,my_tools:shout",
        program="shell/run_tool_agent.sh",
    ),
    run("shapes", *SMALL, program="shell/run_shapes.sh", needs="torchvision"),
    run(
        "shapes_frozen",
        "config=config/shapes_tiny_cpu.yaml",
        *SMALL,
        "model.freeze=[visual]",
        needs="torchvision",
    ),
    run(
        "external_agent",
        TINY,
        *SMALL,
        "agent.loop=external",
        "agent.command=python3 my_agent.py",
        "agent.max_concurrency=16",
    ),
    run(
        "external_tools",
        "config=config/external_agent.yaml",
        *SMALL,
        "agent.command=python3 my_agent.py",
        "agent.max_concurrency=8",
        "actor.ppo_mini_batch_size=4",
        "data.val_size=16",
    ),
    run("mixed_sources", "config=config/mixed_sources.yaml", *SMALL),
    SmokeCase(
        "gpu_check",
        "shell/gpu_check.sh",
        ("--device", "cpu", "--out", "outputs/gpu_check", "--only", "devices", "missing_rank"),
        writes=("gpu_report.md", "gpu_report.json"),
        prints="2 PASS, 0 FAIL, 0 SKIP",
    ),
    SmokeCase(
        "plan_times",
        "one_step_off.plan",
        (TINY, *"--times 458,445,1,177 --gpus 16".split()),
        prints="best:",
    ),
    SmokeCase(
        "plan_hardware",
        "one_step_off.plan",
        ("config=config/qwen_gsm8k_fsdp.yaml", "model.path=Qwen/Qwen2.5-7B-Instruct")
        + ("--hardware", "H200", "--gpus", "8", "--response-tokens", "300"),
        prints="best:",
    ),
    SmokeCase(
        "plan_runs",
        "one_step_off.plan",
        (TINY, *SMALL)
        + ("--from", "outputs/planner/round0_synchronous")
        + ("--from", "outputs/planner/round0_synchronous_a_quarter_of_the_batch")
        + ("--gpus", "4"),
        prints="best:",
        after=("planner",),
    ),
]

BENCHMARKS = [
    SmokeCase(
        "throughput",
        "benchmarks.throughput",
        (
            "--out",
            "outputs/throughput",
            "--config",
            "config/gsm8k_tiny_cpu.yaml",
            "--models",
            "tiny:qwen2",
        )
        + tuple("--lengths fixed:8 --batches 2x2 --splits 1:1 --runs 1".split())
        + tuple("--warmup 0 --steps 2 --arms overlapped".split())
        + (REFERENCE,),
        writes=RESULTS,
    ),
    SmokeCase(
        "throughput_headline",
        "benchmarks.throughput",
        ("--out", "outputs/throughput_headline", "--headline", "tiny:qwen2")
        + tuple("--runs 1 --warmup 0 --steps 2 --regimes 1x2:8".split()),
        writes=RESULTS,
    ),
    benchmark(
        "learning",
        *(
            "--config",
            "config/gsm8k_tiny_cpu.yaml",
            "--arms",
            "async",
            "--seeds",
            "0",
            "--test-freq",
            "1",
        ),
        *SMALL,
        writes=(*RESULTS, "learning.png"),
    ),
    benchmark("mismatch", *"--arms fp8 --seeds 0 --steps 2 --probe-steps 2".split(), *FEW_SAMPLES),
    benchmark("planner", "--arms", "--batch", "4", *CALIBRATING),
    SmokeCase("planner_published", "benchmarks.planner", ("--published",), prints="| verl |"),
    benchmark(
        "long_tail",
        *"--most 16 --limits= --runs 1".split(),
        *SMALL,
        writes=(*RESULTS, "long_tail.png"),
    ),
    benchmark(
        "staleness",
        *"--ages 1 --modes keep --corrections mis --seeds 0 --steps 3 --most 16 --runs 1".split(),
        *("--parts", "speed", "learning"),
        *SMALL,
        writes=(*RESULTS, "staleness.png"),
    ),
    benchmark(
        "overhead", *"--replicas 2 --samples 16 --tokens 8 --ranks 2 --steps 4 --no-loggers".split()
    ),
    benchmark("scale", *"--ranks 2 12 --layers 1 --large-layers 1".split()),
    benchmark("overhead_ray", *"--samples 64 --tokens 16 --repeats 1".split()),
    benchmark(
        "weight_sync",
        *"--model tiny --ranks 2 --replicas 1 --repeats 1 --bucket-mb 1".split(),
        *"--arms raw per-tensor sharded delta shared file vllm".split(),
        writes=(*RESULTS, "weight_sync.png"),
    ),
    benchmark(
        "exposed",
        *(
            "--exposed",
            "--repeats",
            "1",
            "--steps",
            "4",
            "--settings",
            "training longer",
            "--against",
            "overlapped",
        ),
        program="weight_sync",
        writes=("exposed.json", "exposed.md"),
    ),
    benchmark(
        "update_phase", "--runs", "1", "--warmup", "0", *SMALL, "critic.ppo_mini_batch_size=4"
    ),
    benchmark(
        "backends",
        *("--models", "tiny", "--arms", "Megatron, 2 ranks, TP=2", "--repeats", "1"),
        needs="megatron.core",
    ),
    benchmark(
        "rollout",
        *"--rows 16 --requests 24 --tokens 12 --repeats 1 --parts host end-to-end".split(),
        *SMALL,
        writes=(*RESULTS, "rollout.png"),
    ),
    benchmark(
        "distillation",
        *("--seeds", "0", "--arms", "grpo", "top_k", "--test-freq", "2"),
        *("--teacher", "outputs/plain/hf_model"),
        *SMALL,
        after=("plain",),
    ),
    benchmark("agent_loop", *"--conversations 8 --reward-s 0.05 --repeats 1".split()),
    benchmark(
        "checkpoint",
        *"--model tiny:qwen2 --layers 1 --repeats 1 --backend fsdp".split(),
        writes=("result.json",),
    ),
    benchmark(
        "optimizers",
        *"--repeats 1 --optimizers adamw,muon --model tiny:qwen2 --layers 1".split(),
    ),
    benchmark(
        "shared_prefix",
        *"--repeats 1 --shapes 64x8,32x32x8 --n 4 --prompts 2 --model tiny --layers 1".split(),
    ),
    benchmark("lora", "--model", "tiny", "--repeats", "1"),
]

CASES = {case.name: case for case in [*BENCHMARKS, *PROGRAM]}


NOT_IN_CI = (
    *("exposed", "long_tail", "staleness", "update_phase", "backends", "lora", "mismatch"),
    *("shared_prefix",),
    *("learning", "overhead_ray", "planner", "plan_runs", "external_tools", "throughput_headline"),
    *("after_sft", "script_sft", "sft_tiny_cpu", "kept_caches", "distillation", "distill_config"),
    *("script_tools", "script_megatron", "agent_loop", "external_agent", "puzzles_partial"),
    *("mixed_sources", "val_only", "plain", "shapes", "shapes_frozen", "vllm_scheduler"),
)
"""Cases that run on demand (marker "slow"): each takes about a minute, and other tests cover most
of their code."""


@dataclass(frozen=True)
class CommandWithoutCase:
    """Documented commands that have no case.

    Attributes:
        reason: why they have none.
        program: as `Command.program`.
        variables: environment variables that the command must set.
        flags: flags that it must have.
        keys: keys that it must have with these values.
        alone: whether it may have no other flags.
    """

    reason: str
    program: str
    variables: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    keys: dict[str, str] = field(default_factory=dict)
    alone: bool = False

    def matches(self, command: Command) -> bool:
        """Whether the command is one of these."""
        has_other_flags = bool(command.flags - set(self.flags))
        return (
            command.program == self.program
            and set(self.variables) <= command.variables.keys()
            and set(self.flags) <= command.flags
            and self.keys.items() <= command.keys.items()
            and not (self.alone and has_other_flags)
        )


GPUS = "needs GPUs; tests/unit/project/test_docs.py reads its config and its keys"
CLUSTER = (
    "needs a cluster; "
    "tests/unit/project/test_shell.py runs it with tools that only record their calls"
)
COMPARED = "tests/unit/project/test_docs.py compares what it writes"
FIRST_OF_CI = "continuous integration begins with it"
PRETRAINED = (
    "needs a model of 135M parameters that is not here; the tiny model's case has the same flags"
)
MAIN = "one_step_off.main_ppo"
WITHOUT = [
    CommandWithoutCase(FIRST_OF_CI, "shell/setup.sh"),
    CommandWithoutCase(FIRST_OF_CI, "shell/test.sh"),
    CommandWithoutCase(
        "asks the package index for minutes; test_packaging.py resolves the same",
        "shell/resolve_constraints.sh",
    ),
    CommandWithoutCase(
        "installs the openai-agents SDK; tests/unit/project/test_shell.py has what it runs",
        "shell/run_external_agent.sh",
    ),
    CommandWithoutCase(GPUS, "shell/run_qwen_gsm8k.sh", ("N_ROLLOUT_GPUS",)),
    CommandWithoutCase(
        "needs the files of GSM8K; tests/unit/project/test_shell.py has DATA",
        "shell/run_qwen_gsm8k.sh",
        ("DATA",),
    ),
    CommandWithoutCase(GPUS, MAIN, keys={"config": "config/qwen_gsm8k_fsdp.yaml"}),
    CommandWithoutCase(GPUS, MAIN, keys={"placement.device": "cuda"}),
    CommandWithoutCase(GPUS, "benchmarks.rollout", flags=("--config",)),
    CommandWithoutCase(
        "tests/e2e/test_router_replay.py makes such a model and trains it",
        MAIN,
        keys={"rollout.replay_routing": "true"},
    ),
    CommandWithoutCase(
        "tests/e2e/test_quantized_rollouts.py syncs such an engine; the case of "
        "benchmarks.mismatch trains with one",
        MAIN,
        keys={"rollout.quantization": "fp8_per_channel"},
    ),
    CommandWithoutCase(
        "tests/e2e/test_speculation.py trains with draft tokens",
        MAIN,
        keys={"rollout.speculation": "ngram"},
    ),
    CommandWithoutCase(
        "needs a run on GPUs; plan_runs reads two runs of the tiny model",
        "one_step_off.plan",
        flags=("--from",),
        keys={"config": "config/qwen_gsm8k_fsdp.yaml"},
    ),
    CommandWithoutCase(
        "plan_times gives times for the tiny model",
        "one_step_off.plan",
        flags=("--times",),
        keys={"config": "config/qwen_gsm8k_fsdp.yaml"},
    ),
    CommandWithoutCase(
        "plan_hardware has short rows; tests/unit/tools/planner/test_hardware.py has long ones",
        "one_step_off.plan",
        flags=("--hardware", "--gpus", "--response-tokens"),
        keys={"data.max_response_length": "129024"},
    ),
    CommandWithoutCase(GPUS, MAIN, keys={"config": "config/dapo_7b.yaml"}),
    CommandWithoutCase(PRETRAINED, MAIN, keys={"config": "config/smollm2_addition_cpu.yaml"}),
    CommandWithoutCase(
        "needs a skipped update; tests/e2e/test_misbehaviour.py makes one and replays it",
        MAIN,
        flags=("--replay",),
    ),
    CommandWithoutCase(
        "two runs of ten steps; plan_runs reads two such runs, and "
        "tests/unit/tools/planner/test_planner.py makes a calibration fail",
        "one_step_off.plan",
        alone=True,
    ),
    CommandWithoutCase(
        "needs a finished run; the case of benchmarks.distillation takes one as its teacher",
        MAIN,
        keys={"teacher.path": "outputs/gsm8k_tiny_cpu/hf_model"},
    ),
    CommandWithoutCase(
        "tests/unit/runtime/test_check.py makes the checks",
        MAIN,
        keys={"model.path": "tiny:qwen3"},
        flags=("--check",),
    ),
    CommandWithoutCase(PRETRAINED, "benchmarks.staleness", flags=("--model",)),
    CommandWithoutCase(CLUSTER, "shell/run_megatron_nodes.sh"),
    CommandWithoutCase(CLUSTER, "shell/slurm_qwen_gsm8k.sh"),
    CommandWithoutCase(CLUSTER, "shell/run_dapo_7b_4x12.sh"),
    CommandWithoutCase(
        "TRL is not installed; tests/unit/benchmarks/test_trl_comparison.py has its settings",
        "benchmarks.trl_comparison",
    ),
    CommandWithoutCase(
        "kills processes for minutes; tests/e2e/test_chaos.py has it", "tests.chaos"
    ),
    CommandWithoutCase(
        "needs a run that goes on; tests/e2e/test_elastic_replicas.py has one",
        "one_step_off.scale",
    ),
    CommandWithoutCase(COMPARED, "docs/make_reference.py"),
    CommandWithoutCase(COMPARED, "docs/make_module_tables.py"),
]

# Keys for which a case has values of its own: how much work it is, and where its files go.
SIZES = {
    "trainer.total_steps",
    "trainer.output_dir",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.save_hf_model",
    "data.train_batch_size",
    "data.val_files",
    "rollout.n",
}
# The configs that a script gives the program, on CPUs and without variables.
SCRIPTS = {
    "config/tool_agent.yaml": "shell/run_tool_agent.sh",
    "config/shapes_tiny_cpu.yaml": "shell/run_shapes.sh",
    "config/external_agent.yaml": "shell/run_external_agent.sh",
    "config/gsm8k_tiny_cpu.yaml": "shell/run_qwen_gsm8k.sh",
}


def covers(case: SmokeCase, command: Command) -> bool:
    """Whether a case is the command in a smaller form.

    It must have the same program, every flag and variable, and every key with the same value except
    SIZES.
    """
    program = command.program
    keys = {name: value for name, value in command.keys.items() if name not in SIZES}
    if keys.get("config") == "FILE":  # any config
        del keys["config"]
    elif "config" in keys and "/" not in keys["config"]:  # a config of the package, by name
        keys["config"] = f"config/{keys['config']}.yaml"
    small = case.command
    script_of_config = SCRIPTS.get(keys.get("config", ""))
    if program == MAIN and small.program == script_of_config and "BACKEND" not in small.variables:
        program = small.program
        del keys["config"]
    same_keys = program.startswith("benchmarks.") or keys.items() <= small.keys.items()
    return (
        small.program == program
        and command.flags <= small.flags
        and command.variables.keys() <= small.variables.keys()
        and small.variables.get("BACKEND") == command.variables.get("BACKEND")
        and same_keys
    )
