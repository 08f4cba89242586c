"""The names of torch that only the GPU path uses exist, with the arguments that it gives."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions
from torch.nn.attention import varlen

from one_step_off import distributed_util
from tests.unit.project.library_sources import (
    ROOT,
    definition,
    imported_names,
    own_trees,
    parameters,
    used_attributes,
)

CUDA = {
    # name of torch.cuda -> the arguments that are given
    "CUDAGraph": (),
    "Event": ("enable_timing",),
    "Stream": ("device",),
    "_sleep": ("cycles",),
    "can_device_access_peer": ("device", "peer_device"),
    "current_device": (),
    "current_stream": (),
    "default_stream": (),
    "device_count": (),
    "device_memory_used": ("device",),
    "empty_cache": (),
    "device": ("device",),
    "get_device_capability": ("device",),
    "get_device_name": ("device",),
    "get_device_properties": ("device",),
    "get_rng_state": (),
    "is_available": (),
    "manual_seed": ("seed",),
    "max_memory_allocated": ("device",),
    "max_memory_reserved": ("device",),
    "mem_get_info": ("device",),
    "memory_allocated": ("device",),
    "memory_reserved": ("device",),
    "reset_peak_memory_stats": ("device",),
    "set_device": ("device",),
    "set_per_process_memory_fraction": ("fraction", "device"),
    "set_rng_state": ("new_state",),
    "set_stream": ("stream",),
    "set_sync_debug_mode": ("debug_mode",),
    "stream": ("stream",),
    "synchronize": ("device",),
    "utilization": ("device",),
}
NO_FUNCTIONS = {"nccl", "OutOfMemoryError", "CUDAGraph"}
"""Names of torch.cuda without arguments of ours."""

STUBS = Path(str(torch.__file__)).parent / "_C/_distributed_c10d.pyi"
NCCL_HEADER = "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"


@pytest.mark.parametrize("name", sorted(CUDA))
def test_a_name_of_torch_cuda_takes_these_arguments(name: str) -> None:
    function = getattr(torch.cuda, name)
    if CUDA[name]:
        assert set(CUDA[name]) <= set(inspect.signature(function).parameters)


def test_the_table_has_every_name_of_torch_cuda_that_is_used() -> None:
    used = used_attributes("torch.cuda") | {name for _, name in imported_names("torch.cuda")}
    assert len(used) > 15, "the search finds the names"
    assert used - CUDA.keys() - NO_FUNCTIONS == set()


def test_properties_of_a_device() -> None:
    assert {"name", "major", "minor", "total_memory"} <= set(
        dir(torch._C._CudaDeviceProperties)
        if hasattr(torch._C, "_CudaDeviceProperties")
        else re.findall(r"^    (\w+): ", _stub_of_properties(), re.M)
    )


def _stub_of_properties() -> str:
    stubs = (Path(str(torch.__file__)).parent / "_C/__init__.pyi").read_text()
    return stubs.partition("class _CudaDeviceProperties:")[2].partition("\nclass ")[0]


# ---- NCCL ----------------------------------------------------------------------------------------


def nccl_stub() -> str:
    """CPU builds have the stubs of ProcessGroupNCCL, not the class."""
    stubs = STUBS.read_text()
    return stubs.partition("class ProcessGroupNCCL(")[2].partition("\nclass ")[0]


def test_an_nccl_group_takes_our_arguments() -> None:
    constructor = re.search(r"    def __init__\(\n(.*?)\) -> None", nccl_stub(), re.S)
    names = re.findall(r"(\w+):", constructor[1])
    assert names == ["store", "rank", "size", "options"]


@pytest.mark.parametrize(
    "name", ["abort", "broadcast", "memory_stats", "shutdown", "_set_default_timeout"]
)
def test_methods_of_an_nccl_group(name: str) -> None:
    backend = STUBS.read_text().partition("class Backend:")[2].partition("\nclass ")[0]
    assert (
        f"def {name}(" in nccl_stub() + backend
        or hasattr(dist.Backend, name)
        or hasattr(torch._C._distributed_c10d.Backend, name)
    )


def test_an_nccl_group_counts_its_memory() -> None:
    header = (Path(str(torch.__file__)).parent / NCCL_HEADER).read_text()
    assert "getMemoryStats() override" in header
    assert "memory_stats" in str(torch._C._distributed_c10d.Backend.memory_stats.__doc__)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    with pytest.raises(RuntimeError, match="does not support getMemoryStats"):
        group.memory_stats()


def test_options_of_an_nccl_group() -> None:
    text = nccl_stub()
    assert "class Options(Backend.Options):" in text
    options = torch._C._distributed_c10d.Backend.Options
    assert hasattr(options, "_timeout"), "our time limit, far above the watchdog's default"
    assert "config: ProcessGroupNCCL.NCCLConfig" in text
    for field in ("is_high_priority_stream", "split_from", "split_color"):
        assert f"{field}:" in text
    for field in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas"):
        assert f"{field}: int" in text


def test_a_group_can_be_created_without_a_watchdog() -> None:
    header = (Path(str(torch.__file__)).parent / NCCL_HEADER).read_text()
    assert f'"{distributed_util.NCCL_BLOCKING_WAIT}"' in header


def test_nccl_variables_that_are_set_or_read_exist() -> None:
    """TORCH_NCCL_... in our sources; NCCL_... are NCCL's own, which has no header here."""
    header = (Path(str(torch.__file__)).parent / NCCL_HEADER).read_text()
    sources = "".join((ROOT / path).read_text() for path in own_trees())
    for variable in set(re.findall(r"\bTORCH_NCCL_[A-Z_]+\b", sources)):
        assert f'"{variable}"' in header, variable


