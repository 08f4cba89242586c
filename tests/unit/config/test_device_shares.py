"""Pools with a share of a device: sizes, cores, memory, and what is refused."""

from __future__ import annotations

import pytest

from one_step_off.config import placement
from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.placement import (
    data_parallel_size,
    placement_text,
    process_cores,
    processes_per_node,
)
from one_step_off.config.schema import Config
from one_step_off.engines.vllm.engine_args import engine_args
from one_step_off.runtime.validation import validate

BASE = (
    "model.path=tiny:qwen2",
    "data.train_files=generator:word_problems",
    "trainer.total_steps=1",
)
HALVES = "placement.pools={rollout: [0.5], actor: [0.5]}"


def valid(*overrides: str, device: str = "cpu", num_gpus: int = 0) -> Config:
    cfg = load_config([*BASE, f"placement.device={device}", *overrides])
    validate(cfg, num_gpus)
    return cfg


def test_shares_make_one_device_and_one_process_each() -> None:
    cfg = valid(HALVES, device="cuda", num_gpus=1)
    assert placement.devices_of_run(cfg) == 1
    assert processes_per_node(cfg, "rollout") == processes_per_node(cfg, "actor") == [1]
    assert data_parallel_size(cfg, "actor") == 1
    assert placement.device_share(cfg, "actor") == 0.5


def test_whole_devices_beside_a_shared_one() -> None:
    pools = "placement.pools={rollout: [0.4], actor: [0.6], critic: [2]}"
    roles = "placement.roles={rollout: rollout, actor: actor, critic: critic}"
    cfg = valid(pools, roles, "algorithm.adv_estimator=gae", device="cuda", num_gpus=3)
    assert placement.devices_of_run(cfg) == 3
    cores = process_cores(cfg, "cpu", [0, 1, 2, 3, 4, 5])
    assert cores == {"rollout": [[0, 1]], "actor": [[0, 1]], "critic": [[2, 3], [4, 5]]}


def test_processes_that_share_a_device_have_the_same_cores() -> None:
    cfg = valid(HALVES)
    assert process_cores(cfg, "cpu", [0]) == {"rollout": [[0]], "actor": [[0]]}
    assert process_cores(cfg, "cpu", [0, 1]) == {"rollout": [[0, 1]], "actor": [[0, 1]]}
    assert "rollout [0.5] on cpu: rollout x 1; cores 0" in placement_text(cfg, [0])


def test_the_engine_gets_its_part_of_the_share() -> None:
    cfg = valid(
        "placement.pools={rollout: [0.4], actor: [0.6]}",
        "rollout.gpu_memory_utilization=0.9",
        device="cuda",
        num_gpus=1,
    )
    arguments = engine_args(cfg, "cuda")
    assert arguments["gpu_memory_utilization"] == pytest.approx(0.36)
    assert not arguments["enable_sleep_mode"], "it works while the trainer works"
    whole = valid(device="cuda", num_gpus=2)
    assert engine_args(whole, "cuda")["gpu_memory_utilization"] == 0.85


def test_roles_of_a_pool_divide_its_memory() -> None:
    cfg = valid(
        "placement.pools={rollout: [0.4], train: [0.6]}",
        "placement.roles={rollout: rollout, actor: train, critic: train, ref: train}",
        "algorithm.adv_estimator=gae",
        "algorithm.kl_coef=0.1",
    )
    assert placement.memory_share(cfg, "critic") == pytest.approx(0.2)
    whole = valid("placement.pools={rollout: [1], actor: [2]}")
    assert placement.memory_share(whole, "actor") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["placement.pools={rollout: [0.5], actor: [0.6]}"],
            r"make 1.1 \(rollout 0.5, actor 0.6\)",
        ),
        (["placement.pools={rollout: [1.5], actor: [1]}"], r"rollout=\[1.5\]: must list"),
        (["placement.pools={rollout: [0.01], actor: [0.5]}"], r"from 0.05 to below 1"),
        (["placement.pools={rollout: [0.5, 0.4], actor: [0.5]}"], r"\[0.5, 0.4\]: must list"),
        (["placement.pools={rollout: [0.5, 1], actor: [0.5]}"], r"\[0.5, 1\]: must list"),
        (["placement.pools={rollout: [.nan], actor: [0.5]}"], r"\[nan\]: must list"),
        (["placement.pools={rollout: [0.5, 0.5], actor: [0.5]}"], r"2 nodes, .* use \[0.5\]"),
        ([HALVES, "rollout.tensor_parallel_size=2"], r"tensor_parallel_size=2: .* share of one"),
    ],
)
def test_what_does_not_fit_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        valid(*overrides)
    assert "\n" not in str(raised.value)


def test_what_a_replica_has_beside_its_engine() -> None:
    cfg = Config()
    cfg.placement.pools = {"rollout": [2], "actor": [2]}
    assert placement.share_beside_engine(cfg) == pytest.approx(0.15)
    cfg.placement.pools = {"rollout": [0.1], "actor": [2]}
    assert placement.share_beside_engine(cfg) == pytest.approx(0.015)
    cfg.rollout.engine_kwargs = {"gpu_memory_utilization": 0.06}
    assert placement.share_beside_engine(cfg) == pytest.approx(0.04)
    cfg.rollout.engine_kwargs = {"gpu_memory_utilization": 0.5}
    assert placement.share_beside_engine(cfg) == 0


def test_the_wait_for_a_turn_on_a_shared_gpu_does_not_count_against_a_start() -> None:
    cfg = Config()
    cfg.trainer.start_timeout_s = 100.0
    cfg.placement.device = "cuda"
    cfg.placement.pools = {"rollout": [2], "actor": [0.5]}
    assert placement.start_limit_s(cfg, "rollout") == 100
    assert placement.start_limit_s(cfg, "actor") == 200, "its turn may come after 100 s"
    assert placement.start_limit_s(cfg, "a role outside of the run") == 100
    cfg.placement.device = "cpu"
    assert placement.start_limit_s(cfg, "actor") == 100, "no process takes turns there"


def test_with_one_gpu_the_error_names_shares() -> None:
    with pytest.raises(ConfigError, match=r"2 GPUs, but this machine has 1; .*rollout: \[0.5\]"):
        valid(device="cuda", num_gpus=1)
