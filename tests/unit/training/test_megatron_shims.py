"""The patches of other libraries: they fail here when a library changes, not in a run."""

import hashlib
import inspect

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra megatron)")

from importlib.metadata import version

from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher

from one_step_off.training.megatron import megatron_shims
from one_step_off.training.megatron.megatron_shims import PATCHES, cuda_is_cpu

CPU = torch.device("cpu")


def digest(function) -> str:
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def test_the_versions_are_those_that_the_patches_were_written_for():
    fix = "read the patched functions again, then raise the versions in megatron_shims.py"
    assert version("megatron-core") == megatron_shims.MEGATRON_VERSION, fix
    assert torch.__version__.partition("+")[0] == megatron_shims.TORCH_VERSION, fix


@pytest.mark.parametrize(
    ("function", "source"),
    [
        (megatron_shims._set_states, "40cab784659711a8"),
        (megatron_random._get_cuda_rng_state, "aa26caaa069c5c4f"),
        (megatron_random._set_cuda_rng_state, "b179c9d95438b61c"),
        (token_dispatcher.maybe_move_tensor_to_cpu, "8fc5847a887d7319"),
    ],
    ids=["set states", "get rng state", "set rng state", "to cpu"],
)
def test_what_is_replaced_is_what_it_was(function, source):
    assert digest(function) == source


def test_the_optimizer_still_reads_the_counts_of_padding():
    """`count_padding_in_checkpoints` sets them."""
    source = inspect.getsource(distrib_optimizer.DistributedOptimizer)
    assert "self.buffers[gbuf_idx].numel_unpadded" in source
    assert "self.buffers[gbuf_idx].buckets[bucket_idx].numel_unpadded" in source


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_there_inside_alone(patch):
    assert patch.reason
    original = getattr(patch.owner, patch.name)
    assert original is not patch.replacement
    with cuda_is_cpu(CPU):
        assert getattr(patch.owner, patch.name) is patch.replacement
        with cuda_is_cpu(CPU):
            assert getattr(patch.owner, patch.name) is patch.replacement
        assert getattr(patch.owner, patch.name) is patch.replacement
    assert getattr(patch.owner, patch.name) is original


def test_tensors_on_cuda_are_made_on_the_cpu():
    with cuda_is_cpu(CPU):
        tensor = torch.zeros(2, device="cuda", pin_memory=True)
        assert tensor.device.type == "cpu"
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.cuda() is tensor
        assert torch.cuda.current_device() == CPU
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_on_gpus_nothing_is_patched():
    original = torch.cuda.current_device
    with cuda_is_cpu(torch.device("cuda")):
        assert torch.cuda.current_device is original
