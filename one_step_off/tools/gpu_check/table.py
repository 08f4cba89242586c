"""The checks, in the order in which they run: of the engine and of whole runs, which say most,
first."""

from one_step_off.tools.gpu_check.check import Check

CHECKS_PACKAGE = "one_step_off.tools.gpu_check.checks"

ENGINE_PACKAGES = ("torch", "vllm", "ray")
RUN_PACKAGES = (*ENGINE_PACKAGES, "transformers", "datasets", "omegaconf")
ONE_STREAM = "CPUs have no streams"


def _check(name: str, title: str, function: str, limit_s: float, **more: object) -> Check:
    settings: dict = dict(more)
    return Check(name, title, f"{CHECKS_PACKAGE}.{function}", limit_s, **settings)


CHECKS: tuple[Check, ...] = (
    _check("devices", "what torch sees, and whether it computes", "devices:devices", 90),
    _check(
        "engine_in_place",
        "vLLM generates with the new weights after in-place updates, graphs included",
        "engines:in_place",
        360,
        packages=ENGINE_PACKAGES,
        cpu_title="vLLM generates with the new weights after updates by reload",
    ),
    _check(
        "engine_sleep",
        "vLLM sleeps, wakes and generates with synced weights",
        "engines:sleep_and_wake",
        240,
        packages=ENGINE_PACKAGES,
        cuda_only="vLLM's sleep mode exists for GPUs alone",
    ),
    _check(
        "engine_trainer_difference",
        "log-probs of engine and trainer in bfloat16",
        "engines:trainer_difference",
        240,
        packages=ENGINE_PACKAGES,
    ),
    _check(
        "run_shared",
        "five steps one step off, half a device for each",
        "runs:shared",
        300,
        packages=RUN_PACKAGES,
        cpu_title="three steps one step off, half a device for each (tiny model)",
    ),
    _check(
        "run_colocated",
        "five steps, engine, then trainer, on one device",
        "runs:colocated",
        300,
        packages=RUN_PACKAGES,
        cpu_title="three steps, engine, then trainer, on one device (tiny model)",
    ),
    _check(
        "run_disaggregated",
        "five steps one step off, a device for each",
        "runs:disaggregated",
        300,
        min_gpus=2,
        ranks_may_share=True,
        packages=RUN_PACKAGES,
        cpu_title="three steps one step off, a device for each (tiny model)",
    ),
    _check(
        "weights_same_device",
        "the same between two processes on one device: shared memory, CUDA IPC",
        "weights:shared_memory",
        150,
    ),
    _check(
        "groups",
        "a dedicated group for each pair of devices, and its speed",
        "groups:pairs",
        240,
        min_gpus=2,
        ranks_may_share=True,
    ),
    _check(
        "missing_rank",
        "creating a group ends in time where a rank never comes or dies, and works afterwards",
        "groups:missing_rank",
        240,
    ),
    _check(
        "dead_peer",
        "a receiver that dies in mid-transfer frees the others",
        "groups:dead_peer",
        180,
        min_gpus=2,
        ranks_may_share=True,
    ),
    _check(
        "weights_network",
        "full and delta syncs over a group arrive bit by bit",
        "weights:network",
        150,
        min_gpus=2,
        ranks_may_share=True,
    ),
    _check(
        "streams",
        "which streams wait for one another: hardware queues",
        "devices:streams",
        90,
        cuda_only=ONE_STREAM,
    ),
    _check(
        "ipc_expandable_segments",
        "whether torch can share expandable segments here (the program refuses them)",
        "weights:shared_expandable",
        90,
        cuda_only="CPUs have no segments",
    ),
    _check(
        "packing",
        "packed sequences give the log-probs and the gradient of padded ones",
        "packing:packing",
        150,
        packages=("torch", "transformers", "peft"),
    ),
    _check(
        "mfu_0.5b",
        "forward and backward of a random 0.5B model",
        "speed:small",
        120,
        packages=("torch", "transformers"),
        cpu_title="forward and backward of a tiny random model",
    ),
    _check(
        "mfu_7b",
        "forward and backward of a random 7B model",
        "speed:large",
        150,
        packages=("torch", "transformers"),
        cpu_title="forward and backward of a tiny random model, activations computed again",
    ),
    _check(
        "run_tp2",
        "five steps, the engine on two GPUs",
        "runs:tensor_parallel",
        300,
        min_gpus=4,
        min_cores=4,
        packages=RUN_PACKAGES,
        cpu_title="three steps, the engine on two ranks (tiny model)",
    ),
    _check(
        "run_hsdp",
        "five steps, the trainer as two copies of two shards",
        "runs:hsdp",
        300,
        min_gpus=4,
        min_cores=4,
        packages=RUN_PACKAGES,
        cpu_title="three steps, the trainer as two copies of two shards (tiny model)",
    ),
    _check(
        "run_megatron",
        "five steps, Megatron-core with two ranks per layer",
        "runs:megatron",
        300,
        min_gpus=4,
        min_cores=4,
        packages=(*RUN_PACKAGES, "megatron.core"),
        cuda_packages=("transformer_engine",),
        cpu_title="three steps, Megatron-core with two ranks per layer (tiny model)",
    ),
)
