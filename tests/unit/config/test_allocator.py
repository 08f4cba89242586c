"""Expandable segments are refused where rollout and actor share a GPU, before one is taken."""

from __future__ import annotations

import pytest
import torch

from one_step_off.cluster.errors import SyncError
from one_step_off.config import allocator
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate
from one_step_off.weight_sync.transports import same_device

ALL_IN_ONE = ({"all": [1]}, {"rollout": "all", "actor": "all"})
HALVES = ({"rollout": [0.5], "actor": [0.5]}, {"rollout": "rollout", "actor": "actor"})
SEPARATE = ({"rollout": [1], "actor": [1]}, {"rollout": "rollout", "actor": "actor"})


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in allocator.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def placed(pools: dict, roles: dict) -> Config:
    cfg = Config()
    cfg.placement.pools = pools
    cfg.placement.roles = roles
    return cfg


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:True", "a:1, expandable_segments : True "])
@pytest.mark.parametrize("placement", [ALL_IN_ONE, HALVES], ids=["one pool", "halves"])
def test_refused_on_a_shared_gpu(monkeypatch, variable, value, placement) -> None:
    monkeypatch.setenv(variable, value)
    cfg = placed(*placement)
    with pytest.raises(ConfigError, match=f"^{variable}={value}: in placement.pools") as refused:
        allocator.check_allocator(cfg, "cuda")
    assert "\n" not in str(refused.value) and "remove expandable_segments:True" in str(
        refused.value
    )
    allocator.check_allocator(cfg, "cpu")


def test_allowed_on_separate_gpus_and_when_off(monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator.check_allocator(placed(*SEPARATE), "cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:64")
    allocator.check_allocator(placed(*ALL_IN_ONE), "cuda")


def test_a_config_is_checked_for_it(monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    cfg = load_config(["config=config/colocated.yaml"])
    cfg.placement.device = "cpu"
    validate(cfg, 0)
    cfg.placement.device = "cuda"
    with pytest.raises(ConfigError, match="CUDA IPC"):
        validate(cfg, 1)


def test_torch_takes_any_of_the_variables() -> None:
    """With the spelling that is looked for."""
    settings = torch._C._accelerator_getAllocatorSettings
    assert callable(settings)
    with pytest.raises(ValueError, match="Expected 'True' or 'False'"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:true")


def test_a_process_with_such_memory_shares_nothing(monkeypatch) -> None:
    """On another node than the driver's."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(SyncError, match="expandable_segments:True: such memory cannot be shared"):
        same_device.SharedBuffer(16, torch.device("cuda"))