# ---- CUDA IPC ------------------------------------------------------------------------------------


def test_a_tensor_is_reduced_to_a_function_and_arguments() -> None:
    """`SharedBuffer.handle` pickles what `reduce_tensor` returns; the receiver calls it."""
    assert list(inspect.signature(reductions.reduce_tensor).parameters) == ["tensor"]
    source = inspect.getsource(reductions.reduce_tensor)
    given = re.search(r"return \(\s*rebuild_cuda_tensor,\s*\((.*?)\),\s*\)", source, re.S)
    count = len([line for line in given[1].splitlines() if line.split("#")[0].strip()])
    assert count == len(inspect.signature(reductions.rebuild_cuda_tensor).parameters)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_variables_of_the_allocator(variable: str) -> None:
    """Both names are read: the header and the library name them."""
    folder = Path(str(torch.__file__)).parent
    libraries = [*(folder / "lib").glob("libc10*.so")]
    assert any(variable.encode() in path.read_bytes() for path in libraries)


def test_the_allocator_knows_expandable_segments() -> None:
    folder = Path(str(torch.__file__)).parent
    header = (folder / "include/c10/core/AllocatorConfig.h").read_text()
    assert "expandable_segments" in header


# ---- attention, streams, compiled names ----------------------------------------------------------


def test_variable_length_attention() -> None:
    signature = inspect.signature(varlen.varlen_attn)
    names = list(signature.parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size", "enable_gqa"} <= set(names)
    assert signature.parameters["window_size"].default == (-1, -1), "not causal by default"


@pytest.mark.parametrize("name", ["_cuda_sleep", "_cuda_synchronize"])
def test_compiled_functions_of_cuda_builds(name: str) -> None:
    stubs = (Path(str(torch.__file__)).parent / "_C/__init__.pyi").read_text()
    assert f"def {name}(" in stubs


def test_the_spinning_kernel_takes_cycles() -> None:
    assert parameters("torch.cuda", "_sleep") == ["cycles"]


def test_fsdp_offload_policy() -> None:
    assert definition("torch.distributed.fsdp._fully_shard._fsdp_api", "CPUOffloadPolicy")


def test_backends_of_a_default_group_by_device() -> None:
    """`ModelWorker.setup` names a backend per device."""
    config = dist.BackendConfig(dist.Backend("cpu:gloo,cuda:nccl"))
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
