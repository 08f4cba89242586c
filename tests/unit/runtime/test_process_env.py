"""The environment of a run's processes: what members of a communicator agree on, and caches."""

from __future__ import annotations

from one_step_off.cluster.process_cleanup import RUN_FOLDER_VARIABLE
from one_step_off.runtime.process_env import process_env, trainer_env


def test_trainers_and_engines_get_the_drivers_nccl_settings_on_gpus(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # may differ from node to node
    on_gpus = process_env("cuda", host="")
    assert on_gpus["NCCL_CUMEM_ENABLE"] == "0"
    assert "NCCL_SOCKET_IFNAME" not in on_gpus
    on_cpus = process_env("cpu", host="")
    assert "NCCL_CUMEM_ENABLE" not in on_cpus


def test_what_torch_compiles_is_kept_between_runs(monkeypatch, tmp_path):
    """By default it lies in TMPDIR, which is the run's own and ends with it."""
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv("ONE_STEP_OFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    env = trainer_env("cuda", "127.0.0.1")
    assert env["TMPDIR"] == str(tmp_path / "run")
    assert env["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "torchinductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert trainer_env("cuda", "127.0.0.1")["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert "TORCHINDUCTOR_CACHE_DIR" not in trainer_env("cuda", ""), "TMPDIR is the machine's own"
