"""Ray for tests with real actors."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()
