"""Every back end offers what `worker_interface.py` lists, by the same names and parameters."""

import importlib.util
import inspect

import pytest

from one_step_off.training.back_ends import worker_class
from one_step_off.training.worker_interface import INTERFACES, TRAINED_ROLES

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
BACKENDS = [
    "fsdp",
    pytest.param(
        "megatron",
        marks=pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed"),
    ),
]


def methods_of(interface: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(interface, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}


def parameters_of(signature: inspect.Signature) -> list[tuple[str, object]]:
    """Name and default of each parameter. Ray adds `_ray_trace_ctx` to a class that is an actor."""
    parameters = [p for p in signature.parameters.values() if not p.name.startswith("_ray")]
    return [(parameter.name, parameter.default) for parameter in parameters]


@pytest.mark.parametrize("role", INTERFACES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_offers_its_interface(backend, role):
    worker = worker_class(f"{role}.backend", backend, role)
    assert not inspect.isabstract(worker)
    methods = methods_of(INTERFACES[role])
    assert "setup" in methods
    for name, signature in methods.items():
        offered = inspect.signature(getattr(worker, name))
        assert parameters_of(offered) == parameters_of(signature), name
    if role in TRAINED_ROLES:
        assert worker.version == 0
