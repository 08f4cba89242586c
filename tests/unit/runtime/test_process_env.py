"""The NCCL settings of the processes that share communicators."""

from __future__ import annotations

from one_step_off.runtime.process_env import process_env


def test_trainers_and_engines_get_the_drivers_nccl_settings_on_gpus(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # may differ from node to node
    on_gpus = process_env("cuda", host="")
    assert on_gpus["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_SOCKET_IFNAME" not in on_gpus
    on_cpus = process_env("cpu", host="")
    assert "NCCL_CUMEM_ENABLE" not in on_cpus
