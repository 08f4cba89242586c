"""The environment variables of a run's processes."""

import os

from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE

# Huge pages (on CPUs): page faults cost as much as copying large tensors does.
COMMON_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# vLLM's CPU engine: no compilation (it stalls the first request for 16 s), threads on the cores
# that we bind, and the worker inside the engine's process (one process less; a start takes 3 s and
# not 20 s).
CPU_ENGINE_ENV = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# On GPUs one thread: more of them would wait in loops on the cores that launch kernels.
GPU_ENGINE_ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ENGINE_ENV = {"cpu": CPU_ENGINE_ENV, "cuda": GPU_ENGINE_ENV}
# The members of a communicator must agree on these, and NCCL does not compare them: with different
# values it hangs. Trainers and engines share communicators, and Ray's processes on other nodes
# inherit from another shell. So all get the driver's values. (Not here: what differs from node to
# node, as NCCL_SOCKET_IFNAME.) NCCL_CUMEM_ENABLE needs no value of ours: vLLM set it to 0 only for
# NCCL before 2.22.3.
NCCL_AGREED = tuple(
    f"NCCL_{name}"
    for name in (
        "ALGO BUFFSIZE COLLNET_ENABLE CUMEM_ENABLE CUMEM_HOST_ENABLE IB_DISABLE MAX_CTAS "
        "MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE MULTI_RANK_GPU_ENABLE NET NTHREADS "
        "NVLS_ENABLE P2P_DISABLE P2P_LEVEL P2P_NET_DISABLE PROTO SHM_DISABLE"
    ).split()
)
# A trainer on CPUs keeps the memory that a pass frees: to fault its pages in again costs more than
# to work on them. It uses a single arena, since autograd's thread would have another one, which
# returns large blocks whatever is set.
CPU_TRAINER_MALLOC = (
    "glibc.malloc.mmap_threshold=4294967296:"
    "glibc.malloc.trim_threshold=8589934592:"
    "glibc.malloc.arena_max=1"
)


# An engine on CPUs packs its weights again in each sync, the head of a language model into fresh
# memory. With huge pages that is faulted in by 2 MiB instead of by 4 KiB.
CPU_ENGINE_MALLOC = "glibc.malloc.hugetlb=1"


def process_env(device: str, host: str) -> dict[str, str]:
    """The environment variables of every process.

    Args:
        device: "cpu" or "cuda".
        host: the address at which processes meet; "": each node's address in the network.
    """
    env = dict(COMMON_ENV)
    if device == "cuda":
        env |= {name: os.environ[name] for name in NCCL_AGREED if name in os.environ}
    is_one_machine = bool(host)
    if is_one_machine:
        env["VLLM_HOST_IP"] = host
        env["GLOO_SOCKET_IFNAME"] = "lo"
        if RUN_FOLDER_VARIABLE in os.environ:
            env["TMPDIR"] = os.environ[RUN_FOLDER_VARIABLE]
    return env


def trainer_env(device: str, host: str) -> dict[str, str]:
    """The environment variables of a rank."""
    env = process_env(device, host)
    if device == "cuda" and "TMPDIR" in env:
        from one_step_off.models.tiny_qwen import cache_dir  # transformers: slow to import

        # torch would keep what it compiles in TMPDIR, which ends with the run. (vLLM has a cache of
        # its own in the user's folder.)
        folder = cache_dir() / "torchinductor"
        env["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder))
    if device == "cpu":
        env["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", CPU_TRAINER_MALLOC)
    return env


def engine_env(device: str, host: str) -> dict[str, str]:
    """The environment variables of a vLLM engine's process."""
    env = process_env(device, host) | ENGINE_ENV[device]
    if device == "cpu":
        env["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", CPU_ENGINE_MALLOC)
    return env
