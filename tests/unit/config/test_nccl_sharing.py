"""Two NCCL ranks on one GPU: refused, unless NCCL is new enough and the environment asks for it."""

import pytest

from one_step_off.config import hardware
from one_step_off.config.errors import ConfigError
from one_step_off.config.sections.weight_sync import WeightSyncConfig, check_weight_sync

COLLECTIVE = WeightSyncConfig(transport="collective")


@pytest.mark.parametrize(
    ("variable", "nccl", "works"),
    [("1", (2, 30), True), ("1", (2, 29), False), ("0", (2, 32), False), (None, (2, 32), False)],
)
def test_collective_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, nccl: tuple[int, ...], works: bool
) -> None:
    monkeypatch.setattr(hardware, "nccl_version", lambda: nccl)
    monkeypatch.delenv(hardware.RANKS_SHARE_GPU, raising=False)
    if variable is not None:
        monkeypatch.setenv(hardware.RANKS_SHARE_GPU, variable)
    if works:
        check_weight_sync(COLLECTIVE, "cuda", is_one_device=True)
        return
    with pytest.raises(ConfigError, match="NCCL 2.30 or later, and NCCL_MULTI_RANK_GPU_ENABLE=1"):
        check_weight_sync(COLLECTIVE, "cuda", is_one_device=True)


def test_cpus_and_separate_gpus_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nccl_version", lambda: ())
    check_weight_sync(COLLECTIVE, "cpu", is_one_device=True)
    check_weight_sync(COLLECTIVE, "cuda", is_one_device=False)
