"""The names of Ray that place processes on GPUs exist, with the arguments and options given."""

from __future__ import annotations

import ast

import pytest

from tests.unit.project.library_sources import (
    constants,
    definition,
    imported_names,
    is_defined,
    literal_values,
    own_trees,
    parameters,
)

PLACEMENT = "one_step_off/cluster/placement.py"
OPTIONS = "ray._common.ray_option_utils"
GPUS = "ray._private.accelerators.nvidia_gpu"

ACTOR_OPTIONS = {
    "concurrency_groups",
    "max_concurrency",
    "max_restarts",
    "num_cpus",
    "num_gpus",
    "runtime_env",
    "scheduling_strategy",
}


@pytest.mark.parametrize(("module", "name"), sorted(imported_names("ray")))
def test_an_imported_name_exists(module: str, name: str) -> None:
    assert is_defined(module, name), f"{module} has no {name}"


def test_actor_options_exist() -> None:
    assert ACTOR_OPTIONS <= constants(OPTIONS)


def test_the_table_has_every_option_that_is_set() -> None:
    keys = set()
    for node in ast.walk(own_trees()[PLACEMENT]):
        if isinstance(node, ast.Dict):
            keys |= {getattr(key, "value", None) for key in node.keys}
    named = {name for name in keys if isinstance(name, str) and name.startswith(("num_", "max_"))}
    assert len(named) >= 4 and named <= ACTOR_OPTIONS


def test_a_share_of_a_gpu_can_be_booked() -> None:
    """Fractions are allowed below one GPU only: the check is of quantities above 1."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager as Manager

    valid, _ = Manager.validate_resource_request_quantity(0.5)
    assert valid


def test_ray_chooses_the_gpus_by_this_variable() -> None:
    assert "CUDA_VISIBLE_DEVICES" in constants(GPUS)


def test_placement_groups() -> None:
    module = "ray.util.placement_group"
    assert parameters(module, "placement_group")[:2] == ["bundles", "strategy"]
    assert "STRICT_PACK" in literal_values(module, "VALID_PLACEMENT_GROUP_STRATEGIES")
    assert parameters(module, "placement_group_table")
    assert parameters(module, "remove_placement_group") == ["placement_group"]
    for name in ("bundle_specs", "wait", "ready"):
        assert definition(module, f"PlacementGroup.{name}")


def test_an_actor_is_placed_in_a_bundle() -> None:
    names = parameters("ray.util.scheduling_strategies", "PlacementGroupSchedulingStrategy")
    assert names[:2] == ["placement_group", "placement_group_bundle_index"]


def test_the_error_of_a_dead_actor_tells_whether_its_constructor_raised() -> None:
    """An exception there comes again in the next attempt: see `remote_calls`."""
    from ray.exceptions import ActorDiedError

    assert ActorDiedError().actor_init_failed is False
    assert "actor_init_failed" in ast.unparse(definition("ray.exceptions", "ActorDiedError"))
